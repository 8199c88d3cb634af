"""`headrace demo`: a real model inside half the memory of its weights, and the proof that its tokens are the same."""

from __future__ import annotations

import functools
import json
from typing import Any

from rich.console import Console

from headrace import errors
from headrace.cli import show, terminal
from headrace.cli.run import require_engine
from headrace.core import Plan
from headrace.units import format_bytes

QUESTIONS = ("What is the capital of France?", "Why is the sky blue? Answer in one sentence.")
MAX_TOKENS = 48
WEIGHT_SHARE = 0.5
CONTEXT, PREFILL = 128, 64
"""Tokens that the cache is planned for; each question has fewer than PREFILL."""


def demo(*, as_json: bool) -> int:
    """Import the model once, answer with half of its weights in memory, answer again with all of them, compare."""
    require_engine()
    from headrace import sources

    console = Console(highlight=False, stderr=as_json)
    with show.bars(console) as bars:
        directory = sources.resolve(sources.demo_gguf(), on_progress=bars)
    console.print(f"SmolLM2-135M-Instruct, imported once into {directory}", style="dim", soft_wrap=True)
    console.print()
    # The run with less memory comes first: the peak is that of the process, and can only grow.
    streamed, streamed_answers = _answer_all(console, directory, half=True)
    console.print(show.report_rows(streamed, streamed_answers))
    console.print()
    console.print("The same questions with all of the weights in memory:", style="bold")
    console.print()
    resident, resident_answers = _answer_all(console, directory, half=False)
    same = [answer.token_ids for answer in streamed_answers] == [answer.token_ids for answer in resident_answers]
    tokens = sum(len(answer.token_ids) for answer in streamed_answers)
    if as_json:
        document = {
            "same_tokens": same,
            "streamed": show.figures(streamed, streamed_answers),
            "resident": show.figures(resident, resident_answers),
        }
        terminal.write(json.dumps(document, allow_nan=False) + "\n")
    if not same or not streamed.offloaded_bytes or resident.offloaded_bytes:
        raise errors.DemoFailed(tokens=tokens, offloaded_bytes=streamed.offloaded_bytes)
    console.print(
        f"The same {tokens} tokens came out both times: with {format_bytes(streamed.offloaded_bytes)} of the weights "
        "on disk, and with all of them in memory.",
        style="bold",
    )
    return 0


def _answer_all(console: Console, directory: Any, *, half: bool) -> tuple[Any, list[Any]]:
    """Load with half or all of the weights in memory and answer both questions greedily."""
    from headrace import generate
    from headrace.engine import Engine

    terminal.raise_if_interrupted()
    answers = []
    with show.bars(console) as bars:
        engine = Engine.open(
            directory,
            weights_share=WEIGHT_SHARE if half else None,
            context=lambda tokenizer, longest: (CONTEXT, PREFILL),
            on_progress=bars,
            on_plan=functools.partial(_show_plan, console) if half else None,
        )
    with engine:
        for question in QUESTIONS:
            ids = generate.encode(engine.tokenizer, [{"role": "user", "content": question}], raw=False)
            sampling = generate.Sampling(max_tokens=MAX_TOKENS, temperature=0)
            console.print(f"> {question}", style="bold cyan")
            with terminal.without_echo(), terminal.interrupt_sets_event() as stop:
                answer = generate.generate(
                    engine.model, engine.tokenizer, ids, sampling, on_text=functools.partial(_write, console), stop=stop
                )
            if answer.stopped:
                raise KeyboardInterrupt
            answers.append(answer)
            console.print("\n")
        return engine.report(), answers


def _show_plan(console: Console, plan: Plan) -> None:
    weights_bytes = plan.memory.resident_bytes + plan.offloaded_bytes
    console.print(
        f"Its weights take {format_bytes(weights_bytes)}. It gets a memory budget in which half of them would fit "
        "beside all else that the process needs; the rest has to stay on disk."
    )
    console.print()
    console.print(show.plan_rows(plan))
    console.print()


def _write(console: Console, text: str) -> None:
    console.out(text, end="", highlight=False)
    console.file.flush()
