"""Where the statements of one module stand, and what runs before what. Knows nothing of errors and messages.

Everything is read from the syntax tree; nothing is imported or run.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass, field

Function = ast.FunctionDef | ast.AsyncFunctionDef
Loop = ast.For | ast.AsyncFor | ast.While
Scope = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
LOOPS = (ast.For, ast.AsyncFor, ast.While)
TRIES = (ast.Try, ast.TryStar)
WITHS = (ast.With, ast.AsyncWith)
_HOLDING_BLOCKS = frozenset({ast.If, ast.Match, *LOOPS, *TRIES, *WITHS})
_NO_NODES = frozenset(
    {int, str, type(None), bool, float, complex, bytes, type(...), ast.Load, ast.Store, ast.Del}.union(
        *(kind.__subclasses__() for kind in (ast.boolop, ast.operator, ast.unaryop, ast.cmpop))
    )
)
"""Classes of what stands in the fields of a syntax tree and has nothing below it that anybody asks for."""
_BLOCKS = ("body", "orelse", "finalbody")

SWALLOWS = frozenset({"suppress", "raises", "assertRaises", "warns", "ignored"})
"""Context managers by the last part of their name: an error in their block goes no further."""
NEVER_RETURNS = frozenset({"sys.exit", "exit", "quit", "os._exit", "os.abort", "pytest.fail", "pytest.skip"})


@dataclass(slots=True)
class Place:
    """Where a statement stands."""

    parent: ast.AST
    """The statement, handler, case, class, function or module that holds the block."""
    field: str
    """Which block of the parent: `body`, `orelse` or `finalbody`."""
    block: list[ast.stmt]
    index: int
    scope: Scope
    """The function, class or module whose names the statement sees as local."""

    @property
    def before(self) -> list[ast.stmt]:
        """What stands above it in the same block."""
        return self.block[: self.index]


@dataclass(slots=True)
class Module:
    """The syntax tree of one file with the place of every statement."""

    tree: ast.Module
    places: dict[ast.AST, Place] = field(default_factory=dict)
    """Of statements, and of handlers and cases (which stand in no block)."""
    owners: dict[ast.AST, Scope] = field(default_factory=dict)
    """The scope around each function and class."""
    functions: dict[str, Function] = field(default_factory=dict)
    """By qualified name; the last one of several."""
    classes: dict[str, ast.ClassDef] = field(default_factory=dict)
    constants: dict[str, ast.expr] = field(default_factory=dict)
    """Names that the module assigns once, at its top."""

    def qualname(self, scope: Scope) -> str:
        """`Class.method`, `outer.inner`, or `<module>`."""
        names = []
        while not isinstance(scope, ast.Module):
            names.append(scope.name)
            scope = self.owners[scope]
        return ".".join(reversed(names)) or "<module>"

    def class_of(self, scope: Scope) -> ast.ClassDef | None:
        """The class whose method a scope is (or is inside of)."""
        while not isinstance(scope, ast.Module):
            if isinstance(scope, ast.ClassDef):
                return scope
            scope = self.owners[scope]
        return None

    def ancestors(self, statement: ast.AST) -> Iterator[tuple[ast.AST, Place]]:
        """Each statement (or handler, or case) from `statement` outwards with its place, up to the scope's edge."""
        while (place := self.places.get(statement)) is not None:
            yield statement, place
            if isinstance(place.parent, (*FUNCTIONS, ast.ClassDef, ast.Module)):
                return
            statement = place.parent


def read_module(source: str | bytes) -> Module:
    """Parse one file. Raises: SyntaxError, or ValueError for null bytes."""
    module = Module(ast.parse(source))
    _place(module, module.tree, module.tree)
    seen: set[str] = set()
    for statement in module.tree.body:
        for name in assigned_names(statement):
            if name in seen:
                module.constants.pop(name, None)
            elif isinstance(statement, ast.Assign | ast.AnnAssign) and statement.value is not None:
                module.constants[name] = statement.value
            seen.add(name)
    return module


def _place(module: Module, holder: ast.AST, scope: Scope) -> None:
    for name in _BLOCKS:
        block = getattr(holder, name, None)
        if not isinstance(block, list):
            continue
        for index, statement in enumerate(block):
            module.places[statement] = Place(holder, name, block, index, scope)
            _enter(module, statement, scope)


def _enter(module: Module, statement: ast.stmt, scope: Scope) -> None:
    if isinstance(statement, (*FUNCTIONS, ast.ClassDef)):
        module.owners[statement] = scope
        name = module.qualname(statement)
        if isinstance(statement, ast.ClassDef):
            module.classes[name] = statement
        else:
            module.functions[name] = statement
        _place(module, statement, statement)
        return
    if statement.__class__ not in _HOLDING_BLOCKS or (
        isinstance(statement, ast.If) and is_type_checking(statement.test)
    ):
        return
    for part in (*getattr(statement, "handlers", ()), *getattr(statement, "cases", ())):
        module.places[part] = Place(statement, "handlers", [], 0, scope)
        _place(module, part, scope)
    _place(module, statement, scope)


def is_type_checking(test: ast.expr) -> bool:
    """`if TYPE_CHECKING:` holds what never runs."""
    return (isinstance(test, ast.Name) and test.id == "TYPE_CHECKING") or (
        isinstance(test, ast.Attribute) and test.attr == "TYPE_CHECKING"
    )


def terminates(block: list[ast.stmt]) -> bool:
    """Whether the end of a block is never reached."""
    return any(_leaves(statement) for statement in block)


def _leaves(statement: ast.stmt) -> bool:
    match statement:
        case ast.Return() | ast.Raise() | ast.Continue() | ast.Break():
            return True
        case ast.If():
            return terminates(statement.body) and terminates(statement.orelse)
        case ast.With() | ast.AsyncWith():
            return terminates(statement.body) and not swallows(statement)
        case ast.Try() | ast.TryStar():
            if terminates(statement.finalbody):
                return True
            ends = terminates(statement.body) or terminates(statement.orelse)
            return ends and all(terminates(handler.body) for handler in statement.handlers)
        case ast.Match():
            last = statement.cases[-1]
            whole = isinstance(last.pattern, ast.MatchAs) and last.pattern.pattern is None and last.guard is None
            return whole and all(terminates(case.body) for case in statement.cases)
        case ast.While():
            endless = isinstance(statement.test, ast.Constant) and bool(statement.test.value)
            return endless and not any(isinstance(leaf, ast.Break) for leaf in own_statements(statement.body))
        case ast.Expr(value=ast.Call() as call):
            return ast.unparse(call.func) in NEVER_RETURNS
    return False


def swallows(statement: ast.With | ast.AsyncWith) -> bool:
    """Whether the block of a `with` can end in an error and what follows runs all the same."""
    calls = [item.context_expr for item in statement.items if isinstance(item.context_expr, ast.Call)]
    return any(ast.unparse(call.func).rpartition(".")[2] in SWALLOWS for call in calls)


def nodes(root: ast.AST) -> list[ast.AST]:
    """What `ast.walk` gives without operators and contexts, in a fifth of its time."""
    found = [root]
    for node in found:
        for value in node.__dict__.values():
            kind = value.__class__
            if kind is list:
                found += [each for each in value if each.__class__ not in _NO_NODES]
            elif kind not in _NO_NODES:
                found.append(value)
    return found


def own_statements(block: list[ast.stmt], *, loops: bool = False) -> Iterator[ast.stmt]:
    """The statements of a block and of the blocks in it, without those of inner functions and classes.

    Inner loops are entered only if `loops`; otherwise a `break` that is found belongs to the loop around the block.
    """
    for statement in block:
        yield statement
        if statement.__class__ not in _HOLDING_BLOCKS:
            continue
        if isinstance(statement, LOOPS) and not loops:
            yield from own_statements(statement.orelse, loops=loops)
            continue
        for name in _BLOCKS:
            yield from own_statements(getattr(statement, name, None) or [], loops=loops)
        for part in (*getattr(statement, "handlers", ()), *getattr(statement, "cases", ())):
            yield from own_statements(part.body, loops=loops)


def own_expressions(statement: ast.stmt) -> Iterator[ast.expr]:
    """The expressions that a statement evaluates itself, without those of the blocks in it."""
    for name, value in ast.iter_fields(statement):
        if name in _BLOCKS or name in ("handlers", "cases"):
            continue
        for item in value if isinstance(value, list) else [value]:
            if isinstance(item, ast.expr):
                yield item
            elif isinstance(item, ast.withitem):
                yield item.context_expr


def assigned_names(statement: ast.stmt) -> Iterator[str]:
    """The plain names that a statement binds itself, without those of the blocks in it and those that `:=` binds."""
    match statement:
        case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
            yield statement.name
            return
        case ast.Import() | ast.ImportFrom():
            yield from (alias.asname or alias.name.partition(".")[0] for alias in statement.names)
            return
        case ast.With() | ast.AsyncWith():
            targets = [item.optional_vars for item in statement.items if item.optional_vars is not None]
        case ast.Assign() | ast.Delete():
            targets = list(statement.targets)
        case ast.AnnAssign() | ast.AugAssign() | ast.For() | ast.AsyncFor():
            targets = [statement.target]
        case ast.Try() | ast.TryStar():
            yield from (handler.name for handler in statement.handlers if handler.name)
            targets = []
        case ast.Match():
            for case in statement.cases:
                yield from pattern_names(case.pattern)
            targets = []
        case _:
            targets = []
    for target in targets:
        yield from (node.id for node in nodes(target) if isinstance(node, ast.Name) and not _is_read(node))


def _is_read(node: ast.Name) -> bool:
    return isinstance(node.ctx, ast.Load)


def walrus_names(expression: ast.expr) -> Iterator[str]:
    """The names that `:=` binds in an expression."""
    yield from (
        node.target.id
        for node in nodes(expression)
        if isinstance(node, ast.NamedExpr) and isinstance(node.target, ast.Name)
    )


def pattern_names(pattern: ast.pattern) -> Iterator[str]:
    """The names that a `case` binds."""
    for node in ast.walk(pattern):
        if isinstance(node, ast.MatchAs | ast.MatchStar) and node.name:
            yield node.name
        elif isinstance(node, ast.MatchMapping) and node.rest:
            yield node.rest


def parameters(function: Function | ast.Lambda) -> Iterator[ast.arg]:
    """Every parameter in the order of the signature."""
    spec = function.args
    yield from (*spec.posonlyargs, *spec.args)
    if spec.vararg:
        yield spec.vararg
    yield from spec.kwonlyargs
    if spec.kwarg:
        yield spec.kwarg
