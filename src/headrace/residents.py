"""Weights that stay: read once, straight from the file to their place. Knows no model library."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import nn

from headrace import store
from headrace.blocks import Weight, lie_as_stored, tensor_view
from headrace.copying.disk import DiskReader
from headrace.copying.slots import Slab

Progress = Callable[[str, int, int], None]
"""What is going on, how much of it is done, how much there is; bytes."""


def load(
    weights: Sequence[Weight],
    converters: Mapping[str, Callable[[], torch.Tensor]],
    reader: DiskReader,
    on_progress: Progress | None,
    what: str = "loading weights",
) -> None:
    """Read `weights` into one slab; those that are stored otherwise come from their converters. Raises: ReadError."""
    plain = [weight for weight in weights if weight.movable]
    offsets, nbytes = lie_as_stored(plain)  # as where they stream: kernels may look at how an address is aligned
    slab = Slab(nbytes)
    placements: list[store.Placement] = []
    for weight, offset in zip(plain, offsets, strict=True):
        weight.bind(nn.Parameter(tensor_view(slab.bytes, offset, weight.meta), requires_grad=False))
        placements.extend(weight.placements(offset))
    reads = store.coalesce(placements, reader.chunk_bytes, slab.nbytes)
    on_read = None if on_progress is None else functools.partial(on_progress, what)
    reader.read_all(reads, slab, "resident weights", on_read)
    for weight in weights:
        if not weight.movable:
            weight.bind(nn.Parameter(converters[weight.name](), requires_grad=False))
