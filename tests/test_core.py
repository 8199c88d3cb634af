"""The nouns that compute something."""

from __future__ import annotations

import dataclasses
import json
import math
import pickle

import pytest
from fakes import MIB, head, layers, machine, model, table
from hypothesis import given
from hypothesis import strategies as st

from headrace.core import Bound, MemoryPlan, Products, Segment, StoredTensor, align_up


@given(st.integers(0, 2**62), st.integers(0, 20).map(lambda power: 2**power))
def test_align_up(value: int, alignment: int) -> None:
    aligned = align_up(value, alignment)
    assert aligned % alignment == 0
    assert value <= aligned < value + alignment


@pytest.mark.parametrize(
    ("compute_s", "moved_bytes", "seconds", "limit"),
    [(1.0, 0, 1.0, "compute"), (1.0, 500, 5.0, "disk"), (7.0, 500, 7.0, "compute"), (5.0, 500, 5.0, "compute")],
)
def test_a_bound_is_the_slower_of_two(compute_s: float, moved_bytes: int, seconds: float, limit: str) -> None:
    bound = Bound(compute_s, moved_bytes, 100.0)
    assert (bound.seconds, bound.limited_by) == (seconds, limit)
    assert json.loads(json.dumps(bound.to_json())) == {
        "compute_s": compute_s,
        "moved_bytes": moved_bytes,
        "link_bytes_per_s": 100.0,
        "link": "disk",
        "disk_bytes": 0,
        "disk_bytes_per_s": 0.0,
        "seconds": seconds,
        "limited_by": limit,
    }


@pytest.mark.parametrize(
    ("compute_s", "moved", "from_disk", "limit"),
    [(9.0, 500, 50, "compute"), (1.0, 500, 20, "link"), (1.0, 500, 80, "disk"), (5.0, 500, 50, "compute")],
)
def test_with_an_accelerator_the_slowest_of_three_counts(
    compute_s: float, moved: int, from_disk: int, limit: str
) -> None:
    bound = Bound(compute_s, moved, 100.0, "link", from_disk, 10.0)
    assert bound.limited_by == limit
    assert bound.seconds == max(compute_s, moved / 100, from_disk / 10)


def test_a_bound_without_moving_needs_no_link() -> None:
    assert Bound(1.0, 0, 0.0).seconds == 1.0


def test_a_memory_plan_adds_up_all_of_its_fields() -> None:
    plan = MemoryPlan(1, 2, 4, 8, 16, 32)
    assert plan.total_bytes == sum(dataclasses.astuple(plan)) == 63


def test_weights_are_counted_once_each() -> None:
    shape = model(table(MIB), *layers([1, 2], [3]), head(4), fixed_bytes=5)
    assert shape.weight_bytes == MIB + 1 + 2 + 3 + 4 + 5
    assert StoredTensor("w", "F32", (2,), Segment("f", 0, 8)).nbytes == 8


def test_nouns_are_frozen_and_can_be_sent() -> None:
    for noun in (machine(), model(*layers([1])), Segment("f", 0, 1)):
        assert pickle.loads(pickle.dumps(noun)) == noun
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(noun, dataclasses.fields(noun)[0].name, None)


def test_products_take_as_long_as_was_measured_and_in_proportion_between() -> None:
    products = Products(((1, 100.0), (3, 50.0), (11, 10.0)))
    assert [products.seconds(1000, rows) for rows in (1, 2, 3, 7, 11, 22)] == pytest.approx([10, 15, 20, 60, 100, 200])


@given(
    st.lists(st.floats(1e6, 1e12), min_size=1, max_size=5),
    st.integers(1, 5000),
    st.integers(1, 5000),
    st.floats(1, 1e12),
)
def test_more_bytes_take_longer_and_time_lies_between_what_was_measured(
    rates: list[float], rows: int, more: int, nbytes: float
) -> None:
    products = Products(tuple((4**index, rate) for index, rate in enumerate(rates)))
    seconds = products.seconds(nbytes, rows)
    assert math.isclose(products.seconds(2 * nbytes, rows), 2 * seconds)
    beyond = max(1.0, rows / 4 ** (len(rates) - 1))
    assert nbytes / max(rates) * (1 - 1e-9) <= seconds <= nbytes / min(rates) * beyond * (1 + 1e-9)
    if rows > 4 ** (len(rates) - 1):
        assert products.seconds(nbytes, rows + more) > seconds
