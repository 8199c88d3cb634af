"""Write a checkpoint in a real model's shape with random bf16 weights, and a tokenizer, so that it can be run.

    python benchmarks/checkpoint.py DIRECTORY [--layers 28]

The default is Llama-3.2-3B's shape with a vocabulary of 49152: 5.5 GiB in 28 layers of 192 MiB and a tied table.
Written layer by layer: the whole never lies in memory.
"""

import argparse
import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM

from headrace import sources


def config(layers: int) -> LlamaConfig:
    return LlamaConfig(
        hidden_size=3072,
        intermediate_size=8192,
        num_hidden_layers=layers,
        num_attention_heads=24,
        num_key_value_heads=8,
        head_dim=128,
        vocab_size=49152,
        max_position_embeddings=8192,
        rope_theta=500000.0,
        tie_word_embeddings=True,
        dtype="bfloat16",
        architectures=["LlamaForCausalLM"],
    )


def write(directory: Path, layers: int) -> None:
    directory.mkdir(parents=True)
    shape = config(layers)
    with torch.device("meta"):
        model = LlamaForCausalLM(shape)
    torch.manual_seed(0)
    shards: dict[str, dict[str, torch.Tensor]] = {}
    weight_map = {}
    for name, parameter in model.named_parameters():
        # What is outside of the layers comes before or after them: a file is written once, when the next one begins.
        layer = name.split(".")[2] if ".layers." in name else "first" if "embed" in name else "last"
        file = f"model-{layer}.safetensors"
        tensor = torch.empty(parameter.shape, dtype=torch.bfloat16)
        tensor.fill_(1) if "norm" in name else tensor.normal_(0, 0.02)
        shards.setdefault(file, {})[name] = tensor
        weight_map[name] = file
        for full in [other for other in shards if other != file]:
            save_file(shards.pop(full), directory / full, metadata={"format": "pt"})
    for file, tensors in shards.items():
        save_file(tensors, directory / file, metadata={"format": "pt"})
    (directory / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    shape.save_pretrained(directory)
    small = sources.resolve(sources.demo_gguf())
    for file in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(small / file, directory / file)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("directory", type=Path)
    parser.add_argument("--layers", type=int, default=28)
    arguments = parser.parse_args()
    write(arguments.directory, arguments.layers)
