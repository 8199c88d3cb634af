"""The server's life: load, serve, drain, end. Knows signals, no model."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import AsyncIterator, Callable
from types import FrameType

import uvicorn
from fastapi import FastAPI

from headrace.server.access import Serving
from headrace.server.app import build
from headrace.server.listening import configuration
from headrace.server.options import ServeOptions
from headrace.server.service import Service
from headrace.server.telemetry import ServiceCollector

log = logging.getLogger("headrace.server")


class Server(uvicorn.Server):
    """uvicorn, of which the first signal drains and the second one stops, whichever signals they are."""

    def __init__(self, config: uvicorn.Config, state: Serving) -> None:
        super().__init__(config)
        self._state = state

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self.should_exit:
            self.force_exit = True
            log.warning("stopping at once")
        else:
            log.warning("draining; a second signal stops at once")
        self._state.stopping = True
        self.should_exit = True


def run(
    options: ServeOptions,
    load: Callable[[], Service],
    listener: socket.socket,
    on_ready: Callable[[Service], None] = lambda service: None,
) -> None:
    """Serve until a signal; requests that run get the drain timeout to end. Raises what `load` raises."""
    state = Serving()
    failure: list[BaseException] = []

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        # /health answers while the model loads, which can take minutes.
        loading = asyncio.create_task(_load(state, load, on_ready))
        loading.add_done_callback(lambda task: _end_if_failed(task, server, failure))
        yield
        with contextlib.suppress(BaseException):
            await loading
        await asyncio.to_thread(_close, state)

    server = Server(configuration(build(options, state, lifespan), options), state)
    with listener:
        try:
            server.run(sockets=[listener])
        except KeyboardInterrupt:
            pass  # uvicorn raises the signal again once everything has ended
        finally:
            _close(state)
    if failure:
        raise failure[0]


async def _load(state: Serving, load: Callable[[], Service], on_ready: Callable[[Service], None]) -> None:
    service = await asyncio.to_thread(load)
    service.telemetry.registry.register(ServiceCollector(service))
    state.service = service
    on_ready(service)


def _end_if_failed(task: asyncio.Task[None], server: Server, failure: list[BaseException]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        failure.append(error)
        server.should_exit = True


def _close(state: Serving) -> None:
    state.stopping = True
    if state.service is not None:
        state.service.close()
