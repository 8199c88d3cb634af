"""Messages that are gathered in a list and joined when the error is raised. Knows no templates."""

from __future__ import annotations

import ast

from headrace.reference.flow import Module, own_statements


def accumulated(call: ast.Call, at: ast.stmt, module: Module) -> list[tuple[ast.stmt, ast.expr]]:
    """Statement and expression of each piece, if the call's message is nothing but a joined local list."""
    name = gathered_in(call)
    if name is None:
        return []
    scope = module.places[at].scope
    body = scope.body
    found: list[tuple[ast.stmt, ast.expr]] = []
    for statement in own_statements(body, loops=True):
        found += [(statement, piece) for piece in _pieces(statement, name) if statement.lineno <= at.lineno]
    return found


def gathered_in(call: ast.Call) -> str | None:
    """The local list that holds the pieces."""
    return _joined_name(call.args[0]) if len(call.args) == 1 else None


def _joined_name(message: ast.expr) -> str | None:
    """`parts` of `" ".join(parts)`, also inside of an f-string that adds nothing."""
    match message:
        case ast.JoinedStr(values=[ast.FormattedValue(value=value)]):
            return _joined_name(value)
        case ast.Call(func=ast.Attribute(attr="join", value=ast.Constant()), args=[ast.Name(id=name)]):
            return name
    return None


def _pieces(statement: ast.stmt, name: str) -> list[ast.expr]:
    match statement:
        case ast.Expr(value=ast.Call(func=ast.Attribute(value=ast.Name(id=owner), attr="append"), args=[piece])):
            return [piece] if owner == name else []
        case ast.Expr(
            value=ast.Call(func=ast.Attribute(value=ast.Name(id=owner), attr="extend"), args=[ast.List() as more])
        ):
            return list(more.elts) if owner == name else []
        case ast.Assign(targets=[ast.Name(id=owner)], value=ast.List() as more):
            return list(more.elts) if owner == name else []
        case ast.AugAssign(target=ast.Name(id=owner), value=ast.List() as more):
            return list(more.elts) if owner == name else []
    return []
