"""The model that is served: opened with room for its requests, asked with token ids, read as answers. Knows no HTTP."""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
import time
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from headrace import errors
from headrace.batching.batcher import Batcher, CacheSize, eos_token_ids
from headrace.batching.sampling import SamplingParams, sampling_defaults
from headrace.core import Plan
from headrace.engine import Engine
from headrace.residents import Progress
from headrace.server.options import MODEL_LEN, ServeOptions
from headrace.server.telemetry import Telemetry
from headrace.server.text import Answer, has_response_template, response_parser
from headrace.units import format_flag_bytes

T = TypeVar("T")

log = logging.getLogger("headrace.server")

KEPT_FREE_BYTES = 64 * 2**20
"""Of the budget, beside what the plan counts: sixteen requests in flight on several threads, and prompts cut in pieces
of ever other sizes, were 58 MiB over a budget of 3 GiB once (docs/log.md)."""
MAX_TOKEN_CHARACTERS = 64
"""A prompt with more characters per token of context than this is refused before it is cut into tokens."""


class Service:
    """An engine, the batcher on it, and what requests need to become tokens and answers again."""

    def __init__(self, engine: Engine, options: ServeOptions, size: CacheSize, model_len: int) -> None:
        self.engine = engine
        self.options = options
        self.model_len = model_len
        self.tokenizer: Any = engine.tokenizer
        self.report = engine.report()  # before the first pass: it looks at where weights lie at rest
        self.tiers = engine.tiers()
        self.telemetry = Telemetry()
        self.batcher = Batcher.start(engine.model, size, options.model, self.telemetry.note_token)
        self.created_s = int(time.time())
        self.vocabulary = int(engine.model.get_output_embeddings().weight.shape[0])
        self.defaults = sampling_defaults(engine.model.generation_config)
        self.eos_token_ids = eos_token_ids(engine.model.generation_config)
        # One thread: tokenizers are not made to be called from two at once, and the event loop must not wait for them.
        self._encoder = ThreadPoolExecutor(1, thread_name_prefix="encoder")
        self._answer_s = 1.0

    @classmethod
    def open(
        cls,
        options: ServeOptions,
        on_progress: Progress | None = None,
        on_plan: Callable[[Plan], None] | None = None,
        weights_share: float | None = None,
        offload: Any = None,
    ) -> Service:
        """Load the model with a KV cache of the size that the options ask for.

        Raises: NoRoomForRequests with numbers that fit, and what Engine.open raises.
        """
        chosen: list[tuple[int, CacheSize]] = []

        def context(tokenizer: Any, longest: int | None) -> tuple[int, int]:
            model_len = _model_len(options, longest)
            size = _cache_size(options, model_len)
            chosen.append((model_len, size))
            return -(-size.num_blocks * size.block_size // size.num_seqs), -(-size.batched_tokens // size.num_seqs)

        try:
            engine = Engine.open(
                options.model,
                memory=options.memory,
                offload=offload,
                context=context,
                weights_share=weights_share,
                kept_free_bytes=KEPT_FREE_BYTES,
                batch=options.max_num_seqs,
                fast=options.fast,
                trust_remote_code=options.trust_remote_code,
                on_progress=on_progress,
                on_plan=on_plan,
            )
        except errors.BudgetError as error:
            raise (_no_room(error, options, chosen[0][0]) if chosen else None) or error from None
        try:
            model_len, size = chosen[0]
            return cls(engine, options, size, model_len)
        except BaseException:
            engine.close()
            raise

    # --- from requests to tokens ----------------------------------------------------------------------------------

    async def encode_chat(self, messages: Sequence[dict[str, Any]], tools: Any = None) -> list[int]:
        """The conversation through the model's chat template. Raises: InvalidField, UnsupportedField."""
        if not getattr(self.tokenizer, "chat_template", None):
            reason = "this model has no chat template; /v1/completions continues text"
            raise errors.UnsupportedField(field="messages", reason=reason)
        if tools and not has_response_template(self.tokenizer, self.engine.model):
            reason = "tool calls of this model cannot be told from its text"
            raise errors.UnsupportedField(field="tools", reason=reason)
        self._check_length("messages", len(json.dumps([*messages, tools])))
        return await self._in_encoder(lambda: self._apply_template(messages, tools))

    def _apply_template(self, messages: Sequence[dict[str, Any]], tools: Any) -> list[int]:
        from transformers.cli.serving.utils import BaseHandler, Modality

        try:
            plain = BaseHandler.get_processor_inputs_from_messages(list(messages), Modality.LLM)
            made = self.tokenizer.apply_chat_template(
                plain, tools=tools or None, add_generation_prompt=True, tokenize=True, return_dict=True
            )
        except Exception as error:  # a template is a program, and fails as one
            reason = f"the model's chat template refuses the conversation ({type(error).__name__})"
            raise errors.InvalidField(field="messages", reason=reason) from error
        return list(made["input_ids"])

    async def encode_text(self, text: str, field: str) -> list[int]:
        """Raises: InvalidField, ContextLengthExceeded."""
        self._check_length(field, len(text))
        ids = await self._in_encoder(lambda: list(self.tokenizer(text)["input_ids"]))
        if not ids:
            raise errors.InvalidField(field=field, reason="it has no tokens")
        return ids

    def check_tokens(self, ids: Sequence[int], field: str) -> list[int]:
        """Raises: InvalidField if the model has no such token."""
        if max(ids) >= self.vocabulary:
            raise errors.InvalidField(field=field, reason=f"the model has {self.vocabulary} tokens, from 0 on")
        return list(ids)

    def _check_length(self, field: str, characters: int) -> None:
        if characters > self.model_len * MAX_TOKEN_CHARACTERS:
            reason = f"{characters} characters cannot fit into {self.model_len} tokens"
            raise errors.InvalidField(field=field, reason=reason)

    def _in_encoder(self, work: Callable[[], T]) -> Awaitable[T]:
        return asyncio.get_running_loop().run_in_executor(self._encoder, work)

    # --- from tokens to answers -------------------------------------------------------------------------------------

    def answer_tokens(self, prompt: Sequence[int], asked: int | None, field: str) -> int:
        """How long an answer may be. Raises: ContextLengthExceeded."""
        room = self.model_len - len(prompt)
        if room < 1 or (asked is not None and asked > room):
            raise errors.ContextLengthExceeded(
                field=field, prompt_tokens=len(prompt), answer_tokens=asked or 1, context_tokens=self.model_len
            )
        return asked if asked is not None else room

    def check_queue(self, answers: int) -> None:
        """Raises: QueueFull if so many more would wait for too long."""
        limit = self.options.max_num_seqs + self.options.max_waiting
        if self.batcher.unfinished + answers > limit:
            self.telemetry.rejected.inc()
            waiting = max(0, self.batcher.unfinished - self.options.max_num_seqs)
            retry_after_s = max(1, round(self._answer_s))
            raise errors.QueueFull(waiting=waiting, limit=self.options.max_waiting, retry_after_s=retry_after_s)

    def answer(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        max_tokens: int,
        stops: Sequence[str] = (),
        *,
        chat: bool = False,
        tools: Any = None,
    ) -> Answer:
        """Begin an answer. In a chat its text is sorted into content, reasoning and tool calls. Raises: NotReady."""
        for token, _ in params.logit_bias:
            self.check_tokens([token], "logit_bias")
        parser = response_parser(self.tokenizer, self.engine.model, prompt, tools) if chat else None
        generation = self.batcher.submit(prompt, params, max_tokens, self.eos_token_ids)
        if self.options.enable_log_requests:
            log.info("%s: %r %s", generation.id, self.tokenizer.decode(prompt), params)
        self.telemetry.prompt_tokens.inc(len(prompt))
        return Answer(generation, self.tokenizer, stops, parser)

    def note_answer(self, seconds: float) -> None:
        """An answer took so long: what a refused client is told to wait."""
        self._answer_s += 0.2 * (seconds - self._answer_s)

    def close(self) -> None:
        """End the batcher and the engine. Idempotent."""
        self.batcher.close()
        self.engine.close()
        self._encoder.shutdown()


def answer_seed(asked: int | None, index: int) -> int:
    """The seed of a request's answer number `index`: a random one if none was asked for."""
    return secrets.randbits(63) if asked is None else asked + index * 0x9E3779B97F4A7C15


def _model_len(options: ServeOptions, longest: int | None) -> int:
    asked = options.max_model_len
    if asked is not None and longest is not None and asked > longest:
        raise errors.InvalidSetting(
            setting="--max-model-len",
            value=str(asked),
            allowed=f"at most {longest} for this model",
            suggestion=str(longest),
        )
    return asked or min(MODEL_LEN, longest or MODEL_LEN)


def _cache_size(options: ServeOptions, model_len: int) -> CacheSize:
    return CacheSize.planned(
        options.max_num_seqs,
        model_len,
        options.max_num_batched_tokens,
        options.block_size,
        options.num_gpu_blocks_override,
    )


def _no_room(error: errors.BudgetError, options: ServeOptions, model_len: int) -> errors.NoRoomForRequests | None:
    """The error with flags that fit, if a smaller cache is all that it takes; None if not even an empty one fits."""
    # NotEnoughMemory tells what the process can have, and was made out of the plan that did not fit.
    planned = error.__context__ if isinstance(error, errors.NotEnoughMemory) else error
    if not isinstance(planned, errors.BudgetTooSmall):
        return None
    seqs = options.max_num_seqs
    memory_bytes = error.free_bytes if isinstance(error, errors.NotEnoughMemory) else planned.memory_bytes
    excess_bytes = planned.needed_bytes - memory_bytes
    share = max(0.0, 1 - excess_bytes / planned.kv_bytes) if planned.kv_bytes else 0.0
    tokens = int(share * seqs * model_len)
    fits = []
    if tokens >= model_len:
        fits.append(f"--max-num-seqs {tokens // model_len} --max-model-len {model_len}")
    if tokens // seqs >= 2 * options.block_size:
        shorter = tokens // seqs // options.block_size * options.block_size
        fits.append(f"--max-num-seqs {seqs} --max-model-len {shorter}")
    if not fits:
        return None
    if not isinstance(error, errors.NotEnoughMemory):
        fits.append(f"--memory {format_flag_bytes(planned.needed_bytes)}")
    return errors.NoRoomForRequests(
        memory_bytes=memory_bytes,
        needed_bytes=planned.needed_bytes,
        kv_bytes=planned.kv_bytes,
        num_seqs=seqs,
        model_len=model_len,
        fits=fits,
    )
