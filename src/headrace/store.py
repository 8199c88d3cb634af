"""The checkpoint on disk: its tensors, their byte ranges, and the few large aligned reads that bring them.

Knows nothing of torch, of models or of when bytes are wanted, and writes nothing.
Format: https://github.com/huggingface/safetensors#format (8 bytes of header length, JSON header, then the data).
"""

from __future__ import annotations

import bisect
import dataclasses
import itertools
import json
import math
import os
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from headrace import errors
from headrace.core import DIRECT_ALIGNMENT, TENSOR_ALIGNMENT, Segment, StoredTensor, align_up

COMPARE_BYTES = 2**20

MAX_HEADER_BYTES = 100 * 2**20

DTYPE_BITS: Mapping[str, int] = {
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8,
    "I16": 16, "U16": 16, "F16": 16, "BF16": 16,
    "I32": 32, "U32": 32, "F32": 32,
    "I64": 64, "U64": 64, "F64": 64, "C64": 64,
}  # fmt: skip

LARGEST_COUNT = 2**63 - 1
"""Offsets and sizes of files are signed 64-bit numbers; a header that says more lies."""

INDEX_NAME = "model.safetensors.index.json"


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A directory of safetensors files, its headers read and found consistent."""

    directory: Path
    tensors: Mapping[str, StoredTensor]
    files: Mapping[str, int]
    """File name (as in `Segment.file`) to its size in bytes."""

    @property
    def nbytes(self) -> int:
        """Payload: the bytes of all tensors."""
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def path(self, file: str) -> Path:
        return self.directory / file


def open_checkpoint(directory: Path) -> Checkpoint:
    """Read and check every header of the checkpoint in `directory`; no tensor data is read.

    Raises: NoWeights, MissingShard, CorruptIndex, CorruptHeader, TruncatedFile, UnknownDtype, ReadError.
    """
    index = directory / INDEX_NAME
    names = _files_of_index(index) if index.exists() else _files_of_directory(directory)
    tensors: dict[str, StoredTensor] = {}
    sizes: dict[str, int] = {}
    for name in names:
        path = directory / name
        found, sizes[name] = _read_file(path)
        for tensor in found:
            if tensor.name in tensors:
                other = tensors[tensor.name].segment.file
                raise errors.CorruptHeader(file=str(path), reason=f"tensor {tensor.name!r} is also in {other!r}")
            tensors[tensor.name] = tensor
    if index.exists():
        _check_index(index, tensors)
    return Checkpoint(directory, tensors, sizes)


def _files_of_directory(directory: Path) -> list[str]:
    # A link into a download cache may lead nowhere: such a file is not there.
    names = sorted(path.name for path in directory.glob("*.safetensors") if path.is_file())
    if "model.safetensors" in names:  # others beside it are adapters or copies in another format
        return ["model.safetensors"]
    if not names:
        raise errors.NoWeights(directory=str(directory), found=sorted(path.name for path in directory.iterdir())[:8])
    return names


def _weight_map(index: Path) -> dict[str, str]:
    try:
        loaded = _load_json(index.read_bytes())
    except OSError as error:
        raise _unreadable(index, error) from None
    except (ValueError, RecursionError) as error:
        raise errors.CorruptIndex(index=str(index), reason=f"it is not JSON ({error})") from None
    weight_map = loaded.get("weight_map") if isinstance(loaded, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise errors.CorruptIndex(index=str(index), reason="it has no weight_map, or an empty one")
    for tensor, file in weight_map.items():
        # A shard is a plain file name: an index from elsewhere must not reach outside of its directory.
        if not isinstance(file, str) or Path(file).name != file or file in ("", ".", ".."):
            raise errors.CorruptIndex(
                index=str(index), reason=f"tensor {tensor!r} is mapped to {file!r}, not a file name"
            )
    return weight_map


def _files_of_index(index: Path) -> list[str]:
    weight_map = _weight_map(index)
    for file in sorted(set(weight_map.values())):
        if not os.path.isfile(index.parent / file):  # False also for names that no file can have
            count = sum(1 for shard in weight_map.values() if shard == file)
            raise errors.MissingShard(index=str(index), shard=file, tensors=count)
    return sorted(set(weight_map.values()))


def _check_index(index: Path, tensors: Mapping[str, StoredTensor]) -> None:
    for name, file in _weight_map(index).items():
        if name not in tensors:
            raise errors.CorruptIndex(
                index=str(index), reason=f"tensor {name!r} is not in {file!r}, where it should be"
            )
        if tensors[name].segment.file != file:
            found = tensors[name].segment.file
            raise errors.CorruptIndex(index=str(index), reason=f"tensor {name!r} is in {found!r}, not in {file!r}")


def read_header(path: Path) -> list[StoredTensor]:
    """The tensors of one safetensors file in file order, checked against each other and against the file's size.

    Raises: CorruptHeader, TruncatedFile, UnknownDtype, ReadError.
    """
    return _read_file(path)[0]


def _read_file(path: Path) -> tuple[list[StoredTensor], int]:
    """The tensors of one file, and its size."""
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            header, data_start = _load_header(file, path, size)
    except OSError as error:
        raise _unreadable(path, error) from None
    tensors = [_parse_entry(path, name, entry, data_start) for name, entry in header.items() if name != "__metadata__"]
    tensors.sort(key=lambda tensor: (tensor.segment.offset, tensor.segment.nbytes))
    end = data_start
    for before, tensor in zip([None, *tensors], tensors, strict=False):
        start = tensor.segment.offset
        if start < end and before is not None:
            reason = f"tensor {tensor.name!r} overlaps tensor {before.name!r} by {end - start} bytes"
            raise errors.CorruptHeader(file=str(path), reason=reason)
        if start > end:
            reason = f"{start - end} bytes before tensor {tensor.name!r} belong to no tensor"
            raise errors.CorruptHeader(file=str(path), reason=reason)
        end = start + tensor.nbytes
    if size < end:
        raise errors.TruncatedFile(file=str(path), expected_bytes=end, actual_bytes=size)
    if size > end:
        raise errors.CorruptHeader(
            file=str(path), reason=f"{size - end} bytes after the last tensor belong to no tensor"
        )
    return tensors, size


def _unreadable(path: Path, error: OSError) -> errors.ReadError:
    return errors.ReadError(file=str(path), offset=0, nbytes=0, reason=os.strerror(error.errno or 0))


def _load_header(file: BinaryIO, path: Path, size: int) -> tuple[dict[str, Any], int]:
    """The JSON header and the offset in the file at which data begins."""
    if size < 8:
        raise errors.TruncatedFile(file=str(path), expected_bytes=8, actual_bytes=size)
    (length,) = struct.unpack("<Q", file.read(8))
    if length > MAX_HEADER_BYTES:
        reason = f"it claims to be {length} bytes long, more than the format's limit of {MAX_HEADER_BYTES}"
        raise errors.CorruptHeader(file=str(path), reason=reason)
    if 8 + length > size:
        raise errors.TruncatedFile(file=str(path), expected_bytes=8 + length, actual_bytes=size)
    try:
        header = _load_json(file.read(length))
    except (ValueError, RecursionError) as error:
        raise errors.CorruptHeader(file=str(path), reason=f"it is not JSON ({error})") from None
    if not isinstance(header, dict):
        raise errors.CorruptHeader(file=str(path), reason="it is not a JSON object")
    return header, 8 + length


def _load_json(text: bytes) -> Any:
    """Strictly: UTF-8, every key once, no NaN. Raises: ValueError, RecursionError."""
    return json.loads(text.decode(), object_pairs_hook=_unique_keys, parse_constant=_no_number)


def _no_number(constant: str) -> None:
    raise errors.Reason(f"{constant} is no number")


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    keys = dict(pairs)
    if len(keys) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise errors.Reason(f"{twice!r} is there twice")
    return keys


def _parse_entry(path: Path, name: str, entry: Any, data_start: int) -> StoredTensor:
    def corrupt(reason: str) -> errors.CorruptHeader:
        return errors.CorruptHeader(file=str(path), reason=f"tensor {name!r} {reason}")

    if not isinstance(entry, dict) or not {"dtype", "shape", "data_offsets"} <= entry.keys():
        raise corrupt("lacks dtype, shape or data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPE_BITS:
        raise errors.UnknownDtype(file=str(path), tensor=name, dtype=str(dtype), known=sorted(DTYPE_BITS))
    if not _is_counts(shape):
        raise corrupt(f"has the shape {shape!r}")
    if not _is_counts(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise corrupt(f"has the data_offsets {offsets!r}")
    nbytes = math.prod(shape) * DTYPE_BITS[dtype] // 8
    if nbytes > LARGEST_COUNT:  # also more digits than Python is willing to print
        raise corrupt(f"is {dtype} {tuple(shape)}, more bytes than a file can have")
    if offsets[1] - offsets[0] != nbytes:
        raise corrupt(f"is {dtype} {tuple(shape)}, {nbytes} bytes, but its data_offsets span {offsets[1] - offsets[0]}")
    return StoredTensor(name, dtype, tuple(shape), Segment(path.name, data_start + offsets[0], nbytes))


def _is_counts(values: Any) -> bool:
    return isinstance(values, list) and all(type(value) is int and 0 <= value <= LARGEST_COUNT for value in values)


def same_bytes(checkpoint: Checkpoint, first: StoredTensor, second: StoredTensor) -> bool:
    """Whether two stored tensors are equal, byte for byte; stops reading at the first difference. Raises: ReadError."""
    if first.segment == second.segment:
        return True
    if (first.dtype, first.shape) != (second.dtype, second.shape):
        return False
    paths = [checkpoint.path(tensor.segment.file) for tensor in (first, second)]
    with paths[0].open("rb") as one, paths[1].open("rb") as other:
        one.seek(first.segment.offset)
        other.seek(second.segment.offset)
        for start in range(0, first.nbytes, COMPARE_BYTES):
            count = min(COMPARE_BYTES, first.nbytes - start)
            pieces = one.read(count), other.read(count)
            for path, tensor, piece in zip(paths, (first, second), pieces, strict=True):
                if len(piece) < count:
                    raise errors.ReadError(
                        file=str(path),
                        offset=tensor.segment.offset + start,
                        nbytes=count,
                        reason="the file ends before it",
                    )
            if pieces[0] != pieces[1]:
                return False
    return True


# --- reads --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Placement:
    """A segment of a file and the offset in the target buffer where its bytes go."""

    segment: Segment
    target_offset: int


@dataclass(frozen=True, slots=True)
class Copy:
    """From an offset in what was read to an offset in the target."""

    source_offset: int
    target_offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Read:
    """One aligned read of a file and what of it goes where."""

    file: str
    offset: int
    nbytes: int
    """A multiple of DIRECT_ALIGNMENT; at the end of the file fewer come back."""
    needed_bytes: int
    """From the start of the read to the last byte that is wanted."""
    copies: tuple[Copy, ...]
    target_offset: int | None = None
    """Where in the target all of it may be read to as it is, so that nothing has to be copied; None if nowhere."""


def layout(sizes: Iterable[int]) -> tuple[list[int], int]:
    """Offsets for tensors of these sizes in one buffer, each at a multiple of TENSOR_ALIGNMENT, and the buffer's size.

    The size is a multiple of DIRECT_ALIGNMENT, so that buffers can be packed one after the other.
    """
    offsets, end = [], 0
    for size in sizes:
        offsets.append(end)
        end = align_up(end + size, TENSOR_ALIGNMENT)
    return offsets, align_up(end, DIRECT_ALIGNMENT)


def layout_as_stored(segments: Sequence[Sequence[Segment]], steady: Sequence[bool]) -> tuple[list[int], int]:
    """Offsets as `layout` gives them, for tensors made of these segments, so that most can be read right into place.

    A direct read needs its place in memory and in the file at the same distance from a page. So neighbours in the file
    stay neighbours, in pages of their own, as they lie there: at a multiple of TENSOR_ALIGNMENT, or where the file has
    them if that changes no result (`steady`). What is not so, and what is put together from several segments, follows.
    """
    tensors = range(len(segments))
    stored = [number for number in tensors if _can_lie_as_stored(segments[number], steady[number])]
    stored.sort(key=lambda number: (segments[number][0].file, segments[number][0].offset))
    offsets, end, before = [0] * len(segments), 0, None
    for number in stored:
        segment = segments[number][0]
        if before is None or before.file != segment.file or not 0 <= segment.offset - before.end < DIRECT_ALIGNMENT:
            offsets[number] = align_up(end, DIRECT_ALIGNMENT) + segment.offset % DIRECT_ALIGNMENT
        else:
            offsets[number] = end + segment.offset - before.end
        end, before = offsets[number] + segment.nbytes, segment
    end = align_up(end, DIRECT_ALIGNMENT)
    others = sorted(set(tensors) - set(stored))
    following, nbytes = layout(sum(segment.nbytes for segment in segments[number]) for number in others)
    for number, offset in zip(others, following, strict=True):
        offsets[number] = end + offset
    return offsets, end + nbytes


def _can_lie_as_stored(segments: Sequence[Segment], steady: bool) -> bool:
    return len(segments) == 1 and segments[0].nbytes > 0 and segments[0].can_lie_as_stored(steady)


def coalesce(placements: Sequence[Placement], chunk_bytes: int, target_bytes: int | None = None) -> tuple[Read, ...]:
    """The reads that bring all `placements`: runs of neighbours merged, then cut at multiples of `chunk_bytes`.

    With `target_bytes`, the size of a target that begins and ends with a page, reads that can go right into it say so:
    then bytes around what is wanted land there too, where nothing else was placed.

    Segments are merged if the gap between them is smaller than one aligned page, which would be read anyhow. So every
    page with a wanted byte is read once, and no other page.
    """
    assert chunk_bytes % DIRECT_ALIGNMENT == 0
    wanted = sorted(
        (placement for placement in placements if placement.segment.nbytes),
        key=lambda placement: (placement.segment.file, placement.segment.offset),
    )
    reads: list[Read] = []
    run: list[Placement] = []
    end = 0
    for placement in wanted:
        segment = placement.segment
        if run and (segment.file != run[0].segment.file or segment.offset - end >= DIRECT_ALIGNMENT):
            reads.extend(_cut(run, chunk_bytes))
            run = []
        end = max(end, segment.offset + segment.nbytes) if run else segment.offset + segment.nbytes
        run.append(placement)
    if run:
        reads.extend(_cut(run, chunk_bytes))
    if target_bytes is None:
        return tuple(reads)
    taken = sorted((placement.target_offset, placement.segment.nbytes) for placement in wanted)
    return tuple(_in_place(read, taken, target_bytes) for read in reads)


def _in_place(read: Read, taken: Sequence[tuple[int, int]], target_bytes: int) -> Read:
    """With the place where all of it can be read to, if there is one. `taken`: offsets and sizes, sorted."""
    begins = {copy.target_offset - copy.source_offset for copy in read.copies}
    begin = begins.pop()
    if begins or begin % DIRECT_ALIGNMENT or begin < 0 or begin + read.nbytes > target_bytes:
        return read
    wanted = sum(copy.nbytes for copy in read.copies)
    first = max(0, bisect.bisect_right(taken, (begin, 0)) - 1)
    there = 0
    for offset, nbytes in itertools.takewhile(lambda place: place[0] < begin + read.nbytes, taken[first:]):
        there += max(0, min(offset + nbytes, begin + read.nbytes) - max(offset, begin))
    return dataclasses.replace(read, target_offset=begin) if there == wanted else read


def _cut(run: Sequence[Placement], chunk_bytes: int) -> Iterable[Read]:
    file = run[0].segment.file
    start = run[0].segment.offset // DIRECT_ALIGNMENT * DIRECT_ALIGNMENT
    end = max(placement.segment.offset + placement.segment.nbytes for placement in run)
    first = 0
    for offset in range(start, end, chunk_bytes):
        stop = min(offset + chunk_bytes, end)
        copies = []
        while run[first].segment.offset + run[first].segment.nbytes <= offset:
            first += 1
        for placement in run[first:]:
            segment = placement.segment
            if segment.offset >= stop:
                break
            low, high = max(offset, segment.offset), min(stop, segment.offset + segment.nbytes)
            if low < high:  # not so where a short segment lies inside of a long one that goes on
                copies.append(Copy(low - offset, placement.target_offset + low - segment.offset, high - low))
        yield Read(file, offset, align_up(stop - offset, DIRECT_ALIGNMENT), stop - offset, tuple(copies))
