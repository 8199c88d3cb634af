"""What fewer bits cost: perplexity and divergence from the original, on a text that ships with the package.

Both models run one after the other, each within the same memory, so neither has to fit. Of the original the likeliest
tokens at each place are kept, with their probabilities; the others count as one token for the divergence, which can
only make it a little smaller.
"""

from __future__ import annotations

import importlib.resources
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from headrace.engine import Engine
from headrace.settings import parse_size

Progress = Callable[[str, int, int], None]

WINDOW = 256
"""Tokens that are seen at once; the first of each window is given, the others are predicted."""
KEPT = 512
"""Of the likeliest tokens at each place."""
_ROWS = 32
"""Places whose logits are in float32 at once."""


@dataclass(frozen=True, slots=True)
class Scored:
    """What a model says of the text."""

    tokens: torch.Tensor
    """The text, (places)."""
    log_likelihoods: torch.Tensor
    """Of the tokens that really come, (places) float32."""
    likeliest: torch.Tensor
    """The KEPT likeliest tokens, (places, KEPT) int32."""
    log_probabilities: torch.Tensor
    """Theirs, float32."""


@dataclass(frozen=True, slots=True)
class Damage:
    """How a model differs from the original."""

    tokens: int
    """That were predicted."""
    perplexity_before: float
    perplexity_after: float
    divergence: float
    """Mean Kullback-Leibler divergence of the original's next-token distribution from the new one's, in nats."""
    same_choice: float
    """Part of the places at which both find the same token the likeliest."""

    @property
    def change(self) -> float:
        """Of the perplexity, as a part of what it was."""
        return self.perplexity_after / self.perplexity_before - 1


def shipped_text() -> str:
    """The text that both models read (its file names the source)."""
    file = importlib.resources.files("headrace.quantize") / "data" / "text.txt"
    return "\n".join(line for line in file.read_text(encoding="utf-8").splitlines() if not line.startswith("# "))


def measure(
    before: Path, after: Path, on_progress: Progress, *, memory: str | None = None, tokens: int = 4096
) -> Damage:
    """Run both over the beginning of the text, so many tokens of it.

    Raises: UserError, CheckpointError, ReadError.
    """
    original = score(before, None, on_progress, memory=memory, tokens=tokens)
    return compare(original, score(after, original, on_progress, memory=memory, tokens=tokens))


def compare(before: Scored, after: Scored) -> Damage:
    """`after` has the log-probabilities of the tokens that were the likeliest `before`."""
    kept, new = before.log_probabilities.double(), after.log_probabilities.double()
    rest, new_rest = _rest(kept), _rest(new)
    divergence = (kept.exp() * (kept - new)).sum(dim=-1) + rest * (rest.log() - new_rest.log())
    return Damage(
        tokens=len(before.tokens),
        perplexity_before=_perplexity(before),
        perplexity_after=_perplexity(after),
        divergence=float(divergence.clamp(min=0).mean()),
        same_choice=float((before.likeliest[:, 0] == after.likeliest[:, 0]).double().mean()),
    )


def _rest(log_probabilities: torch.Tensor) -> torch.Tensor:
    """The probability of all tokens that were not kept."""
    return (1 - log_probabilities.exp().sum(dim=-1)).clamp(min=1e-12)


def _perplexity(scored: Scored) -> float:
    return math.exp(-float(scored.log_likelihoods.double().mean()))


def score(
    directory: Path,
    original: Scored | None,
    on_progress: Progress,
    *,
    memory: str | None,
    tokens: int,
    text: str | None = None,
) -> Scored:
    """What a model says of a text, by default that of the package.

    `log_probabilities` are of the tokens that were the `original`'s likeliest.
    `likeliest` are always its own.
    """
    budget = None if memory is None else parse_size(memory, "--memory")
    read = shipped_text() if text is None else text
    with Engine.open(
        directory, memory=budget, context=(lambda *_: (WINDOW, WINDOW)), on_progress=on_progress
    ) as engine:
        ids = torch.tensor(engine.tokenizer(read, verbose=False)["input_ids"][: max(tokens, 2)])
        starts = range(0, len(ids) - 1, WINDOW)
        parts: list[tuple[torch.Tensor, ...]] = []
        for number, start in enumerate(starts):
            window = ids[start : start + WINDOW + 1]
            with torch.inference_mode():
                logits = engine.model(window[None, :-1], use_cache=False).logits[0]
            done = start  # places that were predicted before
            places = slice(done, done + len(window) - 1)
            wanted = None if original is None else original.likeliest[places]
            parts.extend(_scored(logits, window[1:], wanted))
            on_progress(f"reading with {directory.name}", number + 1, len(starts))
    columns = zip(*parts, strict=True)
    return Scored(*(torch.cat(column) for column in columns))


def _scored(
    logits: torch.Tensor, following: torch.Tensor, wanted: torch.Tensor | None
) -> Iterator[tuple[torch.Tensor, ...]]:
    for start in range(0, len(following), _ROWS):
        some = slice(start, start + _ROWS)
        log_probabilities = logits[some].float().log_softmax(dim=-1)
        likely = log_probabilities.topk(min(KEPT, log_probabilities.shape[-1]), dim=-1)
        likelihood = log_probabilities.gather(1, following[some, None])[:, 0]
        of_wanted = likely.values if wanted is None else log_probabilities.gather(1, wanted[some].long())
        yield following[some], likelihood, likely.indices.int(), of_wanted
