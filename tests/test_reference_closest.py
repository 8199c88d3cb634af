"""Texts are compared by their rare words in order."""

from __future__ import annotations

import pytest

from headrace.reference.closest import Rarity, difference, nearness, template_words, words
from headrace.reference.records import Placeholder

RARITY = Rarity(1000, {"the": 900, "of": 800, "blocks": 20, "cache": 40})


def test_words() -> None:
    assert words("KV-cache: 31.4 of `max_model_len` (Größe)") == ["kv", "cache", "of", "max_model_len", "größe"]


def test_values_are_no_words_of_a_template() -> None:
    assert template_words(("no ", Placeholder("the_name"), " here")) == ("no", "here")


def test_rare_words_count_more() -> None:
    assert RARITY.weight("unheard") > RARITY.weight("blocks") > RARITY.weight("cache") > RARITY.weight("the") > 0


def test_the_same_text_is_nearest() -> None:
    text = words("no memory for the cache blocks")
    same = nearness(text, text, RARITY)
    assert (same.share, same.said) == (pytest.approx(1), pytest.approx(1))
    assert same.common == pytest.approx(same.whole)
    assert nearness(text, words("no memory for blocks"), RARITY).common < same.common


def test_order_counts() -> None:
    text = words("blocks of cache")
    assert nearness(text, words("cache of blocks"), RARITY).common < nearness(text, text, RARITY).common


def test_a_text_that_has_grown_is_near_on_one_side() -> None:
    near = nearness(words("no cache blocks"), words("no cache blocks are left so try a smaller model"), RARITY)
    assert near.said == pytest.approx(1)
    assert near.share < 0.5
    assert near.score == pytest.approx(near.common)


def test_nothing_in_common() -> None:
    assert nearness(words("a b"), words("c d"), RARITY).score == 0
    assert nearness([], [], RARITY).score == 0


def test_the_heaviest_common_words_are_taken() -> None:
    """`the the the` in order would be longer, `unheard` weighs more."""
    near = nearness(words("unheard the the the"), words("the the the unheard"), RARITY)
    assert near.common == pytest.approx(max(RARITY.weight("unheard"), 3 * RARITY.weight("the")))


def test_difference() -> None:
    template = ("Free memory on device ", Placeholder("gpu"), " is low")
    assert difference("Free memory on device is too low", template) == [
        ("same", "Free memory on device"),
        ("theirs", "{gpu}"),
        ("same", "is"),
        ("yours", "too"),
        ("same", "low"),
    ]
