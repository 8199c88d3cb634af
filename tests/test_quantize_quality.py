"""What 4 bits cost a real model, on a text that it was not calibrated with."""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors.torch import load_file

from headrace import sources
from headrace.quantize import damage, job

pytestmark = pytest.mark.slow


def test_4_bits_in_groups_of_64_cost_a_small_model_at_most_6_percent(tmp_path: Path) -> None:
    def quiet(*progress: object) -> None:
        pass

    original = sources.resolve(sources.demo_gguf())
    written = job.quantize(str(original), tmp_path / "new", quiet, bits=4)
    assert written is not None
    assert written.calibrated
    assert written.bytes_after < 0.34 * written.bytes_before  # the table, a fifth of the weights, has 8 bits
    stored = load_file(tmp_path / "new" / "model.safetensors")
    layers = {name: each for name, each in stored.items() if "_proj." in name}
    # A byte of a packed weight is two numbers; value projections are not packed.
    count = sum(each.numel() * (1 if "v_proj" in name else 2) for name, each in layers.items() if "scale" not in name)
    assert 4.5 < 8 * sum(each.nbytes for each in layers.values()) / count < 4.7
    lost = damage.measure(original, tmp_path / "new", quiet)
    assert lost.tokens == 4095
    assert 0 < lost.change < 0.06
    assert lost.divergence < 0.065
