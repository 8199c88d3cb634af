"""The objects of one run, built from values that were chosen for some of them. Knows no conditions and no source."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from headrace.reference.running.stubs import Raises, Stub

Step = tuple[str, Any]
"""("attribute", name), ("item", key), ("call", None), or last ("contains", value)."""
Path = tuple[Any, ...]
"""The name that it begins with, then steps."""
Assignment = dict[Path, Any]


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
