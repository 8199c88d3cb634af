"""Plans, progress and reports as text on a terminal. Knows their records, not how they come about."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from rich.console import Console, ConsoleOptions
from rich.progress import BarColumn, DownloadColumn, Progress, TaskID, TextColumn, TransferSpeedColumn
from rich.text import Text

from headrace.units import format_bytes, format_rate, format_seconds

if TYPE_CHECKING:
    from headrace.core import Plan
    from headrace.generate import Answer
    from headrace.reports import Report


WIDEST = 110
"""Longer lines are hard to read."""


@dataclass(frozen=True, slots=True)
class Rows:
    """A title and rows of a name, maybe a value, and words about it that wrap; below one another if it is narrow.

    Not rich's table, which pads every line with blanks to the width of the longest.
    """

    title: str
    rows: Sequence[tuple[str, ...]]
    """The last cell of each wraps; the others do not."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Text]:
        yield Text(self.title, style="bold")
        widths = [max(len(row[column]) for row in self.rows) + 2 for column in range(len(self.rows[0]) - 1)]
        width = min(options.max_width, WIDEST)
        if width - sum(widths) < 30:
            widths = []
        for row in self.rows:
            yield from self._wide(row, widths, width) if widths else self._narrow(row, width)

    def _wide(self, row: tuple[str, ...], widths: Sequence[int], width: int) -> Iterator[Text]:
        *cells, words = row
        first = "".join(cell.ljust(size) for cell, size in zip(cells, widths, strict=True))
        indent = " " * len(first)
        for number, line in enumerate(textwrap.wrap(words, width - len(first)) or [""]):
            text = Text((first if number == 0 else indent) + line)
            text.stylize("bold", 0, widths[0])
            if len(row) > 2:
                text.stylize("dim", len(first))
            yield text

    def _narrow(self, row: tuple[str, ...], width: int) -> Iterator[Text]:
        name, *others = row
        yield Text(f"{name}  {others[0]}" if len(others) > 1 else name, style="bold")
        for line in textwrap.wrap(others[-1], max(8, width - 2)):
            yield Text(f"  {line}")


def plan_rows(plan: Plan) -> Rows:
    """The choices with their reasons."""
    return Rows("plan", [(choice.name, choice.value, choice.reason) for choice in plan.choices])


def report_rows(report: Report, answers: list[Answer]) -> Rows:
    """Where the bytes are, what moved, how fast it was against the bound, how much memory it took."""
    return Rows("report", list(_figures(report, answers)))


def _figures(report: Report, answers: list[Answer]) -> Iterator[tuple[str, str]]:
    counters, bound = report.counters, report.bound
    yield "weights", _tiers(report)
    if report.ring_bytes:
        net = report.net_saving_bytes
        saving = f"saves {format_bytes(net)} net" if net > 0 else "saves nothing"
        yield "ring", f"{format_bytes(report.ring_bytes)} of memory for what streams, so offloading {saving}"
    if counters.passes and counters.read_bytes:
        rate = counters.read_bytes / counters.passes
        is_one = answers and not any(answer.drafted_tokens for answer in answers)
        each = "token" if is_one else "pass"
        yield (
            "read",
            f"{format_bytes(rate)} per {each}, {format_bytes(counters.read_bytes)} in {counters.passes} passes over "
            "the layers",
        )
    speed = tokens_per_s(answers)
    if speed is not None:
        yield (
            "speed",
            f"{speed:.2f} tokens/s, {100 * share_of_bound(report, answers):.0f} % of the bound of "
            f"{_per_second(report, answers)} ({format_seconds(bound.seconds)} per pass, limited by {bound.limited_by})",
        )
        yield from _drafts(answers)
    if answers:
        last = " (the last answer's)" if len(answers) > 1 else ""
        yield "first token", f"after {format_seconds(answers[-1].seconds_to_first_token)}{last}"
    if counters.stalls:
        yield "waits", f"{format_seconds(counters.stall_s)} for weights, over {counters.stalls} blocks"
    if counters.slot_misses:
        yield "slot misses", f"{counters.slot_misses} blocks were not where they were expected: read on the spot"
    yield "peak memory", _peak(report)
    for fallback in report.fallbacks:
        yield "fallback", fallback


def _per_second(report: Report, answers: list[Answer]) -> str:
    """The bound in tokens: with drafts there are as many in a pass as there were."""
    bound = 1 / report.bound.seconds
    made = tokens_per_pass(answers) or 1.0
    return f"{bound:.2f} tokens/s" if made == 1 else f"{bound * made:.2f} tokens/s at {made:.2f} per pass"


def _drafts(answers: list[Answer]) -> Iterator[tuple[str, str]]:
    made, drafted = tokens_per_pass(answers), sum(answer.drafted_tokens for answer in answers)
    if made is not None and drafted:
        passes = sum(answer.decode_passes for answer in answers)
        right = sum(answer.accepted_tokens for answer in answers)
        yield (
            "speculation",
            f"{made:.2f} tokens per pass: in {passes} passes {right} of {drafted} drafted tokens were right",
        )


def _tiers(report: Report) -> str:
    if not report.offloaded_bytes:
        return f"{format_bytes(report.resident_bytes)}, all of it in memory"
    looked_up = f" ({format_bytes(report.looked_up_bytes)} of it looked up by rows)" if report.looked_up_bytes else ""
    return f"{format_bytes(report.resident_bytes)} in memory, {format_bytes(report.offloaded_bytes)} on disk{looked_up}"


def _peak(report: Report) -> str:
    peak = format_bytes(report.peak_memory_bytes)
    if report.requested_bytes is None:
        return f"{peak} (no budget was given)"
    share = 100 * report.peak_memory_bytes / report.requested_bytes
    return f"{peak}, {share:.0f} % of the budget of {format_bytes(report.requested_bytes)}"


def figures(report: Report, answers: list[Answer]) -> dict[str, Any]:
    """Every figure as plain data for JSON; `share_of_bound` is 1.0 at the physical limit."""
    speed = tokens_per_s(answers)
    return {
        "answers": [
            asdict(answer)
            | {
                "seconds_per_token": answer.seconds_per_token,
                "tokens_per_s": answer.tokens_per_s,
                "tokens_per_pass": answer.tokens_per_pass,
                "accepted_tokens": answer.accepted_tokens,
            }
            for answer in answers
        ],
        "tokens_per_s": speed,
        "tokens_per_pass": tokens_per_pass(answers),
        "share_of_bound": None if speed is None else share_of_bound(report, answers),
        "report": report.to_json(),
    }


def tokens_per_s(answers: list[Answer]) -> float | None:
    """Over every decoded token of all answers, or None if no answer had two tokens."""
    seconds = [second for answer in answers for second in answer.decode_seconds]
    return len(seconds) / sum(seconds) if seconds else None


def tokens_per_pass(answers: list[Answer]) -> float | None:
    """Over all passes after first tokens, or None if there were none."""
    passes = sum(answer.decode_passes for answer in answers)
    return sum(len(answer.decode_seconds) for answer in answers) / passes if passes else None


def share_of_bound(report: Report, answers: list[Answer]) -> float:
    """How near passes are to the physical limit, which is 1.0; drafts do not count, since the bound is of a pass."""
    speed, made = tokens_per_s(answers), tokens_per_pass(answers)
    return 0.0 if speed is None or made is None else speed / made * report.bound.seconds


class Bars:
    """A progress bar for each thing that is going on, made when it is first heard of."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._tasks: dict[str, TaskID] = {}

    def __call__(self, what: str, done: int, total: int) -> None:
        if what not in self._tasks:
            self._tasks[what] = self._progress.add_task(what, total=total)
        self._progress.update(self._tasks[what], completed=done, total=total)


@contextmanager
def bars(console: Console) -> Iterator[Bars]:
    """Progress bars that vanish when they are done; nothing at all if the console is no terminal."""
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(binary_units=True), TransferSpeedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        yield Bars(progress)


def rate_line(report: Report, answer: Answer) -> str:
    """One line after an answer: speed, share of the bound, what was read."""
    speed = tokens_per_s([answer])
    tokens = len(answer.token_ids)
    if speed is None:
        return f"{tokens} token{'s' if tokens != 1 else ''}"
    made = answer.tokens_per_pass or 1.0
    share = 100 * share_of_bound(report, [answer])
    moved = format_rate(speed / made * report.read_bytes_per_pass) if report.counters.read_bytes else ""
    parts = [
        f"{tokens} tokens, {speed:.2f} tokens/s ({share:.0f} % of the bound)",
        *([f"{made:.2f} tokens per pass"] if answer.drafted_tokens else []),
        *([f"reading {moved}"] if moved else []),
    ]
    return ", ".join(parts)
