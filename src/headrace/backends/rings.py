"""Slots, and the ways in which blocks get into them. Knows no order of blocks (`schedule` does) and no modules.

`DiskRing` is for the CPU: a slot is host memory, and reads land in it. `DeviceRing` is for an accelerator: a slot is
device memory, and a block gets there by one packed copy, from page-locked host memory where it lives or through which
it passes on its way from disk.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

from headrace import errors
from headrace.backends.packing import Packing
from headrace.copying.device import Device, Event, Stream
from headrace.copying.disk import DiskReader, Ticket
from headrace.copying.slots import Slab
from headrace.metrics import Metrics

STAGING_SLABS = 2
"""One is read into while the other is copied to the device: host memory beyond the host tier is two blocks at most."""


class Delivery(Protocol):
    """One block on its way into one slot."""

    @property
    def ready(self) -> bool:
        """Whether `wait` returns at once."""

    def cancel(self) -> None:
        """Give up what has not begun."""

    def wait_idle(self) -> None:
        """Block until nothing of it writes into the slot any more, or only in order with what is brought next."""

    def wait(self) -> None:
        """Return when what runs next finds the block in the slot. Raises: ReadError."""


class Slot(Protocol):
    """Memory that a block lands in."""

    @property
    def bytes(self) -> torch.Tensor:
        """1-d uint8, where modules compute."""


class Ring(ABC):
    """The slots of one prefetch schedule."""

    packings: Sequence[Packing]
    slots: Sequence[Slot]
    slot_bytes: int

    @property
    def allocated_bytes(self) -> int:
        """Memory of the slots."""
        return sum(slot.bytes.numel() for slot in self.slots)

    @property
    def capturing(self) -> bool:
        """Whether what is put on the device now goes into a graph."""
        return False

    def fork(self) -> None:  # noqa: B027 (only a device has graphs)
        """Let what is brought from now on begin where the calling thread's stream is."""

    def join(self) -> None:  # noqa: B027
        """Let what follows on the calling thread's stream happen after all that was brought."""

    @property
    def times_uncounted(self) -> int:
        """How much `count_time` would have to look at."""
        return 0

    @property
    def host_bytes(self) -> int:
        """Host memory taken beside the slots: blocks that live there, and staging."""
        return 0

    @abstractmethod
    def new_slot(self, nbytes: int) -> Slot:
        """A slot beside the ring, for one run. Raises: OutOfDeviceMemory."""

    @abstractmethod
    def free(self, slot: Slot) -> None:
        """Give back what `new_slot` gave."""

    @abstractmethod
    def bring(self, index: int, slot: Slot, *, urgent: bool = False) -> Delivery:
        """Begin to bring block `index` into `slot`, over whatever is there. The slot is not in use."""

    def ran(self, slot: Slot) -> None:  # noqa: B027 (only an accelerator runs behind our back)
        """What the calling thread has launched so far uses `slot`."""

    def count_time(self) -> None:  # noqa: B027
        """Bring the metrics up to date with what only the device knows."""

    def close(self) -> None:  # noqa: B027
        """Give everything back. Nothing is brought or run any more. Idempotent."""


class DiskRing(Ring):
    """Host memory that a reader fills."""

    def __init__(self, packings: Sequence[Packing], slots: int, reader: DiskReader) -> None:
        self.packings = packings
        self.reader = reader
        self.slot_bytes = max(packing.nbytes for packing in packings)
        self.slots: list[Slab] = [Slab(self.slot_bytes) for _ in range(slots)]

    def new_slot(self, nbytes: int) -> Slab:
        return Slab(nbytes)

    def free(self, slot: Slot) -> None:
        pass

    def bring(self, index: int, slot: Slot, *, urgent: bool = False) -> Ticket:
        assert isinstance(slot, Slab)
        packing = self.packings[index]
        return self.reader.submit(packing.reads, slot.address, packing.block.name, urgent=urgent, keep=slot)


@dataclass(eq=False)
class DeviceSlot:
    """Device memory with the events that guard it."""

    bytes: torch.Tensor
    arrived: Event
    """The last copy into it."""
    ran: dict[Stream, Event] = field(default_factory=dict)
    """Per stream, the last run out of it that no copy has waited for yet."""


class DeviceDelivery:
    """A copy to the device, after a read if the block lives on disk."""

    def __init__(self, ring: DeviceRing, index: int, slot: DeviceSlot) -> None:
        self.index = index
        self.slot = slot
        self._ring = ring
        self._ticket: Ticket | None = None
        self._begun = threading.Event()
        self._given_up = False

    @property
    def ready(self) -> bool:
        return self._begun.is_set() and (self._ticket is None or self._ticket.ready)

    def cancel(self) -> None:
        self._ring.staging.forget(self)
        if self._ticket is not None:
            self._ticket.cancel()

    def wait_idle(self) -> None:
        self._begun.wait()
        if self._ticket is not None:
            self._ticket.wait_idle()

    def wait(self) -> None:
        self.wait_idle()
        assert not self._given_up, "nobody waits for what was given up"
        if self._ticket is not None:
            self._ticket.wait()
        self._ring.wait_arrived(self.slot)

    def begin(self, ticket: Ticket | None) -> None:
        """It is on its way; or, without a ticket, copied already."""
        self._ticket = ticket
        self._begun.set()

    def give_up(self) -> None:
        """It will not begin any more."""
        self._given_up = True
        self._begun.set()


class DeviceRing(Ring):
    """Device memory that copies fill, on a stream of their own.

    Guarantees: a copy into a slot is ordered after every run out of it, and a run after the copy it needs, by events
    alone: the host never waits for the device, except before it reads into staging again. At any time at most
    `STAGING_SLABS` blocks from disk are in host memory.

    Without page-locked memory (`page_locked` false, or the driver refuses) copies happen on the spot.
    """

    def __init__(
        self,
        packings: Sequence[Packing],
        slots: int,
        device: Device,
        metrics: Metrics,
        *,
        host: Mapping[int, torch.Tensor],
        reader: DiskReader | None,
        page_locked: bool,
    ) -> None:
        self.packings = packings
        self.device = device
        self.metrics = metrics
        self.host = host
        """Blocks that live in host memory, or as much of them as does, packed: index to their bytes."""
        self.page_locked = page_locked
        self.stream = device.new_stream()
        self.slot_bytes = max(packing.nbytes for packing in packings)
        self.slots: list[DeviceSlot] = []
        self._lock = threading.Lock()
        self._closed = False
        self._copying: deque[tuple[Event, Event]] = deque()
        self._waiting: deque[tuple[Event, Event]] = deque()
        """Begin and end of copies and of waits for them; `count_time` adds them up."""
        from_disk = [packing.nbytes - packing.disk_offset for packing in packings if packing.reads]
        try:
            for _ in range(slots):
                self.slots.append(self.new_slot(self.slot_bytes))
            self.staging = Staging(self, reader, max(from_disk, default=0), min(STAGING_SLABS, len(from_disk)))
        except BaseException:
            for slot in self.slots:
                device.free(slot.bytes)
            raise

    @property
    def host_bytes(self) -> int:
        return sum(memory.numel() for memory in self.host.values()) + self.staging.nbytes

    def new_slot(self, nbytes: int) -> DeviceSlot:
        return DeviceSlot(self.device.allocate(nbytes), self.device.new_event())

    def free(self, slot: Slot) -> None:
        assert isinstance(slot, DeviceSlot)
        for event in (slot.arrived, *slot.ran.values()):
            event.wait_done()
        self.device.free(slot.bytes)

    def bring(self, index: int, slot: Slot, *, urgent: bool = False) -> DeviceDelivery:
        assert isinstance(slot, DeviceSlot)
        delivery = DeviceDelivery(self, index, slot)
        packing = self.packings[index]
        from_disk = packing.disk_offset < packing.nbytes and bool(packing.reads)
        if from_disk and self.capturing:
            raise errors.CannotCapture(block=packing.block.name)
        if index in self.host:
            self.copy(slot, self.host[index], 0, page_locked=self.page_locked)
        if from_disk:
            self.staging.bring(delivery, urgent=urgent)
        else:
            delivery.begin(None)
        return delivery

    def copy(self, slot: DeviceSlot, source: torch.Tensor, offset: int, *, page_locked: bool) -> None:
        """Put the copy of a block, or of what one tier has of it, on the stream, after what still runs from `slot`."""
        with self._lock:
            for event in slot.ran.values():
                self.stream.wait(event)
            slot.ran.clear()
            begin = self._stopwatch(self.stream)
            target = slot.bytes[offset : offset + source.numel()]
            self.device.copy(target, source, self.stream, page_locked=page_locked)
            self._clock(self._copying, begin, self.stream)
            slot.arrived.record(self.stream)
        self.metrics.add(copies=1, copied_bytes=source.numel())

    def wait_arrived(self, slot: DeviceSlot) -> None:
        """Let what the calling thread launches next happen after the last copy into `slot`."""
        # On every run, not once per copy: the next run may be on another stream.
        stream = self.device.current_stream()
        begin = self._stopwatch(stream)
        stream.wait(slot.arrived)
        self._clock(self._waiting, begin, stream)

    def _stopwatch(self, stream: Stream) -> Event | None:
        if self.capturing:  # what a graph does is not seen
            return None
        begin = self.device.new_event()
        begin.record(stream)
        return begin

    def _clock(self, times: deque[tuple[Event, Event]], begin: Event | None, stream: Stream) -> None:
        if begin is None:
            return
        end = self.device.new_event()
        end.record(stream)
        times.append((begin, end))

    @property
    def capturing(self) -> bool:
        return self.device.capturing

    @property
    def times_uncounted(self) -> int:
        return max(len(self._copying), len(self._waiting))

    def count_time(self) -> None:
        """Add the time that copies and waits for them took on the device to the metrics, as far as they are done."""
        if self.capturing:  # where even to look is refused
            return
        for times, counter in ((self._copying, "copy_s"), (self._waiting, "device_stall_s")):
            while times and times[0][1].done:
                begin, end = times.popleft()
                self.metrics.add(**{counter: end.seconds_since(begin)})

    def ran(self, slot: Slot) -> None:
        assert isinstance(slot, DeviceSlot)
        stream = self.device.current_stream()
        with self._lock:
            event = slot.ran.get(stream)
            if event is None:
                event = slot.ran[stream] = self.device.new_event()
            event.record(stream)

    def fork(self) -> None:
        """Let the copies that follow begin where the calling thread's stream is: within the graph that is captured.

        Events from before are forgotten: a graph may not wait for them, and whoever captures or replays one sees to
        it that nothing else runs.
        """
        begin = self.device.new_event()
        begin.record(self.device.current_stream())
        with self._lock:
            for slot in self.slots:
                slot.ran.clear()
            self.stream.wait(begin)

    def join(self) -> None:
        """Let what follows on the calling thread's stream happen after every copy."""
        end = self.device.new_event()
        with self._lock:
            end.record(self.stream)
        self.device.current_stream().wait(end)

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self.device.wait_idle()
        for slot in self.slots:
            self.device.free(slot.bytes)
        self.staging.close()


class Staging:
    """Host memory through which blocks on disk reach the device: read into a slab, copied out of it."""

    def __init__(self, ring: DeviceRing, reader: DiskReader | None, nbytes: int, slabs: int) -> None:
        assert reader is not None or not slabs
        self._ring = ring
        self._reader = reader
        self._slabs = [Slab(nbytes) for _ in range(slabs)]
        self._locked = [slab for slab in self._slabs if ring.page_locked and ring.device.page_lock(slab) is None]
        self._free = list(self._slabs)
        self._waiting: deque[DeviceDelivery] = deque()
        self._lock = threading.Lock()

    @property
    def nbytes(self) -> int:
        return sum(slab.nbytes for slab in self._slabs)

    def bring(self, delivery: DeviceDelivery, *, urgent: bool) -> None:
        with self._lock:
            if urgent:
                self._waiting.appendleft(delivery)
            else:
                self._waiting.append(delivery)
        self._read_next(urgent=urgent)

    def forget(self, delivery: DeviceDelivery) -> None:
        with self._lock:
            if delivery not in self._waiting:
                return
            self._waiting.remove(delivery)
        delivery.give_up()

    def _read_next(self, *, urgent: bool = False) -> None:
        with self._lock:
            if not self._waiting or not self._free:
                return
            delivery, slab = self._waiting.popleft(), self._free.pop()
        packing = self._ring.packings[delivery.index]

        def end(error: BaseException | None) -> None:
            """On the reader's thread that has read the last piece."""
            try:
                if error is None:
                    source = slab.bytes[: packing.nbytes - packing.disk_offset]
                    self._ring.copy(delivery.slot, source, packing.disk_offset, page_locked=slab in self._locked)
                    delivery.slot.arrived.wait_done()
            finally:
                with self._lock:
                    self._free.append(slab)
                self._read_next()

        assert self._reader is not None
        try:
            ticket = self._reader.submit(
                packing.reads, slab.address, packing.block.name, urgent=urgent, keep=slab, on_end=end
            )
        except errors.ClosedError:
            with self._lock:
                self._free.append(slab)
            delivery.give_up()
            raise
        delivery.begin(ticket)

    def close(self) -> None:
        for slab in self._locked:
            self._ring.device.unlock(slab)
        self._locked.clear()
