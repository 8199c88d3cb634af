"""What a message shows of the values in it, and what they say to a condition. Knows no catalogue and no ranking."""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from headrace.reference import evaluate
from headrace.reference.inversion import Fit
from headrace.reference.records import Atom, Placeholder, Site, Template


@dataclass(frozen=True, slots=True)
class Check:
    """One test of a condition, with the values of the message put in."""

    atom: Atom
    code: str
    """As shown: `8 > 4`; the source's words where no value is known."""
    holds: bool | None
    """None if the message does not tell all values."""


def captured_values(template: Template, fitting: Fit) -> dict[str, object]:
    """Each expression of a template with the value that the message shows for it, and what that tells of others."""
    placeholders = [piece for piece in template if isinstance(piece, Placeholder)]
    values: dict[str, object] = {}
    for placeholder, text in zip(placeholders, fitting.captured, strict=True):
        if text:
            expr, value = evaluate.normal(placeholder.expr), evaluate.read_value(text)
            values.setdefault(expr, value)
            for inner, meant in _inside(expr, value):
                values.setdefault(inner, meant)
    return values


_SHOWN_AS_IT_IS = {"str", "repr", "list", "sorted", "tuple", "set", "dict"}


def _inside(expr: str, value: Any) -> list[tuple[str, Any]]:
    """What is shown through a function that only writes it: `', '.join(sorted(names))` tells `names`."""
    node, found = evaluate.parsed(expr), []
    while isinstance(node, ast.Call) and len(node.args) == 1 and not node.keywords:
        if isinstance(node.func, ast.Attribute) and node.func.attr == "join":
            value = [item.strip().strip("'\"") for item in str(value).split(",")]
        elif ast.unparse(node.func) not in _SHOWN_AS_IT_IS:
            break
        node = node.args[0]
        found.append((ast.unparse(node), value))
    return found


_SCALING = re.compile(r"format|human|round|to_|as_|gib|gb|mib|mb|bytes", re.IGNORECASE)


def scaled_values(values: Mapping[str, object]) -> list[dict[str, object]]:
    """Values that are shown in another unit, together with those in the same one: their order is that of the values.

    `format_gib(free)` is 31.4 and `format_gib(wanted)` is 45.0, so `free < wanted`. They are good for nothing else.
    """
    groups: dict[str, dict[str, object]] = {}
    for expr, value in values.items():
        node = evaluate.parsed(expr)
        if isinstance(node, ast.Call) and len(node.args) == 1 and _SCALING.search(ast.unparse(node.func)):
            groups.setdefault(ast.unparse(node.func), {})[ast.unparse(node.args[0])] = value
        elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div):
            groups.setdefault("/" + ast.unparse(node.right), {})[ast.unparse(node.left)] = value
    return [group for group in groups.values() if len(group) > 1]


def checked(site: Site, values: Mapping[str, object], scaled: Sequence[Mapping[str, object]] = ()) -> tuple[Check, ...]:
    """The site's condition with values put in."""
    return tuple(_check(atom, values, scaled) for atom in site.condition.atoms)


def _check(atom: Atom, values: Mapping[str, object], scaled: Sequence[Mapping[str, object]]) -> Check:
    if not values:
        return Check(atom, atom.code, None)
    codes = [code for code in (atom.code, atom.substituted) if code]
    tries = [(code, values) for code in codes]
    tries += [(code, group) for code in codes for group in scaled if _is_order(code)]
    for code, known in tries:
        if (holds := evaluate.truth(code, known)) is not None:
            return Check(atom, evaluate.with_values(code, known), holds)
    return Check(atom, evaluate.with_values(atom.code, values), None)


def _is_order(code: str) -> bool:
    node = evaluate.parsed(code)
    orders = (ast.Lt, ast.LtE, ast.Gt, ast.GtE)
    return isinstance(node, ast.Compare) and len(node.ops) == 1 and isinstance(node.ops[0], orders)
