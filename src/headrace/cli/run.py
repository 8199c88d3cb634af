"""`headrace run`: one answer, or a chat. Knows the engine and the terminal; every figure comes from the report."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console

from headrace import errors
from headrace.cli import show
from headrace.config import OffloadConfig, parse_size
from headrace.core import Plan
from headrace.errors import InvalidSetting, MissingPackage

CHAT_CONTEXT = 2048


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunOptions:
    """What was asked for on the command line, checked by `check`."""

    model: str
    prompt: str | None = None
    raw: bool = False
    max_tokens: int = 256
    temperature: float | None = None
    top_p: float | None = None
    seed: int | None = None
    memory: str | None = None
    context: int | None = None
    as_json: bool = False
    trace: Path | None = None
    trust_remote_code: bool = False
    quiet: bool = False

    def check(self) -> None:
        """Everything that can be known to be wrong before anything is loaded. Raises: ConfigError, PathNotFound."""
        if self.memory is not None:
            parse_size(self.memory)
        _require(self.max_tokens >= 1, "--max-tokens", self.max_tokens, "at least 1", "256")
        _require(
            self.temperature is None or 0 <= self.temperature <= 10, "--temperature", self.temperature, "0 to 10", "0.7"
        )
        _require(self.top_p is None or 0 < self.top_p <= 1, "--top-p", self.top_p, "above 0 and at most 1", "0.95")
        _require(self.seed is None or 0 <= self.seed < 2**63, "--seed", self.seed, "0 to 2**63 - 1", "0")
        _require(self.context is None or self.context >= 1, "--context", self.context, "at least 1", "2048")
        _require(self.prompt is None or self.prompt.strip() != "", "--prompt", "empty", "some text", "'Hello'")
        if self.trace is not None and not self.trace.absolute().parent.is_dir():
            raise errors.InvalidSetting(
                setting="--trace",
                value=str(self.trace),
                allowed="a file in a directory that exists",
                suggestion=self.trace.name,
            )


def _require(valid: bool, setting: str, value: object, allowed: str, suggestion: str) -> None:
    if not valid:
        raise InvalidSetting(setting=setting, value=str(value), allowed=allowed, suggestion=suggestion)


def run(options: RunOptions, config: OffloadConfig) -> int:
    """Load, answer, report. Returns the exit code: 130 if the answer was interrupted."""
    options.check()
    require_engine()
    terminal = sys.stdin.isatty()
    prompt = options.prompt
    if prompt is None and not terminal:
        prompt = sys.stdin.read().strip()
        _require(prompt != "", "standard input", "empty", "some text", "or pass -p 'Hello'")
    session = _Session(options, config, prompt)
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


class _Session:
    """A loaded model, the conversation so far and where its parts are printed: text to stdout, the rest to stderr."""

    def __init__(self, options: RunOptions, config: OffloadConfig, prompt: str | None) -> None:
        from headrace import generate
        from headrace.engine import Engine

        self.options = options
        self.console = Console(stderr=True, highlight=False, quiet=options.quiet)
        self._generate = generate
        self.sampling = generate.Sampling(options.max_tokens, options.temperature, options.top_p, options.seed)
        self.messages: list[dict[str, str]] = []
        self.answers: list[Any] = []
        with show.bars(self.console) as bars:
            self.engine = Engine.open(
                options.model,
                memory=options.memory,
                offload=config,
                context=lambda tokenizer, longest: self._tokens(tokenizer, longest, prompt),
                trust_remote_code=options.trust_remote_code,
                tracing=options.trace is not None,
                on_progress=bars,
                on_plan=self._show_plan,
            )

    def _show_plan(self, plan: Plan) -> None:
        self.console.print(show.plan_table(plan))
        self.console.print()

    def _tokens(self, tokenizer: Any, longest: int | None, prompt: str | None) -> tuple[int, int]:
        """How many tokens the cache is planned for, and how many are prefilled at once."""
        asked = self.options.max_tokens
        if prompt is None:
            self.context = min(self.options.context or max(CHAT_CONTEXT, 2 * asked), longest or sys.maxsize)
            _require(
                asked < self.context,
                "--max-tokens",
                asked,
                f"below the context of {self.context}",
                str(self.context // 2),
            )
            return self.context, self.context - asked
        messages = [{"role": "user", "content": prompt}]
        length = self._generate.encode(tokenizer, messages, raw=self.options.raw).shape[1]
        self.context = max(length + asked, self.options.context or 0)
        room = (longest or sys.maxsize) - length
        _require(
            room > 0,
            "--prompt",
            f"{length} tokens long",
            f"shorter than the model's {longest} tokens",
            "a shorter text",
        )
        _require(asked <= room, "--max-tokens", asked, f"at most {room} after a prompt of {length} tokens", str(room))
        return self.context, length

    def answer_once(self, prompt: str) -> int:
        answer = self._answer(prompt)
        return 130 if answer.stopped else 0

    def chat(self) -> int:
        """Questions from the terminal until end of file; Ctrl-C ends an answer, not the chat."""
        self.console.print("Chat: Enter sends, Ctrl-C ends an answer, Ctrl-D ends the chat.", style="dim")
        while True:
            try:
                prompt = input("> ").strip()
            except EOFError:
                self.console.print()
                return 0
            except KeyboardInterrupt:
                self.console.print("\nCtrl-D ends the chat.", style="dim")
                continue
            if prompt:
                self._answer(prompt)

    def _answer(self, prompt: str) -> Any:
        self.messages.append({"role": "user", "content": prompt})
        ids = self._encode_what_fits()
        with interrupt_sets_event() as stop:
            answer = self._generate.generate(
                self.engine.model, self.engine.tokenizer, ids, self.sampling, on_text=_write, stop=stop
            )
        _write("\n")
        self.messages.append({"role": "assistant", "content": answer.text})
        self.answers.append(answer)
        self.console.print(show.rate_line(self.engine.report(), answer), style="dim")
        return answer

    def _encode_what_fits(self) -> Any:
        """The conversation as tokens; its oldest questions are forgotten when it outgrows the planned context."""
        forgotten = 0
        while True:
            ids = self._generate.encode(self.engine.tokenizer, self.messages, raw=self.options.raw)
            if ids.shape[1] + self.options.max_tokens <= self.context or len(self.messages) <= 1:
                break
            del self.messages[:2]
            forgotten += 1
        if forgotten:
            self.console.print(f"(the oldest {forgotten} of the questions no longer fit into the context)", style="dim")
        room = self.context - self.options.max_tokens
        _require(
            ids.shape[1] <= room,
            "the question",
            f"{ids.shape[1]} tokens long",
            f"at most {room} tokens",
            "a shorter one",
        )
        return ids

    def finish(self) -> None:
        """The report, the trace, and last of all the JSON document."""
        report = self.engine.report()
        if self.answers:
            self.console.print()
            self.console.print(show.report_table(report, self.answers))
        if self.options.trace is not None:
            self.engine.metrics.write_trace(self.options.trace)
            self.console.print(f"trace: {self.options.trace} (open it with Perfetto)", style="dim")
        if self.options.as_json:
            document = {
                "model": self.options.model,
                "answers": [answer_json(answer) for answer in self.answers],
                "tokens_per_s": show.tokens_per_s(self.answers),
                "report": report.to_json(),
            }
            print(json.dumps(document))

    def close(self) -> None:
        self.engine.close()


def answer_json(answer: Any) -> dict[str, Any]:
    """An answer with its derived figures."""
    return dataclasses.asdict(answer) | {
        "seconds_per_token": answer.seconds_per_token,
        "tokens_per_s": answer.tokens_per_s,
    }


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


@contextmanager
def interrupt_sets_event() -> Iterator[threading.Event]:
    """Within it the first Ctrl-C only sets the event, so that a pass is never torn; the second one interrupts."""
    event = threading.Event()

    def interrupt(number: int, frame: object) -> None:
        if event.is_set():
            raise KeyboardInterrupt
        event.set()
        os.write(2, b"\n(stopping after this token; Ctrl-C again stops at once)\n")

    before = signal.signal(signal.SIGINT, interrupt)
    try:
        yield event
    finally:
        signal.signal(signal.SIGINT, before)
