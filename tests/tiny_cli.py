"""A tiny Llama with random weights and a byte-level tokenizer, as a checkpoint directory that the command line can run.

Its answers are noise, and the same noise every time.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
LAYERS = 4
CONTEXT = 512


def write_checkpoint(directory: Path, *, chat: bool = True, shards: bool = False, tie: bool = False) -> Path:
    """The checkpoint in `directory`, which is made; with a chat template, or without."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    vocabulary = write_tokenizer(directory, chat=chat)
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=tie,
        bos_token_id=0,
        eos_token_id=1,
    )
    torch.manual_seed(0)
    model: Any = LlamaForCausalLM(config).to(torch.bfloat16)
    # No end of sequence: answers have the length that was asked for.
    model.generation_config.eos_token_id = None
    model.save_pretrained(directory, max_shard_size="600KB" if shards else "5GB")
    return directory


def write_tokenizer(directory: Path, *, chat: bool = True) -> int:
    """One token per byte and two special ones; the size of the vocabulary."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: number for number, token in enumerate(["<s>", "</s>", *letters])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")
    if chat:
        fast.chat_template = CHAT_TEMPLATE
    directory.mkdir(parents=True, exist_ok=True)
    fast.save_pretrained(directory)
    return len(vocabulary)


def edit_config(directory: Path, **changes: Any) -> None:
    """Set fields of the checkpoint's config.json; None removes one."""
    file = directory / "config.json"
    config = {**json.loads(file.read_bytes()), **changes}
    file.write_text(json.dumps({name: value for name, value in config.items() if value is not None}))
