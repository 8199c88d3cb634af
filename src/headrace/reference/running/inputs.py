"""Values for what a condition reads, found by trying: first such that it holds, then such that one test fails.

Runs no function; expressions are evaluated as they stand, so this room is for the inside of the jail only.
"""

from __future__ import annotations

import ast
import builtins
import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from headrace.reference.running.leaves import Question, text_of
from headrace.reference.running.stubs import GUESSES, Raises, Stub, error_class
from headrace.reference.running.worlds import ABSENT, AUTO, MAPPING, Assignment, Kind, Marker, Path, Same, World, shown

_GENERIC: tuple[Any, ...] = (
    *(None, "x", 1, True, False, 0, 2, 3, -1, "", 0.5, 8, ["x"], [], [1], [1, 1], {"x": "x"}, {}, 64, 1.5, -0.5),
)
_SAMPLES: dict[str, tuple[Any, ...]] = {
    "str": ("x", ""),
    "int": (1, 0, 2),
    "bool": (True, False),
    "float": (0.5, 1.5),
    "list": (["x"], [], [1]),
    "dict": ({"x": "x"}, {}),
    "tuple": (("x",), ()),
    "set": ({"x"}, set()),
    "bytes": (b"x", b""),
    "Sequence": (["x"], []),
    "Mapping": ({"x": "x"}, {}),
}


@dataclass(slots=True)
class Search:
    """The values that can be tried, and how often an expression may be evaluated yet."""

    questions: Sequence[Question]
    constants: Mapping[str, Any]
    fields: Mapping[str, Any]
    domains: dict[Path, list[Any]]
    left: int = 2500

    def solutions(self, wanted: Sequence[tuple[Question, bool]], start: Assignment) -> Iterator[Assignment]:
        """Assignments that extend `start` and answer each question as wanted."""
        if not wanted:
            # What was chosen late may have changed what was asked early.
            if all(self.holds(question, start) for question in self.questions):
                yield dict(start)
            return
        (question, answer), rest = wanted[0], wanted[1:]
        for assignment in self._answers(question, answer, start):
            yield from self.solutions(rest, assignment)
            if self.left <= 0:
                return

    def _answers(self, question: Question, answer: bool, start: Assignment) -> Iterator[Assignment]:
        free = [leaf for leaf in question.leaves if leaf not in start]
        for combination in _combinations([self.domains[leaf] for leaf in free]):
            self.left -= 1
            if self.left <= 0:
                return
            assignment = start | dict(zip(free, combination, strict=True))
            if self.holds(question, assignment) is answer:
                yield assignment

    def holds(self, question: Question, assignment: Assignment) -> bool | None:
        """What a question comes to; None if it cannot be told without guessing."""
        before = GUESSES.count
        try:
            # The names go into the globals: what stands in a generator sees no other.
            world = World(assignment, self.constants, self.fields)
            result = bool(eval(question.compiled, {name: world.root(name) for name in question.names}))
        except Exception as error:
            if question.raises is None or GUESSES.count != before:
                return None
            return _is_a(error, question.raises)
        if GUESSES.count != before:
            return None
        return False if question.raises is not None else result


def _is_a(error: Exception, name: str) -> bool:
    return any(cls.__name__ == name.rpartition(".")[2] for cls in type(error).__mro__)


def _combinations(domains: list[list[Any]]) -> Iterator[tuple[Any, ...]]:
    """Choices of one value each: the first of all, then with one changed, with two, and of few with three."""
    first = tuple(domain[0] for domain in domains)
    yield first
    for count in range(1, min(3, len(domains)) + 1):
        most = {1: 60, 2: 16, 3: 7}[count]
        for places in itertools.combinations(range(len(domains)), count):
            choices = [range(1, min(most, len(domains[place]))) for place in places]
            for indexes in sorted(itertools.product(*choices), key=sum):
                values = list(first)
                for place, index in zip(places, indexes, strict=True):
                    values[place] = domains[place][index]
                yield tuple(values)


def domains(
    questions: Sequence[Question],
    fields: Mapping[str, Any],
    defaults: Mapping[str, Any],
    constants: Mapping[str, Any],
    annotations: Mapping[str, str],
) -> dict[Path, list[Any]]:
    """What to try for each leaf, the likeliest first: what it is said to be before anything else."""
    leaves = list(dict.fromkeys(leaf for question in questions for leaf in question.leaves))
    hints: dict[Path, list[Any]] = {leaf: [] for leaf in leaves}
    for question in questions:
        values, switches = _values_in(question.code, constants), _switches(question.code)
        for leaf in question.leaves:
            hints[leaf] += [*((True, False) if text_of(leaf) in switches else ()), *values]
            if question.raises is not None and leaf[-1] == ("call", None):
                hints[leaf].append(Raises(_error(question.raises)))
    found = {leaf: _domain(leaf, leaves, hints[leaf], fields, defaults) for leaf in leaves}
    return {leaf: _of_type_first(values, annotations.get(text_of(leaf), "")) for leaf, values in found.items()}


def _of_type_first(values: list[Any], annotation: str) -> list[Any]:
    names = {name.lower() for name in re.findall(r"\w+", annotation)}
    if not names & {name.lower() for name in _SAMPLES}:
        return values

    def is_other(value: Any) -> bool:
        return not (value is None or isinstance(value, Marker | Kind | Same) or type(value).__name__ in names)

    return sorted(values, key=is_other)


def _error(name: str) -> Exception:
    known = getattr(builtins, name, None)
    return known("raised on purpose") if isinstance(known, type) else error_class(name)("raised on purpose")


def _domain(
    leaf: Path, leaves: Sequence[Path], hints: Sequence[Any], fields: Mapping[str, Any], defaults: Mapping[str, Any]
) -> list[Any]:
    found: list[Any] = []
    if len(leaf) > 1 and leaf[-1][0] == "contains":
        return [False, True]
    below = {other[len(leaf)][0] for other in leaves if len(other) > len(leaf) and other[: len(leaf)] == leaf}
    if below:
        found += [*([] if "attribute" in below or "call" in below else [MAPPING]), AUTO, None]
        found += [hint for hint in hints if isinstance(hint, Kind)]
    if len(leaf) == 1 and leaf[0] in defaults:
        found.append(defaults[leaf[0]])
    if len(leaf) == 2 and leaf[0] == "self" and leaf[1][0] == "attribute" and leaf[1][1] in fields:
        found.append(fields[leaf[1][1]])
    if len(leaf) > 1 and leaf[-1][0] == "item":
        found.append(ABSENT)
    found += [*hints, *_GENERIC]
    if len(leaf) > 1 and leaf[-1][0] == "attribute":
        found.append(ABSENT)
    unique: dict[str, Any] = {}
    for value in found:
        unique.setdefault(f"{type(value).__name__} {value!r}" if not isinstance(value, Raises) else shown(value), value)
    return list(unique.values())[:60]


def _switches(code: str) -> set[str]:
    """What an expression only asks whether it is true."""
    found: set[str] = set()
    todo: list[ast.expr] = [ast.parse(code, mode="eval").body]
    while todo:
        match todo.pop():
            case ast.BoolOp(values=parts):
                todo += parts
            case ast.UnaryOp(op=ast.Not(), operand=operand):
                todo.append(operand)
            case node:
                found.add(ast.unparse(node))
    return found


def _values_in(code: str, constants: Mapping[str, Any]) -> list[Any]:
    """Values that an expression compares with, and those next to them."""
    found: list[Any] = []
    tree = ast.parse(code, mode="eval")
    for node in ast.walk(tree):
        match node:
            case ast.Constant(value=bool() | None):
                found.append(node.value)
            case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as number)):
                found += [-number, -number - 1, -number + 1]
            case ast.Constant(value=int() as number):
                found += [number, number + 1, number - 1]
            case ast.Constant(value=float() as number):
                found += [number, number + 0.5, number - 0.5]
            case ast.Constant(value=str() as text):
                found += [text, text + "x", [text], {text: text}]
            case ast.Compare(ops=[ast.Lt() | ast.LtE() | ast.Gt() | ast.GtE(), *_]) | ast.BinOp():
                found += [1, 2, 0, 3, 4, 8, -1]
            case ast.Call(func=ast.Name(id="isinstance"), args=[_, kinds]):
                found += _samples(kinds)
            case ast.Attribute() | ast.Name() | ast.Set() | ast.List() | ast.Tuple():
                found += _members(node, constants)
    if any(isinstance(node, ast.comprehension) for node in ast.walk(tree)):
        single = [*found, None, 1, "x", True]
        found = [*([each] for each in single), *({each: each} for each in single if _can_be_key(each)), *found]
    return found


def _can_be_key(value: Any) -> bool:
    return isinstance(value, str | int | float | bool | None)


def _samples(kinds: ast.expr) -> list[Any]:
    found: list[Any] = []
    parts = kinds.elts if isinstance(kinds, ast.Tuple) else [kinds]
    for part in parts:
        name = ast.unparse(part)
        found += _SAMPLES.get(name.rpartition(".")[2], (Kind(name),))
    return found


def _members(node: ast.expr, constants: Mapping[str, Any]) -> list[Any]:
    """A constant of the module itself, and if it is a collection, what is in it."""
    code = ast.unparse(node)
    root = code.partition(".")[0]
    if isinstance(node, ast.Name | ast.Attribute) and root not in constants:
        return []
    try:
        value = eval(code, dict(constants))
    except Exception:
        return []
    if isinstance(value, Stub):
        return [Same(code)] if isinstance(node, ast.Attribute) else []
    if isinstance(value, set | frozenset | list | tuple | dict):
        members = list(itertools.islice(sorted(value, key=repr), 6))
        return ["x", *members] if any(isinstance(each, str) for each in members) else members
    if isinstance(value, bool | int | float | str):
        near = [value + 1, value - 1] if isinstance(value, int) and not isinstance(value, bool) else []
        return [value, *near]
    return [] if callable(value) else [Same(code)]
