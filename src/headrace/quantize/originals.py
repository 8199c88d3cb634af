"""What is to be quantized, tensor by tensor: a checkpoint that the engine runs. Keeps no tensor in memory."""

from __future__ import annotations

import json
import shutil
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from headrace import model, store
from headrace.blocks import Weight
from headrace.errors import ReadError
from headrace.lowbit import rounding
from headrace.lowbit.rounding import Rounded
from headrace.sizing.scheme import BLOCK_ROWS, Scheme

PIECE_BYTES = 2**20
"""Of a matrix in float32: about how much is rounded at a time."""
_NOT_COPIED = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".h5", ".msgpack", ".onnx")


class Original(ABC):
    """A model's tensors in the order in which they are to be written, and everything beside them."""

    name: str
    """As the user called it."""
    model: Any
    """On the meta device."""
    dtype: torch.dtype
    moments: Mapping[str, torch.Tensor]
    """By module, what `calibration` found; empty if it was not asked."""

    @property
    @abstractmethod
    def tensors(self) -> Sequence[tuple[str, torch.Tensor]]:
        """Names in the model, and meta tensors (or real ones of buffers) with dtype and shape."""

    @abstractmethod
    def pieces(self, name: str) -> Iterator[torch.Tensor]:
        """A tensor by whole rows, in order; those of a matrix in multiples of BLOCK_ROWS, as far as there are."""

    @abstractmethod
    def save_metadata(self, directory: Path, scheme: Scheme) -> None:
        """Write the config with the scheme, the tokenizer and what else lies beside weights."""

    def rounded(self, name: str, bits: int, group_size: int) -> Iterator[Rounded]:
        """A matrix by whole rows, in fewer bits."""
        for piece in self.pieces(name):
            if bits == 8:
                yield rounding.to_8_bits(piece, self.dtype)
            else:
                moments = self.moments.get(name.removesuffix(".weight"))
                yield rounding.to_4_bits(piece, group_size, self.dtype, moments)


def rows_per_piece(columns: int) -> int:
    """Of a matrix."""
    return max(1, PIECE_BYTES // (4 * columns * BLOCK_ROWS)) * BLOCK_ROWS


def cut(whole: torch.Tensor) -> Iterator[torch.Tensor]:
    """A tensor in memory by pieces of its rows."""
    if whole.dim() < 2:
        yield whole
        return
    yield from torch.split(whole, rows_per_piece(max(1, whole[0].numel())))


class CheckpointOriginal(Original):
    """A directory with safetensors. Raises: UserError, CheckpointError, ReadError."""

    def __init__(self, directory: Path, name: str, *, trust_remote_code: bool = False) -> None:
        self.name, self.directory, self.moments = name, directory, {}
        self._checkpoint = store.open_checkpoint(directory)
        self._skeleton = model.build(directory, self._checkpoint, trust_remote_code=trust_remote_code, dequantize=True)
        self.model, self.dtype = self._skeleton.model, self._skeleton.dtype
        self._weights = {weight.name: weight for weight in self._skeleton.blocks.weights()}
        stored = self.model.state_dict().keys()
        self._buffers = {name: buffer for name, buffer in self.model.named_buffers() if name in stored}

    @property
    def tensors(self) -> Sequence[tuple[str, torch.Tensor]]:
        weights = [(name, weight.meta.detach()) for name, weight in self._weights.items()]
        return [*weights, *self._buffers.items()]

    def pieces(self, name: str) -> Iterator[torch.Tensor]:
        if name in self._buffers:
            yield self._buffers[name]
            return
        weight = self._weights[name]
        if len(weight.parts) == 1:
            yield from self._stored(weight)
        elif weight.parts:
            yield from self._joined(weight)
        else:
            yield from cut(self._skeleton.converters[name]())

    def save_metadata(self, directory: Path, scheme: Scheme) -> None:
        copy_metadata(self.directory, directory)
        add_scheme(directory, scheme)

    def _stored(self, weight: Weight) -> Iterator[torch.Tensor]:
        segment, meta = weight.parts[0].segment, weight.meta
        shape = tuple(meta.shape)
        row_items = meta[0].numel() if meta.dim() > 1 else 1
        step = rows_per_piece(row_items) if meta.dim() > 1 else max(1, meta.numel())
        row_bytes = row_items * meta.element_size()
        for start in range(0, shape[0] if shape else 1, step):
            count = min(step, shape[0] - start) if shape else 1
            raw = self._read(segment.file, segment.offset + start * row_bytes, count * row_bytes)
            yield raw.view(meta.dtype).view(count, *shape[1:]) if shape else raw.view(meta.dtype).view(())

    def _joined(self, weight: Weight) -> Iterator[torch.Tensor]:
        """A weight whose bytes are those of several tensors, one after the other: its own rows are theirs."""
        for part in weight.parts:
            raw = self._read(part.segment.file, part.segment.offset, part.nbytes)
            yield raw.view(weight.meta.dtype)

    def _read(self, file: str, offset: int, nbytes: int) -> torch.Tensor:
        path = self._checkpoint.path(file)
        try:
            raw = np.fromfile(path, np.uint8, nbytes, offset=offset)
        except OSError as error:
            raise ReadError(file=str(path), offset=offset, nbytes=nbytes, reason=error.strerror or str(error)) from None
        if raw.size != nbytes:
            raise ReadError(file=str(path), offset=offset, nbytes=nbytes, reason="the file ends before it")
        return torch.from_numpy(raw)


def copy_metadata(source: Path, directory: Path) -> None:
    """Everything but weights and their index."""
    for path in sorted(source.iterdir()):
        if path.is_file() and not path.name.endswith((*_NOT_COPIED, ".index.json")) and path.name != "headrace.json":
            shutil.copyfile(path, directory / path.name)


def add_scheme(directory: Path, scheme: Scheme) -> None:
    """Say in the config how the weights are stored."""
    file = directory / "config.json"
    config = json.loads(file.read_bytes())
    config.pop("quantization_config", None)
    text = json.dumps({**config, "quantization_config": scheme.to_json()}, indent=2)
    file.write_text(text + "\n", encoding="utf-8")
