"""Products with weights of 8 and 4 bits: torch's kernels for few rows, pieces in the model's dtype for many.

torch's kernels go through all weights again for every few rows of the input: for a token or a few nothing is faster,
and from some dozens of rows on the product in the model's dtype is, even with the work of making its matrix.
So a prefill makes some rows of the matrix at a time, in memory that the next ones reuse, and multiplies with those.
"""

from __future__ import annotations

import torch

from headrace.lowbit.packing import HALVES
from headrace.sizing.scheme import BLOCK_ROWS

MOST_ROWS_8, MOST_ROWS_4 = 16, 64
"""Rows of the input up to which torch's kernel for the bits is taken."""
SCRATCH_BYTES = 4 * 2**20
"""About how much of a matrix is made at a time."""


def linear_8(rows: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """`rows` (n, columns) by the transpose of what int8 `weight` (rows, columns) and `scale` (rows) stand for."""
    if rows.shape[0] <= MOST_ROWS_8 and rows.device.type == "cpu":
        return torch.ops.aten._weight_int8pack_mm(rows, weight, scale)  # type: ignore[no-any-return]
    outputs, columns = weight.shape
    out = rows.new_empty(rows.shape[0], outputs)
    step = _step(columns, rows.dtype, outputs)
    made = rows.new_empty(step, columns)
    for start in range(0, outputs, step):
        end = min(start + step, outputs)
        piece = made[: end - start].copy_(weight[start:end])
        torch.mul(torch.mm(rows, piece.t()), scale[start:end], out=out[:, start:end])
    return out


def linear_4(
    rows: torch.Tensor, weight: torch.Tensor, scale_and_zero: torch.Tensor, group_size: int, layout: str
) -> torch.Tensor:
    """The same of packed uint8 `weight` (rows, columns / 2) and `scale_and_zero` (columns / group, rows, 2)."""
    if rows.shape[0] <= MOST_ROWS_4 and rows.device.type == "cpu":
        return torch.ops.aten._weight_int4pack_mm_for_cpu(  # type: ignore[no-any-return]
            rows, weight, group_size, scale_and_zero
        )
    outputs, columns = weight.shape[0], weight.shape[1] * 2
    out = rows.new_empty(rows.shape[0], outputs)
    step = _step(columns, rows.dtype, outputs)
    scratch = _Scratch(rows, step, columns, layout)
    for start in range(0, outputs, step):
        end = min(start + step, outputs)
        piece = scratch.fill(weight[start:end], scale_and_zero[:, start:end], group_size)
        out[:, start:end] = torch.mm(rows, piece.t())
    return out


def rows_8(indices: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Rows of an int8 table, in the dtype of its scales."""
    picked = weight[indices]
    return picked.to(scale.dtype).mul_(scale[indices][..., None])


def _step(columns: int, dtype: torch.dtype, outputs: int) -> int:
    """Rows of a matrix that are made at a time: whole blocks."""
    rows = SCRATCH_BYTES // (columns * dtype.itemsize) // BLOCK_ROWS * BLOCK_ROWS
    return min(max(rows, BLOCK_ROWS), outputs)


class _Scratch:
    """Memory in which some rows of a 4-bit matrix are made."""

    def __init__(self, like: torch.Tensor, rows: int, columns: int, layout: str) -> None:
        self._block, self._apart = HALVES[layout]
        self._numbers = torch.empty(rows * columns, dtype=torch.uint8, device=like.device)
        self._wide = like.new_empty(rows * columns)
        self._matrix = like.new_empty(rows, columns)

    def fill(self, packed: torch.Tensor, scale_and_zero: torch.Tensor, group_size: int) -> torch.Tensor:
        """The matrix (rows, columns) of these packed rows.

        The lower and the upper numbers of all bytes are kept apart until the last step: every step before it runs over
        memory as it lies.
        """
        rows, columns = packed.shape[0], packed.shape[1] * 2
        block, apart = self._block, self._apart
        blocks, halves, groups = rows // block, block // 2 // apart, columns // group_size
        numbers = self._numbers[: rows * columns].view(2, blocks, columns, block // 2)
        bytes_ = packed.view(blocks, columns, block // 2)
        torch.bitwise_and(bytes_, 15, out=numbers[0])
        torch.bitwise_right_shift(bytes_, 4, out=numbers[1])
        numbers.view(torch.int8).sub_(8)
        wide = self._wide[: rows * columns].view(2, blocks, groups, group_size, block // 2)
        wide.copy_(numbers.view(torch.int8).view(wide.shape))
        # Of a block's rows: (groups, blocks, halves, which of a byte's two, apart, scale or zero).
        of_rows = scale_and_zero.reshape(groups, blocks, halves, 2, apart, 2)
        scale, zero = of_rows.permute(5, 3, 1, 0, 2, 4).reshape(2, 2, blocks, groups, 1, block // 2)
        torch.addcmul(zero, wide, scale, out=wide)
        ordered = wide.view(2, blocks, columns, halves, apart).permute(1, 3, 0, 4, 2)
        self._matrix[:rows].view(blocks, halves, 2, apart, columns).copy_(ordered)
        return self._matrix[:rows]
