"""Common situations of an error, written by a model that is shown the source of it and nothing else.

Any endpoint with OpenAI's chat completions will do. What it says is kept only sentence by sentence (`named.kept`), with
the model's name, and counts only as long as the source stays as it was.
"""

from __future__ import annotations

import ast
import functools
import re
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from headrace.errors import EndpointFailed, UnknownErrorId
from headrace.reference import named
from headrace.reference.database import Catalogue
from headrace.reference.matching import Catalogue as Asked
from headrace.reference.records import Page, Prose, Site
from headrace.reference.sentences import condition_sentence

Progress = Callable[[str, int, int], None]

_LONGEST_SPAN = 60
"""Lines of source above an error that a model is shown; fewer if its function begins later."""
_BELOW = 2
_KEPT_AFTER_S = 20.0
"""What was written for so long is put into the database, which is replaced as a whole."""


_SITUATION = re.compile(
    r"^(?:(?:Common|Most|Usual|Typical)\w* )?(?:This|It|The error|Users?|You)\b.{0,40}\b"
    r"(?:happens?|occurs?|arises?|appears?|raised|triggered|seen?|runs? into|meets?)\b.{0,40}\b"
    r"(?:when|whenever|if|because|after|before|while|unless|where)\b|^(?:When|Whenever|If|After|While)\b"
)
"""What says in which situation something happens; a model says other things too."""


@dataclass(frozen=True, slots=True)
class Material:
    """All that a model is given about an error."""

    span: str
    """The lines of the source."""
    docstring: str
    condition: str

    def text(self) -> str:
        """As it is given, and as its sentences are compared with it."""
        parts = [("Source", self.span), ("Docstring", self.docstring), ("Raised when", self.condition)]
        return "\n\n".join(f"{title}:\n{text}" for title, text in parts if text)

    @property
    def fingerprint(self) -> str:
        """Changes with anything that a model is given."""
        import hashlib  # late: most pages have no prose

        return hashlib.blake2b(self.text().encode(errors="surrogatepass"), digest_size=8).hexdigest()


def material(page: Page, catalogue: Asked) -> Material | None:
    """What there is about a page; None if its source is not kept."""
    site = page.sites[0] if page.sites else None
    source = catalogue.source(site.file) if site is not None else None
    if site is None or source is None:
        return None
    lines = source.splitlines()
    first = max(site.function_line or 1, site.line - _LONGEST_SPAN, 1)
    span = "\n".join(lines[first - 1 : site.end_line + _BELOW])
    tests = condition_sentence(site.condition) if site.condition.complete else ""
    return Material(span, _docstring(site, source), tests)


def _docstring(site: Site, source: str) -> str:
    """Of the function that the error is raised in."""
    if site.function_line:
        for node in ast.walk(_parsed(source)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.lineno == site.function_line:
                return ast.get_docstring(node) or ""
    return ""


@functools.lru_cache(maxsize=1)
def _parsed(source: str) -> ast.Module:
    return ast.parse(source)


def situations(page: Page, catalogue: Asked) -> Prose | None:
    """What a model wrote about a page, if it has not changed since."""
    prose = catalogue.prose(page.id)
    if prose is None or not prose.sentences:
        return None
    given = material(page, catalogue)
    return prose if given is not None and given.fingerprint == prose.fingerprint else None


# --- writing ----------------------------------------------------------------------------------------------------------


class Writer(Protocol):
    """A model that answers."""

    @property
    def model(self) -> str: ...

    def answer(self, question: str) -> str: ...


@dataclass(slots=True)
class Written:
    """What came of it."""

    pages: int = 0
    sentences: int = 0
    dropped: int = 0
    """Sentences that named something which is not in the source, or were none."""


def write(
    path: Path, writer: Writer, *, ids: Sequence[str] = (), limit: int, on_progress: Progress | None = None
) -> Written:
    """Have a model write about the pages of a database that it has not written about as they are now.

    `ids` are the only pages to write about; at most `limit` of them. What is written is kept, whatever stops it.
    Raises: EndpointFailed, UnknownErrorId, NotWritable.
    """
    from headrace.reference.storing import add_prose  # late: most who load this only read

    with Catalogue.open(path) as catalogue:
        todo = list(_todo(catalogue, writer.model, ids, limit))
    done = Written()
    kept_s = time.monotonic()
    pending: list[Prose] = []
    label = f"asking {writer.model}"
    try:
        for page_id, given in todo:
            try:
                answer = writer.answer(given.text())
            except EndpointFailed as error:
                raise EndpointFailed(url=error.url, reason=error.reason, written=done.pages) from error
            kept = [each for each in named.kept(answer, given.text()) if _SITUATION.search(each)]
            pending.append(Prose(page_id, given.fingerprint, writer.model, tuple(kept)))
            done.pages += 1
            done.sentences += len(kept)
            done.dropped += len(named.sentences(answer)) - len(kept)
            if time.monotonic() - kept_s > _KEPT_AFTER_S:
                add_prose(path, pending)
                pending, kept_s = [], time.monotonic()
            if on_progress is not None:
                on_progress(label, done.pages, len(todo))
    finally:
        if pending:
            add_prose(path, pending)
    return done


def _todo(catalogue: Catalogue, model: str, ids: Sequence[str], limit: int) -> Iterator[tuple[str, Material]]:
    left = limit
    for page in _asked(catalogue, ids) if ids else catalogue.pages():
        if left <= 0:
            return
        given = material(page, catalogue) if page.template else None
        known = catalogue.prose(page.id)
        if given is None or (known is not None and (known.fingerprint, known.model) == (given.fingerprint, model)):
            continue
        left -= 1
        yield page.id, given


def _asked(catalogue: Catalogue, ids: Sequence[str]) -> Iterator[Page]:
    for page_id in ids:
        page = catalogue.page(page_id)
        if page is None:
            near = catalogue.near_ids(page_id, 3)
            raise UnknownErrorId(id=page_id, nearest=near, packages=[catalogue.package])
        yield page
