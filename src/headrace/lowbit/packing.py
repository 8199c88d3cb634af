"""The order in which torch's 4-bit kernel wants its numbers. It depends on the processor's vectors.

With vectors of 512 bits it takes rows by 64, and byte i of a column holds rows i and i + 32 of such a block; with
vectors of 256 bits by 32, rows i and i + 16; else by 32, rows 2 i and 2 i + 1. The first of the two has the lower bits.
Source: torch, aten/src/ATen/native/cpu/int4mm_kernel.cpp (weight_to_int4pack_kernel).
"""

from __future__ import annotations

import functools

import torch

from headrace.sizing.scheme import BLOCK_ROWS

HALVES = {"avx512": (64, 32), "avx2": (32, 16), "plain": (32, 1)}
"""By layout: the rows of a block, and how far apart the two rows of a byte are."""


def pack(numbers: torch.Tensor, layout: str) -> torch.Tensor:
    """Numbers from 0 to 15, uint8 (rows, columns), as the kernel's uint8 (rows, columns / 2)."""
    rows, columns = numbers.shape
    assert rows % BLOCK_ROWS == 0, f"{rows} rows"
    lower, upper = _pairs(numbers, layout)
    packed = lower | upper << 4  # (blocks, columns, half a block's rows)
    return packed.contiguous().view(rows, columns // 2)


def unpack(packed: torch.Tensor, layout: str) -> torch.Tensor:
    """What `pack` was given."""
    rows, columns = packed.shape[0], packed.shape[1] * 2
    block, apart = HALVES[layout]
    bytes_ = packed.view(rows // block, columns, block // 2)
    both = torch.stack([bytes_ & 15, bytes_ >> 4], dim=-1)  # (blocks, columns, half, 2)
    halves = block // 2 // apart
    ordered = both.view(rows // block, columns, halves, apart, 2).transpose(-1, -2)
    return ordered.reshape(rows // block, columns, block).transpose(1, 2).reshape(rows, columns)


def _pairs(numbers: torch.Tensor, layout: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Of each byte, what its lower and what its upper bits hold: (blocks, columns, half a block's rows)."""
    rows, columns = numbers.shape
    block, apart = HALVES[layout]
    by_pair = numbers.view(rows // block, block // 2 // apart, 2, apart, columns)
    lower, upper = by_pair[:, :, 0], by_pair[:, :, 1]
    return tuple(half.reshape(rows // block, block // 2, columns).transpose(1, 2) for half in (lower, upper))  # type: ignore[return-value]


@functools.cache
def layout_here() -> str:
    """The layout that this process's kernel reads, seen in what torch packs; empty if it is none of those known."""
    generator = torch.Generator().manual_seed(0)
    numbers = torch.randint(0, 16, (BLOCK_ROWS, 64), generator=generator, dtype=torch.int32)
    theirs = torch.ops.aten._convert_weight_to_int4pack_for_cpu(numbers, 1)
    ours = numbers.to(torch.uint8)
    return next((name for name in HALVES if torch.equal(pack(ours, name), theirs)), "")
