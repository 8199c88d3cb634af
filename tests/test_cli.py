"""The command line: what it prints, how it fails, and that what it suggests is read back."""

import json
import os
import shlex
import subprocess
import sys
import warnings

import pytest

from headrace.cli import app as cli
from headrace.cli.options import OffloadFlags, spread_lists
from headrace.config import OffloadConfig, OffloadConfigWarning
from headrace.errors import ReadError

pytestmark = pytest.mark.filterwarnings("error")


class Outcome:
    def __init__(self, code: int, out: str, err: str) -> None:
        self.code, self.out, self.err = code, out, err


@pytest.fixture
def headrace(capsys: pytest.CaptureFixture[str]):
    def run(line: str) -> Outcome:
        code = cli.main(shlex.split(line))
        captured = capsys.readouterr()
        return Outcome(code, captured.out, captured.err)

    return run


def test_version(headrace) -> None:
    done = headrace("--version")
    assert (done.code, done.out) == (0, "headrace 0.1.0\n")


def test_without_a_command_the_help_is_shown(headrace) -> None:
    assert headrace("").code == 0
    assert headrace("").out == headrace("--help").out
    assert "check" in headrace("--help").out


def test_check_help_names_the_seven_flags(headrace) -> None:
    text = headrace("check --help").out
    for field in OffloadConfig().values():
        assert f"--{field.replace('_', '-')}" in text


def test_check_of_nothing(headrace) -> None:
    done = headrace("check")
    assert done.code == 0
    assert "nothing is offloaded, unless --memory asks" in done.out
    assert done.err == ""


def test_check_of_a_contradiction(headrace) -> None:
    done = headrace("check --offload-num-in-group 8 --offload-group-size 4")
    assert done.code == 2
    assert done.out == ""
    assert done.err.startswith("error: offload_num_in_group (8) must be <= offload_group_size (4)")
    works = [line for line in done.err.splitlines() if line.startswith("--")]
    assert len(works) == 2
    for line in works:
        assert headrace(f"check {line}").code == 0


def test_check_of_prefetch(headrace) -> None:
    done = headrace("check --offload-group-size 8 --offload-num-in-group 2 --offload-params mlp")
    assert done.code == 0
    assert "prefetch, because --offload-group-size is above 0" in done.out
    assert "layer i is offloaded if i % 8 >= 6; of 32 layers these 8: 6, 7, 14, 15, 22, 23, 30, 31" in done.out
    assert "only names with mlp" in done.out
    assert "--offload-prefetch-step 2 avoids that" in done.out


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("--offload-group-size 1", "every layer is offloaded"),
        ("--offload-group-size 100", "a model needs at least 100 layers"),
        ("--offload-group-size 2", "these 16: 1, 3, 5, 7, ..., 31"),
        ("--cpu-offload-gb 4", "at most 4.00 GiB of weights"),
        ("--offload-backend uva --cpu-offload-gb 4", "uva, as --offload-backend says"),
        ("--cpu-offload-gb 4 --cpu-offload-params experts", "only names with experts"),
    ],
)
def test_check_says_what_will_be_used(headrace, line: str, words: str) -> None:
    done = headrace(f"check {line}")
    assert done.code == 0
    assert words in done.out


def test_warnings_go_to_stderr(headrace) -> None:
    done = headrace("check --cpu-offload-gb 4 --offload-group-size 8")
    assert done.code == 0
    assert done.err.startswith("warning: Both UVA and prefetch offload fields are set")
    assert "prefetch" in done.out


def test_check_as_json(headrace) -> None:
    document = json.loads(headrace("check --cpu-offload-gb 4 --offload-group-size 8 --json").out)
    assert document["ok"] is True
    assert document["backend"] == "prefetch"
    assert len(document["warnings"]) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", OffloadConfigWarning)
        config = OffloadConfig.model_validate(document["config"])
    assert config.compute_hash() == document["hash"]
    assert config.to_flags() == document["flags"]


def test_a_refusal_as_json(headrace) -> None:
    done = headrace("check --offload-num-in-group 8 --offload-group-size 4 --json")
    document = json.loads(done.out)
    assert done.code == 2
    assert document["ok"] is False
    assert document["error"] == "InvalidOffloadConfig"
    assert "--offload-group-size 8 --offload-num-in-group 8" in document["facts"]["remedies"]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("check --cpu-offload-gb -1", "--cpu-offload-gb is -1.0, but it must be"),
        ("check --cpu-offload-gb nan", "--cpu-offload-gb is nan"),
        ("check --offload-group-size -4", "--offload-group-size is -4"),
        ("check --offload-backend vua", "Use --offload-backend uva."),
        ("check --offload-params ''", "--offload-params is ['']"),
        ("check --cpu-offload-params experts", "would offload nothing"),
        ("check --offload-groupsize 4", "--offload-group-size"),
        ("check --offload-group-size four", "Invalid value for '--offload-group-size'"),
        ("check --offload-group-size 1.5", "Invalid value for '--offload-group-size'"),
        ("check --offload-params", "requires an argument"),
        ("check --offload-group-size 4 stray", "stray"),
        ("chekc", "Did you mean 'check'?"),
    ],
)
def test_bad_input_is_one_error_without_a_traceback(headrace, line: str, words: str) -> None:
    done = headrace(line)
    assert done.code == 2
    assert done.err.startswith("error: ")
    assert words in done.err
    assert "Traceback" not in done.err


@pytest.mark.parametrize("line", ["--debug check --cpu-offload-gb -1", "check --cpu-offload-gb -1 --debug"])
def test_debug_shows_the_traceback_wherever_it_stands(headrace, line: str) -> None:
    done = headrace(line)
    assert done.code == 2
    assert "Traceback" in done.err
    assert done.err.splitlines()[-3].startswith("error: --cpu-offload-gb is -1.0")


@pytest.mark.parametrize(
    ("line", "selectors"),
    [
        ("--offload-params a b c", ["a", "b", "c"]),
        ("--offload-params a,b --offload-params c", ["a", "b", "c"]),
        ("--offload-params=a b --offload-group-size 4", ["a", "b"]),
        ("--offload-params w13_weight w2_weight", ["w13_weight", "w2_weight"]),
    ],
)
def test_lists_are_read_with_spaces_commas_or_repeated(headrace, line: str, selectors: list[str]) -> None:
    done = headrace(f"check --offload-group-size 4 {line} --json")
    assert json.loads(done.out)["config"]["prefetch"]["offload_params"] == selectors


def test_a_list_flag_leaves_a_path_to_the_command() -> None:
    def is_path(token: str) -> bool:
        return "/" in token

    lists = {"--list"}
    assert spread_lists(["--list", "a", "b", "m/x", "c"], lists, is_path) == ["--list", "a", "--list", "b", "m/x", "c"]
    assert spread_lists(["--list", "m/x", "a"], lists, is_path) == ["--list", "m/x", "--list", "a"]
    assert spread_lists(["x", "--list", "a", "--", "b"], lists, is_path) == ["x", "--list", "a", "--", "b"]
    assert spread_lists(["--list", "a", "--other", "b", "c"], lists, is_path) == ["--list", "a", "--other", "b", "c"]


@pytest.mark.parametrize(
    "line",
    [
        "",
        "--offload-backend uva --cpu-offload-gb 4 --cpu-offload-params experts.w2_weight w13_weight",
        "--offload-group-size 8 --offload-num-in-group 2 --offload-prefetch-step 3 --offload-params mlp",
        "--cpu-offload-gb 0.30000000000000004",
        "--cpu-offload-gb 1e-09",
    ],
)
def test_flags_round_trip(headrace, line: str) -> None:
    document = json.loads(headrace(f"check {line} --json").out)
    assert shlex.join(document["flags"]) == line
    assert OffloadConfig.model_validate(document["config"]).to_flags() == shlex.split(line)


def failing_check(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    def fail(self: OffloadFlags) -> OffloadConfig:
        raise error

    monkeypatch.setattr(OffloadFlags, "config", fail)


def test_an_unexpected_failure_is_one_line_and_the_way_to_more(headrace, monkeypatch: pytest.MonkeyPatch) -> None:
    failing_check(monkeypatch, ZeroDivisionError("division by zero"))
    done = headrace("check")
    assert done.code == 1
    assert done.err == "error: ZeroDivisionError: division by zero\nThis was not expected; run again with --debug.\n"
    assert "Traceback" in headrace("check --debug").err


def test_an_interrupt_is_quiet(headrace, monkeypatch: pytest.MonkeyPatch) -> None:
    failing_check(monkeypatch, KeyboardInterrupt())
    done = headrace("check")
    assert (done.code, done.out, done.err) == (130, "", "")


def test_the_error_decides_the_exit_code(headrace, monkeypatch: pytest.MonkeyPatch) -> None:
    failing_check(monkeypatch, ReadError(**ReadError.example))
    done = headrace("check")
    assert done.code == ReadError.exit_code == 1
    assert done.err.startswith("error: Reading 8192 bytes")


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_closed_pipe_is_quiet(unbuffered: str) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(
        [sys.executable, "-m", "headrace", "check"],
        stdout=writer,
        stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONUNBUFFERED": unbuffered},
        check=False,
    )
    os.close(writer)
    assert done.returncode == 1
    assert done.stderr == b""


def test_as_a_module() -> None:
    done = subprocess.run([sys.executable, "-m", "headrace", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout == "headrace 0.1.0\n"
