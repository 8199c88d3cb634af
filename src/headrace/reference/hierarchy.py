"""Which classes stand above an error class, so that a handler of them catches it. Knows no source."""

from __future__ import annotations

import builtins
from collections.abc import Sequence

WRAPPED_BY_PYDANTIC = {"ValueError", "AssertionError"}
"""What a validator raises of these arrives as a ValidationError."""


def above(error_class: str, bases: Sequence[str]) -> list[str]:
    """The names of the classes above one, nearest first, down to `Exception`; `bases` are those that its package tells.

    Of Python's own classes what stands above them is known; of those of other packages nothing is said.
    """
    name = error_class.rpartition(".")[2]
    found: dict[str, None] = {}
    for each in (name, *bases):
        found[each] = None
        found |= dict.fromkeys(_of_python(each))
    return [each for each in found if each != name]


def _of_python(name: str) -> list[str]:
    cls = getattr(builtins, name, None)
    if not (isinstance(cls, type) and issubclass(cls, BaseException)):
        return []
    return [each.__name__ for each in cls.__mro__[1:-1]]
