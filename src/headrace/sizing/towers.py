"""Models that also see: a vision tower and a projector before a decoder. Names are those in transformers."""

from __future__ import annotations

from headrace.sizing.decoders import DECODERS
from headrace.sizing.fields import Fields, UnknownFamily
from headrace.sizing.outline import Outline

_TOWER = "model.vision_tower"
_PROJECTOR = "model.multi_modal_projector"


def llava(fields: Fields) -> Outline:
    """CLIP, two matrices, any decoder."""
    vision, text = _vision(fields), fields.text
    out = Outline()
    _clip(vision, out)
    seen, hidden = vision.count("hidden_size", default=1024), text.count("hidden_size", default=4096)
    layers = fields.values.get("vision_feature_layer", -2)
    seen *= len(layers) if isinstance(layers, list) else 1
    bias = fields.is_on("multimodal_projector_bias", True)
    out.linear(f"{_PROJECTOR}.linear_1", seen, hidden, bias)
    out.linear(f"{_PROJECTOR}.linear_2", hidden, hidden, bias)
    return _with_decoder(fields, out)


def gemma3(fields: Fields) -> Outline:
    """SigLIP, one matrix, Gemma 3."""
    vision = _vision(fields)
    out = Outline()
    hidden, inner = vision.count("hidden_size"), vision.count("intermediate_size")
    _patches(vision, out, hidden, bias=True)
    out.add(f"{_TOWER}.embeddings.position_embedding.weight", _patch_count(vision), hidden)
    for layer in range(vision.count("num_hidden_layers")):
        where = f"{_TOWER}.encoder.layers.{layer}"
        out.norm(f"{where}.layer_norm1", hidden, bias=True)
        _seeing_attention(out, where, hidden)
        out.norm(f"{where}.layer_norm2", hidden, bias=True)
        out.linear(f"{where}.mlp.fc1", hidden, inner, bias=True)
        out.linear(f"{where}.mlp.fc2", inner, hidden, bias=True)
    out.norm(f"{_TOWER}.post_layernorm", hidden, bias=True)
    out.add(f"{_PROJECTOR}.mm_input_projection_weight", hidden, fields.text.count("hidden_size"))
    out.norm(f"{_PROJECTOR}.mm_soft_emb_norm", hidden)
    return _with_decoder(fields, out)


def mistral3(fields: Fields) -> Outline:
    """Pixtral, a merger of patches, Mistral."""
    vision, text = _vision(fields), fields.text
    out = Outline()
    hidden, inner, patch = (
        vision.count("hidden_size"),
        vision.count("intermediate_size"),
        vision.count("patch_size"),
    )
    out.add(f"{_TOWER}.patch_conv.weight", hidden, vision.count("num_channels", default=3), patch, patch)
    out.norm(f"{_TOWER}.ln_pre", hidden)
    for layer in range(vision.count("num_hidden_layers")):
        where = f"{_TOWER}.transformer.layers.{layer}"
        out.norm(f"{where}.attention_norm", hidden)
        out.linear(f"{where}.feed_forward.gate_proj", hidden, inner)
        out.linear(f"{where}.feed_forward.up_proj", hidden, inner)
        out.linear(f"{where}.feed_forward.down_proj", inner, hidden)
        for projection in ("k_proj", "v_proj", "q_proj", "o_proj"):
            out.linear(f"{where}.attention.{projection}", hidden, hidden)
        out.norm(f"{where}.ffn_norm", hidden)
    merged, width = hidden * fields.count("spatial_merge_size", default=2) ** 2, text.count("hidden_size")
    bias = fields.is_on("multimodal_projector_bias")
    out.norm(f"{_PROJECTOR}.norm", hidden)
    out.linear(f"{_PROJECTOR}.patch_merger.merging_layer", merged, hidden)
    out.linear(f"{_PROJECTOR}.linear_1", hidden, width, bias)
    out.linear(f"{_PROJECTOR}.linear_2", width, width, bias)
    return _with_decoder(fields, out, tied=True)


def qwen2_vl(fields: Fields) -> Outline:
    """A tower whose MLP has no gate, a merger of patches, Qwen 2."""
    vision = _vision(fields)
    hidden, width = vision.count("embed_dim"), vision.count("hidden_size")
    inner = int(hidden * float(vision.values.get("mlp_ratio", 4)))
    out = Outline()
    _video_patches(vision, out, hidden)
    for layer in range(vision.count("depth")):
        where = f"model.visual.blocks.{layer}"
        out.norm(f"{where}.norm1", hidden, bias=True)
        out.norm(f"{where}.norm2", hidden, bias=True)
        out.linear(f"{where}.attn.qkv", hidden, 3 * hidden, bias=True)
        out.linear(f"{where}.attn.proj", hidden, hidden, bias=True)
        out.linear(f"{where}.mlp.fc1", hidden, inner, bias=True)
        out.linear(f"{where}.mlp.fc2", inner, hidden, bias=True)
    _merger(vision, out, hidden, width, bias=True)
    return _with_decoder(fields, out, "qwen2_vl_text")


def qwen2_5_vl(fields: Fields) -> Outline:
    """A tower with gated MLPs, a merger of patches, Qwen 2.5."""
    vision = _vision(fields)
    hidden, inner = vision.count("hidden_size"), vision.count("intermediate_size")
    out = Outline()
    _video_patches(vision, out, hidden)
    for layer in range(vision.count("depth")):
        where = f"model.visual.blocks.{layer}"
        out.norm(f"{where}.norm1", hidden)
        out.norm(f"{where}.norm2", hidden)
        out.linear(f"{where}.attn.qkv", hidden, 3 * hidden, bias=True)
        out.linear(f"{where}.attn.proj", hidden, hidden, bias=True)
        out.linear(f"{where}.mlp.gate_proj", hidden, inner, bias=True)
        out.linear(f"{where}.mlp.up_proj", hidden, inner, bias=True)
        out.linear(f"{where}.mlp.down_proj", inner, hidden, bias=True)
    _merger(vision, out, hidden, vision.count("out_hidden_size"), bias=False)
    return _with_decoder(fields, out, "qwen2_5_vl_text")


TOWERS = {
    "llava": llava,
    "gemma3": gemma3,
    "mistral3": mistral3,
    "qwen2_vl": qwen2_vl,
    "qwen2_5_vl": qwen2_5_vl,
}


def _with_decoder(fields: Fields, out: Outline, model_type: str = "", tied: bool = False) -> Outline:
    """The tower's tensors, then the decoder's, whose table and head are the model's."""
    text = fields.text
    family = DECODERS.get(model_type or text.model_type)
    if family is None:
        raise UnknownFamily(f"no family has the model_type {text.model_type!r} of its text_config")
    if tied:
        text = text.with_default("tie_word_embeddings", True)
    decoder = family.outline(text, prefix="model.language_model")
    decoder.tensors = [*out.tensors, *decoder.tensors]
    return decoder


def _vision(fields: Fields) -> Fields:
    return fields.inner("vision_config")


def _patch_count(vision: Fields) -> int:
    return (vision.count("image_size") // vision.count("patch_size")) ** 2


def _patches(vision: Fields, out: Outline, hidden: int, *, bias: bool) -> None:
    patch = vision.count("patch_size")
    channels = vision.count("num_channels", default=3)
    out.add(f"{_TOWER}.embeddings.patch_embedding.weight", hidden, channels, patch, patch)
    if bias:
        out.add(f"{_TOWER}.embeddings.patch_embedding.bias", hidden)


def _seeing_attention(out: Outline, where: str, hidden: int) -> None:
    for projection in ("k_proj", "v_proj", "q_proj", "out_proj"):
        out.linear(f"{where}.self_attn.{projection}", hidden, hidden, bias=True)


def _clip(vision: Fields, out: Outline) -> None:
    hidden, inner = vision.count("hidden_size"), vision.count("intermediate_size")
    out.add(f"{_TOWER}.embeddings.class_embedding", hidden)
    _patches(vision, out, hidden, bias=False)
    out.add(f"{_TOWER}.embeddings.position_embedding.weight", _patch_count(vision) + 1, hidden)
    out.norm(f"{_TOWER}.pre_layrnorm", hidden, bias=True)  # transformers spells it so
    for layer in range(vision.count("num_hidden_layers")):
        where = f"{_TOWER}.encoder.layers.{layer}"
        _seeing_attention(out, where, hidden)
        out.norm(f"{where}.layer_norm1", hidden, bias=True)
        out.linear(f"{where}.mlp.fc1", hidden, inner, bias=True)
        out.linear(f"{where}.mlp.fc2", inner, hidden, bias=True)
        out.norm(f"{where}.layer_norm2", hidden, bias=True)
    out.norm(f"{_TOWER}.post_layernorm", hidden, bias=True)


def _video_patches(vision: Fields, out: Outline, hidden: int) -> None:
    patch, frames = vision.count("patch_size", default=14), vision.count("temporal_patch_size", default=2)
    channels = vision.count("in_channels", "in_chans", default=3)
    out.add("model.visual.patch_embed.proj.weight", hidden, channels, frames, patch, patch)


def _merger(vision: Fields, out: Outline, hidden: int, width: int, *, bias: bool) -> None:
    merged = hidden * vision.count("spatial_merge_size", default=2) ** 2
    out.norm("model.visual.merger.ln_q", hidden, bias)
    out.linear("model.visual.merger.mlp.0", merged, merged, bias=True)
    out.linear("model.visual.merger.mlp.2", merged, width, bias=True)
