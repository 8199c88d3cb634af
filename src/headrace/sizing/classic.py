"""The families from before Llama: GPT-2, GPT-J, GPT-NeoX, OPT, BLOOM, Falcon. Names are those in transformers."""

from __future__ import annotations

from headrace.sizing.fields import Fields
from headrace.sizing.outline import Matrices, Outline


def gpt2(fields: Fields) -> Outline:
    """Its matrices stand the other way round: inputs first."""
    hidden = fields.count("n_embd", "hidden_size")
    inner = fields.count("n_inner", default=4 * hidden)
    out = _start(fields, "transformer.wte", hidden, tied=True)
    out.add("transformer.wpe.weight", fields.count("n_positions", "max_position_embeddings", default=1024), hidden)
    for layer in range(fields.count("n_layer", "num_hidden_layers")):
        where = f"transformer.h.{layer}"
        out.norm(f"{where}.ln_1", hidden, bias=True)
        _turned(out, f"{where}.attn.c_attn", hidden, 3 * hidden)
        _turned(out, f"{where}.attn.c_proj", hidden, hidden)
        out.norm(f"{where}.ln_2", hidden, bias=True)
        _turned(out, f"{where}.mlp.c_fc", hidden, inner)
        _turned(out, f"{where}.mlp.c_proj", inner, hidden)
    out.norm("transformer.ln_f", hidden, bias=True)
    return _finish(fields, out, hidden)


def gptj(fields: Fields) -> Outline:
    """No biases in its attention, one at its head."""
    hidden = fields.count("n_embd", "hidden_size")
    inner = fields.count("n_inner", default=4 * hidden)
    out = _start(fields, "transformer.wte", hidden, tied=False)
    for layer in range(fields.count("n_layer", "num_hidden_layers")):
        where = f"transformer.h.{layer}"
        out.norm(f"{where}.ln_1", hidden, bias=True)
        for projection in ("k_proj", "v_proj", "q_proj", "out_proj"):
            out.linear(f"{where}.attn.{projection}", hidden, hidden)
        out.linear(f"{where}.mlp.fc_in", hidden, inner, bias=True)
        out.linear(f"{where}.mlp.fc_out", inner, hidden, bias=True)
    out.norm("transformer.ln_f", hidden, bias=True)
    return _finish(fields, out, hidden, head_bias=True)


def gpt_neox(fields: Fields) -> Outline:
    """Pythia's family."""
    hidden, inner = fields.count("hidden_size"), fields.count("intermediate_size")
    bias = fields.is_on("attention_bias", True)
    out = _start(fields, "gpt_neox.embed_in", hidden, tied=False)
    for layer in range(fields.count("num_hidden_layers")):
        where = f"gpt_neox.layers.{layer}"
        out.norm(f"{where}.input_layernorm", hidden, bias=True)
        out.norm(f"{where}.post_attention_layernorm", hidden, bias=True)
        out.linear(f"{where}.attention.query_key_value", hidden, 3 * hidden, bias)
        out.linear(f"{where}.attention.dense", hidden, hidden, bias)
        out.linear(f"{where}.mlp.dense_h_to_4h", hidden, inner, bias=True)
        out.linear(f"{where}.mlp.dense_4h_to_h", inner, hidden, bias=True)
    out.norm("gpt_neox.final_layer_norm", hidden, bias=True)
    return _finish(fields, out, hidden)


def opt(fields: Fields) -> Outline:
    """Its table may be narrower than its layers."""
    hidden, inner = fields.count("hidden_size"), fields.count("ffn_dim")
    embedded = fields.count("word_embed_proj_dim", default=hidden)
    bias, affine = fields.is_on("enable_bias", True), fields.is_on("layer_norm_elementwise_affine", True)
    out = _start(fields, "model.decoder.embed_tokens", embedded, tied=True)
    out.add("model.decoder.embed_positions.weight", fields.count("max_position_embeddings") + 2, hidden)
    if embedded != hidden:
        out.linear("model.decoder.project_out", hidden, embedded)
        out.linear("model.decoder.project_in", embedded, hidden)
    if fields.is_on("do_layer_norm_before", True) and not fields.is_on("_remove_final_layer_norm") and affine:
        out.norm("model.decoder.final_layer_norm", hidden, bias=True)
    for layer in range(fields.count("num_hidden_layers")):
        where = f"model.decoder.layers.{layer}"
        for projection in ("k_proj", "v_proj", "q_proj", "out_proj"):
            out.linear(f"{where}.self_attn.{projection}", hidden, hidden, bias)
        if affine:
            out.norm(f"{where}.self_attn_layer_norm", hidden, bias=True)
        out.linear(f"{where}.fc1", hidden, inner, bias)
        out.linear(f"{where}.fc2", inner, hidden, bias)
        if affine:
            out.norm(f"{where}.final_layer_norm", hidden, bias=True)
    return _finish(fields, out, embedded)


def bloom(fields: Fields) -> Outline:
    """A norm follows its table."""
    hidden = fields.count("hidden_size", "n_embed")
    out = _start(fields, "transformer.word_embeddings", hidden, tied=True)
    out.norm("transformer.word_embeddings_layernorm", hidden, bias=True)
    for layer in range(fields.count("n_layer", "num_hidden_layers")):
        where = f"transformer.h.{layer}"
        out.norm(f"{where}.input_layernorm", hidden, bias=True)
        out.linear(f"{where}.self_attention.query_key_value", hidden, 3 * hidden, bias=True)
        out.linear(f"{where}.self_attention.dense", hidden, hidden, bias=True)
        out.norm(f"{where}.post_attention_layernorm", hidden, bias=True)
        out.linear(f"{where}.mlp.dense_h_to_4h", hidden, 4 * hidden, bias=True)
        out.linear(f"{where}.mlp.dense_4h_to_h", 4 * hidden, hidden, bias=True)
    out.norm("transformer.ln_f", hidden, bias=True)
    return _finish(fields, out, hidden)


def falcon_heads(fields: Fields) -> tuple[int, int, int]:
    """Query heads, key-value heads, and the size of each."""
    hidden, count = fields.count("hidden_size"), fields.count("num_attention_heads", "n_head")
    if fields.is_on("new_decoder_architecture"):
        kv = fields.count("num_kv_heads", default=count)
    else:
        kv = 1 if fields.is_on("multi_query", True) else count
    return count, kv, max(1, hidden // count)


def falcon(fields: Fields) -> Outline:
    """One matrix for queries, keys and values; the norms depend on its generation."""
    hidden = fields.count("hidden_size")
    inner = fields.count("ffn_hidden_size", default=4 * hidden)
    count, kv, dim = falcon_heads(fields)
    bias, is_new = fields.is_on("bias"), fields.is_on("new_decoder_architecture")
    out = _start(fields, "transformer.word_embeddings", hidden, tied=True)
    for layer in range(fields.count("num_hidden_layers", "n_layer")):
        where = f"transformer.h.{layer}"
        out.linear(f"{where}.self_attention.query_key_value", hidden, (count + 2 * kv) * dim, bias)
        out.linear(f"{where}.self_attention.dense", hidden, hidden, bias)
        out.linear(f"{where}.mlp.dense_h_to_4h", hidden, inner, bias)
        out.linear(f"{where}.mlp.dense_4h_to_h", inner, hidden, bias)
        if is_new and fields.count("num_ln_in_parallel_attn", default=2) == 2:
            names = ["ln_attn", "ln_mlp"]
        elif is_new or fields.is_on("parallel_attn", True):
            names = ["input_layernorm"]
        else:
            names = ["input_layernorm", "post_attention_layernorm"]
        for name in names:
            out.norm(f"{where}.{name}", hidden, bias=True)
    out.norm("transformer.ln_f", hidden, bias=True)
    return _finish(fields, out, hidden)


CLASSIC = {"gpt2": gpt2, "gptj": gptj, "gpt_neox": gpt_neox, "opt": opt, "bloom": bloom, "falcon": falcon}


def _start(fields: Fields, table: str, width: int, *, tied: bool) -> Outline:
    out = Outline(table, "lm_head", fields.is_on("tie_word_embeddings", tied))
    out.add(f"{table}.weight", fields.count("vocab_size"), width)
    return out


def _finish(fields: Fields, out: Outline, width: int, *, head_bias: bool = False) -> Outline:
    vocabulary = fields.count("vocab_size")
    if not out.tied:
        out.add("lm_head.weight", vocabulary, width)
    if head_bias:
        out.add("lm_head.bias", vocabulary)
    return out


def _turned(out: Outline, name: str, inputs: int, outputs: int) -> None:
    out.add(f"{name}.weight", inputs, outputs, matrices=Matrices(1, outputs, inputs))
    out.add(f"{name}.bias", outputs)
