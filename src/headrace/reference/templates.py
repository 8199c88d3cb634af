"""The forms that a string expression can take, by every definition that reaches it. Knows no errors and no conditions.

What cannot be told from the source is a placeholder, never a guess: `f"{name} is missing"` is a placeholder and a text,
and if `name` is one of two texts by then, it is two texts.
"""

from __future__ import annotations

import ast
from collections.abc import Callable
from dataclasses import dataclass, field

from headrace.reference import pieces
from headrace.reference.flow import FUNCTIONS, LOOPS, TRIES, Function, Module, Scope, assigned_names, terminates
from headrace.reference.pieces import MOST_FORMS, Forms, concatenated, placeholder
from headrace.reference.records import Placeholder, PlaceholderKind
from headrace.reference.values import is_exception_name, kind_of, kind_of_parameter

FILLED = "format:"
"""Begins the expression of a placeholder for an attribute of `self` that is a format, filled when the error is made."""
_DEEPEST = 12
_SAME_TEXT = {"dedent", "textwrap.dedent", "inspect.cleandoc", "cleandoc", "str", "_", "gettext"}
_STRIPS = {"strip": "both", "lstrip": "left", "rstrip": "right"}


@dataclass(slots=True)
class Texts:
    """Reads the string expressions of one scope."""

    module: Module
    scope: Scope
    cls: ast.ClassDef | None = None
    """The class that `self` is of."""
    bindings: dict[str, Forms] = field(default_factory=dict)
    """What the parameters are, if the caller is known."""
    depth: int = 0
    """How many functions and definitions have been entered so far."""
    late: bool = False
    """Attributes of `self` stay placeholders, since a subclass may set them; `FILLED` marks one that is a format."""
    of_each: frozenset[str] = frozenset()
    """Names that a comprehension around the text binds: what they are differs each time."""

    def of(self, node: ast.expr, at: ast.stmt) -> Forms:
        """The forms of `node`, evaluated where the statement `at` stands."""
        if self.depth > _DEEPEST:
            return self._opaque(node)
        forms = self._forms(node, at)
        return pieces.fullest_first(forms)[:MOST_FORMS]

    def _forms(self, node: ast.expr, at: ast.stmt) -> Forms:
        match node:
            case ast.Constant(value=str() as literal):
                return [(literal,)] if literal else [()]
            case ast.Constant(value=None):
                return []
            case ast.JoinedStr():
                return concatenated([self._part(part, at) for part in node.values])
            case ast.BinOp(op=ast.Add()):
                return self._sum(node, at)
            case ast.BinOp(op=ast.Mod()):
                return self._percent(node, at)
            case ast.IfExp():
                return [*self.of(node.body, at), *self.of(node.orelse, at)]
            case ast.BoolOp(op=ast.Or()):
                forms = [form for value in node.values for form in self.of(value, at)]
                return forms if _tells(forms) else self._opaque(node)
            case ast.NamedExpr() | ast.Await():
                return self.of(node.value, at)
            case ast.Name():
                return self._name(node, at)
            case ast.Attribute():
                return self._attribute(node, at)
            case ast.Call():
                return self._call(node, at)
        return self._opaque(node)

    def _opaque(self, node: ast.expr) -> Forms:
        return placeholder(ast.unparse(node), kind_of(node))

    # --- f-strings and the older ways to fill a text ---

    def _part(self, part: ast.expr, at: ast.stmt) -> Forms:
        if not isinstance(part, ast.FormattedValue):
            return self.of(part, at)
        if part.conversion in (ord("r"), ord("a")):
            return placeholder(ast.unparse(part.value), "quoted")
        if part.format_spec is not None:
            spec = ast.unparse(part.format_spec)[2:-1]
            return placeholder(ast.unparse(part.value), _firm(pieces.kind_of_spec(spec), kind_of(part.value)))
        return self._inlined(part.value, at)

    def _inlined(self, value: ast.expr, at: ast.stmt) -> Forms:
        """A value that is put into a text: its own text if it has one, else a placeholder for it as written."""
        forms = self.of(value, at)
        if _tells(forms) or self.late or isinstance(value, ast.JoinedStr):
            return forms
        kinds = {piece.kind for form in forms for piece in form if isinstance(piece, Placeholder)}
        return placeholder(ast.unparse(value), kinds.pop() if len(kinds) == 1 else "any")

    def _sum(self, node: ast.BinOp, at: ast.stmt) -> Forms:
        forms = concatenated([self.of(node.left, at), self.of(node.right, at)])
        return forms if _tells(forms) else self._opaque(node)

    def _percent(self, node: ast.BinOp, at: ast.stmt) -> Forms:
        forms: Forms = []
        for form in self.of(node.left, at):
            if len(form) == 1 and isinstance(form[0], str) and (parsed := pieces.parse_percent(form[0])) is not None:
                forms += self._filled_percent(parsed, node.right, at)
            else:
                return self._opaque(node)
        return forms

    def _filled_percent(self, parsed: list[str | tuple[str | None, str]], right: ast.expr, at: ast.stmt) -> Forms:
        values = list(right.elts) if isinstance(right, ast.Tuple) else [right]
        keys = _string_keys(right)
        parts: list[Forms] = []
        for part in parsed:
            if isinstance(part, str):
                parts.append([(part,)])
                continue
            key, conversion = part
            value = keys.get(key) if key else (values.pop(0) if values else None)
            if value is None:
                parts.append(placeholder(f"{ast.unparse(right)}[{key!r}]" if key else "?"))
            elif conversion == "s":
                parts.append(self._inlined(value, at))
            else:
                kind: PlaceholderKind = "quoted" if conversion in "ra" else "float" if conversion in "eEfFgG" else "int"
                parts.append(placeholder(ast.unparse(value), kind))
        return concatenated(parts)

    def _filled_braces(self, format_text: str, call: ast.Call, at: ast.stmt) -> Forms | None:
        parsed = pieces.parse_braces(format_text)
        if parsed is None or any(isinstance(argument, ast.Starred) for argument in call.args):
            return None
        keywords = {keyword.arg: keyword.value for keyword in call.keywords if keyword.arg}
        position = 0
        parts: list[Forms] = []
        for part in parsed:
            if isinstance(part, str):
                parts.append([(part,)])
                continue
            name, conversion, spec = part
            if name == "":
                name, position = str(position), position + 1
            parts.append(self._field(name, conversion, spec, keywords, call, at))
        return concatenated(parts)

    def _field(
        self,
        name: str,
        conversion: str,
        spec: str,
        keywords: dict[str, ast.expr],
        call: ast.Call,
        at: ast.stmt,
    ) -> Forms:
        head = name.replace("[", ".").partition(".")[0]
        value = keywords.get(head)
        if head.isdigit() and int(head) < len(call.args):
            value = call.args[int(head)]
        expr = name if value is None else ast.unparse(value) + name[len(head) :]
        if conversion in ("r", "a"):
            return placeholder(expr, "quoted")
        if spec or value is None or head != name:
            return placeholder(expr, pieces.kind_of_spec(spec))
        return self._inlined(value, at)

    # --- names ---

    def _name(self, node: ast.Name, at: ast.stmt) -> Forms:
        if node.id in self.of_each:
            return placeholder(node.id, kind_of(node))
        deeper = self._deeper()
        forms = deeper._before(node.id, at)
        if forms and len(forms) <= MOST_FORMS:
            return forms if _tells(forms) or self.late else placeholder(node.id, _common_kind(forms, node))
        return placeholder(node.id, kind_of(node))

    def _deeper(self) -> Texts:
        return Texts(self.module, self.scope, self.cls, self.bindings, self.depth + 1, self.late)

    def _before(self, name: str, at: ast.AST) -> Forms:
        """The forms that the name can have just before a statement runs; loops are taken to turn once or never."""
        place = self.module.places.get(at)
        if place is None or self.depth > _DEEPEST:
            return placeholder(name)
        forms, passes = self._after_block(name, place.before)
        if passes:
            forms = forms + self._at_start(name, place.parent, place.field)
        return forms[: MOST_FORMS + 1]

    def _at_start(self, name: str, parent: ast.AST, block: str) -> Forms:
        """The forms just before the first statement of a block of `parent`."""
        if isinstance(parent, (*FUNCTIONS, ast.ClassDef, ast.Module)):
            return self._outside(name, parent)
        if isinstance(parent, ast.ExceptHandler):
            if parent.name == name:
                return placeholder(name, "exception")
            attempt = self.module.places[parent].parent
            assert isinstance(attempt, TRIES)
            return self._after_block(name, attempt.body)[0] + self._before(name, attempt)
        if isinstance(parent, TRIES) and block != "body":
            forms, passes = self._after_block(name, parent.body)
            return forms + self._before(name, parent) if passes else forms
        if isinstance(parent, ast.match_case):
            return self._before(name, self.module.places[parent].parent)
        if isinstance(parent, ast.stmt) and not isinstance(parent, TRIES) and name in set(assigned_names(parent)):
            return placeholder(name)
        return self._before(name, parent)

    def _outside(self, name: str, scope: Scope) -> Forms:
        if isinstance(scope, FUNCTIONS):
            if name in self.bindings:
                return self.bindings[name]
            for argument in _all_arguments(scope):
                if argument.arg == name:
                    return placeholder(name, kind_of_parameter(argument))
            if isinstance(self.module.owners[scope], FUNCTIONS):
                outer = Texts(self.module, self.module.owners[scope], self.cls, {}, self.depth + 1, self.late)
                return outer._before(name, scope)
        constant = self.module.constants.get(name)
        if constant is not None:
            forms = Texts(self.module, self.module.tree, None, {}, self.depth + 1).of(
                constant, self.module.tree.body[-1]
            )
            if _tells(forms):
                return forms
            return placeholder(name, kind_of(constant))
        return placeholder(name, "exception" if is_exception_name(name) else "any")

    def _after_block(self, name: str, block: list[ast.stmt]) -> tuple[Forms, bool]:
        """The forms that a block gives to the name, and whether it can leave the name as it was."""
        forms: Forms = []
        for statement in reversed(block):
            given, passes = self._after(name, statement)
            forms += given
            if not passes:
                return forms, False
        return forms, True

    def _after(self, name: str, statement: ast.stmt) -> tuple[Forms, bool]:
        match statement:
            case ast.Assign():
                for target in statement.targets:
                    if (given := self._assigned(name, target, statement.value, statement)) is not None:
                        return given, False
                return [], True
            case ast.AnnAssign(target=ast.Name(id=target_name), value=ast.expr() as value) if target_name == name:
                return self.of(value, statement), False
            case ast.AugAssign(target=ast.Name(id=target_name)) if target_name == name:
                if isinstance(statement.op, ast.Add):
                    return concatenated(
                        [self._deeper()._before(name, statement), self.of(statement.value, statement)]
                    ), False
                return placeholder(name), False
            case ast.If():
                return self._either(name, [statement.body, statement.orelse])
            case ast.Match():
                forms, _ = self._either(name, [case.body for case in statement.cases])
                return forms, True
            case ast.Try() | ast.TryStar():
                forms, passes = self._either(name, [statement.body, *(part.body for part in statement.handlers)])
                later, through = self._after_block(name, [*statement.orelse, *statement.finalbody])
                return forms + later, passes and through
            case ast.With() | ast.AsyncWith() if name not in set(assigned_names(statement)):
                return self._after_block(name, statement.body)
        if isinstance(statement, LOOPS) and name not in set(assigned_names(statement)):
            forms, _ = self._after_block(name, statement.body)
            return forms, True
        return (placeholder(name), False) if name in set(assigned_names(statement)) else ([], True)

    def _assigned(self, name: str, target: ast.expr, value: ast.expr, at: ast.stmt) -> Forms | None:
        if isinstance(target, ast.Name):
            return self.of(value, at) if target.id == name else None
        if isinstance(target, ast.Tuple | ast.List):
            same = isinstance(value, ast.Tuple | ast.List) and len(value.elts) == len(target.elts)
            for index, part in enumerate(target.elts):
                if any(isinstance(node, ast.Name) and node.id == name for node in ast.walk(part)):
                    element = value.elts[index] if same and isinstance(value, ast.Tuple | ast.List) else None
                    if isinstance(part, ast.Name) and element is not None:
                        return self.of(element, at)
                    return placeholder(name)
        return None

    def _either(self, name: str, blocks: list[list[ast.stmt]]) -> tuple[Forms, bool]:
        forms: Forms = []
        passes = False
        for block in blocks:
            if terminates(block):
                continue
            given, through = self._after_block(name, block)
            forms += given
            passes = passes or through
        return forms, passes

    # --- attributes and calls ---

    def _attribute(self, node: ast.Attribute, at: ast.stmt) -> Forms:
        owner = node.value.id if isinstance(node.value, ast.Name) else None
        cls = self.cls if owner in ("self", "cls") else self.module.classes.get(owner or "")
        if cls is not None:
            value = None if self.late else class_constant(cls, node.attr)
            if isinstance(value, ast.Constant) and isinstance(value.value, str):
                return [(value.value,)]
            function = self.module.functions.get(f"{self.module.qualname(cls)}.{node.attr}")
            if function is not None and any(ast.unparse(mark).endswith("property") for mark in function.decorator_list):
                forms = self._returned(function, ast.Call(node, [], []), at)
                if forms:
                    return forms
        return self._opaque(node)

    def _call(self, node: ast.Call, at: ast.stmt) -> Forms:
        match node:
            case ast.Call(func=ast.Attribute(attr="format", value=text)):
                return self._format(text, node, at)
            case ast.Call(func=ast.Attribute(attr="join", value=separator), args=[items]):
                return self._join(separator, items, node, at)
            case ast.Call(func=ast.Attribute(attr=("strip" | "lstrip" | "rstrip") as name, value=text), args=[]):
                forms = self.of(text, at)
                if _tells(forms):
                    return [pieces.stripped(form, _STRIPS[name]) for form in forms]
            case ast.Call(args=[text]) if ast.unparse(node.func) in _SAME_TEXT:
                return self._inlined(text, at) if not isinstance(text, ast.Starred) else self._opaque(node)
        function, cls = self.callee(node)
        if function is not None:
            reader = Texts(self.module, self.scope, cls, self.bindings, self.depth, self.late)
            forms = reader._returned(function, node, at)
            if forms:
                return forms
        return self._opaque(node)

    def _format(self, text: ast.expr, node: ast.Call, at: ast.stmt) -> Forms:
        forms: Forms = []
        if self.late and (name := _late_format(text, node)):
            return placeholder(FILLED + name)
        for form in self.of(text, at):
            literal = "".join(piece if isinstance(piece, str) else "" for piece in form)
            whole = all(isinstance(piece, str) for piece in form)
            filled = self._filled_braces(literal, node, at) if whole else None
            if filled is None:
                return self._opaque(node)
            forms += filled
        return forms

    def _join(self, separator: ast.expr, items: ast.expr, node: ast.Call, at: ast.stmt) -> Forms:
        between = self.of(separator, at)
        if isinstance(items, ast.List | ast.Tuple) and not any(isinstance(item, ast.Starred) for item in items.elts):
            parts: list[Forms] = []
            for index, item in enumerate(items.elts):
                parts += [between] if index else []
                parts.append(self._inlined(item, at))
            return concatenated(parts)
        return placeholder(ast.unparse(node), "list")

    def callee(self, node: ast.Call) -> tuple[Function | None, ast.ClassDef | None]:
        """The function of this module that a call means, and the class that its `self` is of."""
        match node.func:
            case ast.Name(id=name):
                return self.module.functions.get(name), None
            case ast.Attribute(value=ast.Name(id="self" | "cls"), attr=name) if self.cls is not None:
                return self.module.functions.get(f"{self.module.qualname(self.cls)}.{name}"), self.cls
        return None, None

    def _returned(self, function: Function, node: ast.Call, at: ast.stmt) -> Forms:
        """The forms of what a function of this module returns for a call; empty if it has no text of its own."""
        if self.depth > 3 or (isinstance(function, ast.AsyncFunctionDef) and self.depth > 1):
            return []
        inside = Texts(self.module, function, self.cls, self._bound(function, node, at), self.depth + 1, self.late)
        forms = self.returned_by(function, lambda value, where: inside.of(value, where))
        return forms if _tells(forms) and len(forms) <= MOST_FORMS else []

    def returned_by(self, function: Function, read: Callable[[ast.expr, ast.stmt], Forms]) -> Forms:
        """What `read` makes of each value that a function returns."""
        forms: Forms = []
        for statement, place in self.module.places.items():
            if isinstance(statement, ast.Return) and place.scope is function and statement.value is not None:
                forms += read(statement.value, statement)
        return forms

    def _bound(self, function: Function, node: ast.Call, at: ast.stmt) -> dict[str, Forms]:
        names = [argument.arg for argument in (*function.args.posonlyargs, *function.args.args)]
        if names and names[0] in ("self", "cls") and isinstance(node.func, ast.Attribute):
            names = names[1:]
        bound: dict[str, Forms] = {}
        for name, value in zip(names, node.args, strict=False):
            if isinstance(value, ast.Starred):
                break
            bound[name] = self._inlined(value, at)
        for keyword in node.keywords:
            if keyword.arg:
                bound[keyword.arg] = self._inlined(keyword.value, at)
        return bound


def _all_arguments(function: Function) -> list[ast.arg]:
    spec = function.args
    return [*spec.posonlyargs, *spec.args, *spec.kwonlyargs, *filter(None, (spec.vararg, spec.kwarg))]


def class_constant(cls: ast.ClassDef, name: str) -> ast.expr | None:
    """What the class body assigns to a name, if it does so once."""
    values = [
        statement.value
        for statement in cls.body
        if isinstance(statement, ast.Assign | ast.AnnAssign) and name in set(assigned_names(statement))
    ]
    return values[0] if len(values) == 1 else None


def _string_keys(node: ast.expr) -> dict[str | None, ast.expr]:
    if not isinstance(node, ast.Dict):
        return {}
    return {
        key.value: value
        for key, value in zip(node.keys, node.values, strict=True)
        if isinstance(key, ast.Constant) and isinstance(key.value, str)
    }


def _late_format(text: ast.expr, node: ast.Call) -> str | None:
    """The attribute in `self.NAME.format(...)` or `Formatter().format(self.NAME, ...)`."""
    for candidate in (text, *node.args[:1]):
        match candidate:
            case ast.Attribute(value=ast.Name(id="self" | "cls"), attr=name):
                return name
    return None


def _tells(forms: Forms) -> bool:
    return any(isinstance(piece, str) or piece.expr.startswith(FILLED) for form in forms for piece in form)


def _firm(first: PlaceholderKind, second: PlaceholderKind) -> PlaceholderKind:
    return second if first == "any" else first


def _common_kind(forms: Forms, node: ast.Name) -> PlaceholderKind:
    kinds = {piece.kind for form in forms for piece in form if isinstance(piece, Placeholder)}
    return kinds.pop() if len(kinds) == 1 else kind_of(node)
