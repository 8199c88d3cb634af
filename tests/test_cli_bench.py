"""`headrace bench`: wrong options are told before anything is measured; a table, a document, a chart."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from test_bench_rounds import TINY
from test_bench_summary import document

from headrace.bench import cases, rounds
from headrace.cli.app import main


def show(tmp_path: Path, *documents: dict[str, Any]) -> list[str]:
    options = []
    for number, each in enumerate(documents):
        file = tmp_path / f"{number}.json"
        file.write_text(json.dumps({"left_out": {"vllm": "not installed"}, "weight_bytes": 5 * 2**30} | each))
        options += ["--show", str(file)]
    return options


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--bits", "5"], "--bits is 5, but it must be 16, 8 or 4"),
        (["--rounds", "0"], "Use --rounds 3"),
        (["--tokens", "0"], "Use --tokens 6"),
        (["--timeout", "-1"], "--timeout"),
        (["--memory", "3"], "3GiB"),
        (["--peer-python", "vllm"], "--peer-python"),
        (["--peer-python", "vllm=no/python"], "vllm=/opt/vllm/bin/python"),
        (["--peers", "lama.cpp"], "Use --peers llama.cpp"),
        (["--gguf", "no/file.gguf"], "--gguf"),
        (["lama-3b"], "Use MODEL llama-3b"),
        (["--show", "no.json"], "--show"),
    ],
)
def test_wrong_options_are_told_first(capsys: pytest.CaptureFixture[str], options: list[str], words: str) -> None:
    assert main(["bench", *options]) == 2
    assert words in capsys.readouterr().err


def test_what_was_measured_is_shown_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", *show(tmp_path, document()), "--plot", str(tmp_path / "chart.png")]) == 0
    shown = capsys.readouterr().out
    assert "a cap of 3.00 GiB" in shown
    assert "1.25 s" in shown
    assert "2.27x" in shown
    assert "killed" in shown
    assert "not installed" in shown
    assert (tmp_path / "chart.png").read_bytes()[:4] == b"\x89PNG"


def test_what_was_measured_under_another_cap_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", *show(tmp_path, document(), document(memory_bytes=2**31))]) != 0
    assert "different memory caps" in capsys.readouterr().err


def test_a_file_that_is_no_benchmark_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "x.json").write_text("[]")
    assert main(["bench", "--show", str(tmp_path / "x.json")]) == 2
    assert "no document of a benchmark" in capsys.readouterr().err


@pytest.mark.slow
def test_a_benchmark_from_nothing_to_its_document(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(cases.CASES, "tiny", TINY)
    monkeypatch.setattr(rounds, "drop_page_cache", lambda: False)
    output = tmp_path / "bench.json"
    options = ["tiny", "--memory", "none", "--peers", "mapped", "--rounds", "1", "--tokens", "2", "--json"]
    assert main(["bench", *options, "--directory", str(tmp_path / "files"), "-o", str(output)]) == 0
    printed = json.loads(capsys.readouterr().out.splitlines()[-1])
    kept = json.loads(output.read_text())
    assert printed["runs"] == kept["runs"]
    assert [line["name"] for line in printed["summary"]["lines"]] == ["headrace", "mapped"]
    assert kept["runs"]["headrace"][0]["tokens"] == kept["runs"]["mapped"][0]["tokens"]
    assert main(["bench", "--show", str(output)]) == 0
