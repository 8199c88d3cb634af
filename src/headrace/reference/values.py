"""What a value looks like when it is printed, as far as an expression tells. Knows no messages and no errors."""

from __future__ import annotations

import ast
import re

from headrace.reference.records import PlaceholderKind

_BY_CALL: dict[str, PlaceholderKind] = {
    "len": "int", "int": "int", "sum": "any", "ord": "int", "hash": "int", "id": "int",
    "float": "float", "time.time": "float", "time.perf_counter": "float", "time.monotonic": "float",
    "bool": "bool", "isinstance": "bool", "issubclass": "bool", "hasattr": "bool", "callable": "bool",
    "list": "list", "sorted": "list", "set": "list", "tuple": "list", "dict": "list", "frozenset": "list",
    "repr": "quoted", "ascii": "quoted", "type": "class",
}  # fmt: skip
_TEXT_METHODS = {"join", "lower", "upper", "strip", "title", "capitalize", "replace", "removeprefix", "removesuffix"}
_LIST_METHODS = {"keys", "values", "items"}
_EXCEPTION_NAME = re.compile(r"(?:e|ex|err|exc|error|exception|cause|(?:\w+_)(?:err|exc|error|exception))\Z")
_BY_ANNOTATION: dict[str, PlaceholderKind] = {
    "int": "int", "float": "float", "bool": "bool", "str": "str", "type": "class",
    "list": "list", "set": "list", "tuple": "list", "dict": "list", "frozenset": "list",
    "List": "list", "Set": "list", "Tuple": "list", "Dict": "list", "Sequence": "list", "Iterable": "list",
    "Mapping": "list", "Exception": "exception", "BaseException": "exception",
}  # fmt: skip


def is_exception_name(name: str) -> bool:
    """Whether people call a caught error so."""
    return _EXCEPTION_NAME.match(name) is not None


def kind_of(node: ast.expr) -> PlaceholderKind:
    """What the value of an expression looks like, printed."""
    match node:
        case ast.Constant(value=bool()):
            return "bool"
        case ast.Constant(value=int()):
            return "int"
        case ast.Constant(value=float()):
            return "float"
        case ast.Constant(value=str()) | ast.JoinedStr():
            return "str"
        case ast.List() | ast.Tuple() | ast.Set() | ast.Dict() | ast.ListComp() | ast.SetComp() | ast.DictComp():
            return "list"
        case ast.Compare() | ast.UnaryOp(op=ast.Not()):
            return "bool"
        case ast.BinOp(op=ast.FloorDiv() | ast.Mod(), left=left) if kind_of(left) == "int":
            return "int"
        case ast.Name(id=name):
            return "exception" if is_exception_name(name) else "any"
        case ast.Attribute(attr="__class__"):
            return "class"
        case ast.Attribute(attr="__name__" | "__qualname__" | "__module__"):
            return "str"
        case ast.Call(func=ast.Attribute(attr=name)) if name in _TEXT_METHODS:
            return "list" if name == "join" else "str"
        case ast.Call(func=ast.Attribute(attr=name)) if name in _LIST_METHODS:
            return "list"
        case ast.Call(func=func):
            if ast.unparse(func) in ("str", "format") and node.args:
                return kind_of(node.args[0])
            return _BY_CALL.get(ast.unparse(func), "any")
    return "any"


def kind_of_parameter(parameter: ast.arg) -> PlaceholderKind:
    """What a parameter looks like, printed."""
    if parameter.annotation is None:
        return "exception" if is_exception_name(parameter.arg) else "any"
    head = ast.unparse(parameter.annotation).strip("'\"").partition("[")[0].rpartition(".")[2]
    return _BY_ANNOTATION.get(head, "any")
