"""The sites of one file: where it raises, asserts or returns an error. Knows neither packages nor the database.

A site whose class has a constructor of its own gets its templates only when all files are read (`finished`), since the
class may stand in another file.
"""

from __future__ import annotations

import ast
import builtins
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace

from headrace.reference import fragments, pieces
from headrace.reference.classes import ClassIndex, ErrorClass, default_forms, last_name, looks_like_error, read_classes
from headrace.reference.flow import (
    FUNCTIONS,
    TRIES,
    WITHS,
    Module,
    Place,
    Scope,
    own_expressions,
    own_statements,
    read_module,
)
from headrace.reference.guards import Guards
from headrace.reference.options import Spellings, read_flags
from headrace.reference.pieces import Forms
from headrace.reference.records import Expectation, Placeholder, Site, SiteKind
from headrace.reference.templates import Texts

_RETURNED = "error_response"
"""Functions with this in their name make an error that is returned, not raised."""


@dataclass(frozen=True, slots=True)
class Draft:
    """A site, and what is needed to finish it."""

    site: Site
    arguments: Mapping[str, Forms] = field(default_factory=dict)
    """By position ("0") or name; empty if the templates are final."""
    origin: str = ""
    """The dotted module that the error's class was imported from, if it was."""


@dataclass(frozen=True, slots=True)
class FileErrors:
    """All that one file tells about errors."""

    file: str
    drafts: tuple[Draft, ...] = ()
    classes: tuple[ErrorClass, ...] = ()
    broken: str | None = None
    """Why the file could not be read."""
    flags: tuple[Spellings, ...] = ()
    """What its command lines take."""
    expectations: tuple[Expectation, ...] = ()
    """What its tests expect, if it is a file of tests; then it has nothing else."""


def read_file(file: str, source: bytes) -> FileErrors:
    """The errors of one file, by its path relative to the folder that holds the package."""
    try:
        module = read_module(source)
        reader = _Reader(module, file, has_responses=_RETURNED.encode() in source)
        flags = read_flags(module.tree, source)
        return FileErrors(file, tuple(reader.drafts()), tuple(read_classes(module, file)), flags=flags)
    except (SyntaxError, ValueError, RecursionError) as error:
        return FileErrors(file, broken=f"{type(error).__name__}: {error}")


def finished(files: Iterable[FileErrors]) -> Iterator[Site]:
    """The sites of a package, with the texts that its error classes build."""
    files = list(files)
    index = ClassIndex(cls for part in files for cls in part.classes)
    for part in files:
        counts: dict[tuple[str, str, str], int] = {}
        for draft in part.drafts:
            site = draft.site
            if _is_no_error(draft, index):
                continue
            if draft.arguments:
                forms = index.forms(site.error_class, site.file, draft.origin, draft.arguments)
                site = with_templates(site, forms)
            elif not site.templates and site.kind == "raise":
                site = with_templates(site, index.forms(site.error_class, site.file, draft.origin, {}))
            key = (site.qualname, site.error_class, pieces.canonical(site.templates[0]) if site.templates else "")
            counts[key] = counts.get(key, -1) + 1
            yield replace(site, ordinal=counts[key])


def _is_no_error(draft: Draft, index: ClassIndex) -> bool:
    """Whether what was returned looked like an error by the name of its module alone, and is none."""
    site = draft.site
    guessed = site.kind == "returned" and draft.origin and not looks_like_error(site.error_class)
    return bool(guessed) and index.find(site.error_class, site.file, draft.origin) is None


def with_templates(site: Site, forms: Forms) -> Site:
    """The site with its templates, and marked as a wrapper if they carry another error."""
    templates = tuple(form for form in dict.fromkeys(forms) if form)
    wrapper = any(isinstance(piece, Placeholder) and piece.kind == "exception" for form in templates for piece in form)
    return replace(site, templates=templates, wrapper=wrapper)


class _Reader:
    """Walks the statements of a file."""

    def __init__(self, module: Module, file: str, *, has_responses: bool) -> None:
        self._module = module
        self._has_responses = has_responses
        self._file = file
        self._guards = Guards(module)
        self._origins = dict(_imported_names(module, file))

    def drafts(self) -> list[Draft]:
        """In the order of their lines."""
        return sorted(self._drafts(), key=lambda draft: draft.site.line)

    def _drafts(self) -> Iterator[Draft]:
        for statement, place in self._module.places.items():
            match statement:
                case ast.Raise():
                    yield from self._raised(statement, place)
                case ast.Assert():
                    forms = self._texts(place).of(statement.msg, statement) if statement.msg else []
                    yield Draft(with_templates(self._site(statement, place, "AssertionError", "assert"), forms))
                case ast.Return(value=ast.Call(func=ast.Name() | ast.Attribute()) as call) if self._may_be_error(call):
                    yield self._made(statement, place, call, "returned")
            if self._has_responses and isinstance(statement, ast.stmt):
                yield from self._error_responses(statement, place)

    def _may_be_error(self, call: ast.Call) -> bool:
        """Whether a call makes an error by its name, or by the name of where the class comes from."""
        name = ast.unparse(call.func)
        if looks_like_error(name):
            return True
        home = f"{self._origin(name)}.{name}".rpartition(".")[0].lower()
        return last_name(name)[:1].isupper() and ("error" in home or "exception" in home)

    def _texts(self, place: Place) -> Texts:
        return Texts(self._module, place.scope, self._module.class_of(place.scope))

    def _site(self, statement: ast.stmt, place: Place, error_class: str, kind: SiteKind) -> Site:
        function = place.scope if isinstance(place.scope, FUNCTIONS) else None
        return Site(
            file=self._file,
            line=statement.lineno,
            end_line=statement.end_lineno or statement.lineno,
            qualname=self._module.qualname(place.scope),
            error_class=error_class,
            kind=kind,
            templates=(),
            condition=self._guards.condition(statement),
            caught_locally=kind != "returned" and self._is_caught(statement, error_class),
            function_line=function.lineno if function else 0,
            decorators=tuple(ast.unparse(mark) for mark in function.decorator_list) if function else (),
        )

    # --- raise ---

    def _raised(self, statement: ast.Raise, place: Place) -> Iterator[Draft]:
        value = statement.exc
        if value is None:
            yield Draft(self._site(statement, place, self._handled_class(statement) or "Exception", "reraise"))
            return
        if isinstance(value, ast.Name) and (made := self._made_before(value.id, place)) is not None:
            value = made
        if isinstance(value, ast.Call):
            helper = self._helper_call(value, place)
            if helper is not None:
                yield self._made(statement, place, *helper)
                return
            parts = list(self._fragments(statement, place, value))
            if not parts or not fragments.is_only_joined(value):
                yield self._made(statement, place, value, "raise")
            yield from parts
            return
        name = ast.unparse(value)
        if looks_like_error(name):
            yield Draft(self._site(statement, place, name, "raise"), origin=self._origin(name))
        else:
            yield Draft(self._site(statement, place, self._handled_class(statement) or name, "reraise"))

    def _made_before(self, name: str, place: Place) -> ast.Call | None:
        """The call that made the error which a name holds: `error = ValueError(...)` in the same block."""
        for earlier in reversed(place.before):
            match earlier:
                case ast.Assign(targets=[ast.Name(id=target)], value=ast.Call() as call) if target == name:
                    return call if looks_like_error(ast.unparse(call.func)) else None
        return None

    def _helper_call(self, call: ast.Call, place: Place) -> tuple[ast.Call, SiteKind] | None:
        """The error that a function of this module makes, in `raise function(...)`, if it makes only one."""
        if looks_like_error(ast.unparse(call.func)):
            return None
        function, _ = self._texts(place).callee(call)
        if function is None:
            return None
        made = [
            statement.value
            for statement in own_statements(function.body, loops=True)
            if isinstance(statement, ast.Return)
            and isinstance(statement.value, ast.Call)
            and looks_like_error(ast.unparse(statement.value.func))
        ]
        return (made[0], "raise") if len(made) == 1 else None

    def _made(self, statement: ast.stmt, place: Place, call: ast.Call, kind: SiteKind) -> Draft:
        """A site whose error is made by a call of its class."""
        name = ast.unparse(call.func)
        site = self._site(statement, place, name, kind)
        arguments = self._arguments(call, statement, place)
        if isinstance(getattr(builtins, name, None), type):
            return Draft(with_templates(site, default_forms(name, arguments)))
        return Draft(site, arguments, self._origin(name))

    def _arguments(self, call: ast.Call, statement: ast.stmt, place: Place) -> dict[str, Forms]:
        texts = self._texts(place)
        arguments: dict[str, Forms] = {}
        for index, argument in enumerate(call.args):
            if isinstance(argument, ast.Starred):
                arguments["*"] = []
            else:
                arguments[str(index)] = texts.of(argument, statement)
        for keyword in call.keywords:
            if keyword.arg:
                arguments[keyword.arg] = texts.of(keyword.value, statement)
        return arguments

    def _fragments(self, statement: ast.Raise, place: Place, call: ast.Call) -> Iterator[Draft]:
        """One site for each piece of a message that is put together from several."""
        site: Site | None = None
        for piece in fragments.gathered(call, statement, self._module):
            at = self._module.places[piece.statement]
            forms = replace(self._texts(at), of_each=piece.of_each).of(piece.text, piece.statement)
            if not any(pieces.is_sentence(form) for form in forms):
                continue
            site = site or replace(self._site(statement, place, ast.unparse(call.func), "raise"), fragment=True)
            yield Draft(with_templates(self._of_piece(site, piece, at, statement, place.scope), forms))

    def _of_piece(self, site: Site, piece: fragments.Piece, at: Place, statement: ast.Raise, scope: Scope) -> Site:
        """The raise of a piece; the place where it is made, if that is in another function."""
        where = piece.statement
        if at.scope is scope:
            if not piece.gathered_in:
                return replace(site, condition=self._guards.condition(where))
            return replace(site, condition=self._guards.piece(where, statement, piece.gathered_in))
        return replace(
            site,
            line=where.lineno,
            end_line=where.end_lineno or where.lineno,
            qualname=self._module.qualname(at.scope),
            condition=replace(
                self._guards.condition(where), complete=False, incomplete=f"{site.qualname} gathers it, and raises"
            ),
        )

    # --- returned ---

    def _error_responses(self, statement: ast.stmt, place: Place) -> Iterator[Draft]:
        for expression in own_expressions(statement):
            for node in ast.walk(expression):
                if isinstance(node, ast.Call) and _RETURNED in last_name(ast.unparse(node.func)):
                    if node.args and isinstance(node.args[0], ast.Call) and self._may_be_error(node.args[0]):
                        yield self._made(statement, place, node.args[0], "returned")
                        continue
                    arguments = self._arguments(node, statement, place)
                    first = [forms for key, forms in arguments.items() if key in ("0", "message", "exc")]
                    if first:
                        site = self._site(statement, place, ast.unparse(node.func), "returned")
                        yield Draft(with_templates(site, first[0]))

    # --- handlers ---

    def _handled_class(self, statement: ast.stmt) -> str | None:
        for _, place in self._module.ancestors(statement):
            if isinstance(place.parent, ast.ExceptHandler):
                return ast.unparse(place.parent.type) if place.parent.type else None
        return None

    def _is_caught(self, statement: ast.stmt, error_class: str) -> bool:
        """Whether a handler around the site, in its own function, keeps the error from leaving."""
        for _, place in self._module.ancestors(statement):
            parent = place.parent
            if isinstance(parent, TRIES) and place.field == "body":
                for handler in parent.handlers:
                    if _catches(handler.type, error_class):
                        return not any(
                            _raises_again(inner, handler) for inner in own_statements(handler.body, loops=True)
                        )
            if isinstance(parent, WITHS):
                for item in parent.items:
                    call = item.context_expr
                    if isinstance(call, ast.Call) and last_name(ast.unparse(call.func)) == "suppress":
                        return any(_catches(kind, error_class) for kind in call.args)
        return False

    def _origin(self, name: str) -> str:
        return self._origins.get(name.partition(".")[0], "")


def _catches(caught: ast.expr | None, error_class: str) -> bool:
    if caught is None:
        return True
    if isinstance(caught, ast.Tuple):
        return any(_catches(part, error_class) for part in caught.elts)
    name = last_name(ast.unparse(caught))
    if name in (last_name(error_class), "BaseException"):
        return True
    handler, raised = (getattr(builtins, part, None) for part in (name, error_class))
    if isinstance(handler, type) and isinstance(raised, type):
        return issubclass(raised, handler)
    return name == "Exception"


def _raises_again(statement: ast.stmt, handler: ast.ExceptHandler) -> bool:
    return isinstance(statement, ast.Raise) and (
        statement.exc is None or (isinstance(statement.exc, ast.Name) and statement.exc.id == handler.name)
    )


def _imported_names(module: Module, file: str) -> Iterator[tuple[str, str]]:
    """Name and dotted module of each `from module import name`."""
    folders = file.removesuffix(".py").split("/")
    for statement in module.places:
        if isinstance(statement, ast.ImportFrom):
            base = folders[: len(folders) - statement.level] if statement.level else []
            origin = ".".join([*base, *([statement.module] if statement.module else [])])
            for alias in statement.names:
                yield alias.asname or alias.name, origin
