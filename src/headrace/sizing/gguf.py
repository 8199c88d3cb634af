"""What a GGUF file's header says of the model in it, in the words of a config.json. Reads no file itself.

Keys and tensor names are those of https://github.com/ggml-org/ggml/blob/master/docs/gguf.md and of llama.cpp's models.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from headrace.sizing.counts import wrong_counts
from headrace.sizing.outline import Matrices, Outline, Tensor

_MODEL_TYPES = {
    "llama": "llama", "qwen2": "qwen2", "qwen2moe": "qwen2_moe", "qwen3": "qwen3", "qwen3moe": "qwen3_moe",
    "gemma": "gemma", "gemma2": "gemma2", "gemma3": "gemma3_text", "phi2": "phi", "phi3": "phi3",
    "starcoder2": "starcoder2", "stablelm": "stablelm", "olmo2": "olmo2", "olmoe": "olmoe", "granite": "granite",
    "command-r": "cohere", "cohere2": "cohere2", "glm4": "glm4", "smollm3": "smollm3", "exaone4": "exaone4",
    "gptneox": "gpt_neox", "falcon": "falcon", "gpt2": "gpt2", "bloom": "bloom", "gpt-oss": "gpt_oss",
}  # fmt: skip
_FIELDS = {
    "block_count": "num_hidden_layers",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.sliding_window": "sliding_window",
    "context_length": "max_position_embeddings",
    "expert_count": "num_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
}
_COMPUTED = ("rope_freqs.weight", "attn_rot_embd.weight", "rope_factors_long.weight", "rope_factors_short.weight")
_F32, _F16 = 0, 1
_AROUND = {"token_embd": "model.embed_tokens", "output": "lm_head", "output_norm": "model.norm"}

Row = tuple[str, int, tuple[int, ...]]
"""Name, type and shape (slowest dimension first) of a tensor in the file."""


def config_of(architecture: str, metadata: Mapping[str, Any], rows: Sequence[Row], vocabulary: int) -> dict[str, Any]:
    """The fields that a config.json would have. An architecture without a family here keeps its own name."""
    names = {name for name, _, _ in rows}
    config: dict[str, Any] = {"model_type": _MODEL_TYPES.get(architecture, architecture), "dtype": dtype_of(rows)}
    for key, field in _FIELDS.items():
        value = metadata.get(f"{architecture}.{key}")
        if isinstance(value, list) and value and all(each == value[0] for each in value):
            value = value[0]
        if isinstance(value, int) and value > 0:
            config[field] = value
    config["vocab_size"] = vocabulary or metadata.get(f"{architecture}.vocab_size")
    config["tie_word_embeddings"] = "output.weight" not in names
    has_bias = "blk.0.attn_q.bias" in names
    config |= {"attention_bias": has_bias, "use_qkv_bias": has_bias, "use_bias": has_bias}
    return config


def why_impossible(config: Mapping[str, Any]) -> str | None:
    """What is wrong with a file whose metadata makes this config, or None if a model can have its counts."""
    wrong = wrong_counts(config)
    return f"its metadata describes no possible model ({', '.join(wrong)})" if wrong else None


def dtype_of(rows: Sequence[Row]) -> str:
    """Torch's name of the dtype that an import writes."""
    types = {type_id for _, type_id, _ in rows}
    if types == {_F32}:
        return "float32"
    return "float16" if types <= {_F32, _F16} else "bfloat16"


def outline_of(rows: Sequence[Row]) -> Outline:
    """The file's tensors, as an import writes them, under names that say to which layer each belongs."""
    names = {name for name, _, _ in rows}
    out = Outline("model.embed_tokens", "lm_head", tied="output.weight" not in names)
    for name, _, shape in rows:
        if name.endswith(_COMPUTED):
            continue
        module, _, kind = name.rpartition(".")
        target = f"{_AROUND.get(module, re.sub(r'^blk', 'model.layers', module))}.{kind}"
        matrices = Matrices(1, *shape) if len(shape) == 2 else None
        out.tensors.append(Tensor(target.replace("_exps.", ".experts."), shape, matrices))
    return out
