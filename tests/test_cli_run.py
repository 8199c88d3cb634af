"""`headrace run`: answers, chats, figures, and that each thing that can be wrong is one clear error."""

from __future__ import annotations

import contextlib
import errno
import io
import json
import os
import pty
import re
import select
import shlex
import shutil
import signal
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import tiny_cli
from fakes import one_thread

from headrace import machine
from headrace.cli import app as cli
from headrace.cli import terminal
from headrace.copying.disk import DiskReader

CHAT_LINE = "Enter sends"
ONE_THREAD = {**os.environ, "OMP_NUM_THREADS": "1"}


class Outcome:
    def __init__(self, code: int, out: str, err: str) -> None:
        self.code, self.out, self.err = code, out, err


Run = Callable[..., Outcome]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    def go(model: object, *arguments: object, stdin: bytes = b"") -> Outcome:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin), encoding="utf-8"))
        code = cli.main(["run", str(model), *map(str, arguments)])
        captured = capsys.readouterr()
        return Outcome(code, captured.out, captured.err)

    return go


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    with one_thread():
        yield


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_cli.write_checkpoint(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_cli.write_checkpoint(tmp_path_factory.mktemp("models") / "sharded", shards=True)


def is_one_error(done: Outcome, *words: str, code: int = 2) -> None:
    assert done.err.startswith("error: "), done.err
    assert "Traceback" not in done.err
    assert "not expected" not in done.err
    for word in words:
        assert word in done.err
    assert done.out == ""
    assert done.code == code


# --- what is wrong with the command line is told before anything is loaded ----------------------------------------


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--memory 3", "--memory '3' is not a usable size: it has no unit.\nWrite --memory 3GiB"),
        ("--memory 3G", "'G' is ambiguous, it could be GiB or GB.\nWrite --memory 3GiB"),
        ("--memory -1GiB", "it is negative.\nWrite --memory 1GiB"),
        ("--memory 0", "it is zero.\nWrite --memory 3GiB"),
        ("--memory abc", "it is not a number with a unit.\nWrite --memory 3GiB"),
        ("--memory ''", "it is empty"),
        ("--memroy 3GiB", "No such option: --memroy (Possible options: --host-memory, --memory, --pin-memory)"),
        ("--max-tokens 0", "--max-tokens is 0, but it must be at least 1.\nUse --max-tokens 256."),
        ("--max-tokens -5", "--max-tokens is -5"),
        ("--max-tokens x", "Invalid value for '--max-tokens'"),
        ("--top-p 2", "--top-p is 2.0, but it must be above 0 and at most 1.\nUse --top-p 0.95."),
        ("--top-p nan", "--top-p is nan"),
        ("--temperature -1", "--temperature is -1.0, but it must be 0 to 10.\nUse --temperature 0.7."),
        ("--temperature 0 --top-p 0.9", "--temperature is 0 beside --top-p 0.9, but it must be above 0"),
        ("--seed x", "Invalid value for '--seed'"),
        ("--seed -1", "--seed is -1, but it must be 0 to 2**63 - 1.\nUse --seed 0."),
        ("--context 0", "--context is 0"),
        ("--trace no/such/directory/t.json", "No such file or directory), but it must be a file that can be written"),
        ("--trace .", "--trace is '.' (Is a directory)"),
        ("--offload-num-in-group 8 --offload-group-size 4", "offload_num_in_group (8) must be <="),
        ("--prompt ''", "--prompt is empty, but it must be some text.\nUse --prompt 'Hello'."),
        ("--fast --device cuda", "--fast is given, but it must be left out with --device"),
        ("stray", "Got unexpected extra argument"),
    ],
)
def test_a_wrong_flag(run: Run, flags: str, words: str) -> None:
    is_one_error(run("no-model", "-p", "hi", *shlex.split(flags)), words)


def test_fast_rows_are_told_by_the_plan(run: Run, tiny: Path) -> None:
    done = run(tiny, "-p", "hi", "--max-tokens", "3", "--fast", "--memory", "2GiB")
    assert done.code == 0
    assert "last bits of the logits can differ" in " ".join(done.err.split())
    assert "last bits" not in run(tiny, "-p", "hi", "--max-tokens", "3", "--memory", "2GiB").err


@pytest.mark.parametrize(("others", "told"), [(0.4, True), (0.1, False)])
def test_a_busy_processor_is_told(
    run: Run, tiny: Path, monkeypatch: pytest.MonkeyPatch, others: float, told: bool
) -> None:
    monkeypatch.setattr("headrace.machine.others_share", lambda before, after: others)
    monkeypatch.setattr("os.cpu_count", machine.cores)
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    done = run(tiny, "-p", "hi", "--max-tokens", "2", "--memory", "2GiB")
    assert ("Other processes had 40% of the processor" in done.err) == told
    monkeypatch.setenv("OMP_WAIT_POLICY", "passive")
    assert "OMP_WAIT_POLICY" not in run(tiny, "-p", "hi", "--max-tokens", "2", "--memory", "2GiB").err


def test_checking_the_trace_leaves_nothing_behind(run: Run, tmp_path: Path) -> None:
    is_one_error(run("no-model", "-p", "hi", "--trace", tmp_path / "trace.json"), "does not exist")
    assert list(tmp_path.iterdir()) == []


def test_a_prompt_that_is_no_text(run: Run) -> None:
    is_one_error(run("no-model", stdin=b"caf\xe9"), "standard input is not UTF-8 (byte 0xe9 at position 3)")
    is_one_error(run("no-model", "-p", "caf\udce9"), "--prompt is not UTF-8 (byte 0xe9 at position 3)")


def test_an_empty_standard_input(run: Run) -> None:
    is_one_error(run("no-model", stdin=b" \n"), "standard input is empty, but it must be some text", "-p 'Hello'")


# --- what is wrong with the model ---------------------------------------------------------------------------------


def test_a_path_with_a_typo(run: Run, tmp_path: Path) -> None:
    (tmp_path / "smollm").mkdir()
    is_one_error(run(tmp_path / "smolm", "-p", "hi"), "does not exist", f"{str(tmp_path / 'smollm')!r}")


def test_a_hub_id_offline(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    is_one_error(run("org/name", "-p", "hi"), "Either give a directory", "`hf download org/name`")


def test_a_directory_without_weights(run: Run, tmp_path: Path) -> None:
    is_one_error(run(tmp_path, "-p", "hi"), "holds no weights", "it has: nothing")
    (tmp_path / "config.json").write_text("{}")
    is_one_error(run(tmp_path, "-p", "hi"), "holds no weights", "it has: config.json")


def test_pickled_weights(run: Run, tmp_path: Path) -> None:
    file = tmp_path / "pytorch_model.bin"
    file.write_bytes(b"")
    for model in (tmp_path, file):
        is_one_error(run(model, "-p", "hi"), "holds pickled weights", f"from_pretrained({str(tmp_path)!r})")


def edit_header(directory: Path, change: Callable[[dict[str, Any]], None]) -> None:
    file = directory / "model.safetensors"
    data = file.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    change(header)
    text = json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(text)) + text + data[8 + length :])


def lie(header: dict[str, Any]) -> None:
    header["model.norm.weight"]["data_offsets"] = [0, 99]


def overlap(header: dict[str, Any]) -> None:
    header["model.norm.weight"]["data_offsets"] = header["model.layers.0.input_layernorm.weight"]["data_offsets"]


def unknown_dtype(header: dict[str, Any]) -> None:
    header["model.norm.weight"]["dtype"] = "F7"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lie, "cannot be trusted: tensor 'model.norm.weight' is BF16 (128,), 256 bytes, but its data_offsets span 99"),
        (overlap, "tensor 'model.norm.weight' overlaps tensor 'model.layers.0.input_layernorm.weight' by 256 bytes"),
        (unknown_dtype, "has the dtype 'F7', which is not known here.\nKnown dtypes are BF16, "),
    ],
)
def test_a_header_that_lies(run: Run, tiny: Path, tmp_path: Path, change: Any, words: str) -> None:
    model = shutil.copytree(tiny, tmp_path / "m")
    edit_header(model, change)
    is_one_error(run(model, "-p", "hi"), words, "model.safetensors")


@pytest.mark.slow
def test_a_shard_that_is_missing_or_cut_off(run: Run, sharded: Path, tmp_path: Path) -> None:
    model = shutil.copytree(sharded, tmp_path / "m")
    shard = model / "model-00002-of-00003.safetensors"
    size = shard.stat().st_size
    os.truncate(shard, size - 100)
    is_one_error(run(model, "-p", "hi"), "is cut off", f"describes {size} bytes and the file has {size - 100}")
    shard.unlink()
    is_one_error(run(model, "-p", "hi"), "'model-00002-of-00003.safetensors', and that file is not there")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"model_type": "lama"}, "does not know its model_type 'lama'.\nUpgrade with"),
        ({"model_type": "clip"}, "'clip' is not a causal language model"),
        ({"model_type": "own", "auto_map": {"AutoModelForCausalLM": "m.M"}}, "(m.M).\nRead that code; if you trust"),
        ({"num_hidden_layers": 5}, "9 weights of the model are not in the checkpoint"),
        ({"hidden_size": 256}, "shapes differ"),
        ({"model_type": None}, "it has no model_type"),
    ],
)
def test_a_config_that_cannot_be_run(run: Run, tiny: Path, tmp_path: Path, config: Any, words: str) -> None:
    model = shutil.copytree(tiny, tmp_path / "m")
    tiny_cli.edit_config(model, **config)
    is_one_error(run(model, "-p", "hi"), words)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("config.json", "{", "config.json: it is not JSON (line 1"),
        ("tokenizer.json", '{"version":', "its tokenizer cannot be loaded (Expecting value"),
        ("tokenizer.json", "{}", "its tokenizer cannot be loaded (KeyError: 'added_tokens')"),
        ("chat_template.jinja", "{% for", "The chat template of"),
        ("chat_template.jinja", "{{ raise_exception('only poems') }}", "cannot be used: only poems.\nPass --raw"),
        ("generation_config.json", "{", "its generation_config.json cannot be read"),
    ],
)
def test_a_file_that_cannot_be_used(run: Run, tiny: Path, tmp_path: Path, name: str, text: str, words: str) -> None:
    model = shutil.copytree(tiny, tmp_path / "m")
    (model / name).write_text(text)
    is_one_error(run(model, "-p", "hi"), words)


@pytest.mark.slow
def test_no_tokenizer(run: Run, tiny: Path, tmp_path: Path) -> None:
    model = shutil.copytree(tiny, tmp_path / "m", ignore=shutil.ignore_patterns("*token*"))
    is_one_error(run(model, "-p", "hi"), "it has no tokenizer files", "tokenizer.json and tokenizer_config.json")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--max-tokens 510", "at most 488: a prompt of 24 tokens leaves no more of a context of 512 tokens"),
        ("--context 513", "--context is 513, but it must be at most 512 for this model.\nUse --context 512."),
        ("--context 24", "The prompt has 24 tokens; in a context of 24 there is room for 23 beside the answer"),
        ("--offload-group-size 100", "the model has 4 layers.\nUse --offload-group-size 4 "),
        ("--offload-group-size 2 --offload-params nope", "--offload-params nope would offload nothing"),
        ("--cpu-offload-gb 1 --cpu-offload-params nope", "--cpu-offload-params nope would offload nothing"),
        ("--offload-backend uva", "Use --offload-backend uva --cpu-offload-gb 4."),
    ],
)
def test_what_this_model_cannot_do(run: Run, tiny: Path, flags: str, words: str) -> None:
    is_one_error(run(tiny, "-p", "hi", "-q", *shlex.split(flags)), words)


@pytest.mark.slow
def test_more_than_this_machine_has(run: Run, tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "available_bytes", lambda: 64 * 2**20)
    is_one_error(run(tiny, "-p", "hi"), "The least that runs this is", "can have only 64.0 MiB here")
    is_one_error(run(tiny, "-p", "hi", "--memory", "1MiB"), "can have only 64.0 MiB here")


@pytest.mark.slow
def test_a_budget_beyond_what_is_free(run: Run, tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "resident_bytes", lambda: 100 * 2**20)
    least = re.search(r"--memory (\d+)MiB", run(tiny, "-p", "hi", "--memory", "1MiB").err)
    assert least is not None
    free_bytes = int(int(least[1]) * 2**20 / 0.9) + 2**20
    monkeypatch.setattr(machine, "available_bytes", lambda: free_bytes)
    # The cache for more tokens is what does not fit; a smaller budget leaves more of the weights on disk.
    monkeypatch.setattr(
        "headrace.planner.costs.kv_bytes", lambda shape, demand: 0 if demand.memory_bytes < 2**40 else 2**38
    )
    done = run(tiny, "-p", "hi", "--memory", "2TiB")
    is_one_error(done, "can have only", "or leave it out: weights that do not fit then stay on disk")
    named = re.search(r"Use --memory (\S+),", done.err)
    assert named is not None
    assert run(tiny, "-p", "hi", "--max-tokens", "2", "-q", "--memory", named[1]).code == 0


@pytest.mark.slow
def test_a_read_error_ends_the_answer(run: Run, tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fail_reads_at_token(monkeypatch, 3)
    done = run(tiny, "-p", "hi", "-q", "--max-tokens", "50", "--offload-group-size", "1")
    assert done.code == 1
    assert re.match(r"error: Reading \d+ bytes at offset \d+ of '.*model.safetensors' failed: Input/output", done.err)
    assert "Traceback" not in done.err


def after_each_token(monkeypatch: pytest.MonkeyPatch, do: Callable[[int], None]) -> None:
    """Call `do` with the number of tokens so far, over all answers. (Text comes later, when a word is whole.)"""
    from headrace import generate

    count, put = 0, generate._Pieces.put

    def note(self: Any, value: Any) -> None:
        nonlocal count
        is_prompt = self.next_tokens_are_prompt
        put(self, value)
        if not is_prompt:
            count += 1
            do(count)

    monkeypatch.setattr(generate._Pieces, "put", note)


def fail_reads_at_token(monkeypatch: pytest.MonkeyPatch, number: int) -> list[bool]:
    """Reads fail from then on, until the list is cleared."""
    failing: list[bool] = []
    pread = DiskReader._pread

    def fail(self: DiskReader, *arguments: Any) -> int:
        if failing:
            raise OSError(errno.EIO, "Input/output error")
        return pread(self, *arguments)

    after_each_token(monkeypatch, lambda count: failing.append(True) if count == number else None)
    monkeypatch.setattr(DiskReader, "_pread", fail)
    return failing


# --- answers ------------------------------------------------------------------------------------------------------


def strict(text: str) -> Any:
    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    return json.loads(text, parse_constant=refuse)


@pytest.mark.slow
def test_the_answer_alone_is_on_stdout(run: Run, tiny: Path) -> None:
    done = run(tiny, "-p", "hi", "--max-tokens", "6")
    again = run(tiny, "--max-tokens", "6", "-q", stdin=b"hi\n")
    assert done.code == again.code == 0
    assert done.out == again.out
    assert done.out.endswith("\n")
    assert again.err == ""
    assert done.err.startswith("plan\nbackend ")
    assert "\x1b" not in done.err
    assert not re.search(r" +$", done.err, re.MULTILINE)
    for row in ("weights", "speed", "first token", "peak memory"):
        assert re.search(rf"^{row} ", done.err, re.MULTILINE)


@pytest.mark.slow
def test_a_seed_gives_the_same_answer_again(run: Run, tiny: Path) -> None:
    def answer(*flags: str) -> str:
        return run(tiny, "-p", "hi", "-q", "--max-tokens", "12", *flags).out

    assert answer("--temperature", "2", "--seed", "7") == answer("--temperature", "2", "--seed", "7")
    assert answer("--temperature", "2", "--seed", "7") != answer("--temperature", "2", "--seed", "8")
    assert answer("--top-p", "0.5", "--seed", "7") == answer("--top-p", "0.5", "--seed", "7")
    assert answer("--temperature", "0") == answer("--temperature", "0", "--offload-group-size", "1")
    assert answer("--temperature", "0", "--raw") != answer("--temperature", "0")


@pytest.mark.slow
def test_without_max_tokens_the_answer_takes_what_the_context_leaves(run: Run, tiny: Path) -> None:
    done = run(tiny, "-p", "x" * 480, "-q", "--json")
    document = strict(done.out.splitlines()[-1])
    assert document["answers"][0]["prompt_tokens"] + len(document["answers"][0]["token_ids"]) == tiny_cli.CONTEXT


@pytest.mark.slow
def test_the_last_line_is_every_figure(run: Run, tiny: Path, tmp_path: Path) -> None:
    trace = tmp_path / "trace.json"
    alone = ["--speculate", "off"]  # a draft would share a pass among tokens
    done = run(tiny, "-p", "hi", "--max-tokens", "5", "--json", "--trace", trace, "--offload-group-size", "1", *alone)
    *text, last = done.out.splitlines()
    document = strict(last)
    (answer,) = document["answers"]
    report = document["report"]
    assert answer["text"] == "\n".join(text)
    assert len(answer["token_ids"]) == 5
    assert len(answer["decode_seconds"]) == 4
    assert document["tokens_per_s"] == pytest.approx(answer["tokens_per_s"])
    assert document["share_of_bound"] == pytest.approx(answer["tokens_per_s"] * report["bound"]["seconds"])
    assert report["backend"] == "prefetch"
    assert 0 < report["ring_bytes"] < report["offloaded_bytes"]
    assert report["counters"]["passes"] == 5
    assert report["counters"]["read_bytes"] > 0
    assert report["peak_memory_bytes"] > 0
    events = strict(trace.read_text())["traceEvents"]
    assert {event["cat"] for event in events if event["ph"] == "X"} >= {"read", "run", "pass"}
    assert all(event["dur"] >= 0 and event["ts"] >= 0 for event in events if event["ph"] == "X")
    assert len([event for event in events if event.get("cat") == "run"]) == 5 * tiny_cli.LAYERS
    assert f"trace: {trace}" in done.err


@pytest.mark.slow
def test_one_token_has_no_speed(run: Run, tiny: Path) -> None:
    document = strict(run(tiny, "-p", "hi", "--max-tokens", "1", "--json", "-q").out.splitlines()[-1])
    assert document["tokens_per_s"] is None
    assert document["share_of_bound"] is None


@pytest.mark.slow
def test_a_trace_that_cannot_be_written_does_not_take_the_answer(run: Run, tiny: Path) -> None:
    done = run(tiny, "-p", "hi", "--max-tokens", "2", "-q", "--json", "--trace", "/dev/full")
    assert done.code == 1
    assert strict(done.out.splitlines()[-1])["answers"]
    assert done.err.startswith("error: Writing the trace to '/dev/full' failed: No space left on device.")


@pytest.mark.slow
def test_an_answer_without_a_chat_template_says_so(run: Run, tiny: Path, tmp_path: Path) -> None:
    model = shutil.copytree(tiny, tmp_path / "m", ignore=shutil.ignore_patterns("chat_template*"))
    done = run(model, "-p", "hi", "--max-tokens", "3")
    assert "no chat template" in done.err
    assert done.out == run(tiny, "-p", "hi", "--raw", "-q", "--max-tokens", "3").out
    assert "no chat template" not in run(model, "-p", "hi", "--raw", "--max-tokens", "3").err


@pytest.mark.slow
@pytest.mark.parametrize("size", ["3GB", "3GiB", "3 gib", "1.5GiB"])
def test_sizes(run: Run, tiny: Path, size: str) -> None:
    assert run(tiny, "-p", "hi", "--max-tokens", "2", "-q", "--memory", size).code == 0


@pytest.mark.slow
def test_the_smallest_budget_that_is_named_works_in_the_next_process(tiny: Path) -> None:
    def headrace(size: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "headrace", "run", str(tiny), "-p", "hi", "--max-tokens", "2", "--json"]
        return subprocess.run([*command, "--memory", size], capture_output=True, text=True, env=ONE_THREAD, check=False)

    refused = headrace("100MiB")
    assert refused.returncode == 2
    assert refused.stdout == ""
    named = re.search(r"Use --memory (\S+) or more", refused.stderr)
    assert named is not None
    done = headrace(named[1])
    assert done.returncode == 0, done.stderr
    report = strict(done.stdout.splitlines()[-1])["report"]
    assert report["peak_memory_bytes"] <= report["requested_bytes"]


# --- Ctrl-C and the chat ------------------------------------------------------------------------------------------


class Typed(io.StringIO):
    """A terminal: questions, and what interrupts."""

    def isatty(self) -> bool:
        return True


@pytest.fixture
def chat(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tiny: Path) -> Callable[..., Outcome]:
    def go(*typed: str | BaseException, flags: str = "", model: Path = tiny) -> Outcome:
        lines: Iterator[str | BaseException] = iter([*typed, EOFError()])

        def ask(prompt: str) -> str:
            line = next(lines)
            if isinstance(line, BaseException):
                raise line
            return line

        monkeypatch.setattr(sys, "stdin", Typed())
        monkeypatch.setattr(terminal, "ask", ask)
        code = cli.main(["run", str(model), "--max-tokens", "20", "--json", *shlex.split(flags)])
        captured = capsys.readouterr()
        return Outcome(code, captured.out, captured.err)

    return go


def answers(done: Outcome) -> Any:
    return strict(done.out.splitlines()[-1])["answers"]


def interrupt_at(monkeypatch: pytest.MonkeyPatch, *tokens: int) -> None:
    """Ctrl-C when the tokens with these numbers have come."""

    def press(count: int) -> None:
        for _ in range(tokens.count(count)):
            signal.raise_signal(signal.SIGINT)

    after_each_token(monkeypatch, press)


@pytest.mark.slow
def test_a_chat_has_a_history(chat: Callable[..., Outcome]) -> None:
    done = chat("hello", "", "again", "and again")
    assert done.code == 0
    assert CHAT_LINE in done.err
    lengths = [answer["prompt_tokens"] for answer in answers(done)]
    assert lengths[0] == len(b"<|user|>hello\n<|assistant|>")
    assert lengths[1] >= lengths[0] + len("<|user|>again\n<|assistant|>")
    assert lengths[2] > lengths[1]


@pytest.mark.slow
def test_a_raw_chat_says_that_it_has_none(chat: Callable[..., Outcome]) -> None:
    done = chat("hello", "again", flags="--raw")
    assert "without history" in done.err
    assert [answer["prompt_tokens"] for answer in answers(done)] == [5, 5]


@pytest.mark.slow
def test_the_oldest_questions_are_forgotten_and_one_that_is_too_long_refused(chat: Callable[..., Outcome]) -> None:
    done = chat("a" * 30, "b" * 30, "c" * 200, "d" * 30, flags="--context 120")
    assert "(forgot the oldest question: the context of 120 tokens is full)" in done.err
    assert "error: The prompt has" in done.err
    assert done.code == 0
    assert len(answers(done)) == 3
    assert all(answer["prompt_tokens"] + 20 <= 120 for answer in answers(done))


@pytest.mark.slow
def test_ctrl_c_ends_the_answer_and_not_the_chat(chat: Callable[..., Outcome], monkeypatch: pytest.MonkeyPatch) -> None:
    interrupt_at(monkeypatch, 3)
    done = chat("hello", "again", KeyboardInterrupt())
    assert done.code == 0
    assert [answer["stopped"] for answer in answers(done)] == [True, False]
    assert [len(answer["token_ids"]) for answer in answers(done)] == [4, 20]  # the one it was at is finished
    assert "Ctrl-D ends the chat" in done.err


@pytest.mark.slow
def test_a_second_ctrl_c_ends_the_answer_at_once(chat: Callable[..., Outcome], monkeypatch: pytest.MonkeyPatch) -> None:
    interrupt_at(monkeypatch, 3, 3)
    done = chat("hello", "again", flags="--offload-group-size 1 --temperature 0")
    assert done.code == 0
    (answer,) = answers(done)
    assert answer["prompt_tokens"] == len(b"<|user|>again\n<|assistant|>")  # nothing of the first question is left


@pytest.mark.slow
def test_an_error_in_an_answer_does_not_end_the_chat(
    chat: Callable[..., Outcome], monkeypatch: pytest.MonkeyPatch
) -> None:
    failing = fail_reads_at_token(monkeypatch, 3)
    complain = terminal.complain

    def mend(message: str) -> None:
        failing.clear()
        complain(message)

    monkeypatch.setattr(terminal, "complain", mend)
    done = chat("hello", "again", flags="--offload-group-size 1")
    assert "failed: Input/output error" in done.err
    assert done.code == 0
    assert len(answers(done)) == 1


@pytest.mark.slow
def test_ctrl_c_in_a_single_answer(run: Run, tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    interrupt_at(monkeypatch, 3, 5, 5)
    done = run(tiny, "-p", "hi", "--json")
    assert done.code == 130
    assert strict(done.out.splitlines()[-1])["answers"][0]["stopped"] is True
    done = run(tiny, "-p", "hi", "-q")
    assert (done.code, done.out) == (130, "")
    assert "Traceback" not in done.err
    assert "error" not in done.err


@pytest.fixture(autouse=True)
def _ctrl_c_interrupts() -> Iterator[None]:
    """A job in the background starts with Ctrl-C ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_ctrl_c_while_loading(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    from headrace.cli import run as command

    def swallow() -> None:
        # As an import of transformers does it, if it is interrupted.
        try:
            signal.raise_signal(signal.SIGINT)
        except KeyboardInterrupt:
            raise ModuleNotFoundError("Could not import module 'LlamaConfig'") from None

    monkeypatch.setattr(command, "require_engine", swallow)
    done = run("no-model", "-p", "hi")
    assert (done.code, done.out, done.err) == (130, "", "")


# --- a real terminal ----------------------------------------------------------------------------------------------

IN_A_TERMINAL = """
import fcntl, signal, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background starts with Ctrl-C ignored
from headrace.cli.app import main
sys.exit(main(sys.argv[1:]))
"""


class Terminal:
    """A program in a pseudo terminal of its own."""

    def __init__(self, *arguments: str) -> None:
        self.fd, theirs = pty.openpty()
        command = [sys.executable, "-c", IN_A_TERMINAL, *arguments]
        environment = {**ONE_THREAD, "COLUMNS": "80", "TERM": "xterm"}
        self.process = subprocess.Popen(
            command, stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True, env=environment
        )
        os.close(theirs)
        self.seen = ""

    def expect(self, pattern: str, seconds: float = 60) -> None:
        while not (match := re.search(pattern, self.seen)):
            ready, _, _ = select.select([self.fd], [], [], seconds)
            assert ready, f"{pattern!r} did not come: {self.seen!r}"
            try:
                data = os.read(self.fd, 65536)
            except OSError:  # the other side has closed
                data = b""
            assert data, f"{pattern!r} did not come before the end: {self.seen!r}"
            self.seen += data.decode(errors="replace")
        self.seen = self.seen[match.end() :]

    def send(self, text: str) -> None:
        os.write(self.fd, text.encode())

    def interrupt(self, pattern: str) -> None:
        """Ctrl-C until it is answered: readline overlooks one that comes just between a key and its waiting."""
        for _ in range(20):
            self.send("\x03")
            with contextlib.suppress(AssertionError):
                return self.expect(pattern, seconds=3)
        raise AssertionError(pattern)


@pytest.mark.slow
def test_a_chat_in_a_terminal(tiny: Path) -> None:
    terminal = Terminal("run", str(tiny), "--max-tokens", "10", "--json", "--temperature", "0")
    try:
        terminal.expect("plan")
        terminal.expect("Ctrl-D ends the chat")
        terminal.expect("> ")
        terminal.send("hello\n")
        terminal.expect(r"tokens/s")
        terminal.expect("> ")
        terminal.send("half a line")
        terminal.expect("half a line")
        terminal.interrupt("Ctrl-D ends the chat")
        terminal.expect("> ")
        terminal.send("again\n")
        terminal.expect(r"tokens/s")
        terminal.expect("> ")
        terminal.send("\x04")
        terminal.expect("report")
        terminal.expect("peak memory")
        terminal.expect(r'"answers"')
        terminal.expect(r"\n")
        assert terminal.process.wait(60) == 0
    finally:
        terminal.process.kill()
        terminal.process.wait()
        os.close(terminal.fd)


@pytest.mark.slow
def test_a_reader_that_has_left(tiny: Path) -> None:
    command = [sys.executable, "-m", "headrace", "run", str(tiny), "-p", "hi", "-q", "--max-tokens", "2"]
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, env=ONE_THREAD, check=False)
    os.close(writer)
    assert (done.returncode, done.stderr) == (1, b"")
