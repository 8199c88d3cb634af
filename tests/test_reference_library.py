"""References asked from many threads, by anything that somebody types."""

from __future__ import annotations

import concurrent.futures
import os
import threading
from pathlib import Path

import pytest
import tiny_reference
from hypothesis import given
from hypothesis import strategies as st

from headrace.errors import InvalidSetting
from headrace.reference.database import database_path
from headrace.reference.library import LONGEST_PASTE, Library


def test_what_is_in_it(library: Library) -> None:
    (package,) = library.overview()
    assert (package["name"], package["version"]) == ("mill", "2.0")
    assert package["errors"] == sum(each["errors"] for each in package["classes"])
    assert library.names() == ["mill"]


def test_an_error_by_its_id(library: Library) -> None:
    (found,) = library.search("stone_width mult")
    document = library.error(found["id"])
    assert document is not None
    assert document["site"]["line"] == found["line"]
    assert library.error("0" * 16) is None


def test_our_own_errors_are_always_there(library: Library) -> None:
    document = library.error(InvalidSetting.error_id())
    assert document is not None
    assert document["title"] == "InvalidSetting"
    assert document["site"] is None


def test_the_nearest_ids(library: Library) -> None:
    page_id = library.search("stone_width")[0]["id"]
    wrong = page_id[:-1] + ("0" if page_id[-1] != "0" else "1")
    assert library.nearest(wrong)[0]["id"] == page_id
    assert library.nearest("") == []


def test_lists_by_class(library: Library) -> None:
    listing = library.listing("mill", "ValueError", 1)
    assert listing is not None
    assert {each["error_class"] for each in listing["results"]} == {"ValueError"}
    everything = library.listing("mill", None, 1)
    assert everything is not None
    assert len(everything["results"]) == everything["errors"]
    for package, error_class, number in (
        ("mill", "ValueError", 2),
        ("mill", "ValueError", 0),
        ("mill", "None", 1),
        ("../mill", None, 1),
        ("headrace", None, 1),
    ):
        assert library.listing(package, error_class, number) is None


def test_only_the_packages_that_were_named(library: Library) -> None:
    with Library(["headrace", "no-such-package"]) as other:
        assert other.search("stone_width") == []
        assert other.names() == []
        assert not other.explain(tiny_reference.STONE)["found"]


def test_a_long_paste_is_read_from_its_end(library: Library) -> None:
    answer = library.explain("log line\n" * LONGEST_PASTE + f"ValueError: {tiny_reference.STONE}\n")
    assert answer["verdict"] == "exact"


@pytest.mark.slow
@given(st.text(max_size=60))
def test_any_words_can_be_searched(library: Library, words: str) -> None:
    for found in library.search(words):
        assert found["package"] == "mill"


FTS = st.lists(
    st.sampled_from(
        [
            '"',
            "*",
            "(",
            ")",
            ":",
            "^",
            "-",
            "+",
            "{",
            "}",
            "NEAR",
            "AND",
            "OR",
            "NOT",
            "message",
            "stone",
            " ",
            "'",
            ";",
        ]
    ),
    max_size=12,
).map("".join)


@pytest.mark.slow
@given(FTS)
def test_nothing_typed_is_taken_for_query_syntax(library: Library, words: str) -> None:
    library.search(words)
    library.explain(words)
    library.nearest(words)
    library.error(words)
    library.listing(words, words, 1)


def test_every_word_has_to_be_there_whatever_it_means_to_the_database(library: Library) -> None:
    assert library.search("stone_width")
    assert library.search("stone_width OR nothing") == []
    assert library.search("message:stone_width") == []
    assert library.search("stone_wid*") == library.search("stone_wid")


@pytest.mark.slow
def test_many_threads(library: Library) -> None:
    start = threading.Barrier(8)

    def ask(number: int) -> str:
        start.wait()
        for _ in range(20):
            document = library.error(library.search("stone_width multiple")[0]["id"])
            assert document is not None
        return str(document["id"])

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        assert len(set(pool.map(ask, range(8)))) == 1
    assert len(library._idle) <= 8


@pytest.mark.slow
def test_what_is_built_anew_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with Library(["mill"]) as library:
        assert library.search("stone_width") == []
        tiny_reference.built(tmp_path)
        assert library.search("stone_width")
        os.utime(database_path("mill"), (0, 0))
        assert library.search("stone_width")
        assert len(library._idle) == 1
        database_path("mill").write_bytes(b"broken")
        assert library.search("stone_width") == []


def test_after_it_is_closed_nothing_stays_open(library: Library) -> None:
    other = Library(["mill"])
    with other.catalogues() as catalogues:
        assert catalogues
        other.close()
    assert other._idle == []
