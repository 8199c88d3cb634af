"""Linear layers in the place of a model's own: the same weights, multiplied another way. Knows no model library.

Fast rows: oneDNN, to which torch gives products in bfloat16, rearranges the matrix for each of them. That pays for many
rows and not for one, which torch's own kernel multiplies at the memory's rate, twice as fast (docs/log.md). But it sums
in another order, so that some results are rounded to the neighbouring number. What streams and what is resident go
through the same kernel: they stay equal, bit for bit, but no longer equal to plain transformers.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

FAST_DTYPE = torch.bfloat16
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
        model.register_forward_pre_hook(_begin_pass, prepend=True)
        model.register_forward_hook(_end_pass, always_call=True)
    return sum(matrices.values())


_passes = threading.RLock()


def _begin_pass(*_: object) -> None:
    _passes.acquire()


def _end_pass(*_: object) -> None:
    _passes.release()


class _Switch:
    """oneDNN's switch, which torch has one of for the whole process: off while any thread wants it off."""

    def __init__(self) -> None:
        self._torch: Any = torch.backends.mkldnn
        self._lock = threading.Lock()
        self._users = 0
        self._before = True

    @contextlib.contextmanager
    def off(self) -> Iterator[None]:
        with self._lock:
            if self._users == 0:
                self._before = self._torch.enabled
                self._torch.enabled = False
            self._users += 1
        try:
            yield
        finally:
            with self._lock:
                self._users -= 1
                if self._users == 0:
                    self._torch.enabled = self._before


own_kernel = _Switch().off
"""Within it torch multiplies without oneDNN. Products of other threads may do so meanwhile."""
