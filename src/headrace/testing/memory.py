"""Who wrote and who read each byte last: finds accesses that nothing orders. Knows addresses, no data and no torch."""

from __future__ import annotations

import bisect
import ctypes
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from headrace.testing.order import Moment, Timeline

POISON = 0xFF
"""NaN in every floating-point type, -1 in signed integers."""


def poison(address: int, nbytes: int) -> None:
    """Spoil these bytes: no result that depends on them looks right."""
    ctypes.memset(address, POISON, nbytes)


@dataclass(slots=True)
class _Span:
    """Bytes with one history: `begin` up to where the next one begins."""

    begin: int
    write: Moment | None
    reads: dict[Timeline, Moment] = field(default_factory=dict)
    """The last of each timeline since `write`; those before it on the same timeline come before it."""


class History:
    """The last write of every byte, and the reads since."""

    def __init__(self, nbytes: int, write: Moment | None) -> None:
        self.nbytes = nbytes
        self._spans = [_Span(0, write)]

    def read(self, begin: int, end: int, moment: Moment) -> list[Moment | None]:
        """`moment` reads these bytes: the writes that do not come before it, None where nobody wrote."""
        conflicts: list[Moment | None] = []
        for span in self._cover(begin, end):
            if span.write is None or not span.write.before(moment):
                conflicts.append(span.write)
            span.reads[moment.timeline] = moment
        return conflicts

    def write(self, begin: int, end: int, moment: Moment) -> list[Moment]:
        """`moment` writes these bytes: the reads and writes that do not come before it."""
        conflicts = []
        covered = self._cover(begin, end)
        for span in covered:
            accesses: Iterable[Moment | None] = (*span.reads.values(), span.write)
            conflicts += [access for access in accesses if access is not None and not access.before(moment)]
        if covered:
            first = self._spans.index(covered[0])
            self._spans[first : first + len(covered)] = [_Span(begin, moment)]
        return conflicts

    def _cover(self, begin: int, end: int) -> list[_Span]:
        """The spans of exactly these bytes, cut where they have to be."""
        if begin == end:
            return []
        first, last = self._cut(begin), self._cut(end)
        return self._spans[first:last]

    def _cut(self, at: int) -> int:
        """The index of the span that begins at `at`, which is made if need be."""
        if at == self.nbytes:
            return len(self._spans)
        index = bisect.bisect_right(self._spans, at, key=lambda span: span.begin) - 1
        span = self._spans[index]
        if span.begin == at:
            return index
        self._spans.insert(index + 1, _Span(at, span.write, dict(span.reads)))
        return index + 1


@dataclass(eq=False, slots=True)
class Region:
    """A piece of device memory, or of page-locked host memory."""

    name: str
    address: int
    nbytes: int
    began: Moment
    """When it was allocated or page-locked."""
    history: History
    keep: object
    """What owns the bytes."""
    on_host: bool = False
    ended: Moment | None = None
    """When it was freed or unlocked."""

    def holds(self, address: int, nbytes: int) -> bool:
        return self.address <= address and address + nbytes <= self.address + self.nbytes

    def place(self, address: int, nbytes: int) -> str:
        begin = address - self.address
        return f"{self.name} [{begin}:{begin + nbytes}]"


class Regions:
    """Regions by address."""

    def __init__(self) -> None:
        self._sorted: list[Region] = []

    def add(self, region: Region) -> None:
        bisect.insort(self._sorted, region, key=lambda other: other.address)

    def remove(self, region: Region) -> None:
        self._sorted.remove(region)

    def find(self, address: int, nbytes: int) -> Region | None:
        """The region that holds all of these bytes."""
        index = bisect.bisect_right(self._sorted, address, key=lambda region: region.address) - 1
        if index < 0 or not self._sorted[index].holds(address, nbytes):
            return None
        return self._sorted[index]

    def __iter__(self) -> Iterator[Region]:
        return iter(self._sorted)
