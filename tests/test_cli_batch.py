"""`headrace run --batch`: every line is answered once, as if it were alone, whatever happens to the run."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tiny_cli
import tiny_models
from fakes import one_thread

from headrace.cli import app as cli
from headrace.errors import ReadError

pytestmark = pytest.mark.slow

ONE_THREAD = {**os.environ, "OMP_NUM_THREADS": "1"}
PROMPTS = ["the weights", "a", "the weights of the weights of the", "it", "what is the", "x" * 40, "b", "the end"]


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    with one_thread():
        yield


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.shared(tmp_path_factory.mktemp("models"), "llama")


@pytest.fixture(scope="module")
def exact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """In float32 no two logits tie."""
    import torch

    return tiny_models.shared(tmp_path_factory.mktemp("models"), "llama", torch.float32)


class Batch:
    """A file of questions and one of answers in a folder of their own."""

    def __init__(self, folder: Path, model: Path) -> None:
        self.model, self.questions, self.out = model, folder / "questions.jsonl", folder / "answers.jsonl"

    def ask(self, *lines: Any) -> None:
        self.questions.write_text("".join(json.dumps(line) + "\n" for line in lines))

    def command(self, *arguments: object) -> list[str]:
        given = {str(each).partition("=")[0] for each in arguments}
        standard = [] if "--max-tokens" in given else ["--max-tokens", "6"]
        fixed = ["run", str(self.model), "--batch", str(self.questions), "-o", str(self.out), "--temperature", "0"]
        return [*fixed, *standard, *map(str, arguments)]

    def run(self, *arguments: object) -> int:
        return cli.main(self.command(*arguments))

    def start(self, *arguments: object) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "headrace", *self.command(*arguments)]
        return subprocess.Popen(command, env=ONE_THREAD, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    def lines(self) -> list[dict[str, Any]]:
        """Whole ones, as they are in the file."""
        data = self.out.read_bytes() if self.out.exists() else b""
        return [json.loads(line) for line in data[: data.rfind(b"\n") + 1].splitlines()]

    def answers(self) -> list[dict[str, Any]]:
        """In the order of the questions; each is there once."""
        lines = sorted(self.lines(), key=lambda line: line["index"])
        assert [line["index"] for line in lines] == list(range(len(lines)))
        return lines


@pytest.fixture
def batch(tmp_path: Path, tiny: Path) -> Batch:
    return Batch(tmp_path, tiny)


# --- answers --------------------------------------------------------------------------------------------------------


def test_each_line_is_answered_as_if_it_were_alone(tmp_path: Path, exact: Path) -> None:
    import torch
    from transformers import AutoTokenizer

    batch = Batch(tmp_path, exact)
    batch.ask(*({"prompt": prompt, "id": f"q{n}", "max_tokens": 3 + n} for n, prompt in enumerate(PROMPTS)))
    assert batch.run("--raw", "--batch-size", 3) == 0
    model, tokenizer = tiny_models.plain(exact, torch.float32), AutoTokenizer.from_pretrained(exact)
    for number, answer in enumerate(batch.answers()):
        prompt = tokenizer(PROMPTS[number], return_tensors="pt")
        made = model.generate(**prompt, max_new_tokens=3 + number, do_sample=False)[0, prompt.input_ids.shape[1] :]
        assert answer["text"] == tokenizer.decode(made, skip_special_tokens=True)
        assert answer["id"] == f"q{number}"
        assert answer["prompt_tokens"] == prompt.input_ids.shape[1]
        assert answer["completion_tokens"] == len(made)
        assert answer["finish_reason"] == ("stop" if int(made[-1]) == tiny_models.EOS else "length")


def test_messages_and_lines_of_openai_go_through_the_template(batch: Batch) -> None:
    hello = [{"role": "user", "content": "the weights"}]
    body = {"model": "any", "messages": hello, "max_tokens": 4}
    batch.ask(
        {"messages": hello, "max_tokens": 4},
        {"prompt": "the weights", "max_tokens": 4},
        {"custom_id": "x", "method": "POST", "url": "/v1/chat/completions", "body": body},
        {"custom_id": "y", "method": "POST", "url": "/v1/completions", "body": {"prompt": "the weights"}},
    )
    assert batch.run("--batch-size", 1) == 0
    first, second, third, raw = batch.answers()
    assert first["text"] == second["text"] == third["text"]
    assert first["prompt_tokens"] == third["prompt_tokens"] > raw["prompt_tokens"]
    assert (third["id"], raw["id"]) == ("x", "y")


def test_what_is_sampled_is_decided_by_the_seed(batch: Batch, tmp_path: Path) -> None:
    lines = [{"prompt": "a", "temperature": 1.5, "seed": seed} for seed in (1, 1, 2)]
    batch.ask(*lines)
    assert batch.run("--batch-size", 2) == 0
    first, second, third = (answer["text"] for answer in batch.answers())
    assert first == second != third


def test_a_prompt_that_is_too_long_is_an_answer_that_says_so(batch: Batch) -> None:
    batch.ask({"prompt": "a"}, {"prompt": "x" * 300}, {"prompt": "b"})
    assert batch.run("--json") == 0
    first, refused, last = batch.answers()
    assert refused["text"] is refused["finish_reason"] is None
    assert "in a context of 256 there is room for 255" in refused["error"]
    assert first["completion_tokens"] == last["completion_tokens"] == 6


def test_figures_and_plan(batch: Batch, capsys: pytest.CaptureFixture[str]) -> None:
    batch.ask(*({"prompt": prompt} for prompt in PROMPTS))
    assert batch.run("--json") == 0
    captured = capsys.readouterr()
    figures = json.loads(captured.out)["batch"]
    assert figures["lines"] == len(PROMPTS)
    assert figures["completion_tokens"] == sum(answer["completion_tokens"] for answer in batch.answers())
    assert figures["prompt_tokens"] == sum(answer["prompt_tokens"] for answer in batch.answers())
    assert figures["tokens_per_s"] == pytest.approx(figures["completion_tokens"] / figures["seconds"])
    assert figures["sequences"] in (1, 2, 4, 8)
    assert f"{figures['sequences']} sequence" in captured.err
    assert "throughput" in captured.err
    assert "answering" not in captured.err  # no terminal, no bar


def test_memory_stays_within_the_budget(tmp_path: Path) -> None:
    """SmolLM2 in a process of its own, with weights that stream."""
    from headrace import sources

    batch = Batch(tmp_path, sources.resolve(sources.demo_gguf()))
    batch.ask(*({"prompt": prompt} for prompt in PROMPTS))
    reports = []
    for budget in ([], ["--memory"]):
        if budget:  # for half of the weights less than all of it took
            planned = reports[0]["plan"]["memory"]
            budget.append(f"{(planned['total_bytes'] - planned['resident_bytes'] // 2) // 2**20}MiB")
        process = batch.start("--json", "--batch-size", 4, *budget)
        out, err = process.communicate(timeout=600)
        assert process.returncode == 0, err
        reports.append(json.loads(out)["report"])
        texts = [answer["text"] for answer in batch.answers()]
        batch.out.unlink()
    report = reports[1]
    assert report["offloaded_bytes"] > 0
    assert report["counters"]["read_bytes"] > 0
    assert report["peak_memory_bytes"] <= report["requested_bytes"]
    assert len(texts) == len(PROMPTS)


# --- interrupted, killed, broken ------------------------------------------------------------------------------------


def until(lines: int, batch: Batch, process: subprocess.Popen[str]) -> None:
    """Poll: another process writes them."""
    end_s = time.monotonic() + 300
    while len(batch.lines()) < lines and process.poll() is None:
        assert time.monotonic() < end_s, "it answers nothing"


@pytest.mark.parametrize("lines", [0, 1, 5, 11])
def test_killed_at_any_line_the_next_run_does_the_rest(batch: Batch, lines: int) -> None:
    batch.ask(*({"prompt": f"{prompt} {n}"} for n in range(2) for prompt in PROMPTS))
    process = batch.start("--batch-size", 2, "--max-tokens", 40)
    until(lines, batch, process)
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=300)
    before = batch.lines()
    with batch.out.open("ab") as torn:
        torn.write(b'{"index": 3, "te')
    assert batch.run("--batch-size", 2, "--max-tokens", 40) == 0
    assert batch.lines()[: len(before)] == before
    assert len(batch.answers()) == 2 * len(PROMPTS)
    stamp = batch.out.stat().st_mtime_ns
    assert batch.run("--batch-size", 2, "--max-tokens", 40) == 0
    assert batch.out.stat().st_mtime_ns == stamp


def test_ctrl_c_ends_it_and_the_next_run_goes_on(batch: Batch) -> None:
    batch.ask(*({"prompt": f"{prompt} {n}"} for n in range(20) for prompt in PROMPTS))
    process = batch.start("--batch-size", 2, "--max-tokens", 60)
    until(2, batch, process)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=300)
    assert process.returncode == 130, err
    assert "Traceback" not in err
    assert 2 <= len(batch.lines()) < 20 * len(PROMPTS)
    assert batch.run("--batch-size", 16, "--max-tokens", 60) == 0
    assert len(batch.answers()) == 20 * len(PROMPTS)


def test_a_pass_that_fails_costs_its_lines_until_the_next_run(
    batch: Batch, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from transformers import LlamaForCausalLM

    forward, calls = LlamaForCausalLM.forward, iter(range(10**6))

    def broken(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.config.vocab_size == tiny_models.VOCABULARY and next(calls) == 8:
            raise ReadError(file="model.safetensors", offset=0, nbytes=1, reason="Input/output error")
        return forward(self, *args, **kwargs)

    batch.ask(*({"prompt": prompt} for prompt in PROMPTS))
    with monkeypatch.context() as patch:
        patch.setattr(LlamaForCausalLM, "forward", broken)
        assert batch.run("--batch-size", 2) == 1
    assert "Input/output error" in capsys.readouterr().err
    assert 0 < len(batch.lines()) < len(PROMPTS)
    assert batch.run("--batch-size", 2) == 0
    assert len(batch.answers()) == len(PROMPTS)


# --- what is wrong is told before anything is loaded ------------------------------------------------------------------


def refused(batch: Batch, capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    assert batch.run(*arguments) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("error: "), captured.err
    assert captured.out == ""
    return captured.err


def test_a_bad_line_is_told_and_nothing_is_loaded(batch: Batch, capsys: pytest.CaptureFixture[str]) -> None:
    batch.questions.write_text('{"prompt": "a"}\n{"prompt": 3}\n')
    assert "Line 2 of" in refused(batch, capsys)
    assert not batch.out.exists()


def test_answers_to_other_questions_are_left_alone(batch: Batch, capsys: pytest.CaptureFixture[str]) -> None:
    batch.ask({"prompt": "a"})
    assert batch.run() == 0
    before = batch.out.read_bytes()
    capsys.readouterr()
    batch.ask({"prompt": "b"})
    assert "does not answer what is asked now" in refused(batch, capsys)
    batch.ask({"prompt": "a"})
    assert "does not answer what is asked now" in refused(batch, capsys, "--max-tokens", 7)
    assert "does not answer what is asked now" in refused(batch, capsys, "--fast")
    assert batch.out.read_bytes() == before


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["-p", "hi"], "--prompt is given"),
        (["--batch-size", "0"], "--batch-size is 0"),
        (["--speculate", "lookup"], "--speculate is lookup"),
        (["--device", "cuda"], "--device is cuda"),
        (["--trace", "t.json"], "--trace is t.json"),
    ],
)
def test_flags_that_do_not_go_with_it(
    batch: Batch, capsys: pytest.CaptureFixture[str], arguments: list[str], words: str
) -> None:
    batch.ask({"prompt": "a"})
    assert words in refused(batch, capsys, *arguments)


def test_flags_that_go_with_nothing_else(
    batch: Batch, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"hi")))
    for flags in (["-o", "x"], ["--batch-size", "2"]):
        assert cli.main(["run", str(batch.model), *flags]) == 2
        assert "given together with --batch" in capsys.readouterr().err
    batch.ask({"prompt": "a"})
    assert cli.main(["run", str(batch.model), "--batch", str(batch.questions)]) == 2
    assert "--output is not there" in capsys.readouterr().err
    batch.out = batch.questions
    assert "another file than --batch" in refused(batch, capsys)


def test_a_checkpoint_without_a_template_continues_texts(tmp_path: Path) -> None:
    batch = Batch(tmp_path, tiny_cli.write_checkpoint(tmp_path / "m", chat=False))
    batch.ask({"prompt": "abc"})
    assert batch.run() == 0
    assert batch.answers()[0]["prompt_tokens"] == 3
