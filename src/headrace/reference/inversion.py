"""Templates run backwards: which values, put into a template, give a text. Knows no catalogue and no class.

White space counts for nothing, on either side: pastes are wrapped, and releases differ in it. Time is bounded: a
template is tried at a limited number of places of a text of limited length.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from headrace.reference.messages import LONGEST_MESSAGE
from headrace.reference.records import Placeholder, Template

Mode = Literal["full", "longer", "cut", "inside"]
"""full: template and text are the same; longer: the text goes on; cut: the text ends early; inside: in the middle."""

_MOST_STEPS = 2_000
_SHAPES = {
    "int": re.compile(r"[-+]?\d[\d,_]*+"),
    "float": re.compile(r"[-+]?(?:\d[\d,_]*+(?:\.\d*+)?(?:[eE][-+]?\d++)?|inf|nan)%?"),
    "bool": re.compile(r"True|False"),
    "quoted": re.compile(r"'.*+(?<=')|\".*+(?<=\")|[^'\"\s]\S*+|[\[({].*+", re.DOTALL),
    "class": re.compile(r"<(?:class|function|bound).*+|[A-Za-z_][\w.\[\], ]*+", re.DOTALL),
}


@dataclass(frozen=True, slots=True)
class Squeezed:
    """A text without its white space, and where each character stood."""

    text: str
    full: str
    places: tuple[int, ...]

    def original(self, start: int, end: int) -> str:
        """What stood between two places, with its blanks."""
        if start >= end:
            return ""
        return self.full[self.places[start] : self.places[end - 1] + 1]


def squeeze(text: str) -> Squeezed:
    """`text` without white space, cut to the longest message."""
    text = text[:LONGEST_MESSAGE]
    places = tuple(place for place, letter in enumerate(text) if not letter.isspace())
    return Squeezed("".join(text[place] for place in places), text, places)


@dataclass(frozen=True, slots=True)
class Fit:
    """How a template and a text agree."""

    mode: Mode
    captured: tuple[str | None, ...]
    """The text of each placeholder of the template; None if the text ends before it."""
    letters: int
    """Letters and digits of the template's own that were found."""
    share: float
    """Of all letters of the template's own."""
    explained: float
    """Share of the text that the template's own letters are, 1.0 if nothing was captured."""
    misfits: int = 0
    """Placeholders whose text does not look like what the source puts there."""


@dataclass(frozen=True, slots=True)
class _Form:
    """A template without white space: literals and groups of placeholders that stand side by side."""

    pieces: tuple[str | tuple[int, ...], ...]
    """A literal, or the numbers of placeholders that nothing separates."""
    kinds: tuple[str, ...]
    letters: int


@lru_cache(maxsize=4096)
def _form(template: Template) -> _Form:
    pieces: list[str | tuple[int, ...]] = []
    kinds: list[str] = []
    for piece in template:
        if isinstance(piece, Placeholder):
            kinds.append(piece.kind)
            group = pieces.pop() if pieces and isinstance(pieces[-1], tuple) else ()
            assert isinstance(group, tuple)
            pieces.append((*group, len(kinds) - 1))
        elif literal := "".join(piece.split()):
            before = pieces.pop() if pieces and isinstance(pieces[-1], str) else ""
            assert isinstance(before, str)
            pieces.append(before + literal)
    letters = sum(_letters(piece) for piece in pieces if isinstance(piece, str))
    return _Form(tuple(pieces), tuple(kinds), letters)


def own_letters(template: Template) -> int:
    """Letters and digits of a template without its placeholders."""
    return _form(template).letters


def _letters(text: str) -> int:
    return sum(letter.isalnum() for letter in text)


def fit(template: Template, text: Squeezed) -> Fit | None:
    """The best agreement of a template with a text, or None. A text that ends in "..." may end early."""
    form = _form(template)
    if not form.letters or not text.text:
        return None
    body = text.text.rstrip("\u2026")
    body = body.removesuffix("...") if not _ends_in_dots(form) else body
    found = (
        _Walk(form, body, strict=True).full(0)
        or _Walk(form, body, strict=False).full(0)
        or _Walk(form, body, strict=False).leftmost(0)
        or _inside(form, body)
    )
    return _measured(form, found, text, len(body)) if found else None


def _ends_in_dots(form: _Form) -> bool:
    """Whether dots at the end of a text may be the template's own."""
    last = form.pieces[-1]
    return isinstance(last, str) and last.endswith("...")


@dataclass(slots=True)
class _Found:
    mode: Mode
    groups: dict[int, tuple[int, int]]
    """Number of a piece of placeholders: where its text begins and ends."""
    literals: int
    """Letters found."""
    begin: int = 0


class _Walk:
    """Tries to lay a template over a text."""

    def __init__(self, form: _Form, text: str, *, strict: bool) -> None:
        self._form = form
        self._text = text
        self._strict = strict
        self._steps = _MOST_STEPS
        self._dead: set[tuple[int, int]] = set()
        self._groups: dict[int, tuple[int, int]] = {}

    def full(self, start: int) -> _Found | None:
        """All of the text, from `start` on, as the whole template."""
        if self._full(0, start):
            return _Found("full", dict(self._groups), self._form.letters)
        return None

    def _full(self, number: int, at: int) -> bool:
        pieces, text = self._form.pieces, self._text
        if number == len(pieces):
            return at == len(text)
        self._steps -= 1
        if self._steps < 0 or (number, at) in self._dead:
            return False
        piece = pieces[number]
        if isinstance(piece, str):
            if text.startswith(piece, at) and self._full(number + 1, at + len(piece)):
                return True
        else:
            for end in self._ends(number, at):
                if self._suits(piece, text[at:end]) and self._full(number + 1, end):
                    self._groups[number] = (at, end)
                    return True
        self._dead.add((number, at))
        return False

    def _ends(self, number: int, at: int) -> list[int]:
        """Where the text of the placeholders `number` may end, likeliest first."""
        pieces, text = self._form.pieces, self._text
        if number + 1 == len(pieces):
            return [len(text)]
        literal = pieces[number + 1]
        assert isinstance(literal, str)
        if number + 2 == len(pieces):
            return [len(text) - len(literal)] if text.endswith(literal) and len(text) - len(literal) >= at else []
        ends: list[int] = []
        end = text.find(literal, at)
        while end >= 0 and len(ends) < 40:
            ends.append(end)
            end = text.find(literal, end + 1)
        return ends

    def _suits(self, group: tuple[int, ...], text: str) -> bool:
        if not self._strict or len(group) > 1:
            return True
        return suits(self._form.kinds[group[0]], text)

    def leftmost(self, start: int) -> _Found | None:
        """The template from `start` on, each literal at its first place; the text may end early, or go on."""
        text, at, letters = self._text, start, 0
        groups: dict[int, tuple[int, int]] = {}
        for number, piece in enumerate(self._form.pieces):
            if isinstance(piece, str):
                where = at if text.startswith(piece, at) else -1
                if number and not isinstance(self._form.pieces[number - 1], str):
                    where = text.find(piece, at)
                    groups[number - 1] = (at, where)
                if where < 0:
                    kept = _overlap(text, piece, at)
                    if number and not isinstance(self._form.pieces[number - 1], str):
                        groups[number - 1] = (at, len(text) - kept)
                    elif kept != len(text) - at:
                        return None
                    return _Found("cut", groups, letters + _letters(piece[:kept]), start)
                at = where + len(piece)
                letters += _letters(piece)
            elif at == len(text):
                return _Found("cut", groups, letters, start)
            elif number + 1 == len(self._form.pieces):
                groups[number] = (at, len(text))
                at = len(text)
        return _Found("full" if at == len(text) and not start else "longer", groups, letters, start)


def _overlap(text: str, literal: str, at: int) -> int:
    """How many characters at the end of `text`, not before `at`, are the beginning of `literal`."""
    for length in range(min(len(literal), len(text) - at), 0, -1):
        if text.endswith(literal[:length]):
            return length
    return 0


def _inside(form: _Form, text: str) -> _Found | None:
    first = form.pieces[0]
    if not isinstance(first, str):
        return None
    start = text.find(first, 1)
    if start < 0:
        return None
    found = _Walk(form, text, strict=False).leftmost(start)
    if found is None:
        return None
    found.mode = "inside" if found.mode == "longer" else found.mode
    return found


def _measured(form: _Form, found: _Found, text: Squeezed, end: int) -> Fit:
    captured: list[str | None] = [None] * len(form.kinds)
    misfits = taken = 0
    for number, (begin, stop) in found.groups.items():
        group = form.pieces[number]
        assert isinstance(group, tuple)
        captured[group[0]] = value = text.original(begin, stop)
        taken += stop - begin
        whole = found.mode != "cut" or stop < end
        misfits += len(group) == 1 and whole and not suits(form.kinds[group[0]], "".join(value.split()))
    covered = end - found.begin if found.mode in ("full", "cut", "longer") else end
    return Fit(
        mode="inside" if found.begin and found.mode == "full" else found.mode,
        captured=tuple(captured),
        letters=found.literals,
        share=found.literals / form.letters,
        explained=1 - taken / max(1, covered),
        misfits=misfits,
    )


def suits(kind: str, text: str) -> bool:
    """Whether a text (without blanks) can be what a placeholder of this kind prints."""
    shape = _SHAPES.get(kind)
    return shape is None or shape.fullmatch(text) is not None
