"""The cut makes enough room, moves no more than whole layers would, and never more where there is more memory."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence

import pytest
from fakes import MIB, head, layers
from hypothesis import given
from hypothesis import strategies as st

from headrace import cuts
from headrace.core import DIRECT_ALIGNMENT, TENSOR_ALIGNMENT, BlockShape, ParamShape, align_up
from headrace.cuts import SMALL_BYTES, Cut, best_cut, least_rest, moved_bytes, slot_bytes, spread, subsets

KIB = 1024
SLOTS = 2
SIZES = st.one_of(
    st.integers(1, 40).map(lambda n: n * 64 * KIB),  # as large parameters are
    st.integers(SMALL_BYTES, 2 * MIB),  # of any size: with padding in the slot
    st.integers(0, SMALL_BYTES - 1),  # norms and biases
)
LAYER = st.lists(SIZES, min_size=1, max_size=5)
UNIFORM = st.tuples(LAYER, st.integers(1, 8)).map(lambda some: layers(*[some[0]] * some[1]))
MIXED = st.lists(LAYER, min_size=1, max_size=6).map(lambda some: layers(*some))
MODELS = st.one_of(UNIFORM, MIXED, st.tuples(MIXED, SIZES.filter(bool)).map(lambda some: (*some[0], head(some[1]))))


def total(blocks: Sequence[BlockShape]) -> int:
    return sum(block.nbytes for block in blocks)


def room_made(blocks: Sequence[BlockShape], cut: Cut) -> int:
    """What the cut frees, less the ring that it needs."""
    return moved_bytes(blocks, cut) - SLOTS * slot_bytes(blocks, cut)


def whole_layers(blocks: Sequence[BlockShape], excess: int) -> int | None:
    """Bytes moved by the best plan that moves whole layers, found by trying every set of them."""
    moved = [
        sum(block.nbytes for block in some)
        for count in range(1, len(blocks) + 1)
        for some in itertools.combinations(blocks, count)
        if room_made(blocks, {block.name: tuple(param.name for param in block.params) for block in some}) >= excess
    ]
    return min(moved, default=None)


def by_hand(blocks: Sequence[BlockShape], excess: int) -> int | None:
    """Bytes moved by the best plan that takes the same set of parameters out of some layers, all alike: every set."""
    best: int | None = None
    params = blocks[0].params
    for some in itertools.product((False, True), repeat=len(params)):
        names = [[p.name for p, moves in zip(block.params, some, strict=True) if moves] for block in blocks]
        for count in range(1, len(blocks) + 1):
            cut = {block.name: tuple(names[index]) for index, block in enumerate(blocks[:count])}
            if any(some) and room_made(blocks, cut) >= excess:
                moved = moved_bytes(blocks, cut)
                best = moved if best is None else min(best, moved)
    return best


# --- what it promises -----------------------------------------------------------------------------------------------


@pytest.mark.slow
@given(MODELS, st.integers(0, 1000))
def test_a_cut_makes_enough_room(blocks: tuple[BlockShape, ...], share: int) -> None:
    excess = max(1, total(blocks) * share // 1000)
    cut = best_cut(blocks, excess, SLOTS)
    stays, ring = least_rest(blocks, SLOTS)
    if cut is None:
        assert stays + ring > total(blocks) - excess, "there was a way"
        return
    assert room_made(blocks, cut) >= excess
    assert stays + ring <= total(blocks) - excess
    assert len(cut) > SLOTS, "with a slot for every block nothing would be gained"
    names = {block.name: {param.name for param in block.params} for block in blocks}
    for name, moved in cut.items():
        assert moved
        assert len(set(moved)) == len(moved)
        assert set(moved) <= names[name]
    assert list(cut) == [block.name for block in blocks if block.name in cut], "in the order of a pass"


@pytest.mark.slow
@given(MODELS)
def test_the_least_rest_can_be_reached_and_one_byte_less_cannot(blocks: tuple[BlockShape, ...]) -> None:
    stays, ring = least_rest(blocks, SLOTS)
    excess = total(blocks) - stays - ring
    if excess > 0:
        cut = best_cut(blocks, excess, SLOTS)
        assert cut is not None
        assert total(blocks) - moved_bytes(blocks, cut) + SLOTS * slot_bytes(blocks, cut) <= stays + ring
    assert best_cut(blocks, excess + 1, SLOTS) is None


@pytest.mark.slow
@given(MODELS, st.lists(st.integers(1, 1000), min_size=2, max_size=12))
def test_more_memory_never_moves_more(blocks: tuple[BlockShape, ...], shares: list[int]) -> None:
    moved = []
    for share in sorted(shares):
        cut = best_cut(blocks, max(1, total(blocks) * share // 1000), SLOTS)
        moved.append(float("inf") if cut is None else moved_bytes(blocks, cut))
    assert moved == sorted(moved)


@pytest.mark.slow
@given(UNIFORM, st.integers(1, 1000))
def test_layers_alike_move_no_more_than_whole_layers_would(blocks: tuple[BlockShape, ...], share: int) -> None:
    excess = max(1, total(blocks) * share // 1000)
    whole = whole_layers(blocks, excess)
    cut = best_cut(blocks, excess, SLOTS)
    if whole is not None:
        assert cut is not None
        assert moved_bytes(blocks, cut) <= whole


@pytest.mark.slow
@given(MIXED, st.integers(1, 1000))
def test_layers_that_differ_move_no_more_than_the_largest_ones_would(
    blocks: tuple[BlockShape, ...], share: int
) -> None:
    """The best set of layers that differ is a knapsack: what is promised is to beat the largest ones first."""
    excess = max(1, total(blocks) * share // 1000)
    for count in range(1, len(blocks) + 1):
        some = sorted(blocks, key=lambda block: -block.nbytes)[:count]
        plain = {block.name: tuple(param.name for param in block.params) for block in some}
        if room_made(blocks, plain) >= excess:
            cut = best_cut(blocks, excess, SLOTS)
            assert cut is not None
            # Padding can make a layer of more bytes need a larger slot; it is a few bytes for each parameter.
            assert moved_bytes(blocks, cut) <= moved_bytes(blocks, plain) + TENSOR_ALIGNMENT * 5 * len(blocks)
            return


LARGE = st.integers(1, 30).map(lambda n: n * 64 * KIB)


@pytest.mark.slow
@given(st.lists(LARGE, min_size=1, max_size=4), st.integers(3, 8), st.integers(1, 1000))
def test_layers_alike_move_no_more_than_any_one_set_of_their_parameters(
    sizes: list[int], count: int, share: int
) -> None:
    blocks = layers(*[sizes] * count)
    excess = max(1, total(blocks) * share // 1000)
    best = by_hand(blocks, excess)
    cut = best_cut(blocks, excess, SLOTS)
    assert (cut is None) == (best is None)
    if cut is not None and best is not None:
        assert moved_bytes(blocks, cut) <= best


# --- small cases by hand --------------------------------------------------------------------------------------------


def test_two_blocks_never_make_room_with_two_slots() -> None:
    assert best_cut(layers([MIB], [MIB]), 1, SLOTS) is None
    assert best_cut(layers([MIB]), 1, SLOTS) is None
    assert best_cut((), 1, SLOTS) is None
    assert least_rest((), SLOTS) == (0, 0)


def test_a_small_lack_moves_small_parameters() -> None:
    """Eight layers of 64 MiB that lack 1 MiB: the smallest parameter of three layers, no whole layer."""
    blocks = layers(*[[40 * MIB, 16 * MIB, 6 * MIB, 2 * MIB, 8 * KIB]] * 8)
    cut = best_cut(blocks, MIB, SLOTS)
    assert cut == {blocks[number].name: (blocks[number].params[3].name,) for number in (1, 4, 6)}


def test_what_moves_is_spread_over_the_pass() -> None:
    blocks = layers(*[[MIB]] * 12)
    cut = best_cut(blocks, 2 * MIB, SLOTS)
    assert cut is not None
    assert [int(name.split(".")[-1]) for name in cut] == [1, 4, 7, 10]


def test_the_last_layer_moves_only_what_is_missing() -> None:
    blocks = layers(*[[4 * MIB, MIB]] * 10)
    cut = best_cut(blocks, 35 * MIB + 512 * KIB, SLOTS)
    assert cut is not None
    assert moved_bytes(blocks, cut) == 46 * MIB, "room for two slots of 5 MiB: nine layers, and a MiB of the tenth"
    assert [len(names) for names in cut.values()] == [*[2] * 9, 1]
    assert cut["model.layers.9"] == ("model.layers.9.p1.weight",)


def test_the_head_moves_only_when_the_layers_are_not_enough() -> None:
    blocks = (*layers(*[[MIB]] * 10), head(2 * MIB))
    for excess, joins in ((1 * MIB, False), (8 * MIB, False), (8 * MIB + 1, True)):
        cut = best_cut(blocks, excess, SLOTS)
        assert cut is None if excess > 8 * MIB else cut is not None
        assert joins or "lm_head" not in (cut or {})
    blocks = (*layers(*[[MIB]] * 10), head(MIB))
    cut = best_cut(blocks, 9 * MIB, SLOTS)
    assert cut is not None
    assert "lm_head" in cut


def test_what_cannot_move_stays() -> None:
    stuck = ParamShape("model.layers.0.stuck.weight", 64 * MIB, movable=False)
    blocks = tuple(BlockShape(block.name, (*block.params, stuck)) for block in layers(*[[MIB]] * 6))
    assert least_rest(blocks, SLOTS) == (6 * 64 * MIB, 2 * MIB)
    cut = best_cut(blocks, 4 * MIB, SLOTS)
    assert cut is not None
    assert all(stuck.name not in names for names in cut.values())


def test_small_parameters_move_only_with_everything() -> None:
    sizes = [MIB, 128 * KIB, 4 * KIB, 2 * KIB]
    known = subsets(layers(sizes)[0])
    assert [subset.nbytes for subset in known] == [0, 128 * KIB, MIB, MIB + 128 * KIB, sum(sizes)]
    assert known[-1].members == (0, 1, 2, 3)


@given(LAYER)
def test_subsets_grow_by_either_measure(sizes: list[int]) -> None:
    block = layers(sizes)[0]
    known = subsets(block)
    assert known[0].members == ()
    assert known[-1].nbytes == sum(sizes)
    for before, after in itertools.pairwise(known):
        assert before.nbytes < after.nbytes
        assert before.slot_bytes < after.slot_bytes
    for subset in known:
        assert subset.nbytes == sum(sizes[index] for index in subset.members)
        assert subset.slot_bytes == sum(align_up(sizes[index], TENSOR_ALIGNMENT) for index in subset.members)
        cut = {block.name: tuple(block.params[index].name for index in subset.members)}
        assert slot_bytes([block], cut) == align_up(subset.slot_bytes, DIRECT_ALIGNMENT)


def test_a_set_that_takes_more_of_a_slot_and_makes_no_more_room_is_not_known() -> None:
    """Two tensors with much padding lose against one with little."""
    sizes = [SMALL_BYTES + 1, SMALL_BYTES + 1, 2 * SMALL_BYTES + 8]
    known = [subset.nbytes for subset in subsets(layers(sizes)[0])]
    assert sizes[2] in known
    assert sizes[0] + sizes[1] not in known


def test_layers_of_one_shape_share_what_is_known_of_them() -> None:
    first, second = layers([MIB, 2 * MIB], [MIB, 2 * MIB])
    assert subsets(first) is subsets(second)
    stuck = BlockShape("stuck", (first.params[0], ParamShape("other", 2 * MIB, movable=False)))
    assert [subset.nbytes for subset in subsets(stuck)] == [0, MIB]


def test_what_is_known_of_layers_is_bounded() -> None:
    for size in range(600):
        subsets(layers([size * 64 + SMALL_BYTES])[0])
    assert len(cuts._SUBSETS) <= 257


@pytest.mark.slow
def test_many_parameters_of_many_sizes_are_searched_in_time() -> None:
    """48 layers of two kinds with 12 parameters of 12 sizes each: all their sets are far more than are tried."""
    kinds = [[(SMALL_BYTES + 4096 * 3**k) + shift for k in range(12)] for shift in (0, 64 * 7)]
    blocks = layers(*(kinds[number % 2] for number in range(48)))
    begin = time.process_time()
    cut = best_cut(blocks, total(blocks) // 2, SLOTS)
    assert cut is not None
    assert time.process_time() - begin < 20


# --- one tier down ------------------------------------------------------------------------------------------------


@given(st.lists(st.integers(0, 10**6), max_size=40), st.integers(0, 10**7))
def test_what_is_not_sent_down_fits_and_no_more_than_one_block_too_many_goes(sizes: list[int], budget: int) -> None:
    away = spread(sizes, budget)
    stays = sum(size for size, gone in zip(sizes, away, strict=True) if not gone)
    assert stays <= budget
    gone = [size for size, is_gone in zip(sizes, away, strict=True) if is_gone]
    assert all(gone)
    if sum(sizes) <= budget:
        assert not gone
    else:
        assert sum(gone) < sum(sizes) - budget + max(gone)


@pytest.mark.parametrize(("budget", "expected"), [
    (0, [True] * 8),
    (20, None), (40, None), (60, None), (79, None), (80, [False] * 8),
])  # fmt: skip
def test_blocks_alike_go_down_evenly(budget: int, expected: list[bool] | None) -> None:
    away = spread([10] * 8, budget)
    if expected is not None:
        assert away == expected
    assert away.count(True) == -(-(80 - budget) // 10)
    for begin in range(0, 8, 2):  # no two neighbours more than their share
        assert abs(away[begin : begin + 2].count(True) - 2 * away.count(True) / 8) <= 1


def test_nothing_to_send_down() -> None:
    assert spread([], 0) == []
    assert spread([0, 0], 0) == [False, False]
    assert spread([0, 5, 0], 0) == [False, True, False]
