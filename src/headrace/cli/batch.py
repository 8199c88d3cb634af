"""`headrace run --batch`: a file of requests answered together, in a file that a later run goes on with.

Knows the engine, the batcher and the terminal; what lines mean and how answers are kept is in `batchfile`.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.text import Text

from headrace.batchfile import Answers, Request, read_requests, unanswered
from headrace.cli import show, terminal
from headrace.config import OffloadConfig
from headrace.errors import HeadraceError, PromptTooLong

if TYPE_CHECKING:
    from headrace.cli.run import RunOptions

MOST_SEQUENCES = 64
"""At a time, if nobody says how many: attention goes through them one by one."""
BATCHED_TOKENS = 1024
"""Of one pass, prompts included."""
BLOCK_TOKENS = 16
"""Of the KV cache."""


@dataclass(slots=True)
class Done:
    """What this run did."""

    lines: int = 0
    refused: int = 0
    """Of these lines: their prompts are too long."""
    prompt_tokens: int = 0
    completion_tokens: int = 0
    seconds: float = 0.0
    passes: int = 0

    @property
    def tokens_per_s(self) -> float | None:
        """Generated ones, over the whole time from the first request to the last answer."""
        return self.completion_tokens / self.seconds if self.completion_tokens else None


def run_batch(options: RunOptions, config: OffloadConfig, max_tokens: int) -> int:
    """Answer what is not answered yet. Returns the exit code: 130 if it was interrupted."""
    assert options.batch is not None
    assert options.output is not None
    requests = read_requests(options.batch, _asked(options, max_tokens))
    console = Console(stderr=True, highlight=False, quiet=options.quiet)
    with contextlib.closing(Answers(options.output, requests)) as answers:
        before = len(answers.done)
        if before:
            console.print(
                f"{before} of {len(requests)} lines are answered in {options.output} already.",
                style="dim",
                soft_wrap=True,
            )
        if before == len(requests):
            return 0
        run = _Run(options, config, max_tokens, list(unanswered(requests, answers)), answers, console)
        try:
            code = run.answer_all(len(requests))
            run.finish()
            return code
        finally:
            run.close()


def _asked(options: RunOptions, max_tokens: int) -> dict[str, Any]:
    """What makes the same line another question: an answer to it is not to be taken over."""
    named = {"model": options.model, "raw": options.raw, "max_tokens": max_tokens}
    if options.fast:  # left out otherwise: files that were begun before there was this flag go on
        named["fast"] = True
    return named | {name: getattr(options, name) for name in ("temperature", "top_p", "seed")}


class _Run:
    """A loaded model, the requests that are left and the file of answers."""

    def __init__(
        self,
        options: RunOptions,
        config: OffloadConfig,
        max_tokens: int,
        requests: Sequence[Request],
        answers: Answers,
        console: Console,
    ) -> None:
        from headrace.batching.batcher import Batcher, eos_token_ids
        from headrace.engine import Engine

        terminal.raise_if_interrupted()
        self.options = options
        self.console = console
        self.done = Done()
        self._max_tokens = max_tokens
        self._requests = requests
        self._answers = answers
        self._prompts: dict[int, list[int]] = {}
        self._longest = 0
        self._failure: HeadraceError | None = None
        with show.bars(console) as bars:
            self.engine = Engine.open(
                options.model,
                memory=options.memory,
                offload=config,
                loads=self._loads,
                fast=options.fast,
                trust_remote_code=options.trust_remote_code,
                tracing=options.trace is not None,
                on_progress=bars,
                on_plan=self._show_plan,
            )
        try:
            self._config = self.engine.model.generation_config
            self._eos = eos_token_ids(self._config)
            size = self._cache_size(self.engine.plan.batch)
            self.batcher = Batcher.start(self.engine.model, size, options.model, paced=False)
        except BaseException:
            self.engine.close()
            raise

    def _show_plan(self, plan: Any) -> None:
        terminal.raise_if_interrupted()
        self.console.print(show.plan_rows(plan))
        self.console.print()

    # --- how many at once ---------------------------------------------------------------------------------------------

    def _loads(self, tokenizer: Any, longest: int | None) -> list[Any]:
        """Batches to choose from. The cache holds the longest requests of the file, whichever run at once."""
        from headrace.generate import encode
        from headrace.planner import Load

        self._longest = min(self.options.context or 2**31, longest or 2**31)
        for request in self._requests:
            raw = self.options.raw or request.raw
            self._prompts[request.index] = encode(tokenizer, request.messages, raw=raw)[0].tolist()
        asked = self.options.batch_size
        sizes = [asked] if asked is not None else list(_powers(min(MOST_SEQUENCES, len(self._requests))))
        loads = []
        for batch in sizes:
            size = self._cache_size(batch)
            tokens = -(-size.num_blocks * size.block_size // batch)
            loads.append(Load(batch, tokens, -(-size.batched_tokens // batch)))
        return loads

    def _cache_size(self, batch: int) -> Any:
        """Room for any `batch` requests of the file at their full length."""
        from headrace.batching.batcher import CacheSize

        needs = sorted((self._blocks(request) for request in self._requests if self._fits(request)), reverse=True)
        blocks = sum(needs[:batch]) + max(0, batch - len(needs)) or 1
        return CacheSize(BLOCK_TOKENS, blocks, batch, min(BATCHED_TOKENS, blocks * BLOCK_TOKENS), reserved=True)

    def _blocks(self, request: Request) -> int:
        return -(-(len(self._prompts[request.index]) + self._answer_tokens(request)) // BLOCK_TOKENS)

    def _fits(self, request: Request) -> bool:
        return 0 < len(self._prompts[request.index]) < self._longest

    def _answer_tokens(self, request: Request) -> int:
        """The longest answer: as asked, or what the context leaves beside the prompt."""
        return min(request.max_tokens or self._max_tokens, self._longest - len(self._prompts[request.index]))

    # --- answering ----------------------------------------------------------------------------------------------------

    def answer_all(self, total: int) -> int:
        """All requests, each written as it is finished. Raises: what the requests that failed failed with."""
        start_s = time.perf_counter()
        try:
            with _progress(self.console) as progress, terminal.interrupt_sets_event() as stop:
                task = progress.add_task("answering", total=total, completed=len(self._answers.done))
                asyncio.run(self._answer_all(progress, task, stop))
        finally:
            self.done.seconds = time.perf_counter() - start_s
            self.done.passes = self.batcher.passes
        if self._failure is not None:
            self.finish()
            raise self._failure
        return 130 if stop.is_set() else 0

    async def _answer_all(self, progress: Progress, task: Any, stop: Any) -> None:
        left = iter(self._requests)

        async def work() -> None:
            for request in left:
                await self._answer(request)
                progress.update(task, completed=len(self._answers.done))

        # More than run at once: the next one is there when a pass has room for it.
        workers = [asyncio.ensure_future(work()) for _ in range(2 * self.batcher.size.num_seqs)]
        watch = asyncio.ensure_future(_until_set(stop))
        try:
            while (pending := [each for each in workers if not each.done()]) and not self._is_over(stop):
                await asyncio.wait([*pending, watch], return_when=asyncio.FIRST_COMPLETED)
        finally:
            for each in (*workers, watch):
                each.cancel()
            ended = await asyncio.gather(*workers, return_exceptions=True)
        for result in ended:
            if isinstance(result, Exception):
                raise result

    def _is_over(self, stop: Any) -> bool:
        return stop.is_set() or self.batcher.trouble() is not None

    async def _answer(self, request: Request) -> None:
        """Ask and write the answer; what fails is asked again by the next run."""
        prompt = self._prompts[request.index]
        if not self._fits(request):
            self.done.lines += 1
            self.done.refused += 1
            self._answers.write(request, _too_long(len(prompt), self._longest))
            return
        generation = None
        try:
            tokens = self._answer_tokens(request)
            generation = self.batcher.submit(prompt, self._params(request), tokens, self._eos)
            made = [token async for token, _ in generation]
        except HeadraceError as error:
            self._failure = self._failure or error
            return
        finally:
            if generation is not None:
                generation.cancel()
        self._answers.write(request, self._record(prompt, made))
        self.done.lines += 1
        self.done.prompt_tokens += len(prompt)
        self.done.completion_tokens += len(made)

    def _record(self, prompt: Sequence[int], made: Sequence[int]) -> dict[str, Any]:
        return {
            "text": self.engine.tokenizer.decode(made, skip_special_tokens=True),
            "prompt_tokens": len(prompt),
            "completion_tokens": len(made),
            "finish_reason": "stop" if made and made[-1] in self._eos else "length",
        }

    def _params(self, request: Request) -> Any:
        """As `headrace run` samples: what the line says, then the command line, then the checkpoint's own config."""
        from headrace.batching.sampling import SamplingParams, sampling_defaults
        from headrace.generate import Sampling

        options = self.options
        temperature = request.temperature if request.temperature is not None else options.temperature
        top_p = request.top_p if request.top_p is not None else options.top_p
        chosen = {"top_k": 50, **sampling_defaults(self._config)}
        if Sampling(temperature=temperature, top_p=top_p).is_greedy(self._config):
            return SamplingParams(temperature=0.0, repetition_penalty=chosen.get("repetition_penalty", 1.0))
        given = {name: value for name, value in (("temperature", temperature), ("top_p", top_p)) if value is not None}
        seed = request.seed if request.seed is not None else options.seed
        return SamplingParams(**{**chosen, **given}, seed=secrets.randbits(63) if seed is None else seed)

    # --- the end ------------------------------------------------------------------------------------------------------

    def finish(self) -> None:
        """The report on stderr, and the JSON document on stdout."""
        report = self.engine.report()
        self.console.print()
        self.console.print(show.report_rows(report, []))
        self.console.print(show.Rows("batch", list(_figures(self.done, self.engine.plan.batch))))
        if self.options.as_json:
            figures = {name: getattr(self.done, name) for name in (*Done.__slots__, "tokens_per_s")}
            batch = figures | {"sequences": self.engine.plan.batch}
            document = {"model": self.options.model, "batch": batch, "report": report.to_json()}
            terminal.write(json.dumps(document, allow_nan=False) + "\n")

    def close(self) -> None:
        self.batcher.close()
        self.engine.close()


def _powers(most: int) -> Iterator[int]:
    """1, 2, 4 ... and `most`."""
    size = 1
    while size < most:
        yield size
        size *= 2
    yield most


async def _until_set(stop: Any) -> None:
    """The event is set by a signal handler, which cannot wake the loop."""
    while not stop.is_set():
        await asyncio.sleep(0.1)


def _too_long(tokens: int, context: int) -> dict[str, Any]:
    error = PromptTooLong(tokens=tokens, most_tokens=context - 1, context_tokens=context)
    return {"text": None, "prompt_tokens": tokens, "finish_reason": None, "error": error.message}


def _figures(done: Done, sequences: int) -> Iterator[tuple[str, str]]:
    yield "lines", f"{done.lines} answered" + (f", {done.refused} of them refused as too long" if done.refused else "")
    if done.tokens_per_s is not None:
        yield (
            "throughput",
            f"{done.tokens_per_s:.2f} tokens/s: {done.completion_tokens} tokens in {done.seconds:.1f} s, with up to "
            f"{sequences} sequences in each of {done.passes} passes",
        )


class _EndTime(TimeRemainingColumn):
    """When it will be done, by the clock."""

    def render(self, task: Any) -> Any:
        if task.finished or task.time_remaining is None:
            return Text("")
        return Text(time.strftime("until %H:%M:%S", time.localtime(time.time() + task.time_remaining)))


@contextlib.contextmanager
def _progress(console: Console) -> Iterator[Progress]:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), _EndTime())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        yield progress
