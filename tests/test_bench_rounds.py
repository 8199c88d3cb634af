"""Each run is a process of its own; what becomes of it is told. The files of a case are made once, and whole."""

from __future__ import annotations

import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from headrace.bench import cases, group, rounds, worker
from headrace.bench.candidates import HEADRACE, PEERS
from headrace.bench.cases import Case, Files
from headrace.errors import BenchmarkFailed, CannotCap

LLAMA = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rope_theta": 10000.0,
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
}
TINY = Case(name="tiny", kind="LlamaConfig", config=LLAMA)
QWEN = Case(name="tiny-qwen", kind="Qwen3Config", config=LLAMA | {"tie_word_embeddings": False})
MAPPED, LLAMA_CPP = (next(peer for peer in PEERS if peer.name == name) for name in ("mapped", "llama.cpp"))


def files(root: Path, case: Case = TINY) -> Files:
    return Files(root / case.name, case, None, lambda text: None)


def wanted(**changes: Any) -> rounds.Wanted:
    usual = {
        "memory_bytes": None,
        "weight_bytes": 2**20,
        "tokens": 3,
        "threads": 1,
        "timeout_s": 300.0,
        "scratch": Path("no"),
    }
    return rounds.Wanted(**(usual | changes))


@pytest.fixture(autouse=True)
def warm(monkeypatch: pytest.MonkeyPatch) -> None:
    """No test drops the page cache of the whole machine."""
    monkeypatch.setattr(rounds, "drop_page_cache", lambda: False)


@pytest.mark.slow
@pytest.mark.parametrize("case", [TINY, QWEN], ids=lambda case: case.name)
def test_all_candidates_are_given_the_same_model(tmp_path: Path, case: Case) -> None:
    made = files(tmp_path, case)
    models = {HEADRACE: made.checkpoint(16), MAPPED: made.checkpoint(16), LLAMA_CPP: made.gguf(16)}
    seen = []
    run = dict.fromkeys(models, sys.executable)
    runs = rounds.measure(run, models, wanted(), 2, lambda number, name, figures: seen.append((number, name)))
    assert seen == [
        (1, "reader"), (1, "headrace"), (1, "mapped"), (1, "llama.cpp"),
        (2, "llama.cpp"), (2, "mapped"), (2, "headrace"), (2, "reader"),
    ]  # fmt: skip
    tokens = {name: some[0]["tokens"] for name, some in runs.items() if name != "reader"}
    assert len(tokens["headrace"]) == 4
    assert tokens["headrace"] == tokens["mapped"] == tokens["llama.cpp"]
    for some in runs.values():
        assert all(figures["cold"] is False for figures in some)
    assert runs["reader"][0]["bytes_per_s"] > 0
    assert runs["headrace"][0]["backend"] == "resident"


def test_a_candidate_that_fails_says_why(tmp_path: Path) -> None:
    figures = rounds.run_one(sys.executable, "reader", tmp_path / "nothing", wanted(weight_bytes="no number"))
    assert "TypeError" in figures["failed"]


def test_a_candidate_that_takes_too_long_is_ended(tmp_path: Path) -> None:
    figures = rounds.run_one(sys.executable, "headrace", tmp_path, wanted(timeout_s=0.01))
    assert figures == {"failed": "not done after 0 s"}


def test_out_of_memory_is_told_as_such() -> None:
    assert rounds._what_became(-signal.SIGKILL, "") == "killed: out of the memory that it was given"
    assert rounds._what_became(3, "first\n\nlast\n\n") == "last"
    assert rounds._what_became(3, "") == "exit code 3"


def test_under_a_cap_every_run_must_be_cold(tmp_path: Path) -> None:
    with pytest.raises(CannotCap, match="page cache"):
        rounds.run_one(sys.executable, "reader", tmp_path, wanted(memory_bytes=2**30))


# --- control groups ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("version", "limit"), [(1, "memory.limit_in_bytes"), (2, "memory.max")])
def test_a_group_has_its_limit_and_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: int, limit: str
) -> None:
    monkeypatch.setattr(group, "ROOT", tmp_path)
    if version == 1:
        (tmp_path / "memory").mkdir()
    with group.memory_group(12345) as members:
        assert (members.parent / limit).read_text() == "12345"
        assert members.name == "cgroup.procs"
        folder = members.parent
        for file in folder.iterdir():  # in the real one they vanish with it
            file.unlink()
    assert not folder.exists()


def test_where_no_group_can_be_made_it_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group, "ROOT", tmp_path / "missing")
    with pytest.raises(CannotCap, match="No such file"), group.memory_group(1):
        pass


def test_a_process_knows_how_long_it_runs_and_what_it_took() -> None:
    assert 0 < worker.since_start_s() < 10**6
    assert worker.peak_bytes() > 2**20
    assert worker.disk_bytes().keys() >= {"read_bytes", "write_bytes"}


# --- files ------------------------------------------------------------------------------------------------------------


def test_files_are_made_once(tmp_path: Path) -> None:
    steps: list[str] = []
    made = Files(tmp_path, TINY, None, steps.append)
    first = made.checkpoint(16)
    before = {file: file.stat().st_mtime_ns for file in first.iterdir()}
    assert made.checkpoint(16) == first
    assert {file: file.stat().st_mtime_ns for file in first.iterdir()} == before
    assert len(steps) == 1


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError])
def test_what_was_not_finished_is_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: type[BaseException]
) -> None:
    def half(target: Path, kind: str, config: dict[str, Any]) -> None:
        target.mkdir()
        (target / "model-first.safetensors").write_bytes(b"half")
        raise error

    monkeypatch.setattr("headrace.bench.checkpoints.write", half)
    with pytest.raises(error):
        files(tmp_path).checkpoint(16)
    assert list((tmp_path / TINY.name).iterdir()) == []


@pytest.mark.slow
def test_fewer_bits_are_made_from_the_same_weights(tmp_path: Path) -> None:
    made = files(tmp_path)
    assert (made.checkpoint(8) / "config.json").exists()
    whole, small = made.gguf(16), made.gguf(8)
    assert small.read_bytes()[:4] == b"GGUF"
    assert small.stat().st_size < whole.stat().st_size
    assert small.name == "Q8_0.gguf"


def test_a_step_that_fails_is_told_with_its_last_words(tmp_path: Path) -> None:
    with pytest.raises(BenchmarkFailed, match="writing the model in Q4_0"):
        cases._requantize(tmp_path / "missing.gguf", tmp_path / "new.gguf", 4)


def test_a_random_checkpoint_is_the_same_each_time(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    one, two = (files(tmp_path / name).checkpoint(16) for name in "ab")
    for file in sorted(path.name for path in one.glob("*.safetensors")):
        left, right = load_file(one / file), load_file(two / file)
        assert left.keys() == right.keys()
        assert all(torch.equal(left[name], right[name]) for name in left)


@pytest.mark.parametrize("name", sorted(cases.CASES))
def test_the_caps_of_a_case_are_below_its_weights_in_16_bits(name: str) -> None:
    case = cases.CASES[name]
    assert case.memory.keys() == set(cases.BITS)
    assert name == case.name
