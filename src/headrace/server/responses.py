"""/v1/responses: transformers' own conversion and event builder, around the same answers as every other route."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import AsyncIterator
from typing import Any

from fastapi import APIRouter, Request
from transformers.cli.serving.response import ResponseHandler, _ResponseStreamBuilder, compute_usage

from headrace.errors import HeadraceError
from headrace.server.access import checked_service
from headrace.server.schemas import ResponseRequest
from headrace.server.service import Service, answer_seed
from headrace.server.streaming import answer_streamed, answer_whole
from headrace.server.text import Answer, Piece

router = APIRouter()


@router.post("/v1/responses")
async def responses(request: Request, body: ResponseRequest) -> Any:
    """Answer one turn. Nothing is stored."""
    service = checked_service(request, body.model)
    given = body.model_dump(exclude_none=True)
    wanted = given.get("tools") if body.tool_choice != "none" else None
    tools = ResponseHandler._normalize_tools(wanted)
    messages = ResponseHandler._normalize_input(given)
    prompt = await service.encode_chat([_as_system(message) for message in messages], tools)
    field = "max_output_tokens" if body.max_output_tokens is not None else "input"
    tokens = service.answer_tokens(prompt, body.max_output_tokens, field)
    service.check_queue(1)
    params = body.params(service.defaults, answer_seed(body.seed, 0))
    answer = service.answer(prompt, params, tokens, chat=True, tools=tools)
    form = _Form(service, answer, wanted or [])
    if body.stream:
        return await answer_streamed(request, service, [answer], form.events)
    return await answer_whole(request, service, [answer], lambda pieces: form.whole(pieces[0]))


def _as_system(message: dict[str, Any]) -> dict[str, Any]:
    return {**message, "role": "system"} if message["role"] == "developer" else message


class _Form:
    """One answer as a response object, and as the events that lead to it."""

    def __init__(self, service: Service, answer: Answer, tools: list[Any]) -> None:
        self._answer = answer
        self._id = secrets.token_hex(12)
        flat = [{"strict": False, "parameters": {}, **tool} for tool in tools]
        defaults = {
            "id": f"resp_{self._id}",
            "created_at": time.time(),
            "model": service.options.name,
            "object": "response",
            "tools": flat,
            "parallel_tool_calls": True,
            "tool_choice": "auto",
        }
        self._builder = _ResponseStreamBuilder(request_id=self._id, response_defaults=defaults)
        self._calls = 0

    def whole(self, piece: Piece) -> dict[str, Any]:
        """The response that the events end in."""
        self._told(piece)
        self._close()
        made: dict[str, Any] = self._final(piece.finish_reason).model_dump(exclude_none=True)
        return made

    async def events(self, pieces: AsyncIterator[tuple[int, Piece]]) -> AsyncIterator[str]:
        yield _named(self._builder.start_response())
        reason = None
        try:
            async for _, piece in pieces:
                reason = piece.finish_reason or reason
                if parts := self._told(piece):
                    yield _named(parts)
        except HeadraceError as error:
            yield _named(self._builder.error(error.message))
            raise
        if parts := self._close():
            yield _named(parts)
        kind = "incomplete" if reason == "length" else "completed"
        final = self._final(reason).model_dump(exclude_none=True)
        data = {"type": f"response.{kind}", "sequence_number": self._builder.seq, "response": final}
        yield _named([f"data: {json.dumps(data, ensure_ascii=False)}\n\n"])

    def _told(self, piece: Piece) -> list[str]:
        builder, parts = self._builder, []
        if piece.reasoning:
            parts += [] if builder.reasoning_open else builder.start_reasoning()
            parts += builder.reasoning_delta(piece.reasoning)
        if piece.text:
            parts += builder.finish_reasoning() if builder.reasoning_open else []
            parts += [] if builder.message_open else builder.start_message()
            parts += builder.text_delta(piece.text)
        for call in piece.tool_calls:
            parts += self._close()
            parts += builder.tool_call(f"call_{self._id}_{self._calls}", call.name, call.arguments)
            self._calls += 1
        return parts

    def _close(self) -> list[str]:
        builder = self._builder
        parts = builder.finish_reasoning() if builder.reasoning_open else []
        return [*parts, *(builder.finish_message() if builder.message_open else [])]

    def _final(self, reason: str | None) -> Any:
        builder = self._builder
        items = [builder.reasoning_item, builder.message_item, *builder.tool_calls]
        usage = compute_usage(self._answer.generation.prompt_tokens, self._answer.tokens)
        output = [item for item in items if item is not None]
        if reason == "length":
            why = {"reason": "max_output_tokens"}
            return builder._response("incomplete", output=output, usage=usage, incomplete_details=why)
        return builder._response("completed", output=output, usage=usage)


def _named(parts: list[str]) -> str:
    """Each event with its name in a line of its own, as OpenAI sends them."""
    return "".join(f"event: {_type(part)}\n{part}" for part in parts)


def _type(part: str) -> str:
    return str(json.loads(part.removeprefix("data: "))["type"])
