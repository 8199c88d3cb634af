"""Writes a safetensors checkpoint as a stream. Knows shapes and bytes; knows nothing of torch, models or GGUF.

All headers follow from names, dtypes and shapes, so they are written first and the data after them, piece by piece:
memory holds one piece. https://huggingface.co/docs/safetensors is the format. Two liberties it leaves are used here:
a header may end in spaces, so data begins at a multiple of 4096, where direct reads begin; and tensors may lie in any
order, so those of one layer lie side by side, in one file.
"""

from __future__ import annotations

import json
import math
import os
import re
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SHARD_BYTES = 4 * 2**30
"""About how large one file gets; a layer is never split for it."""
_DATA_ALIGNMENT = 4096
_LAYER = re.compile(r"^.*?\.\d+\.")
_ITEM_BYTES = {"F64": 8, "I64": 8, "F32": 4, "I32": 4, "F16": 2, "BF16": 2, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1}


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A tensor that will be written: safetensors' name of its dtype, and its shape."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * _ITEM_BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class Shard:
    """One file of the checkpoint, before it is written."""

    file: str
    tensors: tuple[TensorSpec, ...]
    header: bytes

    @property
    def data_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)

    @property
    def nbytes(self) -> int:
        return len(self.header) + self.data_bytes


def plan_shards(tensors: Sequence[TensorSpec], shard_bytes: int = SHARD_BYTES) -> tuple[Shard, ...]:
    """Distribute tensors over files in the order given; the tensors of a layer stay together."""
    files: list[list[TensorSpec]] = [[]]
    used = 0
    for group in _layers(tensors):
        nbytes = sum(tensor.nbytes for tensor in group)
        if files[-1] and used + nbytes > shard_bytes:
            files.append([])
            used = 0
        files[-1].extend(group)
        used += nbytes
    if len(files) == 1:
        return (Shard("model.safetensors", tuple(files[0]), _header(files[0])),)
    return tuple(
        Shard(f"model-{number:05d}-of-{len(files):05d}.safetensors", tuple(content), _header(content))
        for number, content in enumerate(files, start=1)
    )


def write_shards(directory: Path, shards: Sequence[Shard], pieces: Callable[[TensorSpec], Iterable[Any]]) -> None:
    """Write every shard and, if there are several, their index; each file is on the disk when this returns.

    `pieces(tensor)` gives the bytes of one tensor as buffers, in order. Peak memory: one of them.
    """
    for shard in shards:
        with (directory / shard.file).open("xb") as stream:
            stream.write(shard.header)
            for tensor in shard.tensors:
                written = sum(stream.write(piece) for piece in pieces(tensor))
                assert written == tensor.nbytes, f"{tensor.name}: {written} bytes instead of {tensor.nbytes}"
            stream.flush()
            os.fsync(stream.fileno())
    if len(shards) > 1:
        index = {
            "metadata": {"total_size": sum(shard.data_bytes for shard in shards)},
            "weight_map": {tensor.name: shard.file for shard in shards for tensor in shard.tensors},
        }
        (directory / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def sync_directory(directory: Path) -> None:
    """Bring every file in the directory, and their names, to the disk."""
    for path in (*directory.iterdir(), directory):
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def _layers(tensors: Iterable[TensorSpec]) -> Iterator[list[TensorSpec]]:
    group: list[TensorSpec] = []
    current: str | None = None
    for tensor in tensors:
        match = _LAYER.match(tensor.name)
        layer = match.group() if match else None
        if group and (layer is None or layer != current):
            yield group
            group = []
        group.append(tensor)
        current = layer
    if group:
        yield group


def _header(tensors: Sequence[TensorSpec]) -> bytes:
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for tensor in tensors:
        end = offset + tensor.nbytes
        entries[tensor.name] = {"dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % _DATA_ALIGNMENT)
    return struct.pack("<Q", len(text)) + text
