"""`headrace reference export` and `headrace reference serve` as they are typed."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import httpx2
import pytest
import tiny_reference

from headrace.cli.app import main


@pytest.fixture
def mill(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working directory, and a cache that holds one reference."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    work = tmp_path / "work"
    work.mkdir()
    monkeypatch.chdir(work)
    return tiny_reference.built(tmp_path)


Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def headrace(capsys: pytest.CaptureFixture[str]) -> Run:
    def run(*arguments: str) -> tuple[int, str, str]:
        code = main(["reference", *arguments])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


def test_both_at_once(mill: Path, headrace: Run) -> None:
    code, out, _ = headrace("export", "mill", "--html", "site", "--json", "mill.json")
    assert code == 0
    count = len(json.loads(Path("mill.json").read_text())["errors"])
    assert out == f"mill: {count} errors, in site\nmill: {count} errors, in mill.json\n"
    assert Path("site/index.html").is_file()


def test_all_that_were_built(mill: Path, headrace: Run) -> None:
    assert headrace("export", "--json", "all.json")[0] == 0
    assert [package["name"] for package in json.loads(Path("all.json").read_text())["packages"]] == ["mill"]


def test_nothing_to_write(mill: Path, headrace: Run) -> None:
    code, _, err = headrace("export", "mill")
    assert code == 2
    assert "--html DIR" in err


def test_a_folder_of_somebody_else(mill: Path, headrace: Run) -> None:
    Path("thesis.tex").write_text("mine")
    code, _, err = headrace("export", "mill", "--html", ".")
    assert code == 2
    assert "thesis.tex" in err


@pytest.mark.parametrize("command", [("export", "--json", "a.json"), ("serve",)])
def test_nothing_was_built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, headrace: Run, command: list[str]) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    code, _, err = headrace(*command)
    assert code == 2
    assert "headrace reference build" in err


def test_a_package_that_is_not_there(mill: Path, headrace: Run) -> None:
    code, _, err = headrace("export", "no_such_package", "--json", "a.json")
    assert code == 2
    assert "no_such_package" in err
    assert not list(Path.cwd().iterdir())


@pytest.mark.parametrize("missing", ["jinja2", "uvicorn"])
@pytest.mark.parametrize("command", [("serve",), ("export", "--html", "site")])
def test_without_the_extra(
    mill: Path, monkeypatch: pytest.MonkeyPatch, headrace: Run, missing: str, command: tuple[str, ...]
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == missing else find(name))
    code, _, err = headrace(*command)
    if (missing, command[0]) == ("uvicorn", "export"):
        assert code == 0  # it serves nothing
        return
    assert code == 2
    assert "headrace[reference]" in err


@pytest.mark.slow
def test_serving_until_a_signal(mill: Path) -> None:
    command = [sys.executable, "-m", "headrace", "reference", "serve", "--port", "0", "mill"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env={**os.environ}) as process:
        assert process.stderr is not None
        try:
            line = process.stderr.readline()
            url = line.split()[-1]
            with httpx2.Client(timeout=60) as client:
                assert "mill 2.0" in client.get(url).text
        finally:
            process.send_signal(signal.SIGINT)
            with contextlib.suppress(ValueError):
                process.communicate(timeout=60)
        assert process.returncode == 0


@pytest.mark.slow
def test_an_address_that_is_taken(mill: Path, headrace: Run) -> None:
    code, _, err = headrace("serve", "--host", "256.256.256.256", "mill")
    assert code == 2
    assert "cannot listen" in err
