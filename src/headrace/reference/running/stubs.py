"""Stand-ins for what a function that was cut out of its module cannot have. Knows no source code.

A stub gives another stub for whatever is asked of it. What it cannot know it guesses, the same in a whole run, and
counts the guesses (`Guesses`): what a guess decided was not shown by running.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any


class Guesses:
    """How stubs answer what they cannot know, and how often they had to."""

    def __init__(self) -> None:
        self.answer = False
        self.count = 0

    def guess(self) -> bool:
        self.count += 1
        return self.answer


GUESSES = Guesses()
_UNSET = object()


class Stub:
    """An object of which only a path is known: `self.config.size`."""

    def __init__(
        self,
        path: str,
        *,
        constant: bool = False,
        certain: bool = False,
        kinds: frozenset[str] = frozenset(),
        absent: frozenset[str] = frozenset(),
        result: Any = _UNSET,
        items: dict[Any, Any] | None = None,
        base: Stub | None = None,
    ) -> None:
        self._path = path
        self._constant = constant
        """A name of the module or a library: equal to nothing but itself, and never empty."""
        self._certain = certain
        """It is known to be an object, and so counts as true."""
        self._kinds = kinds
        self._absent = absent
        self._result = result
        self._items = items if items is not None else {}
        self._base = base
        """Whom to ask for what has no value here, so that constants stay the same objects."""

    def __getattr__(self, name: str) -> Any:
        if (name.startswith("__") and name.endswith("__")) or name in self.__dict__.get("_absent", ()):
            raise AttributeError(name)
        base = self.__dict__.get("_base")
        child = Stub(f"{self._path}.{name}", constant=self._constant) if base is None else getattr(base, name)
        self.__dict__[name] = child
        return child

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        if self._result is _UNSET:
            self._result = Stub(f"{self._path}()")
        if isinstance(self._result, Raises):
            raise self._result.error
        return self._result

    def __getitem__(self, key: Any) -> Any:
        try:
            if key not in self._items:
                self._items[key] = Stub(f"{self._path}[{key!r}]")
            return self._items[key]
        except TypeError:
            return Stub(f"{self._path}[...]")

    def __setitem__(self, key: Any, value: Any) -> None:
        self._items[key] = value

    def __delitem__(self, key: Any) -> None:
        self._items.pop(key, None)

    # --- what it cannot know ---

    def __bool__(self) -> bool:
        return True if self._certain or self._constant else GUESSES.guess()

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if not (self._constant or (isinstance(other, Stub) and other._constant)):
            GUESSES.guess()
        return False

    def __hash__(self) -> int:
        return id(self)

    def __contains__(self, item: object) -> bool:
        return GUESSES.guess()

    def __len__(self) -> int:
        return int(GUESSES.guess())

    def __iter__(self) -> Iterator[Any]:
        GUESSES.guess()
        return iter(())

    def __next__(self) -> Any:
        GUESSES.guess()
        raise StopIteration

    def __int__(self) -> int:
        return int(GUESSES.guess())

    def __index__(self) -> int:
        return int(GUESSES.guess())

    def __float__(self) -> float:
        return float(GUESSES.guess())

    def __instancecheck__(self, instance: object) -> bool:
        if isinstance(instance, Stub):
            if not (instance._kinds or instance._constant):
                GUESSES.guess()
            return self._path in instance._kinds
        return False

    def __subclasscheck__(self, subclass: object) -> bool:
        GUESSES.guess()
        return False

    # --- the rest of what objects can do ---

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *failure: object) -> None:
        return None

    def __str__(self) -> str:
        return self._path

    __repr__ = __str__

    def __format__(self, spec: str) -> str:
        return self._path


def _arithmetic(name: str) -> Callable[..., Stub]:
    def compute(self: Stub, *others: Any) -> Stub:
        return Stub(f"{name}({self._path})")

    return compute


def _order(name: str) -> Callable[[Stub, Any], bool]:
    def compare(self: Stub, other: Any) -> bool:
        return GUESSES.guess()

    return compare


for _name in (
    "add",
    "sub",
    "mul",
    "truediv",
    "floordiv",
    "mod",
    "pow",
    "and",
    "or",
    "xor",
    "lshift",
    "rshift",
    "matmul",
):
    setattr(Stub, f"__{_name}__", _arithmetic(_name))
    setattr(Stub, f"__r{_name}__", _arithmetic(_name))
for _name in ("neg", "pos", "abs", "invert", "round"):
    setattr(Stub, f"__{_name}__", _arithmetic(_name))
for _name in ("lt", "le", "gt", "ge"):
    setattr(Stub, f"__{_name}__", _order(_name))


class Raises:
    """In the place of a value: getting it raises."""

    def __init__(self, error: BaseException) -> None:
        self.error = error


class _StandIn(Exception):
    """The base of error classes that only have a name here."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments)
        self.named = named

    def texts(self) -> list[str]:
        """Every text that the error was made with."""
        return [str(each) for each in (*self.args, *self.named.values())]


@functools.cache
def error_class(name: str) -> type[_StandIn]:
    """A class for an error that is known by its dotted name alone."""
    return type(name.rpartition(".")[2], (_StandIn,), {})


def texts_of(error: BaseException) -> list[str]:
    """What an error says; for a stand-in any text that it was made with, since its class would build the message."""
    return error.texts() if isinstance(error, _StandIn) else [str(error)]
