"""Checkpoints with random weights in the shape of a real model. Written part by part: the whole is never in memory."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import save_file

from headrace import sources

VOCABULARY = 49152
"""Of the tokenizer that each gets: the demo model's."""


def write(directory: Path, kind: str, fields: dict[str, Any]) -> None:
    """Write bf16 weights (matrices of deviation 0.02, norms of ones), config and tokenizer into a new directory."""
    config = getattr(transformers, kind)(
        **fields, vocab_size=VOCABULARY, bos_token_id=1, eos_token_id=2, dtype="bfloat16"
    )
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
    config.architectures = [type(model).__name__]
    directory.mkdir(parents=True)
    generator = torch.Generator().manual_seed(0)
    parts: dict[str, dict[str, torch.Tensor]] = {}
    weight_map: dict[str, str] = {}
    for name, parameter in model.named_parameters():
        file = f"model-{_part(name)}.safetensors"
        weight_map[name] = file
        for finished in [other for other in parts if other != file]:
            save_file(parts.pop(finished), directory / finished, metadata={"format": "pt"})
        tensor = torch.empty(parameter.shape, dtype=torch.bfloat16)
        tensor.fill_(1) if tensor.dim() == 1 else tensor.normal_(0, 0.02, generator=generator)
        parts.setdefault(file, {})[name] = tensor
    for file, tensors in parts.items():
        save_file(tensors, directory / file, metadata={"format": "pt"})
    (directory / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    config.save_pretrained(directory)
    copy_tokenizer(directory)


def copy_tokenizer(directory: Path) -> None:
    """Give a model with VOCABULARY tokens the small real model's tokenizer."""
    small = sources.resolve(sources.demo_gguf())
    for file in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(small / file, directory / file)


def _part(name: str) -> str:
    """What is outside of the layers comes before or after them, so a file is whole when the next one begins."""
    if ".layers." in name:
        return f"layer-{name.split('.layers.')[1].split('.')[0]}"
    return "first" if "embed" in name else "last"
