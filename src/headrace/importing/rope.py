"""What a GGUF file says about rotary positions, in transformers' words. Knows nothing of files or tensors.

transformers' reading of GGUF files leaves these at their defaults, and the model then writes nonsense beyond its
first few thousand tokens, or at once. What cannot be carried over is refused.
"""

from __future__ import annotations

import math
from typing import Any

from headrace.importing.header import GgufHeader


class UnknownScaling(ValueError):
    """Positions are scaled by a rule that has no counterpart; its text is the reason."""


def stretch_positions(config: Any, header: GgufHeader, divisors: Any | None) -> None:
    """Set scaling and partial rotation in `config.rope_parameters`.

    `divisors` is the table of frequency divisors (float32, one per pair of dimensions) that GGUF stores for Llama 3.
    """
    rope = getattr(config, "rope_parameters", None) or {}
    rope = rope.get("full_attention", rope)  # local layers of models that have both kinds are not stretched
    if rope.get("rope_type") == "default":
        rope.update(_scaling(rope, header, divisors))
    turned = header.metadata.get(f"{header.architecture}.rope.dimension_count")
    if turned and "partial_rotary_factor" in rope:
        head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        rope["partial_rotary_factor"] = turned / head


def _scaling(rope: dict[str, Any], header: GgufHeader, divisors: Any | None) -> dict[str, Any]:
    if divisors is not None:
        return _llama3(rope["rope_theta"], divisors)
    prefix = f"{header.architecture}.rope.scaling."
    kind = header.metadata.get(prefix + "type", "none")
    if kind == "none":
        return {}
    if kind == "linear":
        return {"rope_type": "linear", "factor": header.metadata[prefix + "factor"]}
    if kind == "yarn":
        return {
            "rope_type": "yarn",
            "factor": header.metadata[prefix + "factor"],
            "original_max_position_embeddings": header.metadata[prefix + "original_context_length"],
        }
    raise UnknownScaling(f"its rotary positions are scaled in a way that is not supported ({kind!r})")


def _llama3(theta: float, divisors: Any) -> dict[str, Any]:
    """Llama 3's rule from the table that GGUF stores instead; only if the rule gives this very table."""
    import numpy as np

    factor = float(divisors.max())
    if factor == 1:
        return {}
    wavelength = 2 * math.pi * theta ** (np.arange(len(divisors)) / len(divisors))
    low, high, context = 1.0, 4.0, 8192
    smooth = np.clip((context / wavelength - low) / (high - low), 0, 1)
    if not np.allclose(1 / ((1 - smooth) / factor + smooth), divisors, rtol=1e-3):
        raise UnknownScaling("its rotary positions are scaled by a table that is not Llama 3's")
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": low,
        "high_freq_factor": high,
        "original_max_position_embeddings": context,
    }
