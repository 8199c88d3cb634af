"""Which parameters of which blocks move: the cut that makes enough room and moves the fewest bytes. Pure; no torch."""

from __future__ import annotations

from collections.abc import Sequence

from headrace.core import DIRECT_ALIGNMENT, TENSOR_ALIGNMENT, BlockShape, align_up

Cut = dict[str, tuple[str, ...]]
"""By block name: the names of the parameters that move."""

MAX_CUTS = 4096
"""Distinct sizes of what moves of a layer that are tried; beyond it every second one, and so on."""

SMALL_BYTES = 64 * 1024
"""Parameters below this (norms, biases) move only if everything must: they are not worth a read."""


def best_cut(blocks: Sequence[BlockShape], excess_bytes: int, slots: int) -> Cut | None:
    """The cut that moves the fewest bytes while it makes room for `excess_bytes` beside its own ring, or None.

    For every size that a slot could have: each layer moves the largest set of its parameters that a slot holds, as few
    layers as are enough, spread evenly. Layers come first; the head, read whole for every token like they are, joins
    when they are not enough.
    """
    best: tuple[int, Cut] | None = None
    for include_head in (False, True):
        candidates = [block for block in blocks if include_head or block.kind != "head"]
        for cap in caps(candidates):
            cut = _cut_with_slot(candidates, cap, excess_bytes, slots)
            if cut is not None:
                moved = moved_bytes(blocks, cut)
                if best is None or moved < best[0]:
                    best = (moved, cut)
    return best[1] if best else None


def caps(blocks: Sequence[BlockShape]) -> list[int]:
    """The slot sizes worth trying: every size that a set of one block's parameters has."""
    sizes = sorted({size for block in blocks for size in subsets(block)} - {0})
    step = -(-len(sizes) // MAX_CUTS)
    return sizes[::-1][::step] if step > 1 else sizes


_SUBSETS: dict[tuple[tuple[int, bool], ...], dict[int, tuple[int, ...]]] = {}


def subsets(block: BlockShape) -> dict[int, tuple[int, ...]]:
    """By size: a set of the block's parameters (as indices) of that size, of the fewest parameters there is."""
    signature = tuple((param.nbytes, param.movable) for param in block.params)
    known = _SUBSETS.get(signature)
    if known is None:
        movable = [index for index, param in enumerate(block.params) if param.movable]
        large = [index for index in movable if block.params[index].nbytes >= SMALL_BYTES]
        known = {0: ()}
        for index in large:
            for size, members in list(known.items()):
                grown = size + align_up(block.params[index].nbytes, TENSOR_ALIGNMENT)
                if len(known) < MAX_CUTS and len(members) + 1 < len(known.get(grown, (0,) * 99)):
                    known[grown] = (*members, index)
        everything = sum(align_up(block.params[index].nbytes, TENSOR_ALIGNMENT) for index in movable)
        known.setdefault(everything, tuple(movable))
        if len(_SUBSETS) > 256:
            _SUBSETS.clear()
        _SUBSETS[signature] = known
    return known


def _cut_with_slot(blocks: Sequence[BlockShape], cap: int, excess_bytes: int, slots: int) -> Cut | None:
    """What moves if a slot has `cap` bytes, or None if even all of it does not make enough room."""
    largest = [max(size for size in subsets(block) if size <= cap) for block in blocks]
    moving = [index for index, size in enumerate(largest) if size]
    slot = align_up(max((largest[index] for index in moving), default=0), DIRECT_ALIGNMENT)
    needed = excess_bytes + slots * slot
    if sum(largest[index] for index in moving) < needed:
        return None
    # As few blocks as are enough, the largest first; among equals, evenly spread.
    moving.sort(key=lambda index: -largest[index])
    count, total = 0, 0
    while total < needed:
        total += largest[moving[count]]
        count += 1
    smallest = largest[moving[count - 1]]
    sure = [index for index in moving if largest[index] > smallest]
    equal = sorted(index for index in moving if largest[index] == smallest)
    take = count - len(sure)
    chosen = sorted(sure + [equal[(2 * k + 1) * len(equal) // (2 * take)] for k in range(take)])
    sizes = {index: largest[index] for index in chosen}
    last = next(index for index in reversed(chosen) if largest[index] == smallest)
    spare = total - needed  # the last one need not move all of it
    sizes[last] = min(size for size in subsets(blocks[last]) if size >= sizes[last] - spare)
    return {
        blocks[index].name: tuple(blocks[index].params[member].name for member in subsets(blocks[index])[size])
        for index, size in sizes.items()
        if size
    }


def moved_bytes(blocks: Sequence[BlockShape], cut: Cut) -> int:
    """Bytes of the parameters that `cut` moves."""
    return sum(
        param.nbytes
        for block in blocks
        for param in block.params
        if block.name in cut and param.name in cut[block.name]
    )


def slot_bytes(blocks: Sequence[BlockShape], cut: Cut) -> int:
    """Size of the slot that holds what moves of any one block, each tensor aligned."""
    sizes = [
        sum(align_up(param.nbytes, TENSOR_ALIGNMENT) for param in block.params if param.name in cut[block.name])
        for block in blocks
        if block.name in cut
    ]
    return align_up(max(sizes, default=0), DIRECT_ALIGNMENT)


def subset_bytes(block: BlockShape, size: int) -> int:
    """Bytes without alignment of the block's set that has `size` with it."""
    return sum(block.params[index].nbytes for index in subsets(block)[size])
