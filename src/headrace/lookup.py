"""Drafts out of the text so far: what followed the longest repetition of its end, as much of it as is likely to pay.

transformers' prompt lookup takes the first match of at most a few tokens and drafts as many each time. How long a match
is tells how likely it goes on (docs/log.md), so here the longest one is taken, of several the last, and few tokens are
drafted after a short one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers.generation.candidate_generator import CandidateGenerator

from headrace.planner import best_drafted

LONGEST_MATCH = 16
"""Tokens at the end of the text that are compared, at most."""
EXPECTED = (0.3, 0.5, 0.6, 0.7, 0.8)
"""Of drafted tokens after a match of one, two ... tokens: how often the next one is right, until the text shows it."""
CONFIDENCE = 4
"""Drafted tokens that those expectations count for."""


class Repetitions:
    """Where the end of a growing text has been before."""

    def __init__(self) -> None:
        self._tokens: list[int] = []
        self._places: dict[int, list[int]] = {}

    def extend(self, tokens: Sequence[int]) -> None:
        """Append what the text has grown by."""
        for place, token in enumerate(tokens, start=len(self._tokens)):
            self._places.setdefault(token, []).append(place)
        self._tokens += tokens

    def __len__(self) -> int:
        return len(self._tokens)

    def longest(self, most: int) -> tuple[int, list[int]]:
        """How many tokens of the text's end are repeated, and up to `most` tokens that followed there; else 0 and none.

        At most LONGEST_MATCH are compared; of matches of the same length the last one counts.
        """
        last = len(self._tokens) - 1
        length, follows = 0, 0
        for place in reversed(self._places[self._tokens[-1]][:-1] if self._tokens else []):
            same = self._same_before(place, last)
            if same > length:
                length, follows = same, place + 1
            if length == LONGEST_MATCH:
                break
        return length, self._tokens[follows : follows + most] if length else []

    def _same_before(self, place: int, last: int) -> int:
        count = 1
        while count < min(LONGEST_MATCH, place + 1) and self._tokens[place - count] == self._tokens[last - count]:
            count += 1
        return count


class Acceptance:
    """How often drafted tokens were right, by the length of the match that they followed. Of one text."""

    def __init__(self) -> None:
        self._counts = [[0, 0] for _ in EXPECTED]

    def expected(self, length: int) -> float:
        """Probability that the next drafted token is right."""
        right, tried = self._counts[self._kind(length)]
        return (EXPECTED[self._kind(length)] * CONFIDENCE + right) / (CONFIDENCE + tried)

    def note(self, length: int, drafted: int, right: int) -> None:
        """Of so many drafted tokens the first were right; what came after the first wrong one tells nothing."""
        counts = self._counts[self._kind(length)]
        counts[0] += right
        counts[1] += min(drafted, right + 1)

    def _kind(self, length: int) -> int:
        return min(length, len(EXPECTED)) - 1


class Lookup(CandidateGenerator):
    """Candidates for transformers' assisted generation."""

    def __init__(self, most: int, pass_tokens: float | None, ends: Any, max_length: int) -> None:
        """`most` tokens for a pass; fewer where more do not pay, unless `pass_tokens` is None (see `best_drafted`).

        `ends`: a tensor of end tokens or None. No candidate goes beyond `max_length` - 1 tokens.
        """
        self._most = most
        self._pass_tokens = pass_tokens
        self._ends = set() if ends is None else set(ends.flatten().tolist())
        self._max_length = max_length
        self._repetitions = Repetitions()
        self._acceptance = Acceptance()
        self._length = self._drafted = 0

    def get_candidates(self, input_ids: torch.Tensor, **kwargs: Any) -> tuple[Any, Any]:
        """The text with what is drafted behind it, shape (1, tokens)."""
        self._repetitions.extend(input_ids[0, len(self._repetitions) :].tolist())
        most = min(self._most, self._max_length - input_ids.shape[1] - 1)
        self._length, draft = self._repetitions.longest(max(0, most))
        ended = next((place for place, token in enumerate(draft) if token in self._ends), len(draft))
        draft = draft[: self._worth(ended)]
        self._drafted = len(draft)
        if not draft:
            return input_ids, None
        return torch.cat((input_ids, input_ids.new_tensor([draft])), dim=1), None

    def _worth(self, found: int) -> int:
        if not found or self._pass_tokens is None:
            return found
        return best_drafted(self._acceptance.expected(self._length), found, self._pass_tokens)

    def update_candidate_strategy(self, input_ids: torch.Tensor, scores: Any, num_matches: int) -> None:
        """`num_matches` of the tokens that were drafted last were right."""
        if self._drafted:
            self._acceptance.note(self._length, self._drafted, int(num_matches))
