"""Standard input and output, and Ctrl-C. Knows no model and no command."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Iterator
from typing import Any

from headrace.errors import InvalidSetting, OutputFailed


def read_text() -> str:
    """All of standard input. Raises: InvalidSetting if it is not UTF-8 text."""
    data = sys.stdin.buffer.read() if hasattr(sys.stdin, "buffer") else sys.stdin.read().encode()
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise _not_text("standard input", data, error) from None


def check_text(text: str, setting: str) -> None:
    """What came as an argument or was typed may hold bytes that are no text. Raises: InvalidSetting."""
    try:
        text.encode()
    except UnicodeEncodeError:
        data = text.encode("utf-8", "surrogateescape")
        try:
            data.decode()
        except UnicodeDecodeError as error:
            raise _not_text(setting, data, error) from None


def _not_text(setting: str, data: bytes, error: UnicodeDecodeError) -> InvalidSetting:
    return InvalidSetting(
        setting=setting,
        value=f"not UTF-8 (byte {data[error.start]:#04x} at position {error.start})",
        allowed="UTF-8 text",
        suggestion="with text that `iconv -t UTF-8` has converted",
    )


def write(text: str) -> None:
    """Write to standard output at once. Raises: BrokenPipeError if the reader has gone, OutputFailed."""
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        raise OutputFailed(output="to standard output", reason=error.strerror or str(error)) from error


def ask(prompt: str) -> str:
    """A line from the terminal. The prompt is no part of the output, so it goes to stderr if stdout is a file."""
    if not sys.stdout.isatty():
        sys.stderr.write(prompt)
        sys.stderr.flush()
        prompt = ""
    return input(prompt)


def complain(message: str) -> None:
    """An error that does not end the program."""
    sys.stderr.write(f"error: {message}\n")


interrupted = threading.Event()
"""Set by a Ctrl-C that nobody has dealt with yet. Libraries that are interrupted in an import turn that into an error
of their own, about a module that is missing; with this it can be told from one."""


@contextlib.contextmanager
def notice_interrupts() -> Iterator[None]:
    """Within it Ctrl-C sets `interrupted` and raises KeyboardInterrupt, unless it is ignored as in the background."""
    interrupted.clear()
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or before is not signal.default_int_handler:
        yield
        return
    signal.signal(signal.SIGINT, _interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def raise_if_interrupted() -> None:
    """Called after imports, which may have swallowed a Ctrl-C. Raises: KeyboardInterrupt."""
    if interrupted.is_set():
        raise KeyboardInterrupt


def _interrupt(number: int, frame: object) -> None:
    interrupted.set()
    raise KeyboardInterrupt


@contextlib.contextmanager
def interrupt_sets_event() -> Iterator[threading.Event]:
    """Within it the first Ctrl-C only sets the event, so that a pass is never torn; the second one interrupts."""
    event = threading.Event()

    def interrupt(number: int, frame: object) -> None:
        if event.is_set():
            _interrupt(number, frame)
        event.set()
        # Not through a stream: the signal may have come in the middle of a write to it.
        with contextlib.suppress(OSError):
            os.write(2, b"\n(stopping after this token; Ctrl-C again stops at once)\n")

    before = signal.signal(signal.SIGINT, interrupt)
    try:
        yield event
    finally:
        signal.signal(signal.SIGINT, before)


@contextlib.contextmanager
def without_echo() -> Iterator[None]:
    """What is typed during an answer does not show in the middle of it; the next prompt has it."""
    settings = _terminal_settings()
    if settings is None:
        yield
        return
    import termios

    quiet = list(settings)
    quiet[3] &= ~termios.ECHO
    termios.tcsetattr(sys.stdin, termios.TCSADRAIN, quiet)
    try:
        yield
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, settings)


def _terminal_settings() -> list[Any] | None:
    try:
        import termios
    except ImportError:
        return None
    try:
        return termios.tcgetattr(sys.stdin)
    except (OSError, ValueError, termios.error):  # no terminal
        return None


def edit_lines() -> None:
    """Let `input` edit its line and recall earlier ones, where Python has readline."""
    with contextlib.suppress(ImportError):
        import readline

        # Tab is a character: there is nothing to complete.
        readline.parse_and_bind("tab: tab-insert")


def repair_streams() -> None:
    """Closed standard streams become empty ones, and what a stream cannot encode becomes `?`."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115 - it stays for good
        elif mode == "w" and hasattr(stream, "reconfigure") and (stream.encoding or "").lower() != "utf-8":
            stream.reconfigure(errors="replace")
