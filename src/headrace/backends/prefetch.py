"""Blocks read ahead from disk into a ring of slots. Knows no model library; `schedule` decides the order.

Memory: `slots` x the largest block, and the reader's staging. Each block is read once per pass, by a few large direct
reads that begin as soon as its slot is free.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

from torch import nn

from headrace.backends.base import Backend, Packing
from headrace.blocks import Block, Weight
from headrace.copying.disk import DiskReader, Ticket
from headrace.copying.slots import Slab
from headrace.metrics import Metrics
from headrace.schedule import Schedule


class PrefetchBackend(Backend):
    """A ring of `min(slots, n)` slots for n blocks: one that runs and the others read ahead.

    Guarantees: a block runs only out of a slot that carries its tag and whose reads have all arrived; a block that is
    not where it should be (a layer skipped, repeated, a pass aborted) is read on the spot and counted.
    """

    name = "prefetch"

    def __init__(
        self,
        blocks: Sequence[Block],
        weights: Mapping[Block, Sequence[Weight]],
        metrics: Metrics,
        reader: DiskReader,
        *,
        slots: int = 2,
    ) -> None:
        super().__init__(blocks, weights, metrics)
        self.reader = reader
        self.packings = [Packing(block, self.weights[block], reader.chunk_bytes) for block in self.blocks]
        self.schedule = Schedule(len(self.blocks), min(slots, len(self.blocks)))
        self.slot_bytes = max(packing.nbytes for packing in self.packings)
        self._slabs = [Slab(self.slot_bytes) for _ in range(self.schedule.slots)]
        self._tickets: list[tuple[int, Ticket] | None] = [None] * self.schedule.slots  # block that is read, its reads
        self._views: dict[tuple[int, int], list[nn.Parameter]] = {}
        self._running: list[tuple[int, int | None]] = []  # block and slot, innermost last
        self._read_ahead()

    @property
    def allocated_bytes(self) -> int:
        return sum(slab.nbytes for slab in self._slabs)

    def before(self, index: int) -> None:
        step = self.schedule.start(index)
        if step is None:
            self._run_outside_the_ring(index)
            return
        try:
            if step.missed or not self._holds(step.slot, index):
                self.metrics.add(slot_misses=1)
                self._read(index, step.slot, urgent=True)
            self._wait(index, step.slot)
            self.packings[index].bind(self._parameters(index, step.slot))
            self._running.append((index, step.slot))
        except BaseException:
            self.schedule.done(step.slot)
            self._unbind(index)
            raise
        self.metrics.add(blocks_run=1)

    def after(self, index: int) -> None:
        running, slot = self._running.pop()
        assert running == index, f"block {index} is done, but {running} was running"
        self._unbind(index)
        if slot is not None:
            self.schedule.done(slot)
            if not self._closed:
                self._read_ahead()

    def close(self) -> None:
        with self._lock:
            super().close()
            for entry in self._tickets:
                if entry is not None:
                    entry[1].cancel()

    def _unbind(self, index: int) -> None:
        if all(block != index for block, _ in self._running):
            self.packings[index].unbind()

    def _holds(self, slot: int, index: int) -> bool:
        """Whether block `index` was read into `slot`: an interrupt may come between the schedule's tag and the read."""
        entry = self._tickets[slot]
        return entry is not None and entry[0] == index and not entry[1].cancelled

    def _wait(self, index: int, slot: int) -> None:
        """Wait for the slot's reads; on any failure the slot is given back empty, so that the next pass reads again."""
        entry = self._tickets[slot]
        assert entry is not None
        assert self.schedule.owner(slot) == entry[0] == index
        ticket = entry[1]
        if ticket.ready and not ticket.failed:
            return
        start_s = time.perf_counter()
        try:
            ticket.wait()
        except BaseException:
            self.schedule.lost(slot)
            ticket.cancel()
            raise
        self.metrics.add(stall_s=time.perf_counter() - start_s, stalls=1)
        self.metrics.span(self.blocks[index].name, "wait", start_s)

    def _read_ahead(self) -> None:
        for step in self.schedule.ahead():
            self._read(step.block, step.slot)

    def _read(self, index: int, slot: int, *, urgent: bool = False) -> None:
        entry = self._tickets[slot]
        if entry is not None and not entry[1].ready:  # only after a jump: what was coming is not wanted any more
            entry[1].cancel()
            entry[1].wait_idle()
        packing, slab = self.packings[index], self._slabs[slot]
        ticket = self.reader.submit(packing.reads, slab.address, packing.block.name, urgent=urgent, keep=slab)
        self._tickets[slot] = (index, ticket)

    def _parameters(self, index: int, slot: int) -> list[nn.Parameter]:
        views = self._views.get((index, slot))
        if views is None:
            views = self._views[index, slot] = self.packings[index].parameters(self._slabs[slot])
        return views

    def _run_outside_the_ring(self, index: int) -> None:
        """Blocks nested deeper than there are slots: this one gets memory of its own for the length of its call."""
        packing = self.packings[index]
        slab = Slab(packing.nbytes)
        self.metrics.add(overflow_slots=1, slot_misses=1, blocks_run=1)
        self.reader.submit(packing.reads, slab.address, packing.block.name, urgent=True, keep=slab).wait()
        packing.bind(packing.parameters(slab))
        self._running.append((index, None))
