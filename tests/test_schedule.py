"""The ring gives every block its own weights in every order of execution, and in order it reads as little as can be."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from headrace.schedule import ReadStep, RunStep, Schedule

RINGS = [(blocks, slots) for blocks in range(1, 13) for slots in range(1, blocks + 1)]


class Ring:
    """Does what the schedule says with memory that holds only tags, and watches it do so."""

    def __init__(self, blocks: int, slots: int) -> None:
        self.schedule = Schedule(blocks, slots)
        self.memory: list[int | None] = [None] * slots
        self.running: list[RunStep] = []
        self.reads: list[int] = []
        self.misses = 0
        self.overflows = 0
        self.read_ahead()

    def read_ahead(self) -> None:
        for step in self.schedule.ahead():
            self._read(step)
        self.schedule.check_integrity()

    def start(self, block: int) -> None:
        step = self.schedule.start(block)
        self.schedule.check_integrity()
        if step is None:
            self.overflows += 1
            assert {running.slot for running in self.running} == set(range(self.schedule.slots))
            assert block not in {running.block for running in self.running}
            return
        assert step.block == block
        if step.missed:
            self.misses += 1
            self._read(ReadStep(block, step.slot))
        assert self.schedule.owner(step.slot) == block
        assert self.memory[step.slot] == block, "the slot holds the weights of another block"
        self.running.append(step)

    def done(self) -> None:
        step = self.running.pop()
        assert self.memory[step.slot] == step.block, "the weights of a running block were overwritten"
        self.schedule.done(step.slot)
        self.read_ahead()

    def run(self, block: int) -> None:
        self.start(block)
        self.done()

    def _read(self, step: ReadStep) -> None:
        assert step.slot not in {running.slot for running in self.running}, "a read into a slot in use"
        self.memory[step.slot] = step.block
        self.reads.append(step.block)


# --- in order -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("blocks", "slots"), RINGS)
def test_passes_in_order(blocks: int, slots: int) -> None:
    ring = Ring(blocks, slots)
    assert ring.reads == list(range(slots)), "the ring is filled with the blocks that come first"
    for number in range(5):
        ring.reads.clear()
        for block in range(blocks):
            ring.run(block)
        assert ring.misses == 0, f"pass {number}"
        expected = [(block + slots) % blocks for block in range(blocks)] if slots < blocks else []
        assert ring.reads == expected, f"pass {number}: each block once, in the order of need, or none at all"


@pytest.mark.parametrize(("blocks", "slots"), RINGS)
def test_a_block_that_runs_is_never_read_late(blocks: int, slots: int) -> None:
    """While a block runs, the blocks that the other slots are for have all been asked for."""
    ring = Ring(blocks, slots)
    for block in [*range(blocks), *range(blocks)]:
        ring.start(block)
        ahead = {(block + distance) % blocks for distance in range(min(slots, blocks))}
        assert ahead <= set(ring.memory)
        ring.done()


def corrupted_by_the_old_rule(blocks: int, step: int) -> bool:
    """vLLM before its change 54975: block i runs out of slot i % step, then (i + step) % blocks is copied."""
    memory = {block % step: block for block in range(min(step, blocks))}
    for block in [*range(blocks)] * 4:
        if memory[block % step] != block:
            return True
        following = (block + step) % blocks
        memory[following % step] = following
    return False


def test_what_the_old_rule_corrupts() -> None:
    for blocks in range(1, 13):
        for step in range(1, 13):
            assert corrupted_by_the_old_rule(blocks, step) == (1 < step < blocks and blocks % step != 0)


CORRUPTED = [(n, k) for n in range(1, 13) for k in range(1, 13) if corrupted_by_the_old_rule(n, k)]


@pytest.mark.parametrize(("blocks", "step"), CORRUPTED)
def test_what_the_old_rule_corrupts_is_right_here(blocks: int, step: int) -> None:
    """`Ring` compares what each block runs with; these pairs are the ones that went wrong elsewhere."""
    for slots in {step, min(step + 1, blocks)}:
        ring = Ring(blocks, slots)
        for block in [*range(blocks)] * 5:
            ring.run(block)
        assert ring.misses == 0


# --- in any order ---------------------------------------------------------------------------------------------------


def naive_ring(blocks: int, slots: int, position: int, in_use: Sequence[int]) -> list[int]:
    """What the free slots should hold after a step: the nearest blocks after `position` that are not in use."""
    nearest = ((position + distance) % blocks for distance in range(1, blocks + 1))
    return [block for block in nearest if block not in in_use][: slots - len(set(in_use))]


OPERATIONS = st.lists(
    st.one_of(
        st.tuples(st.just("run"), st.integers(0, 11)),
        st.tuples(st.just("next"), st.integers(1, 6)),
        st.tuples(st.just("start"), st.integers(0, 11)),
        st.tuples(st.just("again"), st.just(0)),
        st.tuples(st.just("done"), st.just(0)),
        st.tuples(st.just("abort"), st.just(0)),
        st.tuples(st.just("fail"), st.integers(0, 11)),
    ),
    max_size=30,
)


def carry_out(ring: Ring, operations: Sequence[tuple[str, int]]) -> Iterator[int]:
    """Yields the block last started after every operation that ended with nothing new running."""
    blocks, position = ring.schedule.blocks, ring.schedule.blocks - 1
    for name, number in operations:
        block = number % blocks
        if name == "run":  # a jump
            running = len(ring.running)
            ring.start(block)
            position = block
            if len(ring.running) > running:
                ring.done()
        elif name == "next":
            for _ in range(number):
                position = (position + 1) % blocks
                running = len(ring.running)
                ring.start(position)
                if len(ring.running) > running:
                    ring.done()
        elif name == "start":  # nested inside of what runs
            ring.start(block)
            position = block
        elif name == "again" and ring.running:  # re-entered
            position = ring.running[-1].block
            ring.start(position)
        elif name == "done" and ring.running:
            ring.done()
        elif name == "abort":
            while ring.running:
                ring.done()
        elif name == "fail" and block not in {running.block for running in ring.running}:
            # The read fails: the slot is given back empty, and nothing is read ahead.
            step = ring.schedule.start(block)
            position = block
            if step is not None:
                ring.schedule.done(step.slot)
                ring.schedule.lost(step.slot)
                ring.memory[step.slot] = None
                ring.schedule.check_integrity()
                assert ring.schedule.slot_of(block) is None
            continue
        ring.read_ahead()
        yield position


@pytest.mark.slow
@given(st.integers(1, 12), st.integers(1, 12), OPERATIONS)
@example(4, 2, [("run", 0), ("run", 2), ("run", 3)])  # a layer is skipped
@example(4, 3, [("run", 0), ("run", 0), ("run", 1)])  # a layer runs twice
@example(4, 4, [("run", 0), ("run", 1), ("run", 0), ("run", 1)])  # a pass is aborted and begun again
@example(3, 1, [("start", 0), ("again", 0), ("start", 1), ("abort", 0)])  # nested deeper than there are slots
def test_any_order(blocks: int, slots: int, operations: list[tuple[str, int]]) -> None:
    ring = Ring(blocks, min(slots, blocks))
    for position in carry_out(ring, operations):
        in_use = [step.block for step in ring.running]
        wanted = naive_ring(blocks, ring.schedule.slots, position, in_use)
        held = [owner for owner in ring.memory if owner is not None and owner not in in_use]
        assert sorted(held) == sorted(wanted)
        assert [ring.schedule.owner(slot) for slot in range(ring.schedule.slots)] == ring.memory
    # Whatever happened: once nothing runs and one pass has gone by, passes in order are as they always are.
    while ring.running:
        ring.done()
    for block in range(blocks):
        ring.run(block)
    ring.misses = 0
    ring.reads.clear()
    for block in range(blocks):
        ring.run(block)
    assert ring.misses == 0
    assert len(ring.reads) == (blocks if ring.schedule.slots < blocks else 0)


@pytest.mark.parametrize(("blocks", "slots"), [ring for ring in RINGS if ring[1] > 1])
def test_every_jump_costs_at_most_one_miss(blocks: int, slots: int) -> None:
    for after in range(blocks):
        for to in range(blocks):
            ring = Ring(blocks, slots)
            for block in range(after + 1):
                ring.run(block)
            ring.run(to)
            ring.run((to + 1) % blocks)
            assert ring.misses == (0 if (to - after - 1) % blocks < slots else 1)


def test_a_miss_gives_up_what_is_needed_last() -> None:
    ring = Ring(6, 3)
    ring.run(0)
    ring.run(1)
    assert ring.memory == [3, 4, 2]
    step = ring.schedule.start(0)
    assert step == RunStep(0, 1, missed=True), "after 0 comes 2, then 3; 4 is farthest away"


def test_a_miss_takes_an_empty_slot_first() -> None:
    ring = Ring(4, 2)
    ring.schedule.lost(0)
    step = ring.schedule.start(3)
    assert step == RunStep(3, 0, True)


def test_a_block_in_use_twice_is_free_after_the_second_done() -> None:
    ring = Ring(3, 1)
    ring.start(0)
    ring.start(0)
    assert ring.misses == 0
    ring.done()
    assert ring.memory == [0]
    assert ring.schedule.start(1) is None
    ring.done()
    assert ring.memory == [2], "1 was the last to run, outside of the ring"


def test_what_we_must_not_do() -> None:
    for blocks, slots in ((0, 0), (1, 0), (1, 2), (3, -1)):
        with pytest.raises(AssertionError):
            Schedule(blocks, slots)
    with pytest.raises(AssertionError):
        Schedule(2, 1).done(0)


@pytest.mark.parametrize(
    ("owners", "users"), [([0, 0], [0, 0]), ([2, None], [0, 0]), ([-1, None], [0, 0]), ([0, 1], [0, -1])]
)
def test_check_integrity_sees_what_is_wrong(owners: list[int | None], users: list[int]) -> None:
    schedule = Schedule(2, 2)
    schedule._owners, schedule._users = owners, users
    with pytest.raises(AssertionError):
        schedule.check_integrity()


def test_with_a_slot_for_every_block_nothing_is_read_again() -> None:
    schedule = Schedule(3, 3)
    assert len(schedule.ahead()) == 3
    for block in (0, 2, 1, 1):
        step = schedule.start(block)
        assert step is not None
        assert not step.missed
        assert schedule.ahead() == []
        schedule.done(step.slot)
    lost = schedule.slot_of(1)
    assert lost is not None
    schedule.lost(lost)
    assert schedule.ahead() == [ReadStep(1, lost)]
