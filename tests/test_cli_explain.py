"""`headrace explain` as it is typed: texts, files, ids; what it prints and its exit codes."""

from __future__ import annotations

import io
import json
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from test_reference_explain import MILL, STONE

from headrace.cli import explain as command
from headrace.cli import references
from headrace.cli.app import main
from headrace.errors import PathNotFound


@dataclass
class Done:
    code: int
    out: str
    err: str


Explain = Callable[..., Done]


@pytest.fixture
def explain(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Explain:
    """The command, with the reference of a small package in an empty cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    Path("mill").mkdir()
    Path("mill/__init__.py").write_text(MILL)
    assert main(["reference", "build", "mill", "--source", "mill"]) == 0
    capsys.readouterr()

    def run(*arguments: str, stdin: str | None = None) -> Done:
        if stdin is not None:
            monkeypatch.setattr(sys, "stdin", io.StringIO(stdin))
        code = main(["explain", *arguments])
        captured = capsys.readouterr()
        return Done(code, captured.out, captured.err)

    return run


def test_a_message(explain: Explain) -> None:
    done = explain(f"ValueError: {STONE}", "--package", "mill")
    assert done.code == 0
    assert "ValueError of mill" in done.out
    assert "exactly this message" in done.out
    assert "mill/__init__.py:6 in Stone.check" in done.out
    assert "\x1b" not in done.out


def test_words_without_quotes_are_joined(explain: Explain) -> None:
    assert explain("--package", "mill", *STONE.split()).code == 0


def test_a_traceback_from_a_file(explain: Explain) -> None:
    text = f'Traceback (most recent call last):\n  File "a.py", line 1, in f\nValueError: {STONE}\n'
    assert "Stone.check" in explain("--package", "mill", stdin=text).out


def test_json(explain: Explain) -> None:
    document = json.loads(explain(STONE, "--json", "--package", "mill").out)
    assert document["found"] is True
    assert document["site"]["qualname"] == "Stone.check"


def test_short(explain: Explain) -> None:
    done = explain(STONE, "--short", "--package", "mill")
    assert done.out.count("\n") == 1
    assert done.out.startswith("mill/__init__.py:6")


def test_nothing_claimed(explain: Explain) -> None:
    done = explain("KeyError: 'weights'", "--package", "mill")
    assert done.code == 1
    assert "not mill" in done.out
    assert "Python's" in done.out
    assert explain("KeyError: 'weights'", "--json", "--package", "mill").code == 1


def test_an_id(explain: Explain) -> None:
    page_id = json.loads(explain(STONE, "--json", "--package", "mill").out)["id"]
    assert "Stone.check" in explain(page_id).out
    assert "Stone.check" in explain(page_id.upper()).out


def test_an_unknown_id_names_the_nearest(explain: Explain) -> None:
    page_id = json.loads(explain(STONE, "--json", "--package", "mill").out)["id"]
    wrong = page_id[:-1] + ("0" if page_id[-1] != "0" else "1")
    done = explain(wrong, "--package", "mill")
    assert done.code == 2
    assert page_id in done.err


@pytest.mark.slow
def test_our_own_reference_is_built_when_it_is_needed(explain: Explain) -> None:
    done = explain(PathNotFound.error_id())
    assert done.code == 0
    assert "headrace/sources/models.py" in done.out
    assert PathNotFound.remedy[:20] in done.out
    assert "before" in done.out
    assert "after" in done.out


@pytest.mark.slow
def test_our_own_reference_is_looked_at_once(explain: Explain, tmp_path: Path) -> None:
    explain(PathNotFound.error_id())
    database = tmp_path / "cache" / "headrace" / "reference" / "headrace.sqlite"
    os.utime(database, (0, 0))
    assert not references.up_to_date(database)
    explain(PathNotFound.error_id())
    assert references.up_to_date(database), "nothing had changed, and the next one has to know"


@pytest.mark.slow
def test_every_reference_is_asked(explain: Explain) -> None:
    assert "Stone.check" in explain(STONE).out
    assert "PathNotFound" in explain("error: 'a/b' does not exist.\nheadrace explain " + PathNotFound.error_id()).out


@pytest.mark.parametrize("arguments", [[""], ["  "]])
def test_an_empty_message(explain: Explain, arguments: list[str]) -> None:
    done = explain(*arguments)
    assert done.code == 2
    assert "MESSAGE is empty" in done.err


def test_a_package_that_is_not_there(explain: Explain) -> None:
    done = explain(STONE, "--package", "no_such_package")
    assert done.code == 2
    assert "no_such_package" in done.err


def test_an_error_on_the_command_line_names_its_id(explain: Explain, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "--offload-group-size", "-1"]) == 2
    assert capsys.readouterr().err.splitlines()[-1].startswith("headrace explain ")


def test_the_packages_of_frames_are_asked_first(explain: Explain) -> None:
    frame = '  File "/x/site-packages/mill/__init__.py", line 5, in check'
    text = f"Traceback (most recent call last):\n{frame}\nValueError: no"
    assert command._packages_of_frames(text) == ["mill"]
