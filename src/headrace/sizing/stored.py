"""A model's tensors as a checkpoint holds them, where no family says how they belong together. Reads no file itself."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping

from headrace.core import StoredTensor
from headrace.sizing.outline import Matrices, Outline, Tensor

TORCH_NAMES: Mapping[str, str] = {
    "BOOL": "bool", "U8": "uint8", "I8": "int8", "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2",
    "F8_E8M0": "float8_e8m0fnu", "I16": "int16", "F16": "float16", "BF16": "bfloat16",
    "I32": "int32", "F32": "float32", "I64": "int64", "F64": "float64",
}  # fmt: skip
"""torch's names of safetensors' dtypes."""

_TABLES = ("embed_tokens", "wte", "word_embeddings", "embed_in", "tok_embeddings", "embeddings.word_embeddings")
_HEADS = ("lm_head", "embed_out", "output")
_EXPERT = re.compile(r"^(?P<where>.*\.experts)\.(?P<number>\d+)\.(?P<rest>.+)$")


def stored_dtype(tensors: Iterable[StoredTensor]) -> str:
    """The floating dtype that most bytes are stored in: the one that the model runs in."""
    nbytes: dict[str, int] = {}
    for tensor in tensors:
        if tensor.dtype in ("F16", "BF16", "F32", "F64"):
            nbytes[tensor.dtype] = nbytes.get(tensor.dtype, 0) + tensor.nbytes
    return TORCH_NAMES[max(nbytes, key=lambda dtype: nbytes[dtype])] if nbytes else "float32"


def stored_outline(tensors: Mapping[str, StoredTensor]) -> Outline:
    """All tensors under the names that they are stored under, in the order of those names.

    Experts that are stored one by one are put together, as models hold them. A table without a head means that they
    are one weight. What is guessed is which tensors are table and head, and nothing else.
    """
    table, head = _module(tensors, _TABLES), _module(tensors, _HEADS)
    out = Outline(table, head or "lm_head", tied=bool(table) and not head)
    stacked: dict[str, list[StoredTensor]] = {}
    for name in sorted(tensors, key=_natural):
        match = _EXPERT.match(name)
        stacked.setdefault(f"{match['where']}.{match['rest']}" if match else name, []).append(tensors[name])
    for name, parts in stacked.items():
        first = parts[0]
        shape = first.shape if len(parts) == 1 else (len(parts), *first.shape)
        matrices = Matrices(len(parts), *first.shape) if len(first.shape) == 2 else None
        out.tensors.append(
            Tensor(name, shape, matrices, TORCH_NAMES.get(first.dtype, ""), (sum(part.nbytes for part in parts),))
        )
    return out


def unlike(outline: Outline, tensors: Mapping[str, StoredTensor], dtype: str) -> str | None:
    """Why the checkpoint is not that of the outline, or None if it holds just that.

    What is stored beside the model (layers past its last one, heads that predict further tokens) is not counted.
    Numbers are compared and not bytes, since a checkpoint may store some in another dtype; of quantized ones, bytes.
    """
    numbers = _numbers(outline)
    kept = {name: tensor for name, tensor in tensors.items() if not _is_beyond(name, numbers)}
    described = (*outline.tensors, *outline.buffers)
    if any(tensor.pieces for tensor in outline.tensors):
        unit, size = "bytes", _nbytes
        expected = sum(tensor.bytes_in(dtype) for tensor in described)
    else:
        unit, size = "numbers", _numel
        expected = sum(tensor.numel for tensor in described)
    found = sum(size(tensor) for tensor in kept.values())
    if outline.tied and found != expected and (twice := kept.get(f"{outline.head}.weight")):
        found -= size(twice)
    return None if found == expected else f"its headers hold {found} {unit}, and its config describes {expected}"


def converted(outline: Outline, tensors: Mapping[str, StoredTensor], dtype: str) -> frozenset[str]:
    """Names in the outline that are stored in another dtype than the model holds them in; those cannot move."""
    by_suffix = {_suffix(name): tensor for name, tensor in tensors.items()}
    stuck = set()
    for tensor in outline.tensors:
        stored = tensors.get(tensor.name) or by_suffix.get(_suffix(tensor.name))
        if stored is not None and TORCH_NAMES.get(stored.dtype) != (tensor.dtype or dtype):
            stuck.add(tensor.name)
    return frozenset(stuck)


def copied_share(tensors: Iterable[StoredTensor]) -> float:
    """Part of the bytes that cannot be read to where they are computed with: they are copied there.

    Those are experts that are stored one by one, and float32 where the file has it at a place that memory has not.
    """
    stored = list(tensors)
    copied = sum(tensor.nbytes for tensor in stored if not _is_read_in_place(tensor))
    return copied / max(1, sum(tensor.nbytes for tensor in stored))


def _is_read_in_place(tensor: StoredTensor) -> bool:
    return not _EXPERT.match(tensor.name) and tensor.segment.can_lie_as_stored(tensor.is_steady)


def _module(tensors: Mapping[str, StoredTensor], names: tuple[str, ...]) -> str:
    for wanted in names:
        for name in tensors:
            if f".{name}".endswith(f".{wanted}.weight") and not re.search(r"\.\d+\.", name):
                return name.removesuffix(".weight")
    return ""


def _natural(name: str) -> list[tuple[int, str]]:
    """Sorts layer 10 after layer 9."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in name.split(".")]


def _numel(tensor: StoredTensor) -> int:
    return math.prod(tensor.shape)


def _nbytes(tensor: StoredTensor) -> int:
    return tensor.nbytes


def _numbers(outline: Outline) -> int:
    """How many layers the outline's main stack has."""
    found = [int(match[1]) for tensor in outline.tensors if (match := re.search(r"layers\.(\d+)\.", tensor.name))]
    return 1 + max(found, default=-1)


def _is_beyond(name: str, layers: int) -> bool:
    match = re.search(r"(?:^|\.)layers\.(\d+)\.", name)
    return match is not None and layers > 0 and int(match[1]) >= layers


def _suffix(name: str) -> str:
    """From the first number on: what is the same under every prefix that a class may add."""
    match = re.search(r"\d+\..*$", name)
    return match[0] if match else ".".join(name.split(".")[-2:])
