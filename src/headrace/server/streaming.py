"""Answers on their way to a client: several at once, until it has gone. Knows pieces and server-sent events."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from typing import Any, TypeVar

from fastapi import Request
from fastapi.responses import Response, StreamingResponse

from headrace.errors import HeadraceError
from headrace.server.failures import error_body, status_and_code
from headrace.server.service import Service
from headrace.server.text import Answer, Piece

T = TypeVar("T")

Numbered = tuple[int, Piece]
"""A piece, and which of a request's answers it belongs to."""

DONE = "data: [DONE]\n\n"


def event(data: Any) -> str:
    """One server-sent event."""
    return f"data: {json.dumps(data, ensure_ascii=False)}\n\n"


async def merged(answers: Sequence[Answer]) -> AsyncGenerator[Numbered]:
    """Pieces of all answers as they come, each with its answer's number. The first failure ends them all."""
    if len(answers) == 1:
        async with contextlib.aclosing(answers[0].pieces()) as pieces:
            async for piece in pieces:
                yield 0, piece
        return
    queue: asyncio.Queue[tuple[int, Piece] | None] = asyncio.Queue()

    async def pump(index: int, answer: Answer) -> None:
        try:
            async for piece in answer.pieces():
                queue.put_nowait((index, piece))
        finally:
            queue.put_nowait(None)

    tasks = [asyncio.create_task(pump(index, answer)) for index, answer in enumerate(answers)]
    try:
        for _ in range(len(tasks)):
            while (item := await queue.get()) is not None:
                yield item
            for task in tasks:
                if task.done() and not task.cancelled() and (error := task.exception()) is not None:
                    raise error
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def collected(answers: Sequence[Answer]) -> list[Piece]:
    """Each answer as one piece."""
    whole = [Piece() for _ in answers]
    async with contextlib.aclosing(merged(answers)) as pieces:
        async for index, piece in pieces:
            target = whole[index]
            target.text += piece.text
            target.reasoning += piece.reasoning
            target.tool_calls += piece.tool_calls
            target.logprobs += piece.logprobs
            target.finish_reason = piece.finish_reason or target.finish_reason
    return whole


async def until_gone(request: Request, work: Awaitable[T]) -> T:
    """The result of `work`, which is cancelled if the client goes away. Raises: asyncio.CancelledError then."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_disconnected(request))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGone
        return await task
    finally:
        for each in (task, gone):
            each.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


class ClientGone(Exception):
    """Nobody is there to read the answer."""


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def answer_whole(
    request: Request, service: Service, answers: Sequence[Answer], body: Callable[[Sequence[Piece]], T]
) -> T | Response:
    """All answers in one body, or nothing for a client that has gone. Raises what the answers raise."""
    start_s = time.perf_counter()
    try:
        pieces = await until_gone(request, collected(answers))
    except ClientGone:
        return Response(status_code=499)
    except HeadraceError as error:
        _note_failure(service, error)
        raise
    _note(service, start_s, [piece.finish_reason or "" for piece in pieces])
    return body(pieces)


async def answer_streamed(
    request: Request,
    service: Service,
    answers: Sequence[Answer],
    events: Callable[[AsyncIterator[Numbered]], Any],
) -> Response:
    """Server-sent events. What fails before the first token has a status of its own; later ones end the stream."""
    start_s = time.perf_counter()
    pieces = merged(answers)
    try:
        first = await until_gone(request, anext(pieces))
    except ClientGone:
        return Response(status_code=499)
    except HeadraceError as error:
        _note_failure(service, error)
        raise

    async def all_pieces() -> AsyncGenerator[Numbered]:
        reasons = []
        async with contextlib.aclosing(pieces):
            yield first
            reasons += [first[1].finish_reason] if first[1].finish_reason else []
            async for index, piece in pieces:
                reasons += [piece.finish_reason] if piece.finish_reason else []
                yield index, piece
        _note(service, start_s, reasons)

    async def lines() -> AsyncIterator[str]:
        try:
            async with contextlib.aclosing(events(all_pieces())) as made:
                async for line in made:
                    yield line
        except HeadraceError as error:
            _note_failure(service, error)
            yield event(error_body(error))

    return StreamingResponse(lines(), media_type="text/event-stream", headers={"Cache-Control": "no-store"})


def _note(service: Service, start_s: float, reasons: Sequence[str]) -> None:
    seconds = time.perf_counter() - start_s
    service.note_answer(seconds)
    service.telemetry.request_s.observe(seconds)
    for reason in reasons:
        service.telemetry.finished.labels(reason).inc()


def _note_failure(service: Service, error: HeadraceError) -> None:
    service.telemetry.failed.labels(status_and_code(error)[1]).inc()
