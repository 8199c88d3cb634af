"""Conditions with values put in: evaluated without running anything, and shown. Knows no catalogue and no message.

Only what is listed here is computed: constants, comparisons, arithmetic, `and`/`or`/`not`, `len`, `abs`, `min`, `max`,
membership and `isinstance` of plain types. Everything else is unknown, and what depends on it is too.
"""

from __future__ import annotations

import ast
import math
import operator
import re
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

Values = Mapping[str, Any]
"""Expressions, as `normal` writes them, with their values."""

LARGEST = 10**18
"""Numbers beyond are not computed with: a power or a product could take for ever."""


class Unknown(Exception):
    """The value depends on what is not given. Never leaves this room's callers."""


@lru_cache(maxsize=4096)
def parsed(code: str) -> ast.expr | None:
    """The expression, or None if it is none."""
    try:
        return ast.parse(code.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


@lru_cache(maxsize=4096)
def normal(code: str) -> str:
    """One way to write an expression, so that two of the same compare equal."""
    tree = parsed(code)
    return code.strip() if tree is None else ast.unparse(tree)


def truth(code: str, values: Values) -> bool | None:
    """Whether a condition holds with these values; None if they do not tell."""
    tree = parsed(code)
    if tree is None:
        return None
    try:
        return bool(_value(tree, values))
    except Unknown:
        return None


def value(code: str, values: Values) -> Any:
    """The value of an expression. Raises Unknown."""
    tree = parsed(code)
    if tree is None:
        raise Unknown
    return _value(tree, values)


def with_values(code: str, values: Values) -> str:
    """The code with each expression that has a value replaced by it: `8 > 4`."""
    tree = parsed(code)
    if tree is None:
        return code
    return ast.unparse(_PutIn(values).visit(ast.parse(code.strip(), mode="eval").body))


class _PutIn(ast.NodeTransformer):
    def __init__(self, values: Values) -> None:
        self._values = values

    def visit(self, node: ast.AST) -> ast.AST:
        if isinstance(node, ast.Name | ast.Attribute | ast.Call | ast.Subscript | ast.BinOp):
            key = ast.unparse(node)
            if key in self._values:
                return ast.Constant(self._values[key])
        visited: ast.AST = super().visit(node)
        return visited


_COMPARE: dict[type[ast.cmpop], Callable[[Any, Any], Any]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.In: lambda item, group: item in group,
    ast.NotIn: lambda item, group: item not in group,
    ast.Is: lambda left, right: left is right,
    ast.IsNot: lambda left, right: left is not right,
}
_ARITHMETIC: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
_CALLS: dict[str, Callable[..., Any]] = {
    "len": len,
    "abs": abs,
    "min": min,
    "max": max,
    "int": int,
    "float": float,
    "bool": bool,
    "any": any,
    "all": all,
    "set": set,
    "list": list,
    "tuple": tuple,
    "math.ceil": math.ceil,
    "math.floor": math.floor,
}
_TYPES: dict[str, type] = {each.__name__: each for each in (int, float, str, bool, list, tuple, dict, set, bytes)}


def _value(node: ast.expr, values: Values) -> Any:
    if not isinstance(node, ast.Constant):
        key = ast.unparse(node)
        if key in values:
            return values[key]
    compute = _NODES.get(type(node))
    if compute is None:
        raise Unknown
    try:
        return compute(node, values)
    except (TypeError, ValueError, ArithmeticError, IndexError, KeyError):
        raise Unknown from None


def _boolean(node: ast.BoolOp, values: Values) -> Any:
    """Also known if one part decides and the others are unknown."""
    deciding = isinstance(node.op, ast.Or)
    unknown = False
    for part in node.values:
        try:
            if bool(_value(part, values)) is deciding:
                return deciding
        except Unknown:
            unknown = True
    if unknown:
        raise Unknown
    return not deciding


def _unary(node: ast.UnaryOp, values: Values) -> Any:
    operand = _value(node.operand, values)
    if isinstance(node.op, ast.Not):
        return not operand
    if isinstance(node.op, ast.USub):
        return -operand
    if isinstance(node.op, ast.UAdd):
        return +operand
    raise Unknown


def _binary(node: ast.BinOp, values: Values) -> Any:
    compute = _ARITHMETIC.get(type(node.op))
    if compute is None:
        raise Unknown
    left, right = _value(node.left, values), _value(node.right, values)
    for each in (left, right):
        if not isinstance(each, int | float) or abs(each) > LARGEST:
            raise Unknown
    return compute(left, right)


def _compared(node: ast.Compare, values: Values) -> Any:
    left = _value(node.left, values)
    for operation, comparator in zip(node.ops, node.comparators, strict=True):
        right = _value(comparator, values)
        if not _COMPARE[type(operation)](left, right):
            return False
        left = right
    return True


def _call(node: ast.Call, values: Values) -> Any:
    name = ast.unparse(node.func)
    if node.keywords:
        raise Unknown
    if name == "isinstance" and len(node.args) == 2:
        return isinstance(_value(node.args[0], values), _types(node.args[1]))
    if name not in _CALLS:
        raise Unknown
    return _CALLS[name](*(_value(argument, values) for argument in node.args))


def _types(node: ast.expr) -> tuple[type, ...]:
    parts = node.elts if isinstance(node, ast.Tuple) else [node]
    names = [ast.unparse(part) for part in parts]
    if not all(name in _TYPES for name in names):
        raise Unknown
    return tuple(_TYPES[name] for name in names)


def _items(node: ast.Tuple | ast.List | ast.Set, values: Values) -> Any:
    items = [_value(item, values) for item in node.elts]
    return set(items) if isinstance(node, ast.Set) else items if isinstance(node, ast.List) else tuple(items)


def _choice(node: ast.IfExp, values: Values) -> Any:
    return _value(node.body if _value(node.test, values) else node.orelse, values)


_NODES: dict[type[ast.expr], Callable[[Any, Values], Any]] = {
    ast.Constant: lambda node, values: node.value,
    ast.BoolOp: _boolean,
    ast.UnaryOp: _unary,
    ast.BinOp: _binary,
    ast.Compare: _compared,
    ast.Call: _call,
    ast.Tuple: _items,
    ast.List: _items,
    ast.Set: _items,
    ast.IfExp: _choice,
}


# --- values as messages print them ----------------------------------------------------------------------------------

_INTEGER = re.compile(r"[-+]?\d{1,18}")
_NUMBER = re.compile(r"[-+]?(?:\d++\.?\d*+|\.\d++)(?:[eE][-+]?\d{1,3})?")
_WITH_COMMAS = re.compile(r"[-+]?\d{1,3}(?:,\d{3})++")
_LONGEST_LITERAL = 4_000


def read_value(text: str) -> Any:
    """A value as a message prints it: a number, a literal, or the text as it is."""
    text = text.strip()
    if text in ("None", "True", "False"):
        return {"None": None, "True": True, "False": False}[text]
    if _INTEGER.fullmatch(text) or _WITH_COMMAS.fullmatch(text):
        return int(text.replace(",", ""))
    if _NUMBER.fullmatch(text):
        return float(text)
    if len(text) <= _LONGEST_LITERAL and text[:1] in "'\"[({" and text[-1:] in "'\"])}":
        try:
            return ast.literal_eval(text)
        except (ValueError, SyntaxError, RecursionError, MemoryError, TypeError):
            return _bare_items(text)
    return text


def _bare_items(text: str) -> Any:
    """`{ auto, half }`, whose items have no quotes, is a list too."""
    if text[:1] in "[({" and text[-1:] in "])}" and "," in text and not re.search(r"[=:()\[\]{}]", text[1:-1]):
        return [item.strip().strip("'\"") for item in text[1:-1].split(",") if item.strip()]
    return text
