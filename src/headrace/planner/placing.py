"""Which of the weights that leave the device stay in host memory, and which go on to disk. Pure; no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from headrace import errors
from headrace.core import BlockShape, HostPlan, align_up
from headrace.cuts import Cut, moved_bytes, slot_bytes
from headrace.planner.costs import Demand

RING_SLOTS = 2
"""Of the host, for what comes from disk: one block is copied on while the next is read."""


@dataclass(frozen=True, slots=True)
class Placement:
    """Where what is not on the device lives."""

    host: HostPlan
    on_host: Cut
    """Of what is streamed."""
    disk_bytes: int
    """Streamed from disk on every pass."""


def place(blocks: Sequence[BlockShape], cut: Cut, tables: Sequence[BlockShape], demand: Demand) -> Placement:
    """The most that the host's budget holds of what is streamed; the rest of it, and tables that do not fit, on disk.

    Largest parameters first; where equal ones do not all fit, those on disk are spread over the pass.

    Raises: HostBudgetTooSmall.
    """
    streamed = moved_bytes(blocks, cut)
    looked_up = sum(block.nbytes for block in tables)
    fixed = demand.host_baseline_bytes + demand.staging_bytes
    if demand.host_bytes is None or demand.host_bytes >= fixed + streamed + looked_up:
        host = HostPlan(demand.host_baseline_bytes, streamed + looked_up, 0, demand.staging_bytes)
        return Placement(host, dict(cut), 0)
    # The ring for what is read from disk holds the largest block that any choice could leave there: then the room
    # for weights does not depend on which ones are chosen.
    ring = RING_SLOTS * slot_bytes(blocks, cut)
    room = demand.host_bytes - fixed - ring
    if room < 0:
        raise errors.HostBudgetTooSmall(
            host_bytes=demand.host_bytes,
            needed_bytes=align_up(fixed + ring, 2**20),
            baseline_bytes=demand.host_baseline_bytes,
            ring_bytes=ring,
            staging_bytes=demand.staging_bytes,
        )
    kept, room = _fill(blocks, cut, room)
    tables_bytes = looked_up if looked_up <= room else 0
    tier = moved_bytes(blocks, kept)
    host = HostPlan(demand.host_baseline_bytes, tier + tables_bytes, ring, demand.staging_bytes)
    return Placement(host, kept, streamed - tier)


def _fill(blocks: Sequence[BlockShape], cut: Cut, room: int) -> tuple[Cut, int]:
    moving = [
        (param.nbytes, position, param.name, block.name)
        for position, block in enumerate(blocks)
        for param in block.params
        if param.name in cut.get(block.name, ())
    ]
    moving.sort(key=lambda item: (-item[0], _spread(item[1])))
    kept: dict[str, set[str]] = {}
    for nbytes, _, param, block in moving:
        if nbytes <= room:
            room -= nbytes
            kept.setdefault(block, set()).add(param)
    return {
        block: chosen
        for block, params in cut.items()
        if (chosen := tuple(name for name in params if name in kept.get(block, ())))
    }, room


def _spread(position: int) -> int:
    """A rank by which any first few positions are far from each other: the bits of the number, reversed."""
    return int(f"{position:016b}"[::-1], 2)
