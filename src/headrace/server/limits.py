"""What every request passes before a route sees it: the key, the size, a line in the log. Knows no model."""

from __future__ import annotations

import hmac
import logging
import time

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from headrace import errors
from headrace.server.failures import error_response

GUARDED = ("/v1/", "/status")
"""Paths that ask for the key. Health, metrics, the page itself and the reference of our own errors, to which every
refusal links, tell nothing that is secret."""

MAX_HEADER_BYTES = 16 * 1024

log = logging.getLogger("headrace.server")


class Gate:
    """Refuses what has no key or is too large, and logs one line per request: never what it says."""

    def __init__(self, app: ASGIApp, api_key: str | None, max_body_bytes: int) -> None:
        self.app = app
        self.key = None if api_key is None else api_key.encode()
        self.max_body_bytes = max_body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        start_s = time.perf_counter()
        status = 0

        async def note_status(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            if (refusal := self._refusal(scope)) is not None:
                await error_response(refusal)(scope, receive, note_status)
            else:
                await self._limited(scope, receive, note_status)
        finally:
            route = getattr(scope.get("route"), "path", "(no route)")
            log.info("%s %s %d %.3f s", scope["method"], route, status, time.perf_counter() - start_s)

    def _refusal(self, scope: Scope) -> errors.RequestError | None:
        if sum(len(name) + len(value) for name, value in scope["headers"]) > MAX_HEADER_BYTES:
            return errors.HeadersTooLarge(limit_bytes=MAX_HEADER_BYTES)
        headers = dict(scope["headers"])
        if self.key is not None and scope["path"].startswith(GUARDED) and scope["method"] != "OPTIONS":
            kind, _, given = headers.get(b"authorization", b"").partition(b" ")
            if not given:
                return errors.KeyRefused(reason="it has no key")
            if kind.lower() != b"bearer" or not hmac.compare_digest(given.strip(), self.key):
                return errors.KeyRefused(reason="its key is another one")
        length = headers.get(b"content-length", b"0")
        if not length.isdigit() or int(length) > self.max_body_bytes:
            return errors.RequestTooLarge(limit_bytes=self.max_body_bytes)
        return None

    async def _limited(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Count what arrives without a declared length, too."""
        received = 0
        too_large = errors.RequestTooLarge(limit_bytes=self.max_body_bytes)

        async def count() -> Message:
            nonlocal received
            message = await receive()
            received += len(message.get("body", b""))
            if received > self.max_body_bytes:
                raise too_large
            return message

        async def send_if_read(message: Message) -> None:
            # The framework answers every failure to read a body with its own words.
            if received <= self.max_body_bytes:
                await send(message)

        await self.app(scope, count, send_if_read)
        if received > self.max_body_bytes:
            await error_response(too_large)(scope, receive, send)
