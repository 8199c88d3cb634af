"""What is read early is what stays; what cannot be told early is no error; the engine's plan decides."""

from __future__ import annotations

import errno
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from fakes import Gate, small_matrices
from tiny_models import differing, edit_config, logits, plain_logits, shared, write

from headrace import early, machine, store
from headrace.cli.app import main
from headrace.config import OffloadConfig, PrefetchOffloadConfig
from headrace.copying import ahead as room
from headrace.copying.ahead import ReadAhead
from headrace.copying.disk import DiskReader
from headrace.copying.mapped import MappedFile
from headrace.engine import Engine
from headrace.errors import BudgetTooSmall, HeadraceError, PathNotFound, ReadError
from headrace.metrics import Metrics

pytestmark = pytest.mark.slow

HALF = OffloadConfig(prefetch=PrefetchOffloadConfig(offload_group_size=2))
"""Every second layer is streamed."""


@pytest.fixture
def llama(root: Path) -> Path:
    return shared(root, "llama")


@pytest.fixture(autouse=True)
def _small_model(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Budgets differ by more than such a model has."""
    monkeypatch.setattr(early, "LESS_BYTES", (0,))
    with small_matrices():
        yield
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("headrace-")]


def names_read(checkpoint: store.Checkpoint, monkeypatch: pytest.MonkeyPatch, **asked: Any) -> set[str]:
    """Names of the tensors that are read ahead."""
    given: list[str] = []

    class Spy(ReadAhead):
        def __init__(self, checkpoint: store.Checkpoint, tensors: Any, metrics: Metrics) -> None:
            given.extend(tensor.name for tensor in tensors)
            super().__init__(checkpoint, tensors, metrics)

    with monkeypatch.context() as patch:
        patch.setattr(early, "ReadAhead", Spy)
        with early.reading(checkpoint.directory, **asked) as ahead:
            if ahead is not None:
                ahead.wait()
                assert ahead.read_bytes == ahead.nbytes
    return set(given)


@pytest.mark.parametrize("architecture", ["llama", "mixtral", "gpt2"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_what_stays_is_read_and_what_streams_is_not(
    root: Path, architecture: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of what stays, that is, what needs no other place in memory than it has in the file."""
    directory = shared(root, architecture, dtype)
    checkpoint = store.open_checkpoint(directory)
    read = names_read(checkpoint, monkeypatch, offload=HALF, context=64)
    with (
        early.reading(directory, offload=HALF, context=64) as ahead,
        Engine.open(directory, offload=HALF, context=64, ahead=ahead) as engine,
    ):
        resident = {name for name, parameter in engine.model.named_parameters() if not parameter.is_meta}
        steady = {name for name, each in checkpoint.tensors.items() if each.segment.can_lie_as_stored(each.is_steady)}
        assert read <= resident & steady
        assert {name for name in resident & steady if ".layers." in name or ".h." in name} <= read
        assert bool(read) == bool(steady)
        assert engine.report().offloaded_bytes > 0
        assert differing(logits(engine.model), plain_logits(directory, dtype)) == []


def test_a_budget_is_planned_for_with_less(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Engine.open(llama, weights_share=0.7, context=64) as engine:
        budget = engine.memory_bytes
    monkeypatch.setattr(machine, "resident_bytes", lambda: 0)
    monkeypatch.setattr(early.forecast, "BASELINE_BYTES", engine.plan.memory.baseline_bytes)
    monkeypatch.setattr(early.forecast, "TOKENIZER_FACTOR", 0)
    names = []
    for less in ((0,), (0, 2**18), (0, 2**18, 2**19)):
        monkeypatch.setattr(early, "LESS_BYTES", less)
        names.append(names_read(store.open_checkpoint(llama), monkeypatch, memory=budget, context=64))
    assert names[0] > names[1] >= names[2] > set()


@pytest.mark.parametrize(
    "change",
    [
        {"model_type": "of_nobody"},
        {"hidden_size": "many"},
        {"quantization_config": {"quant_method": "gptq", "bits": 4}},
    ],
)
def test_a_config_that_nobody_knows_is_no_error_here(tmp_path: Path, change: dict[str, Any]) -> None:
    """Read or not, what follows is the engine's own answer."""
    directory = edit_config(write(tmp_path, "llama"), **change)
    with pytest.raises(HeadraceError) as refused:
        Engine.open(directory, context=64)
    with pytest.raises(HeadraceError) as again, early.reading(directory, context=64) as ahead:
        Engine.open(directory, context=64, ahead=ahead)
    assert str(again.value) == str(refused.value)


def test_what_is_not_there_is_no_error_here(tmp_path: Path, llama: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(b"cut off")
    for model in (tmp_path / "nowhere", tmp_path, "org/name", llama / "model.safetensors"):
        with early.reading(model, context=64) as ahead:
            assert ahead is None
    for memory in ("much", 2**20):
        with early.reading(llama, memory=memory, context=64) as ahead:
            assert ahead is None
    with pytest.raises(PathNotFound):
        Engine.open(tmp_path / "nowhere", ahead=None)


@pytest.mark.parametrize("raised", [BudgetTooSmall, KeyboardInterrupt])
def test_an_error_ends_the_reading(llama: Path, raised: type[BaseException], monkeypatch: pytest.MonkeyPatch) -> None:
    """No thread is left: the fixture looks."""
    gate = Gate()
    monkeypatch.setattr(room, "_wait_for", lambda descriptor, read: gate(read.offset))

    def interrupt(plan: object) -> None:
        raise KeyboardInterrupt

    def open_meanwhile() -> None:
        with early.reading(llama, context=64) as ahead:
            gate.wait_arrived()
            gate.open()
            memory = "1MiB" if raised is BudgetTooSmall else None
            Engine.open(llama, memory=memory, context=64, ahead=ahead, on_plan=interrupt)

    with pytest.raises(raised):
        open_meanwhile()


def test_a_file_that_cannot_be_read_is_the_engines_error(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object) -> None:
        raise OSError(errno.EIO, "refused")

    monkeypatch.setattr(room, "_wait_for", refuse)
    monkeypatch.setattr(MappedFile, "wait_for", refuse)
    monkeypatch.setattr(DiskReader, "_pread", refuse)
    with (
        pytest.raises(ReadError, match=r"model\.safetensors.*Input/output error"),
        early.reading(llama, context=64) as ahead,
    ):
        Engine.open(llama, context=64, ahead=ahead)


def test_two_models_at_once(llama: Path, root: Path) -> None:
    other = shared(root, "mixtral")
    with (
        early.reading(llama, context=64) as first,
        early.reading(other, offload=HALF, context=64) as second,
        Engine.open(other, offload=HALF, context=64, ahead=second) as streamed,
        Engine.open(llama, context=64, ahead=first) as resident,
    ):
        assert streamed.report().offloaded_bytes > 0
        assert differing(logits(resident.model), plain_logits(llama)) == []
        assert differing(logits(streamed.model), plain_logits(other)) == []


@pytest.fixture
def begun(monkeypatch: pytest.MonkeyPatch) -> list[ReadAhead | None]:
    """What each command begins to read."""
    all_of_it: list[ReadAhead | None] = []
    begin = early._begin

    def spy(*arguments: Any) -> ReadAhead | None:
        all_of_it.append(begin(*arguments))
        return all_of_it[-1]

    monkeypatch.setattr(early, "_begin", spy)
    return all_of_it


@pytest.mark.usefixtures("capsys")
def test_the_command_reads_early(llama: Path, begun: list[ReadAhead | None]) -> None:
    assert main(["run", str(llama), "-p", "Hello", "--max-tokens", "4", "-q"]) == 0
    (ahead,) = begun
    assert ahead is not None
    assert ahead.read_bytes == ahead.nbytes > 2**20, "the model fits"


@pytest.mark.usefixtures("capsys")
def test_the_command_does_not_where_a_draft_model_takes_memory_too(llama: Path, begun: list[ReadAhead | None]) -> None:
    assert main(["run", str(llama), "-p", "Hello", "--max-tokens", "4", "-q", "--speculate", str(llama)]) == 0
    assert main(["run", str(llama), "-p", "Hello", "--max-tokens", "4", "-q", "--device", "cuda"]) == 2
    assert not begun
