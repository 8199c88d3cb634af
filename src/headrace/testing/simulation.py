"""The rules that all parts share: what is put where, what the host knows, what is reported. Knows no torch, no seam."""

from __future__ import annotations

import ctypes
import threading
import zlib
from collections.abc import Callable
from dataclasses import dataclass

from headrace.testing.memory import Region
from headrace.testing.order import Hazard, Moment, Timeline
from headrace.testing.queues import Operation, Policy, Queue, Scheduler

CHECKSUM_BYTES = 4 * 2**20
"""Sources of copies up to here are compared with what they were."""


@dataclass(frozen=True, slots=True)
class _Watched:
    """The source of a copy, until the host knows that it was copied."""

    copy: Operation
    address: int
    nbytes: int
    checksum: int
    keep: object


class Simulation:
    """What the host asked for, in which order, and what it knows to have happened. Callers hold `lock`."""

    def __init__(self, policy: Policy, seed: int, *, raise_at_once: bool) -> None:
        self.lock = threading.RLock()
        self.scheduler = Scheduler(policy, seed)
        self.host = Timeline("the host")
        self.host_s = 0.0
        self.link_free_s = 0.0
        self.hazards: list[Hazard] = []
        self.raise_at_once = raise_at_once
        self._numbers = 0
        self._watched: list[_Watched] = []

    # --- what happens ---------------------------------------------------------------------------------------------

    def put(
        self,
        queue: Queue,
        what: str,
        *,
        after: Operation | None = None,
        steps: tuple[Callable[[], None], ...] = (),
        cost_s: float = 0.0,
        over_link: bool = False,
    ) -> Operation:
        """Put something on a stream: after what is there, after `after`, and after all that the host knows."""
        queue.learn(self.host.known)
        start_s = max(queue.free_s, self.host_s, self.link_free_s if over_link else 0.0)
        if after is not None:
            queue.learn(after.known)
            start_s = max(start_s, after.end_s)
        number, time, known = self._next(queue)
        operation = Operation(number, what, queue, time, known, queue=queue, after=after, steps=steps)
        operation.start_s, operation.end_s = start_s, start_s + cost_s
        queue.free_s = operation.end_s
        queue.busy_s += cost_s
        if over_link:
            self.link_free_s = operation.end_s
        self.scheduler.put(operation)
        return operation

    def on_host(self, what: str) -> Moment:
        """Something that the host does itself, now."""
        number, time, known = self._next(self.host)
        return Moment(number, what, self.host, time, known)

    def _next(self, timeline: Timeline) -> tuple[int, int, dict[Timeline, int]]:
        self._numbers += 1
        timeline.time += 1
        timeline.known[timeline] = timeline.time
        return self._numbers, timeline.time, dict(timeline.known)

    # --- what the host knows --------------------------------------------------------------------------------------

    def wait(self, operation: Operation) -> None:
        """The host waits for `operation`."""
        self.scheduler.finish(operation)
        self.learn(operation)

    def learn(self, operation: Operation) -> None:
        """The host has seen that `operation` has happened."""
        self.host.learn(operation.known)
        self.host_s = max(self.host_s, operation.end_s)
        known = [watched for watched in self._watched if self.host.knows(watched.copy)]
        self._watched = [watched for watched in self._watched if not self.host.knows(watched.copy)]
        for watched in known:
            if _checksum(watched.address, watched.nbytes) != watched.checksum:
                seen = self.on_host("look at what was copied, which is not there any more")
                why = "the bytes to copy changed before the host knew that they were copied"
                self.report("source-changed-while-copied", why, seen, watched.copy)

    def watch(self, copy: Operation, address: int, nbytes: int, keep: object) -> None:
        """The bytes that `copy` reads must stay as they are until the host knows that it has happened."""
        if nbytes <= CHECKSUM_BYTES:
            self._watched.append(_Watched(copy, address, nbytes, _checksum(address, nbytes), keep))

    # --- what is wrong --------------------------------------------------------------------------------------------

    def report(self, kind: str, why: str, later: Moment, earlier: Moment | None = None) -> None:
        hazard = Hazard(kind, why, later, earlier)
        self.hazards.append(hazard)
        if self.raise_at_once:
            raise hazard

    def access(
        self, moment: Moment, region: Region, address: int, nbytes: int, *, reads: bool = False, writes: bool = False
    ) -> None:
        """`moment` uses these bytes: report what it may collide with."""
        place = region.place(address, nbytes)
        if region.ended is not None:
            self.report("use-after-free", f"{place} is not there any more", moment, region.ended)
            return
        begin = address - region.address
        if reads:
            for write in region.history.read(begin, begin + nbytes, moment)[:1]:
                if write is None:
                    self.report("never-written", f"{place} has bytes that nobody wrote", moment)
                else:
                    self.report("read-before-ready", f"{place} is read without waiting for its writer", moment, write)
        if writes:
            for use in region.history.write(begin, begin + nbytes, moment)[:1]:
                by_host = region.on_host and moment.timeline is self.host
                kind = "source-changed-while-copied" if by_host else "write-while-in-use"
                self.report(kind, f"{place} is written without waiting for its last use", moment, use)

    def end(self, moment: Moment, region: Region) -> None:
        """`moment` frees or unlocks `region`, which nothing may be using."""
        for use in region.history.write(0, region.nbytes, moment)[:1]:
            self.report("use-after-free", f"the host does not know that {region.name} is not in use", moment, use)
        region.ended = moment


def _checksum(address: int, nbytes: int) -> int:
    return zlib.crc32((ctypes.c_char * nbytes).from_address(address))
