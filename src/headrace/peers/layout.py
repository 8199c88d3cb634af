"""A model's parameters as vLLM and SGLang hold them: fused, and sharded over GPUs. Knows no offloading.

Both fuse q, k and v, gate and up, and all experts of a layer, and call the results by the same names. Matrices are
divided among the GPUs of a tensor-parallel group; norms, biases, routers and the short projections of latent attention
are not.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from headrace.core import align_up
from headrace.sizing.fields import Fields
from headrace.sizing.outline import ELEMENT_BYTES, Outline, Tensor
from headrace.sizing.running import cache_shape, expert_share, latent_cache_per_layer, layer_count
from headrace.sizing.shape import stacks_of, used_share

VOCABULARY_UNIT = 64
"""Tables are padded to a multiple of this many tokens."""

_FUSED = (
    (r"\bexperts\.gate_up_proj\b", "experts.w13_weight"),
    (r"\bexperts\.down_proj\b", "experts.w2_weight"),
    (r"\b[qkv]_proj\.", "qkv_proj."),
    (r"\b(?:gate|up)_proj\.", "gate_up_proj."),
)
_REPLICATED = ("q_a_proj", "kv_a_proj_with_mqa", "router")
_NUMBERED = re.compile(r"^(?P<stack>.*?)\.(?P<index>\d+)\.(?P<rest>.+)$")


@dataclass(frozen=True, slots=True)
class PeerParam:
    """One parameter on one GPU."""

    name: str
    """From the layer on: `self_attn.qkv_proj.weight`. Selectors match whole segments of it."""
    pieces: tuple[int, ...]
    """Bytes of each tensor that it is held as: one, or several if it is quantized."""
    used_share: float
    """Part of it that one token reads."""

    @property
    def nbytes(self) -> int:
        return sum(self.pieces)


@dataclass(frozen=True, slots=True)
class PeerModel:
    """A model on one of the GPUs that it is divided among."""

    layers: tuple[tuple[PeerParam, ...], ...]
    """The decoder stack."""
    around_bytes: int
    """Table, head, norms outside of the stack, towers: what is never offloaded."""
    kv_bytes_per_token: int
    kv_window_bytes_per_token: int
    kv_window_tokens: int
    activation_bytes_per_token: int
    logits_bytes: int
    """Of one position."""

    @property
    def stack_bytes(self) -> int:
        return sum(param.nbytes for layer in self.layers for param in layer)

    @property
    def has_experts(self) -> bool:
        return any(param.used_share < 1 for layer in self.layers for param in layer)


def peer_model(outline: Outline, fields: Fields, dtype: str, gpus: int) -> PeerModel:
    """The model on one of `gpus`."""
    text, element_bytes = fields.text, ELEMENT_BYTES[dtype]
    share = expert_share(text)
    stack = _main_stack(outline)
    layers: dict[int, list[Tensor]] = {}
    around = []
    for tensor in outline.tensors:
        match = _NUMBERED.match(tensor.name)
        if match and match["stack"] == stack:
            layers.setdefault(int(match["index"]), []).append(tensor)
        else:
            around.append(tensor)
    full, windowed, window = _cache(text, element_bytes, gpus)
    return PeerModel(
        layers=tuple(_layer(layers[index], dtype, share, gpus) for index in sorted(layers)),
        around_bytes=sum(_around_bytes(tensor, outline, dtype, gpus) for tensor in around),
        kv_bytes_per_token=full,
        kv_window_bytes_per_token=windowed,
        kv_window_tokens=window,
        activation_bytes_per_token=element_bytes * 4 * text.count("hidden_size", "n_embd", default=1)
        + element_bytes * 3 * text.count("intermediate_size", "n_inner", "ffn_dim", default=1) // gpus,
        logits_bytes=text.optional("vocab_size") * (element_bytes + 4),
    )


def _main_stack(outline: Outline) -> str:
    sizes = dict.fromkeys(stacks_of(tensor.name for tensor in outline.tensors), 0)
    for tensor in outline.tensors:
        match = _NUMBERED.match(tensor.name)
        if match and match["stack"] in sizes:
            sizes[match["stack"]] += tensor.numel
    return max(sizes, key=lambda stack: sizes[stack], default="")


def _layer(tensors: Iterable[Tensor], dtype: str, share: float, gpus: int) -> tuple[PeerParam, ...]:
    """In the order of declaration, a fused parameter where the first of its parts was."""
    fused: dict[str, list[tuple[int, ...]]] = {}
    for tensor in tensors:
        match = _NUMBERED.match(tensor.name)
        assert match is not None
        fused.setdefault(_fused_name(match["rest"]), []).append(_on_one(tensor, dtype, gpus))
    return tuple(PeerParam(name, _together(parts), used_share(name, share)) for name, parts in fused.items())


def _fused_name(name: str) -> str:
    for pattern, replacement in _FUSED:
        name = re.sub(pattern, replacement, name)
    return name


def _together(parts: list[tuple[int, ...]]) -> tuple[int, ...]:
    """Tensor by tensor, if all parts are stored alike."""
    if len({len(part) for part in parts}) == 1:
        return tuple(sum(each) for each in zip(*parts, strict=True))
    return tuple(nbytes for part in parts for nbytes in part)


def _on_one(tensor: Tensor, dtype: str, gpus: int) -> tuple[int, ...]:
    pieces = tensor.pieces or (tensor.bytes_in(dtype),)
    if tensor.matrices is None or any(word in tensor.name for word in _REPLICATED):
        return pieces
    return tuple(-(-nbytes // gpus) for nbytes in pieces)


def _around_bytes(tensor: Tensor, outline: Outline, dtype: str, gpus: int) -> int:
    module = tensor.name.rpartition(".")[0]
    if module not in (outline.table, outline.head) or len(tensor.shape) != 2:
        return tensor.bytes_in(dtype)
    row_bytes = tensor.bytes_in(dtype) // max(1, tensor.shape[0])
    return align_up(tensor.shape[0], VOCABULARY_UNIT) * row_bytes // gpus


def _cache(text: Fields, element_bytes: int, gpus: int) -> tuple[int, int, int]:
    """Bytes per token of full and of windowed layers, and the window. A GPU has at least one key-value head."""
    latent = latent_cache_per_layer(text)
    if latent is not None:  # the short vector is kept by every GPU
        return latent * layer_count(text) * element_bytes, 0, 0
    cache = cache_shape(text, element_bytes)
    kv_heads = text.count("num_key_value_heads", "num_kv_heads", default=text.count("num_attention_heads", default=1))
    on_one = max(1, kv_heads // gpus) / kv_heads
    return int(cache.full_bytes_per_token * on_one), int(cache.window_bytes_per_token * on_one), cache.window_tokens
