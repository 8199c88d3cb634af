"""`headrace bench`: Headrace beside its peers under one memory cap. Knows the terminal; the room measures."""

from __future__ import annotations

import difflib
import json
import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console

from headrace import __version__, machine
from headrace.bench import candidates, chart, rounds
from headrace.bench.candidates import HEADRACE, Candidate, Chosen, choose
from headrace.bench.cases import BITS, CASES, DEFAULT_CASE, Case, Files
from headrace.bench.summary import Summary, summarize
from headrace.cli import show, terminal
from headrace.cli.run import require_engine
from headrace.errors import BenchmarkFailed, InvalidSetting, OutputFailed
from headrace.settings import parse_size, require
from headrace.units import format_bytes, format_rate, format_seconds

DIRECTORY = Path("/var/tmp/headrace-bench")
"""Not /tmp, which may be memory: files of some GiB are kept there."""
NO_CAP = "none"


@dataclass(frozen=True, kw_only=True)
class BenchOptions:
    """What was asked for on the command line, checked by `check`."""

    model: str = DEFAULT_CASE
    memory: str | None = None
    bits: int = 16
    peers: Sequence[str] = ()
    peer_python: Sequence[str] = ()
    rounds: int = 3
    tokens: int = 6
    timeout: float = 900.0
    gguf: Path | None = None
    directory: Path = DIRECTORY
    output: Path | None = None
    plot: Path | None = None
    show: Sequence[Path] = field(default_factory=tuple)
    as_json: bool = False

    def check(self) -> None:
        """Everything that can be known to be wrong before anything is measured. Raises: ConfigError."""
        require(self.bits in BITS, "--bits", self.bits, "16, 8 or 4", "16")
        require(self.rounds >= 1, "--rounds", self.rounds, "at least 1", "3")
        require(self.tokens >= 1, "--tokens", self.tokens, "at least 1", "6")
        require(self.timeout > 0, "--timeout", self.timeout, "above 0", "900")
        if self.memory not in (None, NO_CAP):
            parse_size(self.memory)
        for pair in self.peer_python:
            require("=" in pair, "--peer-python", repr(pair), *candidates.A_PEER_PYTHON)
        candidates.check(self.peers, self.pythons)
        if self.model not in CASES and not Path(self.model).is_dir():
            nearest = difflib.get_close_matches(self.model, CASES, n=1, cutoff=0.0)[0]
            allowed = f"a directory with a checkpoint, or one of {', '.join(CASES)}"
            require(False, "MODEL", repr(self.model), allowed, nearest)
        if self.gguf is not None:
            require(self.gguf.is_file(), "--gguf", repr(str(self.gguf)), "a file that is there", "model.gguf")

    @property
    def pythons(self) -> dict[str, str]:
        """Interpreters of other environments by peer."""
        return dict(pair.split("=", 1) for pair in self.peer_python)

    @property
    def case(self) -> Case | None:
        return CASES.get(self.model)

    @property
    def memory_bytes(self) -> int | None:
        """The cap; None is none."""
        text = self.memory or (NO_CAP if self.case is None else self.case.memory[self.bits])
        return None if text == NO_CAP else parse_size(text)


def bench(options: BenchOptions) -> int:
    """Make the files, measure in turn, print a table; or print what was measured before."""
    require_engine()
    if options.plot is not None:
        chart.require()
    console = Console(highlight=False, stderr=options.as_json)
    documents = [_read(file) for file in options.show] or [_measure(options, console)]
    if options.output is not None:
        _write(options.output, documents[-1])
    found = summarize(documents)
    title = _title(documents[0])
    _print(console, found, title, documents[0]["left_out"])
    if options.plot is not None:
        chart.draw(found, title, options.plot)
    if options.as_json:
        terminal.write(json.dumps({**documents[-1], "summary": found.to_json()}, allow_nan=False) + "\n")
    return 0


def _measure(options: BenchOptions, console: Console) -> dict[str, Any]:
    notes = Console(highlight=False, stderr=True)

    def on_step(text: str) -> None:
        notes.print(f"{text} ...", style="dim", soft_wrap=True)

    own = None if options.case is not None else Path(options.model).absolute()
    root = options.directory / (own.name if own is not None else options.model)
    files = Files(root, options.case, own, on_step)
    model = files.checkpoint(options.bits)
    weight_bytes = sum(file.stat().st_size for file in model.glob("*.safetensors"))
    chosen = choose(options.peers, options.pythons, options.bits, (weight_bytes, options.memory_bytes))
    chosen, models = _models(chosen, files, options)
    wanted = rounds.Wanted(
        memory_bytes=options.memory_bytes,
        weight_bytes=weight_bytes,
        tokens=options.tokens,
        threads=machine.cores(),
        timeout_s=options.timeout,
        scratch=root / "split",
    )

    def on_run(number: int, name: str, figures: Mapping[str, Any]) -> None:
        notes.print(f"round {number} of {options.rounds}: {name}: {_told(figures)}", style="dim", soft_wrap=True)

    runs = rounds.measure(chosen.run, models, wanted, options.rounds, on_run)
    return {
        "headrace": __version__,
        "model": f"{options.model} in {options.bits} bits",
        "memory_bytes": options.memory_bytes,
        "weight_bytes": weight_bytes,
        "tokens": options.tokens,
        "machine": f"{platform.machine()}, {machine.cores()} cores, {os.uname().release}",
        "left_out": dict(chosen.left_out),
        "runs": runs,
    }


def _models(chosen: Chosen, files: Files, options: BenchOptions) -> tuple[Chosen, dict[Candidate, Path]]:
    """What each candidate loads; one whose file cannot be made is left out, and why."""
    run, models, left_out = dict(chosen.run), {}, dict(chosen.left_out)
    for candidate in chosen.run:
        try:
            if candidate.reads_gguf:
                models[candidate] = options.gguf or files.gguf(options.bits)
            else:
                models[candidate] = files.checkpoint(options.bits)
        except BenchmarkFailed as error:
            if candidate is HEADRACE:
                raise
            left_out[candidate.name] = error.reason
            del run[candidate]
    return Chosen(run, left_out), models


def _told(figures: Mapping[str, Any]) -> str:
    if "failed" in figures:
        return str(figures["failed"])
    if "bytes_per_s" in figures:
        return format_rate(figures["bytes_per_s"])
    seconds = sorted(figures["seconds_per_token"])
    return f"{format_seconds(seconds[len(seconds) // 2])} per token"


def _title(document: Mapping[str, Any]) -> str:
    cap = document["memory_bytes"]
    size = format_bytes(document["weight_bytes"])
    return f"{document['model']} ({size}), {'no cap' if cap is None else f'a cap of {format_bytes(cap)}'}"


def _print(console: Console, found: Summary, title: str, left_out: Mapping[str, str]) -> None:
    from rich.table import Table

    console.print(title, style="bold")
    console.print(
        f"the disk alone: {format_rate(found.disk_bytes_per_s)}; bound: {format_seconds(found.bound_s)} per token "
        f"({found.limited_by}), {format_seconds(found.first_token_bound_s)} to read what the first one needs"
    )
    table = Table(box=None, pad_edge=False)
    table.add_column("")
    for name in ("first token", "per token", "of bound", "read/token", "peak", "ratio"):
        table.add_column(name, justify="right")
    for line in found.lines:
        table.add_row(
            line.name,
            format_seconds(line.seconds_to_first_token),
            format_seconds(line.seconds_per_token),
            f"{line.share_of_bound:.0%}",
            format_bytes(line.read_bytes_per_token),
            format_bytes(line.peak_memory_bytes),
            f"{line.ratio:.2f}x",
        )
    console.print(table)
    others = [*found.failed.items(), *left_out.items()]
    if others:
        console.print(show.Rows("not compared", others))


def _read(file: Path) -> dict[str, Any]:
    """Raises: InvalidSetting."""
    try:
        document = json.loads(file.read_text(encoding="utf-8"))
        if isinstance(document, dict) and {"runs", "memory_bytes", "model", "machine", "tokens"} <= document.keys():
            return document
        reason = "it is no document of a benchmark"
    except OSError as error:
        reason = error.strerror or str(error)
    except ValueError as error:
        reason = f"it is not JSON ({error})"
    raise InvalidSetting(
        setting="--show",
        value=f"{str(file)!r} ({reason})",
        allowed="a file that `headrace bench` wrote with --output",
        suggestion="bench.json",
    )


def _write(file: Path, document: Mapping[str, Any]) -> None:
    """Raises: OutputFailed."""
    try:
        file.write_text(json.dumps(document, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    except OSError as error:
        raise OutputFailed(output=f"to {file}", reason=error.strerror or str(error)) from error
