"""`headrace demo`: a real model inside half the memory of its weights, and the proof that its tokens are the same."""

from __future__ import annotations

import json
from typing import Any

from rich.console import Console

from headrace import errors
from headrace.cli import show
from headrace.cli.run import answer_json, interrupt_sets_event, require_engine
from headrace.core import Plan
from headrace.units import format_bytes

QUESTIONS = ("What is the capital of France?", "Why is the sky blue? Answer in one sentence.")
MAX_TOKENS = 48
WEIGHT_SHARE = 0.5


def demo(*, as_json: bool) -> int:
    """Import the model once, answer with half of its weights in memory, answer again with all of them, compare."""
    require_engine()
    from headrace import sources

    console = Console(highlight=False, stderr=as_json)
    with show.bars(console) as bars:
        directory = sources.resolve(sources.demo_gguf(), on_progress=bars)
    console.print(f"SmolLM2-135M-Instruct, imported once into {directory}", style="dim", soft_wrap=True)
    console.print()
    streamed, streamed_answers = _answer_all(console, directory, half=True)
    console.print(show.report_table(streamed, streamed_answers))
    console.print()
    console.print("The same questions with every weight in memory:", style="bold")
    resident, resident_answers = _answer_all(console, directory, half=False)
    same = [answer.token_ids for answer in streamed_answers] == [answer.token_ids for answer in resident_answers]
    tokens = sum(len(answer.token_ids) for answer in streamed_answers)
    if not same or not streamed.offloaded_bytes or resident.offloaded_bytes:
        raise errors.DemoFailed(tokens=tokens, offloaded_bytes=streamed.offloaded_bytes)
    console.print(
        f"The same {tokens} tokens came out of both: streamed, with {format_bytes(streamed.offloaded_bytes)} of the "
        "weights on disk, and resident, with all of them in memory.",
        style="bold",
    )
    if as_json:
        print(
            json.dumps(
                {
                    "same_tokens": same,
                    "streamed": {"answers": [answer_json(a) for a in streamed_answers], "report": streamed.to_json()},
                    "resident": {"answers": [answer_json(a) for a in resident_answers], "report": resident.to_json()},
                }
            )
        )
    return 0


def _answer_all(console: Console, directory: Any, *, half: bool) -> tuple[Any, list[Any]]:
    """Load with half or all of the weights in memory and answer both questions greedily."""
    from headrace import generate
    from headrace.engine import Engine

    def show_plan(plan: Plan) -> None:
        if half:
            console.print(show.plan_table(plan))
            console.print()

    answers = []
    with show.bars(console) as bars:
        engine = Engine.open(
            directory,
            weights_share=WEIGHT_SHARE if half else None,
            context=lambda tokenizer, longest: (128, 64),
            on_progress=bars,
            on_plan=show_plan,
        )
    with engine:
        for question in QUESTIONS:
            ids = generate.encode(engine.tokenizer, [{"role": "user", "content": question}], raw=False)
            sampling = generate.Sampling(max_tokens=MAX_TOKENS, temperature=0)
            console.print(f"> {question}", style="bold cyan")
            with interrupt_sets_event() as stop:
                answer = generate.generate(
                    engine.model, engine.tokenizer, ids, sampling, on_text=lambda text: _write(console, text), stop=stop
                )
            if answer.stopped:
                raise KeyboardInterrupt
            answers.append(answer)
            console.print("\n")
        return engine.report(), answers


def _write(console: Console, text: str) -> None:
    console.out(text, end="", highlight=False)
    console.file.flush()
