"""Documents as HTML pages. Knows no database; what is linked where, served or in a folder, a `Links` tells.

Jinja2 fills the pages in `web/`, with everything escaped. They load one stylesheet and one script of ours, and nothing
from anywhere else.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.resources
import re
from collections.abc import Mapping, Sequence
from typing import Any, Protocol
from urllib.parse import urlencode

import jinja2
from markupsafe import Markup, escape

ASSETS = {"style.css": "text/css; charset=utf-8", "search.js": "text/javascript; charset=utf-8"}
BASES = {
    "guard": "the code that is tested before the error is raised",
    "docstring": "a docstring of the package",
    "comment": "a comment in the source",
    "test": "it was run, and what is said to raise the error raises it, what is said not to does not; or a test of the "
    "package expects it, which was read and not run",
    "note": "written by hand",
    "model": "written by a language model; what names something that is not in the source was dropped",
}
_CODE = re.compile(r"``(.+?)``|`([^`]+)`|((?<![\w-])--[a-z][\w-]*|\bself\.[\w.]*\w)")


class Links(Protocol):
    """Where pages are."""

    explains: bool
    """Whether a message can be explained there."""

    def index(self) -> str: ...
    def error(self, page_id: str) -> str: ...
    def json(self, page_id: str) -> str: ...
    def listing(self, package: str, error_class: str | None, number: int) -> str: ...
    def asset(self, name: str) -> str: ...
    def search_attributes(self) -> str: ...


class Served:
    """Links between pages that a server answers."""

    explains = True

    def index(self) -> str:
        return "/errors"

    def error(self, page_id: str) -> str:
        return f"/errors/{page_id}"

    def json(self, page_id: str) -> str:
        return f"/api/errors/{page_id}"

    def listing(self, package: str, error_class: str | None, number: int) -> str:
        given = {"package": package, "class": error_class, "page": number if number > 1 else None}
        return "/errors?" + urlencode({name: value for name, value in given.items() if value is not None})

    def asset(self, name: str) -> str:
        return f"/errors/-/{name}?{fingerprint(asset(name))}"

    def search_attributes(self) -> str:
        return Markup('data-api="/api/errors" data-explain="/api/explain" data-errors="/errors/" data-suffix=""')


@functools.cache
def asset(name: str) -> bytes:
    """The stylesheet or the script; `name` is a key of ASSETS."""
    return importlib.resources.files("headrace.reference").joinpath("web", name).read_bytes()


def fingerprint(content: bytes) -> str:
    """16 hex digits that change with the content."""
    return hashlib.blake2b(content, digest_size=8).hexdigest()


@functools.cache
def _environment() -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("headrace.reference", "web"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["prose"] = _prose
    environment.globals["bases"] = BASES
    return environment


def _prose(text: str) -> Markup:
    """A sentence with its `code`, flags and attributes set as code."""
    parts: list[Markup] = []
    end = 0
    for found in _CODE.finditer(text):
        parts += [escape(text[end : found.start()]), Markup("<code>{}</code>").format(found[1] or found[2] or found[3])]
        end = found.end()
    return Markup("").join([*parts, escape(text[end:])])


def _render(name: str, links: Links, **given: Any) -> str:
    return _environment().get_template(name).render(links=links, **given)


def error_page(document: Mapping[str, Any], links: Links) -> str:
    """One error."""
    return _render("error.html", links, error=document)


def answer_page(document: Mapping[str, Any], links: Links, query: str) -> str:
    """What can be said about a message that was pasted."""
    if document["found"]:
        return _render("error.html", links, error=document, message=document, query=query)
    return _render("unexplained.html", links, message=document, query=query)


def index_page(packages: Sequence[Mapping[str, Any]], links: Links) -> str:
    """The packages with their error classes."""
    return _render("index.html", links, packages=packages)


def search_page(
    query: str, results: Sequence[Mapping[str, Any]], packages: Sequence[Mapping[str, Any]], links: Links
) -> str:
    """What has the words that were searched."""
    return _render("index.html", links, packages=packages, query=query, results=results)


def listing_page(listing: Mapping[str, Any], links: Links) -> str:
    """Errors of one class, or of a package."""
    return _render("listing.html", links, listing=listing)


def missing_page(what: str, nearest: Sequence[Mapping[str, Any]], links: Links) -> str:
    """There is no such page; `nearest` are errors that may be meant."""
    return _render("missing.html", links, what=what, results=nearest)


def moved_page(target: str, links: Links) -> str:
    """Leads from the id of an error to the one that it was reworded to, where no server can."""
    return _render("moved.html", links, target=target)
