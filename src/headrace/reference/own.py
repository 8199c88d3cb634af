"""What Headrace knows about its own errors beyond their source: the class, its words, and steps that lead to it."""

from __future__ import annotations

import inspect
from dataclasses import dataclass

from headrace.errors import error_with_id
from headrace.reference.examples import Example, examples


@dataclass(frozen=True, slots=True)
class OwnError:
    """One class of `headrace.errors`."""

    name: str
    meaning: str
    """The docstring."""
    template: str
    remedy: str
    rendered: str
    """The message with the facts of the class's own example."""
    example: Example | None


def own_error(page_id: str) -> OwnError | None:
    """The class that has this id, or None if it is no error of Headrace."""
    cls = error_with_id(page_id)
    if cls is None:
        return None
    return OwnError(
        name=cls.__name__,
        meaning=inspect.getdoc(cls) or "",
        template=cls.template,
        remedy=cls.remedy,
        rendered=cls(**cls.example).message,
        example=examples().get(cls.__name__),
    )
