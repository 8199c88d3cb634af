"""Putting templates together from pieces. Knows no source code.

A message has *forms*: an optional part, a branch or a second definition of a name each make one more template.
"""

from __future__ import annotations

import itertools
import re
import string
import unicodedata
from collections.abc import Iterable, Sequence

from headrace.reference.records import Piece, Placeholder, PlaceholderKind, Template

Forms = list[Template]
MOST_FORMS = 12
"""A message with more forms than that has the part with the most of them as a placeholder."""

_WORDS = re.compile(r"(?<!\S)\S*?[^\W\d_]{2,}\S*")
_FEWEST_WORDS = 3
_FLOAT_SPEC = re.compile(r"(?:.?[<>=^])?[-+ ]?z?#?0?\d*[,_]?(?:\.(?:\d+|\{\}))?[feEgG%]")
_INT_SPEC = re.compile(r"[-+ #0<>=^]?\d*[,_]?[bcdoxXn]?\Z")
_PERCENT = re.compile(
    r"%(?:\((?P<key>[^)]*)\))?[-+ #0]*(?:\*|\d+)?(?:\.(?:\*|\d+))?[hlL]?(?P<type>[diouxXeEfFgGcrsa%])"
)


def join(pieces: Iterable[Piece]) -> Template:
    """One template; literals that meet become one, empty ones go."""
    out: list[Piece] = []
    for piece in pieces:
        if isinstance(piece, str) and out and isinstance(out[-1], str):
            out[-1] += piece
        elif piece != "":
            out.append(piece)
    return tuple(out)


def concatenated(parts: Sequence[Forms]) -> Forms:
    """Every way to put one form of each part after the other."""
    forms: Forms = [()]
    for part in parts:
        forms = [join((*left, *right)) for left, right in itertools.product(forms, part)]
        if len(forms) > MOST_FORMS:
            forms = fullest_first(forms)[:MOST_FORMS]
    return forms


def fullest_first(forms: Iterable[Template]) -> Forms:
    """Each form once, by the length of its literal text; ties by the text, so that no order of lines decides."""
    unique = dict.fromkeys(forms)
    return sorted(unique, key=lambda form: (-literal_length(form), canonical(form)))


def literal_length(template: Template) -> int:
    """How many characters of it are not white space and always the same."""
    return sum(len("".join(piece.split())) for piece in template if isinstance(piece, str))


def has_words(template: Template) -> bool:
    """Whether anything but placeholders and punctuation is in it."""
    return any(character.isalnum() for piece in template if isinstance(piece, str) for character in piece)


def is_sentence(template: Template) -> bool:
    """Whether a template has at least three words of its own: less is a name, or a value."""
    return sum(len(_WORDS.findall(piece)) for piece in template if isinstance(piece, str)) >= _FEWEST_WORDS


def canonical(template: Template) -> str:
    """The template's text for ids: NFC, white space collapsed, `{}` for each placeholder."""
    text = "".join(piece if isinstance(piece, str) else "{}" for piece in template)
    return " ".join(unicodedata.normalize("NFC", text).split())


def text(template: Template) -> str:
    """The template as people read it: `{expr}` for each placeholder."""
    return "".join(piece if isinstance(piece, str) else f"{{{piece.expr}}}" for piece in template)


def one_line(template: Template) -> str:
    """The template as people read it, white space collapsed."""
    return " ".join(text(template).split())


def stripped(template: Template, side: str = "both") -> Template:
    """Without white space at its ends: `left`, `right` or `both`."""
    pieces = list(template)
    if pieces and side in ("left", "both") and isinstance(pieces[0], str):
        pieces[0] = pieces[0].lstrip()
    if pieces and side in ("right", "both") and isinstance(pieces[-1], str):
        pieces[-1] = pieces[-1].rstrip()
    return join(pieces)


def kind_of_spec(spec: str) -> PlaceholderKind:
    """What a value printed with this format specification looks like."""
    if _FLOAT_SPEC.fullmatch(spec):
        return "float"
    if spec and (spec[-1] in "bcdoxXn,_") and _INT_SPEC.match(spec):
        return "int"
    return "any"


def parse_percent(format_text: str) -> list[str | tuple[str | None, str]] | None:
    """Literals and (key, conversion type) of a `%` format in order; None if it is not one."""
    out: list[str | tuple[str | None, str]] = []
    position = 0
    for match in _PERCENT.finditer(format_text):
        out.append(format_text[position : match.start()])
        out.append("%" if match["type"] == "%" else (match["key"], match["type"]))
        position = match.end()
    rest = format_text[position:]
    if "%" in rest:
        return None
    return [*out, rest]


def parse_braces(format_text: str) -> list[str | tuple[str, str, str]] | None:
    """Literals and (field, conversion, specification) of a `str.format` text; None if it is not one."""
    out: list[str | tuple[str, str, str]] = []
    try:
        for literal, name, spec, conversion in string.Formatter().parse(format_text):
            out.append(literal)
            if name is not None:
                out.append((name, conversion or "", spec or ""))
    except ValueError:
        return None
    return out


def replaced(template: Template, forms_by_expr: dict[str, Forms]) -> Forms:
    """`template` with placeholders exchanged for the forms that stand under their expression."""
    return concatenated(
        [
            [(piece,)] if isinstance(piece, str) or piece.expr not in forms_by_expr else forms_by_expr[piece.expr]
            for piece in template
        ]
    )


def placeholder(expr: str, kind: PlaceholderKind = "any") -> Forms:
    """The one form that is only this value."""
    return [(Placeholder(expr, kind),)]
