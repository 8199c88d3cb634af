"""What the source says in words about an error: docstrings and comments around its site, each with its lines.

Knows no conditions and no pages. Reads text only: nothing is imported or run.
"""

from __future__ import annotations

import ast
import inspect
import itertools
import re
import tokenize
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from headrace.reference.records import Basis, Site

_LONGEST = 480
"""Characters of a statement; what is longer ends with its last whole sentence."""
_LONGEST_HEADER = 400
"""Lines from a `def` to the end of its docstring."""
_STRING = re.compile(r"(?s)[rRuU]?(?P<quote>\"{3}|'{3}|\"|')(?P<text>.*)(?P=quote)")
_SECTION = re.compile(r"(?:Raises|Exceptions?)\s*:?\s*$")
_SPHINX = re.compile(r"^\s*:raises?\s+(?P<cls>[\w.]+)\s*:\s*(?P<text>.*)$")
_ENTRY = re.compile(r"^(?P<indent>\s*)`*(?P<cls>[A-Z][\w.]*)`*\s*(?::\s*(?P<text>.*))?$")
_TOOLS = re.compile(r"#\s*(?:noqa|type:|pragma|mypy:|ruff:|pylint:|fmt:|yapf:|isort:|TODO|FIXME|XXX|HACK|SPDX)\b", re.I)


@dataclass(frozen=True, slots=True)
class Statement:
    """A sentence about an error, and where it comes from."""

    text: str
    basis: Basis
    about: str = ""
    """Whose words they are: `OffloadConfig.validate_offload_config`."""
    file: str = ""
    lines: tuple[int, int] | None = None
    """First and last line of the source that says so."""


def statements(site: Site, lines: Sequence[str]) -> list[Statement]:
    """What docstrings and comments say, the closest to the error first. `lines` are those of the site's file."""
    found = [*_comments(site, lines)]
    function = _docstring(lines, site.function_line) if site.function_line else None
    if function is not None:
        text, first, last = function
        told = _raises(text, site.error_class)
        found += [Statement(each, "docstring", f"{site.qualname}, Raises", site.file, (first, last)) for each in told]
        if summary := _summary(text):
            found.append(Statement(summary, "docstring", site.qualname, site.file, (first, last)))
    found += _class_docstring(site, lines)
    return list({statement.text: statement for statement in reversed(found)}.values())[::-1]


def _class_docstring(site: Site, lines: Sequence[str]) -> Iterator[Statement]:
    owner = site.qualname.rpartition(".")[0]
    name = owner.rpartition(".")[2]
    if not name[:1].isupper() or not site.function_line:
        return
    header = re.compile(rf"\s*class {re.escape(name)}\b")
    for number in range(min(site.function_line, len(lines)), 0, -1):
        if header.match(lines[number - 1]):
            found = _docstring(lines, number)
            if found and (summary := _summary(found[0])):
                yield Statement(summary, "docstring", owner, site.file, found[1:])
            return


# --- docstrings -------------------------------------------------------------------------------------------------------


def _docstring(lines: Sequence[str], header: int) -> tuple[str, int, int] | None:
    """The docstring below a `def` or `class` on line `header`, with its first and last line."""
    if header > len(lines):
        return None
    depth, below = 0, False
    try:
        for token in _tokens(lines[header - 1 : header - 1 + _LONGEST_HEADER]):
            if below and token.type == tokenize.STRING:
                text = _STRING.fullmatch(token.string)
                if text is None:
                    return None
                return inspect.cleandoc(text["text"]), header - 1 + token.start[0], header - 1 + token.end[0]
            if below and token.type not in (tokenize.NEWLINE, tokenize.NL, tokenize.INDENT, tokenize.COMMENT):
                return None
            if token.type == tokenize.OP:
                depth += (token.string in "([{") - (token.string in ")]}")
                below = below or (token.string == ":" and depth == 0)
    except (tokenize.TokenError, SyntaxError):
        return None
    return None


def _tokens(lines: Sequence[str]) -> Iterator[tokenize.TokenInfo]:
    return tokenize.generate_tokens((f"{line}\n" for line in lines).__next__)


def _summary(docstring: str) -> str:
    """The first paragraph, in one line."""
    paragraph = docstring.strip().partition("\n\n")[0]
    kept = itertools.takewhile(lambda line: not _begins_section(line), paragraph.splitlines())
    return _shortened(" ".join(" ".join(kept).split()))


def _begins_section(line: str) -> bool:
    return bool(re.match(r"\s*(?:Args|Arguments|Parameters|Returns|Yields|Raises|Examples?|Attributes)\s*:\s*$", line))


def _shortened(text: str) -> str:
    if len(text) <= _LONGEST:
        return text
    cut = text[:_LONGEST]
    end = max(cut.rfind(". "), cut.rfind("; "))
    return cut[: end + 1] if end > _LONGEST // 3 else cut[: cut.rfind(" ")] + " ..."


def _raises(docstring: str, error_class: str) -> Iterator[str]:
    """What a section about errors says of this class, in the styles of Google, NumPy and Sphinx."""
    name = error_class.rpartition(".")[2]
    lines = docstring.splitlines()
    for number, line in enumerate(lines):
        if (sphinx := _SPHINX.match(line)) and sphinx["cls"].rpartition(".")[2] == name:
            yield _shortened(" ".join([sphinx["text"], *_deeper(lines[number + 1 :], _indent(line))]))
        elif _SECTION.match(line.strip()):
            rest = lines[number + 1 :]
            if rest and re.fullmatch(r"\s*-{3,}\s*", rest[0]):
                rest = rest[1:]
            yield from _entries(rest, name)


def _entries(lines: Sequence[str], name: str) -> Iterator[str]:
    for number, line in enumerate(lines):
        entry = _ENTRY.match(line)
        if not line.strip() or entry is None:
            if not line.strip() and number:
                return
            continue
        if entry["cls"].rpartition(".")[2] == name:
            text = " ".join([entry["text"] or "", *_deeper(lines[number + 1 :], len(entry["indent"]))]).strip()
            if text:
                yield _shortened(text[:1].upper() + text[1:])


def _deeper(lines: Sequence[str], indent: int) -> list[str]:
    kept = itertools.takewhile(lambda line: line.strip() and _indent(line) > indent, lines)
    return [line.strip() for line in kept]


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip())


# --- comments ---------------------------------------------------------------------------------------------------------


def _comments(site: Site, lines: Sequence[str]) -> Iterator[Statement]:
    """Comments directly above the error, or above the test that decides."""
    tests = [atom.line for atom in site.condition.atoms if not atom.early_exit]
    for below in dict.fromkeys([site.line, *tests[-1:]]):
        last = below - 1
        first = last
        while first > max(site.function_line, 0) and lines[first - 1 : first] and _is_comment(lines[first - 1]):
            first -= 1
        text = " ".join(lines[number].strip().lstrip("#").strip() for number in range(first, last))
        if len(text.split()) > 2 and not _is_code(text) and _is_comment_at(lines, site.function_line, last):
            yield Statement(_shortened(text), "comment", site.qualname, site.file, (first + 1, last))


def _is_comment(line: str) -> bool:
    return line.lstrip().startswith("#") and not _TOOLS.match(line.lstrip())


def _is_code(text: str) -> bool:
    """Whether a comment is code that was switched off."""
    try:
        ast.parse(text)
    except (SyntaxError, ValueError):
        return False
    return True


def _is_comment_at(lines: Sequence[str], first: int, line: int) -> bool:
    """Whether what looks like a comment is one, and not the inside of a string that began before."""
    first = max(first, 1)
    try:
        return any(
            token.type == tokenize.COMMENT and first - 1 + token.start[0] == line
            for token in _tokens(lines[first - 1 : line])
        )
    except (tokenize.TokenError, SyntaxError):
        return False  # the string is not closed yet
