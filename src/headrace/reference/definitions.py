"""What a local name was set to, if there is only one answer. Knows no errors."""

from __future__ import annotations

import ast

from headrace.reference.atoms import names_read, with_names
from headrace.reference.changes import Changes, conflict
from headrace.reference.flow import FUNCTIONS, LOOPS, TRIES, Module, assigned_names, own_statements

_PURE_CALLS = {"len", "getattr", "int", "float", "str", "bool", "abs", "min", "max", "set", "tuple", "list", "sum"}
_DEEPEST = 4
_LARGEST = 80
"""In nodes; what is longer explains nothing."""


class Definitions:
    """Finds the only definition of a name that reaches a statement."""

    def __init__(self, module: Module, changes: Changes) -> None:
        self._module = module
        self._changes = changes

    def substituted(self, test: ast.expr, at: ast.AST, changed: set[str]) -> ast.expr | None:
        """`test` with local names in terms of what they were made from; None if nothing can be replaced.

        `changed` are the paths that get another value between `at` and the error.
        """
        current, replaced_any = test, False
        for _ in range(_DEEPEST):
            values = {}
            for name in names_read(current):
                value = self.only(name, at)
                if value is not None and conflict(value, changed) is None:
                    values[name] = value
            longer = with_names(current, values) if values else current
            if not values or _size(longer) > _LARGEST:
                break
            current, replaced_any = longer, True
        return current if replaced_any else None

    def only(self, name: str, at: ast.AST) -> ast.expr | None:
        """The pure expression that `name` was set to, if nothing else can have been and it would still give that."""
        passed: set[str] = set()
        for node, place in self._module.ancestors(at):
            for earlier in reversed(place.before):
                value = _value(earlier, name)
                if value is not None:
                    return value if is_pure(value) and conflict(value, {*passed, name}) is None else None
                changed = self._changes.of(earlier)
                if name in changed or _binds(earlier, name):
                    return None
                passed |= changed
            if self._binds_on_entry(node, place.parent, name):
                return None
            if isinstance(place.parent, LOOPS):
                passed |= self._changes.of_block(place.parent.body)
            if isinstance(place.parent, ast.ExceptHandler):
                attempt = self._module.places[place.parent].parent
                passed |= self._changes.of_block(getattr(attempt, "body", []))
            if isinstance(place.parent, (*FUNCTIONS, ast.ClassDef, ast.Module)):
                return None
        return None

    def _binds_on_entry(self, node: ast.AST, parent: ast.AST, name: str) -> bool:
        if isinstance(parent, LOOPS):
            return name in self._changes.of_block(parent.body) or name in set(assigned_names(parent))
        if isinstance(parent, ast.ExceptHandler):
            attempt = self._module.places[parent].parent
            return parent.name == name or name in self._changes.of_block(getattr(attempt, "body", []))
        if isinstance(parent, TRIES):
            return node not in parent.body and name in self._changes.of_block(parent.body)
        if isinstance(parent, ast.match_case):
            return any(name in set(assigned_names(case)) for case in [self._module.places[parent].parent])  # type: ignore[arg-type]
        if isinstance(parent, ast.stmt) and not isinstance(parent, (*FUNCTIONS, ast.ClassDef)):
            return name in set(assigned_names(parent))
        return False


def _size(expression: ast.expr) -> int:
    return sum(1 for _ in ast.walk(expression))


def _value(statement: ast.stmt, name: str) -> ast.expr | None:
    match statement:
        case ast.Assign(targets=[ast.Name(id=target)], value=value) if target == name:
            return value
        case ast.AnnAssign(target=ast.Name(id=target), value=ast.expr() as value) if target == name:
            return value
    return None


def _binds(statement: ast.stmt, name: str) -> bool:
    return any(name in set(assigned_names(inner)) for inner in own_statements([statement], loops=True))


def is_pure(value: ast.expr) -> bool:
    """Whether an expression can stand for a name: no call but of a few builtins, nothing that is made anew each time."""
    for node in ast.walk(value):
        if isinstance(node, ast.Call):
            if not (isinstance(node.func, ast.Name) and node.func.id in _PURE_CALLS):
                return False
        elif isinstance(node, ast.Await | ast.Yield | ast.YieldFrom | ast.NamedExpr | ast.Lambda):
            return False
        elif isinstance(node, ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp | ast.JoinedStr):
            return False
    return not isinstance(value, ast.List | ast.Dict | ast.Set)
