"""Tests that expect an error: what class, what words, and the call that has to fail. Reads a file, runs none of it.

    with pytest.raises(ValueError, match="must be positive"):      with self.assertRaisesRegex(ValueError, "positive"):
    with pytest.raises(ValueError) as caught: ...                  assert "must be positive" in str(caught.value)

Texts may stand in a name of the function, the module or `parametrize`. Knows neither pages nor templates.
"""

from __future__ import annotations

import ast
import re
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from headrace.reference.classes import last_name
from headrace.reference.flow import FUNCTIONS, WITHS, Module, Place, Scope, own_statements, read_module
from headrace.reference.records import Expectation

_RAISING = {"raises", "assertRaises"}
_RAISING_LIKE = {"assertRaisesRegex", "assertRaisesRegexp"}
_CAUGHT = {"value", "exception"}
_TEXTS = {"message", "msg"}
_MOST_LINES = 4
_MOST_LETTERS = 300
_ANYTHING = ".*"


def read_expectations(file: str, source: bytes) -> tuple[Expectation, ...]:
    """The errors that the tests of a file expect; none of a file that is no Python."""
    if b"aises" not in source:
        return ()
    try:
        return tuple(_Reader(read_module(source), file, source.decode("utf-8", "replace").splitlines()).found())
    except (SyntaxError, ValueError, RecursionError):
        return ()


@dataclass(frozen=True, slots=True)
class _Text:
    """One regular expression that a test may use."""

    pattern: str
    case: Mapping[str, str] = field(default_factory=dict)
    """What else the same case of `parametrize` gives, as code."""


class _Reader:
    def __init__(self, module: Module, file: str, lines: Sequence[str]) -> None:
        self._module, self._file, self._lines = module, file, lines

    def found(self) -> Iterator[Expectation]:
        for statement, place in self._module.places.items():
            if isinstance(statement, WITHS):
                for item in statement.items:
                    yield from self._block(statement, item, place)
            elif isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call):
                yield from self._called(statement, statement.value, place)

    def _block(self, statement: ast.With | ast.AsyncWith, item: ast.withitem, place: Place) -> Iterator[Expectation]:
        call = item.context_expr
        if not isinstance(call, ast.Call) or not call.args:
            return
        names = _Names(self._module, place.scope)
        name = _function(call)
        texts: list[_Text] = []
        if name in _RAISING:
            texts = [text for word in call.keywords if word.arg == "match" for text in names.patterns(word.value)]
            if not texts and isinstance(item.optional_vars, ast.Name):
                texts = self._asserted(item.optional_vars.id, place, names)
        elif name in _RAISING_LIKE and len(call.args) > 1:
            texts = names.patterns(call.args[1])
        for text in texts:
            yield self._expectation(text, names.classes(call.args[0]), place, statement.body)

    def _called(self, statement: ast.Expr, call: ast.Call, place: Place) -> Iterator[Expectation]:
        """`self.assertRaisesRegex(ValueError, "positive", function, argument)`."""
        if _function(call) in _RAISING_LIKE and len(call.args) > 2:
            names = _Names(self._module, place.scope)
            for text in names.patterns(call.args[1]):
                yield self._expectation(text, names.classes(call.args[0]), place, [statement])

    def _asserted(self, caught: str, place: Place, names: _Names) -> list[_Text]:
        """What is asserted below a block of the error that it caught."""
        found: list[_Text] = []
        for statement in place.block[place.index + 1 :]:
            match statement:
                case ast.With() | ast.AsyncWith():
                    break
                case ast.Assert(test=ast.Compare(left=text, ops=[ast.In()], comparators=[said])) if _says(said, caught):
                    found += names.patterns(text, literal=True)
                case (
                    ast.Assert(test=ast.Compare(left=said, ops=[ast.Eq()], comparators=[text]))
                    | ast.Assert(test=ast.Compare(left=text, ops=[ast.Eq()], comparators=[said]))
                ) if _says(said, caught):
                    found += names.patterns(text, literal=True)
                case ast.Expr(value=ast.Call(func=ast.Attribute(ast.Name(id=name), attr="match"), args=[text])) if (
                    name == caught
                ):
                    found += names.patterns(text)
        return found[:1]

    def _expectation(
        self, text: _Text, classes: tuple[str, ...], place: Place, body: Sequence[ast.stmt]
    ) -> Expectation:
        marks = getattr(body[0], "decorator_list", [])
        first = min(node.lineno for node in (body[0], *marks))
        last = body[-1].end_lineno or body[-1].lineno
        return Expectation(
            file=self._file,
            line=first,
            end_line=last,
            test=self._module.qualname(place.scope),
            classes=classes,
            pattern=text.pattern,
            call=self._excerpt(first, last, text.case),
        )

    def _excerpt(self, first: int, last: int, case: Mapping[str, str]) -> str:
        lines = textwrap.dedent("\n".join(self._lines[first - 1 : last])).splitlines()
        shown = "\n".join(lines[:_MOST_LINES])[:_MOST_LETTERS]
        if len(shown) < len("\n".join(lines)):
            shown += " ..."
        used = {name: value for name, value in case.items() if re.search(rf"\b{re.escape(name)}\b", shown)}
        given = "\n".join(f"{name} = {value}" for name, value in used.items())
        return f"{given}\n{shown}" if given else shown


class _Names:
    """What names stand for in a test."""

    def __init__(self, module: Module, scope: Scope) -> None:
        self._constants = dict(module.constants)
        self._cases: list[dict[str, ast.expr]] = []
        holders: list[Scope] = [scope, *filter(None, [module.class_of(scope)])]
        for holder in holders:
            if not isinstance(holder, ast.Module):
                self._cases += [case for mark in holder.decorator_list for case in _cases(mark)]
        if isinstance(scope, FUNCTIONS):
            self._constants |= _assigned_once(scope)

    def patterns(self, node: ast.expr, *, literal: bool = False) -> list[_Text]:
        """The regular expressions that an expression may be; `literal` if it is compared and not searched for."""
        match node:
            case ast.Constant(value=str(text)):
                return [_Text(re.escape(text) if literal else text)]
            case ast.JoinedStr(values=parts):
                return [_Text("".join(_part(part, literal=literal) for part in parts))]
            case ast.Call(func=ast.Attribute(attr="escape"), args=[inner]):
                return self.patterns(inner, literal=True)
            case ast.BinOp(op=ast.Add(), left=left, right=right):
                pairs = [(self.patterns(left, literal=literal), self.patterns(right, literal=literal))]
                return [_Text(a.pattern + b.pattern) for first, second in pairs for a in first for b in second]
            case ast.Name(id=name):
                given = [
                    _Text(text.pattern, {key: ast.unparse(value) for key, value in case.items() if key != name})
                    for case in self._cases
                    if isinstance(case.get(name), ast.Constant | ast.JoinedStr | ast.Call)
                    for text in self.patterns(case[name], literal=literal)
                ]
                known = self._constants.get(name)
                return given or (self.patterns(known, literal=literal) if _is_text(known) and known else [])
        return []

    def classes(self, node: ast.expr) -> tuple[str, ...]:
        """The last parts of the names of the classes that are expected."""
        if isinstance(node, ast.Tuple):
            return tuple(name for part in node.elts for name in self.classes(part))
        if isinstance(node, ast.Name | ast.Attribute):
            return (last_name(ast.unparse(node)),)
        return ()


def _is_text(node: ast.expr | None) -> bool:
    return isinstance(node, ast.Constant | ast.JoinedStr | ast.BinOp)


def _part(part: ast.expr, *, literal: bool) -> str:
    if not isinstance(part, ast.Constant):
        return _ANYTHING
    return re.escape(str(part.value)) if literal else str(part.value)


def _function(call: ast.Call) -> str:
    return call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")


def _says(node: ast.expr, caught: str) -> bool:
    """Whether an expression is the text of the error that was caught: `str(caught.value)`, `caught.value.message`."""
    match node:
        case ast.Call(func=ast.Name(id="str"), args=[ast.Attribute(ast.Name(id=name), attr=attribute)]):
            return name == caught and attribute in _CAUGHT
        case ast.Attribute(ast.Attribute(ast.Name(id=name), attr=attribute), attr=text):
            return name == caught and attribute in _CAUGHT and text in _TEXTS
    return False


def _assigned_once(function: ast.FunctionDef | ast.AsyncFunctionDef) -> dict[str, ast.expr]:
    """Local names with one definition."""
    found: dict[str, list[ast.expr]] = {}
    for statement in own_statements(function.body, loops=True):
        if isinstance(statement, ast.Assign):
            for target in statement.targets:
                if isinstance(target, ast.Name):
                    found.setdefault(target.id, []).append(statement.value)
    return {name: values[0] for name, values in found.items() if len(values) == 1}


def _cases(mark: ast.expr) -> Iterator[dict[str, ast.expr]]:
    """The cases of a `parametrize`, each with its names."""
    match mark:
        case ast.Call(
            func=ast.Attribute(attr="parametrize"), args=[names, ast.List(elts=cases) | ast.Tuple(elts=cases), *_]
        ):
            written = _written(names)
            for case in cases:
                values = _values(case, len(written))
                if len(values) == len(written):
                    yield dict(zip(written, values, strict=True))


def _written(names: ast.expr) -> list[str]:
    match names:
        case ast.Constant(value=str(text)):
            return [name.strip() for name in text.split(",") if name.strip()]
        case ast.List(elts=parts) | ast.Tuple(elts=parts):
            return [str(part.value) for part in parts if isinstance(part, ast.Constant)]
    return []


def _values(case: ast.expr, count: int) -> list[ast.expr]:
    if isinstance(case, ast.Call) and _function(case) == "param":
        return list(case.args)
    if count > 1 and isinstance(case, ast.Tuple | ast.List):
        return list(case.elts)
    return [case]
