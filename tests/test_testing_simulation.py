"""What is reported is exactly what nothing orders, and what is not reported is computed right."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from device_programs import PAGE, slab_of
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.testing import Hazard, SimulatedAccelerator
from headrace.testing.device import SimulatedEvent, SimulatedStream

STREAMS, EVENTS, BYTES = 3, 3, 6

Step = tuple[str, list[int]]
"""copy: stream, first byte, bytes; record, wait: stream, event; host waits: event."""


def step(what: str, *numbers: st.SearchStrategy[int]) -> st.SearchStrategy[Step]:
    return st.tuples(st.just(what), st.tuples(*numbers).map(list))


stream, event = st.integers(0, STREAMS - 1), st.integers(0, EVENTS - 1)
copies = step("copy", stream, st.integers(0, BYTES - 2), st.integers(1, 2))
orders = step("record", stream, event) | step("wait", stream, event)
programs = st.lists(copies | copies | orders | orders | step("host waits", event), min_size=5, max_size=25)


@dataclass
class Oracle:
    """Which operations surely come before which: by walking back through what each one follows, step by step."""

    follows: list[set[int]] = field(default_factory=list)
    streams: dict[int, int] = field(default_factory=dict)
    """The last operation of each."""
    events: dict[int, int] = field(default_factory=dict)
    """What each was recorded after."""
    host: set[int] = field(default_factory=set)
    """What the host has seen done."""

    def add(self, stream: int, *others: int) -> int:
        before = {self.streams[stream]} if stream in self.streams else set()
        self.follows.append(before | self.host | set(others))
        self.streams[stream] = len(self.follows) - 1
        return len(self.follows) - 1

    def before(self, operation: int) -> set[int]:
        seen: set[int] = set()
        left = list(self.follows[operation])
        while left:
            if (one := left.pop()) not in seen:
                seen.add(one)
                left.extend(self.follows[one])
        return seen


def first_race(program: list[Step]) -> int | None:
    """The index of the first step that collides with an earlier one."""
    oracle = Oracle()
    written: list[tuple[int, range]] = []
    for index, (what, rest) in enumerate(program):
        if what == "copy":
            stream, begin, nbytes = rest
            operation = oracle.add(stream)
            known = oracle.before(operation)
            target = range(begin, begin + nbytes)
            if any(other not in known and set(target) & set(place) for other, place in written):
                return index
            written.append((operation, target))
        elif what == "record":
            oracle.events[rest[1]] = oracle.add(rest[0])
        elif what == "wait" and rest[1] in oracle.events:
            oracle.add(rest[0], oracle.events[rest[1]])
        elif what == "host waits" and rest[0] in oracle.events:
            oracle.host.add(oracle.events[rest[0]])
    return None


class Play:
    """The same program on the simulated accelerator; every copy brings bytes of its own."""

    def __init__(self, seed: int, policy: str) -> None:
        self.device = SimulatedAccelerator(seed, policy=policy)  # type: ignore[arg-type]
        self.streams: list[SimulatedStream] = [self.device.new_stream() for _ in range(STREAMS)]
        self.events: list[SimulatedEvent] = [self.device.new_event() for _ in range(EVENTS)]
        self.memory = self.device.allocate(BYTES)
        self.expected = [255] * BYTES

    def step(self, number: int, what: str, rest: list[int]) -> None:
        if what == "copy":
            stream, begin, nbytes = rest
            self.expected[begin : begin + nbytes] = [number] * nbytes
            target, source = self.memory[begin : begin + nbytes], self.sources[number, :nbytes]
            self.device.copy(target, source, self.streams[stream], page_locked=True)
        elif what == "record":
            self.events[rest[1]].record(self.streams[rest[0]])
        elif what == "wait":
            self.streams[rest[0]].wait(self.events[rest[1]])
        else:
            self.events[rest[0]].wait_done()

    def run(self, program: list[Step]) -> int | None:
        """The index of the first step that is reported."""
        slab = slab_of(0, PAGE)
        assert self.device.page_lock(slab) is None
        self.sources = slab.bytes[: len(program) * BYTES].view(len(program), BYTES)
        for number in range(len(program)):
            self.sources[number].fill_(number)
        for number, step in enumerate(program):
            try:
                self.step(number, *step)
            except Hazard as hazard:
                assert hazard.kind == "write-while-in-use"
                return number
        self.device.wait_idle()
        assert self.memory.tolist() == self.expected
        self.device.unlock(slab)
        self.device.free(self.memory)
        self.device.check()
        return None


@pytest.mark.slow
@settings(max_examples=1000)
@given(programs, st.integers(0, 2**32), st.sampled_from(["random", "late", "early"]))
def test_a_race_is_reported_at_the_step_that_makes_it_and_nothing_else_is(
    program: list[Step], seed: int, policy: str
) -> None:
    """And if there is none, memory holds at the end what it would if each copy had happened at once."""
    assert Play(seed, policy).run(program) == first_race(program)
