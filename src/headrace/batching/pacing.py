"""How many prompt tokens may share a pass with requests that are being answered. Knows times, not models.

A pass that streams weights takes as long for one token as for some dozens: prompts ride along for nothing, until
computing them takes longer than the disk. Beyond that every answer would stutter whenever a prompt arrives.
"""

from __future__ import annotations

from transformers.generation.continuous_batching.requests import FutureRequestState, RequestStatus
from transformers.generation.continuous_batching.scheduler import SCHEDULER_MAPPING, FIFOScheduler

NAME = "headrace"


class Pace:
    """Raises and halves the share of prompts so that a pass with prompts takes little longer than one without.

    It is raised in steps that cannot make answers stutter much: what takes 1.2 times as long as a pass without prompts
    takes at most 1.5 times as long with a quarter more. What was too much once is remembered, and tried again later.
    """

    SLOWER = 1.2
    """A mixed pass may take so many times the pass without prompts."""
    LEAST_TOKENS = 16
    GROWTH = 1.25
    WEIGHT = 0.2
    """Of the newest pass in the average of those without prompts."""
    BELOW, FORGIVEN = 0.75, 1.02
    """Of what was too much, what is tried next; and by how much that is raised with each pass that goes well there."""

    def __init__(self, most_tokens: int) -> None:
        self.most_tokens = most_tokens
        self.tokens = min(self.LEAST_TOKENS, most_tokens)
        self._too_many: float | None = None
        self._plain_s: float | None = None

    def note(self, prompt_tokens: int, decoding: int, seconds: float) -> None:
        """A pass has taken `seconds` for so many tokens of prompts and so many requests that decode."""
        if not decoding:
            return
        if not prompt_tokens:
            plain_s = self._plain_s if self._plain_s is not None else seconds
            self._plain_s = plain_s + self.WEIGHT * (seconds - plain_s)
        elif self._plain_s is not None:
            if seconds > self.SLOWER * self._plain_s:
                self._too_many = prompt_tokens
                self.tokens = max(self.LEAST_TOKENS, self.tokens // 2)
            elif prompt_tokens >= self.tokens:
                self.tokens = min(self.most_tokens, max(self.tokens, self._next()))

    def _next(self) -> int:
        """After a pass that went well with all that it was allowed."""
        more = int(self.GROWTH * self.tokens)
        if self._too_many is None:
            return more
        self._too_many *= self.FORGIVEN
        return min(more, int(self.BELOW * self._too_many))


class PacedScheduler(FIFOScheduler):
    """First come, first served; while requests decode, the prompts of others come in pieces."""

    pace: Pace | None = None
    reserved = False
    """Whether the cache holds every request at its full length."""

    def schedule_batch(
        self, token_budget: int, cache_budget: int
    ) -> tuple[list[FutureRequestState] | None, bool, int, int]:
        if not self.active_requests:
            # Set while requests that lost their cache wait for others to end; nobody clears it when those are cancelled
            # or fail.
            self.block_new_requests = False
        decoding = sum(state.status == RequestStatus.DECODING for state in self.active_requests.values())
        if decoding and self.pace is not None:
            token_budget = min(token_budget, decoding + self.pace.tokens)
        return super().schedule_batch(token_budget, cache_budget)

    def _try_to_meet_safety_margin(self) -> bool:
        """Gives up blocks that no request uses. What is reserved needs no margin beyond that."""
        return super()._try_to_meet_safety_margin() or self.reserved


def register() -> None:
    """Make the name known to transformers. Idempotent."""
    SCHEDULER_MAPPING[NAME] = PacedScheduler
