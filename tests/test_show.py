"""Plans and reports as text: at every width, without colour in pipes, with every figure."""

from __future__ import annotations

import io
import re
from typing import Any

import pytest
from rich.console import Console

from headrace.cli import show
from headrace.core import Bound, Choice, MemoryPlan, Plan
from headrace.generate import Answer
from headrace.metrics import Counters
from headrace.reports import Report

MIB = 2**20


def plan(**changes: Any) -> Plan:
    facts: dict[str, Any] = {
        "backend": "prefetch",
        "choices": (
            Choice("backend", "prefetch", "257 MiB of weights do not fit into 128 MiB: what fits stays for good"),
            Choice("offloaded", "138 MiB", "out of 30 blocks, at most 4.64 MiB of each, spread over the pass"),
        ),
        "streamed": (),
        "gathered": (),
        "slots": 2,
        "slot_bytes": 5 * MIB,
        "offloaded_bytes": 138 * MIB,
        "memory": MemoryPlan(400 * MIB, 119 * MIB, 10 * MIB, 16 * MIB, 3 * MIB, 50 * MIB),
        "bound": Bound(compute_s=0.02, moved_bytes=138 * MIB, link_bytes_per_s=1380.0 * MIB),
    }
    return Plan(**{**facts, **changes})


def report(**changes: Any) -> Report:
    facts: dict[str, Any] = {
        "backend": "prefetch",
        "requested_bytes": 600 * MIB,
        "resident_bytes": 119 * MIB,
        "offloaded_bytes": 138 * MIB,
        "looked_up_bytes": 0,
        "ring_bytes": 10 * MIB,
        "staging_bytes": 16 * MIB,
        "host_bytes": 0,
        "buffer_bytes": 0,
        "net_saving_bytes": 128 * MIB,
        "peak_memory_bytes": 540 * MIB,
        "counters": Counters(passes=10, read_bytes=1380 * MIB, stalls=3, stall_s=0.5),
        "plan": plan(),
        "fallbacks": (),
    }
    return Report(**{**facts, **changes})


def answer(*seconds: float) -> Answer:
    return Answer("text", tuple(range(len(seconds) + 1)), 5, 0.25, seconds, False, decode_passes=len(seconds))


def printed(what: Any, width: int, *, terminal: bool = False) -> str:
    file = io.StringIO()
    Console(file=file, width=width, force_terminal=terminal, color_system="standard" if terminal else None).print(what)
    return file.getvalue()


@pytest.mark.parametrize("width", [20, 40, 60, 80, 120, 300])
@pytest.mark.parametrize("rows", [show.plan_rows(plan()), show.report_rows(report(), [answer(0.2, 0.2)])])
def test_lines_fit_and_end_without_blanks_and_no_word_is_lost(rows: show.Rows, width: int) -> None:
    text = printed(rows, width)
    lines = text.splitlines()
    if width >= 40:
        assert max(map(len, lines)) <= min(width, show.WIDEST)
    assert not [line for line in lines if line != line.rstrip()]
    assert "\x1b" not in text
    for row in rows.rows:
        for cell in row:
            assert set(cell.split()) <= set(text.split())


def test_wide_is_a_table_and_narrow_a_list() -> None:
    assert printed(show.plan_rows(plan()), 80).splitlines()[:3] == [
        "plan",
        "backend    prefetch  257 MiB of weights do not fit into 128 MiB: what fits stays",
        "                     for good",
    ]
    assert printed(show.plan_rows(plan()), 40).splitlines()[:3] == [
        "plan",
        "backend  prefetch",
        "  257 MiB of weights do not fit into 128",
    ]


def test_colours_on_a_terminal_only() -> None:
    assert "\x1b[1m" in printed(show.plan_rows(plan()), 80, terminal=True)


def rows(**changes: Any) -> dict[str, str]:
    answers = changes.pop("answers", [answer(0.125, 0.125)])
    return dict(show.report_rows(report(**changes), answers).rows)  # type: ignore[arg-type]


def test_the_figures_of_a_report() -> None:
    assert rows() == {
        "weights": "119 MiB in memory, 138 MiB on disk",
        "ring": "10.0 MiB of memory for what streams, so offloading saves 128 MiB net",
        "read": "138 MiB per token, 1.35 GiB in 10 passes over the layers",
        "speed": "8.00 tokens/s, 80 % of the bound of 10.00 tokens/s (100.0 ms per pass, limited by disk)",
        "first token": "after 250.0 ms",
        "waits": "500.0 ms for weights, over 3 blocks",
        "peak memory": "540 MiB, 90 % of the budget of 600 MiB",
    }


def test_what_is_not_so_is_not_told() -> None:
    told = rows(
        requested_bytes=None,
        offloaded_bytes=0,
        ring_bytes=0,
        counters=Counters(),
        plan=plan(bound=Bound(0.1, 0, 1.0)),
        answers=[answer()],
    )
    assert told == {
        "weights": "119 MiB, all of it in memory",
        "first token": "after 250.0 ms",
        "peak memory": "540 MiB (no budget was given)",
    }


def test_what_is_seldom_so_is_told() -> None:
    told = rows(
        looked_up_bytes=54 * MIB,
        net_saving_bytes=-1,
        counters=Counters(slot_misses=2),
        fallbacks=("direct reads are not possible",),
        answers=[answer(0.1), answer(0.1)],
    )
    assert told["weights"].endswith("138 MiB on disk (54.0 MiB of it looked up by rows)")
    assert told["ring"].endswith("so offloading saves nothing")
    assert told["slot misses"].startswith("2 blocks")
    assert told["fallback"] == "direct reads are not possible"
    assert told["first token"].endswith("(the last answer's)")


def test_the_line_after_an_answer() -> None:
    assert show.rate_line(report(), answer(0.125)) == "2 tokens, 8.00 tokens/s (80 % of the bound), reading 1.08 GiB/s"
    assert show.rate_line(report(), answer()) == "1 token"
    still = report(counters=Counters(), plan=plan(bound=Bound(0.1, 0, 1.0)))
    assert show.rate_line(still, answer(0.125)) == "2 tokens, 8.00 tokens/s (80 % of the bound)"


def test_figures_are_plain_data() -> None:
    figures = show.figures(report(), [answer(0.125, 0.125), answer(0.125)])
    assert figures["tokens_per_s"] == 8
    assert figures["share_of_bound"] == pytest.approx(0.8)
    assert [each["tokens_per_s"] for each in figures["answers"]] == [8, 8]
    assert figures["report"]["bound"]["limited_by"] == "disk"
    assert show.figures(report(), [answer()])["share_of_bound"] is None


@pytest.mark.parametrize("terminal", [True, False])
def test_bars_are_for_terminals(terminal: bool) -> None:
    file = io.StringIO()
    with show.bars(Console(file=file, width=80, force_terminal=terminal)) as bars:
        bars("importing", 2**20, 2**21)
        bars("importing", 2**21, 2**21)
    assert bool(re.search("importing", file.getvalue())) == terminal
