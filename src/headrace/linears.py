"""Linear layers in the place of a model's own: the same weights, multiplied another way. Knows no model library.

Fast rows: oneDNN, to which torch gives products in bfloat16, rearranges the matrix for each of them. That pays for many
rows and not for one, which torch's own kernel multiplies at the memory's rate, twice as fast (docs/log.md). But it sums
in another order, so that some results are rounded to the neighbouring number. What streams and what is resident go
through the same kernel: they stay equal, bit for bit, but no longer equal to plain transformers.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from headrace import core

FAST_DTYPE = getattr(torch, core.FAST_DTYPE)
"""The one that fast rows are for: a row of float16 or float32 goes through torch's own kernel anyway."""


class FoldedLinear(nn.Linear):
    """A head without a bias that multiplies by a matrix of all positions, as torch does for a weight that needs grad.

    Without grad, torch multiplies the last position of a prefill, which is strided, by a copy of the whole weight for
    each sequence (192 MiB each for 49152 x 2048 in bfloat16), and in float16 and float32 the bits can differ from those
    of the model that from_pretrained gives, whose weights do need grad. So this saves the copies and keeps the bits.
    """

    is_plain_linear = True
    """It computes what nn.Linear does."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        folded = nn.functional.linear(input.reshape(-1, self.in_features), self.weight)
        return folded.view(*input.shape[:-1], self.out_features)


class OneRowLinear(nn.Linear):
    """One row goes through torch's own kernel, several through its default."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if input.numel() != self.in_features:
            return super().forward(input)
        with own_kernel():
            return super().forward(input)


class OneRowFoldedLinear(OneRowLinear, FoldedLinear):
    """The same for a head."""


def use_fast_rows(model: nn.Module) -> int:
    """Have `model` multiply single rows by torch's own kernel; bytes of the matrices that this is for.

    Passes of models with fast rows run one at a time, whatever threads call them: what one switches off would change
    the other's bits. A model without them that another thread runs meanwhile is not protected from it.
    """
    fast: dict[type[nn.Module], type[nn.Linear]] = {nn.Linear: OneRowLinear, FoldedLinear: OneRowFoldedLinear}
    matrices = {}
    for module in model.modules():
        made = fast.get(type(module))
        if made is not None and isinstance(module, nn.Linear) and module.weight.dtype == FAST_DTYPE:
            module.__class__ = made
            matrices[id(module.weight)] = module.weight.nbytes
    if matrices:
        kind: Any = type(model)
        model.__class__ = _alone(kind)
    return sum(matrices.values())


_passes = threading.RLock()


@functools.cache
def _alone(kind: Any) -> Any:
    """A class like `kind` whose passes hold `_passes`.

    Its forward and not a hook: torch's always_call hooks do not run after a KeyboardInterrupt.
    """

    @functools.wraps(kind.forward)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        with _passes:
            return kind.forward(self, *args, **kwargs)

    def reduce(self: nn.Module, protocol: Any) -> tuple[Any, ...]:
        return (_new_alone, (kind,), *object.__reduce_ex__(self, protocol)[2:])

    return type(kind.__name__, (kind,), {"forward": forward, "__reduce_ex__": reduce, "__module__": kind.__module__})


def _new_alone(kind: Any) -> nn.Module:
    """For copies and pickles, which find `kind` by its name and its subclass by no name."""
    made = _alone(kind)
    return made.__new__(made)  # type: ignore[no-any-return]


class _Switch:
    """oneDNN's switch, which torch has one of for the whole process: off while any thread wants it off."""

    def __init__(self) -> None:
        self._torch: Any = torch.backends.mkldnn
        self._lock = threading.Lock()
        self._users = 0
        self._before = True

    @contextlib.contextmanager
    def off(self) -> Iterator[None]:
        counted = False
        try:
            with self._lock:
                if self._users == 0:
                    self._before = self._torch.enabled
                self._users += 1
                counted = True
                self._torch.enabled = False
            yield
        finally:
            if counted:
                with self._lock:
                    self._users -= 1
                    if self._users == 0:
                        self._torch.enabled = self._before


own_kernel = _Switch().off
"""Within it torch multiplies without oneDNN. Products of other threads may do so meanwhile."""
