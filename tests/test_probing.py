"""Probes measure something, leave nothing behind, and say how they did it. No rate is compared with a number."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest

from headrace import machine, overheads, probing
from headrace.core import CHUNK_BYTES
from headrace.errors import InvalidSetting


def test_every_place_of_a_file_is_read_once() -> None:
    for count in (0, 1, 63, 64, 65, 1000):
        assert sorted(probing._spread(count)) == list(range(count))


def test_a_file_is_read_at_some_rate(tmp_path: Path) -> None:
    file = tmp_path / "big"
    file.write_bytes(bytes(3 * probing.CHUNK_BYTES))
    rate, is_direct = probing.measure_disk_bytes_per_s(file, seconds=10.0)
    assert rate > 0
    assert isinstance(is_direct, bool)


def test_the_scratch_file_is_gone_afterwards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(probing, "SCRATCH_BYTES", 2 * probing.CHUNK_BYTES)
    with probing._readable(None) as path:
        assert path.stat().st_size == 2 * probing.CHUNK_BYTES
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("content", [None, b"short"])
def test_a_file_that_tells_nothing_is_refused(tmp_path: Path, content: bytes | None) -> None:
    file = tmp_path / "file"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(InvalidSetting, match="--file"), probing._readable(file):
        pass


@pytest.mark.slow
def test_without_torch_the_processor_is_estimated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.setattr(probing, "COPY_BYTES", 2**22)
    kernels, why = probing._kernels(1e10)
    assert (kernels.bytes_per_s, kernels.layer_s, kernels.pass_s, kernels.expert_s) == (5e9, 0.0, 0.0, 0.0)
    assert kernels.operations_per_s > 0
    assert kernels.products == {}
    assert "torch is not installed" in why
    assert probing._accelerator() is None


@pytest.mark.slow
def test_an_estimate_says_that_it_is_one() -> None:
    made = probing.estimate()
    assert made.machine.compute_bytes_per_s > 0
    assert "guess" in made.notes[0]


@pytest.mark.slow
def test_what_layers_cost_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "measure_products", functools.partial(machine.measure_products, nbytes=1))
    monkeypatch.setattr(overheads, "WEIGHTS_BYTES", 1)
    kernels, why = probing._kernels(1e10)
    assert 0 <= kernels.pass_s < 10
    assert 0 <= kernels.layer_s < 10
    assert kernels.pass_s + kernels.layer_s > 0
    assert 0 <= kernels.expert_s < 10
    assert set(kernels.products) == set(probing.DTYPES)
    assert kernels.fast_row_bytes_per_s > 0
    assert "bfloat16" in why


@pytest.mark.slow
def test_reading_and_computing_at_once_leave_shares(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "square_matrices", functools.partial(machine.square_matrices, nbytes=1))
    monkeypatch.setattr(probing, "SHARE_SECONDS", 0.01)
    file = tmp_path / "model.safetensors"
    file.write_bytes(bytes(2 * CHUNK_BYTES))
    made = probing._contention(file)
    assert made is not None
    assert 0 < made.disk_share <= 1
    assert 0 < made.compute_share <= 1
