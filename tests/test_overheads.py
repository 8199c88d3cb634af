"""What layers take beside their weights is told from what the weights take."""

from __future__ import annotations

import pytest
import torch
from tiny_models import model

from headrace import overheads


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_layer_takes_something_beside_its_products(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(overheads, "WEIGHTS_BYTES", 1)
    assert 0 <= overheads.measure_layer_overhead_s(dtype, 0.0) < 10
    assert overheads.measure_layer_overhead_s(dtype, 10.0) == 0, "all of it is the pass's"


@pytest.mark.slow
def test_experts_take_something_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(overheads, "WEIGHTS_BYTES", 1)
    assert 0 <= overheads.measure_expert_overhead_s(0.0, 0.0) < 10
    assert overheads.measure_expert_overhead_s(0.0, 10.0) == 0, "all of it is the layer's"


def test_a_model_is_as_large_as_asked_and_touched_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    monkeypatch.setattr(overheads, "WEIGHTS_BYTES", 200_000)
    made_of = overheads._TINY
    made = overheads._filled(LlamaForCausalLM, LlamaConfig, "float16", **made_of)
    layer_bytes = sum(weight.nbytes for weight in made.model.layers[0].parameters())
    assert 200_000 <= layer_bytes * len(made.model.layers) < 200_000 + layer_bytes
    assert all(bool((weight != 0).all()) for weight in made.parameters())
    assert {weight.dtype for weight in made.parameters()} == {torch.float16}


def test_what_is_between_tokens_is_no_part_of_them() -> None:
    calls = []
    seconds = overheads._token_seconds(model("llama"), lambda: calls.append(1))
    assert len(calls) >= len(seconds) > 0
    assert all(token_s > 0 and between_s > 0 for token_s, between_s in seconds)
