"""Modules whose weights have 8 or 4 bits, and how they take the places of a model's own. Knows no file.

A module's tensors are plain parameters, so they move like any other weight. They are made on the meta device.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, TypeGuard

import torch
from torch import nn

from headrace.lowbit import kernels
from headrace.sizing.scheme import SCALE, SCALE_AND_ZERO, Scheme


class LowBitLinear(nn.Module):
    """What both have in common: sizes, the bias, and inputs of any number of dimensions."""

    def __init__(self, in_features: int, out_features: int, bias: nn.Parameter | None) -> None:
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        self.bias = bias

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        rows = self._multiplied(input.reshape(-1, self.in_features))
        if self.bias is not None:
            rows = rows + self.bias
        return rows.view(*input.shape[:-1], self.out_features)

    def _multiplied(self, rows: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"


class Int8Linear(LowBitLinear):
    """A linear module with one scale for each row of its int8 weight."""

    def __init__(self, in_features: int, out_features: int, bias: nn.Parameter | None, dtype: torch.dtype) -> None:
        super().__init__(in_features, out_features, bias)
        self.weight = _constant(torch.empty(out_features, in_features, dtype=torch.int8, device="meta"))
        self.weight_scale = _constant(torch.empty(out_features, dtype=dtype, device="meta"))

    def _multiplied(self, rows: torch.Tensor) -> torch.Tensor:
        return kernels.linear_8(rows, self.weight, self.weight_scale)


class Int4Linear(LowBitLinear):
    """A linear module with a scale and a zero for each group of a row of its packed weight."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: nn.Parameter | None,
        dtype: torch.dtype,
        group_size: int,
        layout: str,
    ) -> None:
        super().__init__(in_features, out_features, bias)
        self.group_size, self.layout = group_size, layout
        self.weight = _constant(torch.empty(out_features, in_features // 2, dtype=torch.uint8, device="meta"))
        self.weight_scale_and_zero = _constant(
            torch.empty(in_features // group_size, out_features, 2, dtype=dtype, device="meta")
        )

    def _multiplied(self, rows: torch.Tensor) -> torch.Tensor:
        return kernels.linear_4(rows, self.weight, self.weight_scale_and_zero, self.group_size, self.layout)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, group_size={self.group_size}, layout={self.layout}"


class Int8Embedding(nn.Embedding):
    """A table with one scale for each row of its int8 weight; its rows come in the dtype of the scales."""

    def __init__(self, table: nn.Embedding, dtype: torch.dtype) -> None:
        shape = (table.num_embeddings, table.embedding_dim)
        super().__init__(
            *shape, table.padding_idx, _weight=torch.empty(shape, dtype=torch.int8, device="meta"), _freeze=True
        )
        self.weight_scale = _constant(torch.empty(shape[0], dtype=dtype, device="meta"))
        factor = getattr(table, "embed_scale", None)  # Gemma's tables multiply what they look up
        if factor is None:
            self.embed_scale = None
        else:
            self.register_buffer("embed_scale", torch.as_tensor(factor), persistent=False)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        rows = kernels.rows_8(input, self.weight, self.weight_scale)
        return rows if self.embed_scale is None else rows * self.embed_scale.to(rows.dtype)


def _constant(data: torch.Tensor) -> nn.Parameter:
    return nn.Parameter(data, requires_grad=False)


def candidates(model: nn.Module) -> Iterator[tuple[str, nn.Linear | nn.Embedding]]:
    """Modules that can be stored in few bits, by name: plain linear ones, and tables that are looked up as usual."""
    for name, module in model.named_modules():
        if _is_linear(module) or _is_table(module):
            yield name, module


def _is_linear(module: nn.Module) -> TypeGuard[nn.Linear]:
    if not isinstance(module, nn.Linear):
        return False
    return type(module).forward is nn.Linear.forward or getattr(module, "is_plain_linear", False)


def _is_table(module: nn.Module) -> TypeGuard[nn.Embedding]:
    """A table of torch's own, or one that multiplies by `embed_scale` and does nothing else."""
    if not isinstance(module, nn.Embedding):
        return False
    scaled = type(module).__name__.endswith("ScaledWordEmbedding") and hasattr(module, "embed_scale")
    return (type(module) is nn.Embedding or scaled) and module.max_norm is None


def replace(model: Any, scheme: Scheme, dtype: torch.dtype) -> None:
    """Put modules of few bits where `scheme` says, on the meta device, tied where the model's own are.

    A bias keeps its parameter.
    """
    tied: dict[int, nn.Module] = {}
    for name, module in list(candidates(model)):
        bits = scheme.bits_of(name)
        if bits is None:
            continue
        made = _made(module, bits, scheme, dtype)
        first = tied.setdefault(id(module.weight), made)
        if first is not made:  # one weight under two names stays one
            for attribute in ("weight", SCALE, SCALE_AND_ZERO):
                if attribute in made._parameters:
                    made._parameters[attribute] = first._parameters[attribute]
        model.set_submodule(name, made)
    for name in list(model.all_tied_weights_keys):
        _tie_scales(model, name)


def _made(module: nn.Linear | nn.Embedding, bits: int, scheme: Scheme, dtype: torch.dtype) -> nn.Module:
    if isinstance(module, nn.Embedding):
        return Int8Embedding(module, dtype)
    sizes = (module.in_features, module.out_features, module.bias)
    if bits == 8:
        return Int8Linear(*sizes, dtype)
    return Int4Linear(*sizes, dtype, scheme.group_size, scheme.layout)


def _tie_scales(model: Any, name: str) -> None:
    """Tell transformers that scales of tied weights are tied too."""
    source = model.all_tied_weights_keys[name]
    module = model.get_submodule(name.rpartition(".")[0])
    if name.endswith(".weight") and SCALE in module._parameters:
        model.all_tied_weights_keys[f"{name}_scale"] = f"{source}_scale"
