"""The examples of README.md, as they stand there, against a server with the address and the name that they use.

litellm's is run where that is installed: it is not among the test packages, since it brings some sixty of its own.
"""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import tiny_models
import torch
from live_server import DEADLINE_S, Live, serving

README = (Path(__file__).parent.parent / "README.md").read_text(encoding="utf-8")
SECTION = README.partition("## Serve it\n")[2].partition("\n## ")[0]
ADDRESS = "http://127.0.0.1:8000"


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    directory = tiny_models.shared(tmp_path_factory.mktemp("models"), "llama", torch.float32)
    with serving(directory, max_model_len=200, served_model_name="my-model") as live:
        yield live


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", SECTION, re.DOTALL)


def run(live: Live, *command: str) -> str:
    """With the port that was free in place of the usual one."""
    here = [word.replace(ADDRESS, live.url) for word in command]
    done = subprocess.run(here, capture_output=True, text=True, timeout=DEADLINE_S)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_curl_example(live: Live) -> None:
    (command,) = [block for block in blocks("sh") if block.startswith("curl")]
    assert shutil.which("curl"), "install curl"
    assert '"finish_reason"' in run(live, "bash", "-c", command.replace("curl ", "curl -sf ", 1))


@pytest.mark.slow
def test_the_openai_example(live: Live) -> None:
    (program,) = [block for block in blocks("python") if "openai" in block and "litellm" not in block]
    assert run(live, sys.executable, "-c", program).strip()


def test_the_litellm_example_is_a_program() -> None:
    (program,) = [block for block in blocks("python") if "litellm" in block]
    compile(program, "README.md", "exec")


if importlib.util.find_spec("litellm") is not None:

    def test_the_litellm_example(live: Live) -> None:
        (program,) = [block for block in blocks("python") if "litellm" in block]
        assert run(live, sys.executable, "-c", program).strip()


def test_the_flags_exist() -> None:
    from headrace.cli.app import app

    (command,) = [block for block in blocks("sh") if "headrace serve" in block]
    import typer.main

    known = {flag for param in typer.main.get_command(app).commands["serve"].params for flag in param.opts}
    assert set(re.findall(r"--[a-z-]+", command.partition("headrace serve")[2])) <= known
