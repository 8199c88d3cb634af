"""A listening socket, and how uvicorn serves on it. Knows no routes and no model."""

from __future__ import annotations

import logging
import socket
from typing import Protocol

import uvicorn
from starlette.types import ASGIApp

from headrace.errors import AddressNotUsable
from headrace.server.limits import MAX_HEADER_BYTES

MAX_CONNECTIONS = 1024


class Address(Protocol):
    """Where to listen, and how long requests may take to end."""

    @property
    def host(self) -> str: ...
    @property
    def port(self) -> int: ...
    @property
    def drain_timeout(self) -> float: ...


def bind(address: Address) -> socket.socket:
    """A listening socket, before anything is loaded. Raises: AddressNotUsable."""
    family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a killed server's port is free at once
        listener.bind((address.host, address.port))
    except OSError as error:
        listener.close()
        reason = error.strerror or str(error)
        raise AddressNotUsable(host=address.host, port=address.port, reason=reason) from None
    return listener


def url(listener: socket.socket) -> str:
    """Where a socket listens, to open in a browser."""
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def configuration(app: ASGIApp, address: Address) -> uvicorn.Config:
    """How uvicorn serves `app`."""
    logging.getLogger("uvicorn.access").disabled = True  # it writes addresses with what is asked for in them
    return uvicorn.Config(
        app,
        http="h11",
        ws="none",
        lifespan="on",
        log_config=None,
        server_header=False,
        h11_max_incomplete_event_size=MAX_HEADER_BYTES,
        limit_concurrency=MAX_CONNECTIONS,
        timeout_graceful_shutdown=max(1, round(address.drain_timeout)),
    )
