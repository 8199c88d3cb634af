"""Tests taken apart into atoms, negated and sorted by kind. Knows expressions, no statements."""

from __future__ import annotations

import ast
import copy
import functools
from collections.abc import Iterator, Mapping

from headrace.reference.flow import nodes

_INVERSE: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Lt: ast.GtE,
    ast.GtE: ast.Lt,
    ast.Gt: ast.LtE,
    ast.LtE: ast.Gt,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
_ORDERS = (ast.Lt, ast.LtE, ast.Gt, ast.GtE)
_READS_NO_DEEPER = {"len", "isinstance", "issubclass", "type", "id", "callable", "bool"}
"""What these tell of a value does not change with its attributes."""
_SETS = {"set", "frozenset", "keys", "intersection", "union", "difference"}


def conjuncts(test: ast.expr, polarity: bool) -> Iterator[ast.expr]:
    """The expressions that all hold if `test` is `polarity`; each has its polarity applied."""
    match test:
        case ast.UnaryOp(op=ast.Not(), operand=ast.Compare(ops=[op])) if polarity and isinstance(op, _ORDERS):
            # People write `not a <= b` of sets, where `a > b` would be another question.
            yield test
        case ast.UnaryOp(op=ast.Not()):
            yield from conjuncts(test.operand, not polarity)
        case ast.BoolOp(op=ast.And()) if polarity:
            for value in test.values:
                yield from conjuncts(value, True)
        case ast.BoolOp(op=ast.Or()) if not polarity:
            for value in test.values:
                yield from conjuncts(value, False)
        case ast.Call(func=ast.Name(id="bool"), args=[value], keywords=[]):
            yield from conjuncts(value, polarity)
        case ast.Constant():
            if bool(test.value) != polarity:
                yield ast.Constant(False)
        case _:
            yield test if polarity else negated(test)


def negated(test: ast.expr) -> ast.expr:
    """`not test`, as people would write it."""
    match test:
        case ast.UnaryOp(op=ast.Not()):
            return test.operand
        case ast.Compare(ops=[op]) if not (isinstance(op, _ORDERS) and _compares_sets(test)):
            return ast.Compare(test.left, [_INVERSE[type(op)]()], test.comparators)
        case ast.BoolOp():
            other = ast.Or() if isinstance(test.op, ast.And) else ast.And()
            return ast.BoolOp(other, [negated(value) for value in test.values])
    return ast.UnaryOp(ast.Not(), test)


def _compares_sets(test: ast.Compare) -> bool:
    """Two sets can be in neither order, so that the negation of one is not the other."""
    for node in (test.left, *test.comparators):
        if isinstance(node, ast.Set | ast.SetComp):
            return True
        if isinstance(node, ast.Call):
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if name in _SETS:
                return True
    return False


def all_of(tests: list[ast.expr]) -> ast.expr:
    """The tests joined with `and`."""
    return tests[0] if len(tests) == 1 else ast.BoolOp(ast.And(), tests)


def none_of(condition: ast.expr, target: ast.expr, iterable: ast.expr) -> ast.expr:
    """`not any(condition for target in iterable)`."""
    generator = ast.GeneratorExp(condition, [ast.comprehension(target, iterable, [], 0)])
    return ast.UnaryOp(ast.Not(), ast.Call(ast.Name("any", ast.Load()), [generator], []))


def kind_of(test: ast.expr) -> str:
    """What an atom tests: modulo, order, equality, membership, none, truth, isinstance, exists or other."""
    match test:
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            kind = kind_of(operand)
            return kind if kind in ("isinstance", "exists", "truth", "order") else "other"
        case ast.BinOp(op=ast.Mod()):
            return "modulo"
        case ast.Compare(ops=[op], left=left, comparators=[right]):
            if isinstance(op, ast.Is | ast.IsNot):
                return "none" if isinstance(right, ast.Constant) and right.value is None else "equality"
            if isinstance(op, ast.In | ast.NotIn):
                return "membership"
            if any(isinstance(side, ast.BinOp) and isinstance(side.op, ast.Mod) for side in (left, right)):
                return "modulo"
            return "equality" if isinstance(op, ast.Eq | ast.NotEq) else "order"
        case ast.Compare(ops=ops) if all(isinstance(op, _ORDERS) for op in ops):
            return "order"
        case ast.Call(func=ast.Name(id="isinstance" | "issubclass")):
            return "isinstance"
        case ast.Call(func=ast.Name(id="any" | "all")):
            return "exists"
        case ast.Name() | ast.Attribute() | ast.Subscript():
            return "truth"
    return "other"


@functools.lru_cache(maxsize=8192)
def reads(expression: ast.expr) -> tuple[frozenset[str], frozenset[str]]:
    """Dotted paths that an expression reads, and those that calls look into (whatever is below them may matter)."""
    plain: set[str] = set()
    called: set[str] = set()
    bound = {
        node.id
        for part in nodes(expression)
        if isinstance(part, ast.comprehension)
        for node in ast.walk(part.target)
        if isinstance(node, ast.Name)
    }
    todo: list[ast.AST] = [expression]
    while todo:
        node = todo.pop()
        path = dotted(node)
        if path is not None:
            plain.add(path)
            continue
        if isinstance(node, ast.Call):
            called |= {owner for part in _looked_into(node) if (owner := dotted(part)) is not None}
        todo += ast.iter_child_nodes(node)
    return frozenset(path for path in plain if path.partition(".")[0] not in bound), frozenset(called - bound)


def _looked_into(call: ast.Call) -> Iterator[ast.expr]:
    """The values whose attributes a call may read: what the method is of, and what it is given."""
    if isinstance(call.func, ast.Attribute):
        yield call.func.value
    if not (isinstance(call.func, ast.Name) and call.func.id in _READS_NO_DEEPER):
        yield from call.args
        yield from (keyword.value for keyword in call.keywords)


def dotted(node: ast.AST) -> str | None:
    """`self.config.size` of an attribute chain that begins with a name."""
    names = []
    while isinstance(node, ast.Attribute):
        names.append(node.attr)
        node = node.value
    if not isinstance(node, ast.Name):
        return None
    return ".".join([node.id, *reversed(names)])


def names_read(expression: ast.expr) -> set[str]:
    """The plain names that an expression reads from around it."""
    plain, called = reads(expression)
    return {path.partition(".")[0] for path in (*plain, *called)}


def with_names(expression: ast.expr, values: Mapping[str, ast.expr]) -> ast.expr:
    """A copy of `expression` with names exchanged for expressions."""
    return _Exchange(values).visit(copy.deepcopy(expression))  # type: ignore[no-any-return]


class _Exchange(ast.NodeTransformer):
    def __init__(self, values: Mapping[str, ast.expr]) -> None:
        self._values = values

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return self._values.get(node.id, node) if isinstance(node.ctx, ast.Load) else node
