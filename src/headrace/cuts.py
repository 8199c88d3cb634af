"""Which parameters of which blocks move: the cut that makes enough room and moves the fewest bytes. Pure; no torch."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from headrace.core import DIRECT_ALIGNMENT, TENSOR_ALIGNMENT, BlockShape, align_up

Cut = dict[str, tuple[str, ...]]
"""By block name: the names of the parameters that move."""

MAX_CUTS = 4096
"""Distinct sizes of what moves of a layer that are tried; beyond it every second one, and so on."""

MAX_SUMS, MAX_SETS = 2**16, 2**13
"""Sums of sizes, in units of what they have in common, and sets over all blocks, up to which the fewest bytes are
searched for exactly. Beyond it sizes are so many that the plain search misses little."""

SMALL_BYTES = 64 * 1024
"""Parameters below this (norms, biases) move only if everything must: they are not worth a read."""


def best_cut(blocks: Sequence[BlockShape], excess_bytes: int, slots: int) -> Cut | None:
    """The cut that moves the fewest bytes while it makes room for `excess_bytes` beside its own ring, or None.

    For every size that a slot could have: each layer moves the largest set of its parameters that a slot holds, as few
    layers as are enough, spread evenly. Where other sets of the same slot's size move fewer bytes in all, those are
    taken. Layers come first; the head, read whole for every token like they are, joins when they are not enough.
    """
    assert excess_bytes > 0
    best: tuple[int, Cut] | None = None
    tried: list[tuple[int, list[BlockShape], list[Subset]]] = []
    for candidates in _candidates(blocks):
        for largest in _by_slot_size(candidates):
            needed = excess_bytes + slots * _slot_for(largest)
            tried.append((needed, candidates, largest))
            cut = _fewest(candidates, largest, needed)
            if cut is not None:
                moved = moved_bytes(candidates, cut)
                best = (moved, cut) if best is None or moved < best[0] else best
    if best is None:
        return None
    for needed, candidates, largest in sorted(tried, key=lambda each: each[0]):
        if needed >= best[0]:
            break  # no slot of this size or a larger one can move less than it needs
        if (exact := _exact(candidates, largest, needed, best[0])) is not None:
            best = (moved_bytes(candidates, exact), exact)
    return best[1]


def least_rest(blocks: Sequence[BlockShape], slots: int) -> tuple[int, int]:
    """The least that any cut leaves in memory: the bytes of `blocks` that stay, and those of the ring beside them."""
    everything = sum(block.nbytes for block in blocks)
    rests = [(everything, 0)]
    for candidates in _candidates(blocks):
        for largest in _by_slot_size(candidates):
            moved = sum(subset.nbytes for subset in largest)
            rests.append((everything - moved, slots * _slot_for(largest)))
    return min(rests, key=sum)


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


# --- sets of a block's parameters -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Subset:
    """Some parameters of a block."""

    slot_bytes: int
    """What they take in a slot, each aligned."""
    nbytes: int
    """What they are: the room that moving them makes."""
    members: tuple[int, ...]
    common_bytes: int
    """The greatest common divisor of this size and of those of all smaller sets of the block."""


_SUBSETS: dict[tuple[tuple[int, bool], ...], list[Subset]] = {}


def subsets(block: BlockShape) -> list[Subset]:
    """Sets of the block's parameters, each larger than the one before by either measure; the first is the empty one."""
    signature = tuple((param.nbytes, param.movable) for param in block.params)
    known = _SUBSETS.get(signature)
    if known is None:
        if len(_SUBSETS) > 256:
            _SUBSETS.clear()
        known = _SUBSETS[signature] = list(_subsets([size if movable else 0 for size, movable in signature]))
    return known


def _subsets(sizes: Sequence[int]) -> Iterator[Subset]:
    """Of parameters of these sizes; by size, the set of the fewest parameters there is."""
    padded = [align_up(size, TENSOR_ALIGNMENT) for size in sizes]
    known: dict[int, tuple[int, ...]] = {0: ()}
    for index, size in enumerate(sizes):
        if size < SMALL_BYTES:
            continue
        for total, members in list(known.items()):
            grown = total + padded[index]
            is_better = len(members) + 1 < len(known[grown]) if grown in known else len(known) < MAX_CUTS
            if is_better:
                known[grown] = (*members, index)
    known.setdefault(sum(padded), tuple(index for index, size in enumerate(sizes) if size))
    largest, common = -1, 0
    for total in sorted(known):
        nbytes = sum(sizes[index] for index in known[total])
        if nbytes > largest:  # else it takes more of a slot, for its padding, and makes no more room
            largest, common = nbytes, math.gcd(common, nbytes)
            yield Subset(total, nbytes, known[total], common)


def _candidates(blocks: Sequence[BlockShape]) -> Iterator[list[BlockShape]]:
    """The blocks that may move: without the head, then with it."""
    without = [block for block in blocks if block.kind != "head"]
    yield without
    if len(without) < len(blocks):
        yield list(blocks)


def _by_slot_size(blocks: Sequence[BlockShape]) -> Iterator[list[Subset]]:
    """For every size of a slot that is worth trying: the largest set of each block that it holds."""
    known = [subsets(block) for block in blocks]
    sizes = sorted({subset.slot_bytes for some in known for subset in some} - {0}, reverse=True)
    for size in sizes[:: -(-len(sizes) // MAX_CUTS) or 1]:
        yield [some[bisect_right(some, size, key=lambda subset: subset.slot_bytes) - 1] for some in known]


def _slot_for(chosen: Sequence[Subset]) -> int:
    return align_up(max((subset.slot_bytes for subset in chosen), default=0), DIRECT_ALIGNMENT)


def _fewest(blocks: Sequence[BlockShape], largest: Sequence[Subset], needed: int) -> Cut | None:
    """What moves if each block can move its `largest` set, or None if even all of it does not make enough room."""
    if sum(subset.nbytes for subset in largest) < needed:
        return None
    # As few blocks as are enough, the largest first; among equals, evenly spread.
    moving = sorted(range(len(blocks)), key=lambda index: -largest[index].nbytes)
    count, total = 0, 0
    while total < needed:
        total += largest[moving[count]].nbytes
        count += 1
    smallest = largest[moving[count - 1]].nbytes
    sure = [index for index in moving if largest[index].nbytes > smallest]
    equal = sorted(index for index in moving if largest[index].nbytes == smallest)
    take = count - len(sure)
    chosen = {index: largest[index] for index in sure}
    chosen |= {index: largest[index] for index in (equal[(2 * k + 1) * len(equal) // (2 * take)] for k in range(take))}
    last = max(index for index in chosen if largest[index].nbytes == smallest)
    some = subsets(blocks[last])  # the last one need not move all of it
    enough = smallest - (total - needed)
    chosen[last] = some[bisect_left(some, enough, key=lambda subset: subset.nbytes)]
    return {
        blocks[index].name: tuple(blocks[index].params[member].name for member in chosen[index].members)
        for index in sorted(chosen)
    }


def spread(sizes: Sequence[int], budget_bytes: int) -> list[bool]:
    """For each of these blocks whether it has to live one tier down, so that the others fit into the budget.

    Those that do are spread over the pass as evenly as their sizes allow: the slow link works all the time.
    """
    excess = sum(sizes) - budget_bytes
    if excess <= 0:
        return [False] * len(sizes)
    total, seen, moved, away = sum(sizes), 0, 0, []
    for size in sizes:
        seen += size
        away.append(moved * total < excess * seen and size > 0)
        moved += size if away[-1] else 0
    return away


def _within(some: list[Subset], most: Subset) -> list[Subset]:
    """Those up to `most`."""
    return some[: bisect_right(some, most.slot_bytes, key=lambda subset: subset.slot_bytes)]


def _exact(blocks: Sequence[BlockShape], largest: Sequence[Subset], needed: int, above: int) -> Cut | None:
    """The sets, each at most its block's `largest`, that together move the fewest bytes from `needed` on.

    None if that is not fewer than `above`, or if the sizes have so little in common that all sums would be too many.
    """
    choices = [_within(subsets(block), most) for block, most in zip(blocks, largest, strict=True)]
    unit = math.gcd(*(some[-1].common_bytes for some in choices))
    if unit == 0 or sum(most.nbytes for most in largest) // unit > MAX_SUMS or sum(map(len, choices)) > MAX_SETS:
        return None
    # Bit s of `reached[i]` says that the first i blocks can move s units together.
    reached = [1]
    for some in choices:
        sums = 0
        for subset in some:
            sums |= reached[-1] << subset.nbytes // unit
        reached.append(sums)
    enough = -(-needed // unit)
    beyond = reached[-1] >> enough
    if beyond == 0:
        return None
    total = enough + (beyond & -beyond).bit_length() - 1
    if total * unit >= above:
        return None
    cut: Cut = {}
    for index in range(len(blocks) - 1, -1, -1):
        subset = next(
            subset
            for subset in choices[index]
            if subset.nbytes // unit <= total and reached[index] >> (total - subset.nbytes // unit) & 1
        )
        total -= subset.nbytes // unit
        if subset.members:
            cut[blocks[index].name] = tuple(blocks[index].params[member].name for member in subset.members)
    return dict(reversed(cut.items()))
