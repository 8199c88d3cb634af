"""Histories of bytes: what a history of ranges says is what one of single bytes would."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.testing.memory import History, Region, Regions
from headrace.testing.order import Moment, Timeline

BYTES = 8


class ByteByByte:
    """A history that keeps every access to every byte for good."""

    def __init__(self) -> None:
        self.accesses: list[list[tuple[str, Moment]]] = [[] for _ in range(BYTES)]

    def access(self, what: str, begin: int, end: int, moment: Moment) -> set[Moment | None]:
        conflicts: set[Moment | None] = set()
        for accesses in self.accesses[begin:end]:
            writes = [number for number, (kind, _) in enumerate(accesses) if kind == "write"]
            if what == "read":
                # The last write alone: one before it collided with the last write itself, if with anything.
                relevant = accesses[writes[-1] : writes[-1] + 1] if writes else []
                conflicts |= set() if writes else {None}
            else:
                relevant = accesses[writes[-1] if writes else 0 :]
            conflicts |= {other for _, other in relevant if not other.before(moment)}
            accesses.append((what, moment))
        return conflicts


ranges = st.tuples(st.integers(0, BYTES), st.integers(0, BYTES)).map(sorted)
accesses = st.tuples(st.sampled_from(["read", "write"]), ranges, st.integers(0, 2), st.booleans())


@settings(max_examples=300)
@given(st.lists(accesses, max_size=20))
def test_a_history_of_ranges_is_one_of_bytes(steps: list[tuple[str, list[int], int, bool]]) -> None:
    timelines = [Timeline(f"timeline {number}") for number in range(3)]
    history, oracle = History(BYTES, None), ByteByByte()
    for number, (what, (begin, end), which, learns) in enumerate(steps):
        timeline = timelines[which]
        if learns:
            timeline.learn(timelines[which - 1].known)
        timeline.time += 1
        timeline.known[timeline] = timeline.time
        moment = Moment(number, what, timeline, timeline.time, dict(timeline.known))
        found = history.read(begin, end, moment) if what == "read" else history.write(begin, end, moment)
        expected = oracle.access(what, begin, end, moment)
        latest = {(other.timeline, other.time) for other in expected if other is not None}
        # Of one timeline the last read is enough: whoever comes after that one comes after those before it.
        assert {other for other in found if other is None} == {other for other in expected if other is None}
        assert {(other.timeline, other.time) for other in found if other is not None} <= latest
        assert {other.timeline for other in found if other is not None} == {timeline for timeline, _ in latest}


def test_regions_are_found_by_what_they_hold_whole() -> None:
    began = Moment(0, "begin", Timeline("the host"), 0, {})
    first, second = (Region(f"at {at}", at, 10, began, History(10, None), None) for at in (100, 120))
    regions = Regions()
    regions.add(second)
    regions.add(first)
    assert list(regions) == [first, second]
    assert regions.find(100, 10) is first
    assert regions.find(129, 1) is second
    assert [regions.find(*place) for place in ((99, 1), (105, 6), (110, 1), (120, 11), (130, 1))] == [None] * 5
    regions.remove(first)
    assert regions.find(100, 10) is None
    assert first.place(103, 4) == "at 100 [3:7]"
