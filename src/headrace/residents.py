"""Weights that stay: read once, straight from the file to their place. Knows no model library."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import nn

from headrace import store
from headrace.blocks import Weight, lie_as_stored, tensor_view
from headrace.copying.ahead import ReadAhead
from headrace.copying.disk import DiskReader
from headrace.copying.slots import Slab, tensor_over

Progress = Callable[[str, int, int], None]
"""What is going on, how much of it is done, how much there is; bytes."""
LOADING = "loading weights"


def load(
    weights: Sequence[Weight],
    converters: Mapping[str, Callable[[], torch.Tensor]],
    reader: DiskReader,
    on_progress: Progress | None,
    what: str = LOADING,
    ahead: ReadAhead | None = None,
) -> None:
    """Read `weights` into one slab; those that are stored otherwise come from their converters. Raises: ReadError.

    What was read `ahead` of this is used where it lies, and given back if it is not one of `weights`.
    """
    plain = [weight for weight in weights if weight.movable]
    there: set[Weight] = set() if ahead is None else _bind_ahead(plain, ahead)
    there_bytes = sum(weight.nbytes for weight in there)
    plain = [weight for weight in plain if weight not in there]
    offsets, nbytes = lie_as_stored(plain)  # as where they stream: kernels may look at how an address is aligned
    slab = Slab(nbytes)
    placements: list[store.Placement] = []
    for weight, offset in zip(plain, offsets, strict=True):
        _bind(weight, slab.bytes, offset)
        placements.extend(weight.placements(offset))
    reads = store.coalesce(placements, reader.chunk_bytes, slab.nbytes)

    def on_read(done: int, total: int) -> None:
        if on_progress is not None:
            on_progress(what, there_bytes + done, there_bytes + total)

    reader.read_all(reads, slab, "resident weights", on_read)
    for weight in weights:
        if not weight.movable:
            weight.bind(nn.Parameter(converters[weight.name](), requires_grad=False))


def _bind_ahead(weights: Sequence[Weight], ahead: ReadAhead) -> set[Weight]:
    """Those of `weights` that are there already, bound to where they lie."""
    memory = tensor_over(ahead.pages)
    segments = {weight: weight.parts[0].segment for weight in weights if len(weight.parts) == 1}
    there = {weight: offset for weight in segments if (offset := ahead.offset_of(segments[weight])) is not None}
    ahead.hand_over(segments[weight] for weight in there)
    for weight, offset in there.items():
        _bind(weight, memory, offset)
    return set(there)


def _bind(weight: Weight, memory: torch.Tensor, offset: int) -> None:
    weight.bind(nn.Parameter(tensor_view(memory, offset, weight.meta), requires_grad=False))
