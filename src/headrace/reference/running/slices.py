"""One function cut out of its file, so that it can be compiled alone. Runs nothing.

Left as they are: every statement, every expression, every line number. Taken off: decorators, annotations and default
values (the runner passes every argument, `*args` and `**kwargs` as two like the others). `await`, `async for` and
`async with` become their plain forms, so that the statements run in the order in which they are written.
"""

from __future__ import annotations

import ast
import builtins
import copy
from collections.abc import Iterator
from dataclasses import dataclass, field

from headrace.reference.changes import MUTATORS
from headrace.reference.flow import FUNCTIONS, Function, own_statements, parameters

NAME = "function_under_test"
_PLAIN = {ast.AsyncFunctionDef: ast.FunctionDef, ast.AsyncFor: ast.For, ast.AsyncWith: ast.With}


@dataclass(slots=True)
class Slice:
    """A function and what its file tells of the names in it."""

    function: Function
    """As it stands in the file."""
    module: ast.Module
    """Only the function, ready to be compiled."""
    parameters: dict[str, ast.expr | None]
    """Each with its default value."""
    free: set[str]
    """The names that come from around it."""
    errors: set[str]
    """Dotted names of what it raises and catches."""
    fields: dict[str, ast.expr] = field(default_factory=dict)
    """What the class that it is a method of sets for each attribute."""
    annotations: dict[str, str] = field(default_factory=dict)
    """What parameters, and attributes as `self.name`, are said to be."""


def cut(tree: ast.Module, qualname: str, line: int) -> Slice | None:
    """The function of that name around a line; None if the line stands in none."""
    found = next((pair for pair in _functions(tree) if _is(pair, qualname, line)), None)
    if found is None:
        return None
    _, function, cls = found
    plain = _Plain().visit(copy.deepcopy(function))
    assert isinstance(plain, ast.FunctionDef)
    plain.name, plain.decorator_list = NAME, []
    spec = plain.args
    spec.kwonlyargs += [each for each in (spec.vararg, spec.kwarg) if each is not None]
    spec.vararg, spec.kwarg, spec.defaults, spec.kw_defaults = None, None, [], [None] * len(spec.kwonlyargs)
    module = ast.fix_missing_locations(ast.Module([plain], []))
    return Slice(
        function,
        module,
        _defaults(function),
        set(_free_names(function)),
        set(_error_names(function)),
        _fields(cls) if cls is not None else {},
        dict(_annotations(function, cls)),
    )


_Found = tuple[str, Function, ast.ClassDef | None]


def _functions(tree: ast.Module) -> Iterator[_Found]:
    todo: list[tuple[str, ast.AST, ast.ClassDef | None]] = [("", tree, None)]
    while todo:
        prefix, holder, cls = todo.pop()
        for node in ast.iter_child_nodes(holder):
            if isinstance(node, ast.ClassDef):
                todo.append((f"{prefix}{node.name}.", node, node))
            elif isinstance(node, FUNCTIONS):
                yield prefix + node.name, node, cls
                todo.append((f"{prefix}{node.name}.", node, None))
            else:
                todo.append((prefix, node, cls))


def _is(found: _Found, qualname: str, line: int) -> bool:
    name, function, _ = found
    return name == qualname and function.lineno <= line <= (function.end_lineno or 0)


class _Plain(ast.NodeTransformer):
    def visit(self, node: ast.AST) -> ast.AST:
        node = self.generic_visit(node)
        plain = _PLAIN.get(type(node))
        if plain is not None:
            node = ast.copy_location(plain(**dict(ast.iter_fields(node))), node)
        if isinstance(node, ast.FunctionDef):
            node.returns = None
        elif isinstance(node, ast.arg):
            node.annotation = None
        elif isinstance(node, ast.comprehension):
            node.is_async = 0
        elif isinstance(node, ast.Await):
            return node.value
        elif isinstance(node, ast.Nonlocal):
            return ast.copy_location(ast.Global(node.names), node)
        elif isinstance(node, ast.AnnAssign):
            return _without_annotation(node)
        return node


def _without_annotation(node: ast.AnnAssign) -> ast.AST:
    if node.value is None:
        return ast.copy_location(ast.Pass(), node)
    return ast.copy_location(ast.Assign([node.target], node.value), node)


def _defaults(function: Function) -> dict[str, ast.expr | None]:
    spec = function.args
    ordered = [*spec.posonlyargs, *spec.args]
    values: dict[str, ast.expr | None] = {each.arg: None for each in ordered}
    for each, value in zip(reversed(ordered), reversed(spec.defaults), strict=False):
        values[each.arg] = value
    values |= {each.arg: value for each, value in zip(spec.kwonlyargs, spec.kw_defaults, strict=True)}
    if spec.vararg is not None:
        values[spec.vararg.arg] = ast.Tuple([], ast.Load())
    if spec.kwarg is not None:
        values[spec.kwarg.arg] = ast.Dict([], [])
    return values


def _free_names(function: Function) -> Iterator[str]:
    bound = {each.arg for each in parameters(function)}
    for node in ast.walk(function):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load) and node.id not in bound:
            yield node.id


def _error_names(function: Function) -> Iterator[str]:
    for node in ast.walk(function):
        caught: ast.expr | None = None
        if isinstance(node, ast.ExceptHandler):
            caught = node.type
        elif isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
            caught = node.exc.func
        for part in caught.elts if isinstance(caught, ast.Tuple) else [caught]:
            if isinstance(part, ast.Name | ast.Attribute):
                name = ast.unparse(part)
                if not hasattr(builtins, name):
                    yield name


def _fields(cls: ast.ClassDef) -> dict[str, ast.expr]:
    found = {}
    for statement in cls.body:
        match statement:
            case ast.AnnAssign(target=ast.Name(id=name), value=ast.expr() as value):
                found[name] = _default_of(value)
            case ast.Assign(targets=[ast.Name(id=name)], value=value):
                found[name] = _default_of(value)
    return {name: value for name, value in found.items() if value is not None}


def _annotations(function: Function, cls: ast.ClassDef | None) -> Iterator[tuple[str, str]]:
    for each in parameters(function):
        if each.annotation is not None:
            yield each.arg, ast.unparse(each.annotation)
    for statement in cls.body if cls is not None else []:
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            yield f"self.{statement.target.id}", ast.unparse(statement.annotation)


def _default_of(value: ast.expr) -> ast.expr | None:
    """The default of `Field(default=3, ge=1)`."""
    if isinstance(value, ast.Call) and ast.unparse(value.func).rpartition(".")[2].lower() == "field":
        named = {keyword.arg: keyword.value for keyword in value.keywords}
        return named.get("default") or (value.args[0] if value.args else None)
    return value


def definitions(function: Function) -> dict[str, ast.expr]:
    """What each name is that the function binds in exactly one place, and leaves as it is."""
    found: dict[str, ast.expr] = {}
    bound: list[str] = [each.arg for each in parameters(function)]
    for statement in own_statements(function.body, loops=True):
        match statement:
            case ast.Assign(targets=[ast.Name(id=name)], value=value):
                found[name] = value
            case ast.AnnAssign(target=ast.Name(id=name), value=ast.expr() as value):
                found[name] = value
    for node in ast.walk(function):
        if isinstance(node, ast.NamedExpr):
            found[node.target.id] = node.value
        if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
            bound.append(node.id)
        elif isinstance(node, ast.ExceptHandler) and node.name:
            bound.append(node.name)
        elif isinstance(node, ast.alias):
            bound.append(node.asname or node.name.partition(".")[0])
        elif isinstance(node, (*FUNCTIONS, ast.ClassDef)) and node is not function:
            bound.append(node.name)
    bound += [name for node in ast.walk(function) for name in _filled_or_global(node)]
    return {name: value for name, value in found.items() if bound.count(name) == 1}


def _filled_or_global(node: ast.AST) -> list[str]:
    match node:
        case ast.Global(names=names) | ast.Nonlocal(names=names):
            return names
        case ast.Call(func=ast.Attribute(value=ast.Name(id=name), attr=method)) if method in MUTATORS:
            return [name]
        case ast.Subscript(value=ast.Name(id=name), ctx=ast.Store() | ast.Del()):
            return [name]
    return []


def imported_names(function: Function) -> dict[str, str]:
    """The names that the function imports itself, with what they are called where they come from."""
    aliases = [node for node in ast.walk(function) if isinstance(node, ast.alias)]
    return {alias.asname or alias.name.partition(".")[0]: alias.name for alias in aliases}


def local_names(function: Function) -> set[str]:
    """Every other name that the function binds itself, its parameters left out."""
    given = {each.arg for each in parameters(function)}
    nodes = list(ast.walk(function))
    stored = {node.id for node in nodes if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load)}
    caught = {node.name for node in nodes if isinstance(node, ast.ExceptHandler) and node.name}
    inner = {node.name for node in nodes if isinstance(node, (*FUNCTIONS, ast.ClassDef)) and node is not function}
    outer = {name for node in nodes if isinstance(node, ast.Global | ast.Nonlocal) for name in node.names}
    return (stored | caught | inner) - given - outer
