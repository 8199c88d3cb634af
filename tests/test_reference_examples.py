"""Every error has an example, before raises this very class with its own words, and after raises nothing."""

from __future__ import annotations

import os
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from headrace.errors import HeadraceError, concrete_errors
from headrace.reference.examples import EXEMPT, Example, examples

EXAMPLES = examples()
OWN = {cls.__name__: cls for cls in concrete_errors() if cls.__module__ == "headrace.errors"}


def test_every_error_has_an_example_or_a_reason_for_none() -> None:
    assert EXAMPLES.keys() | EXEMPT.keys() == OWN.keys()
    assert not EXAMPLES.keys() & EXEMPT.keys(), "an exemption that is no longer needed"
    assert all(reason.strip() for reason in EXEMPT.values())


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    import tiny_models

    return tiny_models.shared(tmp_path_factory.mktemp("examples"), "llama")


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty directory; what an example changes in the environment is undone."""
    monkeypatch.chdir(tmp_path)
    environment = dict(os.environ)
    os.environ |= {"XDG_CACHE_HOME": str(tmp_path / "cache"), "HF_HUB_OFFLINE": "1"}
    yield tmp_path
    os.environ.clear()
    os.environ.update(environment)


def run(steps: str, names: dict[str, Any]) -> None:
    """Commands are run as the command line runs them, up to where it would print an error."""
    lines = steps.strip().splitlines()
    if not all(line.startswith("headrace ") for line in lines):
        exec(compile(steps, "an example", "exec"), names)
        return
    from headrace.cli.app import app

    for line in lines:
        code = typer.main.get_command(app).main(shlex.split(line)[1:], prog_name="headrace", standalone_mode=False)
        assert code in (0, None), line


def check(example: Example, part: str) -> None:
    names: dict[str, Any] = {}
    run(example.given, names)
    if part == "after":
        run(example.after, names)
        return
    with pytest.raises(HeadraceError) as caught:
        run(example.before, names)
    assert type(caught.value) is OWN[example.error]


either = pytest.mark.parametrize("part", ["before", "after"])


@either
@pytest.mark.parametrize("name", [name for name, example in EXAMPLES.items() if not example.checkpoint])
def test_a_light_example(name: str, part: str, place: Path) -> None:
    check(EXAMPLES[name], part)


@pytest.mark.slow
@either
@pytest.mark.parametrize("name", [name for name, example in EXAMPLES.items() if example.checkpoint])
def test_an_example_with_a_checkpoint(name: str, part: str, place: Path, tiny: Path) -> None:
    shutil.copytree(tiny, place / "models" / "tiny")
    check(EXAMPLES[name], part)
