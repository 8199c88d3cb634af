"""What a benchmark has found: medians, the bound, ratios. Refuses to compare what was not measured alike. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from headrace.bench.rounds import READER
from headrace.errors import NotComparable

Runs = Mapping[str, Sequence[Mapping[str, Any]]]


@dataclass(frozen=True, kw_only=True)
class Line:
    """One candidate, medians over all of its runs; seconds and bytes."""

    name: str
    seconds_to_first_token: float
    """From the start of its process: imports, loading and 16 tokens of prompt."""
    seconds_per_token: float
    read_bytes_per_token: float
    written_bytes: int
    peak_memory_bytes: int
    share_of_bound: float
    """The bound over its time per token, in the same round: 1 is as fast as can be."""
    ratio: float
    """Its time per token over Headrace's in the same round."""
    runs: int


@dataclass(frozen=True, kw_only=True)
class Summary:
    """A benchmark's figures."""

    memory_bytes: int | None
    disk_bytes_per_s: float
    """The median of the rounds; a machine that others share has fast ones and slow ones."""
    bound_s: float
    """Seconds per token that the disk, or computing, needs for Headrace's plan."""
    limited_by: str
    first_token_bound_s: float
    """Reading what stays resident, and one pass."""
    lines: tuple[Line, ...]
    failed: Mapping[str, str]

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def summarize(documents: Sequence[Mapping[str, Any]]) -> Summary:
    """The runs of one or several documents as one benchmark. Raises: NotComparable."""
    runs = _joined(documents)
    for name, who in (("headrace", "Headrace itself"), (READER, "what measures the disk")):
        if all("failed" in run for run in runs[name]):
            raise NotComparable(reason=f"{who} failed: {runs[name][0]['failed']}")
    ours = [run for run in runs["headrace"] if "failed" not in run]
    rate = statistics.median(run["bytes_per_s"] for run in runs[READER] if "failed" not in run)
    rounds = [each for document in documents for each in _rounds(document["runs"])]
    moving_s = ours[0]["bound"]["moved_bytes"] / rate
    computing_s = statistics.median(run["bound"]["compute_s"] for run in ours)
    bound_s = max(moving_s, computing_s)
    lines, failed = [], {}
    for name, some in runs.items():
        good = [run for run in some if "failed" not in run]
        if name == READER:
            continue
        together = [each for each in rounds if {name, "headrace", READER} <= each.keys()]
        if not good or not together:
            failed[name] = str(some[0].get("failed", "there is no round in which Headrace ran well, too"))
            continue
        lines.append(
            Line(
                name=name,
                seconds_to_first_token=statistics.median(run["seconds_to_first_token"] for run in good),
                seconds_per_token=_seconds(good),
                read_bytes_per_token=statistics.median(run["read_bytes_per_token"] for run in good),
                written_bytes=max(run["written_bytes"] for run in good),
                peak_memory_bytes=max(run["peak_memory_bytes"] for run in good),
                share_of_bound=statistics.median(_bound_s(each) / _seconds([each[name]]) for each in together),
                ratio=statistics.median(_seconds([each[name]]) / _seconds([each["headrace"]]) for each in together),
                runs=len(good),
            )
        )
    return Summary(
        memory_bytes=documents[0]["memory_bytes"],
        disk_bytes_per_s=rate,
        bound_s=bound_s,
        first_token_bound_s=(ours[0]["resident_bytes"] + ours[0]["bound"]["moved_bytes"]) / rate,
        limited_by="disk" if moving_s >= computing_s else "compute",
        lines=tuple(lines),
        failed=failed,
    )


def _rounds(runs: Runs) -> list[dict[str, Mapping[str, Any]]]:
    """What ran well, one after the other."""
    turns = (dict(zip(runs, some, strict=True)) for some in zip(*runs.values(), strict=True))
    return [{name: run for name, run in turn.items() if "failed" not in run} for turn in turns]


def _bound_s(together: Mapping[str, Mapping[str, Any]]) -> float:
    """With the disk as fast as it was in this round."""
    bound = together["headrace"]["bound"]
    return float(max(bound["compute_s"], bound["moved_bytes"] / together[READER]["bytes_per_s"]))


def _joined(documents: Sequence[Mapping[str, Any]]) -> dict[str, list[Mapping[str, Any]]]:
    """All runs by candidate. Raises: NotComparable."""
    for field, what in (
        ("memory_bytes", "memory caps"), ("model", "models"), ("machine", "machines"), ("tokens", "lengths")
    ):  # fmt: skip
        values = {repr(document[field]) for document in documents}
        if len(values) > 1:
            raise NotComparable(reason=f"they were measured with different {what}: {', '.join(sorted(values))}")
    runs: dict[str, list[Mapping[str, Any]]] = {}
    for document in documents:
        for name, some in document["runs"].items():
            runs.setdefault(name, []).extend(some)
    for name, some in runs.items():
        for run in some:
            _check_cap(name, run, documents[0]["memory_bytes"])
    if len({run["cold"] for some in runs.values() for run in some if "failed" not in run}) > 1:
        raise NotComparable(reason="some were run with a cold page cache and some were not")
    return runs


def _check_cap(name: str, run: Mapping[str, Any], memory_bytes: int | None) -> None:
    """Each process tells the limit that the system has put it under. Raises: NotComparable."""
    if "failed" not in run and _pages(run["cap_bytes"]) != _pages(memory_bytes):
        told = "no cap" if run["cap_bytes"] is None else f"a cap of {run['cap_bytes']} bytes"
        meant = "none" if memory_bytes is None else f"{memory_bytes} bytes"
        raise NotComparable(reason=f"{name} ran under {told}, the cap of this benchmark is {meant}")


def _pages(nbytes: int | None) -> int | None:
    return None if nbytes is None else nbytes // 4096  # the system rounds limits to pages


def _seconds(runs: Sequence[Mapping[str, Any]]) -> float:
    return float(statistics.median(second for run in runs for second in run["seconds_per_token"]))
