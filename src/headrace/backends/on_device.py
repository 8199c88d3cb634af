"""The backend for a device: in place where that was planned and works, else copies into a ring. Knows no checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from headrace.backends.base import Backend
from headrace.backends.packing import Packing
from headrace.backends.prefetch import PrefetchBackend
from headrace.backends.rings import DeviceRing
from headrace.backends.zero_copy import ZeroCopyBackend, why_not_in_place
from headrace.copying.arena import HostArena
from headrace.copying.device import Device
from headrace.copying.disk import DiskReader
from headrace.core import Plan
from headrace.metrics import Metrics


def open_on_device(
    made: Plan,
    packings: Sequence[Packing],
    metrics: Metrics,
    device: Device,
    *,
    arena: HostArena | None,
    host: dict[int, torch.Tensor],
    reader: DiskReader | None,
    announce: Callable[[str], None],
) -> Backend:
    """`host`: by number of the block, what `arena` holds of it; the rest comes from `reader`.

    `announce` is told if `uva` was planned and copies take its place. Raises: OutOfDeviceMemory.
    """
    blocks = [packing.block for packing in packings]
    weights = {packing.block: packing.weights for packing in packings}
    if made.backend == "uva":
        refused = _why_not(packings, device, arena)
        if refused is None:
            assert arena is not None
            views = {blocks[index]: view for index, view in arena.views(host).items()}
            return ZeroCopyBackend(blocks, weights, metrics, views)
        announce(f"uva is not possible ({refused}): weights are copied to the device for each run")
    ring = DeviceRing(
        packings,
        min(max(1, made.slots), len(packings)),
        device,
        metrics,
        host=host,
        reader=reader,
        page_locked=arena is not None and arena.page_locked,
    )
    return PrefetchBackend(blocks, weights, metrics, ring=ring)


def _why_not(packings: Sequence[Packing], device: Device, arena: HostArena | None) -> str | None:
    if arena is None or not arena.page_locked:
        return "host memory is not page-locked"
    if any(packing.reads for packing in packings):
        return "host memory does not hold all that is offloaded"
    return why_not_in_place(device)
