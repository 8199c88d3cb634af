"""String literals as they are written: which of them Python joins, and what stands at their seams. Knows no errors."""

from __future__ import annotations

import ast
import io
import itertools
import re
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass, replace

BRACED = re.compile(r"(?<!\{)\{[A-Za-z_]\w*(?:[.\[!:][^{}]*)?\}(?!\})")
"""A value's name in braces, as an f-string or `str.format` would fill it."""
_SHORTEST_RUN = 5  # ''""


@dataclass(frozen=True, slots=True)
class Literal:
    """One literal of a text."""

    line: int
    prefix: str
    """In small letters: `f`, `rb` ..., or nothing."""
    body: str
    """What stands between the quotes, escapes as written."""

    @property
    def is_f(self) -> bool:
        return "f" in self.prefix

    @property
    def is_plain_text(self) -> bool:
        """Neither bytes nor raw, where a backslash or a blank means something else."""
        return not {"r", "b"} & set(self.prefix)


@dataclass(frozen=True, slots=True)
class Run:
    """Literals side by side, which Python joins into one text."""

    literals: tuple[Literal, ...]

    def seams(self) -> Iterator[tuple[Literal, Literal]]:
        """Each two literals that meet."""
        yield from itertools.pairwise(self.literals)

    def lacking_f(self) -> Iterator[tuple[Literal, str]]:
        """A literal with a name in braces and no f in front, where another literal of the text has one."""
        if any(literal.is_f for literal in self.literals):
            for literal in self.literals:
                if not literal.is_f and (missing := BRACED.search(literal.body)):
                    yield literal, missing[0]


def runs(source: str) -> Iterator[Run]:
    """Every run of at least two literals in a piece of Python."""
    found: list[tuple[int, str]] = []
    lines = source.splitlines(keepends=True)
    opened: list[tokenize.TokenInfo] = []
    # From Python 3.12 on an f-string is many tokens between a start and an end.
    fstring_start, fstring_end = (getattr(tokenize, name, -1) for name in ("FSTRING_START", "FSTRING_END"))
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == fstring_start:
            opened.append(token)
        elif token.type == fstring_end:
            start = opened.pop()
            if not opened:
                (first, left), (last, right) = start.start, token.end
                text = (
                    lines[first - 1][left:right]
                    if first == last
                    else "".join([lines[first - 1][left:], *lines[first : last - 1], lines[last - 1][:right]])
                )
                found.append((first, text))
        elif opened:
            continue
        elif token.type == tokenize.STRING:
            found.append((token.start[0], token.string))
        elif token.type not in {tokenize.NL, tokenize.COMMENT}:
            if len(found) > 1:
                yield Run(tuple(_literal(line, written) for line, written in found))
            found = []


def run_of(node: ast.Constant | ast.JoinedStr, source: str) -> Run | None:
    """The literals that a text of a syntax tree is written as; None if it is only one."""
    if node.end_lineno == node.lineno and (node.end_col_offset or 0) - node.col_offset < _SHORTEST_RUN:
        return None
    written = ast.get_source_segment(source, node)
    if written is None:
        return None
    found = next(runs(f"({written})"), None)
    if found is None:
        return None
    return Run(tuple(replace(literal, line=literal.line + node.lineno - 1) for literal in found.literals))


def _literal(line: int, written: str) -> Literal:
    """Prefix and body of a literal: `f"ab"` is ("f", "ab")."""
    match = re.match(r"[A-Za-z]*", written)
    assert match is not None
    prefix = match[0].lower()
    rest = written[len(prefix) :]
    quote = 3 if rest.startswith(('"""', "'''")) else 1
    return Literal(line, prefix, rest[quote:-quote])
