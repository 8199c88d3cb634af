"""What happens in which order: vector clocks over streams and the host. Knows no memory, no torch and no time.

The host is one timeline however many threads it has: locks cannot be seen from here, so what one thread did before
another did something counts as ordered. Streams are ordered by what the rules of `copying.device` order, and by nothing
else.
"""

from __future__ import annotations

import functools
import sys
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, FrameType

SHOWN_FRAMES = 3
_OURS = str(Path(__file__).parent)
_NOT_SHOWN = ("/torch/", "/contextlib.py", "/functools.py", "<")


class Timeline:
    """What happens one after the other: the work of a stream, or what the host does."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.time = 0
        """How many moments there were."""
        self.known: dict[Timeline, int] = {}
        """Up to which time of each timeline everything has happened before what comes next on this one."""

    def learn(self, known: dict[Timeline, int]) -> None:
        """What comes next here comes after all of this too."""
        for timeline, time in known.items():
            if time > self.known.get(timeline, 0):
                self.known[timeline] = time

    def knows(self, moment: Moment) -> bool:
        """Whether everything from now on comes after `moment`."""
        return self.known.get(moment.timeline, 0) >= moment.time


@dataclass(eq=False, slots=True)
class Moment:
    """Something that happens on a timeline, and what has surely happened before it."""

    number: int
    """In the order in which the host asked for it."""
    what: str
    timeline: Timeline
    time: int
    known: dict[Timeline, int]
    frames: tuple[tuple[CodeType, int], ...] = field(default_factory=lambda: callers())

    def before(self, other: Moment) -> bool:
        """Whether this has happened, on every device and with any luck, when `other` begins."""
        return other.known.get(self.timeline, 0) >= self.time

    @property
    def where(self) -> str:
        """The lines that asked for it, innermost first."""
        places = (f"{Path(code.co_filename).name}:{line} in {code.co_name}" for code, line in self.frames)
        return " < ".join(places) or "nowhere"

    def __str__(self) -> str:
        return f"#{self.number} {self.what} on {self.timeline.name}, asked for at {self.where}"


@functools.cache
def _shown(file: str) -> bool:
    return not (file.startswith(_OURS) or any(part in file for part in _NOT_SHOWN))


def callers() -> tuple[tuple[CodeType, int], ...]:
    """The innermost lines of the calling thread that are neither ours nor torch's."""
    frames: list[tuple[CodeType, int]] = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and len(frames) < SHOWN_FRAMES:
        file = frame.f_code.co_filename
        if _shown(file):
            frames.append((frame.f_code, frame.f_lineno))
        frame = frame.f_back
    return tuple(frames)


class Hazard(AssertionError):
    """Two operations that only luck keeps apart, or one that breaks a rule another one made.

    `kind` is one of `KINDS`; `earlier` and `later` are the two sides, in the order in which the host asked for them.
    """

    def __init__(self, kind: str, why: str, later: Moment, earlier: Moment | None = None) -> None:
        assert kind in KINDS, kind
        self.kind = kind
        self.later = later
        self.earlier = earlier
        before = f"\n  earlier: {earlier}" if earlier else ""
        super().__init__(f"{kind}: {why}.{before}\n  later:   {later}")


KINDS = {
    "read-before-ready": "something reads bytes, and nothing makes it wait for the one that writes them",
    "write-while-in-use": "something writes bytes, and nothing makes it wait for those that use them",
    "use-after-free": "memory is used after it was freed or unlocked, or that happens while it may still be in use",
    "never-written": "something reads bytes that nobody wrote",
    "source-changed-while-copied": "the host writes to memory, and nothing tells it that a copy from it is done",
    "not-page-locked": "a copy relies on page-locked memory that is not",
    "out-of-bounds": "a copy's ends are not inside of one piece of memory",
    "never-waited-for": "at the end a copy may still be under way",
    "leak": "at the end memory is still allocated, or page-locked",
    "capture-isolation": "cudaErrorStreamCaptureIsolation: a captured stream depends on work outside of the capture",
    "capture-unjoined": "cudaErrorStreamCaptureUnjoined: a stream forked into a capture was not joined again",
    "captured-event": "cudaErrorCapturedEvent: an event recorded in a capture is waited for outside of it",
    "capture-unsupported": "cudaErrorStreamCaptureUnsupported: the host waits for what is only being captured",
}
