"""Error classes that build their own text: in `__init__`, in `__str__`, or from attributes that subclasses set.

One file at a time becomes records (`read_classes`); the package's records together tell what a call of a class prints
(`ClassIndex`). Knows no sites and no conditions.
"""

from __future__ import annotations

import ast
import builtins
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from headrace.reference import pieces
from headrace.reference.flow import Function, Module, own_statements
from headrace.reference.pieces import Forms, concatenated, placeholder
from headrace.reference.records import Placeholder, Template
from headrace.reference.templates import FILLED, Texts

_ENDINGS = ("Error", "Exception", "Warning", "Exit", "Interrupt", "Abort", "Failure", "NotFound")
_BASE_TEXT = "super().__str__()"
_OS_ERRORS = {name for name, value in vars(builtins).items() if isinstance(value, type) and issubclass(value, OSError)}
_TEXT_NAMES = ("message", "msg", "detail", "reason", "error", "description")


@dataclass(frozen=True, slots=True)
class ErrorClass:
    """What one class says about its text. Forms speak of parameters by their names."""

    name: str
    file: str
    bases: tuple[str, ...]
    parameters: tuple[str, ...] | None = None
    """Of its own `__init__`, without `self`; None if it has none."""
    defaults: Mapping[str, Forms] = field(default_factory=dict)
    message: Forms | None = None
    """What its `__init__` hands to the one above; None if it hands over nothing."""
    attributes: Mapping[str, Forms] = field(default_factory=dict)
    """What its `__init__` keeps on `self`."""
    text: Forms | None = None
    """What its own `__str__` returns."""
    constants: Mapping[str, str] = field(default_factory=dict)
    """Texts among its class attributes."""


def last_name(written: str) -> str:
    """`ArgumentTypeError` of `argparse.ArgumentTypeError`."""
    return written.rpartition(".")[2]


def looks_like_error(name: str) -> bool:
    """Whether a class with this name is an error, as far as names tell."""
    value = getattr(builtins, name, None)
    if isinstance(value, type):
        return issubclass(value, BaseException)
    plain = last_name(name).lstrip("_")
    return plain[:1].isupper() and plain.endswith(_ENDINGS)


def read_classes(module: Module, file: str) -> Iterator[ErrorClass]:
    """The error classes of one file."""
    known: set[str] = set()
    for qualname, cls in module.classes.items():
        bases = tuple(last_name(ast.unparse(base)) for base in cls.bases)
        if any(base in known or looks_like_error(base) for base in bases):
            known.add(cls.name)
            yield _read_class(module, file, cls, qualname, bases)


def _read_class(module: Module, file: str, cls: ast.ClassDef, qualname: str, bases: tuple[str, ...]) -> ErrorClass:
    constants = {
        target.id: statement.value.value
        for statement in cls.body
        if isinstance(statement, ast.Assign | ast.AnnAssign)
        for target in (statement.targets if isinstance(statement, ast.Assign) else [statement.target])
        if isinstance(target, ast.Name)
        and isinstance(statement.value, ast.Constant)
        and isinstance(statement.value.value, str)
    }
    init = _method(cls, "__init__")
    string = _method(cls, "__str__")
    text = None
    if string is not None:
        texts = Texts(module, string, cls, late=True)
        text = texts.returned_by(string, texts.of)
    if init is None:
        return ErrorClass(cls.name, file, bases, text=text, constants=constants)
    return ErrorClass(
        cls.name,
        file,
        bases,
        parameters=_parameters(init),
        defaults=_defaults(module, init, cls),
        message=_message(module, init, cls),
        attributes=_attributes(module, init, cls),
        text=text,
        constants=constants,
    )


def _method(cls: ast.ClassDef, name: str) -> ast.FunctionDef | None:
    for statement in cls.body:
        if isinstance(statement, ast.FunctionDef) and statement.name == name:
            return statement
    return None


def _parameters(init: Function) -> tuple[str, ...]:
    spec = init.args
    star = [f"*{spec.vararg.arg}"] if spec.vararg else []
    return (*(arg.arg for arg in (*spec.posonlyargs, *spec.args)[1:]), *star, *(arg.arg for arg in spec.kwonlyargs))


def _defaults(module: Module, init: Function, cls: ast.ClassDef) -> dict[str, Forms]:
    spec = init.args
    names = [arg.arg for arg in (*spec.posonlyargs, *spec.args)]
    pairs = [*zip(reversed(names), reversed(spec.defaults), strict=False)]
    pairs += [(arg.arg, value) for arg, value in zip(spec.kwonlyargs, spec.kw_defaults, strict=True) if value]
    texts = Texts(module, init, cls)
    return {name: texts.of(value, init) for name, value in pairs if isinstance(value, ast.Constant | ast.Name)}


def _message(module: Module, init: Function, cls: ast.ClassDef) -> Forms | None:
    texts = Texts(module, init, cls, late=True)
    forms: Forms | None = None
    for statement in own_statements(init.body, loops=True):
        match statement:
            case ast.Expr(value=ast.Call(func=ast.Attribute(attr="__init__"), args=[*args]) as call):
                above = isinstance(call.func, ast.Attribute) and ast.unparse(call.func.value)
                values = args if above == "super()" or (above or "").startswith("super(") else args[1:]
                values = values or [keyword.value for keyword in call.keywords if keyword.arg in _TEXT_NAMES]
                if len(values) >= 1 and not any(isinstance(value, ast.Starred) for value in values):
                    forms = (forms or []) + _telling(values, texts, statement)
    return forms


def _telling(values: list[ast.expr], texts: Texts, at: ast.stmt) -> Forms:
    """The forms of the value that has the most text of its own; the first one if none has any."""
    return max((texts.of(value, at) for value in values), key=_weight)


def _weight(forms: Forms) -> int:
    return max((pieces.literal_length(form) for form in forms), default=0)


def _attributes(module: Module, init: Function, cls: ast.ClassDef) -> dict[str, Forms]:
    texts = Texts(module, init, cls, late=True)
    found: dict[str, Forms] = {}
    for statement in own_statements(init.body, loops=True):
        match statement:
            case (
                ast.Assign(targets=[ast.Attribute(value=ast.Name(id="self"), attr=name)], value=value)
                | ast.AnnAssign(target=ast.Attribute(value=ast.Name(id="self"), attr=name), value=ast.expr() as value)
            ):
                found[name] = found.get(name, []) + texts.of(value, statement)
    return found


class ClassIndex:
    """What calls of a package's error classes print."""

    def __init__(self, classes: Iterable[ErrorClass]) -> None:
        self._by_name: dict[str, list[ErrorClass]] = {}
        for cls in classes:
            self._by_name.setdefault(cls.name, []).append(cls)

    def find(self, written: str, file: str, origin: str = "") -> ErrorClass | None:
        """The class that a name means in a file; `origin` is the dotted module that the name was imported from."""
        found = self._by_name.get(last_name(written), [])
        for matches in (
            [cls for cls in found if cls.file == file],
            [cls for cls in found if origin and _module_of(cls.file) == origin],
            found,
        ):
            if len(matches) == 1:
                return matches[0]
        return None

    def forms(self, written: str, file: str, origin: str, arguments: Mapping[str, Forms]) -> Forms:
        """What `raise Class(arguments)` prints; what names the page comes first."""
        line = self._line(self.find(written, file, origin))
        if not line:
            return default_forms(last_name(written), arguments)
        base = self._message(line, arguments)
        own = next((cls for cls in line if cls.text is not None), None)
        if own is None or own.text is None:
            return self._own_words(base)
        texts = self._bound(line, arguments)
        decorated = _all_replaced(own.text, {_BASE_TEXT: base, "self.args[0]": base, **texts})
        decorated = [self._filled(form, line) for form in decorated]
        if any(_BASE_TEXT in _exprs(form) for form in own.text):
            return list(dict.fromkeys([*base, *decorated]))
        return self._own_words(decorated)

    @staticmethod
    def _own_words(forms: Forms) -> Forms:
        """A page is named by what the class says in any case, not by what it adds in some."""
        ordered = pieces.fullest_first(forms)
        whole = pieces.canonical(ordered[0]) if ordered else ""
        always = [form for form in ordered if pieces.has_words(form) and whole.startswith(pieces.canonical(form))]
        return [*always[-1:], *(form for form in ordered if form not in always[-1:])]

    def _line(self, cls: ErrorClass | None) -> list[ErrorClass]:
        """The class and those above it that the package defines, nearest first."""
        line: list[ErrorClass] = []
        todo = [cls] if cls is not None else []
        while todo:
            current = todo.pop(0)
            if current in line:
                continue
            line.append(current)
            todo += [found for base in current.bases if (found := self.find(base, current.file)) is not None]
        return line

    def bases(self) -> dict[str, list[str]]:
        """The names of the classes above each one, nearest first; of those whose name only one class has."""
        single = {name: found[0] for name, found in self._by_name.items() if len(found) == 1}
        return {
            name: list(dict.fromkeys(base for each in self._line(cls) for base in each.bases))
            for name, cls in single.items()
        }

    def _message(self, line: list[ErrorClass], arguments: Mapping[str, Forms]) -> Forms:
        for position, cls in enumerate(line):
            if cls.parameters is None:
                continue
            if cls.message is None:
                break
            bound = _bind(cls, arguments)
            forms = [form for message in cls.message for form in pieces.replaced(message, bound)]
            above = self._message(line[position + 1 :], {"0": forms}) if position + 1 < len(line) else forms
            return [self._filled(form, line) for form in above]
        return default_forms(line[-1].name if line else "", arguments)

    def _bound(self, line: list[ErrorClass], arguments: Mapping[str, Forms]) -> dict[str, Forms]:
        """What `self.NAME` is, where `__init__` or the class says it."""
        for cls in line:
            if cls.parameters is not None:
                bound = _bind(cls, arguments)
                return {
                    f"self.{name}": [form for given in forms for form in pieces.replaced(given, bound)]
                    for name, forms in cls.attributes.items()
                }
        return {}

    def _filled(self, template: Template, line: list[ErrorClass]) -> Template:
        """With the formats that are class attributes put in, their fields as placeholders."""
        out: list[str | Placeholder] = []
        for piece in template:
            if isinstance(piece, str) or not piece.expr.startswith(FILLED):
                out.append(piece)
                continue
            name = piece.expr.removeprefix(FILLED)
            format_text = next((cls.constants[name] for cls in line if name in cls.constants), None)
            parsed = pieces.parse_braces(format_text) if format_text is not None else None
            for part in parsed if parsed is not None else [(name, "", "")]:
                if isinstance(part, str):
                    out.append(part)
                else:
                    out.append(Placeholder(part[0], "quoted" if part[1] == "r" else pieces.kind_of_spec(part[2])))
        return pieces.join(out)


def _all_replaced(texts: Forms, values: Mapping[str, Forms]) -> Forms:
    """Every template of `texts` with the known values put in."""
    return [form for template in texts for form in pieces.replaced(template, dict(values))]


def default_forms(name: str, arguments: Mapping[str, Forms]) -> Forms:
    """What an error prints whose class leaves its arguments as they are; for a class of others, its likely message."""
    positional = [arguments[key] for key in sorted(arguments) if key.isdigit()]
    if "*" in arguments:
        return placeholder("*")
    builtin = isinstance(getattr(builtins, name, None), type)
    if not positional or not builtin:
        named = [forms for key, forms in arguments.items() if key in _TEXT_NAMES]
        candidates = [*positional, *named] or [forms for forms in arguments.values() if _weight(forms)]
        if not candidates:
            return []
        best = max(candidates, key=_weight)
        return best if len(candidates) == 1 or _weight(best) else candidates[0]
    if len(positional) == 1:
        return positional[0]
    if name in _OS_ERRORS and len(positional) <= 5:
        return concatenated([[("[Errno ",)], positional[0], [("] ",)], positional[1]])
    return _as_tuple(positional)


def _as_tuple(positional: list[Forms]) -> Forms:
    """Several arguments of a built-in error print as the repr of a tuple."""
    parts: list[Forms] = [[("(",)]]
    for index, forms in enumerate(positional):
        parts += [[(", ",)]] if index else []
        parts.append([_repr(form) for form in forms])
    return concatenated([*parts, [(")",)]])


def _repr(form: Template) -> Template:
    if not any(isinstance(piece, str) for piece in form):
        return tuple(Placeholder(piece.expr, "quoted") for piece in form if isinstance(piece, Placeholder))
    quote = '"' if any(isinstance(piece, str) and "'" in piece for piece in form) else "'"
    escaped = (repr(piece)[1:-1] if isinstance(piece, str) else piece for piece in form)
    return pieces.join([quote, *escaped, quote])


def _bind(cls: ErrorClass, arguments: Mapping[str, Forms]) -> dict[str, Forms]:
    bound = dict(cls.defaults)
    positional = [name for name in cls.parameters or () if not name.startswith("*")]
    for key, forms in arguments.items():
        if key.isdigit():
            if int(key) < len(positional):
                bound[positional[int(key)]] = forms
        else:
            bound[key] = forms
    return bound


def _exprs(template: Template) -> set[str]:
    return {piece.expr for piece in template if isinstance(piece, Placeholder)}


def _module_of(file: str) -> str:
    return file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
