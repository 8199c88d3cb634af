"""How many tokens a pass verifies, and how many sequences share one."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from fakes import MIB, demand, head, layers, machine, model, table
from hypothesis import given
from hypothesis import strategies as st

from headrace.config import OffloadConfig
from headrace.core import Choice, Plan, Speculation
from headrace.errors import BudgetTooSmall
from headrace.planner import Demand, Load, best_drafted, choose_load, demand_of, plan

SHAPE = model(table(20 * MIB), *layers(*[(40 * MIB, 10 * MIB)] * 10), head(20 * MIB))
SMALL = model(table(2 * MIB), *layers(*[(4 * MIB,)] * 2), head(2 * MIB))
CONFIG = OffloadConfig()


def planned(memory: int | None = 400 * MIB, *, computing: float = 2e10, **question: Any) -> Plan:
    asked = dataclasses.replace(demand(memory), **question)
    return plan(SHAPE, machine(compute_bytes_per_s=computing), asked, CONFIG)


def row(made: Plan) -> Choice:
    (found,) = [choice for choice in made.choices if choice.name == "speculation"]
    return found


def test_without_a_question_there_is_no_row() -> None:
    made = planned()
    assert made.speculation == Speculation()
    assert "speculation" not in [choice.name for choice in made.choices]


def test_lookup_knows_how_many_tokens_are_computed_in_the_time_of_the_reads() -> None:
    made = planned(speculate="auto")
    assert made.speculation == Speculation("lookup", 10, made.bound.moving_s / made.bound.compute_s)
    assert row(made).value == "lookup, up to 10 tokens"
    assert "as many as are likely enough to be right" in row(made).reason
    assert not row(made).reason.startswith("asked for")
    assert row(planned(speculate="lookup")).reason == f"asked for; {row(made).reason}"


@given(st.floats(0, 1), st.integers(0, 10), st.floats(0, 30), st.floats(0, 2))
def test_no_other_number_of_drafted_tokens_is_faster(
    accepted: float, most: int, pass_tokens: float, draft_tokens: float
) -> None:
    def seconds_per_token(drafted: int) -> float:
        made = 1 + sum(accepted ** (number + 1) for number in range(drafted))
        return (max(pass_tokens, 1 + drafted) + drafted * draft_tokens) / made

    best = best_drafted(accepted, most, pass_tokens, draft_tokens)
    assert 0 <= best <= most
    assert all(seconds_per_token(best) <= seconds_per_token(other) * (1 + 1e-9) for other in range(most + 1))


def test_drafts_cost_nothing_while_a_pass_waits_and_pay_beyond_if_they_are_likely() -> None:
    assert [best_drafted(0.0, 10, 9.0), best_drafted(0.1, 10, 9.0), best_drafted(0.1, 10, 0.9)] == [0, 8, 0]
    assert [best_drafted(accepted, 10, 2.5) for accepted in (0.3, 0.95)] == [1, 2]


@pytest.mark.parametrize(
    ("question", "reason"),
    [
        ({"memory": None}, "nothing moves"),
        ({"computing": 3e9}, "would make the pass longer"),
        ({"greedy": False}, "sampled"),
        ({"cannot_speculate": "it keeps a state"}, "it keeps a state"),
    ],
)
def test_by_itself_nothing_is_drafted_where_it_does_not_pay(question: dict[str, Any], reason: str) -> None:
    made = planned(speculate="auto", **question)
    assert made.speculation == Speculation()
    assert row(made).value == "off"
    assert reason in row(made).reason


def test_what_is_asked_for_is_done_and_said_not_to_pay() -> None:
    assert row(planned(speculate="off")).reason == "asked for"
    made = planned(memory=None, speculate="lookup")
    assert made.speculation == Speculation("lookup", 4)
    assert row(made).value == "lookup, 4 tokens"
    assert "not expected to be faster" in row(made).reason
    assert "not expected" not in row(planned(speculate="lookup", greedy=False)).reason


def test_a_draft_model_takes_its_bytes_from_the_budget() -> None:
    without, with_draft = planned(), planned(speculate="draft", draft=SMALL)
    memory = with_draft.memory
    assert memory.draft_bytes > SMALL.weight_bytes
    assert memory.total_bytes <= 400 * MIB
    assert memory.resident_bytes < without.memory.resident_bytes
    assert with_draft.bound.moved_bytes > without.bound.moved_bytes
    assert with_draft.speculation.kind == "draft"
    assert 1 <= with_draft.speculation.tokens <= 10
    assert "draft model" in next(choice.reason for choice in with_draft.choices if choice.name == "memory")


def test_a_slower_draft_model_drafts_fewer_tokens() -> None:
    quick = planned(computing=1e11, speculate="draft", draft=SMALL).speculation.tokens
    slow = planned(900 * MIB, computing=1e11, speculate="draft", draft=SHAPE).speculation.tokens
    assert slow < quick


def test_a_budget_that_does_not_hold_the_draft_model_says_what_would() -> None:
    question: dict[str, Any] = {"speculate": "draft", "draft": SHAPE}
    with pytest.raises(BudgetTooSmall) as caught:
        planned(**question)
    assert caught.value.fixed_bytes > SHAPE.weight_bytes
    assert planned(caught.value.needed_bytes, **question).speculation.kind == "draft"


# --- how many sequences ---------------------------------------------------------------------------------------------


def chosen(memory: int | None, *sizes: int, tokens: int = 100, computing: float = 2e10) -> tuple[Load, Choice, Demand]:
    here, asked = machine(compute_bytes_per_s=computing), demand(memory)
    loads = [Load(size, tokens, 10) for size in sizes]
    load, why = choose_load(SHAPE, here, asked, CONFIG, loads)
    return load, why, demand_of(asked, load)


def test_where_reads_are_shared_more_sequences_are_better() -> None:
    load, why, asked = chosen(400 * MIB, 1, 2, 4, 8, 16)
    assert load.batch == 16
    assert (asked.batch, asked.context_tokens) == (16, 100)
    assert why.value == "16 sequences"
    speeds = [plan(SHAPE, machine(), demand_of(asked, Load(n, 100, 10)), CONFIG).tokens_per_s for n in (1, 16)]
    assert why.reason.startswith(f"{speeds[1]:.3g} tokens/s, with 1 at a time {speeds[0]:.3g}")


def test_a_cache_that_displaces_more_than_it_shares_is_not_filled() -> None:
    """A sequence of 40,000 tokens takes some 40 MiB: of each one more a pass reads as much more."""
    load, why, _ = chosen(400 * MIB, 1, 2, 4, 8, 16, tokens=40_000)
    assert 1 < load.batch < 16
    assert "do not fit into memory" in why.reason or "would make" in why.reason


def test_the_first_load_is_taken_even_if_it_does_not_fit() -> None:
    load, _, asked = chosen(20 * MIB, 4, 8)
    assert load.batch == 4
    with pytest.raises(BudgetTooSmall):
        plan(SHAPE, machine(), asked, CONFIG)
    assert chosen(400 * MIB, 32)[0].batch == 32
    assert chosen(400 * MIB, 1)[1].value == "1 sequence"
