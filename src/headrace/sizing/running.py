"""What running a model costs beside its weights: KV cache, activations, logits. From its config; knows no plan."""

from __future__ import annotations

from dataclasses import dataclass

from headrace.sizing.classic import falcon_heads
from headrace.sizing.fields import Fields

_WINDOW_PATTERNS = {"gemma2": 2, "gemma3_text": 6, "cohere2": 4, "gpt_oss": 2, "exaone4": 4}
"""Where a config does not list its layers' types: every so many layers one sees everything, the others a window."""


@dataclass(frozen=True, slots=True)
class CacheShape:
    """Bytes of KV cache for one token of one sequence."""

    full_bytes_per_token: int
    """Of the layers that keep every token."""
    window_bytes_per_token: int
    """Of those that keep only the last `window_tokens`."""
    window_tokens: int


def layer_count(text: Fields) -> int:
    """Under any of the names that families have for it."""
    return text.count("num_hidden_layers", "n_layer", default=1)


def hidden_size(text: Fields) -> int:
    """The same."""
    return text.count("hidden_size", "n_embd", "n_embed", default=1)


def cache_shape(text: Fields, element_bytes: int) -> CacheShape:
    """As transformers caches: keys and values of every key-value head, also where attention is latent."""
    layers, windows = layer_count(text), _windowed_layers(text)
    per_layer = _cached_per_layer(text) * element_bytes
    window = text.optional("sliding_window") if windows else 0
    return CacheShape(per_layer * (layers - windows), per_layer * windows, window)


def _cached_per_layer(text: Fields) -> int:
    """Numbers that one layer caches for one token."""
    if text.model_type == "falcon":
        _, kv, dim = falcon_heads(text)
        return 2 * kv * dim
    count = text.count("num_attention_heads", "n_head", default=1)
    if text.optional("kv_lora_rank"):
        dims = ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
        return count * sum(text.count(name, default=1) for name in dims)
    kv = text.count("num_key_value_heads", default=count)
    dim = text.count("head_dim", default=max(1, hidden_size(text) // count))
    return 2 * kv * dim


def query_groups(text: Fields) -> int:
    """Query heads that share the keys and values of one key-value head."""
    if text.model_type == "falcon":
        heads, kv, _ = falcon_heads(text)
        return max(1, heads // kv)
    heads = text.count("num_attention_heads", "n_head", default=1)
    if text.optional("kv_lora_rank"):
        return 1
    return max(1, heads // text.count("num_key_value_heads", default=heads))


def latent_cache_per_layer(text: Fields) -> int | None:
    """Numbers that a layer of latent attention caches where only the short vector is kept; None if it is not latent."""
    rank = text.optional("kv_lora_rank")
    return rank + text.optional("qk_rope_head_dim") if rank else None


def _windowed_layers(text: Fields) -> int:
    """How many layers see only a window of the last tokens."""
    window = text.values.get("sliding_window")
    if not isinstance(window, int) or window < 1 or text.values.get("use_sliding_window") is False:
        return 0
    layers = layer_count(text)
    if types := text.sequence("layer_types"):
        return sum(1 for kind in types if kind == "sliding_attention")
    pattern = text.values.get("sliding_window_pattern") or _WINDOW_PATTERNS.get(text.model_type)
    if not isinstance(pattern, int) or pattern < 1:
        return layers
    return sum(1 for layer in range(layers) if (layer + 1) % pattern)


def activation_bytes_per_token(text: Fields, element_bytes: int) -> int:
    """Hidden states (residual, normed, in and out) and the MLP's three (gate, up and their product), and some more. A
    3072 x 8192 layer in bfloat16 took 74 KiB per token where this says 78 (docs/log.md).
    """
    hidden = hidden_size(text)
    inner = text.values.get("intermediate_size") or text.values.get("n_inner") or text.values.get("ffn_dim")
    inner = max(inner) if isinstance(inner, (list, tuple)) else inner if isinstance(inner, int) else 4 * hidden
    inner = max(inner, 2 * experts_per_token(text) * text.optional("moe_intermediate_size"))
    return element_bytes * (4 * hidden + 3 * inner) + 2 * hidden


_KEEPS_SCORES = ("gemma2", "gpt_oss", "bloom")
"""Families that transformers runs without a fused kernel for attention."""


def score_bytes(text: Fields, element_bytes: int) -> int:
    """Of one pair of positions: scores and their exponentials in the model's dtype, and a copy in float32."""
    if text.model_type not in _KEEPS_SCORES:
        return 0
    return text.count("num_attention_heads", "n_head", default=1) * (2 * element_bytes + 4)


def logits_bytes(text: Fields, element_bytes: int) -> int:
    """Of one position: scores in the model's dtype, in float32, and sorted copies with their indices while sampling."""
    return text.optional("vocab_size") * (element_bytes + 4 * 4 + 8)


def experts_per_token(text: Fields) -> int:
    """How many routed experts a token chooses; 0 for a dense model."""
    return text.optional("num_experts_per_tok", "experts_per_token")


def expert_share(text: Fields) -> float:
    """Part of the routed experts that one token uses; 1 for a dense model."""
    count = text.optional("num_experts", "num_local_experts", "n_routed_experts")
    chosen = experts_per_token(text)
    return chosen / count if 0 < chosen < count else 1.0
