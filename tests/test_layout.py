"""The layers hold on the real package, and each contract breaks when somebody steps over it."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import headrace

ROOT = Path(__file__).parents[1]
PYPROJECT = ROOT / "pyproject.toml"
PACKAGE = Path(headrace.__file__).parent
CONTRACTS = tomllib.loads(PYPROJECT.read_text(encoding="utf-8"))["tool"]["importlinter"]["contracts"]


def lint_imports(source: Path) -> subprocess.CompletedProcess[str]:
    """Import-linter on the package below `source`, in a process of its own: this one has imported the real package."""
    return subprocess.run(
        [
            sys.executable,
            "-c",
            "from importlinter.cli import lint_imports_command; lint_imports_command()",
            "--no-cache",
            "--no-logo",
            str(PYPROJECT),
        ],
        cwd=source,
        env={**os.environ, "PYTHONPATH": str(source), "COLUMNS": "500"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A directory with a copy of the real package."""
    shutil.copytree(PACKAGE, tmp_path / "headrace", ignore=shutil.ignore_patterns("__pycache__"))
    return tmp_path


def plant(source: Path, module: str, code: str) -> None:
    """Add a line to a module or a package, which is made if it does not exist yet."""
    path = source / "headrace" / module
    path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    with path.open("a", encoding="utf-8") as file:
        file.write(f"\n{code}\n")


def test_the_real_package_keeps_every_contract() -> None:
    result = lint_imports(PACKAGE.parent)
    assert result.returncode == 0, result.stdout + result.stderr
    assert f"Contracts: {len(CONTRACTS)} kept, 0 broken." in result.stdout


# The contract, the module to change and the line that it must not have.
VIOLATIONS = [
    ("layers", "errors", "import headrace.core"),
    ("layers", "core", "from headrace import planner"),
    ("layers", "store", "from headrace import schedule"),
    ("layers", "model", "from headrace import backends"),
    ("layers", "generate", "from headrace import model"),
    ("layers", "backends", "from headrace import engine"),
    ("layers", "engine", "def late():\n    from headrace import cli"),
    ("light", "planner", "import torch"),
    ("light", "schedule", "from torch import nn"),
    ("light", "store", "import torch.utils"),
    ("light", "config", "from transformers import AutoConfig"),
    ("light", "units", "def late():\n    import torch"),
    ("moving-knows-no-models", "backends", "import transformers"),
    ("moving-knows-no-models", "copying", "import transformers.utils"),
    ("models-know-no-moving", "model", "from headrace import copying"),
    ("models-know-no-moving", "generate", "from headrace import copying"),
    ("only-sources-import", "backends", "from headrace import importing"),
]


@pytest.mark.slow
def test_each_step_over_a_layer_is_reported(source: Path) -> None:
    """All at once, since each run costs a second: every contract breaks, and the report names every culprit."""
    # Modules that are still to come stand empty, so that the rule for them is tested before they are.
    for _, module, code in VIOLATIONS:
        plant(source, module, code)
        if (imported := imported_module(code)).startswith("headrace."):
            plant(source, imported.removeprefix("headrace."), "")
    result = lint_imports(source)
    assert result.returncode == 1, result.stdout + result.stderr
    assert f"Contracts: 0 kept, {len(CONTRACTS)} broken." in result.stdout
    assert {contract for contract, *_ in VIOLATIONS} == {contract["id"] for contract in CONTRACTS}
    for _, module, code in VIOLATIONS:
        importer, imported = f"headrace.{module}", imported_module(code)
        assert f"{importer} is not allowed to import {imported}:" in result.stdout, (importer, imported)


def imported_module(code: str) -> str:
    """The module that a line imports, as the report names it."""
    line = code.splitlines()[-1].strip()
    if match := re.fullmatch(r"from headrace import (\w+)", line):
        return f"headrace.{match[1]}"
    name = line.split()[1]
    return name if name.startswith("headrace.") else name.partition(".")[0]


@pytest.mark.slow
def test_a_step_around_a_layer_is_reported(source: Path) -> None:
    """Through the package itself, which is no layer: what it imports, it imports for everybody who imports it."""
    plant(source, "engine", "")
    plant(source, "__init__", "from headrace import engine")
    plant(source, "core", "from headrace import __version__")
    result = lint_imports(source)
    assert result.returncode == 1, result.stdout + result.stderr
    assert "headrace.core is not allowed to import headrace.engine:" in result.stdout


@pytest.mark.slow
def test_a_module_without_a_layer_is_reported(source: Path) -> None:
    plant(source, "helpers", "")
    result = lint_imports(source)
    assert result.returncode == 1, result.stdout + result.stderr
    assert "The following modules are not listed as layers:" in result.stdout
    assert "- headrace.helpers" in result.stdout


def test_the_drawing_for_people_is_the_contract() -> None:
    """CONTRIBUTING.md shows the layers in the order of pyproject.toml."""
    (layers,) = (contract["layers"] for contract in CONTRACTS if contract["id"] == "layers")
    drawn = re.search(r"```text\n(__main__ .*?)```", (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8"), re.DOTALL)
    assert drawn, "CONTRIBUTING.md has no drawing of the layers"
    rows = [re.split(r"\s{2,}", row)[0].split(" | ") for row in drawn[1].splitlines()]
    assert rows == [re.findall(r"\w+", layer) for layer in layers]
