"""How errors leave: one JSON shape, OpenAI's, with a status and the address of the error's own page."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException

from headrace import errors

STATUSES: Mapping[type[errors.HeadraceError], tuple[int, str]] = {
    errors.ContextLengthExceeded: (400, "context_length_exceeded"),
    errors.KeyRefused: (401, "invalid_api_key"),
    errors.ModelNotServed: (404, "model_not_found"),
    errors.RouteNotFound: (404, "not_found"),
    errors.UnknownErrorId: (404, "unknown_error_id"),
    errors.RequestTooLarge: (413, "request_too_large"),
    errors.HeadersTooLarge: (431, "headers_too_large"),
    errors.QueueFull: (429, "rate_limit_exceeded"),
    errors.NotReady: (503, "not_ready"),
}
"""Status and OpenAI's code, where they are not 400 (what the client did) or 500 (what happened here) and the name of
the class."""

TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "invalid_request_error",
    405: "invalid_request_error",
    413: "invalid_request_error",
    431: "invalid_request_error",
    429: "rate_limit_error",
    503: "service_unavailable_error",
}


def status_and_code(error: errors.HeadraceError) -> tuple[int, str]:
    """The HTTP status of an error and the `code` that programs look at."""
    code = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", type(error).__name__).lower()
    return STATUSES.get(type(error), (400 if isinstance(error, errors.RequestError) else 500, code))


def error_body(error: errors.HeadraceError) -> dict[str, Any]:
    """OpenAI's error object."""
    status, code = status_and_code(error)
    return {
        "error": {
            "message": error.message,
            "type": TYPES.get(status, "server_error"),
            "param": "model" if isinstance(error, errors.ModelNotServed) else error.facts.get("field"),
            "code": code,
            "doc_url": f"/errors/{error.error_id()}",
        }
    }


def error_response(error: errors.HeadraceError) -> JSONResponse:
    """The error as an HTTP response."""
    status, _ = status_and_code(error)
    headers = {}
    if isinstance(error, errors.QueueFull):
        headers["Retry-After"] = str(error.retry_after_s)
    if isinstance(error, errors.KeyRefused):
        headers["WWW-Authenticate"] = "Bearer"
    return JSONResponse(error_body(error), status, headers)


def from_validation(problems: Sequence[Mapping[str, Any]]) -> errors.RequestError:
    """The one error to mend first, out of all that a schema has found."""
    for problem in problems:
        if problem["type"] == "json_invalid":
            return errors.MalformedBody(reason=_sentence(str(problem.get("ctx", {}).get("error", "it cannot be read"))))
    unknown = next((problem for problem in problems if problem["type"] == "extra_forbidden"), None)
    if unknown is not None:
        field = _field(unknown["loc"][:-1], str(unknown["loc"][-1]))
        return errors.UnsupportedField(field=field, reason="there is no such field here")
    problem = problems[0]
    field = _field(problem["loc"])
    if not field:
        return errors.MalformedBody(reason=_sentence(problem["msg"]))
    if problem["type"] == "none_required":
        return errors.UnsupportedField(field=field, reason="it has no effect here")
    if problem["type"] == "literal_error" and field.split(".")[-1] not in ("type", "role"):
        return errors.UnsupportedField(
            field=field, reason=f"the only value with an effect is {problem['ctx']['expected']}"
        )
    return errors.InvalidField(field=field, reason=_sentence(problem["msg"]))


_LABELS = {"str", "int", "float", "bool", "none", "body"}
"""Of the branches of a union, which a location names as if they were fields."""


def _field(location: Sequence[str | int], last: str = "") -> str:
    text = ""
    for part in location:
        if isinstance(part, int):
            text += f"[{part}]"
        elif re.fullmatch(r"[a-z_]+", part) and part not in _LABELS:
            text += f".{part}" if text else part
    return f"{text}.{last}" if text and last else text or last


def _sentence(text: str) -> str:
    """Pydantic's message as the end of a sentence of ours."""
    text = text.rstrip(".")
    return f"it {text[6:]}" if text.startswith("Input ") else text[:1].lower() + text[1:]


def install(app: FastAPI) -> None:
    """Let every failure of `app` leave in the one shape."""

    @app.exception_handler(errors.HeadraceError)
    async def ours(request: Request, error: errors.HeadraceError) -> Response:
        return error_response(error)

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> Response:
        return error_response(from_validation(error.errors()))

    @app.exception_handler(HTTPException)
    async def routing(request: Request, error: HTTPException) -> Response:
        if error.status_code == HTTPStatus.BAD_REQUEST:
            return error_response(errors.MalformedBody(reason="it cannot be read"))
        made = error_response(errors.RouteNotFound(method=request.method, path=request.url.path[:200]))
        made.status_code = error.status_code
        made.headers.update(error.headers or {})
        return made

    @app.exception_handler(Exception)
    async def unforeseen(request: Request, error: Exception) -> Response:
        return error_response(errors.GenerationFailed(reason=type(error).__name__))
