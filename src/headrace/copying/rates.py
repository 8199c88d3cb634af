"""How fast a device is: the link from host memory, its own memory, its products of matrices. Knows no model."""

from __future__ import annotations

from collections.abc import Callable
from statistics import median

import torch

from headrace.copying.device import Device, Stream
from headrace.copying.slots import Slab
from headrace.core import Accelerator, Link, Tier

COPY_BYTES = 64 * 2**20
SIDE = 4096
ROUNDS = 5


def measure(device: Device, *, copy_bytes: int = COPY_BYTES, side: int = SIDE) -> Accelerator:
    """What the planner needs to know of `device`: the medians of some rounds, in some tens of milliseconds.

    `copy_bytes` go over the link at once; square matrices of `side` in bfloat16 are multiplied.
    """
    memory_bytes = device.free_bytes
    slab = Slab(copy_bytes)
    page_locked = device.page_lock(slab) is None
    target = device.allocate(copy_bytes, "measuring the link")
    stream = device.new_stream()
    try:
        slab.bytes.zero_()
        link = copy_bytes / _seconds(
            device, stream, lambda: device.copy(target, slab.bytes, stream, page_locked=page_locked)
        )
    finally:
        device.wait_idle()
        device.free(target)
        if page_locked:
            device.unlock(slab)
    matrix = torch.ones((side, side), dtype=torch.bfloat16, device=device.torch_device)
    current = device.current_stream()
    memory = _seconds(device, current, lambda: torch.nn.functional.linear(matrix[:1], matrix))
    products = _seconds(device, current, lambda: matrix @ matrix) if device.torch_device.type != "cpu" else memory
    return Accelerator(
        name=str(device.torch_device),
        memory_bytes=memory_bytes,
        link=Link(Tier.HOST, Tier.DEVICE, link),
        memory_bytes_per_s=2 * side * side / memory,
        operations_per_s=2 * side**3 / products,
        source="measured",
    )


def _seconds(device: Device, stream: Stream, work: Callable[[], object]) -> float:
    times = []
    for _ in range(ROUNDS + 1):  # the first one sets things up
        begin, end = device.new_event(), device.new_event()
        begin.record(stream)
        work()
        end.record(stream)
        end.wait_done()
        times.append(end.seconds_since(begin))
    return max(median(times[1:]), 1e-9)
