"""What the counts in a config.json can be: layers, heads, widths, experts. Knows no family, and not which are needed.

Whatever reads a config asks here before it loops over layers or hands the config to transformers, which builds a model
without layers from -1 of them, and builds for hours from 10**9.
"""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Limit:
    """The smallest and the largest number that a count can be."""

    least: int
    most: int


_LAYERS = (
    "num_hidden_layers", "num_layers", "n_layer", "n_layers", "decoder_layers", "depth",
)  # fmt: skip
_WIDTHS = (
    "hidden_size", "n_embd", "n_embed", "d_model", "embed_dim", "word_embed_proj_dim",
)  # fmt: skip
_INNER = (
    "intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size", "decoder_ffn_dim",
)  # fmt: skip
_HEADS = (
    "num_attention_heads", "num_key_value_heads", "num_heads", "num_kv_heads", "n_head", "n_heads",
    "decoder_attention_heads",
)  # fmt: skip
_EXPERTS = (
    "num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts", "n_shared_experts",
    "num_shared_experts", "num_experts_per_tok", "experts_per_token",
)  # fmt: skip
_EXPERT_WIDTHS = (
    "moe_intermediate_size", "shared_expert_intermediate_size", "shared_intermediate_size",
)  # fmt: skip
_LATENT = (
    "q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim",
)  # fmt: skip

# At least four times the largest that was ever trained, which stands behind each; a plan for the most layers takes
# seconds. Zero is allowed where it is how a config says that there is none.
_LIMITS: Mapping[str, Limit] = {
    **dict.fromkeys(_LAYERS, Limit(1, 2**12)),  # 1,000: DeepNet, arXiv:2203.00555
    **dict.fromkeys(_WIDTHS, Limit(1, 2**20)),  # 20,480: Megatron-Turing NLG, arXiv:2201.11990
    **dict.fromkeys(_INNER, Limit(1, 2**22)),  # 81,920: the same
    **dict.fromkeys(_HEADS, Limit(1, 2**14)),  # 232: Falcon-180B
    "head_dim": Limit(1, 2**14),  # 1,280: the largest default in transformers
    "vocab_size": Limit(1, 2**24),  # 901,629: XLM-V, arXiv:2301.10472
    **dict.fromkeys(_EXPERTS, Limit(0, 2**16)),  # 16,384: Doge, whose experts are single vectors
    **dict.fromkeys(_EXPERT_WIDTHS, Limit(0, 2**22)),
    **dict.fromkeys(_LATENT, Limit(0, 2**20)),
}
_OF_OTHERS = Limit(1, 2**40)


def limit(name: str) -> Limit:
    """What a count of this name can be."""
    return _LIMITS.get(name, _OF_OTHERS)


def why_wrong(name: str, value: Any, allowed: Limit) -> str | None:
    """A few words, or None for a whole number within the limits. True and 2.0 are none."""
    said = f"{name} is {reprlib.repr(value)}"
    if type(value) is not int:
        return said
    if value < allowed.least:
        return f"{said} (at least {allowed.least})"
    return f"{said} (at most {allowed.most})" if value > allowed.most else None


def wrong_counts(config: Mapping[str, Any], path: str = "") -> list[str]:
    """`why_wrong` of every count in a config and in the configs of its parts. What is missing or null is not wrong.

    Other counts than those of layers may be listed layer by layer.
    """
    wrong = []
    for name, value in config.items():
        if isinstance(value, dict) and name.endswith("_config"):
            wrong += wrong_counts(value, f"{path}{name}.")
        elif name in _LIMITS and value is not None:
            each = value if isinstance(value, list) and value and name not in _LAYERS else [value]
            allowed = _limit_within(config, name)
            wrong += [why for item in each if (why := why_wrong(path + name, item, allowed))][:1]
    return wrong


def _limit_within(config: Mapping[str, Any], name: str) -> Limit:
    """Latent attention has dims of its own, and `head_dim` may be 0 beside them."""
    allowed = limit(name)
    return Limit(0, allowed.most) if name == "head_dim" and config.get("kv_lora_rank") else allowed
