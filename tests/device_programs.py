"""Right programs over the seam to an accelerator, and what each has to give: for the simulated one and for real ones.

Each takes a device, leaves nothing behind on it, and returns what it computed next to what it should have.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from headrace.copying.device import Device, Event
from headrace.copying.slots import Slab

Outcome = tuple[list[float], list[float]]
Program = Callable[[Device], Outcome]

PAGE = 4096


def slab_of(value: int, nbytes: int = PAGE) -> Slab:
    slab = Slab(nbytes)
    slab.bytes.fill_(value)
    return slab


def add_up(memory: torch.Tensor) -> torch.Tensor:
    """A kernel that reads every byte; its result is still on its way."""
    return memory.sum(dtype=torch.int64)


def one_copy(device: Device) -> Outcome:
    """Copy on one stream, compute on another: an event between them."""
    slab, slot, copying = slab_of(3), device.allocate(PAGE), device.new_stream()
    assert device.page_lock(slab) is None
    device.copy(slot, slab.bytes, copying, page_locked=True)
    arrived = device.new_event()
    arrived.record(copying)
    device.current_stream().wait(arrived)
    total = add_up(slot).item()
    arrived.wait_done()
    device.unlock(slab)
    device.free(slot)
    return [total], [3 * PAGE]


def host_waits_instead(device: Device) -> Outcome:
    """No event on the computing stream: the host itself sees the copy done before it asks for the kernel."""
    slab, slot, copying = slab_of(3), device.allocate(PAGE), device.new_stream()
    assert device.page_lock(slab) is None
    device.copy(slot, slab.bytes, copying, page_locked=True)
    arrived = device.new_event()
    arrived.record(copying)
    while not arrived.done:
        pass
    total = add_up(slot).item()
    device.unlock(slab)
    device.free(slot)
    return [total], [3 * PAGE]


def pageable(device: Device) -> Outcome:
    """A copy from memory that is not page-locked is over when it returns."""
    source, slot = torch.full((PAGE,), 5, dtype=torch.uint8), device.allocate(PAGE)
    device.copy(slot, source, device.new_stream(), page_locked=False)
    source.fill_(6)
    total = add_up(slot).item()
    device.free(slot)
    return [total], [5 * PAGE]


def ring(device: Device, *, blocks: int = 5, slots: int = 2, passes: int = 2) -> Outcome:
    """Blocks through slots: a copy waits for the last use of its slot, a use for the copy."""
    computing, copying = device.current_stream(), device.new_stream()
    slabs = [slab_of(block + 1) for block in range(blocks)]
    assert [device.page_lock(slab) for slab in slabs] == [None] * blocks
    memory = [device.allocate(PAGE) for _ in range(slots)]
    arrived = [device.new_event() for _ in range(slots)]
    used = [device.new_event() for _ in range(slots)]
    totals = []

    def bring(step: int) -> None:
        slot = step % slots
        copying.wait(used[slot])
        device.copy(memory[slot], slabs[step % blocks].bytes, copying, page_locked=True)
        arrived[slot].record(copying)

    steps = blocks * passes
    for step in range(min(slots, steps)):
        bring(step)
    for step in range(steps):
        slot = step % slots
        computing.wait(arrived[slot])
        totals.append(add_up(memory[slot]))
        used[slot].record(computing)
        if step + slots < steps:
            bring(step + slots)
    results = [total.item() for total in totals]
    device.wait_idle()
    for piece in memory:
        device.free(piece)
    for slab in slabs:
        device.unlock(slab)
    return results, [float((step % blocks + 1) * PAGE) for step in range(steps)]


def staging(device: Device, *, rounds: int = 6) -> Outcome:
    """One page-locked buffer filled again and again: the host waits for the copy out of it before each."""
    slab, copying = slab_of(0), device.new_stream()
    assert device.page_lock(slab) is None
    memory = [device.allocate(PAGE) for _ in range(rounds)]
    copied = device.new_event()
    for number, piece in enumerate(memory):
        copied.wait_done()
        slab.bytes.fill_(number + 1)
        device.copy(piece, slab.bytes, copying, page_locked=True)
        copied.record(copying)
    device.current_stream().wait(copied)
    results = [add_up(piece).item() for piece in memory]
    device.wait_idle()
    for piece in memory:
        device.free(piece)
    device.unlock(slab)
    return results, [float((number + 1) * PAGE) for number in range(rounds)]


def chain(device: Device, *, streams: int = 4) -> Outcome:
    """One slot handed from stream to stream: each writes over what the one before wrote."""
    slot = device.allocate(PAGE)
    slabs = [slab_of(number + 1) for number in range(streams)]
    assert [device.page_lock(slab) for slab in slabs] == [None] * streams
    before: Event | None = None
    for slab in slabs:
        stream = device.new_stream()
        if before is not None:
            stream.wait(before)
        device.copy(slot, slab.bytes, stream, page_locked=True)
        before = device.new_event()
        before.record(stream)
    assert before is not None
    device.current_stream().wait(before)
    total = add_up(slot).item()
    device.wait_idle()
    device.free(slot)
    for slab in slabs:
        device.unlock(slab)
    return [total], [float(streams * PAGE)]


def in_place(device: Device) -> Outcome:
    """A kernel reads host memory in place; the host writes to it when the kernel is surely over."""
    slab = slab_of(2)
    assert device.page_lock(slab) is None
    view = device.view(slab)
    first = add_up(view).item()
    slab.bytes.fill_(4)
    second = add_up(view).item()
    device.unlock(slab)
    return [first, second], [2 * PAGE, 4 * PAGE]


def part_by_part(device: Device) -> Outcome:
    """Two streams write two halves of one slot; neither has to know of the other."""
    slab, slot = slab_of(7), device.allocate(PAGE)
    assert device.page_lock(slab) is None
    for begin in (0, PAGE // 2):
        half = slice(begin, begin + PAGE // 2)
        stream, arrived = device.new_stream(), device.new_event()
        device.copy(slot[half], slab.bytes[half], stream, page_locked=True)
        arrived.record(stream)
        device.current_stream().wait(arrived)
    total = add_up(slot).item()
    device.wait_idle()
    device.free(slot)
    device.unlock(slab)
    return [total], [7 * PAGE]


PROGRAMS: list[Program] = [one_copy, host_waits_instead, pageable, ring, staging, chain, in_place, part_by_part]
