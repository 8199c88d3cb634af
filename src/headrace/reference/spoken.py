"""The messages of a module as syntax: each error that is made, with the literals its text is put together from.

Knows no rules. A literal comes with what is still filled into it (`%` or `.format`), if anything is.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from headrace.reference.flow import FUNCTIONS, Module, Place, own_statements

Filled = Literal["", "percent", "format", "unknown"]
_DEEPEST = 3


@dataclass(frozen=True, slots=True)
class Spoken:
    """A literal (or a run of them) in a message."""

    node: ast.Constant | ast.JoinedStr
    filled: Filled


@dataclass(frozen=True, slots=True)
class Message:
    """An error that a statement raises or asserts."""

    statement: ast.Raise | ast.Assert
    place: Place
    error_class: str
    arguments: tuple[ast.expr, ...]
    """As written; a local name that was set to one of several texts stays a name."""
    has_more: bool
    """There are keywords or starred arguments beside them."""
    spoken: tuple[Spoken, ...]


def messages(module: Module) -> Iterator[Message]:
    """Every error that the module makes with a call of its class, or by an assert with a message."""
    for statement, place in module.places.items():
        match statement:
            case ast.Raise(exc=ast.Call(func=ast.Name() | ast.Attribute()) as call):
                stars = any(isinstance(argument, ast.Starred) for argument in call.args)
                yield Message(
                    statement,
                    place,
                    ast.unparse(call.func),
                    tuple(call.args),
                    bool(call.keywords) or stars,
                    tuple(_all_spoken((*call.args, *(word.value for word in call.keywords)), statement, module)),
                )
            case ast.Raise(exc=ast.Name(id=name)):
                yield Message(statement, place, name, (), has_more=False, spoken=())
            case ast.Assert(msg=ast.expr() as text):
                spoken = tuple(_all_spoken([text], statement, module))
                yield Message(statement, place, "AssertionError", (text,), has_more=False, spoken=spoken)


def _all_spoken(values: tuple[ast.expr, ...] | list[ast.expr], at: ast.stmt, module: Module) -> Iterator[Spoken]:
    for value in values:
        yield from _spoken(value, at, module, "", _DEEPEST)


def _spoken(node: ast.expr, at: ast.stmt, module: Module, filled: Filled, depth: int) -> Iterator[Spoken]:
    match node:
        case ast.Constant(value=str()) | ast.JoinedStr():
            yield Spoken(node, filled)
        case ast.BinOp(op=ast.Add()):
            yield from _spoken(node.left, at, module, filled, depth)
            yield from _spoken(node.right, at, module, filled, depth)
        case ast.BinOp(op=ast.Mod()):
            yield from _spoken(node.left, at, module, "percent", depth)
        case ast.IfExp():
            yield from _spoken(node.body, at, module, filled, depth)
            yield from _spoken(node.orelse, at, module, filled, depth)
        case ast.Tuple():
            for item in node.elts:
                yield from _spoken(item, at, module, "unknown", depth)
        case ast.Call(func=ast.Attribute(attr="format", value=text)):
            yield from _spoken(text, at, module, "format", depth)
        case ast.Call(func=ast.Attribute(attr="join"), args=[ast.List() | ast.Tuple() as items]):
            for item in items.elts:
                yield from _spoken(item, at, module, filled, depth)
        case ast.Name(id=name) if depth:
            yield from _definitions(name, at, module, filled, depth - 1)


def _definitions(name: str, at: ast.stmt, module: Module, filled: Filled, depth: int) -> Iterator[Spoken]:
    """The literals that a local name is set to, or that are put behind what it has."""
    scope = module.places[at].scope
    if not isinstance(scope, FUNCTIONS):
        return
    for statement in own_statements(scope.body, loops=True):
        match statement:
            case (
                ast.Assign(targets=[ast.Name(id=target)], value=ast.expr() as value)
                | ast.AnnAssign(target=ast.Name(id=target), value=ast.expr() as value)
                | ast.AugAssign(target=ast.Name(id=target), op=ast.Add(), value=value)
            ) if target == name and statement.lineno <= at.lineno:
                if not (isinstance(value, ast.Name) and value.id == name):
                    yield from _spoken(value, statement, module, _filled_elsewhere(name, scope, filled), depth)


def _filled_elsewhere(name: str, scope: ast.AST, filled: Filled) -> Filled:
    """A text that is filled anywhere in the function may be filled before it is raised."""
    for node in ast.walk(scope):
        match node:
            case ast.Attribute(value=ast.Name(id=owner), attr="format" | "replace" | "substitute") if owner == name:
                return "unknown"
            case ast.BinOp(op=ast.Mod(), left=ast.Name(id=owner)) if owner == name:
                return "unknown"
    return filled
