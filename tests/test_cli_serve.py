"""`headrace serve` on the command line: what is wrong is told at once."""

from __future__ import annotations

import pytest

from headrace.cli import app as cli


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--port", "99999"], "--port is 99999"),
        (["--memory", "3"], "has no unit"),
        (["--max-num-seqs", "0"], "--max-num-seqs is 0"),
        (["--kv-offload-gb", "2"], "lies in host memory already"),
        (["--max-num-batched-tokens", "4"], "at least 16"),
        (["--offload-group-size", "4", "--offload-num-in-group", "8"], "offload_num_in_group (8) must be <="),
        (["--api-key", ""], "--api-key is empty"),
    ],
)
def test_a_flag_that_cannot_work_is_one_clear_error(
    flags: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["serve", "models/none", *flags]) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("error: ")
    assert words in captured.err
    assert captured.out == ""


def test_the_key_can_come_from_the_environment(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Where other users of the machine cannot see it."""
    monkeypatch.setenv("HEADRACE_API_KEY", " ")
    assert cli.main(["serve", "models/none"]) == 2
    assert "--api-key is empty" in capsys.readouterr().err
