"""Values for what a condition reads, found by trying: first such that it holds, then such that one test fails.

What can be given a value is a *leaf*: an attribute, an item or a result, reached by a path from a parameter or from a
name of the module: `self.config.size`, `data['seed']`, `is_available()`. Runs no function; expressions are evaluated
as they stand, so this room is for the inside of the jail only.
"""

from __future__ import annotations

import ast
import copy
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from headrace.reference.atoms import with_names
from headrace.reference.running.stubs import GUESSES, Raises, Stub

Step = tuple[str, Any]
"""("attribute", name), ("item", key) or ("call", None)."""
Path = tuple[Any, ...]
"""The name that it begins with, then steps."""
Assignment = dict[Path, Any]

METHODS_OF_VALUES = frozenset(
    """startswith endswith lower upper strip lstrip rstrip split rsplit partition rpartition count index find isdigit
    isalpha isidentifier isnumeric removeprefix removesuffix replace join encode decode items keys values issubset
    issuperset intersection union difference isdisjoint is_integer bit_length casefold format""".split()
)
_BUILTINS = vars(__import__("builtins"))


class Marker:
    """A value that stands for something else."""

    def __init__(self, text: str) -> None:
        self.text = text

    def __repr__(self) -> str:
        return self.text


AUTO = Marker("an object")
"""Built from the leaves below it."""
MAPPING = Marker("a mapping")
"""The same, of items alone."""
ABSENT = Marker("(not there)")


@dataclass(frozen=True, slots=True)
class Kind:
    """An object of a class that is only known by name."""

    path: str

    def __repr__(self) -> str:
        return f"a {self.path}"


@dataclass(frozen=True, slots=True)
class Same:
    """The same object as a constant of the module: `Mode.FULL`."""

    code: str

    def __repr__(self) -> str:
        return self.code


def shown(value: Any) -> str:
    """A value as a page shows it."""
    if isinstance(value, Raises):
        return f"raises {type(value.error).__name__}"
    return repr(value)


# --- leaves ---------------------------------------------------------------------------------------------------------


def path_of(node: ast.expr, roots: set[str]) -> Path | None:
    """The path of an expression; None if it is none, or begins with a name that nobody can give a value."""
    match node:
        case ast.Name(id=name):
            return (name,) if name in roots else None
        case ast.NamedExpr(value=inner) | ast.Await(value=inner):
            return path_of(inner, roots)
        case ast.Attribute(value=inner, attr=name):
            return _longer(path_of(inner, roots), ("attribute", name))
        case ast.Subscript(value=inner, slice=ast.Constant(value=key)):
            return _longer(path_of(inner, roots), ("item", key))
        case ast.Call(func=ast.Name(id="getattr"), args=[inner, ast.Constant(value=str(name)), *_]):
            return _longer(path_of(inner, roots), ("attribute", name))
        case ast.Call(func=ast.Attribute(value=inner, attr="get"), args=[ast.Constant(value=key), *_]):
            return _longer(path_of(inner, roots), ("item", key))
        case ast.Call(func=ast.Attribute(attr=name)) if name in METHODS_OF_VALUES:
            return None
        case ast.Call(func=func):
            return _longer(path_of(func, roots), ("call", None))
    return None


def _longer(path: Path | None, step: Step) -> Path | None:
    return None if path is None else (*path, step)


def text_of(path: Path) -> str:
    """The path as code."""
    text = str(path[0])
    for what, name in path[1:]:
        text += f".{name}" if what == "attribute" else f"[{name!r}]" if what == "item" else "()"
    return text


@dataclass(slots=True)
class Question:
    """One test of a condition, as it is evaluated on the inputs."""

    code: str
    line: int
    early: bool
    leaves: list[Path] = field(default_factory=list)
    names: set[str] = field(default_factory=set)
    open: bool = False
    """It reads what the function computes in a way that cannot be followed."""
    raises: str | None = None
    """It asks whether evaluating raises this error."""
    compiled: Any = None


class Scope:
    """What the names of one function mean to the search."""

    def __init__(self, parameters: Iterable[str], assignable: Iterable[str], local: set[str]) -> None:
        self.parameters = set(parameters)
        self.assignable = set(assignable)
        self.local = local

    @property
    def roots(self) -> set[str]:
        return self.parameters | self.assignable

    def leaves(self, node: ast.AST, bound: frozenset[str] = frozenset()) -> Iterator[Path]:
        """The leaves that an expression reads."""
        if isinstance(node, ast.expr):
            path = path_of(node, self.roots - bound)
            if path is not None and not _is_constant(path, self.parameters):
                yield path
                return
        if isinstance(node, ast.Compare) and isinstance(node.ops[0], ast.In | ast.NotIn) and len(node.ops) == 1:
            inner = path_of(node.comparators[0], self.roots - bound)
            if isinstance(node.left, ast.Constant) and inner is not None and not _is_constant(inner, self.parameters):
                yield (*inner, ("contains", node.left.value))
                return
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "hasattr":
            match node.args:
                case [inner_node, ast.Constant(value=str(name))]:
                    inner = path_of(inner_node, self.roots - bound)
                    if inner is not None:
                        yield (*inner, ("attribute", name))
                        return
        if isinstance(node, ast.ListComp | ast.SetComp | ast.GeneratorExp | ast.DictComp):
            bound |= {each.id for part in node.generators for each in ast.walk(part.target) if isinstance(each, ast.Name)}
        for child in ast.iter_child_nodes(node):
            yield from self.leaves(child, bound)


def _is_constant(path: Path, parameters: set[str]) -> bool:
    """`Mode.FULL`, `torch.float16`: not somebody's to set; what a call returns is."""
    if path[0] in parameters or any(what == "call" for what, _ in path[1:]):
        return False
    return str(path[0])[:1].isupper() or path[0] in ("torch", "np", "logger", "math")


def unfolded(node: ast.expr, definitions: Mapping[str, ast.expr], deepest: int = 6) -> ast.expr:
    """An expression in terms of what the function was given, as far as its names have one definition."""
    node = _Unwalrus().visit(copy.deepcopy(node))
    for _ in range(deepest):
        names = {part.id for part in ast.walk(node) if isinstance(part, ast.Name)}
        values = {name: definitions[name] for name in names & definitions.keys()}
        if not values:
            break
        node = _Unwalrus().visit(with_names(node, values))
    return node


class _Unwalrus(ast.NodeTransformer):
    def visit_NamedExpr(self, node: ast.NamedExpr) -> ast.AST:
        return self.visit(node.value)  # type: ignore[no-any-return]

    def visit_Await(self, node: ast.Await) -> ast.AST:
        return self.visit(node.value)  # type: ignore[no-any-return]


# --- building -------------------------------------------------------------------------------------------------------


class World:
    """The objects of one run: the given values, and stubs for everything else."""

    def __init__(self, assignment: Assignment, constants: Mapping[str, Any], fields: Mapping[str, Any]) -> None:
        self._constants = constants
        self._fields = fields
        self._tree: dict[Any, Any] = {}
        for path, value in assignment.items():
            node = self._tree
            for step in path:
                node = node.setdefault(step, {})
            node[None] = value

    def root(self, name: str) -> Any:
        """The object that a name stands for."""
        node = self._tree.get(name)
        if node is None:
            return self._constants[name] if name in self._constants else self._plain(name)
        return self._built(node, name, self._constants.get(name))

    def _plain(self, name: str) -> Any:
        return self._built({}, name, None) if name == "self" else Stub(name)

    def _built(self, node: dict[Any, Any], path: str, base: Any) -> Any:
        value = node.get(None, AUTO)
        children = {step: child for step, child in node.items() if step is not None}
        if not (value is AUTO or value is MAPPING or isinstance(value, Kind)):
            return self._value(value, path)
        if children and value is not MAPPING and all(what == "contains" for what, _ in children):
            return _holding({key: child[None] for (_, key), child in children.items()})
        items = {key: child for (what, key), child in children.items() if what == "item"}
        attributes = {name: child for (what, name), child in children.items() if what == "attribute"}
        if value is MAPPING or (items and not attributes and value is AUTO):
            contains = {key: child[None] for (what, key), child in children.items() if what == "contains"}
            return self._mapping(items, path) | {key: "x" for key, there in contains.items() if there}
        kinds = frozenset([value.path]) if isinstance(value, Kind) else frozenset()
        absent = frozenset(name for name, child in attributes.items() if child.get(None) is ABSENT)
        known = base if isinstance(base, Stub) else None
        stub = Stub(path, certain=True, kinds=kinds, absent=absent, items=self._mapping(items, path), base=known)
        if path == "self":
            stub.__dict__ |= {name: copy.copy(each) for name, each in self._fields.items()}
        for name, child in attributes.items():
            if name not in absent:
                stub.__dict__[name] = self._built(child, f"{path}.{name}", None)
        if ("call", None) in children:
            stub._result = self._built(children["call", None], f"{path}()", None)
        return stub

    def _mapping(self, items: Mapping[Any, dict[Any, Any]], path: str) -> dict[Any, Any]:
        return {
            key: self._built(child, f"{path}[{key!r}]", None)
            for key, child in items.items()
            if child.get(None) is not ABSENT
        }

    def _value(self, value: Any, path: str) -> Any:
        if isinstance(value, Same):
            return eval(value.code, dict(self._constants))
        return copy.deepcopy(value) if isinstance(value, list | dict | set) else value


def _holding(contains: Mapping[Any, bool]) -> Any:
    """A text, or else a list, that holds some values and others not."""
    there = [key for key, wanted in contains.items() if wanted]
    if all(isinstance(key, str) for key in contains):
        return " ".join(there) or "-"
    return there


# --- trying ---------------------------------------------------------------------------------------------------------

_GENERIC: tuple[Any, ...] = (
    *(None, False, True, 1, 0, 2, 3, -1, "x", "", 0.5, 8, [], ["x"], [1], [1, 1], {}, {"x": "x"}, 64, 1.5, -0.5),
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
    questions: Sequence[Question], fields: Mapping[str, Any], defaults: Mapping[str, Any], constants: Mapping[str, Any]
) -> dict[Path, list[Any]]:
    """What to try for each leaf, the likeliest first."""
    leaves = list(dict.fromkeys(leaf for question in questions for leaf in question.leaves))
    hints: dict[Path, list[Any]] = {leaf: [] for leaf in leaves}
    for question in questions:
        values, switches = _values_in(question.code, constants), _switches(question.code)
        for leaf in question.leaves:
            hints[leaf] += [*((True, False) if text_of(leaf) in switches else ()), *values]
            if question.raises is not None and leaf[-1] == ("call", None):
                hints[leaf].append(Raises(_error(question.raises)))
    return {leaf: _domain(leaf, leaves, hints[leaf], fields, defaults) for leaf in leaves}


def _error(name: str) -> Exception:
    known = _BUILTINS.get(name)
    from headrace.reference.running.stubs import error_class

    return known("raised on purpose") if isinstance(known, type) else error_class(name)("raised on purpose")


def _domain(
    leaf: Path, leaves: Sequence[Path], hints: Sequence[Any], fields: Mapping[str, Any], defaults: Mapping[str, Any]
) -> list[Any]:
    found: list[Any] = []
    if len(leaf) > 1 and leaf[-1][0] == "contains":
        return [False, True]
    below = {other[len(leaf)][0] for other in leaves if len(other) > len(leaf) and other[: len(leaf)] == leaf}
    if below:
        found += [MAPPING if "item" in below and "attribute" not in below else AUTO, None]
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
