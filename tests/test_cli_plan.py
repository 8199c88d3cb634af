"""`headrace plan`, `headrace machine` and `headrace check -- vllm ...`: what they print, and how they refuse."""

from __future__ import annotations

import builtins
import json
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fakes import machine
from public_configs import FOLDER

from headrace import machinefile, probing
from headrace.cli import app as cli

LLAMA = FOLDER / "llama-3.1-8b.json"
MOE = FOLDER / "qwen3-30b-a3b.json"

Run = Callable[[str], tuple[int, str, str]]


@pytest.fixture
def headrace(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """On a machine that was measured before."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("COLUMNS", "120")
    machinefile.write(machine(), machinefile.cache_file())

    def run(line: str) -> tuple[int, str, str]:
        code = cli.main(shlex.split(line))
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


def test_a_plan_has_choices_tiers_speed_and_steps_up(headrace: Run) -> None:
    code, out, err = headrace(f"plan {LLAMA} --memory 8GiB")
    assert (code, err) == (0, "")
    for words in ("backend", "first token", "KV cache", "together", "per pass", "by disk", "everything resident"):
        assert words in out
    assert "as `headrace machine` measured it" in out


def test_the_document_has_every_figure(headrace: Run) -> None:
    code, out, _ = headrace(f"plan {LLAMA} --memory 8GiB --device l40s --host-memory 16GiB --json")
    document = json.loads(out)
    assert code == 0
    assert document["weight_bytes"] == 16060522496
    assert document["machine"]["accelerator"]["name"] == "L40S"
    assert document["plan"]["memory"]["total_bytes"] <= 8 * 2**30
    assert document["steps"][-1]["backend"] == "resident"


@pytest.mark.slow
@pytest.mark.parametrize("flags", ["", "--device l40s"])
def test_a_plot_is_a_picture(headrace: Run, tmp_path: Path, flags: str) -> None:
    file = tmp_path / "plan.png"
    assert headrace(f"plan {LLAMA} --memory 8GiB --plot {file} {flags}")[0] == 0
    assert file.read_bytes().startswith(b"\x89PNG")
    code, _, err = headrace(f"plan {LLAMA} --memory 8GiB --plot {tmp_path}/plan.doc")
    assert code == 2
    assert "--plot" in err


def test_without_matplotlib_the_extra_is_named(headrace: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def missing(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", missing)
    code, _, err = headrace(f"plan {LLAMA} --memory 8GiB --plot plan.png")
    assert code == 2
    assert "pip install 'headrace[plot]'" in err


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--memory 1GiB", "the least that runs this is"),
        ("--memory lots", "is not a usable size"),
        ("--host-memory 8GiB", "together with --device"),
        ("--device rtx4080", "rtx-4090"),
        ("--device cuda:0", "it has none"),
        ("--gpus 2", "together with --for vllm"),
        ("--context 200000", "at most 131072"),
        ("--for trt --device l4", "vllm or sglang"),
        ("--for vllm", "no accelerator was measured here"),
        ("--fast --device l40s", "left out with --device"),
        ("--for vllm --device l40s --fast", "left out"),
        ("--for vllm --device l40s --memory 8GiB", "left out"),
        ("--for vllm --device l40s --offload-group-size 4", "left out"),
        ("--for vllm --device l40s --gpus 0", "--gpus"),
        ("--for vllm --device l40s --gpu-memory-utilization 1.5", "--gpu-memory-utilization"),
        ("--machine none.json", "cannot be used"),
    ],
)
def test_what_cannot_be_planned_is_one_clear_error(headrace: Run, flags: str, words: str) -> None:
    code, out, err = headrace(f"plan {LLAMA} {flags}")
    assert (code, out) == (2, "")
    assert err.startswith("error: ")
    assert words in err


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_the_line_for_another_engine_comes_first(headrace: Run, engine: str) -> None:
    code, out, _ = headrace(f"plan {LLAMA} --for {engine} --device t4 --host-memory 64GiB")
    assert code == 0
    first = out.splitlines()[0]
    assert first.startswith({"vllm": "vllm serve", "sglang": "python -m sglang"}[engine])
    assert "offload" in first
    document = json.loads(headrace(f"plan {LLAMA} --for {engine} --device t4 --host-memory 64GiB --json")[1])
    assert document["command"] == first
    assert document["per_gpu"]["total_bytes"] <= document["per_gpu"]["capacity_bytes"]


def test_a_line_of_vllm_is_looked_through(headrace: Run) -> None:
    flags = "--offload-group-size 4 --offload-num-in-group 2"
    code, out, _ = headrace(f"check --device l4 -- vllm serve {LLAMA} --max-model-len 8k {flags}")
    assert code == 0
    assert "of 16 of 32 layers: 2, 3, 6, 7, 10, 11, ..., 31" in out
    assert "--offload-prefetch-step 2 avoids that" in out


def test_a_line_that_offloads_nothing_has_its_own_exit_code(headrace: Run) -> None:
    line = f"-- vllm serve {MOE} --cpu-offload-gb 20 --cpu-offload-params visual"
    code, out, _ = headrace(f"check {line}")
    assert code == 1
    assert "nothing, although it was asked to" in out
    document = json.loads(headrace(f"check --json {line}")[1])
    assert (document["ok"], document["offloaded_layers"]) == (False, [])
    assert "visual" in document["ignored"][0]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (
            f"check -- vllm serve {LLAMA} --offload-num-in-group 8 --offload-group-size 4",
            "must be <= offload_group_size",
        ),
        (f"check -- vllm serve {LLAMA} --offload-groupsize 4", "'--offload-group-size'"),
        (f"check --cpu-offload-gb 4 -- vllm serve {LLAMA}", "given before the --"),
        ("check -- ls -l", "vllm serve MODEL"),
        ("check --device l4", "without a command line"),
        ("check --host-memory 4GiB", "without a command line"),
    ],
)
def test_lines_that_are_refused(headrace: Run, line: str, words: str) -> None:
    code, out, err = headrace(line)
    assert (code, out) == (2, "")
    assert words in err


def test_a_refusal_of_vllm_s_is_a_document_too(headrace: Run) -> None:
    out = headrace(f"check --json -- vllm serve {LLAMA} --offload-backend prefetch")[1]
    document = json.loads(out)
    assert document["ok"] is False
    assert document["error"] == "InvalidOffloadConfig"


@pytest.mark.slow
def test_the_machine_is_measured_and_kept(headrace: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probing, "DISK_SECONDS", 0.1)
    big = tmp_path / "big"
    big.write_bytes(bytes(8 * 2**20))
    code, out, _ = headrace(f"machine --file {big} --output {tmp_path}/here.json --json")
    assert code == 0
    document = json.loads(out)
    here = machinefile.read(tmp_path / "here.json")
    assert document["disk"]["bytes_per_s"] == here.disk.bytes_per_s > 0
    assert headrace(f"plan {LLAMA} --memory 8GiB --machine {tmp_path}/here.json")[0] == 0
    code, _, err = headrace(f"machine --file {tmp_path}/none")
    assert code == 2
    assert "--file" in err
