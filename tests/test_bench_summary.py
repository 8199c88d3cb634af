"""Medians and ratios of a benchmark; what was not measured alike is not compared."""

from __future__ import annotations

from typing import Any

import pytest

from headrace.bench.summary import summarize
from headrace.errors import NotComparable

GIB = 2**30
CAP = 3 * GIB


def run(*seconds: float, cap: int | None = CAP, cold: bool = True, **more: Any) -> dict[str, Any]:
    return {
        "seconds_per_token": list(seconds),
        "seconds_to_first_token": 10 * seconds[0],
        "read_bytes_per_token": 100,
        "written_bytes": 0,
        "peak_memory_bytes": 2 * GIB,
        "cap_bytes": cap,
        "cold": cold,
    } | more


def ours(*seconds: float, moved_bytes: int = 2 * GIB, compute_s: float = 0.1, **more: Any) -> dict[str, Any]:
    bound = {"moved_bytes": moved_bytes, "compute_s": compute_s}
    return run(*seconds, bound=bound, resident_bytes=4 * GIB, **more)


def reader(rate: float, cap: int | None = CAP) -> dict[str, Any]:
    return {"bytes_per_s": rate, "cap_bytes": cap, "cold": True}


def document(**changes: Any) -> dict[str, Any]:
    runs = {
        "reader": [reader(1.0 * GIB), reader(4.0 * GIB), reader(2.0 * GIB)],
        "headrace": [ours(1.2, 1.0), ours(1.4, 9.0), ours(1.25, 1.25)],
        "llama.cpp": [run(3.0, 2.0), run(2.5, 2.5), run(2.5, 90.0)],
        "airllm": [{"failed": "killed"}, {"failed": "killed"}, {"failed": "killed"}],
    }
    return {"memory_bytes": CAP, "model": "m", "machine": "x86_64", "tokens": 2, "runs": runs} | changes


def test_figures_are_medians_and_ratios_to_ours() -> None:
    found = summarize([document()])
    assert found.disk_bytes_per_s == 2 * GIB
    assert (found.bound_s, found.limited_by) == (1.0, "disk")
    assert found.first_token_bound_s == 3.0
    mine, theirs = found.lines
    assert (mine.name, mine.seconds_per_token, mine.ratio, mine.runs) == ("headrace", 1.25, 1.0, 3)
    assert mine.share_of_bound == 0.8
    assert mine.seconds_to_first_token == 12.5
    assert (theirs.name, theirs.seconds_per_token) == ("llama.cpp", 2.5)
    assert theirs.ratio == pytest.approx(2.5 / 1.1), "of the first round; 0.5 and 37 of the others"
    assert found.failed == {"airllm": "killed"}


def test_where_computing_takes_longer_it_is_the_bound() -> None:
    runs = document()["runs"] | {"headrace": [ours(4.0, compute_s=3.0)] * 3}
    found = summarize([document(runs=runs)])
    assert (found.bound_s, found.limited_by) == (3.0, "compute")


def test_runs_that_failed_do_not_count_where_others_went_well() -> None:
    runs = document()["runs"] | {"mapped": [{"failed": "not done"}, run(7.0), {"failed": "not done"}]}
    found = summarize([document(runs=runs)])
    assert {line.name: line.runs for line in found.lines}["mapped"] == 1


def test_two_documents_are_one_benchmark() -> None:
    found = summarize([document(), document()])
    assert [line.runs for line in found.lines] == [6, 6]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"memory_bytes": 2 * GIB}, "different memory caps: 2147483648, 3221225472"),
        ({"memory_bytes": None}, "different memory caps"),
        ({"model": "other"}, "different models: 'm', 'other'"),
        ({"machine": "arm64"}, "different machines"),
        ({"tokens": 3}, "different lengths"),
    ],
)
def test_documents_that_were_not_measured_alike_are_refused(change: dict[str, Any], words: str) -> None:
    with pytest.raises(NotComparable, match=words):
        summarize([document(), document(**change)])


@pytest.mark.parametrize("cap", [None, 2 * GIB, CAP + 4096])
def test_a_run_that_tells_of_another_cap_is_refused(cap: int | None) -> None:
    runs = document()["runs"] | {"mapped": [run(1.0, cap=cap)] * 3}
    with pytest.raises(NotComparable, match="mapped ran under"):
        summarize([document(runs=runs)])


def test_the_system_rounds_a_cap_to_pages() -> None:
    runs = document()["runs"] | {"mapped": [run(1.0, cap=CAP)] * 3}
    odd = document(runs=runs, memory_bytes=CAP + 4095)
    assert len(summarize([odd]).lines) == 3


def test_without_a_cap_all_have_none() -> None:
    runs = {"reader": [reader(1e9, None)], "headrace": [ours(1.0, cap=None)], "mapped": [run(2.0, cap=None)]}
    assert summarize([document(runs=runs, memory_bytes=None)]).memory_bytes is None
    with pytest.raises(NotComparable, match="headrace ran under a cap of"):
        summarize([document(runs=runs | {"headrace": [ours(1.0)]}, memory_bytes=None)])


def test_cold_and_warm_are_not_compared() -> None:
    runs = document()["runs"] | {"mapped": [run(1.0, cold=False)] * 3}
    with pytest.raises(NotComparable, match="cold page cache"):
        summarize([document(runs=runs)])


def test_without_a_run_of_our_own_there_is_nothing_to_compare_with() -> None:
    runs = document()["runs"] | {"headrace": [{"failed": "error: the budget is too small"}] * 3}
    with pytest.raises(NotComparable, match="the budget is too small"):
        summarize([document(runs=runs)])
    runs = document()["runs"] | {"reader": [{"failed": "no direct reads"}] * 3}
    with pytest.raises(NotComparable, match="no direct reads"):
        summarize([document(runs=runs)])


def test_a_round_without_ours_compares_nothing() -> None:
    runs = {
        "reader": [reader(1e9), reader(1e9)],
        "headrace": [{"failed": "killed"}, ours(1.0)],
        "mapped": [run(2.0), {"failed": "killed"}],
    }
    found = summarize([document(runs=runs)])
    assert [line.name for line in found.lines] == ["headrace"]
    assert "no round" in found.failed["mapped"]
