"""Prefill and decode through transformers' own generation, streamed and timed. Does not know that weights move."""

from __future__ import annotations

import itertools
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import StoppingCriteria, StoppingCriteriaList, TextStreamer

from headrace.errors import ChatTemplateFailed


@dataclass(frozen=True, slots=True)
class Sampling:
    """How the next token is chosen. None means what the model's generation config says."""

    max_tokens: int = 256
    temperature: float | None = None
    """0 is greedy."""
    top_p: float | None = None
    seed: int | None = None

    def arguments(self) -> dict[str, Any]:
        """Keyword arguments for transformers' generate."""
        chosen: dict[str, Any] = {"max_new_tokens": self.max_tokens}
        if self.temperature == 0:
            # None, not left out: the model's own sampling settings would be warned about.
            return chosen | {"do_sample": False, "temperature": None, "top_p": None, "top_k": None}
        if self.temperature is not None:
            chosen |= {"do_sample": True, "temperature": self.temperature}
        if self.top_p is not None:
            chosen |= {"do_sample": True, "top_p": self.top_p}
        return chosen


@dataclass(frozen=True, slots=True)
class Answer:
    """What was generated and how long it took."""

    text: str
    token_ids: tuple[int, ...]
    prompt_tokens: int
    seconds_to_first_token: float
    decode_seconds: tuple[float, ...]
    """Between one token and the next."""
    stopped: bool
    """True if it was interrupted before its end."""

    @property
    def seconds_per_token(self) -> float | None:
        """Median over the decoded tokens, or None if there was only one."""
        return statistics.median(self.decode_seconds) if self.decode_seconds else None

    @property
    def tokens_per_s(self) -> float | None:
        """Over all decoded tokens, the slow ones too; None if there was only one."""
        return len(self.decode_seconds) / sum(self.decode_seconds) if self.decode_seconds else None


class _Pieces(TextStreamer):
    """Passes on text as soon as it is whole, and notes when each token came."""

    def __init__(self, tokenizer: Any, on_text: Callable[[str], None], on_token: Callable[[], None] | None) -> None:
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self._on_text = on_text
        self._on_token = on_token
        self.times_s: list[float] = []
        self.pieces: list[str] = []

    def put(self, value: Any) -> None:
        is_prompt = self.next_tokens_are_prompt
        super().put(value)  # type: ignore[no-untyped-call]
        if not is_prompt:
            self.times_s.append(time.perf_counter())
            if self._on_token is not None:
                self._on_token()

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        if text:
            self.pieces.append(text)
            self._on_text(text)


class _Interrupted(StoppingCriteria):
    def __init__(self, event: threading.Event) -> None:
        self._event = event

    def __call__(self, input_ids: Any, scores: Any, **kwargs: Any) -> Any:
        return torch.full((input_ids.shape[0],), self._event.is_set(), dtype=torch.bool, device=input_ids.device)


def encode(tokenizer: Any, messages: Sequence[dict[str, str]], *, raw: bool) -> torch.Tensor:
    """Token ids of shape (1, tokens): the chat template over `messages`, or the last message's text as it is.

    Raises: ChatTemplateFailed.
    """
    if raw or not getattr(tokenizer, "chat_template", None):
        ids = tokenizer(messages[-1]["content"], return_tensors="pt").input_ids
    else:
        try:
            made = tokenizer.apply_chat_template(
                list(messages), add_generation_prompt=True, return_tensors="pt", return_dict=True
            )
        except Exception as error:  # a template is a program, and fails as one: jinja2's errors and Python's
            reason = str(error).strip().partition("\n")[0] or type(error).__name__
            raise ChatTemplateFailed(model=str(tokenizer.name_or_path), reason=reason) from error
        ids = made["input_ids"]
    return ids  # type: ignore[no-any-return]


def generate(
    model: Any,
    tokenizer: Any,
    input_ids: torch.Tensor,
    sampling: Sampling,
    *,
    on_text: Callable[[str], None] = lambda text: None,
    on_token: Callable[[], None] | None = None,
    stop: threading.Event | None = None,
) -> Answer:
    """Answer to `input_ids`, shape (1, tokens). `on_text` gets the text in pieces; setting `stop` ends the answer."""
    if sampling.seed is not None:
        torch.manual_seed(sampling.seed)
    streamer = _Pieces(tokenizer, on_text, on_token)
    stop = stop or threading.Event()
    arguments = sampling.arguments()
    if model.generation_config.pad_token_id is None and tokenizer.pad_token_id is None:
        # One sequence is never padded; without this transformers warns on every call.
        arguments["pad_token_id"] = tokenizer.eos_token_id if tokenizer.eos_token_id is not None else 0
    start_s = time.perf_counter()
    input_ids = input_ids.to(model.device)
    output = model.generate(
        input_ids,
        attention_mask=torch.ones_like(input_ids),
        streamer=streamer,
        stopping_criteria=StoppingCriteriaList([_Interrupted(stop)]),
        **arguments,
    )
    times_s = streamer.times_s
    return Answer(
        text="".join(streamer.pieces),
        token_ids=tuple(output[0, input_ids.shape[1] :].tolist()),
        prompt_tokens=input_ids.shape[1],
        seconds_to_first_token=times_s[0] - start_s if times_s else 0.0,
        decode_seconds=tuple(after - before for before, after in itertools.pairwise(times_s)),
        stopped=stop.is_set(),
    )
