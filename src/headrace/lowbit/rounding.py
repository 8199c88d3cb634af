"""Numbers of 8 and 4 bits for a matrix, with the scales that make the smallest squared error. Knows no file, no model.

Scales are rounded to the model's dtype first and numbers chosen for the scales as they are stored. Plain rounding
between the ends of a group is the first candidate; so the result is never worse than that (tests hold it).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

SHRINKS_4 = (1.0, 0.93, 0.86, 0.79, 0.72)
"""Ranges that are tried, as parts of what a group spans: the ends give up a little, and the many in the middle gain."""
LEAST_WEIGHT = 0.01
"""Of an input, in units of the mean."""
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
    matrix: torch.Tensor, group_size: int, dtype: torch.dtype, importance: torch.Tensor | None = None
) -> Rounded:
    """One scale and one zero of `dtype` for each group of a row.

    `importance` (columns) weighs the squared error: the mean square of each input of the matrix.
    """
    rows, columns = matrix.shape
    wide = matrix.float().view(rows, columns // group_size, group_size)
    weights = _weights(importance, columns).view(1, -1, group_size)
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
    return Rounded(numbers.view(rows, columns), scale, zero)


def _weights(importance: torch.Tensor | None, columns: int) -> torch.Tensor:
    """In units of their mean, none near 0: an input that was silent in a text need not stay so."""
    if importance is None:
        return torch.ones(columns)
    mean = importance.mean()
    return importance / torch.where(mean > 0, mean, 1) + LEAST_WEIGHT


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
