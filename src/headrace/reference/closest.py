"""How near two texts are, word by word, rare words counting more; and the words in which they differ."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Literal

from headrace.reference.records import Placeholder, Template

_WORD = re.compile(r"[^\W\d]\w*")
_MOST_WORDS = 400
"""Of a message that are compared; the time grows with their square."""


def words(text: str) -> list[str]:
    """The words of a text, as they are compared: small letters, no numbers."""
    return [found.lower() for found in _WORD.findall(text)][:_MOST_WORDS]


@lru_cache(maxsize=16384)
def template_words(template: Template) -> tuple[str, ...]:
    """The words of a template's own; the values are nobody's words."""
    return tuple(words(" \x00 ".join(piece for piece in template if not isinstance(piece, Placeholder))))


_FEWEST_DOCUMENTS = 10_000
_SEEN_BY_CHANCE = 2
_MOST_OF_A_COMMON_WORD = 2.5
# What messages of all programs say.
_COMMON = frozenset(
    {
        "a", "all", "allowed", "already", "an", "and", "another", "any", "are", "argument", "arguments", "as", "at",
        "available", "be", "been", "before", "between", "both", "but", "by", "can", "cannot", "class", "contain",
        "contains", "could", "count", "current", "currently", "data", "default", "did", "do", "does", "each",
        "either", "empty", "equal", "error", "exist", "exists", "expected", "failed", "file", "first", "for",
        "format", "found", "from", "get", "given", "got", "greater", "had", "has", "have", "how", "if", "in",
        "index", "input", "instead", "into", "invalid", "is", "it", "its", "key", "larger", "least", "length",
        "less", "list", "match", "missing", "more", "most", "must", "name", "needs", "no", "non", "none", "not",
        "number", "object", "of", "on", "one", "only", "option", "or", "other", "out", "output", "path", "per",
        "please", "positive", "provided", "request", "required", "requires", "same", "see", "set", "should", "size",
        "smaller", "specified", "string", "such", "support", "supported", "than", "that", "the", "them", "then",
        "there", "this", "to", "true", "try", "type", "unexpected", "unknown", "unsupported", "use", "used",
        "using", "valid", "value", "values", "was", "when", "which", "will", "with", "yet", "you", "your",
    }
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Rarity:
    """What finding a word in common is worth: the logarithm of how few templates have it."""

    documents: int
    counts: Mapping[str, int]
    """In how many templates a word stands; none for a word that is in none."""
    _weights: dict[str, float] = field(default_factory=dict, repr=False, compare=False)

    def weight(self, word: str) -> float:
        """Of one word. Never negative.

        A package with few messages tells little about how rare a word is elsewhere: it is taken for one of
        `_FEWEST_DOCUMENTS`, and what every program says is not rare even if this one says it once.
        """
        if word not in self._weights:
            self._weights[word] = self._weight(word)
        return self._weights[word]

    def _weight(self, word: str) -> float:
        documents, count = self.documents, self.counts.get(word, 0)
        if documents < _FEWEST_DOCUMENTS:
            count = count * _FEWEST_DOCUMENTS // max(documents, 1) if count > _SEEN_BY_CHANCE else count
            documents = _FEWEST_DOCUMENTS
        weight = math.log((documents + 1) / (count + 0.5))
        return min(weight, _MOST_OF_A_COMMON_WORD) if word in _COMMON else weight

    def total(self, group: Iterable[str]) -> float:
        """Of all words of a text."""
        return sum(map(self.weight, group))


@dataclass(frozen=True, slots=True)
class Nearness:
    """How much of a template is in a text, in this order."""

    common: float
    """Weight of the longest common subsequence."""
    share: float
    """Of the template's weight."""
    said: float
    """Of the text's weight."""
    whole: float
    """Weight of the template."""

    @property
    def score(self) -> float:
        """Grows with what is common, and falls with what is missing on the side that has less to miss.

        Messages grow from release to release and are cut off in pastes, so one side may well be part of the other.
        """
        return self.common * max(self.share, self.said)


def nearness(text: Sequence[str], template: Sequence[str], rarity: Rarity) -> Nearness:
    """Compare the words of a text with those of a template."""
    common = sum(rarity.weight(word) for word in _common(text, template, rarity))
    whole = rarity.total(template)
    return Nearness(
        common=common, share=common / max(whole, 1e-9), said=common / max(rarity.total(text), 1e-9), whole=whole
    )


def _common(text: Sequence[str], template: Sequence[str], rarity: Rarity) -> list[str]:
    """The heaviest common subsequence. Words that the other side does not have cost nothing to leave out first."""
    both = set(text).intersection(template)
    left = [word for word in text if word in both]
    right = [word for word in template if word in both]
    weights = [rarity.weight(word) for word in left]
    best = [[0.0] * (len(right) + 1) for _ in range(len(left) + 1)]
    for row in range(len(left) - 1, -1, -1):
        for column in range(len(right) - 1, -1, -1):
            if left[row] == right[column]:
                best[row][column] = best[row + 1][column + 1] + weights[row]
            else:
                best[row][column] = max(best[row + 1][column], best[row][column + 1])
    row = column = 0
    found: list[str] = []
    while row < len(left) and column < len(right):
        if left[row] == right[column]:
            found.append(left[row])
            row, column = row + 1, column + 1
        elif best[row + 1][column] >= best[row][column + 1]:
            row += 1
        else:
            column += 1
    return found


Change = Literal["same", "yours", "theirs"]


def difference(text: str, template: Template) -> list[tuple[Change, str]]:
    """What a text and a template have in common and in which words they differ, in reading order."""
    import difflib

    mine = text.split()
    its = "".join(f"{{{piece.expr}}}" if isinstance(piece, Placeholder) else piece for piece in template).split()
    changes: list[tuple[Change, str]] = []
    matcher = difflib.SequenceMatcher(None, mine, its, autojunk=False)
    for kind, left, left_end, right, right_end in matcher.get_opcodes():
        if kind == "equal":
            changes.append(("same", " ".join(mine[left:left_end])))
            continue
        if left < left_end:
            changes.append(("yours", " ".join(mine[left:left_end])))
        if right < right_end:
            changes.append(("theirs", " ".join(its[right:right_end])))
    return changes
