"""The flags that a package's command lines have, read from the calls that declare them. Knows no parser library."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator, Mapping

from headrace.reference.flow import nodes

_DECLARING = {"add_argument", "add_option", "Option", "option"}
_HOLDERS = ("Args", "Arguments", "Options", "Flags")
_FLAG = re.compile(r"--?[A-Za-z][\w\-]*(?:/--?[A-Za-z][\w\-]*)?")

Spellings = tuple[str, ...]
"""All ways to write one flag, as one call declares them."""


def read_flags(tree: ast.Module, source: bytes) -> tuple[Spellings, ...]:
    """The flags that one file declares."""
    if b"add_argument" not in source and b"ption(" not in source:
        return ()  # most files: the walk below takes as long as all else
    calls = [node for node in nodes(tree) if isinstance(node, ast.Call) and _name(node.func) in _DECLARING]
    declared = [spellings for call in calls if (spellings := _spellings(call))]
    if any(_is_made_from_a_name(call) for call in calls):
        declared += _fields(tree)
    return tuple(declared)


def _is_made_from_a_name(call: ast.Call) -> bool:
    """`add_argument(f"--{field}")`: the flags are the fields of a class."""
    starts = [each.values[0] for each in call.args if isinstance(each, ast.JoinedStr) and each.values]
    return any(isinstance(start, ast.Constant) and str(start.value).startswith("--") for start in starts)


def _fields(tree: ast.Module) -> Iterator[Spellings]:
    """A flag for each field of the classes that are named as holders of flags."""
    holders = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name.endswith(_HOLDERS)]
    for statement in (statement for holder in holders for statement in holder.body):
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            flag = "--" + statement.target.id.replace("_", "-")
            yield (flag,)
            if ast.unparse(statement.annotation) == "bool":
                yield (flag.replace("--", "--no-", 1),)


def _name(function: ast.expr) -> str:
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


def _spellings(call: ast.Call) -> Spellings:
    texts = [each.value for each in call.args if isinstance(each, ast.Constant) and isinstance(each.value, str)]
    return tuple(part for text in texts if _FLAG.fullmatch(text) for part in text.split("/"))


def by_spelling(declared: Iterable[Spellings]) -> Mapping[str, str]:
    """Every spelling with the best one: the longest that begins with two dashes."""
    flags: dict[str, str] = {}
    for spellings in declared:
        best = max(spellings, key=lambda text: (text.startswith("--"), len(text)))
        for text in spellings:
            # What switches a flag off is a flag of its own: `--color/--no-color`.
            flags.setdefault(text, text if text.startswith("--") else best)
    return flags
