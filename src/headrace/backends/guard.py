"""What an offloaded module answers when it is treated as if its weights were in memory. Knows no backend.

torch and transformers ask a model for its device, its state and copies of itself by looking at its parameters; some of
those are meta tensors here. The model's class is replaced by a subclass of the same name that answers right or refuses.
"""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch import nn

from headrace.errors import OffloadedWeightsError


def guard(root: nn.Module) -> None:
    """Make `root` refuse state_dict, copies, pickling and moves that would need the weights that are on disk."""
    plain = type(root)
    guarded = type(
        plain.__name__, (_Guarded, plain), {"__module__": plain.__module__, "__qualname__": plain.__qualname__}
    )
    root.__class__ = guarded


class _Guarded(nn.Module):
    @property
    def device(self) -> torch.device:
        """Where the module computes, which its meta parameters do not say."""
        return torch.device("cpu")

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
        if device in (None, torch.device("cpu")) and dtype in (None, *{p.dtype for p in self.parameters()}):
            return self
        self._refuse(f"to({device or dtype})")

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        self._refuse("changing every weight")

    def _refuse(self, action: str) -> NoReturn:
        names = [name for name, parameter in self.named_parameters() if parameter.is_meta]
        shown = names if len(names) <= 3 else [*names[:3], "..."]
        raise OffloadedWeightsError(action=action, count=len(names), names=shown)
