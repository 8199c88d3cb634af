"""What a test demands of a number, and what a message says that it demands. Knows no errors.

Only plain cases: one name against one whole number, and a message that states one bound about that very name.
"""

from __future__ import annotations

import ast
import re

from headrace.reference.flow import Module

_DEMANDED_UNLESS: dict[type[ast.cmpop], str] = {ast.Lt: ">=", ast.LtE: ">", ast.Gt: "<=", ast.GtE: "<"}
"""An error that is raised if `x < n` demands `x >= n`."""
_PHRASES = (
    (">=", r">=|(?:greater|larger|more) than or equal to|at least"),
    ("<=", r"<=|(?:less|smaller|lower) than or equal to|at most|no (?:more|greater|larger) than"),
    (">", r">|(?:strictly )?(?:greater|larger|more|bigger|higher) than"),
    ("<", r"<|(?:strictly )?(?:less|smaller|fewer|lower) than"),
)
_NUMBER = r"\s*`?(?P<number>-?\d+)`?(?!\w|\.\d|\s*[-+*/%]|\s+(?:or|and|if|unless|when|for)\b)"


def only_test(statement: ast.stmt, module: Module) -> ast.Compare | None:
    """The comparison that a statement stands under, if that is one `if` with one comparison and a whole number."""
    place = module.places[statement]
    parent = place.parent
    if not isinstance(parent, ast.If) or place.field != "body" or place.index:
        return None
    test = parent.test
    if isinstance(test, ast.Compare) and len(test.ops) == 1 and type(test.ops[0]) in _DEMANDED_UNLESS:
        return test if isinstance(_number(test.comparators[0]), int) else None
    return None


def _number(node: ast.expr) -> int | None:
    match node:
        case ast.Constant(value=int() as number) if not isinstance(number, bool):
            return number
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() as number)):
            return -number
    return None


def contradiction(test: ast.Compare, text: str) -> str | None:
    """What the text says and what the test demands, if these are two bounds on the same name that differ."""
    name = _last(test.left)
    number = _number(test.comparators[0])
    if name is None or number is None:
        return None
    demanded = _DEMANDED_UNLESS[type(test.ops[0])], number
    said = _said(name, text)
    if said is None or _as_least(said) == _as_least(demanded) or said[0][0] != demanded[0][0]:
        return None
    return f"the text asks for {name} {said[0]} {said[1]}, and the test for {name} {demanded[0]} {demanded[1]}"


def _last(node: ast.expr) -> str | None:
    match node:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name
    return None


def _said(name: str, text: str) -> tuple[str, int] | None:
    """The only bound that a text states about a name, right behind it."""
    found: list[tuple[str, int]] = []
    subject = (
        rf"(?<![\w.]){re.escape(name)}[`'\"]?\s+(?:must|should|has to|needs to) be\s+(?:an? (?:integer|int|number) )?"
    )
    rest = text
    for operator, phrase in _PHRASES:
        for match in re.finditer(rf"{subject}(?:{phrase}){_NUMBER}", rest, re.IGNORECASE):
            found.append((operator, int(match["number"])))
        rest = re.sub(rf"{subject}(?:{phrase}){_NUMBER}", "", rest, flags=re.IGNORECASE)
    return found[0] if len(found) == 1 and not re.search(r"\bor\b|\bunless\b|\band\b", text) else None


def _as_least(bound: tuple[str, int]) -> tuple[str, int]:
    """Bounds of whole numbers with the edge included, so that `> 0` and `>= 1` are one."""
    operator, number = bound
    return {">": (">=", number + 1), "<": ("<=", number - 1)}.get(operator, (operator, number))
