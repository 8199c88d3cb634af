"""Weights that stay: used where the page cache has them, or read to their place once. Knows no model library."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from torch import nn

from headrace import store
from headrace.blocks import Weight, can_be_mapped, lie_as_stored, tensor_view
from headrace.copying.disk import DiskReader
from headrace.copying.mapped import GROUP_BYTES, MappedFile
from headrace.copying.slots import Slab, tensor_over
from headrace.errors import ReadError

Progress = Callable[[str, int, int], None]
"""What is going on, how much of it is done, how much there is; bytes."""
LOADING = "loading weights"


def load(
    weights: Sequence[Weight],
    converters: Mapping[str, Callable[[], torch.Tensor]],
    reader: DiskReader,
    on_progress: Progress | None,
    what: str = LOADING,
) -> None:
    """Bring `weights` to memory; those that are stored otherwise come from their converters. Raises: ReadError.

    What can lie as it is stored is mapped: nothing is copied, and what a run before this one, or `copying.ahead`, has
    left in the page cache is not read again. The rest is read into one slab.
    """
    plain = [weight for weight in weights if weight.movable]
    mapped = [weight for weight in plain if can_be_mapped(weight)]
    copied = [weight for weight in plain if not can_be_mapped(weight)]
    total = sum(weight.nbytes for weight in plain)

    def on_read(done: int) -> None:
        if on_progress is not None:
            on_progress(what, min(done, total), total)

    try:
        _map(mapped, reader.paths, on_read)
    except (OSError, ReadError):  # the reader has other ways, and the words for what does not work in any
        mapped, copied = [], plain
    mapped_bytes = sum(weight.nbytes for weight in mapped)
    _copy(copied, reader, lambda done, _: on_read(mapped_bytes + done))
    for weight in weights:
        if not weight.movable:
            weight.bind(nn.Parameter(converters[weight.name](), requires_grad=False))


def _map(weights: Sequence[Weight], paths: Mapping[str, Path], on_read: Callable[[int], None]) -> None:
    """Raises: ReadError, OSError."""
    segments = {weight: weight.parts[0].segment for weight in weights}
    files = {name: MappedFile(paths[name]) for name in {segment.file for segment in segments.values()}}
    reads = store.coalesce([store.Placement(segment, 0) for segment in segments.values()], GROUP_BYTES)
    done = 0
    for read, following in itertools.pairwise([None, *reads, None]):
        if following is not None:
            files[following.file].ask_for(following)
        if read is not None:
            files[read.file].wait_for(read)
            done += read.needed_bytes
            on_read(done)
    memory = {name: tensor_over(file) for name, file in files.items()}
    for weight, segment in segments.items():
        _bind(weight, memory[segment.file], segment.offset)


def _copy(weights: Sequence[Weight], reader: DiskReader, on_read: Callable[[int, int], None]) -> None:
    """Raises: ReadError."""
    offsets, nbytes = lie_as_stored(weights)  # as where they stream: kernels may look at how an address is aligned
    slab = Slab(nbytes)
    placements: list[store.Placement] = []
    for weight, offset in zip(weights, offsets, strict=True):
        _bind(weight, slab.bytes, offset)
        placements.extend(weight.placements(offset))
    reads = store.coalesce(placements, reader.chunk_bytes, slab.nbytes)
    reader.read_all(reads, slab, "resident weights", on_read)


def _bind(weight: Weight, memory: torch.Tensor, offset: int) -> None:
    weight.bind(nn.Parameter(tensor_view(memory, offset, weight.meta), requires_grad=False))
