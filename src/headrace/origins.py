"""Where each weight of a transformers model comes from: the stored tensors it is made of, and what makes it of them.

Knows transformers' rules for names and conversions; does not know where weights will live.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from headrace import errors
from headrace.blocks import Weight, named_sites
from headrace.core import StoredTensor
from headrace.store import Checkpoint, same_bytes

TORCH_DTYPES: Mapping[str, torch.dtype] = {
    "BOOL": torch.bool, "U8": torch.uint8, "I8": torch.int8,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
    "I16": torch.int16, "U16": torch.uint16, "F16": torch.float16, "BF16": torch.bfloat16,
    "I32": torch.int32, "U32": torch.uint32, "F32": torch.float32,
    "I64": torch.int64, "U64": torch.uint64, "F64": torch.float64, "C64": torch.complex64,
}  # fmt: skip


@dataclass(frozen=True)
class Source:
    """What a parameter or buffer is made of."""

    stored: tuple[tuple[str, StoredTensor], ...]
    """(transformers' source pattern, tensor), in the order of the checkpoint's names."""
    converter: Any
    """transformers' WeightConverter, or None if the tensor is stored as the model holds it."""
    first_target: str
    """The name that the converter is called with: its own, or that of the first of several that it makes at once."""


def trace(model: Any, checkpoint: Checkpoint, dequantizer: Any | None = None) -> tuple[dict[str, Source], list[str]]:
    """By name in the model: the stored tensors it is made of; and the stored tensors that nothing is made of.

    `dequantizer` is transformers' quantizer whose conversions make plain weights of quantized ones.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

    mapping = get_model_conversion_mapping(model, hf_quantizer=dequantizer)
    renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
    by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    wanted = model.state_dict()
    prefix = model.base_model_prefix
    found: dict[str, list[tuple[str, StoredTensor]]] = {}
    used: dict[str, Any] = {}
    ignored = []
    for name in sorted(checkpoint.tensors, key=dot_natural_key):
        target, pattern = rename_source_key(name, renamings, converters, prefix, wanted)
        if target not in wanted and name in wanted:
            target, pattern = rename_source_key(name, [], [], prefix, wanted)
        if target in wanted:
            found.setdefault(target, []).append((pattern or name, checkpoint.tensors[name]))
            used[target] = by_pattern[pattern] if pattern is not None else None
        else:
            ignored.append(name)
    sources: dict[str, Source] = {}
    for target, stored in found.items():
        for made in _made_together(target, used[target]):
            sources[made] = Source(tuple(stored), used[target], target)
    return sources, ignored


def _made_together(target: str, converter: Any) -> list[str]:
    """All that `converter` makes of the tensors that are renamed to `target`: q, k and v of one matrix, say."""
    if converter is None:
        return [target]
    first, *others = converter.target_patterns
    return [target, *(target.replace(first, other) for other in others)]


def _parts(source: Source) -> tuple[StoredTensor, ...] | None:
    """The tensors whose bytes one after the other are the parameter's, or None if it takes more than moving bytes.

    A stack of experts is such a sequence, and so is one whose experts are made of several matrices, one above the
    other: expert by expert, matrix by matrix.
    """
    if source.converter is None:
        return tuple(tensor for _, tensor in source.stored) if len(source.stored) == 1 else None
    names = [type(operation).__name__ for operation in source.converter.operations]
    dims = [getattr(operation, "dim", None) for operation in source.converter.operations]
    if len(source.converter.target_patterns) != 1 or (names, dims) not in (
        (["MergeModulelist"], [0]),
        (["MergeModulelist", "Concatenate"], [0, 1]),
    ):
        return None
    by_pattern = {
        pattern: [t for p, t in source.stored if p == pattern] for pattern in source.converter.source_patterns
    }
    counts = {len(tensors) for tensors in by_pattern.values()}
    if len(counts) != 1 or not counts.pop():
        return None
    return tuple(tensor for expert in zip(*by_pattern.values(), strict=True) for tensor in expert)


def _shape_of(source: Source, parts: Sequence[StoredTensor]) -> tuple[int, ...] | None:
    """The shape that `parts` have together, or None if they do not fit each other."""
    if source.converter is None:
        return parts[0].shape
    count = len(source.converter.source_patterns)
    experts = {tuple(part.shape for part in parts[start : start + count]) for start in range(0, len(parts), count)}
    matrices = experts.pop()
    if experts or not all(matrices) or len({shape[1:] for shape in matrices}) > 1:
        return None
    return (len(parts) // count, sum(shape[0] for shape in matrices), *matrices[0][1:])


def untie_different(model: Any, checkpoint: Checkpoint, sources: Mapping[str, Source]) -> None:
    """Undo the ties that the checkpoint contradicts: both names are stored, with different values.

    The config says that they are one weight and the files say that they are two; transformers believes the files, and
    so the tokens are right only if we do.
    """
    for target, source in list(model.all_tied_weights_keys.items()):
        if target not in sources or source not in sources:
            continue
        stored = [sources[name].stored for name in (target, source)]
        if len(stored[0]) != 1 or len(stored[1]) != 1 or same_bytes(checkpoint, stored[0][0][1], stored[1][0][1]):
            continue
        module, attribute = model.get_submodule(target.rpartition(".")[0]), target.rpartition(".")[2]
        tied = module._parameters[attribute]
        module._parameters[attribute] = nn.Parameter(torch.empty_like(tied), requires_grad=False)
        del model.all_tied_weights_keys[target]


def collect_weights(
    directory: Path, model: Any, checkpoint: Checkpoint, sources: Mapping[str, Source]
) -> tuple[dict[int, Weight], dict[str, Callable[[], torch.Tensor]]]:
    """By identity of the parameter: its weight; and by name what converts those that cannot be read as they are."""
    weights: dict[int, Weight] = {}
    converters: dict[str, Callable[[], torch.Tensor]] = {}
    missing, wrong = [], []
    for identity, sites in named_sites(model).items():
        parameter = sites[0].module._parameters[sites[0].attribute]
        assert parameter is not None
        source = next((sources[site.name] for site in sites if site.name in sources), None)
        if source is None:
            missing.append(sites[0].name)
            continue
        parts = _parts(source) or ()
        if parts and (shape := _shape_of(source, parts)) != tuple(parameter.shape):
            wrong.append(f"{sites[0].name}: stored {shape or 'in several shapes'}, model {tuple(parameter.shape)}")
        if any(TORCH_DTYPES.get(part.dtype) != parameter.dtype for part in parts):
            parts = ()
        weight = Weight(tuple(sites), parameter, parts)
        weights[identity] = weight
        if not parts:
            target = next(site.name for site in sites if site.name in sources)
            converters[weight.name] = _converter(directory, model, checkpoint, target, source, parameter)
    _check_matches(directory, missing, wrong)
    _load_buffers(directory, model, checkpoint, sources)
    return weights, converters


def _check_matches(directory: Path, missing: list[str], wrong: list[str]) -> None:
    if missing:
        reason = f"{len(missing)} weights of the model are not in the checkpoint"
        raise errors.TensorMismatch(model=str(directory), reason=reason, names=_few(missing))
    if wrong:
        raise errors.TensorMismatch(model=str(directory), reason="shapes differ", names=_few(wrong))


def _few(names: list[str]) -> list[str]:
    return names if len(names) <= 4 else [*names[:4], f"and {len(names) - 4} more"]


def _converter(
    directory: Path, model: Any, checkpoint: Checkpoint, target: str, source: Source, parameter: nn.Parameter
) -> Callable[[], torch.Tensor]:
    """What makes the parameter. It raises ReadError, and TensorMismatch if the tensors do not give the parameter."""

    def mismatch(reason: str) -> errors.TensorMismatch:
        return errors.TensorMismatch(model=str(directory), reason=reason, names=[target])

    def convert() -> torch.Tensor:
        tensors = [(pattern, _read(checkpoint, tensor)) for pattern, tensor in source.stored]
        if source.converter is None:
            return _own_memory(tensors[0][1], parameter)
        converter = deepcopy(source.converter)
        for (pattern, stored), (_, tensor) in zip(source.stored, tensors, strict=True):
            converter.add_tensor(source.first_target, stored.name, pattern, tensor)
        try:
            value = converter.convert(source.first_target, model=model, config=model.config)[target]
        except Exception as error:  # whatever torch raises in the conversion
            raise mismatch(f"transformers cannot convert what is stored: {error}") from error
        value = value[0] if isinstance(value, list) else value
        if value.shape != parameter.shape:
            raise mismatch(f"stored {tuple(value.shape)}, model {tuple(parameter.shape)}")
        return _own_memory(value, parameter)

    return convert


def _own_memory(tensor: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """`tensor` in `like`'s dtype, out of the mapped file or of a larger tensor: torch aligns memory of its own."""
    return tensor.to(like.dtype, memory_format=torch.contiguous_format, copy=True)


def _read(checkpoint: Checkpoint, tensor: StoredTensor) -> torch.Tensor:
    from safetensors import safe_open

    path = checkpoint.path(tensor.segment.file)
    try:
        with safe_open(path, framework="pt") as file:
            return file.get_tensor(tensor.name)  # type: ignore[no-any-return]
    except OSError as error:
        segment = tensor.segment
        raise errors.ReadError(
            file=str(path), offset=segment.offset, nbytes=segment.nbytes, reason=str(error)
        ) from None


def _load_buffers(directory: Path, model: Any, checkpoint: Checkpoint, sources: Mapping[str, Source]) -> None:
    """Persistent buffers that the checkpoint holds; the others have the values their modules made."""
    buffers = dict(model.named_buffers(remove_duplicate=False))
    found = {name: source for name, source in sources.items() if name in buffers and source.converter is None}
    wrong = [
        f"{name}: stored {source.stored[0][1].shape}, model {tuple(buffers[name].shape)}"
        for name, source in found.items()
        if source.stored[0][1].shape != tuple(buffers[name].shape)
    ]
    _check_matches(directory, [], wrong)
    for name, source in found.items():
        module = model.get_submodule(name.rpartition(".")[0])
        module._buffers[name.rpartition(".")[2]] = _own_memory(_read(checkpoint, source.stored[0][1]), buffers[name])
