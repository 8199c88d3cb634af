"""`headrace run`: one answer, or a chat. Knows the engine and the terminal; every figure comes from the report."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import sys
from pathlib import Path
from typing import Any

from rich.console import Console

from headrace import early, machine
from headrace.cli import show, terminal
from headrace.config import OffloadConfig, parse_size
from headrace.copying.ahead import ReadAhead
from headrace.core import Plan
from headrace.errors import HeadraceError, InvalidSetting, MissingPackage, OutputFailed, PromptTooLong
from headrace.settings import require

CHAT_CONTEXT = 2048
MAX_TOKENS = 256
BYTES_PER_TOKEN, TEMPLATE_TOKENS = 2, 128
"""Of a prompt whose tokens are not known yet: more of them than most have."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunOptions:
    """What was asked for on the command line, checked by `check`."""

    model: str
    prompt: str | None = None
    raw: bool = False
    max_tokens: int | None = None
    """None is MAX_TOKENS, or what the context leaves if that is less."""
    temperature: float | None = None
    top_p: float | None = None
    seed: int | None = None
    memory: str | None = None
    device: str | None = None
    host_memory: str | None = None
    pin_memory: bool = True
    context: int | None = None
    speculate: str = "auto"
    """A word, or a smaller model."""
    batch: Path | None = None
    """Requests, one a line; then `output` is where answers go."""
    output: Path | None = None
    batch_size: int | None = None
    as_json: bool = False
    trace: Path | None = None
    fast: bool = False
    trust_remote_code: bool = False
    quiet: bool = False

    @property
    def on_processor(self) -> bool:
        """Whether no device of its own computes."""
        return self.device in (None, "cpu")

    def check(self) -> None:
        """Everything that can be known to be wrong before anything is loaded. Raises: ConfigError, PathNotFound."""
        if self.memory is not None:
            parse_size(self.memory)
        if self.host_memory is not None:
            parse_size(self.host_memory, "--host-memory")
        needless, beside = "for what computes on a device", "given together with --device"
        alone = self.on_processor and self.host_memory is not None
        require(not alone, "--host-memory", needless, beside, "with --device cuda")
        left_out = "left out with --device: it is for the processor"
        require(self.on_processor or not self.fast, "--fast", "given", left_out, "without --device")
        tokens, temperature, top_p, seed = self.max_tokens, self.temperature, self.top_p, self.seed
        require(tokens is None or tokens >= 1, "--max-tokens", tokens, "at least 1", str(MAX_TOKENS))
        require(temperature is None or 0 <= temperature <= 10, "--temperature", temperature, "0 to 10", "0.7")
        require(top_p is None or 0 < top_p <= 1, "--top-p", top_p, "above 0 and at most 1", "0.95")
        beside = f"0 beside --top-p {top_p}"
        allowed = "above 0 where --top-p is given, since 0 does not sample"
        require(top_p is None or temperature != 0, "--temperature", beside, allowed, "0.7")
        require(seed is None or 0 <= seed < 2**63, "--seed", seed, "0 to 2**63 - 1", "0")
        require(self.context is None or self.context >= 1, "--context", self.context, "at least 1", str(CHAT_CONTEXT))
        require(self.speculate != "", "--speculate", "empty", "auto, lookup, off or a model", "auto")
        self._check_batch()
        if self.prompt is not None:
            require(self.prompt.strip() != "", "--prompt", "empty", "some text", "'Hello'")
            terminal.check_text(self.prompt, "--prompt")
        if self.trace is not None:
            _check_writable(self.trace)

    def _check_batch(self) -> None:
        """What goes together with a file of requests, and what does not."""
        if self.batch is None:
            needless, beside = "for answers to a file of requests", "given together with --batch"
            require(self.output is None, "--output", needless, beside, "with --batch FILE")
            require(self.batch_size is None, "--batch-size", needless, beside, "with --batch FILE")
            return
        output, size = self.output, self.batch_size
        require(output is not None, "--output", "not there", "a file for the answers beside --batch", "answers.jsonl")
        assert output is not None
        is_itself = output.exists() and self.batch.exists() and output.samefile(self.batch)
        require(not is_itself, "--output", repr(str(output)), "another file than --batch", "answers.jsonl")
        require(size is None or size >= 1, "--batch-size", size, "at least 1", "16")
        require(self.prompt is None, "--prompt", "given", "left out beside --batch", "in the file")
        is_alone = self.speculate in ("auto", "off")
        require(is_alone, "--speculate", self.speculate, "auto or off beside --batch, whose passes are shared", "off")
        require(self.on_processor, "--device", self.device, "cpu beside --batch", "cpu")
        require(self.trace is None, "--trace", self.trace, "left out beside --batch", "without --batch")


def _check_writable(trace: Path) -> None:
    """It is written last of all: an answer of an hour must not end in a typo."""
    existed = os.path.lexists(trace)
    if trace.exists() and not trace.is_file() and not trace.is_dir():
        return  # a pipe or a device: opening one may wait, or do something
    try:
        with trace.open("ab"):
            pass
    except OSError as error:
        raise InvalidSetting(
            setting="--trace",
            value=f"{str(trace)!r} ({error.strerror})",
            allowed="a file that can be written, in a directory that exists",
            suggestion=trace.name if trace.name and not trace.is_dir() else "trace.json",
        ) from None
    if not existed:
        trace.unlink()


def run(options: RunOptions, config: OffloadConfig) -> int:
    """Load, answer, report. Returns the exit code: 130 if the answer was interrupted."""
    require_engine()
    if options.batch is not None:
        from headrace.cli.batch import run_batch

        return run_batch(options, config, options.max_tokens or MAX_TOKENS)
    prompt = options.prompt
    if prompt is None and not sys.stdin.isatty():
        prompt = terminal.read_text().strip()
        require(prompt != "", "standard input", "empty", "some text", "with text in it, or pass -p 'Hello'")
    with _reading_ahead(options, config, prompt) as ahead:
        session = _Session(options, config, prompt, ahead)
    try:
        code = session.chat() if prompt is None else session.answer_once(prompt)
        session.finish()
        return code
    finally:
        session.close()


def require_engine() -> None:
    """Raises: MissingPackage with the install command, instead of an import error from the depths."""
    import importlib.util

    for package in ("torch", "transformers", "safetensors", "accelerate"):
        if importlib.util.find_spec(package) is None:
            raise MissingPackage(package=package, purpose="Running a model", extra="engine")


def _reading_ahead(
    options: RunOptions, config: OffloadConfig, prompt: str | None
) -> contextlib.AbstractContextManager[ReadAhead | None]:
    """Weights begin to arrive, unless they go to a device, or a draft model takes of the budget as well."""
    if not options.on_processor or options.speculate not in ("auto", "lookup", "off"):
        return contextlib.nullcontext()
    longest_answer = options.max_tokens or MAX_TOKENS
    context = max(CHAT_CONTEXT, 2 * longest_answer)
    if prompt is not None:
        context = len(prompt.encode(errors="replace")) // BYTES_PER_TOKEN + TEMPLATE_TOKENS + longest_answer
    return early.reading(
        options.model,
        memory=options.memory,
        offload=config,
        context=options.context or context,
        tracing=options.trace is not None,
    )


class _Session:
    """A loaded model, the conversation so far and where its parts are printed: text to stdout, the rest to stderr."""

    def __init__(self, options: RunOptions, config: OffloadConfig, prompt: str | None, ahead: ReadAhead | None) -> None:
        from headrace import generate
        from headrace.engine import Engine

        terminal.raise_if_interrupted()
        self.options = options
        self.console = Console(stderr=True, highlight=False, quiet=options.quiet)
        self._generate = generate
        self.max_tokens = options.max_tokens or MAX_TOKENS
        self.context = 0
        self.messages: list[dict[str, str]] = []
        self.answers: list[Any] = []
        with show.bars(self.console) as bars:
            self.engine = Engine.open(
                options.model,
                memory=options.memory,
                offload=config,
                context=lambda tokenizer, longest: self._plan_tokens(tokenizer, longest, prompt),
                device=options.device,
                host_memory=options.host_memory,
                pin_memory=options.pin_memory,
                speculate=options.speculate,
                sampling=self._sampling(),
                fast=options.fast,
                trust_remote_code=options.trust_remote_code,
                tracing=options.trace is not None,
                on_progress=bars,
                on_plan=self._show_plan,
                ahead=ahead,
            )
        self.raw = options.raw or not getattr(self.engine.tokenizer, "chat_template", None)
        self._loaded = machine.ProcessorTime.now()

    def _show_plan(self, plan: Plan) -> None:
        terminal.raise_if_interrupted()
        self.console.print(show.plan_rows(plan))
        self.console.print()

    def _sampling(self) -> Any:
        options = self.options
        return self._generate.Sampling(self.max_tokens, options.temperature, options.top_p, options.seed)

    def _plan_tokens(self, tokenizer: Any, longest: int | None, prompt: str | None) -> tuple[int, int]:
        """How many tokens the cache is planned for, and how many are prefilled at once."""
        context = self.options.context
        if context is not None and longest is not None:
            require(context <= longest, "--context", context, f"at most {longest} for this model", str(longest))
        length = 0
        if prompt is not None:
            messages = [{"role": "user", "content": prompt}]
            length = self._generate.encode(tokenizer, messages, raw=self.options.raw).shape[1]
        room = context or longest or sys.maxsize
        if prompt is None:
            room = context or min(max(CHAT_CONTEXT, 2 * self.max_tokens), room)
        self._fit_answer(room, length)
        self.context = room if context is not None or prompt is None else length + self.max_tokens
        return self.context, length or self.context - self.max_tokens

    def _fit_answer(self, room: int, length: int) -> None:
        """See that a prompt of `length` tokens (0 in a chat) and the answer fit into `room` tokens."""
        if length >= room:
            raise PromptTooLong(tokens=length, most_tokens=room - 1, context_tokens=room)
        most = room - length if length else max(1, room // 2)
        if self.options.max_tokens is None:
            self.max_tokens = min(self.max_tokens, most)
        why = f"a prompt of {length} tokens leaves no more of a context of {room} tokens"
        if not length:
            why = f"half of the context of {room} tokens is for questions"
        require(self.max_tokens <= most, "--max-tokens", self.max_tokens, f"at most {most}: {why}", str(most))

    def answer_once(self, prompt: str) -> int:
        if self.raw and not self.options.raw:
            self.console.print("(no chat template: the text is continued as it is)", style="dim")
        answer = self._answer(prompt)
        return 130 if answer.stopped else 0

    def chat(self) -> int:
        """Questions from the terminal until end of file; neither Ctrl-C nor a failed answer ends the chat."""
        terminal.edit_lines()
        self.console.print("Enter sends, Ctrl-C ends an answer, Ctrl-D ends the chat.", style="dim")
        if self.raw:
            self.console.print("No chat template: each text is continued by itself, without history.", style="dim")
        while True:
            try:
                prompt = terminal.ask("> ").strip()
                if not prompt:
                    continue
                terminal.check_text(prompt, "the question")
                self._answer(prompt)
            except EOFError:
                self.console.print()
                return 0
            except KeyboardInterrupt:
                terminal.interrupted.clear()
                self.console.print("\nCtrl-D ends the chat.", style="dim")
            except OutputFailed:
                raise
            except HeadraceError as error:
                terminal.complain(error.message)

    def _answer(self, prompt: str) -> Any:
        before = list(self.messages)
        self.messages.append({"role": "user", "content": prompt})
        written = False

        def write(text: str) -> None:
            nonlocal written
            written = True
            terminal.write(text)

        try:
            ids = self._encode_what_fits()
            with terminal.without_echo(), terminal.interrupt_sets_event() as stop:
                answer = self._generate.generate(
                    self.engine.model,
                    self.engine.tokenizer,
                    ids,
                    self._sampling(),
                    on_text=write,
                    stop=stop,
                    drafter=self.engine.drafter,
                )
        except BaseException as error:
            self.messages = before  # a question without an answer is no part of the conversation
            if written and not isinstance(error, OSError):
                terminal.write("\n")
            raise
        terminal.write("\n")
        self.messages.append({"role": "assistant", "content": answer.text})
        self.answers.append(answer)
        self.console.print(show.rate_line(self.engine.report(), answer), style="dim")
        return answer

    def _encode_what_fits(self) -> Any:
        """The conversation as tokens; its oldest questions are forgotten when it outgrows the planned context."""
        forgotten = 0
        room = self.context - self.max_tokens
        while True:
            ids = self._generate.encode(self.engine.tokenizer, self.messages, raw=self.options.raw)
            if ids.shape[1] <= room or len(self.messages) <= 1:
                break
            del self.messages[:2]
            forgotten += 1
        if ids.shape[1] > room:
            raise PromptTooLong(tokens=ids.shape[1], most_tokens=room, context_tokens=self.context)
        if forgotten:
            count = "the oldest question" if forgotten == 1 else f"the {forgotten} oldest questions"
            self.console.print(f"(forgot {count}: the context of {self.context} tokens is full)", style="dim")
        return ids

    def finish(self) -> None:
        """The report, the trace, and last of all the JSON document."""
        report = self.engine.report()
        if self.answers:
            self.console.print()
            self.console.print(show.report_rows(report, self.answers))
            self._tell_if_busy()
        failure = self._write_trace()
        if self.options.as_json:
            document = {"model": self.options.model, **show.figures(report, self.answers)}
            terminal.write(json.dumps(document, allow_nan=False) + "\n")
        if failure is not None:
            raise failure

    def _tell_if_busy(self) -> None:
        """OpenMP's threads wait for each other by spinning, and so take the processor from whom they wait for."""
        others = machine.others_share(self._loaded, machine.ProcessorTime.now())
        shares_all = self.options.on_processor and machine.cores() == os.cpu_count()
        if others > machine.BUSY_SHARE and shares_all and "OMP_WAIT_POLICY" not in os.environ:
            self.console.print(
                f"Other processes had {others:.0%} of the processor meanwhile. On a busy machine this can be twice as "
                "fast with OMP_WAIT_POLICY=passive in the environment (on a quiet one it is slower).",
                style="dim",
                soft_wrap=True,
            )

    def _write_trace(self) -> OutputFailed | None:
        path = self.options.trace
        if path is None:
            return None
        try:
            self.engine.metrics.write_trace(path)
        except OSError as error:
            return OutputFailed(output=f"the trace to {str(path)!r}", reason=error.strerror or str(error))
        self.console.print(f"trace: {path} (open it with https://ui.perfetto.dev)", style="dim", soft_wrap=True)
        return None

    def close(self) -> None:
        self.engine.close()
