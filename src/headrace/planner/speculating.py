"""How many tokens are drafted for a pass, so that verifying them pays. Pure.

Verified tokens are computed one by one inside of each block, so each takes what a token takes. A pass that waits for
its weights has time for some; one that computes all the time has none.
"""

from __future__ import annotations

from headrace.core import Bound, Machine, ModelShape, Speculation
from headrace.planner import costs
from headrace.planner.costs import Demand
from headrace.units import format_seconds

ACCEPTED_SHARE = 0.7
"""Of a draft model's tokens, taken to be right; only the number of them per pass follows from it."""

LONG_MATCH_SHARE = 0.9
"""Of the tokens that lookup finds after a long match, taken to be right: if even those do not pay, none do."""

UNPROFITABLE_TOKENS = 4
"""Drafted where it was asked for, although it is not expected to pay."""


def best_drafted(accepted: float, most: int, pass_tokens: float, draft_tokens: float = 0.0) -> int:
    """How many drafted tokens for a pass give the most tokens per second, at most `most`; 0 if drafts do not pay.

    `accepted`: how likely a drafted token is right if those before it are. `pass_tokens`: tokens that are computed in
    the time that a pass takes anyway. `draft_tokens`: what drafting a token takes, in the time of computing one.
    """

    def rate(drafted: int) -> float:
        made = sum(accepted**number for number in range(drafted + 1))
        return made / (max(pass_tokens, 1 + drafted) + drafted * draft_tokens)

    return max(range(most + 1), key=rate)  # of equal ones the least


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
    pass_tokens = moving_s / token_s if token_s else float(costs.MOST_DRAFTED + 1)
    times = (
        f"a pass takes {format_seconds(moving_s)} {'from disk' if bound.link == 'disk' else 'over the link'}, "
        f"and computing a token {format_seconds(token_s)}"
    )
    if not moving_s:
        times = "nothing moves, and each token that a pass verifies is computed"
    if asked == "draft" and demand.draft is not None:
        return _by_draft(demand.draft, machine, demand, token_s, pass_tokens, times)
    pays = best_drafted(LONG_MATCH_SHARE, costs.MOST_DRAFTED, pass_tokens) > 0
    if not pays and asked == "auto":
        return Speculation(), f"{times}: verifying a draft would make the pass longer"
    why = f"{times}: more are verified meanwhile, as many as are likely enough to be right"
    if not pays:
        why = f"{times}; it is not expected to be faster"
    most, waiting = (costs.MOST_DRAFTED, pass_tokens) if pays else (UNPROFITABLE_TOKENS, None)
    return Speculation("lookup", most, waiting), why if asked == "auto" else f"asked for; {why}"


def _by_draft(
    draft: ModelShape, machine: Machine, demand: Demand, token_s: float, pass_tokens: float, times: str
) -> tuple[Speculation, str]:
    """A smaller model, which takes its own time for each token."""
    draft_s = costs.decode_compute_s(draft, machine, demand) + costs.overhead_s(draft, machine)
    tokens = best_drafted(ACCEPTED_SHARE, costs.MOST_DRAFTED, pass_tokens, draft_s / token_s if token_s else 1.0)
    end = "" if tokens else "; it is not expected to be faster"
    return Speculation("draft", tokens or UNPROFITABLE_TOKENS), (
        f"asked for; {times}, drafting one {format_seconds(draft_s)}{end}"
    )
