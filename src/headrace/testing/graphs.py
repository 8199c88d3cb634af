"""Graphs: what is put on streams while they are captured, to be put there again. Knows no schedule and no memory.

The rules are those of CUDA's stream capture (CUDA programming guide, "Creating a Graph Using Stream Capture"): a stream
that waits for an event of the capture joins it, and must be joined again at the end; nothing in it may depend on what
happens outside; the host waits for nothing.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from headrace.testing.memory import poison
from headrace.testing.operators import Call, extent, tensors_in
from headrace.testing.order import Moment, Timeline
from headrace.testing.queues import Operation, Queue

Put = Callable[[Queue, Operation | None], Operation]
"""Puts something on a stream, after an operation of another one."""


@dataclass(eq=False, slots=True, kw_only=True)
class Node(Moment):
    """One thing that was put on a captured stream."""

    capture: Capture
    put: Put
    after: Node | None


class Capture:
    """The streams being captured and what was put on them so far."""

    def __init__(self, origin: Queue, began: Moment) -> None:
        self.origin = origin
        self.began = began
        self.nodes: list[Node] = []
        self.active = True
        self._branches = {origin: Timeline(f"{origin.name} (captured)")}
        self._undo: list[Callable[[], None]] = []

    def has(self, queue: Queue) -> bool:
        return self.active and queue in self._branches

    def add(self, queue: Queue, what: str, put: Put, after: Node | None = None) -> Node:
        """Capture something on `queue`, which joins the capture if it was not part of it."""
        branch = self._branches.setdefault(queue, Timeline(f"{queue.name} (captured)"))
        if after is not None:
            branch.learn(after.known)
        branch.time += 1
        branch.known[branch] = branch.time
        node = Node(len(self.nodes), what, branch, branch.time, dict(branch.known), capture=self, put=put, after=after)
        self.nodes.append(node)
        return node

    def run(self, call: Call) -> tuple[Any, list[torch.Tensor]]:
        """The result of an operator that is only captured, and the tensors in it that a replay has to fill.

        It does run, for shapes and strides to be right; at the end of the capture what it wrote is put back, and its
        results become poison, since on a device nothing has happened yet.
        """
        used = [access.tensor for access in call.accesses()]
        for access in call.accesses():
            if access.writes:
                self._undo.append(_restorer(*extent(access.tensor), access.tensor))
        result = call.run()
        storages = {tensor.untyped_storage().data_ptr() for tensor in used}
        fresh = [tensor for tensor in tensors_in(result) if tensor.untyped_storage().data_ptr() not in storages]
        for tensor in fresh:
            self._undo.append(_poisoner(*extent(tensor), tensor))
        return result, fresh

    def end(self) -> None:
        self.active = False
        for undo in reversed(self._undo):
            undo()
        self._undo.clear()

    def unjoined(self) -> Node | None:
        """The last thing on a stream that the origin does not wait for."""
        known = self._branches[self.origin].known
        last = {node.timeline: node for node in self.nodes}
        return next((node for branch, node in last.items() if known.get(branch, 0) < node.time), None)


class Graph:
    """What a capture caught; `replay` puts it on the current stream again."""

    def __init__(self, capture: Capture, current: Callable[[], Queue], branch: Callable[[str], Queue]) -> None:
        self._capture = capture
        self._current = current
        self._branch = branch
        self._queues: dict[Timeline, Queue] = {}

    def replay(self) -> None:
        """Do again what was captured, after what is on the current stream and before what comes on it next."""
        assert not self._capture.active, "the capture has not ended"
        origin = self._capture.nodes[0].timeline if self._capture.nodes else None
        put: dict[Node | None, Operation | None] = {None: None}
        for node in self._capture.nodes:
            if node.timeline is origin:
                queue = self._current()
            elif node.timeline not in self._queues:
                queue = self._queues[node.timeline] = self._branch(f"{node.timeline.name}, replayed")
            else:
                queue = self._queues[node.timeline]
            put[node] = node.put(queue, put[node.after])


def refill(call: Call, outputs: list[torch.Tensor]) -> None:
    """Run a captured operator again, into the tensors that its first run gave."""
    for old, new in zip(outputs, _fresh(call), strict=True):
        assert extent(old)[1] == extent(new)[1], f"{call.name} gave another shape than when it was captured"
        ctypes.memmove(*(extent(old)[0], *extent(new)))


def _fresh(call: Call) -> list[torch.Tensor]:
    storages = {access.tensor.untyped_storage().data_ptr() for access in call.accesses()}
    with torch.inference_mode():  # what was captured lies below autograd
        result = call.run()
    return [tensor for tensor in tensors_in(result) if tensor.untyped_storage().data_ptr() not in storages]


def _restorer(address: int, nbytes: int, keep: object) -> Callable[[], None]:
    before = ctypes.string_at(address, nbytes)

    def restore() -> None:
        assert keep is not None
        ctypes.memmove(address, before, nbytes)

    return restore


def _poisoner(address: int, nbytes: int, keep: object) -> Callable[[], None]:
    def spoil() -> None:
        assert keep is not None
        poison(address, nbytes)

    return spoil
