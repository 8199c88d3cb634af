"""Conditions as English, made from their code by fixed patterns: no word that is not in the source. Knows no files."""

from __future__ import annotations

import ast

from headrace.reference.records import Atom, Condition

_COMPARISONS: dict[type[ast.cmpop], str] = {
    ast.Eq: "is",
    ast.NotEq: "is not",
    ast.Lt: "is less than",
    ast.LtE: "is at most",
    ast.Gt: "is greater than",
    ast.GtE: "is at least",
    ast.Is: "is",
    ast.IsNot: "is not",
    ast.In: "is in",
    ast.NotIn: "is not in",
}


_RANGES = "for some `"


def condition_sentence(condition: Condition) -> str:
    """When the error is raised, in one sentence; checks that merely passed before are counted, not told."""
    reasons = [_reason(atom) for atom in condition.atoms if not atom.early_exit]
    earlier = sum(atom.early_exit for atom in condition.atoms)
    text = _when(reasons) if reasons else "Raised"
    if [atom.kind for atom in condition.atoms if not atom.early_exit] == ["always"]:
        text = "Raised whenever this line is reached"
    if earlier:
        text += f", and {'an earlier check' if earlier == 1 else f'each of {earlier} earlier checks'} did not end it"
    if not condition.complete and condition.incomplete:
        text += f". This is not the whole condition: {condition.incomplete}"
    return text + "."


def _reason(atom: Atom) -> str:
    """A phrase that keeps its meaning beside others: `either a or b`."""
    phrased = atom_phrase(atom)
    return (
        f"either {phrased}" if atom.kind not in ("handler", "exists", "always") and _is_choice(atom.code) else phrased
    )


def _is_choice(code: str) -> bool:
    try:
        body = ast.parse(code, mode="eval").body
    except SyntaxError:
        return False
    return isinstance(body, ast.BoolOp) and isinstance(body.op, ast.Or)


def _when(reasons: list[str]) -> str:
    """`Raised when, for some x in xs, a and b`: what ranges over something comes before what is said of it."""
    text = ""
    said: list[str] = []
    for reason in reasons:
        if not reason.startswith(_RANGES):
            said.append(reason)
            continue
        text += f"{' ' + _listed(said) + ' and' if said else ''}, {reason},"
        said = []
    return f"Raised when{text} {_listed(said) or 'this line is reached'}"


def _listed(reasons: list[str]) -> str:
    """With a comma before the last `and` where one of them is a choice."""
    if len(reasons) > 1 and any(reason.startswith("either ") for reason in reasons):
        return f"{', '.join(reasons[:-1])}, and {reasons[-1]}"
    return _joined(reasons)


def atom_phrase(atom: Atom, *, substituted: bool = False) -> str:
    """One atom as a phrase: "`a` is not a multiple of `b`"."""
    code = atom.substituted if substituted and atom.substituted else atom.code
    if atom.kind == "always":
        return "this line is reached"
    if code.startswith("for ") and atom.kind == "exists":
        target, _, iterable = code.removeprefix("for ").partition(" in ")
        return f"for some `{target}` in `{iterable}`"
    if atom.kind == "handler":
        what, verb, kinds = _handled(code)
        kinds, but, others = kinds.partition(" but not ")
        return f"`{what}` {verb} `{kinds}`" + (f"{but}`{others}`" if but else "")
    try:
        return phrase(ast.parse(code, mode="eval").body)
    except SyntaxError:
        return f"`{code}`"


def _handled(code: str) -> tuple[str, str, str]:
    for verb in (" does not raise ", " raises "):
        what, found, kinds = code.rpartition(verb)
        if found:
            return what, verb.strip(), kinds
    return code, "raises", "an error"


def phrase(test: ast.expr) -> str:
    """A test as a phrase."""
    match test:
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            return _denied(operand)
        case ast.BoolOp(op=op, values=values):
            return _joined([phrase(value) for value in values], "and" if isinstance(op, ast.And) else "or")
        case ast.Compare(left=left, ops=[op], comparators=[right]):
            return _compared(left, op, right)
        case ast.BinOp(op=ast.Mod(), left=left, right=right):
            return f"{_code(left)} is not a multiple of {_code(right)}"
        case ast.Call(func=ast.Name(id="isinstance"), args=[value, kinds]):
            return f"{_code(value)} is {_kinds(kinds)}"
        case ast.Call(func=ast.Name(id="callable"), args=[value]):
            return f"{_code(value)} is callable"
        case ast.Call(func=ast.Name(id="hasattr"), args=[value, ast.Constant(value=str(name))]):
            return f"{_code(value)} has an attribute `{name}`"
        case ast.Call(func=ast.Name(id="any"), args=[ast.GeneratorExp(generators=[loop], elt=element)]) if not loop.ifs:
            return f"for some {_code(loop.target)} in {_code(loop.iter)}: {phrase(element)}"
        case ast.Call(func=ast.Name(id="all"), args=[ast.GeneratorExp(generators=[loop], elt=element)]) if not loop.ifs:
            return f"for every {_code(loop.target)} in {_code(loop.iter)}: {phrase(element)}"
        case ast.Name() | ast.Attribute() | ast.Subscript():
            return f"{_code(test)} is set"
    return f"{_code(test)} holds"


def _denied(test: ast.expr) -> str:
    match test:
        case ast.Call(func=ast.Name(id="isinstance"), args=[value, kinds]):
            return f"{_code(value)} is not {_kinds(kinds)}"
        case ast.Call(func=ast.Name(id="callable"), args=[value]):
            return f"{_code(value)} is not callable"
        case ast.Call(func=ast.Name(id="hasattr"), args=[value, ast.Constant(value=str(name))]):
            return f"{_code(value)} has no attribute `{name}`"
        case ast.Call(func=ast.Name(id="any"), args=[ast.GeneratorExp(generators=[loop], elt=element)]) if not loop.ifs:
            return f"for no {_code(loop.target)} in {_code(loop.iter)}: {phrase(element)}"
        case ast.Call(func=ast.Name(id="all"), args=[ast.GeneratorExp(generators=[loop], elt=element)]) if not loop.ifs:
            return f"not for every {_code(loop.target)} in {_code(loop.iter)}: {phrase(element)}"
        case ast.BinOp(op=ast.Mod(), left=left, right=right):
            return f"{_code(left)} is a multiple of {_code(right)}"
        case ast.Name() | ast.Attribute() | ast.Subscript():
            return f"{_code(test)} is empty, zero, False or None"
    return f"{_code(test)} does not hold"


def _compared(left: ast.expr, op: ast.cmpop, right: ast.expr) -> str:
    match left, op, right:
        case ast.BinOp(op=ast.Mod(), left=value, right=divisor), ast.NotEq() | ast.Gt(), ast.Constant(value=0):
            return f"{_code(value)} is not a multiple of {_code(divisor)}"
        case ast.BinOp(op=ast.Mod(), left=value, right=divisor), ast.Eq(), ast.Constant(value=0):
            return f"{_code(value)} is a multiple of {_code(divisor)}"
        case ast.Call(func=ast.Name(id="len"), args=[value]), ast.Eq(), ast.Constant(value=0):
            return f"{_code(value)} is empty"
        case _, ast.In() | ast.NotIn(), ast.Tuple() | ast.List() | ast.Set() if len(right.elts) > 1:
            listed = _joined([_code(element) for element in right.elts], "and" if isinstance(op, ast.NotIn) else "or")
            return f"{_code(left)} is {'none of' if isinstance(op, ast.NotIn) else 'one of'} {listed}"
    return f"{_code(left)} {_COMPARISONS[type(op)]} {_code(right)}"


def _kinds(kinds: ast.expr) -> str:
    if isinstance(kinds, ast.Tuple):
        return "a " + _joined([_code(kind) for kind in kinds.elts], "or")
    return f"a {_code(kinds)}"


def _joined(parts: list[str], word: str = "and") -> str:
    if len(parts) < 2:
        return "".join(parts)
    return f"{', '.join(parts[:-1])} {word} {parts[-1]}"


def _code(node: ast.expr) -> str:
    return f"`{ast.unparse(node)}`"
