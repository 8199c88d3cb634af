"""What the names around a function are, as far as its file tells: constants, enumerations, harmless modules, stubs.

Evaluates expressions of the examined source, so it is for the inside of the jail only.
"""

from __future__ import annotations

import ast
import builtins
import importlib
from collections.abc import Iterable, Mapping
from typing import Any

from headrace.reference.flow import Module
from headrace.reference.running.slices import Slice, cut
from headrace.reference.running.stubs import Stub, error_class

HARMLESS = (
    *("math", "re", "json", "enum", "typing", "types", "functools", "itertools", "operator", "collections"),
    *("collections.abc", "dataclasses", "copy", "string", "textwrap", "numbers", "abc", "datetime", "decimal"),
    *("fractions", "statistics", "bisect", "heapq", "base64", "binascii", "hashlib", "struct", "contextlib"),
    *("urllib.parse", "ast", "inspect", "posixpath", "warnings", "time", "uuid", "ipaddress", "http", "difflib"),
)
"""Modules of Python that compute and no more; they are loaded before the jail is locked."""
_NO_BUILTINS = frozenset(
    ["open", "exec", "eval", "compile", "input", "breakpoint", "exit", "quit", "help", "__import__", "print"]
)
_ENUMERATIONS = {"Enum", "IntEnum", "StrEnum", "Flag", "IntFlag", "str", "int", "enum.Enum", "enum.IntEnum"}


def load_harmless() -> None:
    """Import what may be used, while imports still work."""
    for name in HARMLESS:
        importlib.import_module(name)
    json = importlib.import_module("json")
    json.loads("[1.5, 1e3]")
    "".encode("idna")


def safe_builtins() -> dict[str, Any]:
    """Python's own names without those that reach outside."""
    names = {name: value for name, value in vars(builtins).items() if name not in _NO_BUILTINS}
    return names | {"print": lambda *arguments, **named: None, "__build_class__": builtins.__build_class__}


_UNKNOWN = object()
"""The name may be anything."""


class Names:
    """Finds out what the free names of a function are."""

    def __init__(self, module: Module, elsewhere: Mapping[str, str]) -> None:
        self._module = module
        self._elsewhere = elsewhere
        """Source of the constants and enumerations that are imported from other files of the package, by name."""
        self._imports = dict(_imports(module.tree))
        self._known: dict[str, Any] = {}
        self._cut: dict[tuple[str, int], Slice] = {}

    def cut(self, qualname: str, line: int) -> Slice | None:
        """The function of that name around a line; each is cut out once."""
        for (name, first), known in self._cut.items():
            if name == qualname and first <= line <= (known.function.end_lineno or 0):
                return known
        found = cut(self._module.tree, qualname, line)
        if found is not None:
            self._cut[qualname, found.function.lineno] = found
        return found

    def resolve(self, names: Iterable[str], errors: Iterable[str]) -> dict[str, Any]:
        """Every name that has a meaning here; those that are left out are stubs that can be given values."""
        found = {}
        for name in names:
            value = self._value(name, ())
            if value is not _UNKNOWN:
                found[name] = value
        for dotted in errors:
            root, _, rest = dotted.partition(".")
            if not rest:
                found[root] = error_class(root)
            elif not isinstance(found.get(root), type(ast)):
                stub = found.setdefault(root, Stub(root, constant=True))
                if isinstance(stub, Stub):
                    stub.__dict__[rest] = error_class(dotted)
        return found

    def _value(self, name: str, passed: tuple[str, ...]) -> Any:
        if name in passed or hasattr(builtins, name):
            return _UNKNOWN
        if name not in self._known:
            self._known[name] = self._found(name, (*passed, name))
        return self._known[name]

    def _found(self, name: str, passed: tuple[str, ...]) -> Any:
        if name in self._imports:
            value = self._imported(*self._imports[name])
            if value is not _UNKNOWN:
                return value
        if name in self._module.constants:
            return self._evaluated(self._module.constants[name], passed)
        if name in self._module.classes:
            return self._enumeration(self._module.classes[name], passed) or Stub(name, constant=True)
        if name in self._elsewhere:
            tree = ast.parse(self._elsewhere[name]).body[0]
            if isinstance(tree, ast.ClassDef):
                return self._enumeration(tree, passed) or Stub(name, constant=True)
            return self._evaluated(tree.value, passed) if isinstance(tree, ast.Expr) else _UNKNOWN
        return Stub(name, constant=True) if name[:1].isupper() else _UNKNOWN

    @staticmethod
    def _imported(module: str, name: str | None) -> Any:
        """What a harmless module gives."""
        if module == "os":
            os_stub = Stub("os", constant=True)
            os_stub.__dict__["path"] = importlib.import_module("posixpath")
            return _UNKNOWN if name else os_stub
        if module not in HARMLESS:
            return _UNKNOWN
        found = importlib.import_module(module)
        return found if name is None else getattr(found, name, _UNKNOWN)

    def _evaluated(self, expression: ast.expr, passed: tuple[str, ...]) -> Any:
        names = {node.id for node in ast.walk(expression) if isinstance(node, ast.Name)}
        around = {name: value for name in names if (value := self._value(name, passed)) is not _UNKNOWN}
        try:
            value = eval(compile(ast.Expression(expression), "<constant>", "eval"), _globals(around))
        except Exception:
            return _UNKNOWN
        return _UNKNOWN if isinstance(value, Stub) and not value._constant else value

    def _enumeration(self, cls: ast.ClassDef, passed: tuple[str, ...]) -> Any:
        bases = {ast.unparse(base) for base in cls.bases}
        if not bases or not bases <= _ENUMERATIONS or bases <= {"str", "int"}:
            return None
        enum = importlib.import_module("enum")
        around = {name: getattr(enum, name) for name in ("Enum", "IntEnum", "StrEnum", "Flag", "IntFlag", "auto")}
        plain = ast.ClassDef(cls.name, cls.bases, [], [each for each in cls.body if isinstance(each, ast.Assign)], [])
        module = ast.fix_missing_locations(ast.Module([plain], []))
        try:
            scope = _globals(around | {"enum": enum})
            exec(compile(module, "<enumeration>", "exec"), scope)
        except Exception:
            return None
        return scope[cls.name]


def _globals(names: Mapping[str, Any]) -> dict[str, Any]:
    return {"__builtins__": safe_builtins(), "__name__": "cut_out", **names}


def _imports(tree: ast.Module) -> Iterable[tuple[str, tuple[str, str | None]]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield (
                    alias.asname or alias.name.partition(".")[0],
                    (alias.name if alias.asname else alias.name.partition(".")[0], None),
                )
        elif isinstance(node, ast.ImportFrom) and not node.level:
            for alias in node.names:
                yield alias.asname or alias.name, (node.module or "", alias.name)
