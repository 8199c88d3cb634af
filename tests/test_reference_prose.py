"""A model writes about errors over real HTTP: what it is given, what is kept of it, and what happens when it fails."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from headrace.cli.app import main
from headrace.reference.database import Catalogue, database_path

MILL = '''
def grind(grain, stone):
    """Grind some grain.

    The stone has to be heavier than the grain.
    """
    if grain > stone:
        raise ValueError(f"grain {grain} is heavier than the stone ({stone})")
    if not grain:
        raise ValueError("there is no grain in the mill at all")


def open_gate(level):
    if level > 9:
        raise RuntimeError(f"level {level} of the water is too high")
'''
GOOD = "This happens when the grain is heavier than the stone."
BAD = "This happens when `max_grain` is 64 on Kubernetes."


class Model:
    """An endpoint, and what it was asked."""

    def __init__(self) -> None:
        self.asked: list[dict[str, Any]] = []
        self.keys: list[str | None] = []
        self.answer: Callable[[int], tuple[int, Any]] = lambda number: (200, self.said(f"{GOOD} {BAD}"))
        self.url = ""

    @staticmethod
    def said(text: str) -> dict[str, Any]:
        return {"choices": [{"message": {"role": "assistant", "content": text}}]}


@pytest.fixture
def model() -> Iterator[Model]:
    told = Model()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.reply(200, {"data": [{"id": "writer-1"}]} if self.path == "/v1/models" else {})

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            assert self.path == "/v1/chat/completions"
            told.asked.append(body)
            told.keys.append(self.headers.get("Authorization"))
            self.reply(*told.answer(len(told.asked)))

        def reply(self, status: int, body: Any) -> None:
            data = body if isinstance(body, bytes) else json.dumps(body).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            if status == 302:
                self.send_header("Location", "/v1/models")
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *arguments: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, name="a model")
        thread.start()
        told.url = f"http://127.0.0.1:{server.server_port}/v1"
        try:
            yield told
        finally:
            server.shutdown()
            thread.join()


@pytest.fixture(autouse=True)
def mill(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("no_proxy", "*")
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    (tmp_path / "mill").mkdir()
    file = tmp_path / "mill" / "__init__.py"
    file.write_text(MILL)
    return file


def build(mill: Path, url: str, *flags: str) -> int:
    return main(["reference", "build", "mill", "--source", str(mill.parent), "--prose-from", url, *flags])


def written() -> dict[str, tuple[str, ...]]:
    """Sentences by the message of their page."""
    with Catalogue.open(database_path("mill")) as catalogue:
        found = {page.id: str(page.template[0]) for page in catalogue.pages()}
        return {found[each.page]: each.sentences for each in catalogue.every_prose()}


def test_sentences_of_the_source_are_kept_and_marked(
    mill: Path, model: Model, capsys: pytest.CaptureFixture[str]
) -> None:
    assert build(mill, model.url) == 0
    assert "writer-1 was asked about 3 errors: 3 sentences kept, 3 dropped" in capsys.readouterr().out
    assert set(written().values()) == {(GOOD,)}
    message = "grain 9 is heavier than the stone (4)"
    assert main(["explain", "--package", "mill", message]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert f"situations {GOOD} (written by writer-1, from the source alone)" in said
    assert main(["explain", "--package", "mill", "--json", message]) == 0
    (situation,) = json.loads(capsys.readouterr().out)["when"]["situations"]
    assert (situation["text"], situation["basis"], situation["about"]) == (GOOD, "model", "writer-1")


def test_what_tells_no_situation_is_dropped(mill: Path, model: Model) -> None:
    model.answer = lambda number: (200, model.said(f"The code grinds some grain. It is heavier. {GOOD}"))
    assert build(mill, model.url) == 0
    assert set(written().values()) == {(GOOD,)}


def test_the_model_is_given_the_source_and_nothing_else(mill: Path, model: Model) -> None:
    assert build(mill, model.url, "--prose-model", "other") == 0
    first = model.asked[0]
    assert first["model"] == "other"
    given = first["messages"][1]["content"]
    assert "if grain > stone:" in given
    assert "The stone has to be heavier than the grain." in given
    assert "open_gate" not in given
    assert str(mill.parent) not in given
    assert model.keys[0] is None


def test_the_key_is_the_environments(mill: Path, model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    assert build(mill, model.url, "--prose-limit", "1") == 0
    assert model.keys == ["Bearer secret"]


def test_only_what_changed_is_asked_again(mill: Path, model: Model) -> None:
    assert build(mill, model.url) == 0
    assert build(mill, model.url) == 0
    assert len(model.asked) == 3
    mill.write_text(MILL.replace("level > 9", "level > 10"))
    assert build(mill, model.url) == 0
    assert ["level > 10" in str(body) for body in model.asked[3:]] == [True]
    assert build(mill, model.url, "--prose-model", "writer-2") == 0
    assert len(model.asked) == 7


def test_what_was_written_about_another_source_is_not_shown(
    mill: Path, model: Model, capsys: pytest.CaptureFixture[str]
) -> None:
    assert build(mill, model.url) == 0
    mill.write_text(MILL.replace("level > 9", "level > 10"))
    assert main(["reference", "build", "mill", "--source", str(mill.parent)]) == 0
    capsys.readouterr()
    main(["explain", "--package", "mill", "level 12 of the water is too high"])
    assert "written by" not in capsys.readouterr().out
    main(["explain", "--package", "mill", "there is no grain in the mill at all"])
    assert "written by" in capsys.readouterr().out


def test_a_limit_and_ids(mill: Path, model: Model, capsys: pytest.CaptureFixture[str]) -> None:
    assert build(mill, model.url, "--prose-limit", "1") == 0
    assert len(model.asked) == 1
    with Catalogue.open(database_path("mill")) as catalogue:
        last = list(catalogue.pages())[-1]
    assert build(mill, model.url, "--prose-ids", last.id) == 0
    assert "level > 9" in str(model.asked[1])
    assert len(written()) == 2
    assert build(mill, model.url, "--prose-ids", "0" * 16) == 2
    assert "error: No error of mill has the id '0000000000000000'" in capsys.readouterr().err


FAILURES: dict[str, tuple[int, Any, str]] = {
    "an error of the API": (429, {"error": {"message": "Too many requests."}}, "429 Too many requests"),
    "an error without words": (500, b"oops", "500 Internal Server Error"),
    "another address": (302, {}, "302 Found"),
    "no JSON": (200, b"<html>", "JSONDecodeError"),
    "no object": (200, [1], "its answer is no JSON object"),
    "no message": (200, {"choices": []}, "its answer has no message in it"),
}


@pytest.mark.parametrize(("status", "body", "told"), FAILURES.values(), ids=FAILURES.keys())
def test_a_failure_is_one_error_and_keeps_what_was_written(
    status: int, body: Any, told: str, mill: Path, model: Model, capsys: pytest.CaptureFixture[str]
) -> None:
    model.answer = lambda number: (200, model.said(GOOD)) if number < 3 else (status, body)
    assert build(mill, model.url) == 1
    said = capsys.readouterr().err
    assert said.startswith(f"error: The model at {model.url} did not answer: {told}")
    assert "about 2 errors, is kept" in said
    assert list(written().values()) == [(GOOD,), (GOOD,)]
    model.answer = lambda number: (200, model.said(""))
    assert build(mill, model.url) == 0
    assert len(model.asked) == 4


def test_nobody_listens(mill: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert build(mill, "http://127.0.0.1:1/v1") == 1
    assert "did not answer: [Errno 111] Connection refused" in capsys.readouterr().err


@pytest.mark.parametrize("url", ["file:///etc/passwd", "ftp://a/b", "127.0.0.1:8000", "http://"])
def test_only_http_is_spoken(url: str, mill: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert build(mill, url) == 2
    assert "error: --prose-from" in capsys.readouterr().err


def test_an_interruption_keeps_what_was_written(mill: Path, model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    from headrace.reference import endpoint

    answer = endpoint.Endpoint.answer

    def interrupted(self: Any, question: str) -> str:
        if "level" in question:
            raise KeyboardInterrupt
        return answer(self, question)

    monkeypatch.setattr(endpoint.Endpoint, "answer", interrupted)
    assert build(mill, model.url) == 130
    assert len(written()) == 2
