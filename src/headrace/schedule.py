"""Which block lies in which slot, and which is read next: pure decisions, no memory, no threads, no torch.

A model runs its blocks in a cycle, pass after pass; the ring of slots holds the block that runs and the ones that come
next. The order is the model's to decide, though: a layer may be skipped, repeated or re-entered, a pass may be aborted.
So there is no fixed list of steps: the schedule is told what starts and what is done, and answers with Read steps. It
never assumes that a slot holds what the cycle says; every slot carries its owner's tag.
"""

from __future__ import annotations

from typing import NamedTuple


class ReadStep(NamedTuple):
    """Read `block` into `slot`, over whatever is there."""

    block: int
    slot: int


class RunStep(NamedTuple):
    """Run `block` out of `slot`; if `missed`, it is not there and must be read first."""

    block: int
    slot: int
    missed: bool


class Schedule:
    """A ring of `slots` for a cycle of `blocks`.

    Guarantees: a slot in use is never given away; a block is in at most one slot; in a cycle run in order nothing
    misses after the first block, and each block is read once per pass (never again if every block has its own slot).
    Not thread-safe: the caller holds a lock.
    """

    def __init__(self, blocks: int, slots: int) -> None:
        assert 1 <= slots <= blocks, f"{slots} slots for {blocks} blocks"
        self.blocks = blocks
        self.slots = slots
        self._owners: list[int | None] = [None] * slots
        self._users = [0] * slots
        self._settled = False
        """Every block is in a slot of its own: nothing is to be read any more."""
        self._position = blocks - 1  # so that the first block expected is block 0

    def owner(self, slot: int) -> int | None:
        return self._owners[slot]

    def slot_of(self, block: int) -> int | None:
        try:
            return self._owners.index(block)
        except ValueError:
            return None

    def start(self, block: int) -> RunStep | None:
        """`block` is about to run: take its slot into use, or None if every slot is in use by another block."""
        self._position = block
        slot = self.slot_of(block)
        missed = slot is None
        if slot is None:
            slot = self._victim()
            if slot is None:
                return None
            self._owners[slot] = block
        self._users[slot] += 1
        return RunStep(block, slot, missed)

    def forget(self) -> None:
        """What the slots hold is not known any more: the next pass begins as the first one did. None is in use."""
        assert not any(self._users), f"slots are in use: {self._users}"
        self._settled = False
        self._owners = [None] * self.slots
        self._position = self.blocks - 1

    def done(self, slot: int) -> None:
        """The block in `slot` has run; a re-entered block is done as often as it was started."""
        assert self._users[slot] > 0, f"slot {slot} is not in use"
        self._users[slot] -= 1

    def lost(self, slot: int) -> None:
        """What was read into `slot` cannot be used."""
        self._settled = False
        self._owners[slot] = None

    def ahead(self, *, within_pass: bool = False) -> list[ReadStep]:
        """The reads that bring the blocks expected next into all slots not in use, nearest first.

        `within_pass`: those that this pass still runs, none for the next one.
        """
        if self._settled:
            return []
        self._settled = self.slots == self.blocks and None not in self._owners
        free = [slot for slot in range(self.slots) if not self._users[slot]]
        in_use = {self._owners[slot] for slot in range(self.slots) if self._users[slot]}
        wanted: list[int] = []
        for distance in range(1, self.blocks + 1):
            block = (self._position + distance) % self.blocks
            if len(wanted) == len(free) or (within_pass and self._position + distance >= self.blocks):
                break
            if block not in in_use:
                wanted.append(block)
        spare = [slot for slot in free if self._owners[slot] not in wanted]
        steps = []
        for block in wanted:
            if self.slot_of(block) is None:
                slot = spare.pop(0)
                self._owners[slot] = block
                steps.append(ReadStep(block, slot))
        return steps

    def _victim(self) -> int | None:
        """The slot to give up: an empty one, else the one whose block is needed last."""
        free = [slot for slot in range(self.slots) if not self._users[slot]]
        if not free:
            return None

        def distance(slot: int) -> int:
            owner = self._owners[slot]
            return self.blocks + 1 if owner is None else (owner - self._position) % self.blocks

        return max(free, key=distance)

    def check_integrity(self) -> None:
        """Raise AssertionError if two slots have one owner, an owner is no block or a count is negative."""
        owners = [owner for owner in self._owners if owner is not None]
        assert len(set(owners)) == len(owners), f"one block in two slots: {self._owners}"
        assert all(0 <= owner < self.blocks for owner in owners), f"no such block: {self._owners}"
        assert all(users >= 0 for users in self._users), f"negative use: {self._users}"
