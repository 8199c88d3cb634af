"""Documents as pages: every section, everything escaped."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
import tiny_reference
from hypothesis import given
from hypothesis import strategies as st

from headrace.errors import InvalidOffloadConfig
from headrace.reference import html
from headrace.reference.library import Library
from headrace.reference.records import Basis

LINKS = html.Served()
SECTIONS = [
    "Error message",
    "What it means",
    "Source",
    "Solutions",
    "Check before calling",
    "When it happens",
    "Related errors",
]


def document(library: Library, words: str) -> dict[str, Any]:
    found = library.error(library.search(words)[0]["id"])
    assert found is not None
    return found


def headings(page: str) -> list[str]:
    return [re.sub(r"\s*<.*", "", text) for text in re.findall(r"<h2[^>]*>(.*?)</h2>", page, re.DOTALL)]


def test_sections_in_their_order(library: Library) -> None:
    page = html.error_page(document(library, "is no wheel"), LINKS)
    assert [each for each in headings(page) if each in SECTIONS] == SECTIONS
    assert page.count("<h1>") == page.count("<main") == 1
    labels = re.findall(r'aria-labelledby="([^"]+)"', page)
    assert all(f'id="{label}"' in page for label in labels)


def test_our_own_page_has_steps_and_the_message_as_it_is_printed(library: Library) -> None:
    own = library.error(InvalidOffloadConfig.error_id())
    assert own is not None
    page = html.error_page(own, LINKS)
    assert "<h1>InvalidOffloadConfig</h1>" in page
    assert "Example fix" in headings(page)
    assert "headrace reference build headrace" in page


def test_what_other_rooms_add_is_shown(library: Library) -> None:
    error = document(library, "is no wheel")
    error["verified"] = {"before": "Wheel(0)  # <raises>", "after": "Wheel(1)"}
    error["when"]["situations"] = [
        {"text": "It is seen <often>.", "basis": "model", "about": None, "file": None, "lines": None}
    ]
    page = html.error_page(error, LINKS)
    assert "Verified by running it" in headings(page)
    assert "Wheel(0)  # &lt;raises&gt;" in page
    assert 'It is seen &lt;often&gt;. <span class="basis model">model</span>' in page


def test_every_basis_is_explained() -> None:
    assert set(html.BASES) == set(Basis.__args__)
    page = html.index_page([], LINKS)
    for name in html.BASES:
        assert f'<span class="basis {name}">' in page


def test_a_pasted_message_is_answered_with_its_values(library: Library) -> None:
    paste = f"ValueError: {tiny_reference.STONE}"
    page = html.answer_page(library.explain(paste), LINKS, paste)
    assert "Your message: exactly this message" in page
    assert "<code>64 % 3 != 0</code> consistent with the message" in page
    assert f">{paste}</textarea>" in page
    other = html.answer_page(library.explain("KeyError: '<b>x</b>'"), LINKS, "KeyError: '<b>x</b>'")
    assert "<h1>Not explained</h1>" in other
    assert "<b>" not in other


def test_a_message_that_differs_is_compared_word_by_word(library: Library) -> None:
    paste = "ValueError: the stone_width (64) must be a multiple of its <b>spacing</b> (3)"
    answer = library.explain(paste)
    assert answer["found"]
    page = html.answer_page(answer, LINKS, paste)
    assert "<del " in page
    assert "<ins " in page
    assert "<b>" not in page


TEXT = st.text("ab`<>&\"'{}-. \n", max_size=30)


def planted(plain: Any, text: str) -> Any:
    """The document with every text replaced, keeping the bases, which choose a class of the stylesheet."""
    if isinstance(plain, dict):
        return {
            key: each if key in ("basis", "strategy", "kind", "id") else planted(each, text)
            for key, each in plain.items()
        }
    if isinstance(plain, list):
        return [planted(each, text) for each in plain]
    return text if isinstance(plain, str) else plain


@pytest.mark.slow
@given(TEXT)
def test_no_text_of_a_document_becomes_markup(library: Library, text: str) -> None:
    error = planted(document(library, "is no wheel"), f"<i>{text}</i>\"'")
    page = html.error_page(error, LINKS)
    assert "<i>" not in page
    assert json.dumps(f"<i>{text}")[1:-1] not in page.partition("<main")[2]


def test_code_within_a_sentence() -> None:
    found = str(html._prose("`a < b` and ``c`` are set by --x-y; self.d.e is <i>"))
    assert found == (
        "<code>a &lt; b</code> and <code>c</code> are set by <code>--x-y</code>; <code>self.d.e</code> is &lt;i&gt;"
    )


def test_addresses_of_lists() -> None:
    assert LINKS.listing("mill", "A&B <c>", 2) == "/errors?package=mill&class=A%26B+%3Cc%3E&page=2"
    assert LINKS.listing("mill", None, 1) == "/errors?package=mill"
