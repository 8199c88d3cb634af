"""How one request chooses its next token."""

from __future__ import annotations

import copy

import torch
from hypothesis import given
from hypothesis import strategies as st

from headrace.batching.sampling import Row, SamplingParams

SCORES = torch.linspace(-2, 2, 11)


def row(prompt: tuple[int, ...] = (1, 2), **params: object) -> Row:
    return Row(prompt, SamplingParams(**params))  # type: ignore[arg-type]


def drawn(made: Row, scores: torch.Tensor, count: int) -> list[int]:
    return [made.choose(scores) for _ in range(count)]


def test_temperature_zero_takes_the_likeliest() -> None:
    assert drawn(row(temperature=0), SCORES, 3) == [10, 10, 10]


@given(seed=st.integers(0, 2**63 - 1))
def test_the_seed_decides(seed: int) -> None:
    assert drawn(row(seed=seed), SCORES, 8) == drawn(row(seed=seed), SCORES, 8)


def test_positions_and_seeds_draw_unlike_tokens() -> None:
    flat = torch.zeros(1000)
    assert len(set(drawn(row(seed=0), flat, 50))) > 40
    assert drawn(row(seed=0), flat, 10) != drawn(row(seed=1), flat, 10)
    assert drawn(row(seed=0), flat, 10)[1:] != drawn(row(seed=1), flat, 10)[:-1]


def test_what_is_drawn_has_the_model_s_distribution() -> None:
    """20,000 draws: each share within 4 standard deviations."""
    scores = torch.tensor([0.0, 1.0, 2.0])
    counts = torch.bincount(torch.tensor([row(seed=seed).choose(scores) for seed in range(20_000)])) / 20_000
    expected = scores.softmax(-1)
    assert bool(((counts - expected).abs() < 4 * (expected * (1 - expected) / 20_000).sqrt()).all())


def test_the_filters_leave_out_what_they_should() -> None:
    assert set(drawn(row(top_k=2), SCORES, 50)) == {9, 10}
    assert set(drawn(row(top_p=0.4), SCORES, 50)) <= {9, 10}
    assert set(drawn(row(min_p=0.9), SCORES, 50)) == {10}
    assert set(drawn(row(temperature=0.01), SCORES, 50)) == {10}


def test_biases_and_penalties_change_the_choice() -> None:
    assert row(temperature=0, logit_bias=((3, 100.0),)).choose(SCORES) == 3
    assert drawn(row(temperature=0, presence_penalty=0.9), SCORES, 3) == [10, 9, 8]
    assert drawn(row(temperature=0, frequency_penalty=0.9), SCORES, 3) == [10, 9, 8]
    assert row(prompt=(10,), temperature=0, repetition_penalty=2.0).choose(SCORES) == 9


def test_a_temperature_next_to_nothing_is_nothing() -> None:
    assert drawn(row(temperature=5e-324), SCORES, 3) == [10, 10, 10]


def test_what_is_no_number_is_an_error_and_no_token() -> None:
    for bad in (torch.full((3,), torch.nan), torch.tensor([0.0, torch.nan, 1.0]), torch.full((3,), -torch.inf)):
        made = row()
        made.choose(bad)
        assert made.error is not None
        assert made.tokens == []
    fine = row(temperature=0)
    assert fine.choose(torch.tensor([0.0, -torch.inf, 1.0])) == 2
    assert fine.error is None


def test_scores_are_left_as_they_are() -> None:
    before = SCORES.clone()
    made = row(logit_bias=((3, 1.0),), presence_penalty=1.0, repetition_penalty=1.5, top_k=3, top_p=0.5, logprobs=2)
    drawn(made, SCORES, 3)
    assert torch.equal(SCORES, before)


def test_logprobs_are_the_model_s_own_whatever_changes_the_choice() -> None:
    made = row(temperature=0, logit_bias=((3, 100.0),), logprobs=2)
    made.choose(SCORES)
    expected = SCORES.log_softmax(-1)
    (entry,) = made.logprobs
    assert (entry.token, entry.logprob) == (3, float(expected[3]))
    assert entry.top == ((10, float(expected[10])), (9, float(expected[9])))


def test_a_request_that_starts_again_goes_on_where_it_was() -> None:
    """Its cache was needed elsewhere: transformers starts a copy of it."""
    made = row(seed=5)
    first = made.choose(SCORES)
    assert [first, *drawn(copy.deepcopy(made), SCORES, 5)] == drawn(row(seed=5), SCORES, 6)
