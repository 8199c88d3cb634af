"""What was asked for, what was done and what has moved: the record that users see. No torch."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

from headrace.core import Bound, Plan
from headrace.metrics import Counters


@dataclass(frozen=True, slots=True)
class Category:
    """Bytes of one kind: as planned, as done, and as taken from the system for it."""

    name: str
    """resident, buffers (a part of it), disk, host, ring or staging."""
    requested_bytes: int
    applied_bytes: int
    allocated_bytes: int


@dataclass(frozen=True, slots=True)
class Report:
    """What was asked for and what was done, in bytes; tied weights are counted once."""

    backend: str
    requested_bytes: int | None
    """The memory budget; None if none was given."""
    resident_bytes: int
    """Weights that stay in memory, and buffers."""
    offloaded_bytes: int
    """Weights that live elsewhere: on disk, or in host memory beside a device."""
    looked_up_bytes: int
    """Part of the offloaded: tables of which only rows are read."""
    ring_bytes: int
    """Allocated for blocks that move."""
    staging_bytes: int
    """Host memory that bytes from disk pass through."""
    host_bytes: int
    """Host memory taken on behalf of a device: weights that live there, and staging."""
    buffer_bytes: int
    """Part of the resident ones."""
    net_saving_bytes: int
    """Offloaded minus ring: what offloading really saves."""
    peak_memory_bytes: int
    """Largest resident set of the process so far."""
    counters: Counters
    plan: Plan
    fallbacks: tuple[str, ...]
    categories: tuple[Category, ...] = ()
    """What was planned, done and allocated, by kind; of a module given to offload()."""

    @property
    def bound(self) -> Bound:
        """The plan's bound, with the disk's rate of this run where it was faster than the probe before it."""
        counters = self.counters
        seen = counters.read_bytes / counters.busy_s if counters.busy_s > 0 else 0.0
        planned = self.plan.bound
        return replace(planned, link_bytes_per_s=max(planned.link_bytes_per_s, seen))

    @property
    def read_bytes_per_pass(self) -> float:
        return self.counters.read_bytes / self.counters.passes if self.counters.passes else 0.0

    def to_json(self) -> dict[str, Any]:
        """The same as plain data, with both bounds: the planned one and the one of this run."""
        data = asdict(self)
        data["plan"]["bound"] = self.plan.bound.to_json()
        data["plan"]["memory"]["total_bytes"] = self.plan.memory.total_bytes
        return data | {"bound": self.bound.to_json(), "read_bytes_per_pass": self.read_bytes_per_pass}
