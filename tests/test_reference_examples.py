"""Every error has an example, before raises this very class with its own words, and after raises nothing."""

from __future__ import annotations

import argparse
import os
import re
import shlex
import shutil
import socket
import string
import urllib.parse
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx2
import live_server
import pytest
import typer

from headrace.errors import HeadraceError, concrete_errors, error_with_id
from headrace.reference.examples import Example, examples

EXAMPLES = examples()
OWN = {cls.__name__: cls for cls in concrete_errors() if cls.__module__ == "headrace.errors"}


def test_every_error_has_an_example() -> None:
    assert EXAMPLES.keys() == OWN.keys()


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    import tiny_models

    return tiny_models.shared(tmp_path_factory.mktemp("examples"), "llama")


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty directory; what an example changes in the environment is undone."""
    monkeypatch.chdir(tmp_path)
    environment = dict(os.environ)
    os.environ |= {"XDG_CACHE_HOME": str(tmp_path / "cache"), "HF_HUB_OFFLINE": "1"}
    yield tmp_path
    os.environ.clear()
    os.environ.update(environment)


def run(steps: str, names: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands are run as the command line runs them, up to where it would print an error."""
    lines = steps.strip().splitlines()
    if lines and lines[0].startswith("headrace serve "):
        serve(lines, monkeypatch)
        return
    if not all(line.startswith("headrace ") for line in lines):
        exec(compile(steps, "an example", "exec"), names)
        return
    from headrace.cli.app import app

    for line in lines:
        code = typer.main.get_command(app).main(shlex.split(line)[1:], prog_name="headrace", standalone_mode=False)
        assert code in (0, None), line


# --- servers ----------------------------------------------------------------------------------------------------------


def parse_curl(line: str) -> argparse.Namespace:
    """What a `curl` line asks for; only what the examples use."""
    parser = argparse.ArgumentParser("curl")
    parser.add_argument("url")
    parser.add_argument("-H", dest="headers", action="append", default=[])
    parser.add_argument("-d", dest="data")
    parser.add_argument("--retry", type=int)
    parser.add_argument("--retry-delay", type=int)
    parser.add_argument("--retry-all-errors", action="store_true")
    return parser.parse_args(shlex.split(line)[1:])


def curl(request: argparse.Namespace, port: int) -> None:
    """Send a request to a server on this port. Raises the error that is answered, as far as its address names it."""
    lines = [line for given in request.headers for line in (read(given).splitlines() if given[0] == "@" else [given])]
    headers = dict(line.split(": ", 1) for line in lines)
    method = "GET" if request.data is None else "POST"
    path = urllib.parse.urlsplit(request.url).path
    content = None if request.data is None else read(request.data)
    answer = httpx2.request(
        method, f"http://127.0.0.1:{port}{path}", headers=headers, content=content, timeout=live_server.DEADLINE_S
    )
    if answer.status_code >= 400:
        error_class = error_with_id(answer.json()["error"]["doc_url"].rpartition("/")[2])
        assert error_class is not None
        raise Answered(error_class, answer.json()["error"]["message"])


def read(given: str) -> str:
    return Path(given[1:]).read_text() if given.startswith("@") else given


class Answered(Exception):
    """An error that came as a response."""

    def __init__(self, error_class: type[HeadraceError], message: str) -> None:
        super().__init__(error_class.__name__, message)
        self.error_class = error_class
        self.message = message


def serve(lines: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The command as it is typed up to where it would serve until a signal; there the requests are sent instead."""
    from headrace.cli.app import app
    from headrace.server import process
    from headrace.server.options import ServeOptions
    from headrace.server.service import Service

    requests = [parse_curl(line) for line in lines[1:]]
    words = shlex.split(lines[0])[1:]
    early = words[-1] == "&"

    def run_instead(
        options: ServeOptions, load: Callable[[], Service], listener: socket.socket, on_ready: Callable[[Service], None]
    ) -> None:
        listener.close()
        if early:
            with live_server.listening(None, options) as port:
                while requests and requests[0].retry is None:
                    curl(requests.pop(0), port)
        service = load()
        try:
            on_ready(service)
            with live_server.listening(service, options) as port:
                for request in requests:
                    curl(request, port)
        finally:
            service.close()

    monkeypatch.setattr(process, "run", run_instead)
    arguments = [*(words[:-1] if early else words), "--port", "0"]  # 8000 may be taken where the tests run
    typer.main.get_command(app).main(arguments, prog_name="headrace", standalone_mode=False)


def test_requests_are_read_as_curl_reads_them() -> None:
    request = parse_curl("curl http://127.0.0.1:8000/v1/models -H 'A: b c' -H @file -d '{\"x\": 1}'")
    assert (request.url, request.headers, request.data) == (
        "http://127.0.0.1:8000/v1/models",
        ["A: b c", "@file"],
        '{"x": 1}',
    )


# --- before and after -------------------------------------------------------------------------------------------------


def check(example: Example, part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    names: dict[str, Any] = {}
    run(example.given, names, monkeypatch)
    if part == "after":
        run(example.after, names, monkeypatch)
        return
    wanted = OWN[example.error]
    with pytest.raises((HeadraceError, Answered)) as caught:
        run(example.before, names, monkeypatch)
    error = caught.value
    if isinstance(error, Answered):
        assert error.error_class is wanted
        assert re.fullmatch(message_pattern(wanted), error.message, re.DOTALL)
    else:
        assert type(error) is wanted


def message_pattern(cls: type[HeadraceError]) -> str:
    """Matches what a class can say."""
    words = f"{cls.template}\n{cls.remedy}" if cls.remedy else cls.template
    parts = string.Formatter().parse(words)
    return "".join(re.escape(literal) + ("" if name is None else ".*") for literal, name, _, _ in parts)


either = pytest.mark.parametrize("part", ["before", "after"])


@either
@pytest.mark.parametrize("name", [name for name, example in EXAMPLES.items() if not example.checkpoint])
def test_a_light_example(name: str, part: str, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check(EXAMPLES[name], part, monkeypatch)


@pytest.mark.slow
@either
@pytest.mark.parametrize("name", [name for name, example in EXAMPLES.items() if example.checkpoint])
def test_an_example_with_a_checkpoint(
    name: str, part: str, place: Path, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(tiny, place / "models" / "tiny")
    check(EXAMPLES[name], part, monkeypatch)
