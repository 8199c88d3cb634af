"""What is read early is what stays, bit for bit; what cannot be told early is no error; the engine's plan decides."""

from __future__ import annotations

import contextlib
import errno
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from fakes import ScriptedReader, broken, small_matrices
from tiny_models import differing, edit_config, logits, plain, plain_logits, shared, write

from headrace import early, machine, store
from headrace.cli.app import main
from headrace.config import OffloadConfig, PrefetchOffloadConfig
from headrace.copying import ahead as room
from headrace.copying.ahead import ReadAhead
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


def everything(directory: Path) -> ReadAhead:
    checkpoint = store.open_checkpoint(directory)
    return ReadAhead(checkpoint, list(checkpoint.tensors.values()), Metrics())


def bound_ahead(engine: Engine, ahead: ReadAhead) -> set[str]:
    """Names of the parameters that lie in what was read ahead."""
    begin, end = ahead.pages.address, ahead.pages.address + ahead.pages.nbytes
    parameters = engine.model.named_parameters()
    return {name for name, parameter in parameters if not parameter.is_meta and begin <= parameter.data_ptr() < end}


def with_scripted(monkeypatch: pytest.MonkeyPatch, script: Callable[[int], Any]) -> None:
    class Reader(ScriptedReader):
        def __init__(self, paths: dict[str, Path], metrics: Metrics) -> None:
            super().__init__(paths, metrics)
            self.script = script

    monkeypatch.setattr(room, "DiskReader", Reader)


def test_weights_are_bound_where_they_lie_and_the_rest_streams(llama: Path) -> None:
    with early.reading(llama, offload=HALF, context=64) as ahead:
        assert ahead is not None
        with Engine.open(llama, offload=HALF, context=64, ahead=ahead) as engine:
            there = bound_ahead(engine, ahead)
            resident = {name for name, parameter in engine.model.named_parameters() if not parameter.is_meta}
            assert there == resident - {"model.norm.weight"}, "what stands outside of blocks is not looked at"
            expected = dict(plain(llama).named_parameters())
            for name in there:
                assert torch.equal(engine.model.get_parameter(name), expected[name]), name
            report = engine.report()
            assert report.offloaded_bytes > 0
            assert ahead.committed_bytes <= engine.plan.memory.resident_bytes + len(there) * 4096
            assert differing(logits(engine.model), plain_logits(llama)) == []
            assert engine.report().counters.read_bytes >= report.offloaded_bytes


@pytest.mark.parametrize("architecture", ["llama", "mixtral", "gpt2"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_what_the_plan_does_not_keep_is_given_back(root: Path, architecture: str, dtype: torch.dtype) -> None:
    """Also where a model holds weights otherwise than they are stored: those are read again, as always."""
    directory = shared(root, architecture, dtype)
    ahead = everything(directory)
    before = ahead.pages.nbytes
    with Engine.open(directory, offload=HALF, context=64, ahead=ahead) as engine:
        there = bound_ahead(engine, ahead)
        kept = sum(engine.model.get_parameter(name).nbytes for name in there)
        assert 0 < kept <= ahead.committed_bytes < before
        assert engine.report().offloaded_bytes > 0
        assert differing(logits(engine.model), plain_logits(directory, dtype)) == []


def test_a_budget_is_planned_for_with_less(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Engine.open(llama, weights_share=0.7, context=64) as engine:
        budget = engine.memory_bytes
    assert budget is not None
    monkeypatch.setattr(machine, "resident_bytes", lambda: 0)
    monkeypatch.setattr(early.forecast, "BASELINE_BYTES", engine.plan.memory.baseline_bytes)
    monkeypatch.setattr(early.forecast, "TOKENIZER_FACTOR", 0)
    names = []
    for less in ((0,), (0, 2**18), (0, 2**18, 2**19)):
        monkeypatch.setattr(early, "LESS_BYTES", less)
        with early.reading(llama, memory=budget, context=64) as ahead:
            assert ahead is not None
            ahead.wait()
            tensors = ahead.checkpoint.tensors
            names.append({name for name in tensors if ahead.offset_of(tensors[name].segment) is not None})
            ahead.close()
    assert names[0] > names[1] >= names[2] > set()


def test_the_baseline_is_that_of_the_libraries(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ahead = everything(llama)
    ahead.wait()
    filled = ahead.committed_bytes
    assert filled > 2**20
    monkeypatch.setattr(machine, "resident_bytes", lambda: 2**29)
    with Engine.open(llama, offload=HALF, context=64, ahead=ahead) as engine:
        assert engine.plan.memory.baseline_bytes == 2**29 - filled


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


def test_what_a_model_has_is_not_taken_from_it_by_a_later_error(llama: Path) -> None:
    with contextlib.suppress(KeyboardInterrupt), early.reading(llama, context=64) as ahead:
        assert ahead is not None
        engine = Engine.open(llama, context=64, ahead=ahead)
        known = logits(engine.model)
        raise KeyboardInterrupt
    assert engine.report().offloaded_bytes == 0
    assert differing(logits(engine.model), known) == []


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


def test_a_read_that_fails_once_is_done_again(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with_scripted(monkeypatch, broken(errno.EIO))
    with early.reading(llama, offload=HALF, context=64) as ahead:
        assert ahead is not None
        with Engine.open(llama, offload=HALF, context=64, ahead=ahead) as engine:
            assert not bound_ahead(engine, ahead)
            assert ahead.committed_bytes == 0
            assert differing(logits(engine.model), plain_logits(llama)) == []


def opened_within(llama: Path, begun: list[ReadAhead], **settings: Any) -> None:
    with early.reading(llama, context=64) as ahead:
        assert ahead is not None
        begun.append(ahead)
        Engine.open(llama, context=64, ahead=ahead, **settings)


def test_a_file_that_cannot_be_read_is_the_engines_error(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with_scripted(monkeypatch, broken(errno.EIO, times=1000))
    begun: list[ReadAhead] = []
    with pytest.raises(ReadError, match=r"model\.safetensors.*Input/output error"):
        opened_within(llama, begun)
    assert begun[0].committed_bytes == 0


def test_a_budget_that_is_too_small_is_told_as_always(llama: Path) -> None:
    begun: list[ReadAhead] = []
    with pytest.raises(BudgetTooSmall):
        opened_within(llama, begun, memory="1MiB")
    assert not any(begun[0].pages.view()), "nothing of it is left"


def test_an_interrupt_ends_the_reading(llama: Path) -> None:
    def interrupt(plan: object) -> None:
        raise KeyboardInterrupt

    begun: list[ReadAhead] = []
    with pytest.raises(KeyboardInterrupt):
        opened_within(llama, begun, on_plan=interrupt)
    assert not any(begun[0].pages.view())


def test_of_another_model_nothing_is_taken(llama: Path, root: Path) -> None:
    ahead = everything(shared(root, "mixtral"))
    with Engine.open(llama, offload=HALF, context=64, ahead=ahead) as engine:
        assert not bound_ahead(engine, ahead)
        assert ahead.committed_bytes == 0
        assert differing(logits(engine.model), plain_logits(llama)) == []


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
    assert ahead.committed_bytes > 2**20, "it was all kept: the model fits"


@pytest.mark.usefixtures("capsys")
def test_the_command_does_not_where_a_draft_model_takes_memory_too(llama: Path, begun: list[ReadAhead | None]) -> None:
    assert main(["run", str(llama), "-p", "Hello", "--max-tokens", "4", "-q", "--speculate", str(llama)]) == 0
    assert main(["run", str(llama), "-p", "Hello", "--max-tokens", "4", "-q", "--device", "cuda"]) == 2
    assert not begun
