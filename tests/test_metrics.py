"""Counters add up from any thread, and traces are what trace viewers open."""

from __future__ import annotations

import dataclasses
import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from headrace import metrics as module
from headrace.metrics import Counters, Metrics, Statistics


class Clock:
    """A `perf_counter` that says what it is told."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(module.time, "perf_counter", clock)
    return clock


def in_threads(count: int, work: Callable[[int], None]) -> None:
    """Run `work` in so many threads that all begin at once."""
    together = threading.Barrier(count, timeout=60)

    def begin(number: int) -> None:
        together.wait()
        work(number)

    threads = [threading.Thread(target=begin, args=(number,), name=f"worker-{number}") for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()


# --- counters -------------------------------------------------------------------------------------------------------


def test_counters_begin_at_zero_and_add_up() -> None:
    metrics = Metrics()
    assert metrics.counters() == Counters()
    assert all(value == 0 for value in dataclasses.astuple(metrics.counters()))
    metrics.add(reads=2, read_bytes=100, read_s=0.5)
    metrics.add(reads=1)
    assert metrics.counters() == Counters(reads=3, read_bytes=100, read_s=0.5)


def test_a_counter_that_does_not_exist_is_a_fault_of_ours() -> None:
    with pytest.raises(AttributeError):
        Metrics().add(raeds=1)


def test_a_copy_does_not_change_any_more() -> None:
    metrics = Metrics()
    copy = metrics.counters()
    metrics.add(passes=1)
    assert copy.passes == 0


def test_every_counter_is_copied_and_reset() -> None:
    metrics = Metrics()
    amounts = {field.name: number for number, field in enumerate(dataclasses.fields(Counters), start=1)}
    metrics.add(**amounts)
    assert dataclasses.asdict(metrics.counters()) == amounts
    metrics.reset()
    assert metrics.counters() == Counters()


def test_threads_lose_no_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """The lock is held from the read of a counter to its write: nobody else is inside in between."""
    metrics = Metrics()
    inside: list[bool] = []

    class Watched(Counters):
        def __getattribute__(self, name: str) -> Any:
            if name in ("reads", "read_bytes"):
                inside.append(metrics._lock.locked())
            return super().__getattribute__(name)

    metrics._counters = Watched()
    in_threads(4, lambda number: [metrics.add(reads=1, read_bytes=number) for _ in range(500)] and None)
    assert metrics.counters().reads == 2000
    assert metrics.counters().read_bytes == 500 * (0 + 1 + 2 + 3)
    assert all(inside)


# --- busy time ------------------------------------------------------------------------------------------------------


def test_busy_time_is_time_with_at_least_one_read(clock: Clock) -> None:
    metrics = Metrics()
    metrics.begin_read()
    clock.now_s += 1
    metrics.begin_read()  # overlaps
    clock.now_s += 2
    metrics.end_read()
    clock.now_s += 4
    metrics.end_read()
    clock.now_s += 100  # nothing is read
    metrics.begin_read()
    clock.now_s += 8
    metrics.end_read()
    assert metrics.counters().busy_s == 15


def test_busy_time_counts_the_read_that_is_in_flight(clock: Clock) -> None:
    metrics = Metrics()
    metrics.begin_read()
    clock.now_s += 3
    assert metrics.counters().busy_s == 3
    assert metrics.counters().busy_s == 3, "looking does not add"
    clock.now_s += 1
    metrics.end_read()
    assert metrics.counters().busy_s == 4


def test_a_reset_in_the_middle_of_a_read(clock: Clock) -> None:
    metrics = Metrics()
    metrics.begin_read()
    clock.now_s += 3
    metrics.reset()
    clock.now_s += 2
    assert metrics.counters().busy_s == 2
    metrics.end_read()
    assert metrics.counters().busy_s == 2


# --- spans and traces -----------------------------------------------------------------------------------------------


def test_no_span_without_tracing(clock: Clock) -> None:
    metrics = Metrics()
    metrics.span("layer", "run", 0.0)
    assert metrics.spans() == []
    assert metrics.dropped_spans == 0


def test_a_span_is_from_its_start_until_now(clock: Clock) -> None:
    metrics = Metrics(tracing=True)
    start_s = clock.now_s
    clock.now_s += 0.25
    metrics.span("layer", "run", start_s)
    (span,) = metrics.spans()
    assert (span.name, span.category, span.start_s, span.duration_s) == ("layer", "run", 1000.0, 0.25)
    assert span.thread == threading.current_thread().name
    metrics.reset()
    assert metrics.spans() == [span], "spans are kept"


def test_spans_beyond_the_cap_are_counted(monkeypatch: pytest.MonkeyPatch, clock: Clock) -> None:
    monkeypatch.setattr(Metrics, "MAX_SPANS", 100)
    metrics = Metrics(tracing=True)
    in_threads(4, lambda number: [metrics.span(f"{number}", "run", 0.0) for _ in range(50)] and None)
    assert len(metrics.spans()) == 100
    assert metrics.dropped_spans == 100


def read_trace(path: Path) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Names of threads, and spans; everything that a viewer asks of them holds."""
    document = json.loads(path.read_text(), parse_constant=lambda text: pytest.fail(f"{text} is not JSON"))
    events = document["traceEvents"]
    assert {event["ph"] for event in events} <= {"M", "X"}
    names = [event for event in events if event["ph"] == "M"]
    spans = [event for event in events if event["ph"] == "X"]
    assert all(event["name"] == "thread_name" for event in names)
    known = {(event["pid"], event["tid"]) for event in names}
    assert len(known) == len(names)
    for event in spans:
        assert (event["pid"], event["tid"]) in known
        assert event["ts"] >= 0
        assert event["dur"] >= 0
        assert isinstance(event["name"], str)
        assert isinstance(event["cat"], str)
    assert [event["ts"] for event in spans] == sorted(event["ts"] for event in spans)
    return names, spans


def test_a_trace(tmp_path: Path, clock: Clock) -> None:
    metrics = Metrics(tracing=True)
    clock.now_s = 1002.0
    metrics.span("layers.0", "run", 1001.0)  # ends first, lies inside of the pass
    metrics.span("layers.1", "read", 1000.5)
    clock.now_s = 1003.0
    metrics.span("pass", "pass", 1000.5)
    metrics.write_trace(tmp_path / "trace.json")
    names, spans = read_trace(tmp_path / "trace.json")
    assert [name["args"]["name"] for name in names] == [threading.current_thread().name]
    assert [(span["name"], span["ts"], span["dur"]) for span in spans] == [
        ("pass", 0.0, 2.5e6),  # what encloses comes first
        ("layers.1", 0.0, 1.5e6),
        ("layers.0", 0.5e6, 1.0e6),
    ]


def test_a_trace_of_many_threads(tmp_path: Path) -> None:
    metrics = Metrics(tracing=True)

    def work(number: int) -> None:
        for turn in range(20):
            metrics.span(f'"{number}"\n\u00e9 {turn}', "run", module.time.perf_counter())

    in_threads(3, work)
    metrics.write_trace(tmp_path / "trace.json")
    names, spans = read_trace(tmp_path / "trace.json")
    thread_of = {name["tid"]: name["args"]["name"] for name in names}
    assert sorted(thread_of.values()) == ["worker-0", "worker-1", "worker-2"]
    assert len(spans) == 60
    for span in spans:
        assert thread_of[span["tid"]] == f"worker-{span['name'][1]}"


def test_an_empty_trace(tmp_path: Path) -> None:
    Metrics().write_trace(tmp_path / "trace.json")
    assert read_trace(tmp_path / "trace.json") == ([], [])


def test_spans_are_recorded_for_a_while_and_taken_away(clock: Clock) -> None:
    metrics = Metrics()
    metrics.span("before", "read", clock())
    metrics.trace_for(10.0)
    clock.now_s += 9.0
    metrics.span("within", "read", clock())
    assert [span.name for span in metrics.take_spans()] == ["within"]
    assert metrics.take_spans() == []
    clock.now_s += 1.0
    metrics.span("after", "read", clock())
    assert metrics.spans() == []


def test_taking_spans_leaves_those_of_a_whole_trace(clock: Clock) -> None:
    metrics = Metrics(tracing=True)
    metrics.span("a", "read", clock())
    assert metrics.take_spans() == metrics.spans() != []


# --- statistics ---------------------------------------------------------------------------------------------------


def test_statistics_of_what_comes_from_disk() -> None:
    metrics = Metrics()
    metrics.add(passes=2, reads=3, read_bytes=300, busy_s=4.0, stall_s=1.0, slot_misses=1, read_errors=2)
    metrics.count_block()
    assert metrics.statistics() == Statistics(
        passes=2,
        blocks_run=1,
        read_bytes=300,
        copied_bytes=0,
        moving_s=4.0,
        stall_s=1.0,
        slot_misses=1,
        read_errors=2,
    )
    assert metrics.statistics().moved_bytes == 300
    assert metrics.statistics().hidden_fraction == 0.75


def test_statistics_of_what_comes_from_host_memory() -> None:
    metrics = Metrics()
    metrics.add(copies=1, copied_bytes=100, copy_s=2.0, device_stall_s=0.5)
    now = metrics.statistics()
    assert (now.moved_bytes, now.moving_s, now.stall_s, now.hidden_fraction) == (100, 2.0, 0.5, 0.75)


def test_a_share_is_neither_below_0_nor_above_1_and_none_if_nothing_moved() -> None:
    metrics = Metrics()
    assert metrics.statistics().hidden_fraction is None
    metrics.add(reads=1, busy_s=1.0, stall_s=5.0)
    assert metrics.statistics().hidden_fraction == 0.0
    metrics.add(stall_s=-5.0)
    assert metrics.statistics().hidden_fraction == 1.0
