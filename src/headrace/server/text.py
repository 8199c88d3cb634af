"""From tokens to what a reader gets: text, reasoning and tool calls, up to the first stop string.

Decoding is the tokenizer's, and the parts of an answer are found by transformers' response parser. Knows no batch.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import AsyncGenerator, Iterable, Sequence
from typing import Any, Literal

from headrace.batching.batcher import Generation
from headrace.batching.sampling import TokenLogprob

FinishReason = Literal["stop", "length", "tool_calls"]


@dataclasses.dataclass(frozen=True, slots=True)
class ToolCall:
    """A call of a function that the model asks for."""

    name: str
    arguments: str
    """JSON."""


@dataclasses.dataclass(slots=True)
class Piece:
    """What became known of an answer with one token, or at its end."""

    text: str = ""
    reasoning: str = ""
    tool_calls: list[ToolCall] = dataclasses.field(default_factory=list)
    logprobs: list[TokenLogprob] = dataclasses.field(default_factory=list)
    finish_reason: FinishReason | None = None

    @property
    def is_empty(self) -> bool:
        return not (self.text or self.reasoning or self.tool_calls or self.logprobs or self.finish_reason)


class StopStrings:
    """Passes text on until a stop string comes up; holds back what may be the beginning of one."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self.stopped = False

    def feed(self, text: str) -> str:
        """The text that is certain not to belong to a stop string."""
        self._held += text
        found = [position for stop in self._stops if (position := self._held.find(stop)) >= 0]
        if found:
            self.stopped = True
            certain, self._held = self._held[: min(found)], ""
            return certain
        keep = max((_overlap(self._held, stop) for stop in self._stops), default=0)
        certain, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
        return certain

    def flush(self) -> str:
        """The answer is over: what was held back was no stop string."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that `stop` begins with."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)


class AnswerParts:
    """Sorts an answer's text into content, reasoning and tool calls as the model's response template tells them apart.

    Without a template everything is content.
    """

    def __init__(self, parser: Any | None = None) -> None:
        self._parser = parser
        self.called_tools = False

    def begin(self) -> Piece:
        """What the prompt has already opened."""
        return self._sorted(self._parser.initial_events) if self._parser is not None else Piece()

    def feed(self, text: str) -> Piece:
        return self._sorted(self._parser.feed(text)) if self._parser is not None else Piece(text=text)

    def end(self) -> Piece:
        if self._parser is None:
            return Piece()
        try:
            return self._sorted(self._parser.finalize()[1])
        except (ValueError, RuntimeError):
            # The answer ended in the middle of a tool call. Its text is not logged: it is the user's.
            logging.getLogger("headrace.server").info("an answer ended in the middle of a tool call")
            return Piece()

    def _sorted(self, events: Iterable[Any]) -> Piece:
        from transformers.cli.serving import utils as serving

        piece = Piece()
        for item in serving.response_events_to_chunks(list(events)):
            if isinstance(item, serving.ToolCall):
                piece.tool_calls.append(ToolCall(item.name, item.arguments))
                self.called_tools = True
            elif isinstance(item, serving.ReasoningText):
                piece.reasoning += item
            else:
                piece.text += item
        return piece


class Answer:
    """One generation, read as pieces of text. `tokens` counts what was generated so far."""

    def __init__(self, generation: Generation, tokenizer: Any, stops: Sequence[str], parser: Any | None = None) -> None:
        from tokenizers.decoders import DecodeStream

        self.generation = generation
        self.tokens = 0
        self._tokenizer = tokenizer._tokenizer
        self._stream = DecodeStream([], skip_special_tokens=parser is None)
        self._stops = StopStrings(stops)
        self._parts = AnswerParts(parser)
        self._eos = frozenset(generation.eos_token_ids)

    async def pieces(self) -> AsyncGenerator[Piece]:
        """Every piece that says something; the last one has the finish reason. Cancels what nobody reads to the end.

        Raises: ReadError, GenerationFailed, NotReady.
        """
        last_token = -1
        try:
            if not (first := self._parts.begin()).is_empty:
                yield first
            async for token, logprob in self.generation:
                self.tokens += 1
                last_token = token
                piece = self._read(token, logprob)
                if not piece.is_empty:
                    yield piece
                if self._stops.stopped:
                    break
            yield self._last(last_token)
        finally:
            self.generation.cancel()

    def _read(self, token: int, logprob: TokenLogprob | None) -> Piece:
        text = self._stops.feed(self._stream.step(self._tokenizer, token) or "")
        piece = self._parts.feed(text) if text else Piece()
        if logprob is not None:
            piece.logprobs.append(logprob)
        return piece

    def _last(self, token: int) -> Piece:
        held = "" if self._stops.stopped else self._stops.flush()
        piece = self._parts.feed(held) if held else Piece()
        rest = self._parts.end()
        piece.text += rest.text
        piece.reasoning += rest.reasoning
        piece.tool_calls += rest.tool_calls
        ended = self._stops.stopped or token in self._eos
        piece.finish_reason = "tool_calls" if self._parts.called_tools else "stop" if ended else "length"
        return piece


def response_parser(tokenizer: Any, model: Any, prompt: Sequence[int], tools: Any) -> Any | None:
    """Transformers' parser of this model's answers, or None if it knows no template for it."""
    from transformers.cli.serving.utils import build_response_parser

    return build_response_parser(tokenizer, model, list(prompt), tools=tools)


def has_response_template(tokenizer: Any, model: Any) -> bool:
    """Whether tool calls can be told from text in this model's answers."""
    from transformers.cli.serving.utils import get_response_template

    return get_response_template(tokenizer, model) is not None
