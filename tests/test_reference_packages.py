"""Where the source of a package is found."""

from __future__ import annotations

from pathlib import Path

import pytest

from headrace.errors import PackageNotFound
from headrace.reference import packages


def installed_as_pointer(site: Path, source: Path, name: str) -> None:
    """What an editable install leaves: a list of files with none of the package's own."""
    (source / name).mkdir(parents=True)
    (source / name / "__init__.py").write_text("raise RuntimeError('this is never imported')\n")
    info = site / f"{name}-2.5.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 2.5\n")
    (info / "RECORD").write_text(f"{name}-2.5.dist-info/METADATA,,\n{name}.pth,,\n")


def test_a_package_that_is_installed_as_a_pointer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    installed_as_pointer(tmp_path / "site", tmp_path / "src", "sluicegate")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    monkeypatch.syspath_prepend(str(tmp_path / "src"))
    found = packages.installed("sluicegate")
    assert (found.name, found.version, found.files) == ("sluicegate", "2.5", ("sluicegate/__init__.py",))
    assert found.root == tmp_path / "src"


def test_a_package_that_is_not_installed_has_a_near_name() -> None:
    with pytest.raises(PackageNotFound, match="Did you mean 'pydantic'"):
        packages.installed("pydantik")
