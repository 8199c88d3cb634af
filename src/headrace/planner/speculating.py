"""How many tokens are drafted for a pass, so that verifying them costs no time that it does not take anyway. Pure.

Verified tokens are computed one by one inside of each block, so each takes what a token takes. A pass that waits for
its weights has time for some; one that computes all the time has none.
"""

from __future__ import annotations

from typing import Literal

from headrace.core import Bound, Machine, ModelShape, Speculation
from headrace.planner import costs
from headrace.planner.costs import Demand
from headrace.units import format_seconds

ACCEPTED_SHARE = 0.7
"""Of a draft model's tokens, taken to be right; only the number of them per pass follows from it."""

UNPROFITABLE_TOKENS = 4
"""Drafted where it was asked for, although it is not expected to pay."""


def speculation(shape: ModelShape, machine: Machine, demand: Demand, bound: Bound) -> tuple[Speculation, str]:
    """What drafts how many tokens, and why; `bound` is that of a pass which makes one token."""
    asked = demand.speculate
    if asked == "off":
        return Speculation(), "asked for"
    if asked == "auto" and demand.cannot_speculate:
        return Speculation(), demand.cannot_speculate
    if asked == "auto" and not demand.greedy:
        return Speculation(), "answers are sampled; --speculate lookup does it for those too"
    token_s = costs.decode_compute_s(shape, machine, demand) + costs.overhead_s(shape, machine)
    moving_s = max(bound.moving_s, bound.disk_s)
    free = max(0, min(costs.MOST_DRAFTED, int(moving_s / token_s) - 1))
    where = "from disk" if bound.link == "disk" else "over the link"
    times = f"a pass takes {format_seconds(moving_s)} {where}, and computing a token {format_seconds(token_s)}"
    if not moving_s:
        times = "nothing moves, and each token that a pass verifies is computed"
    if asked == "auto":
        if not free:
            return Speculation(), f"{times}: verifying a draft would make the pass longer"
        return Speculation("lookup", free), f"{times}: as many more are verified in the time that it takes anyway"
    kind: Literal["draft", "lookup"] = "draft" if asked == "draft" else "lookup"
    tokens = free or UNPROFITABLE_TOKENS
    if demand.draft is not None:
        draft_s = costs.decode_compute_s(demand.draft, machine, demand) + costs.overhead_s(demand.draft, machine)
        tokens = _best_drafted(tokens, draft_s, max(moving_s, token_s), 0.0 if free else token_s)
        times += f", drafting one {format_seconds(draft_s)}"
    end = "" if free else "; it is not expected to be faster"
    return Speculation(kind, tokens), f"asked for; {times}{end}"


def _best_drafted(most: int, draft_s: float, pass_s: float, verify_s: float) -> int:
    """The number that gives the most tokens per second, if a draft is right as often as is assumed."""

    def rate(tokens: int) -> float:
        made = (1 - ACCEPTED_SHARE ** (tokens + 1)) / (1 - ACCEPTED_SHARE)
        return made / (pass_s + tokens * (draft_s + verify_s))

    return max(range(1, most + 1), key=rate)
