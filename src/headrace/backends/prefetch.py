"""Blocks brought ahead of their run into a ring of slots. Knows no model library; `schedule` decides the order.

Memory: `slots` x the largest block, and the reader's staging. Each block is brought once per pass, by a few large
direct reads or one packed copy that begin as soon as its slot is free.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

from torch import nn

from headrace.backends.base import Backend
from headrace.backends.packing import Packing
from headrace.backends.rings import Delivery, DiskRing, Ring, Slot
from headrace.blocks import Block, Weight
from headrace.copying.disk import DiskReader
from headrace.core import DIRECT_ALIGNMENT, align_up
from headrace.metrics import Metrics
from headrace.schedule import Schedule

LEAST_PIECE_BYTES = 2**20
"""Of a read. Smaller ones cost more processor time than they save waiting (docs/log.md)."""

MANY_TIMES = 1000
"""Of what the device has measured: until then nobody asks it whether it is done."""


class PrefetchBackend(Backend):
    """A ring of `min(slots, n)` slots for n blocks: one that runs and the others on their way.

    Guarantees: a block runs only out of a slot that carries its tag and in which all of it has arrived; a block that is
    not where it should be (a layer skipped, repeated, a pass aborted) is brought on the spot and counted.
    """

    name = "prefetch"

    def __init__(
        self,
        blocks: Sequence[Block],
        weights: Mapping[Block, Sequence[Weight]],
        metrics: Metrics,
        reader: DiskReader | None = None,
        *,
        slots: int = 2,
        ring: Ring | None = None,
    ) -> None:
        super().__init__(blocks, weights, metrics)
        if ring is None:
            assert reader is not None
            packings = [
                Packing(block, self.weights[block], _piece_bytes(self.weights[block], reader), as_stored=True)
                for block in self.blocks
            ]
            ring = DiskRing(packings, min(slots, len(packings)), reader)
        self.ring = ring
        self.packings = ring.packings
        self.schedule = Schedule(len(self.blocks), len(ring.slots))
        self._deliveries: list[tuple[int, Delivery] | None] = [None] * self.schedule.slots
        """Per slot, the block that is or was on its way there."""
        self._views: dict[tuple[int, int], list[nn.Parameter]] = {}
        self._running: list[tuple[int, int | None, Slot, list[nn.Parameter]]] = []
        """Block, number of its slot (None beside the ring), the slot, what is bound; innermost last."""
        self._ranges = [_range(slot) for slot in ring.slots]
        self._captured = False
        self._bring_ahead()

    @property
    def allocated_bytes(self) -> int:
        return self.ring.allocated_bytes

    @property
    def host_bytes(self) -> int:
        return self.ring.host_bytes

    def count_time(self) -> None:
        with self._lock:
            self.ring.count_time()

    # --- a block runs ---------------------------------------------------------------------------------------------

    def before(self, index: int) -> None:
        step = self.schedule.start(index)
        if step is None:
            self._run_beside_the_ring(index)
            return
        try:
            if step.missed or not self._holds(step.slot, index):
                self.metrics.add(slot_misses=1)
                self._bring(index, step.slot, urgent=True)
            self._wait(index, step.slot)
            self._bind(index, step.slot, self.ring.slots[step.slot], self._parameters(index, step.slot))
        except BaseException:
            self.schedule.done(step.slot)
            raise
        self.metrics.count_block()

    def after(self, index: int) -> None:
        running, number, slot, parameters = self._running.pop()
        assert running == index, f"block {index} is done, but {running} was running"
        self.ring.ran(slot)
        if not self._running or all(block != index for block, *_ in self._running):
            self.packings[index].unbind(parameters)
        if number is None:
            self.ring.free(slot)
            return
        self.schedule.done(number)
        if not self._closed:
            self._bring_ahead()

    def check_unchanged(self, index: int) -> None:
        _, number, _, parameters = self._running[-1]
        try:
            self.packings[index].check_unchanged(parameters)
        except BaseException:
            if number is not None:  # what lies there now is not the weight, and the views have counted the change
                self.schedule.lost(number)
                self._views.pop((index, number))
            raise

    def lent_memory(self) -> tuple[int, int]:
        _, number, slot, _ = self._running[-1]
        return self._ranges[number] if number is not None else _range(slot)

    def _bind(self, index: int, number: int | None, slot: Slot, parameters: list[nn.Parameter]) -> None:
        try:
            self.packings[index].bind(parameters)
            self._running.append((index, number, slot, parameters))
        except BaseException:  # an interrupt between two sites
            self.packings[index].unbind(parameters)
            raise

    def _run_beside_the_ring(self, index: int) -> None:
        """Blocks nested deeper than there are slots: this one gets memory of its own for the length of its call."""
        packing = self.packings[index]
        slot = self.ring.new_slot(packing.nbytes)
        self.metrics.add(overflow_slots=1, slot_misses=1, blocks_run=1)
        delivery: Delivery | None = None
        try:
            delivery = self.ring.bring(index, slot, urgent=True)
            delivery.wait()
            self._bind(index, None, slot, packing.parameters(slot.bytes))
        except BaseException:
            if delivery is not None:
                delivery.cancel()
                delivery.wait_idle()
            self.ring.free(slot)
            raise

    # --- into the slots -------------------------------------------------------------------------------------------

    def _holds(self, number: int, index: int) -> bool:
        """Whether block `index` was brought to this slot: an interrupt may come between the schedule's tag and that."""
        entry = self._deliveries[number]
        return entry is not None and entry[0] == index

    def _wait(self, index: int, number: int) -> None:
        """Wait for what is on its way; if it fails the slot is given back empty, so that the next pass tries again."""
        entry = self._deliveries[number]
        assert entry is not None
        assert self.schedule.owner(number) == entry[0] == index
        delivery = entry[1]
        stalled = not delivery.ready
        start_s = time.perf_counter() if stalled else 0.0
        try:
            delivery.wait()
        except BaseException:
            self.schedule.lost(number)
            delivery.cancel()
            raise
        if stalled:
            self.metrics.add(stall_s=time.perf_counter() - start_s, stalls=1)
            self.metrics.span(self.blocks[index].name, "wait", start_s)

    def _bring_ahead(self) -> None:
        for step in self.schedule.ahead(within_pass=self._captured):
            self._bring(step.block, step.slot)

    def _bring(self, index: int, number: int, *, urgent: bool = False) -> None:
        entry = self._deliveries[number]
        if entry is not None and not entry[1].ready:  # only after a jump: what was coming is not wanted any more
            entry[1].cancel()
            entry[1].wait_idle()
        self._deliveries[number] = None  # if bringing fails, the slot holds nothing
        self._deliveries[number] = (index, self.ring.bring(index, self.ring.slots[number], urgent=urgent))

    def _parameters(self, index: int, number: int) -> list[nn.Parameter]:
        views = self._views.get((index, number))
        if views is None:
            views = self._views[index, number] = self.packings[index].parameters(self.ring.slots[number].bytes)
        return views

    # --- passes and graphs ----------------------------------------------------------------------------------------

    def begin_pass(self) -> None:
        """Graphs replay copies behind our back: once there is one, each pass brings all it needs, and nothing more."""
        self._captured = self._captured or self.ring.capturing
        if self._captured:
            self.schedule.forget()
            self.ring.fork()

    def end_pass(self) -> None:
        if self.ring.times_uncounted > MANY_TIMES:
            self.ring.count_time()
        if self._captured:
            self.ring.join()

    def close(self) -> None:
        with self._lock:
            super().close()
            for entry in self._deliveries:
                if entry is not None:
                    entry[1].cancel()
            if not self._running:  # else a block closes its own model: what it runs with must stay
                for entry in self._deliveries:
                    if entry is not None:
                        entry[1].wait_idle()
                self._views.clear()
                self.ring.close()


def _piece_bytes(weights: Sequence[Weight], reader: DiskReader) -> int:
    """Small enough that all threads read the block which is needed first, and large enough for the disk."""
    share = sum(weight.nbytes for weight in weights) // (2 * reader.threads)
    return min(reader.chunk_bytes, max(LEAST_PIECE_BYTES, align_up(share, DIRECT_ALIGNMENT)))


def _range(slot: Slot) -> tuple[int, int]:
    begin = slot.bytes.data_ptr()
    return begin, begin + slot.bytes.numel()
