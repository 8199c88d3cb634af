"""Small GGUF files with random weights: of any architecture that transformers reads, whole or broken on purpose."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np

SHAPES: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", "num_key_value_heads": 2},
    "qwen2": {"model_type": "qwen2", "num_key_value_heads": 2},
    "qwen3": {"model_type": "qwen3", "num_key_value_heads": 2, "head_dim": 32},
    "gemma3": {"model_type": "gemma3_text", "num_key_value_heads": 2, "head_dim": 32},
    "phi3": {"model_type": "phi3", "num_key_value_heads": 2},
    "gpt2": {"model_type": "gpt2"},
    "qwen3moe": {
        "model_type": "qwen3_moe",
        "num_key_value_heads": 2,
        "head_dim": 32,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
    },
}
TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m['content'] }}<|im_end|>{% endfor %}"


def vocabulary() -> list[str]:
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    return [*TOKENS, *bytes_to_unicode().values(), "ab"]


def config(architecture: str, **changes: Any) -> Any:
    from transformers import AutoConfig

    common = {
        "num_hidden_layers": 2,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_attention_heads": 4,
        "max_position_embeddings": 128,
        "vocab_size": len(vocabulary()),
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
        "tie_word_embeddings": True,
    }
    settings = {**common, **SHAPES[architecture], **changes}
    return AutoConfig.for_model(settings.pop("model_type"), **settings)


def write(
    file: Path,
    architecture: str = "llama",
    *,
    kind: str = "F32",
    values: dict[str, Any] | None = None,
    drop: str | None = None,
    extra: dict[str, np.ndarray] | None = None,
    **changes: Any,
) -> Path:
    """A GGUF file with weights of `kind`; norms and biases are F32, as converters leave them.

    `values` are further metadata, `drop` a tensor that is left out, `extra` tensors that are added.
    """
    import gguf
    from gguf.quants import quantize

    model_config = config(architecture, **changes)
    writer = gguf.GGUFWriter(file, architecture)
    _write_metadata(writer, architecture, model_config)
    for key, value in (values or {}).items():
        {str: writer.add_string, int: writer.add_uint32, float: writer.add_float32}[type(value)](key, value)
    random = np.random.default_rng(7)
    for name, shape in _tensors(architecture, model_config).items():
        numbers = random.standard_normal(shape, dtype=np.float32) * 0.1
        if name == drop:
            continue
        if len(shape) == 1 or kind == "F32":
            writer.add_tensor(name, numbers)
        elif kind == "F16":
            writer.add_tensor(name, numbers.astype(np.float16))
        else:
            quantization = gguf.GGMLQuantizationType[kind]
            writer.add_tensor(name, quantize(numbers, quantization), raw_dtype=quantization)
    for name, numbers in (extra or {}).items():
        writer.add_tensor(name, numbers)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def _write_metadata(writer: Any, architecture: str, model_config: Any) -> None:
    from transformers.integrations.ggml import GGUF_CONFIG_MAPPING

    theta = (getattr(model_config, "rope_parameters", None) or {}).get("rope_theta", 10000.0)
    legacy = {"qwen3moe": "qwen3_moe"}.get(architecture, architecture)
    written = set()
    for key, name in GGUF_CONFIG_MAPPING[legacy].items():
        value = theta if name == "rope_theta" else getattr(model_config, name, None) if name else None
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            add = writer.add_float32 if isinstance(value, float) else writer.add_uint32
            add(f"{architecture}.{key}", value)
            written.add(f"{architecture}.{key}")
    for key, name in (("attention.key_length", "head_dim"), ("expert_feed_forward_length", "moe_intermediate_size")):
        if isinstance(value := getattr(model_config, name, None), int) and f"{architecture}.{key}" not in written:
            writer.add_uint32(f"{architecture}.{key}", value)
    if architecture == "gpt2":
        writer.add_uint32("gpt2.context_length", model_config.n_positions)
    writer.add_name("tiny")
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(vocabulary())
    writer.add_token_types([3] * len(TOKENS) + [1] * (len(vocabulary()) - len(TOKENS)))
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(0)
    writer.add_pad_token_id(0)
    writer.add_chat_template(TEMPLATE)


def _tensors(architecture: str, model_config: Any) -> dict[str, tuple[int, ...]]:
    """Names and shapes as a converter writes them, from transformers' own map of names."""
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.modeling_gguf_pytorch_utils import (
        TENSOR_PROCESSORS,
        TensorProcessor,
        get_gguf_hf_weights_map,
    )

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(model_config)
    state = model.state_dict()
    processor = TENSOR_PROCESSORS.get(architecture, TensorProcessor)(config=model_config.to_dict())
    shapes = {}
    for name, target in get_gguf_hf_weights_map(model, processor).items():
        shape = tuple(state[target].shape)
        if name == "output.weight" and model_config.tie_word_embeddings:
            continue
        if re.search(r"ffn_(gate|up)_exps$", name):
            shape = (shape[0], shape[1] // 2, shape[2])
        if architecture == "gpt2" and len(shape) == 2 and name.startswith("blk."):
            shape = shape[::-1]
        shapes[name if name.endswith((".weight", ".bias")) else f"{name}.weight"] = shape
    return shapes
