"""Every plan keeps its promise: what it counts adds up and fits, what it suggests works, what was asked for is done."""

from __future__ import annotations

import dataclasses
import itertools
import re
import shlex
from typing import Any

import pytest
from fakes import MIB, demand, head, layers, machine, model, table
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from headrace.config import OffloadConfig, PrefetchOffloadConfig, UVAOffloadConfig
from headrace.core import (
    READER_THREADS,
    WIDE_LAYER,
    BlockShape,
    Contention,
    ModelShape,
    ParamShape,
    Plan,
    Products,
    align_up,
)
from headrace.cuts import moved_bytes, slot_bytes
from headrace.errors import BudgetTooSmall, NothingOffloaded
from headrace.planner import Demand, costs, memory_for_share, plan

KIB = 1024
GIB = 2**30
AUTO = OffloadConfig()
MACHINE = machine()


def prefetch(size: int, number: int = 1, step: int = 1, *params: str) -> OffloadConfig:
    settings = PrefetchOffloadConfig(
        offload_group_size=size,
        offload_num_in_group=number,
        offload_prefetch_step=step,
        offload_params=frozenset(params),
    )
    return OffloadConfig(prefetch=settings)


def uva(nbytes: float, *params: str) -> OffloadConfig:
    return OffloadConfig(uva=UVAOffloadConfig(cpu_offload_gb=nbytes / GIB, cpu_offload_params=frozenset(params)))


def check(shape: ModelShape, wanted: Demand, made: Plan) -> None:
    """What is true of every plan."""
    memory, cut = made.memory, dict(made.streamed)
    assert memory.total_bytes == sum(dataclasses.astuple(memory))
    assert min(dataclasses.astuple(memory)) >= 0
    if wanted.memory_bytes is not None:
        assert memory.total_bytes <= wanted.memory_bytes
    looked_up = sum(block.nbytes for block in shape.blocks if block.name in made.gathered)
    assert not cut.keys() & set(made.gathered)
    assert made.offloaded_bytes == moved_bytes(shape.blocks, cut) + looked_up
    assert memory.resident_bytes + made.offloaded_bytes == shape.weight_bytes
    assert memory.ring_bytes == max(1, made.slots) * made.slot_bytes  # uva: the mapped pages of one block
    assert made.slots <= len(cut)
    if made.slots:
        assert made.slot_bytes == slot_bytes(shape.blocks, cut)
    names = [block.name for block in shape.blocks]
    assert [names.index(name) for name, _ in made.streamed] == sorted(names.index(name) for name in cut)
    movable = {param.name for block in shape.blocks for param in block.params if param.movable}
    assert all(moved and set(moved) <= movable for moved in cut.values())
    tables = {block.name for block in shape.blocks if block.gathered}
    streamed = moved_bytes([block for block in shape.blocks if block.name not in tables], cut)
    kept = made.slots and made.slots == len(cut)
    assert made.bound.moved_bytes == (0 if kept else streamed)
    assert all(choice.name and choice.value and choice.reason for choice in made.choices)


def make(shape: ModelShape, wanted: Demand, config: OffloadConfig = AUTO) -> Plan:
    made = plan(shape, MACHINE, wanted, config)
    check(shape, wanted, made)
    return made


def overhead(shape: ModelShape) -> int:
    """Everything but weights and ring, as a plan without a limit counts it."""
    memory = make(shape, demand(None)).memory
    return memory.total_bytes - memory.resident_bytes


def with_room(shape: ModelShape, room: int, config: OffloadConfig = AUTO) -> Plan:
    return make(shape, demand(overhead(shape) + room), config)


SIZES = st.one_of(st.integers(0, 65535), st.integers(65536, 3 * MIB), st.integers(1, 30).map(lambda n: n * 64 * KIB))
LAYERS = st.one_of(
    st.lists(st.lists(SIZES, min_size=1, max_size=5), min_size=1, max_size=8).map(lambda some: layers(*some)),
    st.tuples(st.lists(SIZES, min_size=1, max_size=6), st.integers(1, 12)).map(lambda s: layers(*[s[0]] * s[1])),
)


@st.composite
def models(draw: Any) -> ModelShape:
    blocks = draw(LAYERS)
    if draw(st.booleans()):
        blocks = (table(draw(st.integers(1, 4 * MIB))), *blocks)
    if draw(st.booleans()):
        blocks = (*blocks, head(draw(st.integers(1, 4 * MIB))))
    if draw(st.booleans()):  # the first layer is converted when it is loaded
        first = next(index for index, block in enumerate(blocks) if block.kind == "layer")
        stuck = tuple(dataclasses.replace(param, movable=False) for param in blocks[first].params)
        blocks = (*blocks[:first], dataclasses.replace(blocks[first], params=stuck), *blocks[first + 1 :])
    shape = model(*blocks, fixed_bytes=draw(st.integers(0, MIB)))
    assume(shape.weight_bytes > sum(block.nbytes for block in blocks if block.gathered))
    return dataclasses.replace(
        shape,
        kv_bytes_per_token=draw(st.integers(0, 5000)),
        head_bytes=draw(st.integers(0, MIB)),
        head_always_copied=draw(st.booleans()),
    )


# --- a budget -------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@given(models(), st.integers(0, 1100))
def test_a_plan_for_a_budget_fits_into_it(shape: ModelShape, share: int) -> None:
    budget = overhead(shape) + shape.weight_bytes * share // 1000
    try:
        made = make(shape, demand(budget))
    except BudgetTooSmall as error:
        assert error.memory_bytes == budget < error.needed_bytes
        return
    if share >= 1000:
        assert made.backend == "resident"
        assert made.offloaded_bytes == made.slots == 0
    else:
        assert made.offloaded_bytes > 0 or shape.weight_bytes * share // 1000 == shape.weight_bytes


@pytest.mark.slow
@given(models())
def test_the_smallest_budget_works_and_less_does_not(shape: ModelShape) -> None:
    with pytest.raises(BudgetTooSmall) as caught:
        make(shape, demand(MIB))
    error = caught.value
    named = error.baseline_bytes + error.fixed_bytes + error.ring_bytes + error.kv_bytes + error.working_bytes
    assert error.needed_bytes == align_up(named, MIB), "what the message lists is what it adds up to"
    make(shape, demand(error.needed_bytes))
    with pytest.raises(BudgetTooSmall) as again:
        make(shape, demand(error.needed_bytes - MIB))
    assert again.value.needed_bytes == error.needed_bytes


@pytest.mark.slow
@given(models(), st.lists(st.integers(1, 1200), min_size=2, max_size=10))
def test_more_memory_never_moves_more(shape: ModelShape, shares: list[int]) -> None:
    before: tuple[float, float] = (float("inf"), float("inf"))
    for share in sorted(shares):
        try:
            made = with_room(shape, shape.weight_bytes * share // 1000)
        except BudgetTooSmall:
            assert before == (float("inf"), float("inf")), "a budget that works keeps working when it grows"
            continue
        now = made.bound.moved_bytes, made.offloaded_bytes
        assert now[0] <= before[0]
        assert now[1] <= before[1]
        before = now


@pytest.mark.parametrize("lack", [253_958, 253_959, 254_018])
def test_padding_in_the_slot_makes_no_room(lack: int) -> None:
    """Six tensors, each a byte above its alignment: counted with padding, they would make room for 60 bytes more."""
    shape = model(*layers(*[[64 * KIB + 1]] * 6))
    if lack == 253_958:
        with_room(shape, shape.weight_bytes - lack)
    else:
        with pytest.raises(BudgetTooSmall):
            with_room(shape, shape.weight_bytes - lack)


def test_everything_fits() -> None:
    shape = model(table(MIB), *layers([MIB], [MIB]), head(MIB), fixed_bytes=100)
    assert with_room(shape, shape.weight_bytes).backend == "resident"
    assert with_room(shape, shape.weight_bytes - 1).backend == "prefetch"
    assert make(shape, demand(None)).backend == "resident"


def test_tables_move_first_and_cost_nothing_per_pass() -> None:
    shape = model(table(8 * MIB), *layers(*[[MIB]] * 8), head(8 * MIB))
    made = with_room(shape, 16 * MIB)
    assert made.gathered == ("model.embed_tokens",)
    assert made.streamed == ()
    assert made.slots == made.bound.moved_bytes == 0
    assert made.offloaded_bytes == 8 * MIB
    made = with_room(shape, 15 * MIB)
    assert made.gathered == ("model.embed_tokens",)
    assert made.bound.moved_bytes == 3 * MIB


def test_a_table_that_is_converted_stays() -> None:
    stuck = BlockShape("embed", (ParamShape("embed.weight", MIB, movable=False),), "embedding", gathered=True)
    shape = model(stuck, *layers(*[[MIB]] * 8))
    made = with_room(shape, 8 * MIB)
    assert made.gathered == ()
    assert len(made.streamed) == 3


def llama(count: int = 28) -> ModelShape:
    """The shape of a model of 3 billion parameters, in bfloat16."""
    sizes = [3072 * 3072, 1024 * 3072, 1024 * 3072, 3072 * 3072, *[3072 * 8192] * 3, 3072, 3072]
    return model(*layers(*[[2 * size for size in sizes]] * count), head(128256 * 3072 * 2), fixed_bytes=6144)


@pytest.mark.parametrize("lack", [1, MIB, 4 * MIB])
def test_a_near_fit_streams_a_few_mib_and_not_layers(lack: int) -> None:
    shape = llama()
    made = with_room(shape, shape.weight_bytes - lack)
    smallest = 1024 * 3072 * 2
    assert 0 < made.bound.moved_bytes <= lack + 2 * smallest + smallest
    assert made.slot_bytes == smallest
    assert made.memory.resident_bytes + made.memory.ring_bytes <= shape.weight_bytes - lack


def test_half_of_a_model_streams_half_and_little_more() -> None:
    shape = llama()
    made = with_room(shape, shape.weight_bytes // 2)
    assert made.bound.moved_bytes <= 1.1 * shape.weight_bytes / 2


def test_the_bound_says_what_limits_it() -> None:
    shape = model(table(MIB), *layers(*[[MIB]] * 10))
    wanted = demand(overhead(shape) + 8 * MIB)
    slow_disk = plan(shape, machine(disk_bytes_per_s=MIB, compute_bytes_per_s=100 * MIB), wanted, AUTO).bound
    assert slow_disk.limited_by == "disk"
    assert slow_disk.seconds == slow_disk.moved_bytes / MIB == 4.0
    slow_cores = plan(shape, machine(disk_bytes_per_s=100 * MIB, compute_bytes_per_s=MIB), wanted, AUTO).bound
    assert slow_cores.limited_by == "compute"
    cached = 1000 * (100 + wanted.prefill_tokens) / 2 / MIB
    assert slow_cores.seconds == pytest.approx(10.0 + cached), "the table is not computed with; the cache is"
    row = next(choice for choice in plan(shape, MACHINE, wanted, AUTO).choices if choice.name == "bound")
    assert "passes/s" in row.value


def test_computing_takes_what_products_of_that_dtype_and_so_many_rows_take() -> None:
    products = {"bfloat16": Products(((1, 100.0 * MIB), (4, 50.0 * MIB))), "float16": Products(((1, 1.0 * MIB),))}
    here = dataclasses.replace(machine(compute_bytes_per_s=200 * MIB), products=products)
    shape = dataclasses.replace(model(*layers(*[[MIB]] * 10)), kv_bytes_per_token=0)
    wanted = demand(None)

    def seconds(dtype: str, **changes: int) -> float:
        made = plan(dataclasses.replace(shape, dtype=dtype), here, dataclasses.replace(wanted, **changes), AUTO)
        return made.bound.compute_s

    assert seconds("bfloat16") == pytest.approx(0.1)
    assert seconds("bfloat16", batch=4) == pytest.approx(0.2)
    assert seconds("float16") == pytest.approx(10.0)
    assert seconds("float32") == pytest.approx(0.05), "not measured: the rate for every dtype"


@given(st.floats(0.1, 1), st.floats(0.1, 1), st.floats(0, 10), st.integers(0, 10**10))
def test_computing_and_reading_hold_each_other_up(
    disk_share: float, compute_share: float, compute_s: float, nbytes: int
) -> None:
    both_at_once = Contention(disk_share, compute_share)
    here = dataclasses.replace(machine(disk_bytes_per_s=1e9), contention=both_at_once)
    reached = costs.bound(compute_s, here, nbytes, 0)
    nothing, wanted = model(), demand(None)
    pass_s = costs.pass_s(nothing, here, wanted, reached)
    both = reached.compute_s + reached.moving_s
    assert pass_s >= reached.seconds - 1e-9
    assert pass_s <= max(both, reached.seconds / min(disk_share, compute_share)) + 1e-9
    assert costs.pass_s(nothing, machine(), wanted, reached) == reached.seconds
    larger = costs.bound(compute_s, here, nbytes + 10**6, 0)
    assert costs.pass_s(nothing, here, wanted, larger) >= pass_s - 1e-9


def test_the_interpreter_works_while_weights_are_read() -> None:
    here = dataclasses.replace(machine(disk_bytes_per_s=1e9), layer_overhead_s=1.0, pass_overhead_s=0.5)
    shape, wanted = model(*layers(*[[MIB]] * 4)), demand(None)
    waiting, computing = costs.bound(1.0, here, 10**10, 0), costs.bound(1.0, here, 10**9, 0)
    assert costs.pass_s(shape, here, wanted, waiting) == 10.0
    assert costs.pass_s(shape, here, wanted, computing) == 1.0 + 4.5


def test_what_is_copied_is_copied_beside_the_products() -> None:
    here = dataclasses.replace(machine(disk_bytes_per_s=1e9), copy_bytes_per_s=5e8)
    shape = dataclasses.replace(model(*layers(*[[MIB]] * 4)), copied_share=0.25)
    copying_s = 0.25 * 1e9 / 5e8
    for computing_s, pass_s in ((0.1, 1.0 + copying_s / READER_THREADS), (0.7, 0.7 + copying_s)):
        assert costs.pass_s(shape, here, demand(None), costs.bound(computing_s, here, 10**9, 0)) == pytest.approx(
            pass_s
        )
    unknown = dataclasses.replace(here, copy_bytes_per_s=0.0)
    assert costs.pass_s(shape, unknown, demand(None), costs.bound(0.7, here, 10**9, 0)) == 1.0


def test_a_layer_takes_beside_its_weights_what_one_of_its_dtype_does() -> None:
    products = {"bfloat16": Products(((1, 1e9),), 2.0), "float16": Products(((1, 1e9),))}
    here = dataclasses.replace(machine(), layer_overhead_s=1.0, products=products)
    assert [here.layer_s(dtype, WIDE_LAYER) for dtype in ("bfloat16", "float16", "float32")] == [2.0, 1.0, 1.0]


def test_a_wider_layer_takes_more_beside_its_weights() -> None:
    here = dataclasses.replace(machine(), layer_overhead_s=1.0, products={"float16": Products(((1, 1e9),), 2.0)})
    widths = (0, WIDE_LAYER // 2, WIDE_LAYER, 2 * WIDE_LAYER)
    assert [here.layer_s("float16", width) for width in widths] == [2.0, 1.5, 2.0, 3.0]
    faster = dataclasses.replace(here, layer_overhead_s=3.0)
    assert faster.layer_s("float16", WIDE_LAYER) == 3.0, "never less than the smallest"


def test_each_query_head_goes_through_the_cache() -> None:
    shape = dataclasses.replace(model(*layers(*[[MIB]] * 10)), kv_bytes_per_token=1000, query_groups=4, dtype="float16")
    wanted = dataclasses.replace(demand(None), context_tokens=300, prefill_tokens=100, batch=2)
    plain = dataclasses.replace(machine(compute_bytes_per_s=1e6), products={"float16": Products(((1, 1e12),))})
    fast = {"float16": Products(((1, 1e12),), attention_bytes_per_s=1e3)}
    cached = 1000 * 200 * 2
    assert costs.decode_compute_s(shape, plain, wanted) == pytest.approx(cached / 1e6, rel=1e-3)
    seconds = costs.decode_compute_s(shape, dataclasses.replace(plain, products=fast), wanted)
    assert seconds == pytest.approx(2 * cached / 1e6 + 4 * cached / 1e3, rel=1e-3)


def test_layers_with_experts_take_more_beside_their_weights() -> None:
    here = dataclasses.replace(machine(), layer_overhead_s=1.0, pass_overhead_s=0.5, expert_overhead_s=3.0)
    dense = model(*layers(*[[MIB]] * 4))
    first, *others = dense.blocks
    routed = dataclasses.replace(first, params=(dataclasses.replace(first.params[0], used_share=0.1),))
    mixed = dataclasses.replace(dense, blocks=(routed, *others))
    assert plan(dense, here, demand(None), AUTO).overhead_s == 4.5
    assert plan(mixed, here, demand(None), AUTO).overhead_s == 7.5


@pytest.mark.slow
@given(models(), st.integers(0, 100))
def test_the_budget_for_a_share_of_the_weights(shape: ModelShape, percent: int) -> None:
    wanted = demand(None)
    assert memory_for_share(shape, wanted, percent / 100) == overhead(shape) + int(percent / 100 * shape.weight_bytes)


def test_what_running_costs_is_counted() -> None:
    shape = dataclasses.replace(model(*layers(*[[MIB]] * 4)), head_bytes=700)
    wanted = Demand(None, 10, 20, context_tokens=100, prefill_tokens=30, batch=1, margin_bytes=5)
    memory = make(shape, wanted).memory
    assert memory.baseline_bytes == 10
    assert memory.staging_bytes == 20
    assert memory.kv_bytes == 100 * 1000 * 5 // 4, "one layer of four exists twice for a moment"
    assert memory.working_bytes == 30 * 100 + 50 + 5
    batch = make(shape, dataclasses.replace(wanted, batch=3)).memory
    assert batch.kv_bytes == 3 * memory.kv_bytes
    assert batch.working_bytes == 3 * (30 * 100 + 50) + 700 + 5
    half = make(dataclasses.replace(shape, head_always_copied=True), wanted).memory
    assert half.working_bytes == memory.working_bytes + 700


# --- no plan is faster within the same memory ---------------------------------------------------------------------


@st.composite
def small_models(draw: Any) -> ModelShape:
    """A few layers of a few parameters each, all of them large enough to move."""
    size = st.integers(1, 24).map(lambda n: n * 64 * KIB)
    some = draw(st.lists(st.lists(size, min_size=1, max_size=3), min_size=1, max_size=4))
    blocks = layers(*some) if draw(st.booleans()) else layers(*[some[0]] * len(some))
    return model(*blocks, *([head(draw(size))] if draw(st.booleans()) else []), fixed_bytes=draw(st.integers(0, MIB)))


def fewest_moved_bytes(shape: ModelShape, room: int) -> int | None:
    """Of every set of parameters that could move, by trying them all: what a pass reads at least; None if none fits."""
    params = [(block.name, param.name, param.nbytes) for block in shape.blocks for param in block.params]
    best = None
    for chosen in itertools.product((False, True), repeat=len(params)):
        cut: dict[str, tuple[str, ...]] = {}
        for (block, name, _), moves in zip(params, chosen, strict=True):
            if moves:
                cut[block] = (*cut.get(block, ()), name)
        moved = moved_bytes(shape.blocks, cut)
        slots = min(2, len(cut))
        if shape.weight_bytes - moved + slots * slot_bytes(shape.blocks, cut) > room:
            continue
        per_pass = 0 if len(cut) <= slots else moved
        best = per_pass if best is None else min(best, per_pass)
    return best


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(small_models(), st.integers(1, 99))
def test_an_exhaustive_search_finds_nothing_faster(shape: ModelShape, percent: int) -> None:
    assume(sum(len(block.params) for block in shape.blocks) <= 9)
    room = shape.weight_bytes * percent // 100
    best = fewest_moved_bytes(shape, room)
    try:
        made = with_room(shape, room)
    except BudgetTooSmall:
        assert best is None
        return
    assert best is not None
    assert made.bound.moved_bytes == best


# --- groups, with vLLM's numbers ------------------------------------------------------------------------------------

VECTORS = [
    (8, 4, 2, [2, 3, 6, 7]),
    (28, 8, 1, [7, 15, 23]),
    (61, 8, 2, [6, 7, 14, 15, 22, 23, 30, 31, 38, 39, 46, 47, 54, 55]),
    (32, 1, 1, list(range(32))),
    (5, 8, 4, [4]),
    (4, 4, 4, [0, 1, 2, 3]),
]


@pytest.mark.parametrize(("count", "size", "number", "expected"), VECTORS)
@pytest.mark.parametrize("step", [1, 2, 5, 100])
def test_groups_are_those_of_vllm(count: int, size: int, number: int, expected: list[int], step: int) -> None:
    shape = model(table(MIB), *layers(*[[MIB, 100]] * count), head(MIB))
    made = make(shape, demand(None), prefetch(size, number, step))
    assert made.backend == "prefetch"
    assert [name for name, _ in made.streamed] == [f"model.layers.{index}" for index in expected]
    assert all(len(params) == 2 for _, params in made.streamed), "all of a layer, the small ones too"
    assert made.slots == min(step + 1, len(expected))
    assert made.gathered == ()


def test_a_group_larger_than_the_model_offloads_nothing_and_says_what_would() -> None:
    shape = model(*layers(*[[MIB]] * 3))
    for size, number in ((100, 1), (100, 50), (4, 1)):
        with pytest.raises(NothingOffloaded) as caught:
            make(shape, demand(None), prefetch(size, number))
        assert f"--offload-group-size {size}" in caught.value.request
        assert "3 layers" in caught.value.reason
        words = shlex.split(caught.value.suggestion)
        given = dict(zip(words[::2], map(int, words[1::2]), strict=True))
        made = make(shape, demand(None), prefetch(given["--offload-group-size"], given["--offload-num-in-group"]))
        assert made.streamed


def test_only_the_parameters_asked_for_move_and_layers_without_them_leave_the_ring() -> None:
    dense, other = layers([MIB, 2 * MIB], [MIB])[0], layers([MIB], first=1)[0]
    shape = model(dense, other, *layers([MIB, 2 * MIB], first=2))
    made = make(shape, demand(None), prefetch(1, 1, 2, "p1"))
    assert made.streamed == (
        ("model.layers.0", ("model.layers.0.p1.weight",)),
        ("model.layers.2", ("model.layers.2.p1.weight",)),
    )
    assert made.slots == 2


def test_groups_that_do_not_fit_the_budget_name_one_that_does() -> None:
    shape = model(*layers(*[[MIB]] * 8))
    config = prefetch(4)
    with pytest.raises(BudgetTooSmall) as caught:
        with_room(shape, 7 * MIB, config)
    make(shape, demand(caught.value.needed_bytes), config)
    with pytest.raises(BudgetTooSmall):
        make(shape, demand(caught.value.needed_bytes - MIB), config)


# --- uva ------------------------------------------------------------------------------------------------------------


def uva_shape() -> ModelShape:
    return model(table(3 * MIB), *layers(*[[2 * MIB, MIB, 512]] * 4), head(5 * MIB))


@pytest.mark.parametrize(
    ("budget", "offloaded"),
    [
        (3 * MIB, 3 * MIB),  # exactly the table
        (3 * MIB - 1, 2 * MIB + 4 * 512),  # the table and the head are too large; of the layers, whatever still fits
        (8 * MIB, 8 * MIB),  # the table and the head
        (100 * MIB, None),  # more than there is
        (512, 512),  # the smallest parameter, and not a byte more
    ],
)
def test_uva_never_takes_more_than_it_may(budget: int, offloaded: int | None) -> None:
    shape = uva_shape()
    made = make(shape, demand(None), uva(budget))
    assert made.backend == "uva"
    assert made.slots == 0
    assert made.offloaded_bytes <= budget
    assert made.offloaded_bytes == (shape.weight_bytes if offloaded is None else offloaded)


@pytest.mark.slow
@given(models(), st.integers(1, 40 * MIB))
def test_uva_fills_its_budget_and_never_exceeds_it(shape: ModelShape, budget: int) -> None:
    try:
        made = make(shape, demand(None), uva(budget))
    except NothingOffloaded:
        movable = [param.nbytes for block in shape.blocks for param in block.params if param.movable and param.nbytes]
        assert all(nbytes > budget for nbytes in movable)
        return
    assert 0 < made.offloaded_bytes <= budget
    moved = {name for _, names in made.streamed for name in names}
    left = [p.nbytes for b in shape.blocks for p in b.params if p.movable and p.nbytes and p.name not in moved]
    assert made.offloaded_bytes + min(left, default=budget) > budget or not left


def test_uva_takes_tables_first_and_layers_from_the_last_one_on() -> None:
    made = make(uva_shape(), demand(None), uva(3 * MIB + 5 * MIB + 3 * MIB + 512))
    assert [name for name, _ in made.streamed] == ["model.embed_tokens", "model.layers.3", "lm_head"]
    assert made.bound.moved_bytes == made.offloaded_bytes - 3 * MIB, "of the table only rows are read"


def test_uva_whose_first_parameters_are_too_large() -> None:
    """vLLM takes the one that crosses the budget as well."""
    shape = model(table(64 * MIB), *layers(*[[MIB]] * 3))
    made = make(shape, demand(None), uva(MIB))
    assert made.streamed == (("model.layers.2", ("model.layers.2.p0.weight",)),)


def test_uva_with_too_little_says_how_much_would_do() -> None:
    shape = uva_shape()
    with pytest.raises(NothingOffloaded) as caught:
        make(shape, demand(None), uva(511))
    assert "512 B" in caught.value.reason
    number = re.match(r"--cpu-offload-gb (\S+) or more", caught.value.suggestion)
    assert number is not None
    assert make(shape, demand(None), uva(float(number[1]) * GIB)).offloaded_bytes > 0


def test_uva_within_a_budget() -> None:
    shape = uva_shape()
    config = uva(8 * MIB)
    # The pages of the block that runs are this process's memory too, although they are the file's.
    touched_bytes = with_room(shape, 2 * shape.weight_bytes, config).memory.ring_bytes
    assert touched_bytes > 0
    with_room(shape, shape.weight_bytes - 8 * MIB + touched_bytes, config)
    with pytest.raises(BudgetTooSmall) as caught:
        with_room(shape, shape.weight_bytes - 8 * MIB + touched_bytes - 1, config)
    make(shape, demand(caught.value.needed_bytes), config)


# --- what matches nothing -------------------------------------------------------------------------------------------


def named(*names: str, movable: bool = True, nbytes: int = MIB) -> ModelShape:
    blocks = tuple(
        BlockShape(
            f"model.layers.{number}",
            tuple(ParamShape(f"model.layers.{number}.{name}.weight", nbytes, movable) for name in names),
        )
        for number in range(4)
    )
    return model(*blocks, fixed_bytes=1)


@pytest.mark.parametrize(
    ("config", "flag"),
    [
        (prefetch(2, 1, 1, "up_prj"), "--offload-params"),
        (prefetch(2, 1, 1, "mlp.up_prj"), "--offload-params"),
        (uva(GIB, "up_prj"), "--cpu-offload-params"),
    ],
)
def test_a_selector_that_matches_nothing_names_the_nearest_that_does(config: OffloadConfig, flag: str) -> None:
    shape = named("mlp.up_proj", "mlp.down_proj", "self_attn.q_proj")
    with pytest.raises(NothingOffloaded) as caught:
        make(shape, demand(None), config)
    assert caught.value.request.startswith(flag)
    suggested = re.fullmatch(rf"{flag} with one of: (.+)", caught.value.suggestion)
    assert suggested is not None
    words = suggested[1].split(", ")
    assert words[0] == "up_proj"
    for word in words:
        again = prefetch(2, 1, 1, word) if flag == "--offload-params" else uva(GIB, word)
        assert make(shape, demand(None), again).offloaded_bytes > 0


def test_a_part_of_a_segment_is_no_match() -> None:
    shape = named("mlp.up_proj")
    with pytest.raises(NothingOffloaded):
        make(shape, demand(None), prefetch(1, 1, 1, "up"))
    assert make(shape, demand(None), prefetch(1, 1, 1, "mlp.up_proj")).streamed


def test_a_selector_like_nothing_is_told_all_there_is() -> None:
    shape = named("mlp.up_proj")
    with pytest.raises(NothingOffloaded) as caught:
        make(shape, demand(None), uva(GIB, "zzzzzz", "qqqqqq"))
    assert caught.value.suggestion.endswith("with one of: layers, mlp, model, up_proj, weight")


def test_two_words_near_to_one_name_it_once() -> None:
    with pytest.raises(NothingOffloaded) as caught:
        make(named("mlp.up_proj"), demand(None), uva(GIB, "up_prj", "up_pro"))
    assert caught.value.suggestion == "--cpu-offload-params with one of: up_proj"


@pytest.mark.parametrize("config", [prefetch(2), uva(GIB), prefetch(2, 1, 1, "up_proj"), uva(GIB, "up_proj")])
@pytest.mark.parametrize("options", [{"movable": False}, {"nbytes": 0}])
def test_weights_that_cannot_move_are_no_match(config: OffloadConfig, options: dict[str, Any]) -> None:
    """A selector that would move nothing is an error too; the message does not blame the words."""
    with pytest.raises(NothingOffloaded) as caught:
        make(named("mlp.up_proj", **options), demand(None), config)
    assert "one of" not in caught.value.suggestion
    assert ("--offload-group-size 2" if config.resolved_backend == "prefetch" else "gb 1") in caught.value.request


def test_uva_with_nothing_but_empty_parameters_that_fit() -> None:
    """An empty parameter fits every budget, and moving it would be nothing offloaded in silence."""
    shape = model(*layers([MIB, 0], [MIB, 0]))
    with pytest.raises(NothingOffloaded, match=re.escape("1.00 MiB")):
        make(shape, demand(None), uva(1000))
