"""The simulated accelerator itself: the seam of `copying.device` over queues, histories and plain memory."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch

from headrace import errors
from headrace.copying.device import Device, Event, Stream
from headrace.copying.slots import Slab
from headrace.testing.buffers import DeviceMemory, PageLocks
from headrace.testing.copies import Copies
from headrace.testing.graphs import Capture, Graph, Node, refill
from headrace.testing.kernels import KernelMode, Kernels
from headrace.testing.operators import Call
from headrace.testing.order import Hazard
from headrace.testing.queues import Operation, Policy, Queue
from headrace.testing.simulation import Simulation


class SimulatedStream(Queue, Stream):
    """A stream whose work happens when the scheduler wants."""

    def __init__(self, accelerator: SimulatedAccelerator, name: str) -> None:
        super().__init__(name)
        self._accelerator = accelerator

    def wait(self, event: Event) -> None:
        assert isinstance(event, SimulatedEvent)
        self._accelerator._stream_waits(self, event)


class SimulatedEvent(Event):
    """A point on a stream, or on one that is being captured."""

    def __init__(self, accelerator: SimulatedAccelerator) -> None:
        self._accelerator = accelerator
        self.point: Operation | Node | None = None

    def record(self, stream: Stream) -> None:
        assert isinstance(stream, SimulatedStream)
        self._accelerator._record(self, stream)

    @property
    def done(self) -> bool:
        return self._accelerator._poll(self)

    def wait_done(self) -> None:
        self._accelerator._host_waits(self)

    def seconds_since(self, earlier: Event) -> float:
        assert isinstance(earlier, SimulatedEvent)
        assert isinstance(self.point, Operation), "it was not recorded, or in a capture"
        assert isinstance(earlier.point, Operation), "the earlier one was not recorded, or in a capture"
        return self.point.end_s - earlier.point.end_s


class SimulatedAccelerator(Device):
    """An accelerator made of host memory, whose copies are as late and as badly ordered as the rules allow.

    Within `with accelerator:` every torch operator of the thread stands for a kernel on the current stream. It computes
    at once, with what the rules promise it; the bytes of a copy that it does not wait for may be there, or may be
    poison (NaN). Either way that is found: two operations that touch the same bytes, one of them writing, have to be
    ordered by events, by their stream or by waits of the host, and whether they are does not depend on the schedule.
    `policy` and `seed` decide what a faulty program computes with, and what `Event.done` says.

    What is found is raised as a `Hazard` and kept in `hazards` (only kept if `raise_at_once` is false); `check` raises
    what was swallowed on the way, and for what is left over at the end.

    Seconds are simulated. A copy takes `copy_latency_s` and its bytes at `copy_bytes_per_s`, one after the other over
    all streams; an operator on device memory takes `kernel_s`, or any operator what `kernel_s(name, bytes of device
    memory)` says.

    `memory_bytes` is the limit of `allocate`. `refuse_page_lock` is a reason to refuse. With `unified=False` there is
    no `view`; with `coherent=False` a view goes on showing what was in memory when it was made, as under confidential
    computing.

    Guarantees: one seed, policy and program give one schedule (if the program has one thread). Freed memory is never
    given out again, so it is held until the accelerator is gone. Not seen: reads of device memory that are no
    operators (`tolist`, `numpy`), writes to host memory that are no operators either (tell `host_write` of them; small
    sources of copies are compared with what they were, too), and locks: all threads of the host count as one.
    """

    torch_device = torch.device("cpu")

    def __init__(
        self,
        seed: int = 0,
        *,
        policy: Policy = "random",
        memory_bytes: int = 2**40,
        copy_latency_s: float = 10e-6,
        copy_bytes_per_s: float = 25e9,
        kernel_s: float | Callable[[str, int], float] = 0.0,
        refuse_page_lock: str | None = None,
        unified: bool = True,
        coherent: bool = True,
        raise_at_once: bool = True,
    ) -> None:
        self.refuse_page_lock = refuse_page_lock
        self.unified = unified
        self.coherent = coherent
        self._simulation = Simulation(policy, seed, raise_at_once=raise_at_once)
        self._lock = self._simulation.lock
        self._memory = DeviceMemory(self._simulation, memory_bytes)
        self._page_locks = PageLocks(self._simulation)
        self._copies = Copies(
            self._simulation, self._memory.regions, self._page_locks, copy_latency_s, copy_bytes_per_s
        )
        self._kernels = Kernels(self._simulation, self._memory.regions, self._page_locks, kernel_s)
        self._capture: Capture | None = None
        self._thread = threading.local()
        self._default = self.new_stream()

    # --- findings -------------------------------------------------------------------------------------------------

    @property
    def hazards(self) -> tuple[Hazard, ...]:
        """All that was found, in the order in which it was."""
        return tuple(self._simulation.hazards)

    def check(self) -> None:
        """Raise the first hazard that was found, or what is left over: copies, device memory, page locks."""
        with self._lock:
            if self.hazards:
                raise self.hazards[0]
            now = self._simulation.on_host("the end")
            for queue in self._simulation.scheduler.queues:
                if queue.last_copy is not None and not self._simulation.host.knows(queue.last_copy):
                    why = "nobody waited for the last copy on a stream"
                    self._simulation.report("never-waited-for", why, now, queue.last_copy)
            for region in (*self._memory.regions, *self._page_locks.regions):
                if region.ended is None:
                    self._simulation.report("leak", f"{region.name} is still there", now, region.began)

    @property
    def makespan_s(self) -> float:
        """When the last operation ends."""
        return max(queue.free_s for queue in self._simulation.scheduler.queues)

    # --- threads and streams --------------------------------------------------------------------------------------

    def __enter__(self) -> SimulatedAccelerator:
        """From here on the operators of this thread are kernels; each thread enters for itself."""
        modes = vars(self._thread).setdefault("modes", [])
        modes.append(KernelMode(self._launch))
        modes[-1].__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        self._thread.modes.pop().__exit__(*exception)

    @contextlib.contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        """Make `stream` the current one of this thread."""
        before = self.current_stream()
        self._thread.stream = stream
        try:
            yield
        finally:
            self._thread.stream = before

    def current_stream(self) -> SimulatedStream:
        stream: SimulatedStream = getattr(self._thread, "stream", self._default)
        return stream

    def new_stream(self) -> SimulatedStream:
        with self._lock:
            return self._new_stream(f"stream {len(self._simulation.scheduler.queues)}")

    def _new_stream(self, name: str) -> SimulatedStream:
        stream = SimulatedStream(self, name)
        self._simulation.scheduler.queues.append(stream)
        return stream

    def wait_idle(self) -> None:
        with self._lock:
            self._refuse_in_capture("wait for the whole device")
            for queue in self._simulation.scheduler.queues:
                if queue.last is not None:
                    self._simulation.wait(queue.last)

    # --- events ---------------------------------------------------------------------------------------------------

    def new_event(self) -> SimulatedEvent:
        return SimulatedEvent(self)

    def _record(self, event: SimulatedEvent, stream: SimulatedStream) -> None:
        with self._lock:
            event.point = self._put(
                stream, "record an event", lambda queue, after: self._mark(queue, "record an event")
            )
            self._simulation.scheduler.some()

    def _mark(self, queue: Queue, what: str, after: Operation | None = None) -> Operation:
        return self._simulation.put(queue, what, after=after)

    def _stream_waits(self, stream: SimulatedStream, event: SimulatedEvent) -> None:
        with self._lock:
            point, what = event.point, "wait for an event"
            captured = self._capture is not None and self._capture.has(stream)
            if isinstance(point, Node):
                if point.capture is not self._capture:
                    later = self._simulation.on_host(f"make {stream.name} wait for an event")
                    why = "the event was recorded in a capture that is over"
                    self._simulation.report("captured-event", why, later, point)
                    return
                self._capture.add(stream, what, lambda queue, after: self._mark(queue, what, after), point)
            elif point is not None and captured:
                later = self._simulation.on_host(f"make {stream.name}, which is captured, wait for an event")
                self._simulation.report(
                    "capture-isolation", "the event was recorded outside of the capture", later, point
                )
            elif point is not None:
                self._mark(stream, what, point)
            self._simulation.scheduler.some()

    def _poll(self, event: SimulatedEvent) -> bool:
        with self._lock:
            point = self._host_may_see(event, "look whether an event is done")
            if point is None:
                return True
            self._simulation.scheduler.some()
            if point.done:
                self._simulation.learn(point)
                return True
            self._simulation.scheduler.step_towards(point)  # who asks often enough gets there
            return False

    def _host_waits(self, event: SimulatedEvent) -> None:
        with self._lock:
            point = self._host_may_see(event, "wait for an event")
            if point is not None:
                self._simulation.wait(point)
            self._simulation.scheduler.some()

    def _host_may_see(self, event: SimulatedEvent, what: str) -> Operation | None:
        self._refuse_in_capture(what)
        if isinstance(event.point, Node):
            why = "the event was recorded in a capture, where nothing happens"
            self._simulation.report("captured-event", why, self._simulation.on_host(what), event.point)
            return None
        return event.point

    # --- memory ---------------------------------------------------------------------------------------------------

    @property
    def allocated_bytes(self) -> int:
        """Device memory in use."""
        return self._memory.allocated_bytes

    @property
    def peak_allocated_bytes(self) -> int:
        """The most that was ever in use."""
        return self._memory.peak_allocated_bytes

    @property
    def free_bytes(self) -> int:
        return self._memory.free_bytes

    @property
    def page_locked_bytes(self) -> int:
        """Host memory that is page-locked."""
        return self._page_locks.locked_bytes

    def allocate(self, nbytes: int, purpose: str = "moving weights") -> torch.Tensor:
        with self._lock:
            return self._memory.allocate(nbytes, purpose)

    def free(self, memory: torch.Tensor) -> None:
        with self._lock:
            self._memory.free(memory)

    def page_lock(self, slab: Slab) -> str | None:
        with self._lock:
            return self.refuse_page_lock or self._page_locks.lock(slab)

    def unlock(self, slab: Slab) -> None:
        with self._lock:
            self._page_locks.unlock(slab)

    def view(self, slab: Slab) -> torch.Tensor:
        if not self.unified:
            raise errors.Reason("the device cannot address host memory")
        with self._lock:
            return self._page_locks.view(slab, coherent=self.coherent)

    def host_write(self, slab: Slab, offset: int = 0, nbytes: int | None = None) -> None:
        """Tell that the host writes to page-locked memory now, where no torch operator does it."""
        with self._lock:
            self._page_locks.write(slab, offset, slab.nbytes - offset if nbytes is None else nbytes)

    # --- copies ---------------------------------------------------------------------------------------------------

    @property
    def copies(self) -> int:
        """Copies that were asked for so far."""
        return self._copies.count

    @property
    def copied_bytes(self) -> int:
        """The bytes of these."""
        return self._copies.nbytes

    def copy(self, target: torch.Tensor, source: torch.Tensor, stream: Stream, *, page_locked: bool) -> None:
        assert isinstance(stream, SimulatedStream)
        for tensor in (target, source):
            assert tensor.dtype == torch.uint8, "copies are of bytes"
            assert tensor.dim() == 1, "copies are of bytes in a row"
            assert tensor.is_contiguous(), "copies are of bytes in a row"
        assert target.numel() == source.numel(), "the two ends of a copy differ in length"
        if not target.numel():
            return
        with self._lock:
            if not page_locked:
                self._refuse_in_capture("copy from memory that is not page-locked")
            put = functools.partial(self._copies.put, target, source, page_locked)
            copy = self._put(stream, f"copy of {target.numel()} bytes", put)
            if not page_locked and isinstance(copy, Operation):
                self._simulation.wait(copy)
            self._simulation.scheduler.some()

    # --- kernels --------------------------------------------------------------------------------------------------

    @property
    def kernels(self) -> int:
        """Operators that ran on the device so far."""
        return self._kernels.count

    def _launch(self, call: Call) -> Any:
        if call.touches_no_data or getattr(self._thread, "replaying", False):
            return call.run()
        with self._lock:
            uses = self._kernels.uses(call)
            if uses and not any(use.by_device for use in uses):
                self._kernels.note(self._simulation.on_host(call.name), uses)
                return call.run()
            stream = self.current_stream()
            if self._capture is not None and self._capture.has(stream):
                return self._launch_captured(self._capture, stream, call)
            kernel = self._kernels.put(call, uses, stream)
            result = call.run()
            if call.waits:
                self._simulation.learn(kernel)
            return result

    def _launch_captured(self, capture: Capture, stream: SimulatedStream, call: Call) -> Any:
        if call.waits:
            self._refuse_in_capture(f"wait for the result of {call.name}")
        result, outputs = capture.run(call)

        def put(queue: Queue, after: Operation | None) -> Operation:
            kernel = self._kernels.put(call, self._kernels.uses(call), queue)
            self._thread.replaying = True
            try:
                refill(call, outputs)
            finally:
                self._thread.replaying = False
            return kernel

        capture.add(stream, call.name, put)
        return result

    # --- graphs ---------------------------------------------------------------------------------------------------

    @property
    def capturing(self) -> bool:
        return self._capture is not None and self._capture.has(self.current_stream())

    @contextlib.contextmanager
    def capture(self) -> Iterator[Graph]:
        """Capture a graph on a stream of its own, as `torch.cuda.graph` does; nothing of it happens before `replay`."""
        self.wait_idle()
        with self._lock:
            assert self._capture is None, "one capture at a time"
            stream = self._new_stream("the capturing stream")
            capture = self._capture = Capture(stream, self._simulation.on_host("begin of a capture"))
        try:
            with self.stream(stream):
                yield Graph(capture, self.current_stream, self._new_stream)
        finally:
            with self._lock:
                self._capture = None
                capture.end()
        if left := capture.unjoined():
            end = self._simulation.on_host("end of the capture")
            self._simulation.report("capture-unjoined", "the capturing stream does not wait for it", end, left)

    def _put(self, queue: Queue, what: str, put: Callable[[Queue, Operation | None], Operation]) -> Operation | Node:
        if self._capture is not None and self._capture.has(queue):
            return self._capture.add(queue, what, put)
        return put(queue, None)

    def _refuse_in_capture(self, what: str) -> None:
        if self._capture is not None:
            why = "the host cannot wait while a graph is captured"
            self._simulation.report("capture-unsupported", why, self._simulation.on_host(what), self._capture.began)
