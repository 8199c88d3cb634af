"""Numbers of 8 and 4 bits for a matrix, with the scales that make the smallest squared error. Knows no file, no model.

Scales are rounded to the model's dtype first and numbers chosen for the scales as they are stored. Plain rounding
between the ends of a group is the first candidate; so the result is never worse than that (tests hold it).

Where it is known what a matrix is multiplied with, the error that counts is that of the product. Then the numbers of
some neighbouring columns make good for each other's errors (coordinate descent on the quadratic form of the inputs'
second moments; after Frantar et al. 2022, GPTQ, https://arxiv.org/abs/2210.17323, and Behdin et al. 2023, QuantEase,
https://arxiv.org/abs/2309.01885).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

SHRINKS_4 = (1.0, 0.93, 0.86, 0.79, 0.72)
"""Ranges that are tried, as parts of what a group spans: the ends give up a little, and the many in the middle gain."""
LEAST_WEIGHT = 0.01
"""Of an input, in units of the mean."""
MOMENT_COLUMNS = 64
"""Columns whose errors make good for each other, at most. The moments of each column take 4 bytes times this."""
SWEEPS = 3
"""Times that each number of such columns is chosen anew."""
_PANEL = 8
"""Columns that are chosen before the others hear of it."""
REFITS = 2
"""Rounds of: the best scale and zero for these numbers, the best numbers for those."""


@dataclass(frozen=True, slots=True)
class Rounded:
    """Numbers and scales of a matrix, or of some of its rows."""

    numbers: torch.Tensor
    """8 bits: int8 from -127 to 127; 4 bits: uint8 from 0 to 15. (rows, columns)"""
    scale: torch.Tensor
    """8 bits: (rows); 4 bits: (rows, columns / group)."""
    zero: torch.Tensor | None = None
    """4 bits: what 8 stands for, (rows, columns / group)."""


def to_8_bits(matrix: torch.Tensor, dtype: torch.dtype) -> Rounded:
    """One scale for each row, of `dtype`."""
    wide = matrix.float()
    scale = _rounded_up(wide.abs().amax(dim=1) / 127, dtype)
    return Rounded((wide / _divisor(scale)[:, None]).round_().clamp_(-127, 127).to(torch.int8), scale)


def to_4_bits(
    matrix: torch.Tensor, group_size: int, dtype: torch.dtype, moments: torch.Tensor | None = None
) -> Rounded:
    """One scale and one zero of `dtype` for each group of a row.

    `moments` (blocks, width, width), float32: mean products of the matrix's inputs, each with those of its own block of
    `width` columns. The error that is made small is the mean square of what comes out, as far as they tell it.
    """
    rows, columns = matrix.shape
    wide = matrix.float().view(rows, columns // group_size, group_size)
    if moments is not None:
        moments = _damped(moments)
    weights = _weights(moments, columns).view(1, -1, group_size)
    low, high = wide.amin(dim=-1), wide.amax(dim=-1)
    middle, span = (low + high) / 2, high - low
    best: tuple[torch.Tensor, ...] | None = None
    for shrink in SHRINKS_4:
        scale = span * (shrink / 15)
        best = _better(best, _with_numbers(wide, weights, scale, middle + scale / 2, dtype))
    assert best is not None
    for _ in range(REFITS):
        best = _better(best, _with_numbers(wide, weights, *_fitted(wide, weights, best[1]), dtype))
    _, numbers, scale, zero = best
    rounded = Rounded(numbers.view(rows, columns), scale, zero)
    return rounded if moments is None else _compensated(wide.view(rows, columns), rounded, moments)


def moment_blocks(columns: int) -> tuple[int, int, int]:
    """The shape of the `moments` of a matrix with so many columns."""
    width = math.gcd(columns, MOMENT_COLUMNS)
    return columns // width, width, width


def _damped(moments: torch.Tensor) -> torch.Tensor:
    """In units of the mean square, none of which is near 0: an input that was silent in a text need not stay so."""
    mean = moments.diagonal(dim1=1, dim2=2).mean()
    return moments / torch.where(mean > 0, mean, 1) + LEAST_WEIGHT * torch.eye(moments.shape[-1])


def _weights(moments: torch.Tensor | None, columns: int) -> torch.Tensor:
    return torch.ones(columns) if moments is None else moments.diagonal(dim1=1, dim2=2).reshape(columns)


def _compensated(wide: torch.Tensor, rounded: Rounded, moments: torch.Tensor) -> Rounded:
    """Other numbers for the same scales and zeros: each in turn the best one for the others, so no row gets worse."""
    assert rounded.zero is not None
    rows, columns = wide.shape
    blocks, width, _ = moments.shape
    group_size = columns // rounded.scale.shape[1]

    def by_block(tensor: torch.Tensor) -> torch.Tensor:  # (rows, columns) as (blocks, width, rows)
        return tensor.t().reshape(blocks, width, rows)

    step = by_block(rounded.scale.float().repeat_interleave(group_size, dim=1))
    zero = by_block(rounded.zero.float().repeat_interleave(group_size, dim=1))
    numbers = by_block(rounded.numbers.float()) - 8
    slope = moments @ (numbers * step + zero - by_block(wide))
    for _ in range(SWEEPS):
        for start in range(0, width, _PANEL):
            panel = slice(start, start + _PANEL)
            changes = _chosen_anew(numbers[:, panel], step[:, panel], slope[:, panel], moments[:, panel, panel])
            slope.baddbmm_(moments[:, :, panel], changes)
    chosen = (numbers + 8).to(torch.uint8).view(columns, rows).t().contiguous()
    return Rounded(chosen, rounded.scale, rounded.zero)


def _chosen_anew(numbers: torch.Tensor, step: torch.Tensor, slope: torch.Tensor, moments: torch.Tensor) -> torch.Tensor:
    """Change `numbers` of a panel (blocks, columns, rows) in place, column by column; what that adds to the matrix.

    `slope` is half the derivative of the error by each of the matrix's numbers.
    """
    slope, changes = slope.clone(), torch.empty_like(numbers)
    for column in range(numbers.shape[1]):
        curvature = moments[:, column, column, None] * _divisor(step[:, column])
        old = numbers[:, column]
        new = (old - slope[:, column] / curvature).round_().clamp_(-8, 7)
        changes[:, column] = (new - old) * step[:, column]
        numbers[:, column] = new
        slope[:, column:].addcmul_(moments[:, column:, column, None], changes[:, column, None])
    return changes


def _with_numbers(
    wide: torch.Tensor, weights: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor, dtype: torch.dtype
) -> tuple[torch.Tensor, ...]:
    """Weighted squared error of each group, numbers, and scale and zero as they are stored."""
    scale, zero = scale.to(dtype), zero.to(dtype)
    wide_scale, wide_zero = scale.float()[..., None], zero.float()[..., None]
    numbers = ((wide - wide_zero) / _divisor(wide_scale)).add_(8).round_().clamp_(0, 15)
    error = (numbers - 8).mul_(wide_scale).add_(wide_zero).sub_(wide).square_().mul_(weights).sum(dim=-1)
    return error, numbers.to(torch.uint8), scale, zero


def _better(best: tuple[torch.Tensor, ...] | None, other: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    """Of each group the one with the smaller error."""
    if best is None:
        return other
    better = other[0] < best[0]
    return tuple(
        torch.where(better[..., None] if new.dim() > better.dim() else better, new, old)
        for new, old in zip(other, best, strict=True)
    )


def _fitted(wide: torch.Tensor, weights: torch.Tensor, numbers: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The scale and zero of the smallest weighted squared error for these numbers: a line through the points."""
    q, total = numbers.float() - 8, weights.sum(dim=-1, keepdim=True)
    q_mean = (q * weights).sum(dim=-1, keepdim=True) / total
    w_mean = (wide * weights).sum(dim=-1, keepdim=True) / total
    weighted = (q - q_mean) * weights
    variance = (weighted * (q - q_mean)).sum(dim=-1)
    scale = (weighted * (wide - w_mean)).sum(dim=-1) / torch.where(variance > 0, variance, 1)
    return scale, w_mean.squeeze(-1) - scale * q_mean.squeeze(-1)


def _divisor(scale: torch.Tensor) -> torch.Tensor:
    """The scale, or 1 where it is 0: there all numbers are 0."""
    wide = scale.float()
    return torch.where(wide == 0, 1, wide)


def _rounded_up(wide: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """In `dtype`, never below: else the largest number of a row would have to be cut."""
    rounded = wide.to(dtype)
    return torch.where(rounded.float() < wide, torch.nextafter(rounded, torch.full_like(rounded, torch.inf)), rounded)
