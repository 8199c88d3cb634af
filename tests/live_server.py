"""A tiny model behind a real server on a port of its own, in this process."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx2
import uvicorn

from headrace.server.access import Serving
from headrace.server.app import build
from headrace.server.listening import configuration
from headrace.server.options import ServeOptions
from headrace.server.service import Service
from headrace.server.telemetry import ServiceCollector

DEADLINE_S = 60.0
"""Nothing takes so long; what does has hung, and the test ends."""


class Live:
    """Where the server listens, and what it serves."""

    def __init__(self, service: Service, port: int) -> None:
        self.service = service
        self.port = port
        self.url = f"http://127.0.0.1:{port}"

    def client(self, **headers: str) -> httpx2.Client:
        return httpx2.Client(base_url=self.url, headers=headers, timeout=DEADLINE_S)

    def openai(self, **others: Any) -> Any:
        from openai import OpenAI

        arguments = {"api_key": "none", "max_retries": 0, "timeout": DEADLINE_S, **others}
        return OpenAI(base_url=f"{self.url}/v1", **arguments)

    def wait_idle(self) -> None:
        """Until no request is left and the cache is empty."""
        wait_until(lambda: is_idle(self.service))


def is_idle(service: Service) -> bool:
    statistics = service.batcher.statistics()
    return statistics.running == statistics.waiting == statistics.kv_blocks_used == 0


def wait_until(condition: Callable[[], bool]) -> None:
    """Poll: the thread that makes it true tells nobody."""
    end_s = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < end_s, "it never came true"
        threading.Event().wait(0.005)


def options(directory: Path, **changes: Any) -> ServeOptions:
    values = {"model": str(directory), "max_num_seqs": 4, "max_model_len": 128, "drain_timeout": 1, **changes}
    values.setdefault("served_model_name", "tiny")
    made = ServeOptions(**values)
    made.check()
    return made


@contextlib.contextmanager
def opened(directory: Path, *, share: float | None = None, **changes: Any) -> Iterator[Service]:
    """The service alone; with `share` of the weights in memory, the rest streams."""
    service = Service.open(options(directory, **changes), weights_share=share)
    try:
        yield service
    finally:
        service.close()


@contextlib.contextmanager
def listening(service: Service | None, chosen: ServeOptions, *, stopping: bool = False) -> Iterator[int]:
    """The application on a port that is free."""
    state = Serving(service, stopping)
    server = uvicorn.Server(configuration(build(chosen, state), chosen))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, name="uvicorn")
        thread.start()
        try:
            wait_until(lambda: server.started)
            yield listener.getsockname()[1]
        finally:
            server.should_exit = True
            thread.join()


@contextlib.contextmanager
def serving(directory: Path, *, share: float | None = None, **changes: Any) -> Iterator[Live]:
    with opened(directory, share=share, **changes) as service:
        service.telemetry.registry.register(ServiceCollector(service))
        with listening(service, service.options) as port:
            yield Live(service, port)
