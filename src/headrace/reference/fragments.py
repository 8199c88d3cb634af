"""Messages that are gathered piece by piece and put together when the error is raised. Knows no templates.

    errors.append(f"...")            problems = list(self._problems())       "; ".join(f"..." for name in names)
    raise X("; ".join(errors))       raise X(problems=problems)              a piece for each name

A piece is what is appended, yielded, listed or made by a comprehension; where it comes from is followed through local
names, attributes of `self`, and functions of the same module.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass, replace

from headrace.reference.flow import FUNCTIONS, Function, Module, Scope, own_statements

_DEEPEST = 4
_SAME_ITEMS = {"list", "tuple", "sorted", "set", "reversed", "dict.fromkeys"}


@dataclass(frozen=True, slots=True)
class Piece:
    """One text of a message that has several."""

    statement: ast.stmt
    """Where it is made."""
    text: ast.expr
    of_each: frozenset[str] = frozenset()
    """The names that a comprehension around it binds."""
    gathered_in: str = ""
    """The local list that the raise reads it from; empty if it is written in the raise itself."""


def is_only_joined(call: ast.Call) -> bool:
    """Whether an error's message is a joined list and no word besides."""
    return len(call.args) == 1 and not call.keywords and _joined(call.args[0]) is not None


def _joined(message: ast.expr) -> ast.expr | None:
    """`parts` of `" ".join(parts)`, also inside of an f-string that adds nothing."""
    match message:
        case ast.JoinedStr(values=[ast.FormattedValue(value=value)]):
            return _joined(value)
        case ast.Call(func=ast.Attribute(attr="join", value=ast.Constant()), args=[items]):
            return items
    return None


def gathered(call: ast.Call, at: ast.stmt, module: Module) -> list[Piece]:
    """The pieces that the call of an error's class puts together, each once, in the order of their lines."""
    reader = _Gatherer(module)
    found: dict[ast.expr, Piece] = {}
    for argument in (*call.args, *(keyword.value for keyword in call.keywords)):
        for items in _collections(argument):
            name = next((node.id for node in ast.walk(items) if isinstance(node, ast.Name)), "")
            for piece in reader.items(items, at, depth=0):
                found.setdefault(piece.text, piece if piece.statement is at else replace(piece, gathered_in=name))
    return sorted(found.values(), key=lambda piece: (piece.text.lineno, piece.text.col_offset))


def _collections(argument: ast.expr) -> Iterator[ast.expr]:
    """What an argument of an error puts together: the items of each `join` in it, or itself if it may be a list."""
    if isinstance(argument, ast.Name | ast.Attribute | ast.ListComp | ast.List | ast.BinOp | ast.Call):
        yield argument
    for node in ast.walk(argument):
        if isinstance(node, ast.expr) and (items := _joined(node)) is not None and items is not argument:
            yield items


class _Gatherer:
    """Follows lists to the pieces that were put into them."""

    def __init__(self, module: Module) -> None:
        self._module = module
        self._seen: set[tuple[ast.AST, str]] = set()

    def items(self, node: ast.expr, at: ast.stmt, depth: int) -> Iterator[Piece]:
        """The pieces in a list that is read where the statement `at` stands."""
        if depth > _DEEPEST:
            return
        match node:
            case ast.List() | ast.Tuple() | ast.Set():
                for item in node.elts:
                    if isinstance(item, ast.Starred):
                        yield from self.items(item.value, at, depth + 1)
                    else:
                        yield Piece(at, item)
            case ast.ListComp() | ast.GeneratorExp() | ast.SetComp():
                yield Piece(at, node.elt, frozenset(_bound(node.generators)))
            case ast.IfExp():
                yield from self.items(node.body, at, depth)
                yield from self.items(node.orelse, at, depth)
            case ast.BinOp(op=ast.Add()):
                yield from self.items(node.left, at, depth)
                yield from self.items(node.right, at, depth)
            case ast.Call(args=[inner], keywords=[]) if ast.unparse(node.func) in _SAME_ITEMS:
                yield from self.items(inner, at, depth)
            case ast.Call():
                yield from self._returned(node, at, depth)
            case ast.Name(id=name):
                yield from self._local(name, at, depth)
            case ast.Attribute(value=ast.Name(id="self" | "cls"), attr=name):
                yield from self._of_self(f"self.{name}", at, depth)

    def _local(self, name: str, at: ast.stmt, depth: int) -> Iterator[Piece]:
        """What was put into a local name above a statement."""
        scope = self._module.places[at].scope
        if self._enter(scope, name):
            for statement in own_statements(scope.body, loops=True):
                if statement.lineno <= at.lineno:
                    yield from self._given(name, statement, depth)

    def _of_self(self, name: str, at: ast.stmt, depth: int) -> Iterator[Piece]:
        """What the methods of a class put into an attribute."""
        cls = self._module.class_of(self._module.places[at].scope)
        if cls is not None and self._enter(cls, name):
            for method in cls.body:
                if isinstance(method, FUNCTIONS):
                    for statement in own_statements(method.body, loops=True):
                        yield from self._given(name, statement, depth)

    def _enter(self, scope: Scope, name: str) -> bool:
        """Whether a name is asked for the first time: lists may be made of one another."""
        key = (scope, name)
        new = key not in self._seen
        self._seen.add(key)
        return new

    def _given(self, name: str, statement: ast.stmt, depth: int) -> Iterator[Piece]:
        """What one statement puts into a list."""
        match statement:
            case ast.Expr(value=ast.Call(func=ast.Attribute(value=owner, attr=method), args=[item])):
                if _is(owner, name) and method in ("append", "add"):
                    yield Piece(statement, item)
                elif _is(owner, name) and method in ("extend", "update"):
                    yield from self.items(item, statement, depth + 1)
            case ast.Expr(value=ast.Call(func=ast.Attribute(value=owner, attr="insert"), args=[_, item])):
                if _is(owner, name):
                    yield Piece(statement, item)
            case ast.Assign(targets=[ast.Tuple() as targets], value=ast.Tuple() as values):
                for target, value in zip(targets.elts, values.elts, strict=False):
                    if _is(target, name):
                        yield from self.items(value, statement, depth + 1)
            case (
                ast.Assign(targets=[target], value=ast.expr() as value)
                | ast.AnnAssign(target=target, value=ast.expr() as value)
            ):
                if _is(target, name):
                    yield from self.items(value, statement, depth + 1)
            case ast.AugAssign(target=target, op=ast.Add(), value=value) if _is(target, name):
                yield from self.items(value, statement, depth + 1)

    def _returned(self, call: ast.Call, at: ast.stmt, depth: int) -> Iterator[Piece]:
        """What a function of this module yields, or returns as a list."""
        function = self._callee(call, at)
        if function is None or not self._enter(function, "()"):
            return
        for statement in own_statements(function.body, loops=True):
            match statement:
                case ast.Expr(value=ast.Yield(value=ast.expr() as text)):
                    yield Piece(statement, text)
                case ast.Expr(value=ast.YieldFrom(value=more)):
                    yield from self.items(more, statement, depth + 1)
                case ast.Return(value=ast.expr() as value):
                    yield from self.items(value, statement, depth + 1)

    def _callee(self, call: ast.Call, at: ast.stmt) -> Function | None:
        match call.func:
            case ast.Name(id=name):
                return self._module.functions.get(name)
            case ast.Attribute(value=ast.Name(id="self" | "cls"), attr=name):
                cls = self._module.class_of(self._module.places[at].scope)
                return self._module.functions.get(f"{self._module.qualname(cls)}.{name}") if cls else None
        return None


def _is(target: ast.expr, name: str) -> bool:
    """Whether an expression is `name`, a local one or `self.NAME`."""
    match target:
        case ast.Name(id=own):
            return own == name
        case ast.Attribute(value=ast.Name(id="self" | "cls"), attr=own):
            return f"self.{own}" == name
    return False


def _bound(generators: list[ast.comprehension]) -> Iterator[str]:
    for generator in generators:
        yield from (node.id for node in ast.walk(generator.target) if isinstance(node, ast.Name))
