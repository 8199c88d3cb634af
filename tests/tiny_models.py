"""Checkpoints of tiny random models, as transformers writes them, and what is computed with a model to compare two.

Each matrix has at least 64 KiB, so that it is worth a read and moves. Nothing here knows headrace.
"""

from __future__ import annotations

import copy
import functools
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

VOCABULARY = 512
HIDDEN = 256
LAYERS = 6
PAD, BOS, EOS = 0, 1, 2

_COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": HIDDEN,
    "intermediate_size": 384,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "pad_token_id": PAD,
    "bos_token_id": BOS,
    "eos_token_id": EOS,
}
_EXPERTS: dict[str, Any] = {"num_experts_per_tok": 2, "intermediate_size": 128}

ARCHITECTURES: Mapping[str, dict[str, Any]] = {
    "llama": {**_COMMON, "model_type": "llama", "tie_word_embeddings": False},
    "llama-tied": {**_COMMON, "model_type": "llama", "tie_word_embeddings": True},
    "qwen3": {**_COMMON, "model_type": "qwen3", "head_dim": 64, "tie_word_embeddings": True},
    "gemma3": {
        **_COMMON,
        "model_type": "gemma3_text",
        "head_dim": 64,
        "sliding_window": 8,
        "layer_types": ["sliding_attention", "full_attention"] * (LAYERS // 2),
    },
    "phi3": {**_COMMON, "model_type": "phi3", "tie_word_embeddings": False},
    "gpt2": {
        "model_type": "gpt2",
        "vocab_size": VOCABULARY,
        "n_embd": HIDDEN,
        "n_layer": LAYERS,
        "n_head": 4,
        "n_positions": 256,
        "pad_token_id": PAD,
        "bos_token_id": BOS,
        "eos_token_id": EOS,
    },
    "qwen3-moe": {
        **_COMMON,
        "model_type": "qwen3_moe",
        "head_dim": 64,
        "num_experts": 4,
        "moe_intermediate_size": 128,
        "num_experts_per_tok": 2,
        "tie_word_embeddings": False,
    },
    "mixtral": {**_COMMON, **_EXPERTS, "model_type": "mixtral", "num_local_experts": 4, "tie_word_embeddings": False},
}

TEMPLATE = (
    "{% for m in messages %}<s>{{ m['role'] }}: {{ m['content'] }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant: {% endif %}"
)


def config(architecture: str, **changes: Any) -> Any:
    values = {**ARCHITECTURES[architecture], **changes}
    return AutoConfig.for_model(values.pop("model_type"), **values)


def model(architecture: str, dtype: torch.dtype = torch.bfloat16, *, seed: int = 0, **changes: Any) -> Any:
    """Random weights that differ in every parameter, the norms too, so that a mix-up shows in the logits."""
    made = AutoModelForCausalLM.from_config(config(architecture, **changes), dtype=dtype).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float32)
            one = 1.0 if (parameter.dim() == 1 and "norm" in name) or ("ln_" in name and "weight" in name) else 0.0
            parameter.copy_(one + 0.08 * noise)
    return made


def write(
    directory: Path,
    architecture: str,
    dtype: torch.dtype = torch.bfloat16,
    *,
    seed: int = 0,
    shard_size: str | None = None,
    template: bool = True,
    **changes: Any,
) -> Path:
    """A checkpoint as `save_pretrained` leaves it, in several files if `shard_size` is given, with a tokenizer."""
    made = model(architecture, dtype, seed=seed, **changes)
    made.save_pretrained(directory, **({"max_shard_size": shard_size} if shard_size else {}))
    write_tokenizer(directory, template=template)
    return directory


def shared(root: Path, architecture: str, dtype: torch.dtype = torch.bfloat16, **changes: Any) -> Path:
    """A checkpoint below `root` that is written once and read by many tests, which leave it as it is."""
    name = "-".join([architecture, str(dtype).removeprefix("torch."), *(f"{k}={v}" for k, v in changes.items())])
    directory = root / f"tiny-{name}"
    return directory if directory.exists() else write(directory, architecture, dtype, **changes)


def write_tokenizer(directory: Path, *, template: bool = True) -> Path:
    """Bytes and a few merges: it encodes every text, and decodes to it again."""
    letters = list(bytes_to_unicode().values())
    vocabulary = {token: number for number, token in enumerate(["<pad>", "<s>", "</s>", *letters, "th", "Ġth", "the"])}
    inner = Tokenizer(models.BPE(vocab=vocabulary, merges=[("t", "h"), ("Ġ", "th"), ("th", "e")]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    inner.post_processor = processors.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token="<pad>", bos_token="<s>", eos_token="</s>", model_max_length=256
    )
    if template:
        tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(directory)
    return directory


def edit(directory: Path, change: Callable[[dict[str, torch.Tensor]], Mapping[str, torch.Tensor]]) -> Path:
    """Replace the tensors of a checkpoint in one file."""
    file = directory / "model.safetensors"
    save_file({name: tensor.contiguous() for name, tensor in change(load_file(file)).items()}, file, {"format": "pt"})
    return directory


def edit_config(directory: Path, **changes: Any) -> Path:
    file = directory / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))
    return directory


def plain(directory: Path, dtype: torch.dtype = torch.bfloat16) -> Any:
    """What transformers itself loads, each tensor in memory of its own: torch aligns that to 64 bytes, and mapped
    files to 8, where float32 products have other last bits.
    """
    made = AutoModelForCausalLM.from_pretrained(directory, dtype=dtype).eval()
    for parameter in made.parameters():
        parameter.data = parameter.data.clone()
    return made


# --- what is compared ---------------------------------------------------------------------------------------------


def ids(*shape: int, seed: int = 7) -> torch.Tensor:
    return torch.randint(3, VOCABULARY, shape, generator=torch.Generator().manual_seed(seed))


@torch.inference_mode()
def logits(loaded: Any) -> dict[str, torch.Tensor]:
    """Of a whole sequence, of a prefill with decode steps after it, and of a padded batch with decode steps."""
    return {"whole": loaded(input_ids=ids(1, 13)).logits, **_decode(loaded), **_decode_batch(loaded)}


def _decode(loaded: Any) -> dict[str, torch.Tensor]:
    prompt = ids(1, 9, seed=8)
    output = loaded(input_ids=prompt, use_cache=True, logits_to_keep=1)
    made = {"prefill": output.logits}
    for step in range(3):
        token = output.logits[:, -1:].argmax(-1)
        output = loaded(input_ids=token, use_cache=True, cache=output.cache)
        made[f"decode {step}"] = output.logits
    return made


def _decode_batch(loaded: Any) -> dict[str, torch.Tensor]:
    prompt, mask = ids(3, 11, seed=9), torch.ones(3, 11, dtype=torch.long)
    for row, padding in enumerate((0, 4, 7)):
        prompt[row, :padding], mask[row, :padding] = PAD, 0
    position = (mask.cumsum(-1) - 1).clamp(min=0)
    arguments = {"input_ids": prompt, "attention_mask": mask, "position_ids": position}
    last = loaded(**arguments, logits_to_keep=1)  # as generate does it
    output = loaded(**arguments, use_cache=True)
    made = {"padded": output.logits, "padded last": last.logits}
    for step in range(2):
        mask = torch.cat([mask, torch.ones(3, 1, dtype=torch.long)], dim=1)
        position = position[:, -1:] + 1
        output = loaded(
            input_ids=output.logits[:, -1:].argmax(-1),
            attention_mask=mask,
            position_ids=position,
            use_cache=True,
            cache=output.cache,
        )
        made[f"padded decode {step}"] = output.logits
    return made


PASSES = 9
"""Forward passes of one call of `logits`."""


def differing(left: Mapping[str, torch.Tensor], right: Mapping[str, torch.Tensor]) -> list[str]:
    """What is not bit for bit equal; NaN would hide there, so it counts as differing."""
    assert left.keys() == right.keys()
    return [name for name in left if not torch.equal(left[name], right[name])]


@functools.cache
def _known(directory: Path, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    return logits(plain(directory, dtype))


@functools.cache
def plain_bytes(directory: Path) -> tuple[int, int]:
    """Of weights, tied ones once, and of buffers."""
    made = plain(directory)
    parameters = sum(parameter.numel() * parameter.element_size() for parameter in made.parameters())
    return parameters, sum(buffer.numel() * buffer.element_size() for buffer in made.buffers())


def plain_logits(directory: Path, dtype: torch.dtype = torch.bfloat16) -> dict[str, torch.Tensor]:
    """`logits` of what transformers itself loads, computed once per checkpoint."""
    return copy.copy(_known(directory, dtype))
