"""The families of decoders whose layers are attention and a gated MLP, or experts: Llama and what descends from it.

A family is a row of parts; a part adds the tensors of one layer. The names, and the order in which a module declares
its parameters, are those of the classes of the same names in transformers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from headrace.sizing.fields import Fields
from headrace.sizing.outline import Matrices, Outline

Part = Callable[[Fields, Outline, str, int], None]
"""Takes the config, the outline to add to, the layer's name and its number."""

Switch = str | bool
"""A flag that the family has always or never, or the field that says."""


def _is_on(fields: Fields, switch: Switch) -> bool:
    return fields.is_on(switch) if isinstance(switch, str) else switch


def heads(fields: Fields, default_dim: int | None = None) -> tuple[int, int, int]:
    """Query heads, key-value heads, and the size of each."""
    count = fields.count("num_attention_heads")
    kv = fields.count("num_key_value_heads", default=count)
    dim = fields.count("head_dim", default=default_dim or max(1, fields.count("hidden_size") // count))
    return count, kv, dim


# --- attention ------------------------------------------------------------------------------------------------------


def attention(
    *,
    bias: Switch = False,
    output_bias: Switch = False,
    output: str = "o_proj",
    qk_norm: str | None = None,
    head_dim: int | None = None,
    sinks: bool = False,
) -> Part:
    """q, k, v and an output projection. `qk_norm` is "head" or "width": what q and k are normalized over."""

    def add(fields: Fields, out: Outline, name: str, layer: int) -> None:
        hidden = fields.count("hidden_size")
        count, kv, dim = heads(fields, head_dim)
        if sinks:
            out.add(f"{name}.self_attn.sinks", count)
        for projection, width in (("q_proj", count * dim), ("k_proj", kv * dim), ("v_proj", kv * dim)):
            out.linear(f"{name}.self_attn.{projection}", hidden, width, _is_on(fields, bias))
        out.linear(f"{name}.self_attn.{output}", count * dim, hidden, _is_on(fields, output_bias))
        if qk_norm is not None:
            out.norm(f"{name}.self_attn.q_norm", dim if qk_norm == "head" else count * dim)
            out.norm(f"{name}.self_attn.k_norm", dim if qk_norm == "head" else kv * dim)

    return add


def fused_attention(fields: Fields, out: Outline, name: str, layer: int) -> None:
    """Phi-3's: q, k and v in one matrix."""
    hidden = fields.count("hidden_size")
    count, kv, dim = heads(fields)
    out.linear(f"{name}.self_attn.o_proj", count * dim, hidden)
    out.linear(f"{name}.self_attn.qkv_proj", hidden, (count + 2 * kv) * dim)


def latent_attention(fields: Fields, out: Outline, name: str, layer: int) -> None:
    """DeepSeek's multi-head latent attention (arXiv:2405.04434): keys and values come out of a short vector."""
    hidden, count = fields.count("hidden_size"), fields.count("num_attention_heads")
    bias = fields.is_on("attention_bias")
    rope, nope = fields.count("qk_rope_head_dim"), fields.count("qk_nope_head_dim")
    value, rank = fields.count("v_head_dim"), fields.count("kv_lora_rank")
    where = f"{name}.self_attn"
    if q_rank := fields.optional("q_lora_rank"):
        out.linear(f"{where}.q_a_proj", hidden, q_rank, bias)
        out.norm(f"{where}.q_a_layernorm", q_rank)
        out.linear(f"{where}.q_b_proj", q_rank, count * (nope + rope))
    else:
        out.linear(f"{where}.q_proj", hidden, count * (nope + rope))
    out.linear(f"{where}.kv_a_proj_with_mqa", hidden, rank + rope, bias)
    out.norm(f"{where}.kv_a_layernorm", rank)
    out.linear(f"{where}.kv_b_proj", rank, count * (nope + value))
    out.linear(f"{where}.o_proj", count * value, hidden, bias)


# --- MLPs -----------------------------------------------------------------------------------------------------------


def gated_mlp(*, bias: Switch = False) -> Part:
    """Gate, up and down."""

    def add(fields: Fields, out: Outline, name: str, layer: int) -> None:
        _gated(out, f"{name}.mlp", fields.count("hidden_size"), fields.count("intermediate_size"), _is_on(fields, bias))

    return add


def _gated(out: Outline, name: str, hidden: int, inner: int, bias: bool = False) -> None:
    out.linear(f"{name}.gate_proj", hidden, inner, bias)
    out.linear(f"{name}.up_proj", hidden, inner, bias)
    out.linear(f"{name}.down_proj", inner, hidden, bias)


def fused_mlp(fields: Fields, out: Outline, name: str, layer: int) -> None:
    """Gate and up in one matrix."""
    hidden, inner = fields.count("hidden_size"), fields.count("intermediate_size")
    out.linear(f"{name}.mlp.gate_up_proj", hidden, 2 * inner)
    out.linear(f"{name}.mlp.down_proj", inner, hidden)


def plain_mlp(first: str, second: str, *, bias: Switch) -> Part:
    """Two matrices, without a gate."""

    def add(fields: Fields, out: Outline, name: str, layer: int) -> None:
        hidden, inner = fields.count("hidden_size"), fields.count("intermediate_size")
        out.linear(f"{name}.mlp.{first}", hidden, inner, _is_on(fields, bias))
        out.linear(f"{name}.mlp.{second}", inner, hidden, _is_on(fields, bias))

    return add


# --- experts --------------------------------------------------------------------------------------------------------


def expert_count(fields: Fields) -> int:
    """How many routed experts each sparse layer has; 0 for a dense model."""
    return fields.optional("num_experts", "num_local_experts", "n_routed_experts")


def expert_inner(fields: Fields) -> int:
    """Width of one expert."""
    return fields.count("moe_intermediate_size", "intermediate_size")


def _experts(fields: Fields, out: Outline, name: str) -> None:
    """All experts of a layer as transformers holds them: stacked, gate and up in one."""
    count, inner, hidden = expert_count(fields), expert_inner(fields), fields.count("hidden_size")
    out.add(f"{name}.gate_up_proj", count, 2 * inner, hidden, matrices=Matrices(2 * count, inner, hidden))
    out.add(f"{name}.down_proj", count, hidden, inner, matrices=Matrices(count, hidden, inner))


def experts(*, where: str = "mlp", router: str = "gate", router_first: bool = True) -> Part:
    """A router without a bias, and routed experts."""

    def add(fields: Fields, out: Outline, name: str, layer: int) -> None:
        count, hidden = fields.count("num_experts", "num_local_experts"), fields.count("hidden_size")
        if router_first:
            out.add(f"{name}.{where}.{router}.weight", count, hidden)
        _experts(fields, out, f"{name}.{where}.experts")
        if not router_first:
            out.add(f"{name}.{where}.{router}.weight", count, hidden)

    return add


def _is_sparse(fields: Fields, layer: int) -> bool:
    """Qwen's rule for which layers have experts."""
    step = fields.count("decoder_sparse_step", default=1)
    return layer not in fields.sequence("mlp_only_layers") and (layer + 1) % step == 0


def qwen_experts(*, shared: bool, router_first: bool) -> Part:
    """In the sparse layers routed experts, and maybe one that all tokens share; in the others an MLP."""
    dense, sparse = gated_mlp(), experts(router_first=router_first)

    def add(fields: Fields, out: Outline, name: str, layer: int) -> None:
        if not _is_sparse(fields, layer):
            dense(fields, out, name, layer)
            return
        sparse(fields, out, name, layer)
        if shared:
            hidden = fields.count("hidden_size")
            _gated(out, f"{name}.mlp.shared_expert", hidden, fields.count("shared_expert_intermediate_size"))
            out.add(f"{name}.mlp.shared_expert_gate.weight", 1, hidden)

    return add


def deepseek_experts(*, correction: bool) -> Part:
    """Routed and shared experts after some dense layers. The router is float32; `correction` is a buffer beside it."""

    def add(fields: Fields, out: Outline, name: str, layer: int) -> None:
        hidden, where = fields.count("hidden_size"), f"{name}.mlp"
        if layer < fields.optional("first_k_dense_replace"):
            _gated(out, where, hidden, fields.count("intermediate_size"))
            return
        count = fields.count("n_routed_experts")
        _experts(fields, out, f"{where}.experts")
        out.add(f"{where}.gate.weight", count, hidden, dtype="float32")
        if correction:
            out.buffer(f"{where}.gate.e_score_correction_bias", count, dtype="float32")
        if shared := fields.optional("n_shared_experts"):
            _gated(out, f"{where}.shared_experts", hidden, shared * expert_inner(fields))

    return add


def gpt_oss_experts(fields: Fields, out: Outline, name: str, layer: int) -> None:
    """Stacked the other way round, with biases."""
    count, inner, hidden = fields.count("num_local_experts"), expert_inner(fields), fields.count("hidden_size")
    out.add(f"{name}.mlp.router.weight", count, hidden)
    out.add(f"{name}.mlp.router.bias", count)
    where = f"{name}.mlp.experts"
    out.add(f"{where}.gate_up_proj", count, hidden, 2 * inner, matrices=Matrices(count, 2 * inner, hidden))
    out.add(f"{where}.gate_up_proj_bias", count, 2 * inner)
    out.add(f"{where}.down_proj", count, inner, hidden, matrices=Matrices(count, hidden, inner))
    out.add(f"{where}.down_proj_bias", count, hidden)


# --- families -------------------------------------------------------------------------------------------------------


def norms(*names: str, bias: Switch = False) -> Part:
    """As wide as the hidden state."""

    def add(fields: Fields, out: Outline, name: str, layer: int) -> None:
        for each in names:
            out.norm(f"{name}.{each}", fields.count("hidden_size"), _is_on(fields, bias))

    return add


@dataclass(frozen=True, slots=True)
class Family:
    """What a layer is made of, and what stands around the layers."""

    parts: tuple[Part, ...]
    tied: bool = False
    """Whether head and table are one weight where the config does not say."""
    last_norm: str = "norm"
    norm_bias: bool = False
    head_bias: bool = False

    def outline(self, fields: Fields, prefix: str = "model") -> Outline:
        """All tensors of the language model; `prefix` is the name of the module that holds table and layers."""
        hidden, vocabulary = fields.count("hidden_size"), fields.count("vocab_size")
        out = Outline(f"{prefix}.embed_tokens", "lm_head", fields.is_on("tie_word_embeddings", self.tied))
        out.add(f"{out.table}.weight", vocabulary, hidden)
        for layer in range(fields.count("num_hidden_layers")):
            for part in self.parts:
                part(fields, out, f"{prefix}.layers.{layer}", layer)
        out.norm(f"{prefix}.{self.last_norm}", hidden, self.norm_bias)
        if not out.tied:
            out.add("lm_head.weight", vocabulary, hidden)
        if self.head_bias:
            out.add("lm_head.bias", vocabulary)
        return out


_TWO = norms("input_layernorm", "post_attention_layernorm")
_TWO_BIASED = norms("input_layernorm", "post_attention_layernorm", bias=True)
_FOUR = norms("input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm")
_AFTER = norms("post_attention_layernorm", "post_feedforward_layernorm")
_ANY_BIAS = attention(bias="attention_bias", output_bias="attention_bias")
_WIDE_NORMS = attention(bias="attention_bias", output_bias="attention_bias", qk_norm="width")
_GLM_ATTENTION = attention(bias="attention_bias", head_dim=128)

_LLAMA = Family((_ANY_BIAS, gated_mlp(bias="mlp_bias"), _TWO))
_QWEN2 = Family((attention(bias=True), gated_mlp(), _TWO))

DECODERS = {
    "llama": _LLAMA,
    "mistral": Family((attention(), gated_mlp(), _TWO)),
    "mixtral": Family((attention(), experts(), _TWO)),
    "qwen2": _QWEN2,
    "qwen2_vl_text": _QWEN2,
    "qwen2_5_vl_text": _QWEN2,
    "qwen2_moe": Family((attention(bias=True), qwen_experts(shared=True, router_first=True), _TWO)),
    "qwen3": Family(
        (
            attention(bias="attention_bias", output_bias="attention_bias", qk_norm="head", head_dim=128),
            gated_mlp(),
            _TWO,
        )
    ),
    "qwen3_moe": Family(
        (
            attention(bias="attention_bias", output_bias="attention_bias", qk_norm="head"),
            qwen_experts(shared=False, router_first=False),
            _TWO,
        )
    ),
    "gemma": Family((attention(bias="attention_bias", head_dim=256), gated_mlp(), _TWO), tied=True),
    "gemma2": Family((attention(bias="attention_bias", head_dim=256), gated_mlp(), _FOUR), tied=True),
    "gemma3_text": Family((attention(qk_norm="head", head_dim=256), gated_mlp(), _FOUR), tied=True),
    "phi": Family(
        (
            attention(bias=True, output_bias=True, output="dense"),
            plain_mlp("fc1", "fc2", bias=True),
            norms("input_layernorm", bias=True),
        ),
        last_norm="final_layernorm",
        norm_bias=True,
        head_bias=True,
    ),
    "phi3": Family((fused_attention, fused_mlp, _TWO)),
    "deepseek_v2": Family((latent_attention, deepseek_experts(correction=False), _TWO)),
    "deepseek_v3": Family((latent_attention, deepseek_experts(correction=True), _TWO)),
    "olmo2": Family((_WIDE_NORMS, gated_mlp(), _AFTER)),
    "olmoe": Family((_WIDE_NORMS, experts(), _TWO)),
    "granite": _LLAMA,
    "granitemoe": Family((_ANY_BIAS, _TWO, experts(where="block_sparse_moe", router="router"))),
    "glm": Family((_GLM_ATTENTION, fused_mlp, _TWO)),
    "glm4": Family(
        (
            _GLM_ATTENTION,
            fused_mlp,
            norms("input_layernorm", "post_attention_layernorm", "post_self_attn_layernorm", "post_mlp_layernorm"),
        )
    ),
    "glm4_moe": Family((attention(bias="attention_bias"), deepseek_experts(correction=True), _TWO)),
    "cohere": Family((_ANY_BIAS, gated_mlp(), norms("input_layernorm")), tied=True),
    "cohere2": Family((_ANY_BIAS, gated_mlp(), norms("input_layernorm")), tied=True),
    "smollm3": Family((_ANY_BIAS, gated_mlp(bias="mlp_bias"), _TWO), tied=True),
    "starcoder2": Family(
        (attention(bias="use_bias", output_bias="use_bias"), plain_mlp("c_fc", "c_proj", bias="use_bias"), _TWO_BIASED),
        tied=True,
        norm_bias=True,
    ),
    "stablelm": Family((attention(bias="use_qkv_bias"), gated_mlp(), _TWO_BIASED), norm_bias=True),
    "exaone4": Family((attention(qk_norm="head"), gated_mlp(), _AFTER)),
    "gpt_oss": Family((attention(bias=True, output_bias=True, head_dim=64, sinks=True), gpt_oss_experts, _TWO)),
}  # fmt: skip
