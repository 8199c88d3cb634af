"""What an offloaded module answers when it is treated as if its weights were in memory. Knows no backend.

A weight that is elsewhere is an `Away`: it says what it is and where it will be computed with, and refuses everything
that needs its values, so that nothing is computed with, saved or written to what is not there. The class of the module
itself is replaced by a subclass of the same name, so that the common mistakes are named as the user made them.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NoReturn

import torch
from torch import nn
from torch.utils import _pytree as pytree

from headrace.blocks import Weight
from headrace.errors import OffloadedWeightsError

_TENSOR = torch.Tensor
_DEVICE = _TENSOR.device.__get__
_DATA = _TENSOR.data.__get__  # type: ignore[attr-defined]
_HARMLESS = {
    getattr(_TENSOR, name).__get__
    for name in (
        *("shape", "dtype", "layout", "ndim", "nbytes", "itemsize", "requires_grad", "is_leaf", "is_meta"),
        *("grad", "grad_fn", "_version", "is_sparse", "is_quantized", "is_nested", "is_mkldnn", "is_sparse_csr"),
        *("is_cuda", "is_cpu"),
    )
} | {
    getattr(_TENSOR, name)
    for name in (
        *("numel", "nelement", "dim", "ndimension", "size", "stride", "storage_offset", "element_size"),
        *("is_contiguous", "is_floating_point", "is_complex", "is_signed", "__len__", "__repr__", "__hash__"),
        *("requires_grad_", "get_device"),
    )
}
_HARMLESS |= {torch.is_floating_point, torch.is_complex, torch.numel, _TENSOR.requires_grad.__set__}  # type: ignore[attr-defined]


class Away(nn.Parameter):
    """A parameter whose data is elsewhere. On the meta device, but `device` says where it will be computed with."""

    compute_device: torch.device
    weight_name: str

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func == _DEVICE:
            return args[0].compute_device
        if func == _DATA:  # a plain tensor on the meta device would swallow what is written to it
            return args[0]
        if func not in _HARMLESS:
            names = [leaf.weight_name for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Away)]
            _refuse(names, _describe(func))
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    def __deepcopy__(self, memo: Any) -> Any:
        _refuse([self.weight_name], "deepcopy()")

    def __reduce_ex__(self, protocol: Any) -> Any:
        _refuse([self.weight_name], "pickling")


def put_away(weights: Iterable[Weight], device: torch.device) -> None:
    """From now on the meta parameters of `weights` stand for data that is elsewhere, and used on `device`."""
    for weight in weights:
        for form in weight.forms:
            away: Any = form.meta
            away.__class__ = Away
            away.compute_device = device
            away.weight_name = form.sites[0].name


def _describe(func: Any) -> str:
    name = getattr(func, "__name__", str(func))
    owner = getattr(getattr(func, "__self__", None), "__name__", "")
    return f"{'setting' if name == '__set__' else 'reading'} .{owner}" if owner else f"{name}()"


def guard(root: nn.Module) -> None:
    """Make `root` refuse state_dict, copies, pickling and moves that would need the weights that are elsewhere."""
    plain = type(root)
    guarded = type(
        plain.__name__, (_Guarded, plain), {"__module__": plain.__module__, "__qualname__": plain.__qualname__}
    )
    root.__class__ = guarded


def unguard(root: nn.Module) -> None:
    """Undo `guard`."""
    if isinstance(root, _Guarded):
        root.__class__ = type(root).__mro__[2]


def is_guarded(module: nn.Module) -> bool:
    """Whether `guard` was called on it."""
    return isinstance(module, _Guarded)


class _Guarded(nn.Module):
    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        self._refuse("state_dict()")

    def save_pretrained(self, *args: Any, **kwargs: Any) -> Any:
        self._refuse("save_pretrained()")

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        self._refuse("load_state_dict()")

    def __deepcopy__(self, memo: Any) -> Any:
        self._refuse("deepcopy()")

    def __reduce_ex__(self, protocol: Any) -> Any:
        self._refuse("pickling")

    def to(self, *args: Any, **kwargs: Any) -> Any:
        device, dtype, _, _ = torch._C._nn._parse_to(*args, **kwargs)
        here = next(parameter.device for parameter in self.parameters() if isinstance(parameter, Away))
        if device in (None, here) and dtype in (None, *{p.dtype for p in self.parameters()}):
            return self
        self._refuse(f"to({device or dtype})")

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        self._refuse("changing every weight")

    def _refuse(self, action: str) -> NoReturn:
        _refuse([name for name, parameter in self.named_parameters() if parameter.is_meta], action)


def _refuse(names: list[str], action: str) -> NoReturn:
    shown = names if len(names) <= 3 else [*names[:3], "..."]
    raise OffloadedWeightsError(action=action, count=len(names), names=shown)
