"""How many bytes a matrix takes in the formats that store it in fewer bits. Knows no model.

The layouts are those that the formats document: GPTQ (packed int32, zeros, scales, g_idx), AWQ's GEMM version,
DeepSeek's fp8 blocks, compressed-tensors (https://github.com/vllm-project/compressed-tensors), MXFP4.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from headrace.errors import ForeignQuantization, Reason
from headrace.sizing.fields import Fields
from headrace.sizing.outline import ELEMENT_BYTES, Matrices, Outline, Tensor
from headrace.sizing.scheme import QUANT_METHOD, READABLE_METHODS, UnknownScheme, scheme_of

Stored = Callable[[Matrices], tuple[int, ...]]
"""Bytes of each tensor that ONE of the matrices is stored as (the count is not looked at)."""


class UnknownQuantization(Reason):
    """No format here has this name."""


def quantize(outline: Outline, fields: Fields, dtype: str) -> Outline:
    """The outline as the config's quantization_config has it stored; the same one if there is none.

    Raises: UnknownQuantization.
    """
    settings = fields.values.get("quantization_config") or fields.text.values.get("quantization_config")
    if not isinstance(settings, dict):
        return outline
    method = str(settings.get("quant_method", ""))
    if method == QUANT_METHOD:
        return _in_low_bits(outline, settings)
    if method not in _METHODS:
        raise UnknownQuantization(f"the layout of its quantization {method!r} is not known here")
    stored_as = _METHODS[method](settings, outline, dtype)
    tensors = []
    for tensor in outline.tensors:
        stored = stored_as(tensor) if tensor.matrices is not None else None
        if tensor.matrices is not None and stored is not None:
            pieces = tuple(tensor.matrices.count * nbytes for nbytes in stored(tensor.matrices))
            tensor = dataclasses.replace(tensor, pieces=pieces)
        tensors.append(tensor)
    return dataclasses.replace(outline, tensors=tensors)


def foreign(model: str, method: str) -> ForeignQuantization:
    """The error for a form that is not streamed, with the way that converts it."""
    if method in READABLE_METHODS:
        suggestion = f"Convert them once: headrace quantize {model} NEW --bits 4 (or 8)."
    else:
        suggestion = "Take the model's unquantized checkpoint, or a .gguf file of it; headrace quantize converts both."
    return ForeignQuantization(model=model, method=method, suggestion=suggestion)


def _in_low_bits(outline: Outline, settings: Mapping[str, Any]) -> Outline:
    """With what `headrace quantize` stores, tensor by tensor."""
    try:
        scheme = scheme_of(settings)
    except UnknownScheme as unknown:
        raise UnknownQuantization(str(unknown)) from None
    tensors: list[Tensor] = []
    for tensor in outline.tensors:
        module, _, attribute = tensor.name.rpartition(".")
        stored = None
        if attribute == "weight" and len(tensor.shape) == 2:
            stored = scheme.stored(module, *tensor.shape)
        if stored is None:
            tensors.append(tensor)
            continue
        bits = scheme.bits_of(module) or 0
        for each in stored:
            of_matrix = bits if each.attribute == "weight" else 0
            tensors.append(Tensor(f"{module}.{each.attribute}", each.shape, dtype=each.dtype, bits=of_matrix))
    return dataclasses.replace(outline, tensors=tensors)


_Rule = Callable[[Tensor], Stored | None]
"""How a tensor is stored, or None if it is left as it is."""


def _is_head(tensor: Tensor, outline: Outline) -> bool:
    return tensor.name == f"{outline.head}.weight"


def _in_a_layer(tensor: Tensor) -> bool:
    return re.search(r"\.\d+\.", tensor.name) is not None and ".visual." not in tensor.name


def _skipped(tensor: Tensor, names: Any) -> bool:
    """Whether one of `names` (whole names, parts of them, or with `*`) is the tensor's module or above it."""
    if not isinstance(names, (list, tuple)):
        return False
    patterns = (re.escape(str(name)).replace(r"\*", r"[^.]*") for name in names)
    return any(re.search(rf"(^|\.){pattern}(\.|$)", tensor.name) for pattern in patterns)


def _whole(settings: Mapping[str, Any], name: str, default: int | None = None) -> int:
    value = settings.get(name, default)
    if type(value) is not int:
        raise UnknownQuantization(f"its quantization_config has no usable {name!r} ({value!r})")
    return value


def _groups(columns: int, size: int) -> int:
    return 1 if size <= 0 else -(-columns // size)


# --- formats --------------------------------------------------------------------------------------------------------


def _gptq(settings: Mapping[str, Any], outline: Outline, dtype: str) -> _Rule:
    bits, size = _whole(settings, "bits"), _whole(settings, "group_size", 128)

    def stored(matrices: Matrices) -> tuple[int, ...]:
        rows, columns = matrices.rows, matrices.columns
        groups = _groups(columns, size)
        return columns * rows * bits // 8, groups * rows * bits // 8, groups * rows * 2, columns * 4

    def rule(tensor: Tensor) -> Stored | None:
        left = _skipped(tensor, settings.get("modules_to_not_convert")) or not _in_a_layer(tensor)
        return None if left and not (_is_head(tensor, outline) and settings.get("lm_head")) else stored

    return rule


def _awq(settings: Mapping[str, Any], outline: Outline, dtype: str) -> _Rule:
    bits, size = _whole(settings, "bits", 4), _whole(settings, "group_size", 128)
    if settings.get("version", "gemm") != "gemm":
        raise UnknownQuantization(f"the layout of AWQ's version {settings['version']!r} is not known here")

    def stored(matrices: Matrices) -> tuple[int, ...]:
        rows, columns = matrices.rows, matrices.columns
        groups = _groups(columns, size)
        return columns * rows * bits // 8, groups * rows * bits // 8, groups * rows * 2

    def rule(tensor: Tensor) -> Stored | None:
        left = _is_head(tensor, outline) or _skipped(tensor, settings.get("modules_to_not_convert"))
        return None if left else stored

    return rule


def _fp8(settings: Mapping[str, Any], outline: Outline, dtype: str) -> _Rule:
    blocks = settings.get("weight_block_size")
    static = 4 if settings.get("activation_scheme") == "static" else 0

    def stored(matrices: Matrices) -> tuple[int, ...]:
        scales = 1
        if isinstance(blocks, (list, tuple)) and len(blocks) == 2:
            scales = -(-matrices.rows // blocks[0]) * -(-matrices.columns // blocks[1])
        return matrices.rows * matrices.columns, 4 * scales, static

    def rule(tensor: Tensor) -> Stored | None:
        left = _is_head(tensor, outline) or _skipped(tensor, settings.get("modules_to_not_convert"))
        return None if left else stored

    return rule


def _mxfp4(settings: Mapping[str, Any], outline: Outline, dtype: str) -> _Rule:
    """Blocks of 32 numbers of 4 bits with one scale of 8; of GPT-OSS the experts alone."""

    def stored(matrices: Matrices) -> tuple[int, ...]:
        blocks = matrices.rows * -(-matrices.columns // 32)
        return 16 * blocks, blocks

    return lambda tensor: stored if ".experts." in tensor.name else None


def _compressed(settings: Mapping[str, Any], outline: Outline, dtype: str) -> _Rule:
    schemes = settings.get("config_groups")
    if not isinstance(schemes, dict) or not schemes:
        raise UnknownQuantization("its quantization_config has no config_groups")
    made = [
        (group.get("targets", ["Linear"]), _compressed_scheme(group, group.get("format") or settings["format"], dtype))
        for group in schemes.values()
    ]

    def rule(tensor: Tensor) -> Stored | None:
        if _targeted(tensor, settings.get("ignore") or []):
            return None
        return next((stored for targets, stored in made if "Linear" in targets or _targeted(tensor, targets)), None)

    return rule


def _targeted(tensor: Tensor, names: Sequence[str]) -> bool:
    """Whether a name, or a pattern after `re:`, is the tensor's module."""
    module = tensor.name.removesuffix(".weight")
    return any(
        re.match(name[3:], module) is not None
        if name.startswith("re:")
        else module == name or module.endswith(f".{name}")
        for name in names
    )


def _compressed_scheme(group: Mapping[str, Any], form: str, dtype: str) -> Stored:
    weights, inputs = group.get("weights"), group.get("input_activations") or {}
    if not isinstance(weights, dict):
        raise UnknownQuantization("a group of its quantization_config says nothing of weights")
    if form not in ("float-quantized", "int-quantized", "naive-quantized", "pack-quantized"):
        raise UnknownQuantization(f"the layout of compressed-tensors' format {form!r} is not known here")
    bits, scale_bytes = _whole(weights, "num_bits"), ELEMENT_BYTES[dtype]
    strategy, size = weights.get("strategy", "tensor"), weights.get("group_size") or 0
    packed, zeros = form == "pack-quantized", not weights.get("symmetric", True)
    static = scale_bytes if inputs and not inputs.get("dynamic") else 0

    def stored(matrices: Matrices) -> tuple[int, ...]:
        rows, columns = matrices.rows, matrices.columns
        groups = _groups(columns, size)
        scales = {"tensor": 1, "channel": rows, "group": rows * groups}.get(strategy)
        if strategy == "block":
            height, width = weights["block_structure"]
            scales = -(-rows // height) * -(-columns // width)
        if scales is None:
            raise UnknownQuantization(f"compressed-tensors' strategy {strategy!r} is not known here")
        small = (scales * scale_bytes, static)
        if not packed:
            return rows * columns, *small, scales if zeros else 0
        return (
            rows * -(-columns * bits // 32) * 4,
            *small,
            16,  # the shape, as two int64
            -(-rows * bits // 32) * 4 * (scales // rows) if zeros else 0,
            4 * columns if weights.get("actorder") == "group" else 0,
        )

    return stored


_METHODS: Mapping[str, Callable[[Mapping[str, Any], Outline, str], _Rule]] = {
    "gptq": _gptq,
    "awq": _awq,
    "fp8": _fp8,
    "mxfp4": _mxfp4,
    "compressed-tensors": _compressed,
}
