"""`headrace plan --for vllm` and `headrace check -- vllm serve ...`: other engines' flags as text. Plans nothing."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

from rich.console import Console

from headrace import advice
from headrace.cli import show, terminal
from headrace.peers import commandline
from headrace.peers.budget import Share
from headrace.units import format_bytes


def print_advice(made: advice.Advice, *, as_json: bool) -> None:
    """The command line, then what it leads to."""
    if as_json:
        terminal.write(json.dumps(advice.advice_json(made), indent=2, allow_nan=False) + "\n")
        return
    console = Console(highlight=False)
    console.print(made.made.command, style="bold", soft_wrap=True)
    console.print()
    console.print(show.Rows("why", list(_reasons(made))))
    console.print()
    console.print(show.Rows("each GPU", list(_share(made.made.share))))
    _print_notes(console, made.notes)


def _reasons(made: advice.Advice) -> Iterator[tuple[str, str]]:
    recommended, wish = made.made, made.wish
    yield "choice", recommended.reason
    if recommended.flags:
        offloaded = recommended.offloaded
        yield (
            "offloaded",
            f"{format_bytes(offloaded.nbytes)} of {len(offloaded.layers)} layers on each GPU; with its buffers "
            f"{format_bytes(offloaded.saved_bytes)} are saved there",
        )
        yield (
            "host",
            f"{format_bytes(recommended.share.pinned_bytes * wish.gpus)} of pinned memory for "
            f"{format_bytes(offloaded.nbytes * wish.gpus)} of weights: each tensor takes the next power of two",
        )
        yield "moved", f"{format_bytes(offloaded.moved_bytes_per_token)} per token over each GPU's link"
    yield "decode", f"at most {1 / recommended.seconds_per_token:.3g} tokens/s for one sequence"
    used = f"{format_bytes(recommended.share.total_bytes)} of {format_bytes(wish.capacity_bytes)}"
    yield "fits", f"{used} that {wish.engine} may fill on each of {wish.gpus} GPU{'s' if wish.gpus > 1 else ''}"


def _share(split: Share) -> Iterator[tuple[str, str]]:
    for name, nbytes in (
        ("layers", split.stack_bytes),
        ("buffers", split.pool_bytes),
        ("around them", split.around_bytes),
        ("KV cache", split.kv_bytes),
        ("activations", split.activation_bytes),
        ("context, graphs", split.other_bytes),
        ("together", split.total_bytes),
    ):
        yield name, format_bytes(nbytes)


def check_line(
    words: Sequence[str], *, device: str | None, host_memory: int | None, machine: Path | None, as_json: bool
) -> int:
    """Look a command line of vLLM through. Returns the exit code: 1 if it will not do what it was written for."""
    made = advice.look_through(commandline.parse(words), device=device, host_memory=host_memory, machine=machine)
    if as_json:
        terminal.write(json.dumps(advice.review_json(made), indent=2, allow_nan=False) + "\n")
        return 0 if made.review.ok else 1
    console = Console(highlight=False)
    console.print(show.Rows("vLLM would", list(_findings(made))))
    console.print()
    console.print(show.Rows("each GPU, about", list(_share(made.review.share))))
    for title, lines in (
        ("ignored there", made.review.ignored),
        ("warning", made.review.warnings),
        ("does not fit", made.review.misfits),
    ):
        for line in lines:
            console.print(f"{title}: {line}", style="bold", soft_wrap=True)
    _print_notes(console, made.notes)
    return 0 if made.review.ok else 1


def _findings(made: advice.Reviewed) -> Iterator[tuple[str, str]]:
    found, taken = made.review, made.review.offloaded
    if not taken.layers:
        asked = "although it was asked to" if found.requested else "since no offload flag asks it to"
        yield "offload", f"nothing, {asked}"
    else:
        numbers = [number for number, _ in taken.layers]
        shown = ", ".join(map(str, numbers if len(numbers) <= 10 else [*numbers[:6], "...", numbers[-1]]))
        yield "offload", f"{format_bytes(taken.nbytes)} of {len(numbers)} of {len(made.model.layers)} layers: {shown}"
        kinds = dict.fromkeys(param.name for _, params in taken.layers for param in params)
        yield "parameters", ", ".join(list(kinds)[:8]) + (" ..." if len(kinds) > 8 else "")
        yield "save", f"{format_bytes(taken.saved_bytes)} on each GPU, buffers subtracted"
        pinned = format_bytes(found.share.pinned_bytes * made.line.gpus)
        yield "pin", f"{pinned} of host memory, each tensor rounded up to a power of two"
        yield "move", f"{format_bytes(taken.moved_bytes_per_token)} per token over each GPU's link"


def _print_notes(console: Console, notes: Sequence[str]) -> None:
    for note in (*notes, "activations, graphs and context are estimates: the engine measures them when it starts"):
        console.print(f"note: {note}", style="dim", soft_wrap=True)
