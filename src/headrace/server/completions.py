"""/v1/chat/completions and /v1/completions, in OpenAI's words."""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

from fastapi import APIRouter, Request

from headrace.batching.sampling import TokenLogprob
from headrace.server.access import checked_service
from headrace.server.schemas import ChatRequest, CompletionRequest
from headrace.server.service import Service, answer_seed
from headrace.server.streaming import DONE, answer_streamed, answer_whole, event
from headrace.server.text import Answer, Piece

LEGACY_MAX_TOKENS = 16

router = APIRouter()


@router.post("/v1/chat/completions")
async def chat(request: Request, body: ChatRequest) -> Any:
    """Answer a conversation."""
    service = checked_service(request, body.model)
    tools = None if body.tool_choice == "none" or not body.tools else [_plain(tool) for tool in body.tools]
    prompt = await service.encode_chat([_message(message) for message in body.messages], tools)
    field = "max_completion_tokens" if body.max_completion_tokens is not None else "max_tokens"
    tokens = service.answer_tokens(prompt, body.answer_tokens, field if body.answer_tokens is not None else "messages")
    count = body.n or 1
    service.check_queue(count)
    answers = [
        service.answer(
            prompt,
            body.answer_params(service.defaults, answer_seed(body.seed, index)),
            tokens,
            body.stops,
            chat=True,
            tools=tools,
        )
        for index in range(count)
    ]
    kind = "chat.completion.chunk" if body.stream else "chat.completion"
    reply = _Reply(service, _ChatForm(service), answers, len(prompt), body.include_usage, "chatcmpl", kind)
    if body.stream:
        return await answer_streamed(request, service, answers, reply.events)
    return await answer_whole(request, service, answers, reply.whole)


@router.post("/v1/completions")
async def completions(request: Request, body: CompletionRequest) -> Any:
    """Continue text."""
    service = checked_service(request, body.model)
    prompts = [
        await service.encode_text(prompt, "prompt")
        if isinstance(prompt, str)
        else service.check_tokens(prompt, "prompt")
        for prompt in body.prompts
    ]
    asked = body.max_tokens if body.max_tokens is not None else LEGACY_MAX_TOKENS
    lengths = [service.answer_tokens(prompt, asked, "max_tokens") for prompt in prompts]
    count = body.n or 1
    service.check_queue(count * len(prompts))
    answers = [
        service.answer(prompt, body.answer_params(service.defaults, answer_seed(body.seed, index)), tokens, body.stops)
        for prompt, tokens in zip(prompts, lengths, strict=True)
        for index in range(count)
    ]
    prompt_tokens = sum(len(prompt) for prompt in prompts)
    reply = _Reply(service, _TextForm(service), answers, prompt_tokens, body.include_usage, "cmpl", "text_completion")
    if body.stream:
        return await answer_streamed(request, service, answers, reply.events)
    return await answer_whole(request, service, answers, reply.whole)


class _Reply:
    """What both routes have in common: the frame around choices, and the usage at the end."""

    def __init__(
        self,
        service: Service,
        form: _ChatForm | _TextForm,
        answers: Sequence[Answer],
        prompt_tokens: int,
        include_usage: bool,
        prefix: str,
        kind: str,
    ) -> None:
        self._form = form
        self._answers = answers
        self._prompt_tokens = prompt_tokens
        self._include_usage = include_usage
        self._head = {
            "id": f"{prefix}-{secrets.token_hex(12)}",
            "object": kind,
            "created": int(time.time()),
            "model": service.options.name,
        }

    def whole(self, pieces: Sequence[Piece]) -> dict[str, Any]:
        choices = [
            {"index": index, **self._form.choice(index, piece), "finish_reason": piece.finish_reason}
            for index, piece in enumerate(pieces)
        ]
        return {**self._head, "choices": choices, "usage": self._usage()}

    async def events(self, pieces: AsyncIterator[tuple[int, Piece]]) -> AsyncIterator[str]:
        # As OpenAI has it: with usage asked for, the field is in every event, and empty until the end.
        nothing = {"usage": None} if self._include_usage else {}
        for index in range(len(self._answers)):
            for choice in self._form.opening(index):
                yield event({**self._head, "choices": [choice], **nothing})
        async for index, piece in pieces:
            choice = {"index": index, **self._form.delta(index, piece), "finish_reason": piece.finish_reason}
            yield event({**self._head, "choices": [choice], **nothing})
        if self._include_usage:
            yield event({**self._head, "choices": [], "usage": self._usage()})
        yield DONE

    def _usage(self) -> dict[str, int]:
        completion_tokens = sum(answer.tokens for answer in self._answers)
        return {
            "prompt_tokens": self._prompt_tokens,
            "completion_tokens": completion_tokens,
            "total_tokens": self._prompt_tokens + completion_tokens,
        }


class _ChatForm:
    """How a piece is told in a chat."""

    def __init__(self, service: Service) -> None:
        self._token = _token_text(service)
        self._calls: dict[int, int] = {}

    def opening(self, index: int) -> list[dict[str, Any]]:
        return [{"index": index, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}]

    def choice(self, index: int, piece: Piece) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": piece.text, **self._extras(index, piece)}
        if piece.tool_calls and not piece.text:
            message["content"] = None
        for call in message.get("tool_calls", ()):
            del call["index"]
        return {"message": message, "logprobs": self._logprobs(piece.logprobs)}

    def delta(self, index: int, piece: Piece) -> dict[str, Any]:
        delta = {**({"content": piece.text} if piece.text else {}), **self._extras(index, piece)}
        return {"delta": delta, "logprobs": self._logprobs(piece.logprobs)}

    def _extras(self, index: int, piece: Piece) -> dict[str, Any]:
        extras: dict[str, Any] = {"reasoning_content": piece.reasoning} if piece.reasoning else {}
        calls = []
        for call in piece.tool_calls:
            number = self._calls[index] = self._calls.get(index, -1) + 1
            function = {"name": call.name, "arguments": call.arguments}
            calls.append(
                {"index": number, "id": f"call_{secrets.token_hex(12)}", "type": "function", "function": function}
            )
        return {**extras, "tool_calls": calls} if calls else extras

    def _logprobs(self, logprobs: Sequence[TokenLogprob]) -> dict[str, Any] | None:
        if not logprobs:
            return None
        content = [
            {**self._entry(each.token, each.logprob), "top_logprobs": [self._entry(*pair) for pair in each.top]}
            for each in logprobs
        ]
        return {"content": content, "refusal": None}

    def _entry(self, token: int, logprob: float) -> dict[str, Any]:
        text = self._token(token)
        return {"token": text, "logprob": max(logprob, -9999.0), "bytes": list(text.encode())}


class _TextForm:
    """How a piece is told where text is continued."""

    def __init__(self, service: Service) -> None:
        self._token = _token_text(service)
        self._offsets: dict[int, int] = {}

    def opening(self, index: int) -> list[dict[str, Any]]:
        return []

    def choice(self, index: int, piece: Piece) -> dict[str, Any]:
        return {"text": piece.text, "logprobs": self._logprobs(index, piece.logprobs)}

    delta = choice

    def _logprobs(self, index: int, logprobs: Sequence[TokenLogprob]) -> dict[str, Any] | None:
        if not logprobs:
            return None
        texts = [self._token(each.token) for each in logprobs]
        offsets = []
        for text in texts:
            offsets.append(self._offsets.setdefault(index, 0))
            self._offsets[index] += len(text)
        return {
            "tokens": texts,
            "token_logprobs": [max(each.logprob, -9999.0) for each in logprobs],
            "top_logprobs": [{self._token(token): value for token, value in each.top} for each in logprobs],
            "text_offset": offsets,
        }


def _token_text(service: Service) -> Callable[[int], str]:
    return lambda token: str(service.tokenizer.decode([token]))


# --- messages as chat templates know them -----------------------------------------------------------------------------


def _plain(model: Any) -> dict[str, Any]:
    made: dict[str, Any] = model.model_dump(exclude_none=True)
    return made


def _message(message: Any) -> dict[str, Any]:
    made = _plain(message)
    if made["role"] == "developer":
        made["role"] = "system"
    return made
