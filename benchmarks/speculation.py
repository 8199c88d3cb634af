"""Tokens per pass with lookup on real prompts, and whether greedy answers are those without drafts.

    python benchmarks/speculation.py [--prompts 50] [--tokens 200] [--draft MODEL] [--drafted N] [--together] [--fast]

SmolLM2-135M-Instruct with half of its weights in memory, or another share. Half of the prompts ask for a summary of a
piece of this project's documentation, the others for a text about something. `--together` verifies a draft's tokens in
one product, as transformers does by itself, instead of token by token: what that costs in equal answers. The last line
of output is one JSON document.
"""

import argparse
import dataclasses
import itertools
import json
import statistics
import sys
import types
from pathlib import Path

import torch

from headrace import sources
from headrace.engine import Engine
from headrace.generate import Sampling, encode, generate

DOCS = Path(__file__).parents[1] / "docs"
TASKS = (
    "Explain",
    "Write a short story about",
    "List five facts about",
    "Give step by step instructions for",
    "What is",
)
THINGS = ("the water cycle", "baking bread", "the French revolution", "photosynthesis", "a lighthouse")


def prompts(count: int) -> list[tuple[str, str]]:
    """Pairs of kind and text, the two kinds in turn."""
    text = "".join((DOCS / name).read_text() for name in ("how-it-works.md", "log.md"))
    pieces = [f"Summarize this text:\n\n{piece}" for piece in text.split("\n\n") if len(piece) > 300]
    free = [f"{task} {thing}." for task, thing in itertools.product(TASKS, THINGS)]
    pairs = itertools.chain.from_iterable(zip(pieces, free, strict=False))
    return list(zip(itertools.cycle(("summary", "free")), itertools.islice(pairs, count), strict=False))


def answers(engine: Engine, asked: list[tuple[str, str]], tokens: int, drafter) -> list:
    made = []
    for number, (kind, text) in enumerate(asked):
        ids = encode(engine.tokenizer, [{"role": "user", "content": text}], raw=False)
        made.append(generate(engine.model, engine.tokenizer, ids, Sampling(tokens, 0), drafter=drafter))
        print(f"{number} {kind}: {made[-1].tokens_per_pass} per pass", file=sys.stderr, flush=True)
    return made


def first_difference(plain, drafted) -> int | None:
    pairs = itertools.zip_longest(plain.token_ids, drafted.token_ids)
    return next((place for place, (left, right) in enumerate(pairs) if left != right), None)


def gap(engine: Engine, text: str, plain, drafted, place: int) -> float:
    """Between the two candidates' logits where the answers part, as a share of the largest logit."""
    ids = encode(engine.tokenizer, [{"role": "user", "content": text}], raw=False)[0].tolist()
    with torch.inference_mode():
        logits = engine.model(input_ids=torch.tensor([ids + list(plain.token_ids[:place])])).logits[0, -1].float()
    apart = logits[plain.token_ids[place]] - logits[drafted.token_ids[place]]
    return abs(float(apart)) / float(logits.abs().max())


def per_pass(made: list) -> float:
    return sum(len(each.decode_seconds) for each in made) / sum(each.decode_passes for each in made)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--prompts", type=int, default=50)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--draft", default="lookup")
    parser.add_argument("--drafted", type=int, help="tokens for each pass; default: up to those of the plan, as pays")
    parser.add_argument("--share", type=float, default=0.5, help="part of the weights that the budget has room for")
    parser.add_argument("--together", action="store_true")
    parser.add_argument("--fast", action="store_true", help="single rows by torch's own kernel")
    arguments = parser.parse_args()
    asked = prompts(arguments.prompts)
    model = sources.resolve(sources.demo_gguf())

    def context(tokenizer, longest: int) -> tuple[int, int]:
        """As `headrace run` plans, for the longest of the prompts."""
        lengths = [encode(tokenizer, [{"role": "user", "content": text}], raw=False).shape[1] for _, text in asked]
        return max(lengths) + arguments.tokens, max(lengths)

    with Engine.open(
        model,
        weights_share=arguments.share,
        context=context,
        speculate=arguments.draft,
        sampling=Sampling(arguments.tokens, 0),
        fast=arguments.fast,
    ) as engine:
        plain = answers(engine, asked, arguments.tokens, None)
        drafted_tokens = arguments.drafted or engine.plan.speculation.tokens
        always = {} if arguments.drafted is None else {"pass_tokens": None}
        drafter = dataclasses.replace(engine.drafter, tokens=drafted_tokens, **always)
        if arguments.together:
            drafter = dataclasses.replace(drafter, verifier=types.SimpleNamespace(is_on=False))
        drafted = answers(engine, asked, arguments.tokens, drafter)
        places = [first_difference(*pair) for pair in zip(plain, drafted, strict=True)]
        gaps = [
            gap(engine, text, one, other, place)
            for (_, text), one, other, place in zip(asked, plain, drafted, places, strict=True)
            if place is not None
        ]
        summary = {
            "drafted_for_a_pass": drafted_tokens,
            "planned_for_a_pass": engine.plan.speculation.tokens,
            "together": arguments.together,
            "answers": len(asked),
            "answers_that_differ": len(gaps),
            "largest_gap": max(gaps, default=0.0),
            "tokens": sum(len(each.token_ids) for each in drafted),
            "seconds_per_token": statistics.median(second for each in drafted for second in each.decode_seconds),
            "seconds_per_token_without": statistics.median(second for each in plain for second in each.decode_seconds),
        }
    for kind in ("summary", "free"):
        summary[f"tokens_per_pass_{kind}"] = per_pass(
            [answer for (each, _), answer in zip(asked, drafted, strict=True) if each == kind]
        )
    print(json.dumps(summary))


if __name__ == "__main__":
    main()
