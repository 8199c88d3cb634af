"""A checkpoint around an accelerator, a simulated one: the same logits as without, wherever weights wait."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tiny_models
import torch

from headrace import engine as engine_module
from headrace import machine
from headrace.config import OffloadConfig
from headrace.engine import Engine
from headrace.errors import HeadraceError
from headrace.testing import SimulatedAccelerator

MIB = 2**20
GROUPS = OffloadConfig.model_validate({"prefetch": {"offload_group_size": 2, "offload_prefetch_step": 1}})
UVA = OffloadConfig.model_validate({"uva": {"cpu_offload_gb": 1}})


@pytest.fixture(scope="module", params=["llama-tied", "qwen3-moe"])
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.write(tmp_path_factory.mktemp(request.param), request.param)


def logits(engine: Engine) -> list[torch.Tensor]:
    """Of a prefill and of a step that decodes."""
    ids = torch.arange(3, 15)[None]
    with torch.inference_mode():
        made = engine.model(ids, use_cache=True)
        last = engine.model(ids[:, :1], cache=made.past_key_values)
    return [made.logits, last.logits]


def weight_bytes(engine: Engine) -> int:
    report = engine.report()
    return report.resident_bytes + report.offloaded_bytes


@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "on_disk"),
    [
        ({"offload": GROUPS}, False),
        ({"offload": UVA}, False),
        ({"offload": GROUPS, "pin_memory": False}, False),
        ({"weights_share": 0.5}, False),
        ({"weights_share": 0.5, "host_memory": "tight"}, True),
    ],
)
def test_the_same_logits(
    checkpoint: Path, settings: dict[str, Any], on_disk: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "resident_bytes", lambda: 500 * MIB)  # the budgets should not depend on other tests
    with Engine.open(checkpoint) as resident:
        expected = logits(resident)
        total = weight_bytes(resident)
    if settings.get("host_memory") == "tight":
        settings = {**settings, "host_memory": _tight(checkpoint, settings)}
    device = SimulatedAccelerator(seed=7)
    with device:
        engine = Engine.open(checkpoint, device=device, **settings)
        for _ in range(2):
            assert all(torch.equal(*pair) for pair in zip(logits(engine), expected, strict=True))
        report = engine.report()
        assert report.offloaded_bytes > 0
        assert (report.counters.copied_bytes > 0) == (report.backend != "uva")
        rows_bytes = report.counters.gathered_rows * 4096  # at most a page each
        assert (report.counters.read_bytes > rows_bytes) == on_disk
        assert report.fallbacks == ()
        assert report.resident_bytes + report.offloaded_bytes == total
        engine.close()
        engine._around.free_residents()  # type: ignore[union-attr]
    device.check()


def _tight(checkpoint: Path, settings: dict[str, Any]) -> int:
    """A host budget that holds some of what leaves the device, and not all."""
    device = SimulatedAccelerator()
    with pytest.raises(HeadraceError) as caught, device:
        Engine.open(checkpoint, device=device, **{**settings, "host_memory": MIB})
    return int(caught.value.needed_bytes) + MIB // 2  # type: ignore[attr-defined]


@pytest.mark.slow
@pytest.mark.parametrize("step", ["loading weights", "loading host memory", "guard"])
def test_a_load_that_fails_gives_back_what_it_took(
    checkpoint: Path, step: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = SimulatedAccelerator()
    took: list[int] = []

    def interrupt(what: str, done: int, total: int) -> None:
        if what == step and done == total:
            took.append(device.allocated_bytes)
            raise KeyboardInterrupt

    def fail(module: Any) -> None:
        took.append(device.page_locked_bytes)
        raise KeyboardInterrupt

    if step == "guard":
        monkeypatch.setattr(engine_module, "guard", fail)
    with device, pytest.raises(KeyboardInterrupt):
        Engine.open(checkpoint, device=device, offload=GROUPS, on_progress=interrupt)
    assert took[0] > 0
    assert device.allocated_bytes == 0
    assert device.page_locked_bytes == 0
    device.check()
