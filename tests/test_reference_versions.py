"""Several versions of a package: what came, went and was reworded; old ids answer; an interruption changes nothing."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from headrace.cli.app import main
from headrace.errors import VersionUnavailable
from headrace.reference import downloads, packages, pieces
from headrace.reference.build import build, build_versions
from headrace.reference.database import Catalogue, database_path
from headrace.reference.packages import PackageSource
from headrace.reference.records import Page

KEPT = '    if grain < 0:\n        raise ValueError(f"grain is negative: {grain}")\n'
STONE_0 = '    if stone > 8:\n        raise ValueError(f"stone {stone} is too heavy for this wheel")\n'
STONE_1 = '    if stone > 8:\n        raise ValueError(f"stone {stone} is much too heavy for this old wheel")\n'
STONE_2 = (
    '    if stone > 8:\n        raise ValueError(f"the stone ({stone}) is much too heavy for this old wheel, of 8")\n'
)
GONE = '    if grain == 7:\n        raise KeyError("seven grains are not ground here")\n'
NEW = '    if grain > 99:\n        raise OverflowError("the channel of the mill is full")\n'
TEXTS = {"1.9": KEPT + STONE_0 + GONE, "1.10": KEPT + STONE_1, "2.0": KEPT + STONE_2 + NEW}


def wheel(folder: Path, version: str, body: str | None = None) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"mill-{version}-py3-none-any.whl"
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("mill/__init__.py", f"def grind(grain, stone):\n{body or TEXTS[version]}")
        archive.writestr(
            f"mill-{version}.dist-info/METADATA", f"Metadata-Version: 2.1\nName: mill\nVersion: {version}\n"
        )
        archive.writestr(f"mill-{version}.dist-info/WHEEL", "Wheel-Version: 1.0\n")
    return file


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def wheels(tmp_path: Path, cache: Path) -> dict[str, Path]:
    return {version: wheel(tmp_path / "wheels", version) for version in TEXTS}


def sources(wheels: dict[str, Path], *versions: str) -> list[PackageSource]:
    return [packages.wheel(wheels[version]) for version in versions]


def page_with(catalogue: Catalogue, words: str) -> Page:
    (found,) = (row.page for row in catalogue.rows() if pieces.canonical(row.page.template).startswith(words))
    return found


def test_what_came_went_and_was_reworded(wheels: dict[str, Path]) -> None:
    with Catalogue.open(build_versions(sources(wheels, "1.9", "1.10", "2.0"))) as catalogue:
        assert [version for version, _ in catalogue.versions_read()] == ["1.9", "1.10", "2.0"]
        kept, gone, new = (
            page_with(catalogue, words) for words in ("grain is negative", "seven grains", "the channel")
        )
        first, second, third = (
            page_with(catalogue, words) for words in ("stone {} is too", "stone {} is much", "the stone")
        )
        histories = {page.id: catalogue.versions(page.id) for page in (kept, gone, new, first, second, third)}
        told = {key: (each.introduced, each.removed, each.successor) for key, each in histories.items() if each}
        assert told == {
            kept.id: (None, None, None),
            gone.id: (None, "1.10", None),
            new.id: ("2.0", None, None),
            first.id: (None, "1.10", second.id),
            second.id: ("1.10", "2.0", third.id),
            third.id: ("2.0", None, None),
        }
        for old in (first, second, third):
            answer = catalogue.page(old.id)
            assert answer is not None
            assert answer.id == third.id
        assert [page.id for page in catalogue.earlier(third.id)] == [second.id]


def test_versions_that_are_known_are_not_read_again(wheels: dict[str, Path]) -> None:
    path = build_versions(sources(wheels, "1.9", "1.10"))
    read: list[str] = []
    build_versions(sources(wheels, "1.9", "1.10", "2.0"), on_progress=lambda label, done, total: read.append(label))
    assert read == ["reading files of mill 2.0"]
    before = path.read_bytes()
    build_versions(sources(wheels, "1.9", "1.10", "2.0"), on_progress=lambda label, done, total: read.append(label))
    assert read == ["reading files of mill 2.0"]
    assert path.read_bytes() == before


def test_a_version_that_is_another_by_now_is_read_again(wheels: dict[str, Path], tmp_path: Path) -> None:
    build_versions(sources(wheels, "1.9", "1.10"))
    wheel(tmp_path / "wheels", "1.9", body=KEPT)
    with Catalogue.open(build_versions(sources(wheels, "1.9", "1.10"))) as catalogue:
        assert all("seven grains" not in str(row.page.template) for row in catalogue.rows())


def test_an_interruption_leaves_what_was_there(wheels: dict[str, Path]) -> None:
    path = build(packages.wheel(wheels["1.9"]))
    before = path.read_bytes()

    def interrupt(label: str, done: int, total: int) -> None:
        if label.endswith("2.0"):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        build_versions(sources(wheels, "1.10", "2.0"), on_progress=interrupt)
    assert path.read_bytes() == before
    assert list(path.parent.iterdir()) == [path]


# --- the commands -----------------------------------------------------------------------------------------------------


def built(wheels: dict[str, Path], *versions: str) -> None:
    flags = [part for version in versions for part in ("--wheel", str(wheels[version]))]
    assert main(["reference", "build", "mill", *flags]) == 0


def test_a_build_tells_what_changed(wheels: dict[str, Path], capsys: pytest.CaptureFixture[str]) -> None:
    built(wheels, "2.0", "1.9", "1.10")
    assert capsys.readouterr().out.splitlines()[:2] == [
        "mill 1.10: 0 messages introduced, 1 removed, 1 reworded",
        "mill 2.0: 1 messages introduced, 0 removed, 1 reworded",
    ]


@pytest.fixture
def explained(wheels: dict[str, Path], capsys: pytest.CaptureFixture[str]) -> Iterator[tuple[Catalogue, object]]:
    built(wheels, "1.9", "1.10", "2.0")
    capsys.readouterr()
    with Catalogue.open(database_path("mill")) as catalogue:
        yield catalogue, capsys


def explain(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["explain", "--package", "mill", *arguments]) == 0
    return " ".join(capsys.readouterr().out.split())


def test_an_old_id_answers_with_what_it_became(
    explained: tuple[Catalogue, object], capsys: pytest.CaptureFixture[str]
) -> None:
    catalogue, _ = explained
    first, second, third = (
        page_with(catalogue, words) for words in ("stone {} is too", "stone {} is much", "the stone")
    )
    said = explain(capsys, first.id)
    assert f"ValueError of mill 2.0 {third.id}" in said
    assert f"{first.id} was this error's id: it was reworded" in said
    assert "it reads like this since 2.0" in said
    assert f"much too heavy for this old wheel ({second.id})" in said
    assert f"too heavy for this wheel ({first.id})" in said
    assert third.id in explain(capsys, third.id)


def test_an_id_that_nothing_came_after(explained: tuple[Catalogue, object], capsys: pytest.CaptureFixture[str]) -> None:
    said = explain(capsys, page_with(explained[0], "seven grains").id)
    assert "removed in 1.10" in said
    assert said.startswith("KeyError of mill 1.9 ")
    where = said.partition("where")[2]
    assert ", in 1.9" in where.splitlines()[0]
    assert "> " not in where  # lines of a version that has other ones


def test_a_message_of_an_old_version(explained: tuple[Catalogue, object], capsys: pytest.CaptureFixture[str]) -> None:
    said = explain(capsys, "ValueError: stone 12 is much too heavy for this old wheel")
    assert "removed in 2.0" in said
    assert "it reads now: the stone ({stone}) is much too heavy for this old wheel, of 8" in said
    document = json.loads(explain(capsys, "stone 12 is much too heavy for this old wheel", "--json"))
    assert document["site"]["permalink"] is None
    assert document["history"]["removed"] == "2.0"


# --- fetching ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def index(wheels: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """pip finds the wheels on disk, and asks no other place."""
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheels["1.9"].parent))


@pytest.mark.slow
@pytest.mark.usefixtures("index")
def test_versions_are_fetched_once(cache: Path, wheels: dict[str, Path], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["reference", "build", "mill", "--versions", "1.9, 2.0"]) == 0
    assert capsys.readouterr().out.startswith("mill 2.0: 1 messages introduced, 1 removed, 1 reworded\n")
    kept = {version: downloads.wheel("mill", version) for version in ("1.9", "2.0")}
    assert {file.parent for file in kept.values()} == {cache / "headrace" / "wheels"}
    wheels["1.9"].unlink()
    assert downloads.wheel("Mill", "1.9") == kept["1.9"]


@pytest.mark.slow
@pytest.mark.usefixtures("index")
def test_a_version_that_does_not_exist(cache: Path) -> None:
    with pytest.raises(VersionUnavailable, match=r"No matching distribution found for mill==3\.0"):
        downloads.wheel("mill", "3.0")
    assert not list((cache / "headrace" / "wheels").iterdir())


@pytest.mark.usefixtures("cache")
@pytest.mark.parametrize("version", ["", "../1.0", "1.0 --index-url=x", "1.0;os_name"])
def test_what_is_no_version_is_not_given_to_pip(version: str) -> None:
    with pytest.raises(VersionUnavailable, match="that is no version"):
        downloads.wheel("mill", version)


def test_no_version_at_all(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["reference", "build", "mill", "--versions", " , "]) == 2
    assert "error: --versions" in capsys.readouterr().err
