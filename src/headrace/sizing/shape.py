"""An outline, cut into blocks for the planner as the engine cuts the model itself. Knows no machine."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping

from headrace.core import BlockKind, BlockShape, ModelShape, ParamShape
from headrace.sizing.fields import Fields
from headrace.sizing.outline import ELEMENT_BYTES, Outline, Tensor
from headrace.sizing.running import (
    activation_bytes_per_token,
    cache_shape,
    expert_share,
    hidden_size,
    logits_bytes,
    query_groups,
    score_bytes,
)

_NUMBERED = re.compile(r"^(?P<stack>.*?)\.(?P<index>\d+)\.")


def model_shape(outline: Outline, fields: Fields, dtype: str, stuck: frozenset[str] = frozenset()) -> ModelShape:
    """What the planner needs to know, of a model of this dtype. `stuck`: parameters that cannot move."""
    text, element_bytes = fields.text, ELEMENT_BYTES[dtype]
    share = expert_share(text)

    def param(tensor: Tensor) -> ParamShape:
        movable, used = tensor.name not in stuck, used_share(tensor.name, share)
        return ParamShape(tensor.name, tensor.bytes_in(dtype), movable, used, tensor.bits)

    blocks, fixed = _cut(outline, param)
    buffers = sum(buffer.bytes_in(dtype) for buffer in outline.buffers)
    cache = cache_shape(text, element_bytes)
    copied = _copied_head_bytes(outline, dtype)
    return ModelShape(
        blocks=blocks,
        fixed_bytes=sum(tensor.bytes_in(dtype) for tensor in fixed) + buffers,
        kv_bytes_per_token=cache.full_bytes_per_token,
        activation_bytes_per_token=activation_bytes_per_token(text, element_bytes),
        head_bytes=copied,
        head_always_copied=dtype == "float16",
        logits_bytes=logits_bytes(text, element_bytes),
        kv_window_bytes_per_token=cache.window_bytes_per_token,
        kv_window_tokens=cache.window_tokens,
        element_bytes=element_bytes,
        dtype=dtype,
        score_bytes=score_bytes(text, element_bytes),
        query_groups=query_groups(text),
        hidden_size=hidden_size(text),
    )


def _copied_head_bytes(outline: Outline, dtype: str) -> int:
    """Of a head that torch copies to multiply with: one with a bias (see `linears.FoldedLinear`)."""
    names = {tensor.name: tensor for tensor in outline.tensors}
    if f"{outline.head}.bias" not in names:
        return 0
    weight = names.get(f"{outline.head}.weight") or names[f"{outline.table}.weight"]
    return weight.bytes_in(dtype)


def used_share(name: str, expert_share: float) -> float:
    """Part of a parameter that one token's pass reads: of stacked experts those that it chooses."""
    return expert_share if "experts" in name.split(".") else 1.0


def _cut(outline: Outline, param: Callable[[Tensor], ParamShape]) -> tuple[tuple[BlockShape, ...], list[Tensor]]:
    """Table, the layers of every stack, head, in the order of a pass; and what stands outside of them."""
    stacks = stacks_of(tensor.name for tensor in outline.tensors)
    layers: dict[str, list[Tensor]] = {}
    around: dict[str, list[Tensor]] = {outline.table: [], outline.head: []}
    fixed: list[Tensor] = []
    for tensor in outline.tensors:
        match = _NUMBERED.match(tensor.name)
        module = tensor.name.rpartition(".")[0]
        if match and match["stack"] in stacks:
            layers.setdefault(f"{match['stack']}.{match['index']}", []).append(tensor)
        elif module == outline.table and not tensor.name.endswith(".weight"):
            fixed.append(tensor)  # scales: rows of the table alone are looked up
        else:
            around.get(module, fixed).append(tensor)
    main = _largest(layers)
    blocks = [
        _block(name, tensors, param, "layer" if _stack(name) == main else "tower") for name, tensors in layers.items()
    ]
    table, head = around[outline.table], around[outline.head]
    if outline.tied:
        return (*blocks, _block(outline.head, [*table, *head], param, "head")), fixed
    first = [_block(outline.table, table, param, "embedding", gathered=True)] if table else []
    last = [_block(outline.head, head, param, "head")] if head else []
    return (*first, *blocks, *last), fixed


def _stack(layer: str) -> str:
    return layer.rpartition(".")[0]


def _largest(layers: Mapping[str, list[Tensor]]) -> str:
    """The stack with the most numbers in it: the main one."""
    sizes: dict[str, int] = {}
    for name, tensors in layers.items():
        sizes[_stack(name)] = sizes.get(_stack(name), 0) + sum(tensor.numel for tensor in tensors)
    return max(sizes, key=lambda stack: sizes[stack], default="")


def _block(
    name: str,
    tensors: Iterable[Tensor],
    param: Callable[[Tensor], ParamShape],
    kind: BlockKind,
    *,
    gathered: bool = False,
) -> BlockShape:
    return BlockShape(name, tuple(param(tensor) for tensor in tensors), kind, gathered)


def stacks_of(names: Iterable[str]) -> dict[str, int]:
    """By name of an outermost list of modules (numbered from 0 on, at least two): how many there are."""
    numbers: dict[str, set[int]] = {}
    for name in names:
        if match := _NUMBERED.match(name):
            numbers.setdefault(match["stack"], set()).add(int(match["index"]))
    lists = {stack: len(found) for stack, found in numbers.items() if found == set(range(len(found)))}
    longer = {stack: count for stack, count in lists.items() if count > 1}
    return longer or dict(list(lists.items())[:1])
