"""What of a condition can be given a value: its leaves. Runs nothing.

A *leaf* is an attribute, an item or a result, reached by a path from a parameter or from a name of the module:
`self.config.size`, `data['seed']`, `is_available()`.
"""

from __future__ import annotations

import ast
import copy
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from headrace.reference.atoms import with_names
from headrace.reference.running.worlds import Path, Step

METHODS_OF_VALUES = frozenset(
    [
        *("startswith", "endswith", "lower", "upper", "strip", "lstrip", "rstrip", "split", "rsplit", "partition"),
        *("rpartition", "count", "index", "find", "isdigit", "isalpha", "isidentifier", "isnumeric", "removeprefix"),
        *("removesuffix", "replace", "join", "encode", "decode", "items", "keys", "values", "issubset", "issuperset"),
        *("intersection", "union", "difference", "isdisjoint", "is_integer", "bit_length", "casefold", "format"),
        *("get", "pop", "setdefault", "copy"),
    ]
)
"""What is computed from a value; any other call gives a value of its own."""


def path_of(node: ast.expr, roots: set[str]) -> Path | None:
    """The path of an expression; None if it is none, or begins with a name that nobody can give a value."""
    match node:
        case ast.Name(id=name):
            return (name,) if name in roots else None
        case ast.NamedExpr(value=inner) | ast.Await(value=inner):
            return path_of(inner, roots)
        case ast.Attribute(value=inner, attr=name):
            return _longer(path_of(inner, roots), ("attribute", name))
        case ast.Subscript(value=inner, slice=ast.Constant(value=key)):
            return _longer(path_of(inner, roots), ("item", key))
        case ast.Call(func=ast.Name(id="getattr"), args=[inner, ast.Constant(value=str(name)), *_]):
            return _longer(path_of(inner, roots), ("attribute", name))
        case ast.Call(func=ast.Attribute(value=inner, attr="get"), args=[ast.Constant(value=key), *_]):
            return _longer(path_of(inner, roots), ("item", key))
        case ast.Call(func=ast.Attribute(attr=name)) if name in METHODS_OF_VALUES:
            return None
        case ast.Call(func=func):
            return _longer(path_of(func, roots), ("call", None))
    return None


def _longer(path: Path | None, step: Step) -> Path | None:
    return None if path is None else (*path, step)


def text_of(path: Path) -> str:
    """The path as code."""
    text = str(path[0])
    for what, name in path[1:]:
        text += f".{name}" if what == "attribute" else f"[{name!r}]" if what == "item" else "()"
    return text


@dataclass(slots=True)
class Question:
    """One test of a condition, as it is evaluated on the inputs."""

    code: str
    line: int
    early: bool
    leaves: list[Path] = field(default_factory=list)
    names: set[str] = field(default_factory=set)
    open: bool = False
    """It reads what the function computes in a way that cannot be followed."""
    raises: str | None = None
    """It asks whether evaluating raises this error."""
    compiled: Any = None


class Scope:
    """What the names of one function mean to the search."""

    def __init__(self, parameters: Iterable[str], assignable: Iterable[str], local: set[str]) -> None:
        self.parameters = set(parameters)
        self.assignable = set(assignable)
        self.local = local

    @property
    def roots(self) -> set[str]:
        return self.parameters | self.assignable

    def leaves(self, node: ast.AST, bound: frozenset[str] = frozenset()) -> Iterator[Path]:
        """The leaves that an expression reads."""
        if isinstance(node, ast.expr):
            path = path_of(node, self.roots - bound)
            if path is not None and not _is_constant(path, self.parameters):
                yield path
                return
        if isinstance(node, ast.Compare) and isinstance(node.ops[0], ast.In | ast.NotIn) and len(node.ops) == 1:
            inner = path_of(node.comparators[0], self.roots - bound)
            if isinstance(node.left, ast.Constant) and inner is not None and not _is_constant(inner, self.parameters):
                yield (*inner, ("contains", node.left.value))
                return
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "hasattr":
            match node.args:
                case [inner_node, ast.Constant(value=str(name))]:
                    inner = path_of(inner_node, self.roots - bound)
                    if inner is not None:
                        yield (*inner, ("attribute", name))
                        return
        if isinstance(node, ast.ListComp | ast.SetComp | ast.GeneratorExp | ast.DictComp):
            bound |= {
                each.id for part in node.generators for each in ast.walk(part.target) if isinstance(each, ast.Name)
            }
        for child in ast.iter_child_nodes(node):
            yield from self.leaves(child, bound)


def _is_constant(path: Path, parameters: set[str]) -> bool:
    """`Mode.FULL`, `torch.float16`: not somebody's to set; what a call returns is."""
    if path[0] in parameters or any(what == "call" for what, _ in path[1:]):
        return False
    return str(path[0])[:1].isupper() or path[0] in ("torch", "np", "logger", "math")


def unfolded(node: ast.expr, definitions: Mapping[str, ast.expr], deepest: int = 6) -> ast.expr:
    """An expression in terms of what the function was given, as far as its names have one definition."""
    node = _Unwalrus().visit(copy.deepcopy(node))
    for _ in range(deepest):
        names = {part.id for part in ast.walk(node) if isinstance(part, ast.Name)}
        values = {name: definitions[name] for name in names & definitions.keys()}
        if not values:
            break
        node = _Unwalrus().visit(with_names(node, values))
    return node


class _Unwalrus(ast.NodeTransformer):
    def visit_NamedExpr(self, node: ast.NamedExpr) -> ast.AST:
        return self.visit(node.value)  # type: ignore[no-any-return]

    def visit_Await(self, node: ast.Await) -> ast.AST:
        return self.visit(node.value)  # type: ignore[no-any-return]
