"""The error reference over HTTP: pages at /errors, the same as JSON at /api. Knows no model; loads no torch.

No part of a request names a file: ids and words are looked up in databases that were built before. A page says nothing
that its package's source does not say.
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import parse_qs

from fastapi import APIRouter, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import RedirectResponse, Response
from pydantic import BaseModel, ConfigDict, ValidationError
from starlette.concurrency import run_in_threadpool

from headrace import __version__
from headrace.errors import MalformedBody, UnknownErrorId
from headrace.reference import codec, html
from headrace.reference.library import Library
from headrace.server import failures, limits

router = APIRouter()

POLICY = (
    "default-src 'none'; style-src 'self'; script-src 'self'; connect-src 'self'; img-src data:; base-uri 'none'; "
    "form-action 'self'; frame-ancestors 'none'"
)
MAX_BODY_BYTES = 2**20
MOST_RESULTS = 100
_LINKS = html.Served()
_ID = re.compile(r"[0-9a-fA-F]{16}")
_ERROR = re.compile(r"(?:^|\s)[\w.]*(?:Error|Exception|Warning): \S")


def build(library: Library) -> FastAPI:
    """The reference as an application of its own."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        with library:
            yield

    app = FastAPI(title="Headrace", version=__version__, docs_url=None, redoc_url=None, lifespan=lifespan)
    app.state.library = library
    app.include_router(router)
    app.add_api_route("/", lambda: RedirectResponse("/errors"), include_in_schema=False)
    failures.install(app)
    app.add_middleware(limits.Gate, api_key=None, max_body_bytes=MAX_BODY_BYTES)
    return app


def looks_pasted(text: str) -> bool:
    """Whether somebody pasted an error instead of typing words."""
    return "\n" in text.strip() or _ERROR.search(text) is not None


# --- how answers leave ------------------------------------------------------------------------------------------------


def _answer(request: Request, content: bytes, kind: str, status: int = 200, cache: str = "no-cache") -> Response:
    """The content, or that the client has it already."""
    mark = f'"{html.fingerprint(content)}"'
    headers = {
        "Content-Security-Policy": POLICY,
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cache-Control": cache,
        "ETag": mark,
    }
    known = [each.strip().removeprefix("W/") for each in request.headers.get("if-none-match", "").split(",")]
    if status == 200 and request.method == "GET" and mark in known:
        return Response(status_code=304, headers=headers)
    return Response(content, status, headers, kind)


def _page(request: Request, text: str, status: int = 200, cache: str = "no-cache") -> Response:
    return _answer(request, text.encode(errors="replace"), "text/html; charset=utf-8", status, cache)


def _json(request: Request, plain: Any, cache: str = "no-cache") -> Response:
    return _answer(request, codec.dumps(plain).encode(errors="replace"), "application/json", cache=cache)


def _missing(request: Request, what: str, nearest: list[dict[str, Any]]) -> Response:
    return _page(request, html.missing_page(what, nearest, _LINKS), 404)


def _library(request: Request) -> Library:
    library: Library = request.app.state.library
    return library


# --- pages ------------------------------------------------------------------------------------------------------------


@router.get("/errors", include_in_schema=False)
def find(request: Request) -> Response:
    """The packages, the errors of a class, what has some words, or the answer to an error that was pasted."""
    asked = request.query_params
    if query := asked.get("q", "").strip():
        return _found(request, query)
    if package := asked.get("package"):
        number = asked.get("page", "1")
        listing = _library(request).listing(package, asked.get("class"), int(number)) if _counts(number) else None
        if listing is None:
            return _missing(request, "There is no such list of errors.", [])
        return _page(request, html.listing_page(listing, _LINKS))
    return _page(request, html.index_page(_library(request).overview(), _LINKS))


def _counts(number: str) -> bool:
    return number.isascii() and number.isdigit() and len(number) < 7


def _found(request: Request, query: str) -> Response:
    library = _library(request)
    if _ID.fullmatch(query) and library.error(query.lower()) is not None:
        return RedirectResponse(_LINKS.error(query.lower()), 303)
    if looks_pasted(query):
        return _explained(request, query)
    results = library.search(query, limit=MOST_RESULTS)
    if not results and (answer := library.explain(query))["found"]:
        return _page(request, html.answer_page(answer, _LINKS, query), cache="no-store")
    return _page(request, html.search_page(query, results, library.overview(), _LINKS))


def _explained(request: Request, paste: str) -> Response:
    answer = _library(request).explain(paste)
    return _page(request, html.answer_page(answer, _LINKS, paste), cache="no-store")


@router.post("/errors", include_in_schema=False)
async def explain_form(request: Request) -> Response:
    """A paste that is too long for an address, or that somebody wants to have explained whatever it looks like."""
    form = parse_qs((await request.body()).decode(errors="replace"), max_num_fields=20)
    paste = form.get("q", [""])[0].strip()
    if not paste:
        return RedirectResponse(_LINKS.index(), 303)
    return await run_in_threadpool(_explained, request, paste)


@router.get("/errors/-/{name}", include_in_schema=False)
def asset(request: Request, name: str) -> Response:
    """The stylesheet and the script; their addresses change with their content."""
    if name not in html.ASSETS:
        return _missing(request, "There is no such page.", [])
    return _answer(request, html.asset(name), html.ASSETS[name], cache="public, max-age=31536000, immutable")


@router.get("/errors/{error_id}", include_in_schema=False)
def error(request: Request, error_id: str) -> Response:
    """One error; an id that was reworded leads to the one that took its place."""
    document = _library(request).error(error_id.lower())
    if document is None:
        what = f"No error here has the id {error_id[:40]!r}."
        return _missing(request, what, _library(request).nearest(error_id.lower()))
    if document["id"] != error_id:
        return RedirectResponse(_LINKS.error(document["id"]), 301, {"Cache-Control": "no-cache"})
    return _page(request, html.error_page(document, _LINKS))


# --- JSON -------------------------------------------------------------------------------------------------------------


@router.get("/api/errors")
def errors(
    request: Request,
    q: str = "",
    package: str | None = None,
    limit: int = 20,
) -> Response:
    """Errors that have all of the words; without words the packages and their error classes."""
    library = _library(request)
    if not q.strip():
        return _json(request, {"packages": library.overview()})
    return _json(request, {"query": q, "results": library.search(q, package, max(1, min(limit, MOST_RESULTS)))})


@router.get("/api/errors/{error_id}")
def error_document(request: Request, error_id: str) -> Response:
    """One error as data; an id that was reworded gives the one that took its place."""
    library = _library(request)
    document = library.error(error_id.lower())
    if document is None:
        nearest = [each["id"] for each in library.nearest(error_id.lower())]
        raise UnknownErrorId(id=error_id[:40], nearest=nearest, packages=library.names() or ["headrace"])
    return _json(request, document)


@router.get("/api/explain")
def explain(request: Request, message: str, command: str | None = None) -> Response:
    """What can be said about a message or a traceback."""
    return _json(request, _library(request).explain(message, command), cache="no-store")


class Pasted(BaseModel):
    """The body of POST /api/explain."""

    model_config = ConfigDict(extra="forbid")

    message: str
    command: str | None = None


_BODY = {
    "required": True,
    "content": {
        "application/json": {"schema": Pasted.model_json_schema()},
        "text/plain": {"schema": {"type": "string"}},
    },
}


@router.post("/api/explain", openapi_extra={"requestBody": _BODY})
async def explain_body(request: Request) -> Response:
    """The same for what is too long for an address: JSON with `message` and `command`, or the text itself."""
    pasted = _pasted(request.headers, await request.body())
    answer = await run_in_threadpool(_library(request).explain, pasted.message, pasted.command)
    return _json(request, answer, cache="no-store")


def _pasted(headers: Mapping[str, str], body: bytes) -> Pasted:
    kind = headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind == "application/json":
        try:
            return Pasted.model_validate_json(body)
        except ValidationError as error:
            raise RequestValidationError(error.errors(include_url=False, include_context=False)) from None
    try:
        return Pasted(message=body.decode())
    except UnicodeDecodeError:
        raise MalformedBody(reason="it is neither JSON nor UTF-8 text") from None
