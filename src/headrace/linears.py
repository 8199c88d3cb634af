"""Linear layers in the place of a model's own: the same weights, multiplied another way. Knows no model library.

Fast rows: oneDNN, to which torch gives products in bfloat16, rearranges the matrix for each of them. That pays for many
rows and not for one, which torch's own kernel multiplies at the memory's rate, twice as fast (docs/log.md). But it sums
in another order, so that some results are rounded to the neighbouring number. What streams and what is resident go
through the same kernel: they stay equal, bit for bit, but no longer equal to plain transformers.
"""

from __future__ import annotations

import contextlib
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
    """Have `model` multiply single rows by torch's own kernel; bytes of the matrices that this is for."""
    fast: dict[type[nn.Module], type[nn.Linear]] = {nn.Linear: OneRowLinear, FoldedLinear: OneRowFoldedLinear}
    matrices = {}
    for module in model.modules():
        made = fast.get(type(module))
        if made is not None and isinstance(module, nn.Linear) and module.weight.dtype == FAST_DTYPE:
            module.__class__ = made
            matrices[id(module.weight)] = module.weight.nbytes
    return sum(matrices.values())


@contextlib.contextmanager
def own_kernel() -> Iterator[None]:
    """Within it torch multiplies without oneDNN. The switch is the process's: other threads' products see it too."""
    switch: Any = torch.backends.mkldnn  # to a type checker its properties are descriptors
    before = switch.enabled
    switch.enabled = False
    try:
        yield
    finally:
        switch.enabled = before
