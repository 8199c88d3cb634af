"""Candidates in turn, round after round, each in a process of its own under the same cap, with a cold page cache."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headrace.bench.candidates import HEADRACE, Candidate
from headrace.bench.group import drop_page_cache, memory_group
from headrace.errors import CannotCap

READER = "reader"
"""Reads and computes nothing: the disk's own rate, in the same round."""
_WORKER = Path(__file__).with_name("worker.py")

OnRun = Callable[[int, str, Mapping[str, Any]], None]
"""Round (from 1), candidate, its figures or what became of it."""


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """What every candidate of a benchmark is given."""

    memory_bytes: int | None
    """The cap; None is none."""
    weight_bytes: int
    tokens: int
    """After the first one."""
    threads: int
    timeout_s: float
    scratch: Path
    """Where one that needs other files than the model's may keep them."""


def measure(
    run: Mapping[Candidate, str], models: Mapping[Candidate, Path], wanted: Wanted, rounds: int, on_run: OnRun
) -> dict[str, list[dict[str, Any]]]:
    """Every run's figures by candidate, in the order of the rounds.

    `run` says with which Python, `models` what each loads. Every other round goes backwards, so that no candidate
    always comes after the same one. Raises: CannotCap.
    """
    order: list[tuple[str, str, Path]] = [(READER, run[HEADRACE], models[HEADRACE])]
    order += [(candidate.name, python, models[candidate]) for candidate, python in run.items()]
    results: dict[str, list[dict[str, Any]]] = {name: [] for name, _, _ in order}
    for number in range(1, rounds + 1):
        for name, python, model in order if number % 2 else reversed(order):
            figures = run_one(python, name, model, wanted)
            results[name].append(figures)
            on_run(number, name, figures)
    return results


def run_one(python: str, name: str, model: Path, wanted: Wanted) -> dict[str, Any]:
    """One candidate's document, or {"failed": what became of it}. Raises: CannotCap."""
    asked = {
        "memory_bytes": wanted.memory_bytes,
        "weight_bytes": wanted.weight_bytes,
        "tokens": wanted.tokens,
        "threads": wanted.threads,
        "scratch": str(wanted.scratch),
    }
    command = [python, "-P", str(_WORKER), name, str(model), json.dumps(asked)]
    cold = drop_page_cache()
    if wanted.memory_bytes is not None and not cold:
        raise CannotCap(reason="the page cache cannot be dropped before each run")
    capped = contextlib.nullcontext() if wanted.memory_bytes is None else memory_group(wanted.memory_bytes)
    with capped as members:
        process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,  # what it has started is ended with it
            preexec_fn=None if members is None else lambda: members.write_text(str(os.getpid())) and None,
        )
        try:
            output, errors = process.communicate(timeout=wanted.timeout_s)
        except subprocess.TimeoutExpired:
            return {"failed": f"not done after {wanted.timeout_s:.0f} s"}
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
    if process.returncode:
        return {"failed": _what_became(process.returncode, errors)}
    document: dict[str, Any] = json.loads(output.splitlines()[-1])
    return document | {"cold": cold}


def _what_became(code: int, errors: str) -> str:
    if code == -signal.SIGKILL:
        return "killed: out of the memory that it was given"
    lines = [line for line in errors.strip().splitlines() if line.strip()]
    return lines[-1] if lines else f"exit code {code}"
