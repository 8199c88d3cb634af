"""What an offloaded module answers when it is treated as if its weights were in memory. Knows no backend.

A weight that is elsewhere is an `Away`: it says what it is and where it will be computed with, and refuses everything
that needs its values, so that nothing is computed with, saved or written to what is not there. The class of the module
itself is replaced by a subclass of the same name, so that the common mistakes are named as the user made them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from typing import Any, NoReturn

import torch
from torch import nn
from torch.utils import _pytree as pytree

from headrace.blocks import Lent, Weight
from headrace.errors import OffloadedWeightsError

_TENSOR = torch.Tensor
_DEVICE = _TENSOR.device.__get__
_DATA = _TENSOR.data.__get__  # type: ignore[attr-defined]
_SET_DATA = _TENSOR.data.__set__  # type: ignore[attr-defined]
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
_HARMLESS |= {torch._has_compatible_shallow_copy_type, torch.is_floating_point, torch.is_complex, torch.numel}
_HARMLESS |= {_TENSOR.requires_grad.__set__}  # type: ignore[attr-defined]


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
        if func == _SET_DATA and args[0] is args[1]:
            return None
        if func == _TENSOR.to and not (kwargs or {}).get("copy", False):
            device, dtype, _, memory_format = torch._C._nn._parse_to(*args[1:], **(kwargs or {}))
            if memory_format is None and not _would_move(args[0], device, dtype):
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


def _would_move(tensor: torch.Tensor, device: torch.device | None, dtype: torch.dtype | None) -> bool:
    here = tensor.device
    elsewhere = device is not None and (device.type != here.type or device.index not in (None, here.index))
    return elsewhere or dtype not in (None, tensor.dtype)


def guard(root: nn.Module) -> Callable[[], None]:
    """Make `root` refuse state_dict, copies, pickling and moves that would need the weights that are elsewhere.

    So do the modules inside, for those of their own. Returns what undoes it.
    """
    plain = type(root)
    guarded = type(
        plain.__name__, (_Guarded, plain), {"__module__": plain.__module__, "__qualname__": plain.__qualname__}
    )
    with contextlib.ExitStack() as undo:
        for module in root.modules():
            if any(isinstance(parameter, Away) for parameter in module._parameters.values()):
                saving = module.register_state_dict_pre_hook(_before_saving)  # type: ignore[no-untyped-call]
                loading = module.register_load_state_dict_pre_hook(_before_loading)  # type: ignore[no-untyped-call]
                undo.callback(saving.remove)
                undo.callback(loading.remove)
        undo.callback(setattr, root, "__class__", plain)
        root.__class__ = guarded
        return undo.pop_all().close


def _before_saving(module: nn.Module, *args: Any) -> None:
    _refuse_for(module, "state_dict()", recurse=False)


def _before_loading(module: nn.Module, state_dict: Any, prefix: str, metadata: Any, *args: Any) -> None:
    if not metadata.get("assign_to_params_buffers", False):  # else new weights take the place of those elsewhere
        _refuse_for(module, "load_state_dict()", recurse=False)


def is_guarded(module: nn.Module) -> bool:
    """Whether `guard` was called on it, or a weight of its own is elsewhere."""
    return isinstance(module, _Guarded) or bool(_away(module, recurse=False))


class _Guarded(nn.Module):
    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        _refuse_for(self, "state_dict()")
        return super().state_dict(*args, **kwargs)

    def save_pretrained(self, *args: Any, **kwargs: Any) -> Any:
        _refuse_for(self, "save_pretrained()")
        return super().save_pretrained(*args, **kwargs)  # type: ignore[misc]

    def load_state_dict(self, state_dict: Any, strict: bool = True, assign: bool = False) -> Any:
        if not assign:
            _refuse_for(self, "load_state_dict()")
        return super().load_state_dict(state_dict, strict, assign)

    def __deepcopy__(self, memo: Any) -> Any:
        _refuse(_away(self), "deepcopy()")

    def __reduce_ex__(self, protocol: Any) -> Any:
        _refuse(_away(self), "pickling")

    def to(self, *args: Any, **kwargs: Any) -> Any:
        device, dtype, _, memory_format = torch._C._nn._parse_to(*args, **kwargs)
        for tensor in [*self.parameters(), *self.buffers()]:
            as_dtype = dtype if tensor.is_floating_point() or tensor.is_complex() else None
            if memory_format is not None or _would_move(tensor, device, as_dtype):
                _refuse_for(self, f"to({device or dtype or memory_format})")
                return super().to(*args, **kwargs)  # the user has replaced all that was elsewhere
        return self

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        _refuse_for(self, "changing every weight")
        return super()._apply(fn, recurse)  # type: ignore[no-untyped-call]


def _away(module: nn.Module, *, recurse: bool = True) -> list[str]:
    """Names of weights that are elsewhere, or only lent: who keeps those finds other data in them later."""
    return [weight.weight_name for weight in module.parameters(recurse) if isinstance(weight, (Away, Lent))]


def _refuse_for(module: nn.Module, action: str, *, recurse: bool = True) -> None:
    """Raises: OffloadedWeightsError, if a weight of `module` is elsewhere."""
    names = _away(module, recurse=recurse)
    if names:
        _refuse(names, action)


def _refuse(names: list[str], action: str) -> NoReturn:
    shown = names if len(names) <= 3 else [*names[:3], "..."]
    raise OffloadedWeightsError(action=action, count=len(names), names=shown)
