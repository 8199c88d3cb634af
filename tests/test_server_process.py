"""The life of a server, in a process of its own: it drains, it stops, it dies, and the next one starts."""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest
import tiny_models
import torch
from live_server import DEADLINE_S, options

from headrace.errors import AddressNotUsable, PathNotFound
from headrace.server.listening import bind
from headrace.server.process import run
from headrace.server.service import Service

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.write(tmp_path_factory.mktemp("models") / "tiny", "llama", torch.float32)


@contextmanager
def started(directory: Path, port: int = 0, *flags: str) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """The command itself, once it says where it listens."""
    command = [sys.executable, "-m", "headrace", "serve", str(directory), "--port", str(port), "--max-num-seqs", "2"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen([*command, *flags], stderr=subprocess.PIPE, env=environment) as process:
        try:
            text = wait_for(process, "is served at http://", "\n")
            yield process, text.partition("is served at ")[2].partition("/v1")[0]
        finally:
            process.kill()


def wait_for(process: subprocess.Popen[bytes], *words: str) -> str:
    """What it has written to stderr once that has these words, in this order."""
    assert process.stderr is not None
    written = b""
    end_s = time.monotonic() + DEADLINE_S
    while not _has(written.decode(errors="replace"), words):
        ready, _, _ = select.select([process.stderr], [], [], max(0.0, end_s - time.monotonic()))
        assert ready, written
        piece = os.read(process.stderr.fileno(), 65536)
        assert piece, written
        written += piece
    return written.decode(errors="replace")


def _has(text: str, words: tuple[str, ...]) -> bool:
    for word in words:
        _, found, text = text.partition(word)
        if not found:
            return False
    return True


def stream(client: httpx2.Client, tokens: int) -> Any:
    body = {"prompt": "a", "max_tokens": tokens, "stream": True, "logit_bias": {str(tiny_models.EOS): -100}}
    return client.stream("POST", "/v1/completions", json=body)


def test_the_first_signal_lets_requests_end_and_takes_no_more(directory: Path) -> None:
    with started(directory) as (process, url), httpx2.Client(base_url=url, timeout=DEADLINE_S) as client:
        with stream(client, 200) as answer:
            lines = answer.iter_lines()
            next(lines)
            process.send_signal(signal.SIGTERM)
            wait_for(process, "draining")
            rest = [line for line in lines if line]
        assert rest[-1] == "data: [DONE]"
        assert json.loads(rest[-2].removeprefix("data: "))["choices"][0]["finish_reason"] == "length"
        process.wait(DEADLINE_S)
        with pytest.raises(httpx2.HTTPError):
            client.get("/health")


def test_requests_that_do_not_end_in_time_are_cut_off(directory: Path) -> None:
    """60 answers of 250 tokens, two at a time, take far longer than a drain of one second."""
    with started(directory, 0, "--drain-timeout", "1") as (process, url):
        body = {"prompt": "a", "n": 60, "max_tokens": 250, "stream": True, "logit_bias": {str(tiny_models.EOS): -100}}
        with (
            httpx2.Client(base_url=url, timeout=DEADLINE_S) as client,
            client.stream("POST", "/v1/completions", json=body) as answer,
        ):
            lines = answer.iter_lines()
            next(lines)
            process.send_signal(signal.SIGTERM)
            with pytest.raises(httpx2.RemoteProtocolError):
                assert list(lines)[-1] == "data: [DONE]"
        process.wait(DEADLINE_S)


def test_nothing_of_a_killed_server_stops_the_next_one_which_a_second_signal_stops_at_once(directory: Path) -> None:
    with started(directory) as (process, url):
        with httpx2.Client(base_url=url, timeout=DEADLINE_S) as client, stream(client, 240) as answer:
            next(answer.iter_lines())
            process.kill()
        process.wait(DEADLINE_S)
    port = int(url.rpartition(":")[2])
    with (
        started(directory, port, "--drain-timeout", "600") as (process, again),
        httpx2.Client(base_url=again, timeout=DEADLINE_S) as client,
        stream(client, 240) as answer,
    ):
        assert again == url
        next(answer.iter_lines())
        process.send_signal(signal.SIGTERM)
        wait_for(process, "draining")
        process.send_signal(signal.SIGINT)
        process.wait(DEADLINE_S)


def test_a_model_that_cannot_be_loaded_ends_the_server_with_its_error(tmp_path: Path) -> None:
    chosen = options(tmp_path / "none", port=0)
    with pytest.raises(PathNotFound):
        run(chosen, lambda: Service.open(chosen), bind(chosen))


def test_a_port_that_is_taken_is_told_before_anything_is_loaded(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(AddressNotUsable, match="already in use"):
            bind(options(tmp_path, port=port))


def test_it_listens_to_this_machine_alone_unless_told(tmp_path: Path) -> None:
    with bind(options(tmp_path, port=0)) as listener:
        assert listener.getsockname()[0] == "127.0.0.1"
    with pytest.raises(AddressNotUsable):
        bind(options(tmp_path, host="192.0.2.1", port=0))
