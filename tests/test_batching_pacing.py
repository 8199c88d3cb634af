"""How prompts share passes with answers."""

from __future__ import annotations

from headrace.batching.pacing import Pace


def test_prompts_that_cost_nothing_get_more_room() -> None:
    pace = Pace(most_tokens=256)
    pace.note(0, 4, 1.0)
    for _ in range(10):
        pace.note(pace.tokens, 4, 1.1)
    assert pace.tokens == 256


def test_prompts_that_make_answers_stutter_get_less() -> None:
    pace = Pace(most_tokens=256)
    pace.note(0, 4, 1.0)
    pace.note(32, 4, 2.0)
    assert pace.tokens == 16
    pace.note(16, 4, 2.0)
    assert pace.tokens == 16  # a prompt has to end at some time


def test_a_small_prompt_that_was_quick_says_nothing_about_a_large_one() -> None:
    pace = Pace(most_tokens=256)
    pace.note(0, 4, 1.0)
    pace.note(3, 4, 1.0)
    assert pace.tokens == 32


def test_passes_without_answers_say_nothing() -> None:
    pace = Pace(most_tokens=256)
    pace.note(200, 0, 100.0)
    pace.note(32, 4, 100.0)
    assert pace.tokens == 32
    assert Pace(most_tokens=8).tokens == 8
