"""The new checkpoint, written as a stream beside its place and renamed when it is whole. Knows shapes, bytes and bits.

Guarantees: DST is whole or not there; what a killed run left is removed by the next one; nothing is written if the disk
has no room for it. Peak memory: some pieces of one matrix, its scales, and libraries.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from headrace.errors import HeadraceError, NoDiskSpace, NotWritable, OutputExists, OutputFailed
from headrace.importing.writer import Shard, TensorSpec, plan_shards, sync_directory, write_shards
from headrace.lowbit.packing import pack
from headrace.lowbit.rounding import Rounded
from headrace.quantize.originals import Original
from headrace.sizing.scheme import SCALE, SCALE_AND_ZERO, Scheme

Progress = Callable[[str, int, int], None]

METADATA_BYTES = 64 * 2**20
"""Room that is asked for beside the weights: tokenizers are the largest of the other files."""
_DTYPES = {
    torch.bfloat16: "BF16", torch.float16: "F16", torch.float32: "F32", torch.float64: "F64", torch.int8: "I8",
    torch.uint8: "U8", torch.int16: "I16", torch.int32: "I32", torch.int64: "I64", torch.bool: "BOOL",
}  # fmt: skip
_BY_NAME = {"int8": "I8", "uint8": "U8"}


@dataclass(frozen=True, slots=True)
class Written:
    """What came of it."""

    directory: Path
    bytes_before: int
    """Of the original's tensors, in the dtype that it runs in."""
    bytes_after: int
    by_bits: dict[int, int]
    """Bytes before, by the bits that they have now; 16 or 32 for what stayed."""
    calibrated: bool
    """Whether what was rounded to 4 bits was rounded for the inputs that it gets."""


def check_output(target: Path) -> None:
    """Raises: OutputExists."""
    if target.is_dir():
        found = sorted(path.name for path in target.iterdir())
    else:
        found = [target.name] if os.path.lexists(target) else []
    if found:
        raise OutputExists(path=str(target), found=found[:4])


def write(original: Original, scheme: Scheme, target: Path, on_progress: Progress) -> Written:
    """Quantize `original` into the directory `target`.

    Raises: OutputExists, NoDiskSpace, NotWritable, OutputFailed, ReadError.
    """
    specs = _Specs(original, scheme)
    shards = plan_shards(specs.tensors)
    with _written(target, shards) as directory:
        original.save_metadata(directory, scheme)
        write_shards(directory, shards, _Pieces(original, specs, on_progress))
    after = sum(shard.data_bytes for shard in shards)
    before = sum(specs.bytes_by_bits.values())
    return Written(target, before, after, specs.bytes_by_bits, calibrated=bool(original.moments))


def write_as_is(
    target: Path,
    tensors: Sequence[TensorSpec],
    pieces: Callable[[TensorSpec], Iterator[Any]],
    finish: Callable[[Path], None],
) -> None:
    """Write these tensors with the same guarantees; `finish` adds the other files. Raises: as `write`."""
    shards = plan_shards(tensors)
    with _written(target, shards) as directory:
        finish(directory)
        write_shards(directory, shards, pieces)


class _Specs:
    """What will be written, and of which module each tensor is."""

    def __init__(self, original: Original, scheme: Scheme) -> None:
        self.scheme = scheme
        self.tensors: list[TensorSpec] = []
        self.matrices: dict[str, tuple[str, int]] = {}
        """Name of a tensor that is written: of the original's matrix, and its bits."""
        self.bytes_by_bits: dict[int, int] = {}
        dtype = _DTYPES[original.dtype]
        for name, tensor in original.tensors:
            module, _, attribute = name.rpartition(".")
            is_matrix = attribute == "weight" and tensor.dim() == 2
            stored = scheme.stored(module, *tensor.shape) if is_matrix else None
            bits = (scheme.bits_of(module) or 0) if stored else 8 * tensor.element_size()
            self.bytes_by_bits[bits] = self.bytes_by_bits.get(bits, 0) + tensor.numel() * tensor.element_size()
            if stored is None:
                self.tensors.append(TensorSpec(name, _DTYPES[tensor.dtype], tuple(tensor.shape)))
                continue
            for each in stored:
                spec = TensorSpec(f"{module}.{each.attribute}", _BY_NAME.get(each.dtype, dtype), each.shape)
                self.matrices[spec.name] = (name, bits)
                self.tensors.append(spec)


class _Pieces:
    """The bytes of each tensor, in the order of the specs: a matrix leaves its scales for the tensor after it."""

    def __init__(self, original: Original, specs: _Specs, on_progress: Progress) -> None:
        self._original, self._specs = original, specs
        self._scales: dict[str, torch.Tensor] = {}
        self._on_progress, self._done = on_progress, 0
        self._total = sum(specs.bytes_by_bits.values())

    def __call__(self, spec: TensorSpec) -> Iterator[Any]:
        if spec.name in self._scales:
            yield _bytes(self._scales.pop(spec.name))
        elif spec.name in self._specs.matrices:
            yield from self._matrix(spec)
        else:
            for piece in self._original.pieces(spec.name):
                yield _bytes(piece)
                self._count(piece.numel() * piece.element_size())

    def _matrix(self, spec: TensorSpec) -> Iterator[Any]:
        name, bits = self._specs.matrices[spec.name]
        scheme, kept = self._specs.scheme, []
        for rounded in self._original.rounded(name, bits, scheme.group_size):
            kept.append(_scales(rounded))
            yield _bytes(rounded.numbers if bits == 8 else pack(rounded.numbers, scheme.layout))
            self._count(rounded.numbers.numel() * self._original.dtype.itemsize)
        module = name.rpartition(".")[0]
        if bits == 8:
            self._scales[f"{module}.{SCALE}"] = torch.cat(kept)
        else:
            self._scales[f"{module}.{SCALE_AND_ZERO}"] = torch.cat(kept, dim=1)

    def _count(self, nbytes: int) -> None:
        self._done += nbytes
        self._on_progress("quantizing", self._done, self._total)


def _scales(rounded: Rounded) -> torch.Tensor:
    """As the kernels want them: (rows), or (groups, rows, 2) of scale and zero."""
    if rounded.zero is None:
        return rounded.scale
    return torch.stack([rounded.scale, rounded.zero], dim=-1).transpose(0, 1)


def _bytes(tensor: torch.Tensor) -> Any:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy()


# --- whole or not at all --------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _written(target: Path, shards: Sequence[Shard]) -> Iterator[Path]:
    """A directory beside `target` that becomes it if all goes well. Raises: OutputExists, NoDiskSpace, NotWritable."""
    check_output(target)
    partial = target.with_name(target.name + ".partial")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(partial, ignore_errors=True)  # of a run that was killed
        _check_space(target, sum(shard.nbytes for shard in shards) + METADATA_BYTES)
        partial.mkdir()
    except OSError as error:
        if isinstance(error, HeadraceError):
            raise
        raise NotWritable(path=str(target.parent), reason=error.strerror or str(error)) from error
    try:
        yield partial
        sync_directory(partial)
        partial.rename(target)  # over an empty directory, too
    except BaseException as error:  # Ctrl-C too
        shutil.rmtree(partial, ignore_errors=True)
        if isinstance(error, OSError) and not isinstance(error, HeadraceError):
            raise OutputFailed(output=f"to {str(target)!r}", reason=error.strerror or str(error)) from error
        raise


def _check_space(target: Path, needed_bytes: int) -> None:
    free = shutil.disk_usage(target.parent).free
    if free < needed_bytes:
        raise NoDiskSpace(path=str(target), needed_bytes=needed_bytes, free_bytes=free)
