"""Drafts out of the text so far: the longest repetition of its end, and how much of it is drafted."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from headrace.lookup import EXPECTED, LONGEST_MATCH, Acceptance, Lookup, Repetitions

texts = st.lists(st.integers(0, 3), max_size=60)


def drafter(
    most: int = 8, pass_tokens: float | None = None, ends: list[int] | None = None, max_length: int = 1000
) -> Lookup:
    return Lookup(most, pass_tokens, None if ends is None else torch.tensor(ends), max_length)


def draft(lookup: Lookup, tokens: list[int]) -> list[int]:
    candidates, logits = lookup.get_candidates(torch.tensor([tokens]))
    assert logits is None
    assert candidates[0, : len(tokens)].tolist() == tokens
    return candidates[0, len(tokens) :].tolist()  # type: ignore[no-any-return]


def longest_by_trying(text: list[int], most: int) -> tuple[int, list[int]]:
    for length in range(min(LONGEST_MATCH, len(text) - 1), 0, -1):
        for end in range(len(text) - 1, length - 1, -1):
            if text[end - length : end] == text[-length:]:
                return length, text[end : end + most]
    return 0, []


@given(texts, st.integers(0, 10), st.integers(1, 60))
def test_the_longest_repetition_is_found_however_the_text_grew(text: list[int], most: int, step: int) -> None:
    repetitions = Repetitions()
    for begin in range(0, len(text), step):
        repetitions.extend(text[begin : begin + step])
    assert len(repetitions) == len(text)
    assert repetitions.longest(most) == longest_by_trying(text, most)


def test_of_equal_matches_the_last_one_counts() -> None:
    assert draft(drafter(2), [1, 2, 7, 8, 1, 2, 5, 6, 1, 2]) == [5, 6]
    assert draft(drafter(2), [9, 1, 2, 7, 8, 1, 2, 5, 6, 9, 1, 2]) == [7, 8], "but a longer one goes before"
    assert draft(drafter(), [1, 2, 3]) == []


def test_a_draft_ends_before_an_end_token_and_before_the_longest_text() -> None:
    text = [1, 2, 3, 4, 5, 6, 1]
    assert draft(drafter(), text) == [2, 3, 4, 5, 6, 1]
    assert draft(drafter(ends=[5, 9]), text) == [2, 3, 4]
    assert draft(drafter(ends=[2]), text) == []
    assert draft(drafter(max_length=len(text) + 3), text) == [2, 3]
    assert draft(drafter(max_length=len(text) + 1), text) == []


def test_fewer_tokens_are_drafted_where_more_do_not_pay() -> None:
    long, short = list(range(10, 30)) * 2, [7, 1, 2, 3, 4, 5, 6, 7]
    lengths = {waiting: (len(draft(drafter(8, waiting), long)), len(draft(drafter(8, waiting), short))) for waiting in
               (None, 0.5, 1.2, 2.0, 4.0, 9.0)}  # fmt: skip
    assert lengths == {None: (8, 7), 0.5: (0, 0), 1.2: (1, 0), 2.0: (1, 1), 4.0: (3, 3), 9.0: (8, 7)}


def test_what_was_right_is_drafted_more() -> None:
    lookup, text = drafter(8, 2.5), [1, 2, 3, 4, 5, 6, 1]
    first = len(draft(lookup, text))
    for _ in range(8):
        lookup.update_candidate_strategy(torch.tensor([text]), None, 1)
    assert len(draft(lookup, text)) > first


def test_acceptance_is_counted_by_the_length_of_the_match() -> None:
    seen = Acceptance()
    assert [seen.expected(length) for length in range(1, 8)] == [*EXPECTED, EXPECTED[-1], EXPECTED[-1]]
    seen.note(1, drafted=8, right=0)
    assert seen.expected(1) < EXPECTED[0]
    assert seen.expected(2) == EXPECTED[1]
    seen.note(9, drafted=4, right=4)
    assert seen.expected(5) == pytest.approx((EXPECTED[-1] * 4 + 4) / 8)


def test_what_was_not_drafted_tells_nothing() -> None:
    lookup = drafter(8, 0.1)
    assert draft(lookup, [1, 2, 1]) == []
    lookup.update_candidate_strategy(torch.tensor([[1, 2, 1]]), None, 0)
    assert lookup._acceptance.expected(1) == EXPECTED[0]
