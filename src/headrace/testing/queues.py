"""Streams, events, and the scheduler that decides when what is queued really happens. Knows no memory and no torch.

Two things are kept apart: *when* an operation happens here, which is the scheduler's whim, and how long it would take
on a device (`start_s`, `end_s`), which follows from the order alone.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

from headrace.testing.order import Moment, Timeline

Policy = Literal["random", "late", "early"]


@dataclass(eq=False, slots=True, kw_only=True)
class Operation(Moment):
    """Something on a stream. It has happened when no step is left."""

    queue: Queue
    after: Operation | None = None
    """Of another stream, besides what is before it on its own."""
    steps: tuple[Callable[[], None], ...] = ()
    done: bool = False
    start_s: float = 0.0
    end_s: float = 0.0


class Queue(Timeline):
    """The work of one stream that has not happened yet."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.pending: deque[Operation] = deque()
        self.last: Operation | None = None
        self.last_copy: Operation | None = None
        self.busy_s = 0.0
        """What its operations take together."""
        self.free_s = 0.0
        """When the last operation ends."""


class Scheduler:
    """Runs pending operations: those that something waits for, and others as `policy` wants.

    `late`: nothing before it must. `early`: everything at once. `random`: in between, the same for the same seed.
    """

    def __init__(self, policy: Policy, seed: int) -> None:
        self.policy = policy
        self._random = random.Random(seed)
        self._eagerness = self._random.choice((0.2, 0.5, 0.8))
        self.queues: list[Queue] = []

    def put(self, operation: Operation) -> None:
        operation.queue.pending.append(operation)
        operation.queue.last = operation

    def finish(self, operation: Operation) -> None:
        """Let `operation` happen, and before it everything that has to."""
        while not operation.done:
            self.step_towards(operation)

    def step_towards(self, operation: Operation) -> None:
        """One step of what `operation` has to wait for, or of itself."""
        head = operation.queue.pending[0]
        while head.after is not None and not head.after.done:
            head = head.after.queue.pending[0]
        self._step(head)

    def some(self) -> None:
        """Let happen what nothing waits for, as the policy wants."""
        if self.policy == "late":
            return
        while ready := list(self._ready()):
            if self.policy == "random" and self._random.random() > self._eagerness:
                return
            self._step(ready[0] if self.policy == "early" else self._random.choice(ready))

    def everything(self) -> None:
        while ready := list(self._ready()):
            self._step(self._random.choice(ready))

    def _ready(self) -> Iterator[Operation]:
        for queue in self.queues:
            if queue.pending and (queue.pending[0].after is None or queue.pending[0].after.done):
                yield queue.pending[0]

    def _step(self, operation: Operation) -> None:
        if operation.steps:
            step, *rest = operation.steps
            operation.steps = tuple(rest)
            step()
        if not operation.steps:
            assert operation.queue.pending.popleft() is operation
            operation.done = True
            operation.after = None  # or every operation would keep all those before it
