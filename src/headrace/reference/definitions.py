"""What a local name was set to, if there is only one answer. Knows no errors."""

from __future__ import annotations

import ast

from headrace.reference.atoms import names_read, with_names
from headrace.reference.changes import Changes, conflict
from headrace.reference.flow import FUNCTIONS, LOOPS, TRIES, Module, Place, Scope, nodes, own_statements

_PURE_CALLS = {"len", "getattr", "int", "float", "str", "bool", "abs", "min", "max", "set", "tuple", "list", "sum"}
_DEEPEST = 4
_LARGEST = 80
"""In nodes; what is longer explains nothing."""


class Definitions:
    """Finds the only definition of a name that reaches a statement."""

    def __init__(self, module: Module, changes: Changes) -> None:
        self._module = module
        self._changes = changes
        self._bound: dict[Scope, set[str]] = {}
        self._found: dict[tuple[str, ast.AST], ast.expr | None] = {}

    def substituted(self, test: ast.expr, at: ast.AST, changed: frozenset[str]) -> ast.expr | None:
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
        key = (name, at)
        if key not in self._found:
            self._found[key] = self._only(name, at) if name in self._names_bound(at) else None
        return self._found[key]

    def _names_bound(self, at: ast.AST) -> set[str]:
        """The names that the scope around a statement binds; parameters are not among them."""
        scope = self._module.places[at].scope
        if scope not in self._bound:
            inside = own_statements(scope.body, loops=True)
            self._bound[scope] = set().union(*(self._changes.own(inner) for inner in inside))
        return self._bound[scope]

    def _only(self, name: str, at: ast.AST) -> ast.expr | None:
        passed: set[str] = set()
        for node, place in self._module.ancestors(at):
            for earlier in reversed(place.before):
                value = _value(earlier, name)
                if value is not None:
                    return value if is_pure(value) and conflict(value, {*passed, name}) is None else None
                changed = self._changes.of(earlier)
                if name in changed:
                    return None
                passed |= changed
            if self._binds_on_entry(node, place.parent, name):
                return None
            if isinstance(place.parent, (*FUNCTIONS, ast.ClassDef, ast.Module)):
                return None
            passed |= self._passed_on_entry(place)
        return None

    def _passed_on_entry(self, place: Place) -> set[str]:
        """What may have changed between the statement around a block and the block."""
        parent = place.parent
        changed = set(self._changes.own(parent)) if isinstance(parent, ast.stmt) else set()
        if isinstance(parent, LOOPS):
            changed |= self._changes.anywhere(parent.body)
        elif isinstance(parent, ast.ExceptHandler):
            changed |= self._changes.anywhere(getattr(self._module.places[parent].parent, "body", []))
        elif isinstance(parent, TRIES) and place.field != "body":
            changed |= self._changes.anywhere(parent.body)
        return changed

    def _binds_on_entry(self, node: ast.AST, parent: ast.AST, name: str) -> bool:
        if isinstance(parent, LOOPS):
            return name in self._changes.anywhere(parent.body) or name in self._changes.own(parent)
        if isinstance(parent, ast.ExceptHandler):
            attempt = self._module.places[parent].parent
            return parent.name == name or name in self._changes.anywhere(getattr(attempt, "body", []))
        if isinstance(parent, TRIES):
            return node not in parent.body and name in self._changes.anywhere(parent.body)
        if isinstance(parent, ast.match_case):
            return name in self._changes.own(self._module.places[parent].parent)  # type: ignore[arg-type]
        if isinstance(parent, ast.stmt) and not isinstance(parent, (*FUNCTIONS, ast.ClassDef)):
            return name in self._changes.own(parent)
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


_MADE_ANEW = (
    *(ast.Await, ast.Yield, ast.YieldFrom, ast.NamedExpr, ast.Lambda),
    *(ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp, ast.JoinedStr),
)


def is_pure(value: ast.expr) -> bool:
    """Whether an expression can stand for a name: no call but a few builtins, nothing made anew each time."""
    for node in nodes(value):
        if isinstance(node, ast.Call):
            if not (isinstance(node.func, ast.Name) and node.func.id in _PURE_CALLS):
                return False
        elif isinstance(node, _MADE_ANEW):
            return False
    return not isinstance(value, ast.List | ast.Dict | ast.Set)
