"""What stays is used where the page cache has it, bit for bit, or read to its place; the reader tells of faults."""

from __future__ import annotations

import errno
import itertools
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from fakes import small_matrices
from tiny_models import differing, logits, plain, plain_logits, shared, write

from headrace import machine, residents, store
from headrace.copying import mapped as room
from headrace.copying.mapped import MappedFile
from headrace.engine import Engine
from headrace.errors import ReadError


@pytest.fixture(autouse=True)
def _small_model() -> Iterator[None]:
    with small_matrices():
        yield


@pytest.fixture
def files(monkeypatch: pytest.MonkeyPatch) -> list[MappedFile]:
    """What is mapped for residents."""
    made: list[MappedFile] = []

    class Spy(MappedFile):
        def __init__(self, path: Path) -> None:
            super().__init__(path)
            made.append(self)

    monkeypatch.setattr(residents, "MappedFile", Spy)
    return made


def names_mapped(engine: Engine, files: list[MappedFile]) -> set[str]:
    """Names of the parameters that lie in a file."""
    ranges = [(file.address, file.address + len(file.view())) for file in files]
    return {
        name
        for name, parameter in engine.model.named_parameters()
        if not parameter.is_meta and any(begin <= parameter.data_ptr() < end for begin, end in ranges)
    }


@pytest.mark.parametrize("architecture", ["llama", "mixtral", "gpt2"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("share", [0.5, None])
def test_what_needs_no_other_place_is_mapped(
    root: Path, architecture: str, dtype: torch.dtype, share: float | None, files: list[MappedFile]
) -> None:
    directory = shared(root, architecture, dtype)
    tensors = store.open_checkpoint(directory).tensors
    expected = dict(plain(directory, dtype).named_parameters())
    with Engine.open(directory, weights_share=share, context=64) as engine:
        mapped = names_mapped(engine, files)
        for name in mapped & set(tensors):
            segment = tensors[name].segment
            assert segment.can_lie_as_stored(dtype is torch.bfloat16)
            assert (engine.model.get_parameter(name).data_ptr() - segment.offset) % 4096 == 0
        assert bool(mapped) == any(each.segment.can_lie_as_stored(each.is_steady) for each in tensors.values())
        for name, parameter in engine.model.named_parameters():
            assert parameter.is_meta or torch.equal(parameter, expected[name]), name
        assert bool(engine.report().offloaded_bytes) == (share is not None)
        assert differing(logits(engine.model), plain_logits(directory, dtype)) == []


def test_writing_to_a_weight_leaves_the_file_alone(tmp_path: Path, files: list[MappedFile]) -> None:
    directory = write(tmp_path, "llama")
    before = (directory / "model.safetensors").read_bytes()
    with Engine.open(directory, context=64) as engine:
        (name, *_) = names_mapped(engine, files)
        parameter = engine.model.get_parameter(name)
        with torch.no_grad():
            parameter.fill_(7)
        assert bool((parameter == 7).all())
    assert (directory / "model.safetensors").read_bytes() == before


def refuse(*arguments: object) -> None:
    raise OSError(errno.EIO, os.strerror(errno.EIO))


@pytest.mark.parametrize("step", ["__init__", "ask_for", "wait_for"])
def test_what_cannot_be_mapped_is_read(root: Path, step: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse_to_map(self: MappedFile, path: Path) -> None:
        raise ReadError(file=str(path), offset=0, nbytes=0, reason="no mapping here")

    directory = shared(root, "llama")
    monkeypatch.setattr(MappedFile, step, refuse_to_map if step == "__init__" else refuse)
    with Engine.open(directory, context=64) as engine:
        assert differing(logits(engine.model), plain_logits(directory)) == []


def test_a_file_that_was_cut_off_is_told(tmp_path: Path) -> None:
    """Between the look at its header and the loading; that its bytes are touched would end the process."""
    directory = write(tmp_path, "llama")

    def cut(plan: object) -> None:
        os.truncate(directory / "model.safetensors", 8192)

    with pytest.raises(ReadError, match="cut off"):
        Engine.open(directory, context=64, on_plan=cut)


def test_progress_reaches_the_end_once(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(residents, "GROUP_BYTES", 2**20)
    directory = shared(root, "llama")
    told: list[tuple[str, int, int]] = []
    Engine.open(directory, context=64, on_progress=lambda *step: told.append(step)).close()
    assert {what for what, _, _ in told} == {residents.LOADING}
    assert len(told) > 2
    done = [done for _, done, _ in told]
    assert done == sorted(done)
    assert told[-1][1] == told[-1][2] == store.open_checkpoint(directory).nbytes


def test_a_kernel_that_does_not_bring_pages_on_demand(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "POPULATE_READ", 12345)
    directory = shared(root, "llama")
    with Engine.open(directory, context=64) as engine:
        assert differing(logits(engine.model), plain_logits(directory)) == []


def test_mapped_memory_is_not_counted_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The page cache is available, whoever has it mapped."""
    path = tmp_path / "file"
    path.write_bytes(b"x" * 32 * 2**20)
    monkeypatch.setattr(machine, "_meminfo_available", lambda: 2**30)
    monkeypatch.setattr(machine, "control_group_limit_bytes", lambda: None)
    before, filled = machine.available_bytes(), machine.resident_bytes()
    file = MappedFile(path)
    read = store.Read("file", 0, 32 * 2**20, 32 * 2**20, ())
    file.ask_for(read)
    file.wait_for(read)
    assert machine.resident_bytes() - filled > 24 * 2**20
    assert abs(machine.available_bytes() - before) < 8 * 2**20


def test_pages_are_there_before_they_are_used(root: Path, files: list[MappedFile], monkeypatch: Any) -> None:
    """All of a checkpoint is asked for ahead of being waited for, and waited for once."""
    monkeypatch.setattr(residents, "GROUP_BYTES", 2**20)
    order: list[tuple[str, int]] = []
    ask, wait = MappedFile.ask_for, MappedFile.wait_for
    monkeypatch.setattr(MappedFile, "ask_for", lambda self, read: (order.append(("ask", read.offset)), ask(self, read)))
    monkeypatch.setattr(
        MappedFile, "wait_for", lambda self, read: (order.append(("wait", read.offset)), wait(self, read))
    )
    Engine.open(shared(root, "llama"), context=64).close()
    asked = [offset for what, offset in order if what == "ask"]
    waited = [offset for what, offset in order if what == "wait"]
    assert asked == waited == sorted(set(asked))
    assert len(asked) > 3
    for offset, following in itertools.pairwise(waited):
        assert order.index(("ask", following)) < order.index(("wait", offset))
