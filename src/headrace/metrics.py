"""Counters and spans: what moved, what waited, for how long. Imports nothing of ours and does no I/O of its own."""

from __future__ import annotations

import json
import threading
import time
from dataclasses import dataclass, fields
from pathlib import Path


@dataclass(slots=True)
class Counters:
    """Totals since the engine was opened (or since `reset`); times in seconds."""

    passes: int = 0
    blocks_run: int = 0
    read_bytes: int = 0
    """Bytes that reads asked the disk for, alignment included."""
    reads: int = 0
    read_s: float = 0.0
    """Summed over reader threads: more than wall time when reads overlap."""
    busy_s: float = 0.0
    """Time with at least one read in flight."""
    stall_s: float = 0.0
    """Time a block waited for its weights."""
    stalls: int = 0
    slot_misses: int = 0
    """Blocks that were not where the schedule expected them and were read on the spot."""
    overflow_slots: int = 0
    """Blocks that ran while every slot was in use (nested blocks) and got a slab of their own for that call."""
    copies: int = 0
    """Packed copies from host to device."""
    copied_bytes: int = 0
    copy_s: float = 0.0
    """Time with a copy under way, as the device has measured it."""
    device_stall_s: float = 0.0
    """Time the device waited for a copy before it could run a block, as it has measured it."""
    gathered_rows: int = 0
    read_errors: int = 0


@dataclass(frozen=True, slots=True)
class Statistics:
    """What moved and what of that was hidden behind computing; a snapshot."""

    passes: int
    blocks_run: int
    read_bytes: int
    """From disk."""
    copied_bytes: int
    """From host to device."""
    moving_s: float
    """Time in which bytes were on their way: reads, or copies where nothing is read."""
    stall_s: float
    """Time in which computing waited for them."""
    slot_misses: int
    """Blocks that were not where the cycle expects them: a layer skipped or repeated, a pass aborted."""
    read_errors: int

    @property
    def moved_bytes(self) -> int:
        """From where the weights live: what the slowest link carries."""
        return self.read_bytes or self.copied_bytes

    @property
    def hidden_fraction(self) -> float | None:
        """Share of the moving time that computing did not wait for; None if nothing has moved."""
        if self.moving_s <= 0:
            return None
        return min(1.0, max(0.0, 1 - self.stall_s / self.moving_s))


@dataclass(frozen=True, slots=True)
class Span:
    """Something that took time on one thread; seconds of `time.perf_counter`."""

    name: str
    category: str
    thread: str
    start_s: float
    duration_s: float


class Metrics:
    """Counters, and spans while `tracing`.

    Guarantees: every method may be called from any thread; with tracing off a span costs two attribute tests.
    """

    MAX_SPANS = 1_000_000
    """About 200 MB of trace: beyond it spans are dropped and counted, so that a long chat cannot fill the memory."""

    def __init__(self, *, tracing: bool = False) -> None:
        self.tracing = tracing
        self.dropped_spans = 0
        self._trace_until_s = 0.0
        self._counters = Counters()
        self._spans: list[Span] = []
        self._lock = threading.Lock()
        self._reads_in_flight = 0
        self._busy_since_s = 0.0

    def begin_read(self) -> None:
        """A read begins on this thread."""
        with self._lock:
            if self._reads_in_flight == 0:
                self._busy_since_s = time.perf_counter()
            self._reads_in_flight += 1

    def end_read(self) -> None:
        """The read that this thread began has ended, well or not."""
        with self._lock:
            self._reads_in_flight -= 1
            if self._reads_in_flight == 0:
                self._counters.busy_s += time.perf_counter() - self._busy_since_s

    def add(self, **amounts: float) -> None:
        """Add to counters by name."""
        with self._lock:
            for name, amount in amounts.items():
                setattr(self._counters, name, getattr(self._counters, name) + amount)

    def count_block(self) -> None:
        """The same as `add(blocks_run=1)`, for every block: by name it would cost a microsecond."""
        with self._lock:
            self._counters.blocks_run += 1

    def span(self, name: str, category: str, start_s: float) -> None:
        """Record a span that began at `start_s` (of `time.perf_counter`) and ends now."""
        if not self.tracing and time.perf_counter() >= self._trace_until_s:
            return
        span = Span(name, category, threading.current_thread().name, start_s, time.perf_counter() - start_s)
        with self._lock:
            if len(self._spans) < self.MAX_SPANS:
                self._spans.append(span)
            else:
                self.dropped_spans += 1

    def counters(self) -> Counters:
        """A copy that does not change any more."""
        with self._lock:
            copy = Counters(**{field.name: getattr(self._counters, field.name) for field in fields(Counters)})
            if self._reads_in_flight:
                copy.busy_s += time.perf_counter() - self._busy_since_s
            return copy

    def statistics(self) -> Statistics:
        """The counters as users want them."""
        now = self.counters()
        return Statistics(
            passes=now.passes,
            blocks_run=now.blocks_run,
            read_bytes=now.read_bytes,
            copied_bytes=now.copied_bytes,
            moving_s=now.busy_s if now.reads else now.copy_s,
            stall_s=now.stall_s + now.device_stall_s,
            slot_misses=now.slot_misses,
            read_errors=now.read_errors,
        )

    def reset(self) -> None:
        """Start counting from zero; spans are kept."""
        with self._lock:
            self._counters = Counters()
            self._busy_since_s = time.perf_counter()

    def spans(self) -> list[Span]:
        with self._lock:
            return list(self._spans)

    def trace_for(self, seconds: float) -> None:
        """Record spans for so long, for somebody who takes them away again with `take_spans`."""
        self._trace_until_s = time.perf_counter() + seconds

    def take_spans(self) -> list[Span]:
        """The spans so far, which are forgotten; all of them stay if the whole run is traced."""
        with self._lock:
            taken = list(self._spans)
            if not self.tracing:
                self._spans.clear()
            return taken

    def write_trace(self, path: Path) -> None:
        """Write the spans as Chrome trace events, which Perfetto and chrome://tracing open.

        Format: https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU (complete events, "X").
        """
        # Spans are recorded as they end: what encloses others comes after them. Viewers want it before.
        spans = sorted(self.spans(), key=lambda span: (span.start_s, -span.duration_s))
        origin_s = min((span.start_s for span in spans), default=0.0)
        threads = {name: number for number, name in enumerate(dict.fromkeys(span.thread for span in spans), start=1)}
        events: list[dict[str, object]] = [
            {"ph": "M", "pid": 1, "tid": number, "name": "thread_name", "args": {"name": name}}
            for name, number in threads.items()
        ]
        events += [
            {
                "ph": "X",
                "pid": 1,
                "tid": threads[span.thread],
                "name": span.name,
                "cat": span.category,
                "ts": (span.start_s - origin_s) * 1e6,
                "dur": span.duration_s * 1e6,
            }
            for span in spans
        ]
        path.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))
