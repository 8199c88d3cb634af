"""What to change so that a condition no longer holds, with values that were checked. Knows no page and no flag.

An error is raised when every atom of its condition holds, so each way to make one of them false is a fix. A value is
proposed only if the condition, evaluated with it, is false; what cannot be computed is said in words instead.
"""

from __future__ import annotations

import ast
import difflib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from headrace.reference.evaluate import Unknown, normal, parsed, truth, value
from headrace.reference.records import Atom, Condition

_MOST_FIXES = 4
_LARGEST_TO_DIVIDE = 10**7
_MOST_PROPOSED = 3


@dataclass(frozen=True, slots=True)
class Change:
    """One expression that has to become something else."""

    expr: str
    words: str
    """What it has to be, in words: `at most 4`."""
    value: Any = None
    """The value nearest to the one it has now; only if `has_value`."""
    has_value: bool = False
    others: tuple[Any, ...] = ()
    """More values that would do, nearest first."""


@dataclass(frozen=True, slots=True)
class Fix:
    """Changes that belong together; with all of them the error is not raised."""

    changes: tuple[Change, ...]
    strategy: str
    """divisor, multiple, bound, member, equal, set, unset, type."""
    atom: Atom
    """The test that then fails."""
    verified: bool = False
    """The condition was evaluated with the new values, and is false."""


def fixes(condition: Condition, values: Mapping[str, Any]) -> list[Fix]:
    """Ways not to meet the condition, those with checked values first; the innermost test counts as the reason."""
    found: list[Fix] = []
    atoms = [atom for atom in condition.atoms if not atom.early_exit and atom.kind not in ("handler", "always")]
    for distance, atom in enumerate(reversed(atoms)):
        tree = parsed(atom.code)
        if tree is None or (distance and any(fix.verified for fix in found)):
            continue
        constants = _made_of_constants(atom)
        ways = (way for way in _falsify(tree, values) if constants.isdisjoint(change.expr for change in way[1]))
        for strategy, changes in islice(ways, _MOST_FIXES):
            fix = _checked(Fix(tuple(changes), strategy, atom), values)
            if fix and fix not in found:
                found.append(fix)
    return sorted(found, key=lambda fix: not fix.verified)[:_MOST_FIXES]


def settable_names(code: str) -> list[str]:
    """The expressions in a condition that somebody could give another value."""
    tree = parsed(code)
    found: list[str] = []
    rest: list[ast.AST] = [] if tree is None else [tree]
    while rest:
        node = rest.pop(0)
        if isinstance(node, ast.Name | ast.Attribute | ast.Subscript):
            found += [ast.unparse(node)] if _settable(node) else []
        else:
            rest += ast.iter_child_nodes(node)
    return found


def _made_of_constants(atom: Atom) -> set[str]:
    """The local names of a test that stand for what the source says and nobody gives."""
    if atom.substituted is None:
        return set()
    written, inputs = set(settable_names(atom.code)), set(settable_names(atom.substituted))
    return written - inputs if inputs <= written else set()


def _checked(fix: Fix, values: Mapping[str, Any]) -> Fix | None:
    """The fix with `verified` if the values make its test false; None if they leave it true."""
    if not all(change.has_value for change in fix.changes):
        return fix
    new = dict(values) | {change.expr: change.value for change in fix.changes}
    holds = truth(fix.atom.code, new)
    if holds:
        return None
    return Fix(fix.changes, fix.strategy, fix.atom, verified=holds is False)


_Way = tuple[str, Sequence[Change]]
"""A strategy, and the changes that together make an expression false."""


def _falsify(node: ast.expr, values: Mapping[str, Any]) -> Iterator[_Way]:
    match node:
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            yield from _satisfy(operand, values)
        case ast.BoolOp(op=ast.And(), values=parts):
            for part in parts:
                yield from _falsify(part, values)
        case ast.BoolOp(op=ast.Or(), values=parts):
            yield from _together(
                [part for part in parts if truth(ast.unparse(part), values) is not False], values, _falsify
            )
        case ast.Compare(left=left, ops=[op], comparators=[right]):
            rule = _COMPARISONS.get(type(op))
            if rule:
                yield from rule(left, right, values)
        case ast.Compare():
            # `a < b < c` is false if one of its parts is.
            for part in _links(node):
                yield from _falsify(part, values)
        case ast.Call(func=ast.Name(id="isinstance"), args=[subject, kind]) if _changeable(subject):
            yield "type", [Change(_name(subject), f"anything but {_kinds(kind)}")]
        case ast.BinOp(op=ast.Mod(), left=left, right=right):
            yield from _divisible(left, right, values)
        case ast.Name() | ast.Attribute() | ast.Subscript() if _settable(node):
            yield "unset", [_switch(node, values, wanted=False)]
        case _:
            return


def _satisfy(node: ast.expr, values: Mapping[str, Any]) -> Iterator[_Way]:
    match node:
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            yield from _falsify(operand, values)
        case ast.BoolOp(op=ast.Or(), values=parts):
            for part in parts:
                yield from _satisfy(part, values)
        case ast.BoolOp(op=ast.And(), values=parts):
            yield from _together(
                [part for part in parts if truth(ast.unparse(part), values) is not True], values, _satisfy
            )
        case ast.Compare(left=left, ops=[op], comparators=[right]):
            opposite = _OPPOSITES.get(type(op))
            if opposite:
                yield from _falsify(ast.Compare(left, [opposite()], [right]), values)
        case ast.Compare():
            yield from _together(
                [p for p in _links(node) if truth(ast.unparse(p), values) is not True], values, _satisfy
            )
        case ast.Call(func=ast.Name(id="isinstance"), args=[subject, kind]) if _changeable(subject):
            yield "type", [Change(_name(subject), _kinds(kind))]
        case ast.Name() | ast.Attribute() | ast.Subscript() if _settable(node):
            yield "set", [_switch(node, values, wanted=True)]
        case _:
            return


def _together(
    parts: Sequence[ast.expr], values: Mapping[str, Any], way: Callable[[ast.expr, Mapping[str, Any]], Iterator[_Way]]
) -> Iterator[_Way]:
    """All parts have to change: the first way of each."""
    ways = [next(way(part, values), None) for part in parts]
    if ways and all(ways):
        known = [each for each in ways if each]
        yield known[-1][0], [change for _, changes in known for change in changes]


def _links(node: ast.Compare) -> list[ast.expr]:
    sides = [node.left, *node.comparators]
    return [ast.Compare(sides[number], [op], [sides[number + 1]]) for number, op in enumerate(node.ops)]


_OPPOSITES: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.GtE,
    ast.GtE: ast.Lt,
    ast.Gt: ast.LtE,
    ast.LtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
}


# --- one rule for each comparison: ways to make it false ------------------------------------------------------------


_LIBRARIES = {"torch", "np", "numpy", "os", "sys", "math", "self", "cls"}
_ENVIRONMENTS = {"env", "envs"}
"""Modules whose constants are what people set in the environment."""


def _settable(node: ast.expr) -> bool:
    """Whether somebody could give this another value: not a constant, a class's member, or what is computed."""
    if isinstance(node, ast.Name):
        return not node.id.strip("_")[:1].isupper() and node.id not in _LIBRARIES
    if not isinstance(node, ast.Attribute | ast.Subscript):
        return False
    root: ast.expr = node
    while isinstance(root, ast.Attribute | ast.Subscript):
        root = root.value
    environment = isinstance(root, ast.Name) and root.id in _ENVIRONMENTS
    constant = isinstance(node, ast.Attribute) and node.attr.isupper() and not environment
    library = isinstance(root, ast.Name) and (root.id in _LIBRARIES - {"self", "cls"} or root.id[:1].isupper())
    return isinstance(root, ast.Name) and not constant and not library


def _changeable(node: ast.expr) -> bool:
    """Whether somebody could give something in it another value; never of what only the source says."""
    if isinstance(node, ast.NamedExpr):
        return _changeable(node.value)
    if isinstance(node, ast.Name | ast.Attribute):
        return _settable(node)
    return not isinstance(node, ast.Constant | ast.JoinedStr) and bool(settable_names(ast.unparse(node)))


def _name(node: ast.expr) -> str:
    """How a change names what has to become something else."""
    return normal(ast.unparse(node.value if isinstance(node, ast.NamedExpr) else node))


def _known(node: ast.expr, values: Mapping[str, Any]) -> Any:
    """The value of a node, or Unknown itself: None is a value."""
    try:
        return value(ast.unparse(node), values)
    except Unknown:
        return Unknown


def _order(larger_is_wrong: bool, strict: bool) -> Callable[[ast.expr, ast.expr, Mapping[str, Any]], Iterator[_Way]]:
    """`left > right` (or with the signs of the arguments) has to become false: a bound for either side."""

    def ways(left: ast.expr, right: ast.expr, values: Mapping[str, Any]) -> Iterator[_Way]:
        yield from _bounded(left, right, values, below=larger_is_wrong, may_equal=strict)
        yield from _bounded(right, left, values, below=not larger_is_wrong, may_equal=strict)

    return ways


def _bounded(
    node: ast.expr, bound: ast.expr, values: Mapping[str, Any], *, below: bool, may_equal: bool
) -> Iterator[_Way]:
    if not _settable(node):
        return
    word = ("at most" if may_equal else "below") if below else ("at least" if may_equal else "above")
    limit = _known(bound, values)
    name = normal(ast.unparse(node))
    if isinstance(limit, bool) or not isinstance(limit, int | float) or not math.isfinite(limit):
        yield "bound", [Change(name, f"{word} {ast.unparse(bound)}")]
    elif may_equal:
        yield "bound", [Change(name, f"{word} {limit}", limit, has_value=True)]
    elif isinstance(limit, int) and not isinstance(_known(node, values), float):
        yield "bound", [Change(name, f"{word} {limit}", limit - 1 if below else limit + 1, has_value=True)]
    else:
        yield "bound", [Change(name, f"{word} {limit}")]


def _equal(left: ast.expr, right: ast.expr, values: Mapping[str, Any]) -> Iterator[_Way]:
    """`left != right` has to become false."""
    for remainder, zero in ((left, right), (right, left)):
        if isinstance(remainder, ast.BinOp) and isinstance(remainder.op, ast.Mod) and _known(zero, values) == 0:
            yield from _divisible(remainder.left, remainder.right, values)
            return
    for node, other in ((left, right), (right, left)):
        if _settable(node):
            wanted = _known(other, values)
            shown = ast.unparse(other) if wanted is Unknown else repr(wanted)
            change = Change(normal(ast.unparse(node)), f"equal to {shown}")
            yield "equal", [change if wanted is Unknown else Change(change.expr, change.words, wanted, has_value=True)]


def _different(left: ast.expr, right: ast.expr, values: Mapping[str, Any]) -> Iterator[_Way]:
    """`left == right` has to become false."""
    if isinstance(left, ast.BinOp) and isinstance(left.op, ast.Mod):
        return
    for node, other in ((left, right), (right, left)):
        if _settable(node):
            wanted = _known(other, values)
            if isinstance(wanted, bool):
                yield "unset", [Change(normal(ast.unparse(node)), str(not wanted), not wanted, has_value=True)]
            else:
                shown = ast.unparse(other) if wanted is Unknown else repr(wanted)
                yield "equal", [Change(normal(ast.unparse(node)), f"other than {shown}")]


def _divisible(whole: ast.expr, part: ast.expr, values: Mapping[str, Any]) -> Iterator[_Way]:
    """`whole % part` has to become 0: another divisor, or another multiple."""
    total, divisor = _known(whole, values), _known(part, values)
    if _settable(part):
        words = f"a divisor of {ast.unparse(whole) if total is Unknown else total}"
        name = normal(ast.unparse(part))
        near = list(_nearest_divisors(total, divisor))
        yield "divisor", [_nearest(name, words, near)]
    if _settable(whole):
        words = f"a multiple of {ast.unparse(part) if divisor is Unknown else divisor}"
        name = normal(ast.unparse(whole))
        near = list(_nearest_multiples(total, divisor))
        yield "multiple", [_nearest(name, words, near)]


def _nearest(name: str, words: str, near: Sequence[int]) -> Change:
    if not near:
        return Change(name, words)
    return Change(name, words, near[0], has_value=True, others=tuple(near[1:_MOST_PROPOSED]))


def _nearest_divisors(total: Any, now: Any) -> Iterator[int]:
    if not _is_int(total) or not 0 < total <= _LARGEST_TO_DIVIDE:
        return
    small = [each for each in range(1, math.isqrt(total) + 1) if total % each == 0]
    divisors = sorted({*small, *(total // each for each in small)})
    yield from sorted(divisors, key=lambda each: (abs(each - now), -each)) if _is_int(now) else reversed(divisors)


def _nearest_multiples(now: Any, divisor: Any) -> Iterator[int]:
    if not _is_int(divisor) or divisor <= 0 or not _is_int(now) or now < 0:
        return
    below = now // divisor * divisor
    yield from (each for each in (below, below + divisor) if each > 0)


def _is_int(each: Any) -> bool:
    return isinstance(each, int) and not isinstance(each, bool)


def _member(left: ast.expr, right: ast.expr, values: Mapping[str, Any]) -> Iterator[_Way]:
    """`left not in right` has to become false: the allowed value that looks most like the one given."""
    if not _changeable(left):
        if _settable(right):
            yield "member", [Change(_name(right), f"contain {ast.unparse(left)}")]
        return
    allowed = _known(right, values)
    name = _name(left)
    if isinstance(allowed, str) or not isinstance(allowed, Iterable):
        yield "member", [Change(name, f"one of {ast.unparse(right)}")]
        return
    items = sorted(allowed, key=str) if isinstance(allowed, set | frozenset) else list(allowed)
    words = f"one of {', '.join(map(str, items[:20]))}{', ...' if len(items) > 20 else ''}"
    near = list(_closest(_known(left, values), items))
    if near:
        yield "member", [Change(name, words, near[0], has_value=True, others=tuple(near[1:_MOST_PROPOSED]))]
    else:
        yield "member", [Change(name, words)]


def _closest(given: Any, items: Sequence[Any]) -> Iterator[Any]:
    if isinstance(given, int | float) and not isinstance(given, bool) and all(_is_int(item) for item in items):
        yield from sorted(items, key=lambda item: abs(item - given))
    elif isinstance(given, str):
        by_text = {str(item).lower(): item for item in items}
        yield from (by_text[text] for text in difflib.get_close_matches(given.lower(), by_text, n=3, cutoff=0.4))


def _no_member(left: ast.expr, right: ast.expr, values: Mapping[str, Any]) -> Iterator[_Way]:
    if _changeable(left):
        yield "member", [Change(_name(left), f"none of {ast.unparse(right)}")]
    elif _settable(right):
        yield "member", [Change(_name(right), f"contain no {ast.unparse(left)}")]


def _given(left: ast.expr, right: ast.expr, values: Mapping[str, Any]) -> Iterator[_Way]:
    """`left is right` has to become false."""
    if not _changeable(left):
        return
    if isinstance(right, ast.Constant) and isinstance(right.value, bool):
        yield "set", [Change(_name(left), str(not right.value), not right.value, has_value=True)]
    else:
        yield "set", [Change(_name(left), "given" if _is_none(right) else f"other than {ast.unparse(right)}")]


def _absent(left: ast.expr, right: ast.expr, values: Mapping[str, Any]) -> Iterator[_Way]:
    """`left is not right` has to become false."""
    if isinstance(right, ast.Constant) and _changeable(left):
        words = "left out" if right.value is None else str(right.value)
        yield "unset", [Change(_name(left), words, right.value, has_value=True)]


def _is_none(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is None


def _switch(node: ast.expr, values: Mapping[str, Any], *, wanted: bool) -> Change:
    """Something that counts as true or false."""
    name, now = normal(ast.unparse(node)), _known(node, values)
    if isinstance(now, bool):
        return Change(name, str(wanted), wanted, has_value=True)
    return Change(name, "given, and not empty or zero" if wanted else "left out, empty or off")


def _kinds(node: ast.expr) -> str:
    return " or ".join(ast.unparse(part) for part in (node.elts if isinstance(node, ast.Tuple) else [node]))


_COMPARISONS: dict[type[ast.cmpop], Callable[[ast.expr, ast.expr, Mapping[str, Any]], Iterator[_Way]]] = {
    ast.Gt: _order(larger_is_wrong=True, strict=True),
    ast.GtE: _order(larger_is_wrong=True, strict=False),
    ast.Lt: _order(larger_is_wrong=False, strict=True),
    ast.LtE: _order(larger_is_wrong=False, strict=False),
    ast.NotEq: _equal,
    ast.Eq: _different,
    ast.NotIn: _member,
    ast.In: _no_member,
    ast.Is: _given,
    ast.IsNot: _absent,
}
