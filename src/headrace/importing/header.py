"""The header of a GGUF file: metadata, tensor table, identity. Knows nothing of torch, models or what a tensor means.

The layout is https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. `gguf.GGUFReader` reads the same, but takes
seconds for a large vocabulary and trusts every count in the file; this walk takes a fraction of a second, skips the
vocabulary, and stops at the first count that the file cannot hold. So a cached import is found again without it.
"""

from __future__ import annotations

import hashlib
import os
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from headrace.errors import CorruptGguf, Reason

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_UINT32, _STRING, _ARRAY = 4, 8, 9
_MAX_DIMS = 4
_MAX_KEPT = 4096
"""Arrays up to this many items are kept; longer ones (a vocabulary) are skipped."""


class LongArray:
    """An array that was skipped: only its length is known."""

    def __init__(self, length: int) -> None:
        self._length = length

    def __len__(self) -> int:
        return self._length


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """A row of the tensor table."""

    name: str
    type_id: int
    shape: tuple[int, ...]
    """Slowest dimension first, as torch has it (the file has it the other way round)."""
    offset: int
    """From the start of the file."""


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """What a GGUF file says of itself before its data begins."""

    architecture: str
    metadata: dict[str, Any]
    tensors: tuple[GgufTensor, ...]
    data_offset: int
    file_bytes: int
    vocabulary_size: int
    spans: tuple[tuple[int, int], ...]
    """Where in the file the metadata is that is not a long array: start and end of each value with its key."""
    table: tuple[int, int]
    """Where in the file the tensor table is."""
    identity: str
    """Changes when the file is replaced: a digest of size, modification time and everything before the data."""

    @property
    def rows(self) -> list[tuple[str, int, tuple[int, ...]]]:
        """Of the tensor table, as `sizing.gguf` wants them: name, type and shape (slowest dimension first)."""
        return [(tensor.name, tensor.type_id, tensor.shape) for tensor in self.tensors]


class _Cursor:
    """Reads forward and refuses to pass the end of the file."""

    def __init__(self, stream: BinaryIO, end: int) -> None:
        self._stream = stream
        self.end = end
        self.offset = 0

    def take(self, nbytes: int) -> bytes:
        if nbytes > self.end - self.offset:
            raise Reason(f"its header is cut off: {nbytes} bytes are missing at offset {self.offset}")
        data = self._stream.read(nbytes)
        self.offset += nbytes
        return data

    def unpack(self, fmt: str) -> tuple[Any, ...]:
        return struct.unpack("<" + fmt, self.take(struct.calcsize("<" + fmt)))

    def one(self, fmt: str) -> Any:
        return self.unpack(fmt)[0]

    def string(self) -> str:
        return self.take(self.one("Q")).decode("utf-8", errors="replace")

    def value(self, type_id: int) -> Any:
        """One metadata value; of a long array only its length."""
        if type_id in _SCALARS:
            return self.one(_SCALARS[type_id])
        if type_id == _STRING:
            return self.string()
        if type_id != _ARRAY:
            raise Reason(f"a metadata value has the unknown type {type_id}")
        item_type, count = self.unpack("IQ")
        if item_type in _SCALARS:
            raw = self.take(count * struct.calcsize("<" + _SCALARS[item_type]))
            keep = count <= _MAX_KEPT
            return list(struct.unpack(f"<{count}{_SCALARS[item_type]}", raw)) if keep else LongArray(count)
        if item_type != _STRING:
            raise Reason(f"a metadata array has the unknown item type {item_type}")
        if count <= _MAX_KEPT:
            return [self.string() for _ in range(count)]
        for _ in range(count):
            self.take(self.one("Q"))
        return LongArray(count)


def is_gguf(file: Path) -> bool:
    """Whether the file begins with GGUF's magic bytes."""
    try:
        with file.open("rb") as stream:
            return stream.read(4) == _MAGIC
    except OSError:
        return False


def read_header(file: Path) -> GgufHeader:
    """Read and check everything before the data. Raises CorruptGguf."""
    try:
        with file.open("rb") as stream:
            return _read(stream)
    except OSError as error:
        raise CorruptGguf(file=str(file), reason=error.strerror or str(error)) from error
    except ValueError as error:
        raise CorruptGguf(file=str(file), reason=str(error)) from error


def write_outline(file: Path, header: GgufHeader, outline: Path) -> None:
    """Write what a reader of the config needs: the file without its vocabulary, and a hole in place of its data.

    gguf's reader keeps four objects per token of the vocabulary; that would be most of an import's time and memory.
    """
    size = f"{header.architecture}.vocab_size"
    add_size = size not in header.metadata and header.vocabulary_size > 0
    with file.open("rb") as source, outline.open("xb") as target:
        target.write(source.read(16))
        target.write(struct.pack("<Q", len(header.spans) + add_size))
        if add_size:
            target.write(struct.pack("<Q", len(size.encode())) + size.encode())
            target.write(struct.pack("<II", _UINT32, header.vocabulary_size))
        for start, end in (*header.spans, header.table):
            source.seek(start)
            target.write(source.read(end - start))
        # Sparse: it takes no space, whatever its length.
        target.truncate(target.tell() + header.file_bytes)


def _read(stream: BinaryIO) -> GgufHeader:
    status = os.fstat(stream.fileno())
    cursor = _Cursor(stream, status.st_size)
    if status.st_size < 4 or cursor.take(4) != _MAGIC:
        raise Reason("it does not begin with the GGUF magic")
    version, tensor_count, value_count = cursor.unpack("IQQ")
    if version not in _VERSIONS:
        big_endian = " (a big-endian file)" if version and not version & 0xFFFF else ""
        raise Reason(f"its GGUF version is {version}{big_endian}, and only versions 2 and 3 are read")
    metadata: dict[str, Any] = {}
    spans = []
    for _ in range(value_count):
        start = cursor.offset
        key = cursor.string()
        metadata[key] = value = cursor.value(cursor.one("I"))
        if not isinstance(value, LongArray):
            spans.append((start, cursor.offset))
    table_start = cursor.offset
    rows = [_tensor_row(cursor) for _ in range(tensor_count)]
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or alignment < 1:
        raise Reason(f"its general.alignment is {alignment!r}")
    data_offset = -(-cursor.offset // alignment) * alignment
    architecture = metadata.get("general.architecture")
    if not isinstance(architecture, str):
        raise Reason("its metadata has no general.architecture")
    if (parts := metadata.get("split.count", 0)) > 1:
        raise Reason(f"it is one of {parts} parts; join them first with `llama-gguf-split --merge`")
    stream.seek(0)
    identity = hashlib.blake2b(f"{status.st_size}:{status.st_mtime_ns}:".encode(), digest_size=16)
    identity.update(stream.read(cursor.offset))
    return GgufHeader(
        architecture=architecture,
        metadata=metadata,
        tensors=tuple(GgufTensor(name, type_id, shape, data_offset + at) for name, type_id, shape, at in rows),
        data_offset=data_offset,
        file_bytes=status.st_size,
        vocabulary_size=len(metadata.get("tokenizer.ggml.tokens", ())),
        spans=tuple(spans),
        table=(table_start, cursor.offset),
        identity=identity.hexdigest(),
    )


def _tensor_row(cursor: _Cursor) -> tuple[str, int, tuple[int, ...], int]:
    name = cursor.string()
    dims = cursor.one("I")
    if dims > _MAX_DIMS:
        raise Reason(f"its tensor {name!r} has {dims} dimensions, and at most {_MAX_DIMS} are possible")
    shape = tuple(reversed(cursor.unpack(f"{dims}Q")))
    type_id, offset = cursor.unpack("IQ")
    return name, type_id, shape, offset
