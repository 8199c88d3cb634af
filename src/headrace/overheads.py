"""What transformers takes beside the products of weights, measured with models made for it. Knows no checkpoint.

A layer also runs norms, attention, activations and Python. What that takes is a small difference of two times on
machines that others use as well, so both are taken in turn, after each token: the token's, and that of the products
alone.
"""

from __future__ import annotations

import functools
import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from headrace.core import WIDE_LAYER
from headrace.model import quiet_transformers

WEIGHTS_BYTES = 256 * 2**20
"""More than caches hold: fewer would be read out of them, token after token."""
TOKENS = 16
_TINY: Any = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
}
_WIDE = {"vocab_size": 64, "hidden_size": WIDE_LAYER, "num_attention_heads": 16, "num_key_value_heads": 4}
_EXPERTS = {"num_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 768, "head_dim": 64}


@functools.cache
def measure_overhead_s() -> tuple[float, float]:
    """What `generate` takes beside weights, in seconds: for each layer, and for each pass. Of a tiny Llama, once."""
    from transformers import LlamaConfig, LlamaForCausalLM

    few, many = 2, 10
    seconds = {}
    for layers in (few, many):
        with torch.random.fork_rng(devices=[]):  # what the user seeded stays as it is
            model: Any = LlamaForCausalLM(LlamaConfig(**_TINY, num_hidden_layers=layers))
        seconds[layers] = min(token_s for token_s, _ in _token_seconds(model.to(torch.bfloat16)))  # others may be busy
    per_layer = max(0.0, (seconds[many] - seconds[few]) / (many - few))
    return per_layer, max(0.0, seconds[few] - few * per_layer)


def measure_layer_overhead_s(dtype: str, per_pass_s: float) -> float:
    """What a layer WIDE_LAYER wide takes beside its products, where a pass takes `per_pass_s` beside its layers.

    More than a tiny one: its other operators have something to do on every core, and the weights that stream by push
    all else out of the caches. `dtype` is torch's name. Takes WEIGHTS_BYTES of memory, and a layer.
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    model = _filled(LlamaForCausalLM, LlamaConfig, dtype, **_WIDE, intermediate_size=5632)
    matrices = [module.weight for module in _linears(model.model.layers)]
    return max(0.0, _beside_products_s(model, matrices) - per_pass_s) / len(model.model.layers)


def measure_expert_overhead_s(per_pass_s: float, per_layer_s: float) -> float:
    """What a bfloat16 layer of a Qwen3-MoE takes more, beside its products, than one without experts."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    model = _filled(Qwen3MoeForCausalLM, Qwen3MoeConfig, "bfloat16", **_WIDE, **_EXPERTS, intermediate_size=768)
    matrices = [module.weight for module in _linears(model.model.layers)]
    for layer in model.model.layers:
        stacks = [weight for weight in layer.mlp.experts.parameters() if weight.dim() == 3]
        matrices += [stack[number] for stack in stacks for number in range(_EXPERTS["num_experts_per_tok"])]
    beside_s = max(0.0, _beside_products_s(model, matrices) - per_pass_s) / len(model.model.layers)
    return max(0.0, beside_s - per_layer_s)


def _filled(model_class: Any, config_class: Any, dtype: str, **fields: int) -> Any:
    """A model of as many layers as have WEIGHTS_BYTES, all weights alike."""
    from transformers.initialization import no_init_weights

    element = getattr(torch, dtype)
    with torch.device("meta"), no_init_weights():
        one = model_class._from_config(config_class(**fields, num_hidden_layers=1), dtype=element)
    layer_bytes = sum(weight.numel() * weight.element_size() for weight in one.model.layers.parameters())
    layers = -(-WEIGHTS_BYTES // layer_bytes)
    with no_init_weights():
        model = model_class._from_config(config_class(**fields, num_hidden_layers=layers), dtype=element)
    with torch.no_grad():
        for weight in model.parameters():
            weight.fill_(0.01)  # memory that nobody has written to is one page of zeros
    return model


def _linears(layers: nn.Module) -> list[nn.Linear]:
    return [module for module in layers.modules() if isinstance(module, nn.Linear)]


def _beside_products_s(model: Any, matrices: Sequence[torch.Tensor]) -> float:
    """By how much a token of `model` takes longer than its products with `matrices`: the median over some tokens."""
    inputs = {matrix.shape[1]: torch.ones((1, matrix.shape[1]), dtype=matrix.dtype) for matrix in matrices}

    def multiply() -> None:
        for matrix in matrices:
            nn.functional.linear(inputs[matrix.shape[1]], matrix)

    return statistics.median(token_s - products_s for token_s, products_s in _token_seconds(model, multiply))


def _token_seconds(model: Any, between: Callable[[], None] = lambda: None) -> list[tuple[float, float]]:
    """Of each token that `model` generates, and of `between` after it, but for the first, which set the kernels up."""
    from transformers.generation.streamers import BaseStreamer

    class Clock(BaseStreamer):
        def __init__(self) -> None:
            self.stops_s: list[tuple[float, float]] = []

        def put(self, value: Any) -> None:
            begin_s = time.perf_counter()
            between()
            self.stops_s.append((begin_s, time.perf_counter()))

        def end(self) -> None:
            pass

    ids, clock = torch.ones((1, 8), dtype=torch.long), Clock()
    lengths = {"max_new_tokens": TOKENS, "min_new_tokens": TOKENS, "do_sample": False}
    with quiet_transformers(), torch.inference_mode():
        model.eval().generate(ids, attention_mask=torch.ones_like(ids), streamer=clock, pad_token_id=0, **lengths)
    return [
        (begin_s - ended_s, end_s - begin_s) for (_, ended_s), (begin_s, end_s) in itertools.pairwise(clock.stops_s[3:])
    ]
