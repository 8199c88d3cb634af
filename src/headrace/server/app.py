"""The routes of the server, put together."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from typing import Any

from fastapi import APIRouter, FastAPI, Request
from fastapi.responses import JSONResponse, PlainTextResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST

from headrace import __version__
from headrace.errors import ModelNotServed
from headrace.reference.library import Library
from headrace.server import completions, failures, limits, pages, reference, responses
from headrace.server.access import Serving, loaded_service, serving
from headrace.server.options import ServeOptions

router = APIRouter()


def build(
    options: ServeOptions,
    state: Serving,
    lifespan: Callable[[FastAPI], AbstractAsyncContextManager[None]] | None = None,
) -> FastAPI:
    """The application. It answers /health at once, and everything else when `state` has a service."""
    # Our own errors, to which `doc_url` leads, and no others: these pages are open to whoever reaches the port, and
    # what else was built on this machine may be somebody's private source.
    library = Library(["headrace"])

    @asynccontextmanager
    async def whole(app: FastAPI) -> AsyncIterator[None]:
        with library:
            async with lifespan(app) if lifespan else nullcontext():
                yield

    app = FastAPI(
        title="Headrace",
        version=__version__,
        docs_url=None,  # its pages load scripts from elsewhere
        redoc_url=None,
        lifespan=whole,
    )
    app.state.serving = state
    app.state.library = library
    app.include_router(router)
    app.include_router(completions.router)
    app.include_router(responses.router)
    app.include_router(pages.router)
    app.include_router(reference.router)
    failures.install(app)
    app.add_middleware(limits.Gate, api_key=options.api_key, max_body_bytes=options.max_request_bytes)
    return app


@router.get("/health", response_model=None)
def health(request: Request) -> Response:
    """Whether the process is of use: red only when a restart is the only help."""
    service = serving(request).service
    alive = service is None or service.batcher.alive
    return JSONResponse({"status": "ok" if alive else "the batching thread has ended"}, 200 if alive else 503)


@router.get("/ready", response_model=None)
def ready(request: Request) -> Response:
    """Whether requests would be answered now, and if not, why."""
    trouble = serving(request).trouble()
    return JSONResponse(
        {"status": "ready"} if trouble is None else {"status": "not ready", "reason": trouble}, 503 if trouble else 200
    )


@router.get("/metrics", response_class=PlainTextResponse)
def metrics(request: Request) -> Response:
    """For Prometheus."""
    return Response(loaded_service(request).telemetry.exposition(), media_type=CONTENT_TYPE_LATEST)


@router.get("/v1/models")
def models(request: Request) -> dict[str, Any]:
    """The one model."""
    return {"object": "list", "data": [_model(request)]}


@router.get("/v1/models/{model:path}")
def model(request: Request, model: str) -> dict[str, Any]:
    """The one model, asked for by name."""
    entry = _model(request)
    if model != entry["id"]:
        raise ModelNotServed(model=model[:200], served=entry["id"])
    return entry


def _model(request: Request) -> dict[str, Any]:
    service = loaded_service(request)
    return {
        "id": service.options.name,
        "object": "model",
        "created": service.created_s,
        "owned_by": "headrace",
        "max_model_len": service.model_len,
    }
