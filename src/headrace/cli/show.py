"""Plans, progress and reports as text on a terminal. Knows their records, not how they come about."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TaskID, TextColumn, TransferSpeedColumn
from rich.table import Table

from headrace.units import format_bytes, format_rate, format_seconds

if TYPE_CHECKING:
    from headrace.core import Plan
    from headrace.engine import Report
    from headrace.generate import Answer


def plan_table(plan: Plan) -> Table:
    """The choices with their reasons."""
    table = Table(
        box=None, pad_edge=False, padding=(0, 2, 0, 0), title="plan", title_justify="left", title_style="bold"
    )
    table.add_column("choice", style="bold", no_wrap=True)
    table.add_column("value", no_wrap=True)
    table.add_column("reason", style="dim")
    for choice in plan.choices:
        table.add_row(choice.name, choice.value, choice.reason)
    return table


def report_table(report: Report, answers: list[Answer]) -> Table:
    """Where the bytes are, what moved, how fast it was against the bound, how much memory it took."""
    table = Table(
        box=None, pad_edge=False, padding=(0, 2, 0, 0), title="report", title_justify="left", title_style="bold"
    )
    table.add_column("figure", style="bold", no_wrap=True)
    table.add_column("value")
    for name, value in report_rows(report, answers):
        table.add_row(name, value)
    return table


def report_rows(report: Report, answers: list[Answer]) -> Iterator[tuple[str, str]]:
    """The figures of a report as text: name and value."""
    counters, bound = report.counters, report.bound
    yield (
        "weights",
        (
            f"{format_bytes(report.resident_bytes)} in memory, {format_bytes(report.offloaded_bytes)} on disk"
            + (f" ({format_bytes(report.looked_up_bytes)} looked up by rows)" if report.looked_up_bytes else "")
        ),
    )
    if report.ring_bytes:
        yield (
            "ring",
            f"{format_bytes(report.ring_bytes)}, so offloading saves {format_bytes(report.net_saving_bytes)} net",
        )
    if counters.passes and counters.read_bytes:
        rate = counters.read_bytes / counters.passes
        yield "read", f"{format_bytes(rate)} per pass, {format_bytes(counters.read_bytes)} in {counters.passes} passes"
    speed = tokens_per_s(answers)
    if speed is not None:
        yield (
            "speed",
            (
                f"{speed:.2f} tokens/s, {100 * speed * bound.seconds:.0f} % of the bound of "
                f"{1 / bound.seconds:.2f} tokens/s "
                f"({format_seconds(bound.seconds)} per pass, limited by {bound.limited_by})"
            ),
        )
    if answers:
        yield "first token", f"after {format_seconds(answers[-1].seconds_to_first_token)} (the last answer's)"
    if counters.stalls:
        yield "waits", f"{format_seconds(counters.stall_s)} for weights, over {counters.stalls} blocks"
    if counters.slot_misses:
        yield (
            "slot misses",
            f"{counters.slot_misses} blocks were not where they were expected and were read on the spot",
        )
    yield "peak memory", _peak(report)
    for fallback in report.fallbacks:
        yield "fallback", fallback


def _peak(report: Report) -> str:
    peak = format_bytes(report.peak_memory_bytes)
    if report.requested_bytes is None:
        return f"{peak} (no budget was given)"
    share = 100 * report.peak_memory_bytes / report.requested_bytes
    return f"{peak} of the {format_bytes(report.requested_bytes)} asked for ({share:.0f} %)"


def tokens_per_s(answers: list[Answer]) -> float | None:
    """Over every decoded token of all answers, or None if no answer had two tokens."""
    seconds = [second for answer in answers for second in answer.decode_seconds]
    return len(seconds) / sum(seconds) if seconds else None


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
    bound = report.bound
    speed = tokens_per_s([answer])
    tokens = len(answer.token_ids)
    if speed is None:
        return f"{tokens} token{'s' if tokens != 1 else ''}"
    share = 100 * speed * bound.seconds
    moved = format_rate(speed * report.read_bytes_per_pass) if report.counters.read_bytes else ""
    return f"{tokens} tokens, {speed:.2f} tokens/s ({share:.0f} % of the bound){', reading ' + moved if moved else ''}"
