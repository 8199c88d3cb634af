"""How prompts share passes with answers."""

from __future__ import annotations

from headrace.batching.pacing import Pace


def test_prompts_that_cost_nothing_get_more_room() -> None:
    pace = Pace(most_tokens=256)
    pace.note(0, 4, 1.0)
    for _ in range(15):
        pace.note(pace.tokens, 4, 1.1)
    assert pace.tokens == 256


def test_prompts_that_make_answers_stutter_get_less() -> None:
    pace = Pace(most_tokens=256)
    pace.note(0, 4, 1.0)
    for _ in range(5):
        pace.note(pace.tokens, 4, 1.0)
    before = pace.tokens
    pace.note(before, 4, 2.0)
    assert pace.tokens == before // 2
    pace.note(16, 4, 2.0)
    assert pace.tokens == 16
    pace.note(16, 4, 2.0)
    assert pace.tokens == 16  # a prompt has to end at some time


def test_what_was_too_much_is_not_tried_again_at_once() -> None:
    pace = Pace(most_tokens=1024)
    pace.note(0, 4, 1.0)

    def seconds(tokens: int) -> float:
        return 1.0 if tokens <= 100 else 1.0 + tokens / 100

    passes = []
    for _ in range(60):
        passes.append(seconds(pace.tokens))
        pace.note(pace.tokens, 4, passes[-1])
    slow = [number for number, taken in enumerate(passes) if taken > 1]
    assert slow[0] == 9, "16, 20, 25 and so on to 116"
    assert max(passes) < 2.2, "the first that is too much is so by little"
    assert len(slow) <= 6, slow
    assert pace.tokens > 64, "it comes near to what costs nothing"


def test_a_machine_that_becomes_quicker_is_noticed() -> None:
    pace = Pace(most_tokens=1024)
    pace.note(0, 4, 1.0)
    pace.note(pace.tokens, 4, 9.0)
    for _ in range(400):
        pace.note(pace.tokens, 4, 1.0)
    assert pace.tokens == 1024


def test_a_small_prompt_that_was_quick_says_nothing_about_a_large_one() -> None:
    pace = Pace(most_tokens=256)
    pace.note(0, 4, 1.0)
    pace.note(3, 4, 1.0)
    assert pace.tokens == 16


def test_passes_without_answers_say_nothing() -> None:
    pace = Pace(most_tokens=256)
    pace.note(200, 0, 100.0)
    pace.note(32, 4, 100.0)
    assert pace.tokens == 16
    assert Pace(most_tokens=8).tokens == 8
