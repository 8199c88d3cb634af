"""Whether a statement can leave the block that it stands in, and what holds if it did not. Knows no messages."""

from __future__ import annotations

import ast
import builtins
import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol

from headrace.reference import atoms
from headrace.reference.changes import conflict
from headrace.reference.flow import (
    FUNCTIONS,
    LOOPS,
    NEVER_RETURNS,
    TRIES,
    WITHS,
    Loop,
    assigned_names,
    own_statements,
    swallows,
    terminates,
)
from headrace.reference.patterns import pattern_tests

_MOST_STATEMENTS = 3
"""A `try` block with more is told by its lines."""


class Conditions(Protocol):
    """What is asked of the guards: the tests on the way to a statement, and what a statement changes."""

    def tests_within(self, statement: ast.stmt, block_owner: ast.AST) -> list[ast.expr] | None: ...

    def changes_of(self, statement: ast.stmt) -> frozenset[str]: ...


@dataclass(frozen=True, slots=True)
class Stay:
    """One thing that holds because a statement did not leave."""

    test: ast.expr | None
    """None if `code` is no expression."""
    line: int
    dispatch: bool
    """It would have returned or gone on, not raised."""
    code: str = ""


_LEAVE_LOOPS = (ast.Return, ast.Raise, ast.Assert)


def leaves(block: Iterable[ast.stmt]) -> Iterator[ast.stmt]:
    """The statements of a block that leave it (an `assert`: may leave it), wherever they stand in it."""
    for statement in block:
        if isinstance(statement, LOOPS):
            inner = own_statements(statement.body, loops=True)
            yield from (leaf for leaf in inner if isinstance(leaf, _LEAVE_LOOPS) or _ends_program(leaf))
            yield from leaves(statement.orelse)
        elif isinstance(statement, (*FUNCTIONS, ast.ClassDef)):
            continue
        elif isinstance(statement, (*_LEAVE_LOOPS, ast.Continue, ast.Break)) or _ends_program(statement):
            yield statement
        else:
            for name in ("body", "orelse", "finalbody"):
                yield from leaves(getattr(statement, name, None) or [])
            for part in (*getattr(statement, "handlers", ()), *getattr(statement, "cases", ())):
                yield from leaves(part.body)


def _ends_program(statement: ast.stmt) -> bool:
    return (
        isinstance(statement, ast.Expr)
        and isinstance(statement.value, ast.Call)
        and ast.unparse(statement.value.func) in NEVER_RETURNS
    )


def _is_dispatch(block: Iterable[ast.stmt]) -> bool:
    return any(isinstance(leaf, ast.Return | ast.Continue | ast.Break) for leaf in leaves(block))


def stays(statement: ast.stmt, guards: Conditions) -> list[Stay] | None:
    """What holds after a statement that did not leave its block; None if that cannot be told."""
    if isinstance(statement, ast.Assert):
        return [Stay(statement.test, statement.lineno, dispatch=False)]
    if not any(leaves([statement])):
        return []
    if isinstance(statement, ast.If):
        return _stays_if(statement, guards)
    if isinstance(statement, WITHS):
        return None if swallows(statement) else _stays_block(statement.body, guards)
    if isinstance(statement, TRIES):
        return _stays_try(statement)
    if isinstance(statement, ast.For | ast.AsyncFor):
        return _stays_for(statement, guards)
    if isinstance(statement, ast.Match):
        return _stays_match(statement)
    return None


def _stays_if(statement: ast.If, guards: Conditions) -> list[Stay] | None:
    result: list[Stay] = []
    for test, block, other in (
        (statement.test, statement.body, statement.orelse),
        (atoms.negated(statement.test), statement.orelse, statement.body),
    ):
        if not any(leaves(block)):
            continue
        dispatch = _is_dispatch(block)
        if terminates(block):
            result.append(Stay(atoms.negated(test), statement.lineno, dispatch))
            continue
        inner = _stays_block(block, guards)
        if inner is None or any(stay.test is None for stay in inner):
            return None
        tests = [stay.test for stay in inner if stay.test is not None]
        if terminates(other):
            result += inner
        elif tests:
            # It left if the outer test and one of the inner ones held, so that none of both did.
            left = [atoms.negated(inner_test) for inner_test in tests]
            some = left[0] if len(left) == 1 else ast.BoolOp(ast.Or(), left)
            result.append(Stay(atoms.negated(ast.BoolOp(ast.And(), [test, some])), statement.lineno, dispatch))
    return result


def _stays_block(block: list[ast.stmt], guards: Conditions) -> list[Stay] | None:
    """The same for a block; None if a test in it reads what the block changes."""
    result: list[Stay] = []
    changed: set[str] = set()
    for statement in block:
        found = stays(statement, guards)
        if found is None:
            return None
        if any(stay.test is not None and conflict(stay.test, changed) for stay in found):
            return None
        result += found
        changed |= guards.changes_of(statement)
    if any(stay.test is not None and conflict(stay.test, changed) for stay in result):
        return None
    return result


def _stays_try(statement: ast.AST) -> list[Stay] | None:
    assert isinstance(statement, TRIES)
    if statement.finalbody and any(leaves(statement.finalbody)):
        return None
    staying = [handler for handler in statement.handlers if not terminates(handler.body)]
    if any(any(leaves(handler.body)) for handler in staying):
        return None
    if terminates([*statement.body, *statement.orelse]):
        if len(staying) != 1:
            return None
        dispatch = _is_dispatch([*statement.body, *statement.orelse])
        return [Stay(None, statement.lineno, dispatch, handled(statement, staying[0]))]
    if any(leaves([*statement.body, *statement.orelse])):
        return None
    result = []
    for handler in statement.handlers:
        if not terminates(handler.body):
            continue
        if any(above in staying for above in _handlers_above(statement, handler)):
            # The error may have been raised, and been caught above.
            return None
        code = handled(statement, handler, negative=True)
        result.append(Stay(None, handler.lineno, _is_dispatch(handler.body), code))
    return result


def _stays_for(statement: ast.For | ast.AsyncFor, guards: Conditions) -> list[Stay] | None:
    if statement.orelse or any(isinstance(leaf, ast.Break) for leaf in own_statements(statement.body)):
        return None
    found = list(leaves([statement]))
    tests = [_none_fits(statement, leaf, guards) for leaf in found]
    if any(test is None for test in tests):
        return None
    return [
        Stay(test, leaf.lineno, isinstance(leaf, ast.Return)) for leaf, test in zip(found, tests, strict=True) if test
    ]


def _none_fits(loop: ast.For | ast.AsyncFor, leaf: ast.stmt, guards: Conditions) -> ast.expr | None:
    """`not any(...)` over the turns of a loop for the tests that lead to a statement in it."""
    tests = guards.tests_within(leaf, loop)
    if not tests or any(conflict(test, carried_over(loop, guards)) for test in tests):
        return None
    # Names that each turn computes have no meaning outside of the loop.
    own = set().union(*(guards.changes_of(inner) for inner in loop.body)) - set(assigned_names(loop))
    if any(conflict(test, own) for test in tests):
        return None
    return atoms.none_of(atoms.all_of(tests), loop.target, loop.iter)


def _stays_match(statement: ast.Match) -> list[Stay] | None:
    result = []
    passed: list[ast.expr] = []
    for case in statement.cases:
        tests = pattern_tests(statement.subject, case.pattern)
        if tests is None or set(assigned_names(statement)):
            return None
        matches = [*tests, *([case.guard] if case.guard is not None else [])]
        if any(leaves(case.body)):
            if not matches or not terminates(case.body):
                return None
            # Not reached either if a case above matched and went on.
            whole = atoms.negated(atoms.all_of([*passed, *matches]))
            result.append(Stay(whole, case.pattern.lineno, _is_dispatch(case.body)))
        elif matches:
            passed.append(atoms.negated(atoms.all_of(matches)))
    return result


# --- loops --------------------------------------------------------------------------------------------------------


def can_end_early(loop: Loop, site: ast.stmt) -> bool:
    """Whether an earlier turn can end the loop, other than at `site`."""
    if any(isinstance(leaf, ast.Break) for leaf in own_statements(loop.body)):
        return True
    return any(leaf is not site for leaf in leaves([loop]))


def carried_over(loop: Loop, guards: Conditions) -> set[str]:
    """What one turn of a loop leaves changed for the next, unless each turn sets it anew before it is read."""
    carried: set[str] = set()
    fresh: set[str] = set(assigned_names(loop))
    for statement in loop.body:
        changed = guards.changes_of(statement)
        if isinstance(statement, ast.Assign | ast.AnnAssign) and not _reads_itself(statement):
            fresh |= {path for path in changed if "." not in path and path not in carried}
        carried |= {path for path in changed if path not in fresh}
    return carried


def _reads_itself(statement: ast.Assign | ast.AnnAssign) -> bool:
    names = set(assigned_names(statement))
    return statement.value is not None and conflict(statement.value, names) is not None


def never_broken(loop: Loop, guards: Conditions) -> list[ast.expr] | None:
    """What holds in the `else` of a loop: that no turn reached a `break`, and none left the function."""
    if isinstance(loop, ast.While):
        return None
    breaks = [leaf for leaf in own_statements(loop.body) if isinstance(leaf, ast.Break)]
    others = [leaf for leaf in own_statements(loop.body, loops=True) if isinstance(leaf, _LEAVE_LOOPS)]
    if any(_ends_program(leaf) for leaf in own_statements(loop.body, loops=True)):
        return None
    tests = [_none_fits(loop, leaf, guards) for leaf in (*breaks, *others)]
    return None if not breaks or any(test is None for test in tests) else [test for test in tests if test]


# --- try ----------------------------------------------------------------------------------------------------------


def handled(attempt: ast.AST, handler: ast.ExceptHandler, *, negative: bool = False) -> str:
    """`int(x) raises ValueError`: what leads into a handler; `... but not UnicodeError` if one above takes that."""
    assert isinstance(attempt, TRIES)
    kind = ast.unparse(handler.type) if handler.type is not None else "any exception"
    above = [] if negative else [ast.unparse(other.type) for other in _handlers_above(attempt, handler) if other.type]
    body = attempt.body
    simple = len(body) <= _MOST_STATEMENTS and not any(hasattr(statement, "body") for statement in body)
    if simple:
        what = "; ".join(_essence(statement) for statement in body)
    else:
        what = f"the block of lines {body[0].lineno} to {body[-1].end_lineno}"
    but = f" but not {' or '.join(above)}" if above else ""
    return f"{what} {'does not raise' if negative else 'raises'} {kind}{but}"


def _handlers_above(attempt: ast.AST, handler: ast.ExceptHandler) -> list[ast.ExceptHandler]:
    """The handlers before one that could take an error which it would take, too."""
    assert isinstance(attempt, TRIES)
    before = attempt.handlers[: attempt.handlers.index(handler)]
    return [other for other in before if _may_share(other.type, handler.type)]


def _may_share(first: ast.expr | None, second: ast.expr | None) -> bool:
    """Whether one error can be of both types; only of Python's own classes it can be told that it cannot."""
    if first is None or second is None:
        return True
    pairs = itertools.product(_classes(first), _classes(second))
    return any(one is None or other is None or issubclass(one, other) or issubclass(other, one) for one, other in pairs)


def _classes(types: ast.expr) -> list[type | None]:
    parts = types.elts if isinstance(types, ast.Tuple) else [types]
    found = [getattr(builtins, part.id, None) if isinstance(part, ast.Name) else None for part in parts]
    return [each if isinstance(each, type) else None for each in found]


def _essence(statement: ast.stmt) -> str:
    match statement:
        case ast.Return(value=ast.expr() as value) | ast.Expr(value=value):
            return ast.unparse(value)
    return ast.unparse(statement)
