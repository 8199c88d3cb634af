"""What Headrace knows about its own errors beyond their source: the class, its words, and steps that lead to it."""

from __future__ import annotations

import inspect
from dataclasses import dataclass

from headrace.errors import HeadraceError, error_with_id, error_with_name
from headrace.reference.examples import Example, examples
from headrace.reference.records import Page


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


def own_error(page: Page) -> OwnError | None:
    """The class that a page of ours is about, or None if it is no error of Headrace.

    A piece of a message has a page of its own; it belongs to the class that puts it together.
    """
    cls = error_with_id(page.id)
    if cls is None and any(site.fragment for site in page.sites):
        cls = error_with_name(page.error_class)
    return None if cls is None else _described(cls)


def own_error_with_id(page_id: str) -> OwnError | None:
    """The class whose page has this id, also where no page was built."""
    cls = error_with_id(page_id)
    return None if cls is None else _described(cls)


def _described(cls: type[HeadraceError]) -> OwnError:
    return OwnError(
        name=cls.__name__,
        meaning=inspect.getdoc(cls) or "",
        template=cls.template,
        remedy=cls.remedy,
        rendered=cls(**cls.example).message,
        example=examples().get(cls.__name__),
    )
