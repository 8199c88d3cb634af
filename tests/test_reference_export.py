"""Pages as files: whole, linked, ours alone, and the same as those that are served."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
import tiny_reference

from headrace.errors import InvalidSetting, OutputFailed
from headrace.reference import export, html
from headrace.reference.database import Catalogue
from headrace.reference.library import Library


@pytest.fixture(scope="module")
def database(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("mill")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
        yield tiny_reference.built(folder)


@pytest.fixture(scope="module")
def site(database: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("site")
    with Catalogue.open(database) as catalogue:
        assert export.export_html([database], target) == len(catalogue) > 5
    return target


class _Links(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.links: list[str] = []
        self.ids: set[str] = set()

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        given = dict(attributes)
        self.links += [given[name] or "" for name in ("href", "src", "action") if name in given]
        if refresh := given.get("content"):
            self.links += re.findall(r"url=(\S+)", refresh)
        self.ids.add(given.get("id") or "")


def links_of(file: Path) -> _Links:
    parser = _Links()
    parser.feed(file.read_text(encoding="utf-8"))
    return parser


def test_every_link_leads_to_a_file(site: Path) -> None:
    followed = 0
    for file in site.rglob("*.html"):
        for link in links_of(file).links:
            parts = urlsplit(link)
            if parts.scheme:
                assert parts.scheme == "data" or link.startswith("https://github.com/water/mill/blob/v2.0/")
                continue
            target = file.parent / unquote(parts.path) if parts.path else file
            assert target.is_file(), (file, link)
            if parts.fragment and parts.fragment != "main":
                assert parts.fragment in links_of(target).ids
            followed += 1
    assert followed > 100


def test_every_error_has_its_files(site: Path, database: Path) -> None:
    with Catalogue.open(database) as catalogue:
        pages = list(catalogue.pages())
    index = (site / "search-index.js").read_text(encoding="utf-8")
    entries = json.loads(re.sub(r",\s*\];\s*$", "]", index.partition("=")[2]))
    assert [entry[0] for entry in entries] == [page.id for page in pages]
    for page in pages:
        assert json.loads((site / "errors" / f"{page.id}.json").read_text())["id"] == page.id
        assert page.id in (site / "errors" / f"{page.id}.html").read_text()


def main_part(text: str) -> str:
    return re.sub(r'(?:href|action)="[^"]*"', "", text.partition("<main")[2])


def test_the_pages_are_those_that_are_served(site: Path, database: Path) -> None:
    with Library(["mill"]) as library, Catalogue.open(database) as catalogue:
        for page in catalogue.pages():
            document = library.error(page.id)
            assert document is not None
            served = html.error_page(document, html.Served())
            assert main_part(served) == main_part((site / "errors" / f"{page.id}.html").read_text(encoding="utf-8"))
            assert json.loads((site / "errors" / f"{page.id}.json").read_text()) == json.loads(json.dumps(document))
        served = html.index_page(library.overview(), html.Served())
        assert main_part(served) == main_part((site / "index.html").read_text(encoding="utf-8"))


def test_old_ids_lead_on_or_answer_themselves(site: Path, database: Path) -> None:
    with Catalogue.open(database) as catalogue:
        gone = catalogue.gone()
        assert gone
        for old in gone:
            text = (site / "errors" / f"{old}.html").read_text(encoding="utf-8")
            page = catalogue.page(old)
            assert page is not None
            assert (f"{page.id}.html" in text) if page.id != old else ("has this error no more" in text)


def test_what_a_message_says_stays_text(site: Path) -> None:
    pages = [file.read_text(encoding="utf-8") for file in site.rglob("*.html")]
    assert any("&lt;script&gt;alert(&#39;wheel&#39;)" in page for page in pages)
    for page in pages:
        assert "<script>alert" not in page
        assert "<b>bold" not in page


def test_the_stylesheet_and_the_script_ask_nobody(site: Path) -> None:
    for name in html.ASSETS:
        assert "//" not in (site / name).read_text(encoding="utf-8").replace("// ", "")


# --- whose folder it is -----------------------------------------------------------------------------------------------


def names(folder: Path) -> set[str]:
    return {file.relative_to(folder).as_posix() for file in folder.rglob("*") if file.is_file()}


def test_a_second_export_replaces_the_first_and_nothing_else(database: Path, tmp_path: Path) -> None:
    target = tmp_path / "site"
    export.export_html([database], target)
    first = names(target)
    (target / "CNAME").write_text("mill.example")
    (target / "errors" / "notes.txt").write_text("mine")
    stale = target / "errors" / "0000000000000000.html"
    stale.write_text("of an older version")
    manifest = target / export.MANIFEST
    manifest.write_text(manifest.read_text() + "errors/0000000000000000.html\n../outside.txt\n")
    outside = tmp_path / "outside.txt"
    outside.write_text("mine")
    export.export_html([database], target)
    assert names(target) == first | {"CNAME", "errors/notes.txt"}
    assert outside.exists()


@pytest.mark.parametrize("name", ["thesis.tex", "index.html", "errors/mine.html"])
def test_a_folder_of_somebody_else_is_left_alone(database: Path, tmp_path: Path, name: str) -> None:
    file = tmp_path / name
    file.parent.mkdir(exist_ok=True)
    file.write_text("mine")
    with pytest.raises(InvalidSetting, match="no export wrote"):
        export.export_html([database], tmp_path)
    assert names(tmp_path) == {name}
    assert file.read_text() == "mine"


def test_a_file_where_a_page_has_to_go_is_left_alone(database: Path, tmp_path: Path) -> None:
    export.export_html([database], tmp_path)
    manifest = tmp_path / export.MANIFEST
    manifest.write_text(manifest.read_text().replace("index.html\n", ""))
    (tmp_path / "index.html").write_text("mine")
    with pytest.raises(InvalidSetting, match=r"index\.html"):
        export.export_html([database], tmp_path)
    assert (tmp_path / "index.html").read_text() == "mine"


def test_a_link_out_of_the_folder_is_not_followed(database: Path, tmp_path: Path) -> None:
    target, elsewhere = tmp_path / "site", tmp_path / "elsewhere"
    elsewhere.mkdir()
    export.export_html([database], target)
    for file in (target / "errors").iterdir():
        file.unlink()
    (target / "errors").rmdir()
    (target / "errors").symlink_to(elsewhere)
    with pytest.raises(InvalidSetting, match="is a link"):
        export.export_html([database], target)
    assert not list(elsewhere.iterdir())


def test_a_file_is_no_folder(database: Path, tmp_path: Path) -> None:
    (tmp_path / "site").write_text("mine")
    with pytest.raises(InvalidSetting, match="a file"):
        export.export_html([database], tmp_path / "site")


def interrupted(*anything: object) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize("step", ["_write_lists", "_write_pages", "_publish"])
def test_an_interrupt_leaves_what_was_there(
    database: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    export.export_html([database], tmp_path)
    before = {name: (tmp_path / name).stat().st_mtime_ns for name in names(tmp_path)}
    monkeypatch.setattr(export, step, lambda *given, **named: interrupted())
    with pytest.raises(KeyboardInterrupt):
        export.export_html([database], tmp_path)
    assert {name: (tmp_path / name).stat().st_mtime_ns for name in names(tmp_path)} == before
    with pytest.raises(KeyboardInterrupt):
        export.export_html([database], tmp_path / "new")
    assert names(tmp_path / "new") == set()


def test_an_export_that_was_killed_is_made_again(database: Path, tmp_path: Path) -> None:
    (tmp_path / f"{export._STAGE}x").mkdir()
    assert export.export_html([database], tmp_path) > 5


@pytest.mark.slow
def test_many_pages_are_written_by_processes(
    database: Path, site: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(export, "_WORTH_PROCESSES", 1)
    monkeypatch.setattr(export, "_PAGES_PER_TASK", 2)
    export.export_html([database], tmp_path)
    assert names(tmp_path) == names(site)
    assert (tmp_path / "search-index.js").read_bytes() == (site / "search-index.js").read_bytes()


# --- one document -----------------------------------------------------------------------------------------------------


def test_one_json_document(database: Path, tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    target = tmp_path / "errors.json"
    count = export.export_json([database], target, lambda label, done, total: seen.append((done, total)))
    made = json.loads(target.read_text())
    assert [package["name"] for package in made["packages"]] == ["mill"]
    with Catalogue.open(database) as catalogue:
        assert [error["id"] for error in made["errors"]] == [page.id for page in catalogue.pages()]
    assert seen[-1] == (count, count)
    mask = os.umask(0o022)
    os.umask(mask)
    assert target.stat().st_mode & 0o777 == 0o666 & ~mask
    assert names(tmp_path) == {"errors.json"}


def test_an_interrupt_leaves_no_half_document(database: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "errors.json"
    target.write_text("the old one")
    monkeypatch.setattr(export, "_documents", lambda *given: interrupted())
    with pytest.raises(KeyboardInterrupt):
        export.export_json([database], target)
    assert names(tmp_path) == {"errors.json"}
    assert target.read_text() == "the old one"


def test_a_place_that_cannot_be_written(database: Path, tmp_path: Path) -> None:
    with pytest.raises(OutputFailed, match="No such file"):
        export.export_json([database], tmp_path / "nowhere" / "errors.json")
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputFailed, match="Not a directory"):
        export.export_html([database], tmp_path / "file" / "site")


@pytest.mark.parametrize("error_class", ["ValueError", "a/../b", "Unusual[0]", "(A, B)", "../../etc", "ä" * 300, ""])
def test_lists_stay_in_their_folder(error_class: str) -> None:
    path = export.listing_file("mill", error_class, 2)
    assert re.fullmatch(r"lists/mill/[A-Za-z0-9_.-]{1,90}-2\.html", path)
    assert ".." not in Path(path).parts
