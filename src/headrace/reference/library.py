"""The references of several packages, asked from any thread: what routes and pages show. Knows no HTTP and no HTML.

Guarantees: answers are plain data; a database that is built anew is seen by the next question; nothing is built here,
and no question names a file.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Self

from headrace.errors import NotInReference
from headrace.reference import explain, pieces
from headrace.reference.database import Catalogue, built_packages, database_path
from headrace.reference.document import document, own_document, page_document
from headrace.reference.own import own_error_with_id
from headrace.reference.records import Page

PAGE_LENGTH = 100
"""Errors on one page of a listing."""
LONGEST_PASTE = 64 * 1024
"""Characters of a message or traceback that are read; the end of a longer one says what ended the program."""
_LONGEST_QUERY = 400
_Mark = tuple[int, int, int]


class Library:
    """References by package. `packages` None is whatever is built when somebody asks."""

    def __init__(self, packages: Sequence[str] | None = None) -> None:
        self._packages = None if packages is None else tuple(dict.fromkeys(packages))
        self._lock = threading.Lock()
        self._idle: list[tuple[str, _Mark, Catalogue]] = []
        self._closed = False

    def close(self) -> None:
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
        for _, _, catalogue in idle:
            catalogue.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *failure: object) -> None:
        self.close()

    # --- connections: one per package and question, kept for the next one ---

    @contextlib.contextmanager
    def catalogues(self, package: str | None = None) -> Iterator[list[Catalogue]]:
        """Every reference, or the one of this package; for the thread that asks alone."""
        names = built_packages() if self._packages is None else self._packages
        with contextlib.ExitStack() as stack:
            yield [
                catalogue
                for name in names
                if package in (None, name) and (catalogue := stack.enter_context(self._borrowed(name))) is not None
            ]

    @contextlib.contextmanager
    def _borrowed(self, name: str) -> Iterator[Catalogue | None]:
        taken = self._take(name)
        if taken is None:
            yield None
            return
        mark, catalogue = taken
        try:
            yield catalogue
        finally:
            with self._lock:
                keep = not self._closed
                if keep:
                    self._idle.append((name, mark, catalogue))
            if not keep:
                catalogue.close()

    def _take(self, name: str) -> tuple[_Mark, Catalogue] | None:
        path = database_path(name)
        mark = _mark(path)
        with self._lock:
            ours = [entry for entry in self._idle if entry[0] == name]
            fresh = next((entry for entry in ours if entry[1] == mark), None)
            old = [entry for entry in ours if entry[1] != mark]
            self._idle = [entry for entry in self._idle if entry is not fresh and entry not in old]
        for _, _, catalogue in old:
            catalogue.close()
        if fresh is not None:
            return fresh[1:]
        if mark is None:
            return None
        try:
            return mark, Catalogue.open(path)
        except NotInReference:
            return None

    # --- questions ---

    def error(self, page_id: str) -> dict[str, Any] | None:
        """The page with this id, or the one that took its place; ours also where their source was not read."""
        with self.catalogues() as catalogues:
            for catalogue in catalogues:
                if (page := catalogue.page(page_id)) is not None:
                    return page_document(explain.explain_page(page, catalogue))
        own = own_error_with_id(page_id)
        if own is None:
            return None
        return own_document(own, page_id)

    def nearest(self, page_id: str) -> list[dict[str, Any]]:
        """The pages whose ids look most like one that does not exist."""
        with self.catalogues() as catalogues:
            near = [(catalogue, each) for catalogue in catalogues for each in catalogue.near_ids(page_id[:40])]
            pages = [(found, each) for catalogue, each in near if (found := catalogue.page(each)) is not None]
            return [entry(page) | {"id": each} for page, each in pages][:6]

    def names(self) -> list[str]:
        """The packages that are asked."""
        with self.catalogues() as catalogues:
            return [catalogue.package for catalogue in catalogues]

    def search(self, text: str, package: str | None = None, limit: int = 20) -> list[dict[str, Any]]:
        """Errors that have all of the words, the last one perhaps begun."""
        found: list[dict[str, Any]] = []
        with self.catalogues(package) as catalogues:
            for catalogue in catalogues:
                found += map(entry, catalogue.search(text[:_LONGEST_QUERY], limit - len(found)))
                if len(found) >= limit:
                    break
        return found

    def overview(self) -> list[dict[str, Any]]:
        """The packages with their error classes."""
        with self.catalogues() as catalogues:
            return [overview(catalogue) for catalogue in catalogues]

    def listing(self, package: str, error_class: str | None, number: int) -> dict[str, Any] | None:
        """One page of the errors of a class (of all with None), counted from 1; None if there is no such page."""
        with self.catalogues(package) as catalogues:
            return listing(catalogues[0], error_class, number) if catalogues else None

    def explain(self, paste: str, command: str | None = None) -> dict[str, Any]:
        """What can be said about a message or a traceback."""
        with self.catalogues() as catalogues:
            return document(explain.explain(paste[-LONGEST_PASTE:], catalogues, command))


def _mark(path: Path) -> _Mark | None:
    """Changes when a database is built anew."""
    try:
        stat = path.stat()
    except OSError:
        return None
    return stat.st_ino, stat.st_mtime_ns, stat.st_size


def entry(page: Page) -> dict[str, Any]:
    """An error in a list."""
    site = page.sites[0] if page.sites else None
    return {
        "id": page.id,
        "url": f"/errors/{page.id}",
        "package": page.package,
        "error_class": page.error_class,
        "template": pieces.one_line(page.template),
        "file": site and site.file,
        "line": site and site.line,
        "qualname": site and site.qualname,
    }


def overview(catalogue: Catalogue) -> dict[str, Any]:
    """One package with its error classes."""
    return {
        "name": catalogue.package,
        "version": catalogue.version,
        "commit": catalogue.commit,
        "errors": len(catalogue),
        "classes": [{"error_class": name, "errors": count} for name, count in catalogue.classes()],
    }


def listing(catalogue: Catalogue, error_class: str | None, number: int) -> dict[str, Any] | None:
    """One page of the errors of a class, or of all."""
    count = dict(catalogue.classes()).get(error_class, 0) if error_class is not None else len(catalogue)
    pages = -(-count // PAGE_LENGTH)
    if not 1 <= number <= pages:
        return None
    return {
        "package": catalogue.package,
        "version": catalogue.version,
        "error_class": error_class,
        "errors": count,
        "page": number,
        "pages": pages,
        "results": [entry(page) for page in catalogue.of_class(error_class, (number - 1) * PAGE_LENGTH, PAGE_LENGTH)],
    }
