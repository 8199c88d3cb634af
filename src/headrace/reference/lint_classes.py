"""Which error classes print their arguments as Python does. Knows no messages."""

from __future__ import annotations

import ast
import builtins
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from headrace.reference.classes import last_name

_PRINTS_OTHERWISE = (UnicodeError, SyntaxError, BaseExceptionGroup, OSError, StopIteration, SystemExit)
"""Python's own classes that read their arguments, or that nobody prints."""


@dataclass(frozen=True, slots=True)
class Definition:
    """A class, as far as it matters to what an error prints."""

    name: str
    bases: tuple[str, ...]
    adds_nothing: bool
    """Nothing in its body could read the arguments that an error is made with."""


def definitions(tree: ast.Module) -> Iterator[Definition]:
    """Every class of a module."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            bases = tuple(last_name(ast.unparse(base)) for base in node.bases)
            yield Definition(node.name, bases, _adds_nothing(node))


class PlainClasses:
    """Python's own error classes, and those of a package that add nothing to one of them."""

    def __init__(self) -> None:
        self._found: dict[str, list[Definition]] = {}

    def add(self, found: Iterable[Definition]) -> None:
        """Learn the classes of one file."""
        for definition in found:
            self._found.setdefault(definition.name, []).append(definition)

    def prints_arguments(self, written: str) -> bool:
        """Whether an error prints its only argument as it is, and several as a tuple; no if that is not known."""
        return self._prints(last_name(written), frozenset())

    def _prints(self, name: str, above: frozenset[str]) -> bool:
        if name in above:
            return False
        known = self._found.get(name)
        if known is None:
            kind = getattr(builtins, name, None)
            if not isinstance(kind, type) or not issubclass(kind, BaseException):
                return False
            return not issubclass(kind, _PRINTS_OTHERWISE)
        return all(
            one.adds_nothing and one.bases and all(self._prints(base, above | {name}) for base in one.bases)
            for one in known
        )


def _adds_nothing(node: ast.ClassDef) -> bool:
    """Whether a class body has nothing that could read arguments: a docstring, constants, other methods."""
    special = {"__init__", "__new__", "__str__", "__repr__", "__init_subclass__", "args"}
    names = {part.name for part in node.body if isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef)}
    return not node.decorator_list and not node.keywords and not names & special
