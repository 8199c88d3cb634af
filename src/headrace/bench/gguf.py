"""A checkpoint as the GGUF file that llama.cpp reads, with the same bf16 weights. Names are the package gguf's."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from safetensors import safe_open

from headrace import sources
from headrace.errors import BenchmarkFailed

_ARCHITECTURES = {"llama": gguf.MODEL_ARCH.LLAMA, "qwen3": gguf.MODEL_ARCH.QWEN3}
_STEP = "converting for llama.cpp"


@dataclass(frozen=True)
class _Source:
    """A tensor of the checkpoint."""

    file: Path
    key: str
    shape: tuple[int, ...]

    @property
    def is_matrix(self) -> bool:
        return len(self.shape) > 1  # the others are norms and biases, which llama.cpp wants in float32

    def read(self, config: dict[str, Any]) -> np.ndarray[Any, Any]:
        with safe_open(self.file, "pt") as shard:
            tensor = shard.get_tensor(self.key)
        if not self.is_matrix:
            return np.asarray(tensor.float().numpy())
        numbers: np.ndarray[Any, Any] = (
            _reordered(tensor.to(torch.bfloat16), self.key, config).view(torch.uint16).numpy()
        )
        return numbers


def write(checkpoint: Path, output: Path) -> None:
    """Write `output`; one tensor is in memory at a time. Raises: BenchmarkFailed for what cannot be carried over."""
    config = json.loads((checkpoint / "config.json").read_text())
    kind, vocabulary = config.get("model_type"), gguf.GGUFReader(sources.demo_gguf())
    tokens = len(vocabulary.fields["tokenizer.ggml.tokens"].data)
    if kind not in _ARCHITECTURES:
        reason = f"only {' and '.join(_ARCHITECTURES)} are written as GGUF, not {kind!r}; give the file with --gguf"
        raise BenchmarkFailed(step=_STEP, reason=reason)
    if config["vocab_size"] != tokens:
        reason = f"a tokenizer of {config['vocab_size']} tokens is not converted; give the file with --gguf"
        raise BenchmarkFailed(step=_STEP, reason=reason)
    writer = gguf.GGUFWriter(output, kind)
    _write_config(writer, config)
    _copy_tokenizer(writer, vocabulary)
    found = dict(_sources(checkpoint, config))
    for name, source in found.items():
        dtype: Any = np.dtype(np.uint16 if source.is_matrix else np.float32)
        nbytes = dtype.itemsize * int(np.prod(source.shape))
        raw = gguf.GGMLQuantizationType.BF16 if source.is_matrix else gguf.GGMLQuantizationType.F32
        writer.add_tensor_info(name, source.shape, dtype, nbytes, raw_dtype=raw)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for source in found.values():
        writer.write_tensor_data(source.read(config))
    writer.close()


def _write_config(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    rope = config.get("rope_parameters") or config
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(rope["rope_theta"])
    head = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    writer.add_rope_dimension_count(head)
    writer.add_key_length(head)
    writer.add_value_length(head)
    writer.add_vocab_size(config["vocab_size"])
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_BF16)


def _copy_tokenizer(writer: gguf.GGUFWriter, vocabulary: gguf.GGUFReader) -> None:
    for field in vocabulary.fields.values():
        if field.name.startswith("tokenizer."):
            inner = field.types[1] if len(field.types) > 1 else None
            writer.add_key_value(field.name, field.contents(), field.types[0], sub_type=inner)


def _sources(checkpoint: Path, config: dict[str, Any]) -> Iterator[tuple[str, _Source]]:
    """Tensors by their name in GGUF. Raises: BenchmarkFailed."""
    names = gguf.get_tensor_name_map(_ARCHITECTURES[config["model_type"]], config["num_hidden_layers"])
    for file in sorted(checkpoint.glob("*.safetensors")):
        with safe_open(file, "pt") as shard:
            for key in shard.keys():  # noqa: SIM118 - not a mapping
                if key == "lm_head.weight" and config.get("tie_word_embeddings"):
                    continue
                name = names.get_name(key, try_suffixes=(".weight", ".bias"))
                if name is None:
                    raise BenchmarkFailed(step=_STEP, reason=f"GGUF has no name for {key!r}")
                yield name, _Source(file, key, tuple(shard.get_slice(key).get_shape()))


def _reordered(tensor: torch.Tensor, key: str, config: dict[str, Any]) -> torch.Tensor:
    """llama.cpp turns neighbouring dimensions of Llama's heads, transformers those half a head apart."""
    kinds = {"q_proj.weight": "num_attention_heads", "k_proj.weight": "num_key_value_heads"}
    kind = next((count for end, count in kinds.items() if key.endswith(end)), None)
    if kind is None or config["model_type"] != "llama":
        return tensor
    rows, columns = tensor.shape
    halves = tensor.view(config[kind], 2, rows // config[kind] // 2, columns)
    return halves.transpose(1, 2).reshape(rows, columns)
