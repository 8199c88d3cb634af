"""A paste is explained by the error in it that matters, and ours are all found by what they print."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import headrace
from headrace.config import OffloadConfig
from headrace.errors import HeadraceError, InvalidOffloadConfig, concrete_errors
from headrace.reference import explained
from headrace.reference.build import build
from headrace.reference.database import Catalogue
from headrace.reference.document import document
from headrace.reference.explain import Explanation, explain, explain_page
from headrace.reference.packages import directory

MILL = """
class Stone:
    def check(self):
        if self.stone_width % self.groove_spacing != 0:
            text = f"stone_width ({self.stone_width}) must be a multiple of groove spacing ({self.groove_spacing})"
            raise ValueError(text)

    def turn(self, error):
        raise RuntimeError(f"The turning of the millstone ended with: {error}")


def start(names):
    raise RuntimeError(f"The waterwheel did not come into motion. See root cause above. Gates: {names}")


def flags(parser):
    parser.add_argument("--stone-width", type=int)
    parser.add_argument("--groove-spacing", "-gs", type=int)
"""
STONE = "stone_width (64) must be a multiple of groove spacing (3)"


@pytest.fixture(scope="module")
def mill(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Catalogue]:
    folder = tmp_path_factory.mktemp("mill")
    (folder / "mill").mkdir()
    (folder / "mill" / "__init__.py").write_text(MILL)
    with Catalogue.open(build(directory(folder, package="mill"), path=folder / "mill.sqlite")) as catalogue:
        yield catalogue


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Catalogue]:
    folder = Path(str(headrace.__file__)).parent
    path = tmp_path_factory.mktemp("ours") / "headrace.sqlite"
    with Catalogue.open(build(directory(folder, package="headrace"), path=path)) as catalogue:
        yield catalogue


def qualname(answer: Explanation) -> str | None:
    return answer.site and answer.site.qualname


# --- which error of a paste -----------------------------------------------------------------------------------------


def test_an_exact_message(mill: Catalogue) -> None:
    answer = explain(f"ValueError: {STONE}", [mill])
    assert (answer.verdict, qualname(answer)) == ("exact", "Stone.check")
    assert answer.found


def traceback(text: str) -> str:
    return f'Traceback (most recent call last):\n  File "/app/run.py", line 1, in <module>\n    main()\n{text}\n'


CAUSED = "\nThe above exception was the direct cause of the following exception:\n\n"


def test_a_cause_matters_more_than_what_it_caused(mill: Catalogue) -> None:
    paste = (
        traceback(f"ValueError: {STONE}")
        + CAUSED
        + traceback("RuntimeError: The turning of the millstone ended with: 3")
    )
    assert qualname(explain(paste, [mill])) == "Stone.check"


def test_what_points_to_another_error_is_not_the_answer(mill: Catalogue) -> None:
    points = "RuntimeError: The waterwheel did not come into motion. See root cause above. Gates: {'north': 1}"
    assert qualname(explain(points, [mill])) == "start"
    stamp = "ERROR 01-02 03:04:05 [a.py:1]"
    log = f"(Core pid=1) {stamp} ValueError: {STONE}\n(Api pid=2) {stamp} {points}"
    assert qualname(explain(log, [mill])) == "Stone.check"


def test_a_wrapper_of_the_package_itself(mill: Catalogue) -> None:
    answer = explain(f"RuntimeError: The turning of the millstone ended with: {STONE}", [mill])
    assert qualname(answer) == "Stone.check"
    assert [wrapper.kind for wrapper in answer.wrappers] == ["package"]
    page = mill.page(answer.wrappers[0].page_id)
    assert page is not None
    assert page.sites[0].qualname == "Stone.turn"


def test_a_wrapper_around_somebody_elses_error(mill: Catalogue) -> None:
    answer = explain("RuntimeError: The turning of the millstone ended with: CUDA out of memory. Tried it", [mill])
    assert qualname(answer) == "Stone.turn"
    assert answer.carried is not None
    assert answer.carried.name == "torch"


# --- nothing claimed ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("paste", "owner"),
    [
        ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.", "torch"),
        ("KeyError: 'weights'", "Python"),
        ("serve: error: argument --mode: invalid choice: 'x' (choose from 'a')", "argparse"),
        (f'{traceback("")}  File "/x/site-packages/torch/a.py", line 1, in f\nValueError: {STONE}', "torch"),
        ("The miller is ill", None),
        ("", None),
        ("\x00\x1b[", None),
    ],
)
def test_nothing_is_claimed(mill: Catalogue, paste: str, owner: str | None) -> None:
    answer = explain(paste, [mill])
    assert not answer.found
    assert (answer.owner and answer.owner.name) == owner
    assert explained.abstention(answer).endswith(".")
    assert json.loads(json.dumps(document(answer)))["found"] is False


def test_without_any_reference() -> None:
    assert not explain(STONE, []).found


# --- the answer -----------------------------------------------------------------------------------------------------


def test_fixes_and_the_corrected_command(mill: Catalogue) -> None:
    answer = explain(STONE, [mill], "mill serve --stone-width 64 -gs 3")
    assert answer.corrected is not None
    assert answer.corrected.after == "mill serve --stone-width 64 -gs 4"
    assert answer.fixes[0].verified
    assert explained.fix_lines(answer)[0].startswith("Use --groove-spacing 4 (a divisor of 64; also 2, 1)")
    assert list(explained.reasons(answer))[-1][1] == "64 % 3 != 0: consistent with the message"
    assert answer.snippet is not None
    assert "must be a multiple" in answer.snippet


def test_one_line(mill: Catalogue) -> None:
    line = explained.short(explain(STONE, [mill]))
    assert line.startswith("mill/__init__.py:6")
    assert "\n" not in line
    assert explained.short(explain("KeyError: 'a'", [mill])).startswith("This is not mill")


def test_plain_data(mill: Catalogue) -> None:
    found: dict[str, Any] = json.loads(json.dumps(document(explain(STONE, [mill]))))
    assert found["verdict"] == "exact"
    assert found["captured"] == {"self.stone_width": 64, "self.groove_spacing": 3}
    assert found["site"]["line"] == 6
    assert found["package"]["name"] == "mill"


def test_where_a_closest_text_differs(mill: Catalogue) -> None:
    answer = explain("ValueError: The stone_width of 64 has to be a multiple of groove spacing 3", [mill])
    assert answer.verdict == "closest"
    assert ("same", "be a multiple of groove spacing") in explained.word_difference(answer)


def test_a_page_by_its_id(mill: Catalogue) -> None:
    found = explain(STONE, [mill]).page
    assert found is not None
    answer = explain_page(found, mill)
    assert answer.found
    assert answer.said is None
    assert json.dumps(document(answer))


# --- our own --------------------------------------------------------------------------------------------------------

OWN = [cls for cls in concrete_errors() if cls.__module__ == "headrace.errors"]


@pytest.mark.parametrize("cls", OWN, ids=lambda cls: cls.__name__)
def test_our_own_errors_are_found_by_what_they_print(ours: Catalogue, cls: type[HeadraceError]) -> None:
    error = cls(**cls.example)
    for paste in (f"headrace.errors.{cls.__name__}: {error}", f"error: {error}\nheadrace explain {cls.error_id()}"):
        answer = explain(paste, [ours])
        assert answer.page is not None, paste
        assert answer.page.id == cls.error_id(), paste
        assert answer.own is not None
        assert (answer.own.name, answer.own.template) == (cls.__name__, cls.template)


def test_what_headrace_prints_below_an_error_is_enough(ours: Catalogue) -> None:
    answer = explain(f"something else\nheadrace explain {OWN[0].error_id()}", [ours])
    assert answer.own is not None
    assert answer.own.name == OWN[0].__name__


@pytest.mark.parametrize(
    "settings",
    [{"offload_group_size": 4, "offload_num_in_group": 8}, {"offload_group_size": 4, "offload_prefetch_step": 0}],
)
def test_the_first_sentence_of_several_problems_is_enough(ours: Catalogue, settings: dict[str, int]) -> None:
    with pytest.raises(InvalidOffloadConfig) as caught:
        OffloadConfig.model_validate({"prefetch": settings})
    answer = explain(str(caught.value).partition(": --")[0], [ours])
    assert answer.site is not None
    assert answer.site.qualname == "_contradictions"
    assert answer.own is not None
    assert answer.own.name == "InvalidOffloadConfig"
    assert answer.match is not None
    assert answer.match.consistent is True
    whole = explain(str(caught.value), [ours])
    assert whole.page is not None
    assert whole.page.id == InvalidOffloadConfig.error_id()
    assert [piece.consistent for piece in whole.pieces] == [True]
    assert whole.fixes[0].verified
