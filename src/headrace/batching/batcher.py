"""Many requests through one model, one pass at a time: transformers' continuous batching, and what a server adds to it.

What it adds: a pass that fails fails its own requests and nobody else's; a request that its reader has left behind is
cancelled for good; every token comes from the request's own row; and pages, blocks and tokens per pass follow from the
plan instead of from a GPU's memory. Knows tokens, not text.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
import logging
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import ContinuousBatchingConfig, GenerationConfig
from transformers.generation.continuous_batching.continuous_api import ContinuousBatchingManager, OutputRouter
from transformers.generation.continuous_batching.requests import GenerationOutput, RequestState

from headrace.batching import attention, pacing
from headrace.batching.sampling import Row, SamplingParams, TokenLogprob, row_chooser
from headrace.core import align_up
from headrace.errors import GenerationFailed, HeadraceError, InvalidSetting, NotReady, UnsupportedModel

FAILURES_IN_A_ROW = 3
"""So many failed passes, and none that went well, mean that the disk is gone rather than that a read went wrong."""


@dataclass(frozen=True, slots=True)
class CacheSize:
    """The paged KV cache and the passes over it, as planned."""

    block_size: int
    num_blocks: int
    num_seqs: int
    batched_tokens: int
    reserved: bool
    """Whether there is room for every request at its full length, so that none ever has to wait for another's."""

    @classmethod
    def planned(
        cls, num_seqs: int, model_len: int, batched_tokens: int, block_size: int, num_blocks: int | None = None
    ) -> CacheSize:
        """Room for `num_seqs` requests of `model_len` tokens, or `num_blocks` if that is less.

        Raises: InvalidSetting if not even one request fits.
        """
        per_request = align_up(model_len, block_size) // block_size
        blocks = num_seqs * per_request
        if num_blocks is not None and num_blocks < per_request:
            raise InvalidSetting(
                setting="--num-gpu-blocks-override",
                value=str(num_blocks),
                allowed=f"at least {per_request}, which one request of {model_len} tokens takes",
                suggestion=str(per_request),
            )
        reserved = num_blocks is None or num_blocks >= blocks
        batched = min(batched_tokens, num_seqs * model_len)
        return cls(block_size, blocks if reserved or num_blocks is None else num_blocks, num_seqs, batched, reserved)

    def config(self) -> ContinuousBatchingConfig:
        """For transformers. Nothing is padded: there are no graphs to capture on a CPU."""
        return ContinuousBatchingConfig(
            page_size=self.block_size,
            num_blocks=self.num_blocks,
            max_batch_tokens=max(self.batched_tokens, self.num_seqs),
            max_requests_per_batch=self.num_seqs,
            max_blocks_per_request=0,
            max_memory_percent=1.0,  # the planner has seen to the memory
            use_cuda_graph=False,
            use_async_batching=False,
            allow_block_sharing=True,
            auto_switch_to_flash=False,
            scheduler_type=pacing.NAME,
            # Below it, blocks that are only kept for prompts that begin alike are given up: room for one more request.
            safety_margin=(0.0 if self.num_seqs == 1 else 1 / self.num_seqs) if self.reserved else None,
        )


TokenTimes = Callable[[bool, float], None]
"""Told of each token: whether it is its request's first, and the seconds since the one before or since the request."""


@dataclass(frozen=True, slots=True)
class Statistics:
    """Of one moment."""

    running: int
    waiting: int
    kv_blocks_used: int
    kv_blocks_cached: int
    """Not in use, kept for prompts that begin alike."""
    kv_blocks: int
    passes: int
    failed_passes: int


class Generation:
    """One request's tokens, in order, for the event loop that asked for them."""

    def __init__(
        self,
        request_id: str,
        prompt: Sequence[int],
        params: SamplingParams,
        eos_token_ids: Sequence[int],
        cancel: Callable[[], None],
        on_token: TokenTimes,
    ) -> None:
        self.id = request_id
        self.prompt_tokens = len(prompt)
        self.eos_token_ids = tuple(eos_token_ids)
        self.row = Row(prompt, params)
        self._last_s = time.perf_counter()
        self.loop = asyncio.get_running_loop()
        self._queue: asyncio.Queue[tuple[list[int], bool, HeadraceError | None]] = asyncio.Queue()
        self._cancel = cancel
        self._on_token = on_token
        self._told = 0
        self._over = False

    def __aiter__(self) -> AsyncIterator[tuple[int, TokenLogprob | None]]:
        return self._tokens()

    async def _tokens(self) -> AsyncIterator[tuple[int, TokenLogprob | None]]:
        """Each token as it comes, with its logprobs if they were asked for. Raises: ReadError, GenerationFailed."""
        position = 0
        while True:
            tokens, finished, error = await self._queue.get()
            for token in tokens:
                yield token, self.row.logprobs[position] if self.row.logprobs else None
                position += 1
            if error is not None:
                raise error
            if finished:
                return

    def cancel(self) -> None:
        """The rest of the answer is not wanted. Idempotent, and nothing happens if it is over."""
        if not self._over:
            self._over = True
            self._cancel()

    def receive(self, output: GenerationOutput, error: HeadraceError | None) -> None:
        """On the event loop: what a pass gave. A slow reader costs its own queue and nobody's time."""
        new = [] if error is not None else output.generated_tokens[self._told :]
        if new:
            now_s = time.perf_counter()
            self._on_token(self._told == 0, now_s - self._last_s)
            self._last_s = now_s
        self._told += len(new)
        finished = output.is_finished() or error is not None
        self._over = self._over or finished
        self._queue.put_nowait((new, finished, error))

    def fail(self, error: HeadraceError) -> None:
        """On any thread: there will be no more tokens."""
        self._over = True
        if not self.loop.is_closed():
            self.loop.call_soon_threadsafe(self._queue.put_nowait, ([], True, error))


class _Router(OutputRouter):
    """Hands outputs to the generation that they belong to, with the error itself and not only its text."""

    def __init__(self, cancel: Callable[[str], None]) -> None:
        super().__init__()
        self.generations: dict[str, Generation] = {}
        self._errors: dict[str, HeadraceError] = {}
        self._cancel = cancel

    def deliver(self, output: GenerationOutput) -> None:
        self.deliver_batch([output])

    def deliver_batch(self, outputs: list[GenerationOutput]) -> None:
        """One wake-up for the whole pass: all generations belong to one event loop."""
        known: list[tuple[Generation, GenerationOutput, HeadraceError | None]] = []
        for output in outputs:
            generation = self.generations.get(output.request_id)
            error = self._errors.pop(output.request_id, None)
            if generation is not None:
                error = error or generation.row.error
                known.append((generation, output, error))
            if output.is_finished() or error is not None:
                self.generations.pop(output.request_id, None)
            if not output.is_finished() and (generation is None or error is not None):
                self._cancel(output.request_id)  # nobody waits for it; if asked before, then before it was known
        if known and not known[0][0].loop.is_closed():
            known[0][0].loop.call_soon_threadsafe(_receive_all, known)

    def fail_and_deliver(self, state: RequestState, error: Exception) -> None:
        self._errors[state.request_id] = as_ours(error)
        super().fail_and_deliver(state, error)


def _receive_all(outputs: Sequence[tuple[Generation, GenerationOutput, HeadraceError | None]]) -> None:
    for generation, output, error in outputs:
        generation.receive(output, error)


def as_ours(error: BaseException) -> HeadraceError:
    """What requests are told: our own errors as they are, of others only the kind, since their text may quote data."""
    return error if isinstance(error, HeadraceError) else GenerationFailed(reason=type(error).__name__)


def eos_token_ids(config: Any) -> tuple[int, ...]:
    """The tokens that end an answer, by the checkpoint's generation config."""
    configured = config.eos_token_id
    several = configured if isinstance(configured, (list, tuple)) else [configured]
    return tuple(dict.fromkeys(token for token in several if token is not None))


class _PassFailed(Exception):
    """The forward pass raised its cause; the batch before and after it is in order."""


class _Manager(ContinuousBatchingManager):
    """transformers' loop, with passes that may fail."""

    on_pass: Callable[[int, int, float, Exception | None], None]

    def switch_to_cb_friendly_attn(self, model: Any, auto_switch_to_flash: bool = True) -> None:
        before = model.config._attn_implementation
        if before != "sdpa":
            super().switch_to_cb_friendly_attn(model, auto_switch_to_flash)
            return
        attention.register()
        model.set_attn_implementation(attention.NAME)
        self._original_attn_impl = before

    def _generation_loop_body(self, batch_processor: Any, bootstrapping: bool) -> bool:
        try:
            return super()._generation_loop_body(batch_processor, bootstrapping)
        except _PassFailed as failed:
            batch_processor.handle_batch_error(failed.__cause__)
            return True

    def _generation_step(self) -> None:
        ios: Any = self.batch_processor.inputs_and_outputs  # type: ignore[union-attr]
        lengths = [request.query_length for request in ios.requests_in_batch]
        decoding = sum(length == 1 for length in lengths)
        start_s = time.perf_counter()
        failure: Exception | None = None
        try:
            super()._generation_step()
        except Exception as error:
            failure = error
            raise _PassFailed from error
        finally:
            self.on_pass(sum(lengths) - decoding, decoding, time.perf_counter() - start_s, failure)


class Batcher:
    """Runs requests through `model` on a thread of its own until it is closed.

    Guarantees: `submit`, `cancel` and `statistics` may be called from the event loop at any time; the loop thread never
    waits for a reader; blocks of the cache go back when a request ends, however it ends.
    """

    def __init__(
        self,
        model: Any,
        size: CacheSize,
        on_token: TokenTimes = lambda first, seconds: None,
        *,
        paced: bool = True,
    ) -> None:
        """`paced`: prompts come in pieces while others are answered, for readers who wait; else as a pass has room."""
        pacing.register()
        logging.getLogger("ContinuousBatchingLogger").setLevel(logging.CRITICAL)  # it quotes prompts
        self.size = size
        self._on_token = on_token
        self.pace = pacing.Pace(size.batched_tokens)
        self.passes = 0
        self.failed_passes = 0
        self.pass_s = 0.0
        """Of the last pass."""
        self._failures_in_a_row = 0
        self._failure: HeadraceError | None = None
        self._ids = itertools.count()
        config = GenerationConfig(do_sample=False, eos_token_id=-1)  # type: ignore[no-untyped-call]
        self._manager = _Manager(model, config, size.config())
        self._manager.logit_processor = row_chooser()
        self._manager.on_pass = self._note_pass
        self._router = self._manager.output_router = _Router(self._manager.cancel_request)
        with torch.inference_mode():  # the thread takes it over from here
            self._processor: Any = self._manager._create_batch_processor()
            scheduler: Any = self._processor.scheduler
            scheduler.pace, scheduler.reserved = self.pace if paced else None, size.reserved
            self._manager.batch_processor = self._processor
            self._manager.start()

    @classmethod
    def start(
        cls,
        model: Any,
        size: CacheSize,
        name: str,
        on_token: TokenTimes = lambda first, seconds: None,
        *,
        paced: bool = True,
    ) -> Batcher:
        """For the model that users know by `name`. Raises: UnsupportedModel if transformers cannot batch for it."""
        try:
            return cls(model, size, on_token, paced=paced)
        except (AttributeError, NotImplementedError, ValueError) as error:
            raise UnsupportedModel(
                model=name,
                reason=f"transformers cannot batch requests to it ({error})",
                suggestion="Use `headrace run` without --batch, which answers one request at a time.",
            ) from error

    def submit(
        self, prompt: Sequence[int], params: SamplingParams, max_tokens: int, eos_token_ids: Sequence[int]
    ) -> Generation:
        """Queue a request; its tokens can be read on the running event loop. Raises: NotReady."""
        self._raise_if_stopped()
        request_id = f"request-{next(self._ids)}"
        forget = functools.partial(self._forget, request_id)
        generation = Generation(request_id, prompt, params, eos_token_ids, forget, self._on_token)
        self._router.generations[request_id] = generation
        self._manager.add_request(
            list(prompt),
            request_id=request_id,
            max_new_tokens=max_tokens,
            streaming=True,
            eos_token_id=list(eos_token_ids),
            row=generation.row,
        )
        if not self._manager.is_running():
            self._forget(request_id)
            self._raise_if_stopped()
        return generation

    def _forget(self, request_id: str) -> None:
        self._router.generations.pop(request_id, None)
        self._manager.cancel_request(request_id)

    def _raise_if_stopped(self) -> None:
        if not self._manager.is_running():
            raise NotReady(reason=self.trouble() or "it has stopped")

    def _note_pass(self, prompt_tokens: int, decoding: int, seconds: float, failure: Exception | None) -> None:
        self.passes += 1
        self.pass_s = seconds
        if failure is None:
            self._failures_in_a_row = 0
            self.pace.note(prompt_tokens, decoding, seconds)
            return
        self.failed_passes += 1
        self._failures_in_a_row += 1
        self._failure = as_ours(failure)
        logging.getLogger("headrace.batching").error("a pass failed: %s", self._failure.what, exc_info=failure)

    def trouble(self) -> str | None:
        """Why requests should go elsewhere, or None: the loop has ended, or pass after pass fails."""
        fatal = self._manager.background_thread_status.fatal_error
        if fatal is not None:
            return f"the batching thread has ended ({type(fatal).__name__})"
        if self._failures_in_a_row >= FAILURES_IN_A_ROW and self._failure is not None:
            return f"the last {self._failures_in_a_row} passes failed, the last one with: {self._failure.what}"
        return None

    @property
    def alive(self) -> bool:
        """Whether the thread runs: if not, only a restart helps."""
        return bool(self._manager.is_running())

    @property
    def unfinished(self) -> int:
        """Requests that run or wait."""
        return len(self._router.generations)

    def statistics(self) -> Statistics:
        processor = self._processor
        used = cached = total = 0
        for allocator in processor.cache.cache_allocators.values():
            used += len({block for table in list(allocator.block_table.values()) for block in table})
            cached += len(allocator.ledger.cached_blocks)
            total += allocator.num_blocks
        running = len(processor.scheduler.active_requests)
        return Statistics(
            running=running,
            waiting=max(0, self.unfinished - running),
            kv_blocks_used=used,
            kv_blocks_cached=cached,
            kv_blocks=total,
            passes=self.passes,
            failed_passes=self.failed_passes,
        )

    def close(self) -> None:
        """End the pass that runs, fail what is left, and give the cache back. Idempotent."""
        while self._router.generations:
            _, generation = self._router.generations.popitem()
            generation.fail(NotReady(reason="it is stopping"))
        if self._manager.is_running():
            self._manager.stop(block=True, hard_stop=True)
