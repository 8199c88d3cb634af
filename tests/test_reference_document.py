"""What is told of an error, and on what basis."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
import tiny_reference

from headrace.errors import InvalidSetting, RequestTooLarge
from headrace.reference.database import Catalogue
from headrace.reference.document import document, own_document, page_document
from headrace.reference.explain import explain, explain_page
from headrace.reference.own import own_error_with_id


@pytest.fixture(scope="module")
def mill(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Catalogue]:
    folder = tmp_path_factory.mktemp("mill")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
        with Catalogue.open(tiny_reference.built(folder)) as catalogue:
            yield catalogue


def told(mill: Catalogue, words: str) -> dict[str, Any]:
    (page,) = mill.search(words)
    made = page_document(explain_page(page, mill))
    return json.loads(json.dumps(made))


def test_each_statement_has_its_basis_and_its_place(mill: Catalogue) -> None:
    meaning = told(mill, "stone_width multiple")["meaning"]
    assert [(each["basis"], each["text"]) for each in meaning] == [
        ("guard", "Raised when `self.stone_width` is not a multiple of `self.groove_spacing`."),
        ("comment", "The grooves would not meet."),
        ("docstring", "If the width is not a multiple of the spacing."),
        ("docstring", "Look whether the grooves fit."),
        ("docstring", "What grinds."),
    ]
    source = tiny_reference.SECOND.splitlines()
    for each in meaning[1:]:
        first, last = each["lines"]
        assert each["text"].split()[0] in " ".join(source[first - 1 : last])


def test_place_condition_and_fixes(mill: Catalogue) -> None:
    error = told(mill, "stone_width multiple")
    site = error["site"]
    assert site["permalink"].startswith("https://github.com/water/mill/blob/v2.0/mill/__init__.py#L")
    excerpt = site["excerpt"]
    numbered = dict(enumerate(excerpt["lines"], excerpt["first_line"]))
    assert "raise ValueError" in numbered[excerpt["raised"][0]]
    assert ["groove_spacing != 0" in numbered[line] for line in excerpt["tests"]] == [True]
    assert error["condition"]["complete"]
    assert [atom["words"] for atom in error["condition"]["atoms"]] == [
        "`self.stone_width` is not a multiple of `self.groove_spacing`"
    ]
    assert {fix["strategy"] for fix in error["fixes"]} == {"divisor", "multiple"}
    assert {fix["basis"] for fix in error["fixes"]} == {"guard"}
    assert [piece["flag"] for piece in error["pieces"] if not isinstance(piece, str)] == [
        "--stone-width",
        "--groove-spacing",
    ]
    assert error["check"]["code"].startswith("def check(")


def test_a_choice_among_several_tests_is_not_misread(mill: Catalogue) -> None:
    text = told(mill, "is no wheel")["condition"]["text"]
    assert text == (
        "Raised when either `self.diameter` is less than `1` or `self.spokes` is `None`, and `self.tail` is greater "
        "than `2`."
    )


def test_when_it_is_checked(mill: Catalogue) -> None:
    assert told(mill, "is no wheel")["when"]["trigger"][0]["text"] == "Checked when `Wheel` is made (`__post_init__`)."
    turning = told(mill, "turning ended")
    assert "2 places" in turning["when"]["trigger"][-1]["text"]
    assert [site["qualname"] for site in turning["sites"]] == ["again"]


def test_what_an_error_was_called_before(mill: Catalogue) -> None:
    history = told(mill, "stored in this place")["history"]
    (old,) = history["earlier"]
    assert old["template"] == "the stone cannot be stored in the place {place}"
    page = mill.page(old["id"])
    assert page is not None
    assert page.id == told(mill, "stored in this place")["id"]


def test_what_is_gone_quotes_no_line_of_the_new_source(mill: Catalogue) -> None:
    gone = [page for each in mill.gone() if (page := mill.page(each)) is not None and page.id == each]
    made = [page_document(explain_page(page, mill)) for page in gone]
    assert "the old crane has broken down" in [each["template"] for each in made]
    for each in made:
        assert each["history"]["removed"] == "2.0"
        assert each["site"]["excerpt"] is None
        assert each["site"]["permalink"] is None
        assert {statement["basis"] for statement in each["meaning"]} <= {"guard"}


def test_a_message_adds_its_values(mill: Catalogue) -> None:
    answer = document(explain(f"ValueError: {tiny_reference.STONE}", [mill]))
    assert answer["verdict"] == "exact"
    assert answer["captured"] == {"self.stone_width": 64, "self.groove_spacing": 3}
    page = told(mill, "stone_width multiple")
    assert {name: answer[name] for name in ("id", "meaning", "check", "related", "history")} == {
        name: page[name] for name in ("id", "meaning", "check", "related", "history")
    }
    assert answer["condition"]["atoms"][0]["with_values"] == "64 % 3 != 0"


def test_nothing_is_claimed(mill: Catalogue) -> None:
    answer = document(explain("KeyError: 'weights'", [mill]))
    assert not answer["found"]
    assert "id" not in answer
    assert answer["owner"]["name"] == "Python"


@pytest.mark.parametrize("cls", [InvalidSetting, RequestTooLarge])
def test_our_own_error_without_its_source(cls: type[InvalidSetting]) -> None:
    own = own_error_with_id(cls.error_id())
    assert own is not None
    error = own_document(own, cls.error_id())
    assert error["title"] == cls.__name__
    assert error["fixes"][0]["basis"] == "note"
    assert ":" not in error["template"].partition("{")[2].partition("}")[0]
    assert (error["example"] is None) == (own.example is None)


def test_both_kinds_of_documents_have_the_same_fields(mill: Catalogue) -> None:
    own = own_error_with_id(InvalidSetting.error_id())
    assert own is not None
    assert own_document(own, "0" * 16).keys() == told(mill, "is no wheel").keys()
