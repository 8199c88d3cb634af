"""Copies from host memory to device memory. Knows no graphs and no seam."""

from __future__ import annotations

import ctypes
import functools

import torch

from headrace.testing.buffers import PageLocks
from headrace.testing.memory import Regions, poison
from headrace.testing.operators import extent
from headrace.testing.queues import Operation, Queue
from headrace.testing.simulation import Simulation


class Copies:
    """The copies that were asked for, over one link."""

    def __init__(
        self, simulation: Simulation, buffers: Regions, page_locks: PageLocks, latency_s: float, bytes_per_s: float
    ) -> None:
        self.count = 0
        self.nbytes = 0
        self._simulation = simulation
        self._buffers = buffers
        self._page_locks = page_locks
        self._latency_s = latency_s
        self._bytes_per_s = bytes_per_s

    def put(
        self, target: torch.Tensor, source: torch.Tensor, page_locked: bool, queue: Queue, after: Operation | None
    ) -> Operation:
        """Put a copy on a stream; see that both of its ends are what they have to be."""
        address, nbytes = extent(target)
        origin, _ = extent(source)
        region = self._buffers.find(address, nbytes)
        source_region = self._page_locks.regions.find(origin, nbytes)
        to = region.place(address, nbytes) if region else "elsewhere"
        steps = (functools.partial(poison, address, nbytes), functools.partial(_move, target, source))
        cost_s = self._latency_s + nbytes / self._bytes_per_s
        what = f"copy of {nbytes} bytes to {to}"
        copy = self._simulation.put(queue, what, after=after, steps=steps, cost_s=cost_s, over_link=True)
        queue.last_copy = copy
        self.count += 1
        self.nbytes += nbytes
        if page_locked:
            self._simulation.watch(copy, origin, nbytes, source)
            if source_region is None:
                why = "the source is not page-locked"
                self._simulation.report("not-page-locked", why, copy, self._page_locks.ended(origin))
        if source_region is not None:
            self._simulation.access(copy, source_region, origin, nbytes, reads=True)
        if region is None:
            self._simulation.report("out-of-bounds", "the target is not inside of one allocation", copy)
        else:
            self._simulation.access(copy, region, address, nbytes, writes=True)
        return copy


def _move(target: torch.Tensor, source: torch.Tensor) -> None:
    ctypes.memmove(target.data_ptr(), source.data_ptr(), target.numel())
