"""Which names and attributes a statement may give another value. Knows no tests and no errors."""

from __future__ import annotations

import ast
from collections.abc import Iterable

from headrace.reference.atoms import dotted, reads
from headrace.reference.flow import (
    FUNCTIONS,
    LOOPS,
    TRIES,
    WITHS,
    Module,
    assigned_names,
    nodes,
    own_expressions,
    own_statements,
    swallows,
    terminates,
)

MUTATORS = frozenset(
    [
        "add",
        "append",
        "appendleft",
        "clear",
        "discard",
        "extend",
        "insert",
        "pop",
        "popitem",
        "popleft",
        "remove",
        "reverse",
        "setdefault",
        "sort",
        "update",
    ]
)


class Changes:
    """Remembers what each statement of a module changes, as dotted paths: `x`, `self.size`."""

    def __init__(self, module: Module) -> None:
        self._module = module
        self._of: dict[ast.stmt, frozenset[str]] = {}
        self._by_itself: dict[ast.stmt, frozenset[str]] = {}

    def of(self, statement: ast.stmt) -> frozenset[str]:
        """What a statement and the blocks in it may change, if it does not leave the block that it stands in."""
        found = self._of.get(statement)
        if found is None:
            found = self._of[statement] = self.own(statement) | self._inner(statement)
        return found

    def of_block(self, block: Iterable[ast.stmt]) -> set[str]:
        """What any statement of a block may change."""
        changed: set[str] = set()
        for statement in block:
            changed |= self.of(statement)
        return changed

    def anywhere(self, block: Iterable[ast.stmt]) -> set[str]:
        """What a block may have changed when it is left in its middle, by an error or for the next turn of a loop."""
        return set().union(*(self.own(inner) for inner in own_statements(list(block), loops=True)))

    def _inner(self, statement: ast.stmt) -> set[str]:
        match statement:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                return set()
            case ast.If():
                blocks = [block for block in (statement.body, statement.orelse) if not terminates(block)]
            case ast.Match():
                blocks = [case.body for case in statement.cases if not terminates(case.body)]
            case _ if isinstance(statement, TRIES):
                blocks = [part.body for part in statement.handlers if not terminates(part.body)]
                blocks += [statement.orelse, statement.finalbody]
                return self.anywhere(statement.body).union(*(self.of_block(block) for block in blocks))
            case _ if isinstance(statement, LOOPS):
                return self.anywhere(statement.body) | self.of_block(statement.orelse)
            case _ if isinstance(statement, WITHS):
                return self.anywhere(statement.body) if swallows(statement) else self.of_block(statement.body)
            case _:
                return set()
        return set().union(*(self.of_block(block) for block in blocks))

    def own(self, statement: ast.stmt) -> frozenset[str]:
        """What a statement may change, without the blocks in it."""
        found = self._by_itself.get(statement)
        if found is None:
            found = self._by_itself[statement] = frozenset(self._own(statement))
        return found

    def _own(self, statement: ast.stmt) -> set[str]:
        changed = set(assigned_names(statement))
        changed |= {path for target in _targets(statement) if (path := _base(target)) is not None}
        if isinstance(statement, (*FUNCTIONS, ast.ClassDef)):
            return changed
        for expression in own_expressions(statement):
            for node in nodes(expression):
                if isinstance(node, ast.NamedExpr):
                    changed.add(node.target.id)
                elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                    changed |= self._by_call(node.func, statement)
        return changed

    def _by_call(self, func: ast.Attribute, statement: ast.stmt) -> set[str]:
        owner = _base(func.value)
        if owner is None:
            return set()
        if func.attr in MUTATORS:
            return {owner}
        place = self._module.places.get(statement)
        cls = self._module.class_of(place.scope) if owner == "self" and place else None
        method = self._module.functions.get(f"{self._module.qualname(cls)}.{func.attr}") if cls else None
        return self._attributes_set_by(method) if method is not None else set()

    def _attributes_set_by(self, method: ast.AST) -> set[str]:
        """Attributes of `self` that a method of the same class assigns itself."""
        assert isinstance(method, FUNCTIONS)
        return {
            path
            for statement in own_statements(method.body, loops=True)
            for target in _targets(statement)
            if (path := _base(target)) is not None and path.startswith("self.")
        }


def _targets(statement: ast.stmt) -> list[ast.expr]:
    match statement:
        case ast.Assign() | ast.Delete():
            return [part for target in statement.targets for part in _split(target)]
        case ast.AnnAssign() | ast.AugAssign() | ast.For() | ast.AsyncFor():
            return _split(statement.target)
        case ast.With() | ast.AsyncWith():
            return [part for item in statement.items if item.optional_vars for part in _split(item.optional_vars)]
    return []


def _split(target: ast.expr) -> list[ast.expr]:
    if isinstance(target, ast.Tuple | ast.List):
        return [part for element in target.elts for part in _split(element)]
    return [target.value if isinstance(target, ast.Starred) else target]


def _base(node: ast.AST) -> str | None:
    """The path of what is changed by an assignment to `node`: `x` for `x[0]` and `x[0].y`."""
    while isinstance(node, ast.Subscript) or (isinstance(node, ast.Attribute) and dotted(node) is None):
        node = node.value
    return dotted(node) if isinstance(node, ast.Name | ast.Attribute) else None


def conflict(expression: ast.expr, changed: Iterable[str]) -> str | None:
    """A path that `expression` depends on and that is among the changed ones; the first by name of several."""
    plain, called = reads(expression)
    roots = {path.partition(".")[0] for path in (*plain, *called)}
    for path in sorted(path for path in changed if path.partition(".")[0] in roots):
        below = path + "."
        if any(read == path or read.startswith(below) for read in plain):
            return path
        if any(path == owner or path.startswith(owner + ".") or owner.startswith(below) for owner in called):
            return path
    return None
