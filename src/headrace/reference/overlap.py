r"""How a regular expression and a template agree: what both of them say, and a text that both allow.

    expression  must be a multiple of \(\d+\)
    template    stone_width ({}) must be a multiple of ({})
                                 ----------------------- -     what both say

Both are words with gaps: a gap of the expression stands for any words of the template, a value of the template for any
words of the expression. The expression may begin and end in the middle of the template. Knows no pages.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from re import _constants, _parser  # type: ignore[attr-defined]  # the parser of `re`, under a private name since 3.11
from typing import Any

from headrace.reference.records import Template

_WORD = re.compile(r"\w+|[^\w\s]")
_LONGEST = 120
"""Words of an expression or a template that are compared."""
_IMPOSSIBLE = -1


@dataclass(frozen=True, slots=True)
class Token:
    """A word, a punctuation mark, or a gap."""

    text: str
    """Of a gap, one text that it allows."""
    gap: bool = False
    blank: bool = False
    """White space stands before it."""
    open_left: bool = False
    """The word may go on there."""
    open_right: bool = False


@dataclass(frozen=True, slots=True)
class Overlap:
    """What an expression and a template have in common."""

    letters: int
    """Of the template's own that the expression says."""
    words: int
    text: str
    """A text that the template can print and in which the expression is found."""
    quoted: str
    """The same, with quotes around the values that the expression does not name."""


def expression_tokens(pattern: str) -> list[Token]:
    """The words and gaps of a regular expression; empty if it is none, or one that is too involved."""
    try:
        items = list(_items(_parser.parse(pattern)))
    except (re.error, RecursionError, OverflowError):
        return []
    if any(item is None for item in items):
        return []
    return _tokens([item for item in items if item is not None])


_Item = tuple[bool, str]
"""Whether it is a gap, and its text."""


def _items(parsed: Iterable[tuple[Any, Any]]) -> Iterator[_Item | None]:
    for kind, given in parsed:
        if kind is _constants.LITERAL:
            yield False, chr(given)
        elif kind is _constants.SUBPATTERN:
            yield from _items(given[3])
        elif kind in (_constants.MAX_REPEAT, _constants.MIN_REPEAT, _constants.POSSESSIVE_REPEAT):
            fewest, _, repeated = given
            text = _example(repeated) * max(1, min(fewest, 8))
            yield (False, " ") if text.isspace() else (True, text if fewest or text == "x" else "")
        elif kind is _constants.IN:
            text = _example([(kind, given)])
            yield (False, " ") if text.isspace() else (True, text)
        elif kind in (_constants.ANY, _constants.NOT_LITERAL):
            yield True, "x"
        elif kind is _constants.BRANCH:
            yield True, _example(given[1][0])
        elif kind is not _constants.AT:
            yield None  # look-arounds, references


def _example(parsed: Iterable[tuple[Any, Any]]) -> str:
    """A text that a part of an expression allows, most likely; whoever uses it tries whether it does."""
    return "".join(_one(given) if kind is _constants.IN else _text(kind, given) for kind, given in parsed)


def _text(kind: Any, given: Any) -> str:
    return "".join(item[1] for item in _items([(kind, given)]) if item)


_OF_CATEGORY = {
    _constants.CATEGORY_DIGIT: "1",
    _constants.CATEGORY_SPACE: " ",
    _constants.CATEGORY_WORD: "a",
}


def _one(members: Sequence[tuple[Any, Any]]) -> str:
    kind, given = members[0]
    if kind is _constants.LITERAL:
        return chr(given)
    if kind is _constants.RANGE:
        return chr(given[0])
    return _OF_CATEGORY.get(given, "x") if kind is _constants.CATEGORY else "x"


def _tokens(items: Sequence[_Item]) -> list[Token]:
    found: list[Token] = []
    literal = ""
    for gap, text in [*items, (True, None)]:
        if not gap:
            literal += text or ""
            continue
        after_gap = not found or found[-1].gap
        words = list(_WORD.finditer(literal))
        for number, word in enumerate(words):
            found.append(
                Token(
                    word[0],
                    blank=literal[: word.start()][-1:].isspace(),
                    open_left=number == 0 and after_gap and word.start() == 0,
                    open_right=number == len(words) - 1 and word.end() == len(literal),
                )
            )
        if text is not None:
            found.append(Token(text, gap=True, blank=literal[-1:].isspace()))
        literal = ""
    return found


def overlap(pattern: str, expression: Sequence[Token], template: Template) -> Overlap | None:
    """The best agreement of an expression with a template; None if the template cannot print what it asks for."""
    printed = [word for number, piece in enumerate(template) for word in _printed(piece, number)]
    if not expression or len(expression) > _LONGEST or len(printed) > _LONGEST:
        return None
    best = _table(expression, printed)
    start = max(range(len(printed)), key=lambda column: best[0][column], default=0)
    if not printed or best[0][start] <= 0:
        return None
    words, absorbed = _walk(expression, printed, best, start)
    text, quoted = (
        "".join(
            piece if isinstance(piece, str) else absorbed.get(number, other) for number, piece in enumerate(template)
        )
        for other in ("x", "'x'")
    )
    if not re.search(pattern, text):
        return None
    return Overlap(best[0][start], words, text, quoted)


@dataclass(frozen=True, slots=True)
class _Printed:
    """A word of a template, or a value: then `number` tells which piece it is."""

    word: str
    number: int = 0


def _printed(piece: Any, number: int) -> Iterator[_Printed]:
    if isinstance(piece, str):
        yield from (_Printed(word) for word in _WORD.findall(piece))
    else:
        yield _Printed("", number)


def _agree(token: Token, word: str) -> bool:
    if token.text == word:
        return True
    if token.open_left and token.open_right:
        return token.text in word
    return (token.open_left and word.endswith(token.text)) or (token.open_right and word.startswith(token.text))


def _letters(text: str) -> int:
    return sum(letter.isalnum() for letter in text)


def _table(expression: Sequence[Token], printed: Sequence[_Printed]) -> list[list[int]]:
    """How many letters agree at most from each token and each printed word on."""
    best = [[_IMPOSSIBLE] * (len(printed) + 1) for _ in range(len(expression) + 1)]
    best[-1] = [0] * (len(printed) + 1)
    for row in range(len(expression) - 1, -1, -1):
        token = expression[row]
        for column in range(len(printed), -1, -1):
            if column == len(printed):
                best[row][column] = best[row + 1][column] if token.gap else _IMPOSSIBLE
                continue
            word = printed[column].word
            found = _IMPOSSIBLE
            if not word or token.gap:
                found = max(best[row][column + 1], best[row + 1][column])
            elif _agree(token, word) and best[row + 1][column + 1] != _IMPOSSIBLE:
                found = best[row + 1][column + 1] + _letters(token.text)
            best[row][column] = found
    return best


def _walk(
    expression: Sequence[Token], printed: Sequence[_Printed], best: list[list[int]], start: int
) -> tuple[int, dict[int, str]]:
    """How many words agree, and what each value of the template has to be for that."""
    row, column, words = 0, start, 0
    absorbed: dict[int, str] = {}
    while row < len(expression) and column < len(printed):
        token, word = expression[row], printed[column]
        here = best[row][column]
        if word.word and not token.gap:
            words += token.text.isalpha() and len(token.text) > 1
            row, column = row + 1, column + 1
        elif word.word and best[row][column + 1] == here:
            column += 1
        elif best[row + 1][column] == here:
            if not word.word:
                before = absorbed.get(word.number, "")
                absorbed[word.number] = before + (" " if token.blank and before else "") + token.text
            row += 1
        else:
            column += 1
    return words, absorbed
