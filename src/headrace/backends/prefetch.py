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
        self._tickets: list[Ticket | None] = [None] * self.schedule.slots
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
        if step.missed:
            self.metrics.add(slot_misses=1)
            self._read(index, step.slot, urgent=True)
        self._wait(index, step.slot)
        self.packings[index].bind(self._parameters(index, step.slot))
        self._running.append((index, step.slot))
        self.metrics.add(blocks_run=1)

    def after(self, index: int) -> None:
        running, slot = self._running.pop()
        assert running == index, f"block {index} is done, but {running} was running"
        if all(block != index for block, _ in self._running):
            self.packings[index].unbind()
        if slot is not None:
            self.schedule.done(slot)
            if not self._closed:
                self._read_ahead()

    def close(self) -> None:
        with self._lock:
            super().close()
            for ticket in self._tickets:
                if ticket is not None:
                    ticket.cancel()

    def _wait(self, index: int, slot: int) -> None:
        """Wait for the slot's reads; on any failure the slot is given back empty, so that the next pass reads again."""
        ticket = self._tickets[slot]
        assert ticket is not None
        assert self.schedule.owner(slot) == index
        if ticket.ready and not ticket.failed:
            return
        start_s = time.perf_counter()
        try:
            ticket.wait()
        except BaseException:
            self.schedule.done(slot)
            self.schedule.lost(slot)
            ticket.cancel()
            raise
        self.metrics.add(stall_s=time.perf_counter() - start_s, stalls=1)
        self.metrics.span(self.blocks[index].name, "wait", start_s)

    def _read_ahead(self) -> None:
        for step in self.schedule.ahead():
            self._read(step.block, step.slot)

    def _read(self, index: int, slot: int, *, urgent: bool = False) -> None:
        before = self._tickets[slot]
        if before is not None and not before.ready:  # only after a jump: what was coming is not wanted any more
            before.cancel()
            before.wait_idle()
        packing = self.packings[index]
        address = self._slabs[slot].address
        self._tickets[slot] = self.reader.submit(packing.reads, address, packing.block.name, urgent=urgent)

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
        self.reader.submit(packing.reads, slab.address, packing.block.name, urgent=True).wait()
        packing.bind(packing.parameters(slab))
        self._running.append((index, None))
