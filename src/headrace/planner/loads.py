"""How many sequences share each pass, where that may be chosen: as many as make more tokens per second. Pure.

More of them share what a pass reads, but their KV cache takes the place of weights, which are then read too.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from headrace.config import OffloadConfig
from headrace.core import Choice, Machine, ModelShape
from headrace.errors import BudgetError
from headrace.planner.choose import plan
from headrace.planner.costs import Demand

ENOUGH = 0.95
"""Of the most tokens per second: a smaller batch that has so much of it is better for everything else."""


@dataclass(frozen=True, slots=True)
class Load:
    """Sequences that share each pass, and the tokens of each."""

    batch: int
    context_tokens: int
    prefill_tokens: int


def demand_of(demand: Demand, load: Load) -> Demand:
    """The same for another load."""
    return dataclasses.replace(
        demand, batch=load.batch, context_tokens=load.context_tokens, prefill_tokens=load.prefill_tokens
    )


def choose_load(
    shape: ModelShape, machine: Machine, demand: Demand, config: OffloadConfig, loads: Sequence[Load]
) -> tuple[Load, Choice]:
    """The smallest of `loads`, which grow, that makes nearly as many tokens per second as the best that fits, and why.

    The first one is taken for granted: whoever plans it is told why it does not fit.
    """
    speeds: list[float] = []
    for load in loads:
        try:
            speeds.append(plan(shape, machine, demand_of(demand, load), config).tokens_per_s)
        except BudgetError:
            break
    if not speeds:
        return loads[0], Choice("batch", _sequences(loads[0].batch), "the least there is")
    best = max(speeds)
    index = next(index for index, speed in enumerate(speeds) if speed >= ENOUGH * best)
    chosen, largest = loads[index], loads[len(speeds) - 1]
    if len(loads) == 1:
        return chosen, Choice("batch", _sequences(chosen.batch), f"{speeds[0]:.3g} tokens/s")
    reason = f"{speeds[index]:.3g} tokens/s, with {loads[0].batch} at a time {speeds[0]:.3g}"
    if index + 1 < len(speeds):
        reason += f"; {largest.batch} would make {speeds[-1]:.3g}"
    elif len(speeds) < len(loads):
        reason += f"; {loads[len(speeds)].batch} do not fit into memory"
    else:
        reason += "; there are no more requests, or no more is tried"
    return chosen, Choice("batch", _sequences(chosen.batch), reason)


def _sequences(batch: int) -> str:
    return f"{batch} sequence{'s' if batch != 1 else ''}"
