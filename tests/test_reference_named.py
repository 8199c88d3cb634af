"""A sentence of a model that names what is not in the source is dropped, however the name is written."""

from __future__ import annotations

import pytest

from headrace.reference.named import foreign, kept, sentences

SOURCE = """
def verify(self, config: ParallelConfig):
    size = config.tensor_parallel_size
    if self.num_heads % size != 0:
        raise ValueError(f"{self.num_heads} heads, use --tensor-parallel-size 4 or 2.5, see config.json")
    for name in ("auto", "flash_attn"):
        self.backend = Backend.FLASH  # since version 0.32.0, at https://example.org/docs
"""

GOOD = [
    "This happens when the number of heads cannot be divided by the size.",
    "This happens when `config.tensor_parallel_size` does not divide `self.num_heads`.",
    "It occurs when tensor_parallel_size is not a divisor of num_heads.",
    "This happens when --tensor-parallel-size is neither 4 nor another divisor.",
    "A ParallelConfig with a size of 2.5 leads to a ValueError.",
    "This happens when the value in config.json does not fit the model's heads.",
    "This happens when the backend is 'auto' or \u201cflash_attn\u201d and the heads do not fit.",
    "Users run into this well-known case with four groups of heads.",
    "This happens since 0.32.0 for such a multi-head model.",
    "This happens with Backend.FLASH and a size that doesn't fit.",
]


@pytest.mark.parametrize("sentence", GOOD)
def test_what_names_only_the_source_is_kept(sentence: str) -> None:
    assert kept(sentence, SOURCE) == [sentence.replace("\u201c", '"').replace("\u201d", '"')]


BAD = {
    "an identifier in backticks": "This happens when `pipeline_parallel_size` is too large for it.",
    "a plain word in backticks": "This happens when `world` is too large for the heads.",
    "a call in backticks": "This happens when `verify(strict)` is called too early.",
    "snake case": "This happens when max_num_seqs is larger than the heads allow.",
    "camel case": "This happens when the EngineArgs ask for a size that does not fit.",
    "lower camel case": "This happens when the numHeads of the model do not fit.",
    "a constant": "This happens when the backend is set to XFORMERS by the user.",
    "a constant with underscores": "This happens when VLLM_USE_V1 is set by the user.",
    "a flag": "This happens when --max-model-len is larger than the heads allow.",
    "a short flag": "This happens when -tp is larger than the heads of it allow.",
    "a longer flag": "This happens when --tensor-parallel-size-limit is too large.",
    "a part of a flag": "This happens when --tensor-parallel is given a wrong size.",
    "a number": "This happens when the size is 8 and the heads do not fit it.",
    "a number in words": "This happens when the size is eight and the heads do not fit it.",
    "a part of a number": "This happens when the size is 32 and the heads do not fit it.",
    "a longer number": "This happens when the size is 44 and the heads do not fit it.",
    "a negative number": "This happens when the size is -4 and the heads do not fit it.",
    "a number with a unit": "This happens when the model has 4GB of weights or even more.",
    "a share": "This happens when the size is more than 4% of all the heads.",
    "twice as much": "This happens when the size is twice what the heads allow.",
    "a version": "This happens since 0.33.0 for each model of that kind.",
    "a longer version": "This happens since 0.32.0.1 for each model of that kind.",
    "a version with a letter": "This happens since v0.32.0 for each model of that kind.",
    "a file": "This happens when the value in settings.yaml does not fit.",
    "a file with a longer name": "This happens when the value in config.json5 does not fit.",
    "a path": "This happens when the value in /etc/hosts does not fit.",
    "an address": "This happens as https://example.com/docs explains in some words.",
    "another attribute": "This happens when config.pipeline_parallel_size does not fit.",
    "a quoted value": "This happens when the backend is 'cuda' and the heads do not fit.",
    "a value in typographic quotes": "This happens when the backend is \u201ceager\u201d for some reason.",
    "a name with a capital": "This happens when Kubernetes gives too few devices to it.",
    "a name at the beginning": "Kubernetes gives too few devices to it in such a case.",
    "an acronym": "This happens when there are too few GPUs for the heads of it.",
    "software in small letters": "This happens when docker gives too few devices to it.",
    "software in a longer word": "This happens when a torch-based model has too few heads.",
    "an assignment": "This happens when size=4 does not fit the heads of the model.",
    "two words with a slash": "This happens when the heads and/or the size do not fit.",
    "another alphabet": "This happens when the s\u0456ze does not fit the heads at all.",
    "hidden characters": "This happens when the si\u200bze does not fit the heads at all.",
    "a link": "This happens when the [size](docs) does not fit the heads.",
    "a dotted name in bold": "This happens when **torch.cuda** is not there for the heads.",
    "a dunder": "This happens when __init__ is called with too few of them.",
    "None": "This happens when the size is None for whatever reason.",
}


@pytest.mark.parametrize("sentence", BAD.values(), ids=BAD.keys())
def test_what_names_something_else_is_dropped(sentence: str) -> None:
    assert kept(sentence, SOURCE) == []
    assert foreign(" ".join(sentences(sentence)), SOURCE)


def test_only_the_sentence_with_the_name_goes() -> None:
    text = f"{GOOD[0]} {BAD['a flag']} {GOOD[1]}"
    assert kept(text, SOURCE) == [GOOD[0], GOOD[1]]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "This happens.",
        "This happens when the size is",
        "no capital at the beginning of it, so it is no sentence.",
        "This " + "really " * 60 + "happens.",
        "## This happens when the size does not fit.",
        "```\nThis happens when the size does not fit.\n```",
        "Does this happen when the size does not fit?",
    ],
)
def test_what_is_no_sentence_is_dropped(text: str) -> None:
    assert kept(text, SOURCE) == []


def test_lists_are_taken_apart_and_sentences_are_kept_once() -> None:
    text = f"- {GOOD[0]}\n2. {GOOD[1]}\n* {GOOD[0]}\n\n> {GOOD[2]}"
    assert kept(text, SOURCE) == [GOOD[0], GOOD[1], GOOD[2]]


def test_a_version_does_not_end_a_sentence() -> None:
    assert sentences("This happens since 0.32.0 for it. It is so.") == [
        "This happens since 0.32.0 for it.",
        "It is so.",
    ]
