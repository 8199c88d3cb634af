"""A .gguf file as an original: one tensor at a time, and 4-bit numbers as they are.

Q4_0, Q4_1 and Q4_K hold a number as `q * scale + something`, for groups of 32, as the kernel here does; so with groups
of 32 their q are taken over bit for bit, and scale and zero are those of the file, rounded to the model's dtype.
Everything else is decoded, a tensor at a time, and rounded anew: to 8 bits unless it was asked for otherwise.
Layouts: https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h (block_q4_0, block_q4_1, block_q4_K).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from headrace.importing.convert import GgufModel, quiet
from headrace.importing.header import GgufTensor, read_header
from headrace.lowbit.rounding import Rounded
from headrace.quantize.originals import Original, add_scheme, cut, rows_per_piece
from headrace.sizing.scheme import Scheme

GROUP_SIZE = 32
"""Of the 4-bit types."""
Q4_0, Q4_1, Q4_K = (
    int(kind) for kind in (GGMLQuantizationType.Q4_0, GGMLQuantizationType.Q4_1, GGMLQuantizationType.Q4_K)
)
FOUR_BITS = (Q4_0, Q4_1, Q4_K)


class GgufOriginal(Original):
    """A .gguf file of an architecture that transformers reads. Raises: CorruptGguf, MissingPackage."""

    def __init__(self, file: Path, name: str, scratch: Path) -> None:
        self.name, self.moments = name, {}
        with quiet():
            self._file = GgufModel(file, read_header(file), scratch)
        self.model, self.dtype = self._file.model, self._file.torch_dtype
        self._specs = {spec.name: spec for spec in self._file.tensors}

    @property
    def tensors(self) -> Sequence[tuple[str, torch.Tensor]]:
        return [(name, torch.empty(spec.shape, dtype=self.dtype, device="meta")) for name, spec in self._specs.items()]

    def has_four_bits(self, name: str) -> bool:
        """Whether a tensor's numbers can be taken over as they are."""
        tensor = self._only(name)
        return tensor is not None and tensor.type_id in FOUR_BITS and len(tensor.shape) == 2

    def pieces(self, name: str) -> Iterator[torch.Tensor]:
        spec = self._specs[name]
        with quiet():
            for row in self._file.numbers(spec):
                yield from cut(row.to(self.dtype))

    def rounded(self, name: str, bits: int, group_size: int) -> Iterator[Rounded]:
        if bits == 4 and group_size == GROUP_SIZE and self.has_four_bits(name):
            order = self._row_order(name)
            if order is not None:
                yield from self._taken_over(name, order)
                return
        yield from super().rounded(name, bits, group_size)

    def save_metadata(self, directory: Path, scheme: Scheme) -> None:
        with quiet():
            self._file.save_metadata(directory)
        add_scheme(directory, scheme)

    # --- numbers as they are --------------------------------------------------------------------------------------

    def _only(self, name: str) -> GgufTensor | None:
        tensors = self._file.tensors_of(name)
        return tensors[0] if len(tensors) == 1 else None

    def _row_order(self, name: str) -> torch.Tensor | None:
        """Which row of the file each row of the model is, or None if the model's matrix is more than an order of rows.

        What transformers does to a matrix of this name is seen in what it does to one that holds its rows' numbers.
        """
        tensor = self._only(name)
        assert tensor is not None
        rows = tensor.shape[0]
        numbered = np.arange(rows, dtype=np.float32)[:, None].repeat(2, axis=1)
        with quiet():
            done = self._file.arranged(tensor, numbered)
        if done is None or done.shape != numbered.shape or not np.array_equal(done[:, 0], done[:, 1]):
            return None
        order = torch.from_numpy(np.ascontiguousarray(done[:, 0])).long()
        return order if torch.equal(order.sort().values, torch.arange(rows)) else None

    def _taken_over(self, name: str, order: torch.Tensor) -> Iterator[Rounded]:
        tensor = self._only(name)
        assert tensor is not None
        rows, columns = tensor.shape
        items, nbytes = GGML_QUANT_SIZES[GGMLQuantizationType(tensor.type_id)]
        row_bytes = columns // items * nbytes
        raw = self._file.read(tensor, tensor.offset, rows * row_bytes).reshape(rows, row_bytes)  # still packed
        for some in torch.split(order, rows_per_piece(columns)):
            q, scale, zero = unpacked(tensor.type_id, raw[some.numpy()])
            numbers = torch.from_numpy(q).view(len(some), columns)
            yield Rounded(numbers, *(torch.from_numpy(each).to(self.dtype) for each in (scale, zero)))


def unpacked(type_id: int, raw: Any) -> tuple[Any, Any, Any]:
    """Of rows (uint8) of a 4-bit type: numbers from 0 to 15 as uint8, and scale and zero of each 32 as float32.

    A number stands for `(q - 8) * scale + zero`.
    """
    rows = len(raw)
    with np.errstate(all="ignore"):  # broken files hold infinities
        if type_id == Q4_K:
            return _unpacked_k(raw.reshape(-1, 144), rows)
        blocks = raw.reshape(rows, -1, 18 if type_id == Q4_0 else 20)
        scale = _float16(blocks[..., 0:2])
        zero = np.zeros_like(scale) if type_id == Q4_0 else _float16(blocks[..., 2:4]) + 8 * scale
        return _nibbles(blocks[..., -16:]).reshape(rows, -1), scale, zero


def _unpacked_k(blocks: Any, rows: int) -> tuple[Any, Any, Any]:
    """256 numbers: two float16, 8 scales and 8 minima of 6 bits each, and four times 32 bytes of two numbers."""
    factor, factor_of_minima, packed = _float16(blocks[:, 0:2]), _float16(blocks[:, 2:4]), blocks[:, 4:16]
    low, middle, high = packed[:, 0:4], packed[:, 4:8], packed[:, 8:12]
    scales = np.concatenate([low & 63, (high & 15) | (low >> 6) << 4], axis=1)
    minima = np.concatenate([middle & 63, (high >> 4) | (middle >> 6) << 4], axis=1)
    scale = factor[:, None] * scales
    zero = 8 * scale - factor_of_minima[:, None] * minima
    numbers = _nibbles(blocks[:, 16:].reshape(-1, 4, 32))
    return numbers.reshape(rows, -1), scale.reshape(rows, -1), zero.reshape(rows, -1)


def _nibbles(bytes_: Any) -> Any:
    """The lower halves of all bytes, then the upper ones."""
    return np.concatenate([bytes_ & 15, bytes_ >> 4], axis=-1)


def _float16(pairs: Any) -> Any:
    return np.ascontiguousarray(pairs).view(np.float16).astype(np.float32)[..., 0]
