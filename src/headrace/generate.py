"""Prefill and decode through transformers' own generation, streamed and timed. Does not know that weights move."""

from __future__ import annotations

import contextlib
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import StoppingCriteria, StoppingCriteriaList, TextStreamer

from headrace.errors import ChatTemplateFailed
from headrace.speculation import Counts, Drafter


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

    def is_greedy(self, generation_config: Any) -> bool:
        """Whether the likeliest token is taken each time, by a model of this config."""
        return not self.arguments().get("do_sample", generation_config.do_sample)


@dataclass(frozen=True, slots=True)
class Answer:
    """What was generated and how long it took."""

    text: str
    token_ids: tuple[int, ...]
    prompt_tokens: int
    seconds_to_first_token: float
    decode_seconds: tuple[float, ...]
    """Between one token and the next; each of several that one pass made has its share of the pass."""
    stopped: bool
    """True if it was interrupted before its end."""
    decode_passes: int = 0
    """Over the model, after the one that made the first token."""
    drafted_tokens: int = 0
    """Verified by these passes beside the token that each makes anyway."""

    @property
    def seconds_per_token(self) -> float | None:
        """Median over the decoded tokens, or None if there was only one."""
        return statistics.median(self.decode_seconds) if self.decode_seconds else None

    @property
    def tokens_per_s(self) -> float | None:
        """Over all decoded tokens, the slow ones too; None if there was only one."""
        return len(self.decode_seconds) / sum(self.decode_seconds) if self.decode_seconds else None

    @property
    def tokens_per_pass(self) -> float | None:
        """Of the passes after the first token's; 1 without drafts, None if there was no such pass."""
        return len(self.decode_seconds) / self.decode_passes if self.decode_passes else None

    @property
    def accepted_tokens(self) -> int:
        """Drafted ones that were right."""
        return len(self.decode_seconds) - self.decode_passes


class _Pieces(TextStreamer):
    """Passes on text as soon as it is whole, and notes when each token came."""

    def __init__(self, tokenizer: Any, on_text: Callable[[str], None], on_token: Callable[[], None] | None) -> None:
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self._on_text = on_text
        self._on_token = on_token
        self.first_s: float | None = None
        """When the first token came."""
        self.decode_seconds: list[float] = []
        self.decode_passes = 0
        self.pieces: list[str] = []
        self._last_s = 0.0

    def put(self, value: Any) -> None:
        """The prompt, then what each pass made: shape (1,) or (1, tokens)."""
        if self.next_tokens_are_prompt:
            super().put(value)  # type: ignore[no-untyped-call]
            return
        self._note(value.numel())
        for token in value.reshape(-1, 1):  # each by itself: text comes in the same pieces whatever a pass makes
            super().put(token)  # type: ignore[no-untyped-call]
            if self._on_token is not None:
                self._on_token()

    def _note(self, tokens: int) -> None:
        now_s = time.perf_counter()
        if self.first_s is None:
            assert tokens == 1, "the pass over the prompt makes one token"
            self.first_s = now_s
        else:
            self.decode_passes += 1
            self.decode_seconds += [(now_s - self._last_s) / tokens] * tokens
        self._last_s = now_s

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
    drafter: Drafter | None = None,
) -> Answer:
    """Answer to `input_ids`, shape (1, tokens). `on_text` gets the text in pieces; setting `stop` ends the answer.

    With a `drafter` a pass can make several tokens. Where the likeliest is taken, they are those of an answer without
    one, bit for bit; where they are drawn, they come from the same distribution, with other draws.
    """
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
    with _drafting(drafter, model, sampling) as (counts, drafts):
        output = model.generate(
            input_ids,
            attention_mask=torch.ones_like(input_ids),
            streamer=streamer,
            stopping_criteria=StoppingCriteriaList([_Interrupted(stop)]),
            **arguments,
            **drafts,
        )
    return Answer(
        text="".join(streamer.pieces),
        token_ids=tuple(output[0, input_ids.shape[1] :].tolist()),
        prompt_tokens=input_ids.shape[1],
        seconds_to_first_token=streamer.first_s - start_s if streamer.first_s is not None else 0.0,
        decode_seconds=tuple(streamer.decode_seconds),
        stopped=stop.is_set(),
        decode_passes=streamer.decode_passes,
        drafted_tokens=counts.drafted,
    )


@contextlib.contextmanager
def _drafting(drafter: Drafter | None, model: Any, sampling: Sampling) -> Iterator[tuple[Counts, dict[str, Any]]]:
    """What counts drafts, and the arguments for transformers' generate that make them."""
    if drafter is None:
        yield Counts(), {}
        return
    with drafter.drafting(model, exact=sampling.is_greedy(model.generation_config)) as counts:
        yield counts, drafter.arguments()
