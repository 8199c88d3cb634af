"""The site of a message is found by frame, by template or by words; what is too far is not claimed."""

from __future__ import annotations

import fakes
import pytest
from fakes import FakeCatalogue

from headrace.reference.matching import Catalogue, file_in_package, find
from headrace.reference.records import Atom, Condition, Page, Placeholder, Site, Template
from headrace.reference.tracebacks import Frame
from headrace.reference.wrappers import Said


def p(expr: str, kind: str = "any") -> Placeholder:
    return Placeholder(expr, kind)  # type: ignore[arg-type]


def site(
    file: str,
    line: int,
    template: Template,
    *,
    condition: str = "",
    name: str = "check",
    error_class: str = "ValueError",
) -> Site:
    atoms = (Atom(condition, line - 1),) if condition else ()
    return Site(file, line, line, name, error_class, "raise", (template,), Condition(atoms, complete=True))


STONES: Template = ("stone_width (", p("width"), ") must be a multiple of the groove spacing (", p("spacing"), ")")
TWINS: Template = ("Stone of kind ", p("kind"), " cannot grind on ", p("stone_name"), " because its surface is worn")
MEMORY: Template = (
    "No room for the flour of one day. Available room: ", p("room"),
    ". Try a larger `sack_count` or a smaller `day_length` when opening the mill. See the handbook for more.",
)  # fmt: skip
PAGES = [
    Page(
        "1" * 16, "mill", "ValueError", STONES, (site("mill/stone.py", 20, STONES, condition="width % spacing != 0"),)
    ),
    Page("2" * 16, "mill", "ValueError", TWINS, (site("mill/wind.py", 5, TWINS), site("mill/water.py", 5, TWINS))),
    Page("3" * 16, "mill", "RuntimeError", MEMORY, (site("mill/room.py", 9, MEMORY, error_class="RuntimeError"),)),
    Page(
        "4" * 16, "mill", "ValueError", ("no ", p("what")), (site("mill/stone.py", 40, ("no ", p("what")), name="get"),)
    ),
    *(
        Page(f"{number:016x}", "mill", "ValueError", text, (site(f"mill/m{number}.py", 3, text),))
        for number, word in enumerate(["grain", "wheel", "gate", "channel", "sack", "miller", "day", "one", "room"])
        for text in [(f"The {word} of the mill must be given, got ", p("value"), " for it")]
    ),
]
MILL = FakeCatalogue(PAGES)


def found(text: str, error_class: str = "ValueError", frames: tuple[Frame, ...] = ()) -> tuple[str, str | None]:
    finding = find(MILL, Said(error_class, text), frames)
    return finding.verdict, finding.best and f"{finding.best.site.file}:{finding.best.site.line}"


def test_the_fake_answers_all_that_is_asked() -> None:
    asked: Catalogue = fakes.FakeCatalogue(PAGES)
    assert asked.page("1" * 16) is PAGES[0]


GOOD = "stone_width (64) must be a multiple of the groove spacing (3)"


@pytest.mark.parametrize(
    ("text", "error_class", "verdict"),
    [
        (GOOD, "ValueError", "exact"),
        (GOOD, "", "exact"),
        (GOOD, "KeyError", "likely"),
        (GOOD + " [parameter=x]", "ValueError", "likely"),
        (GOOD[:48], "ValueError", "likely"),
        ("stone_width (64) must be a multiple of the groove spacing (8)", "ValueError", "likely"),
        ("stone_width 64 should be a multiple of groove spacing 3", "ValueError", "closest"),
    ],
)
def test_how_sure_it_is(text: str, error_class: str, verdict: str) -> None:
    assert found(text, error_class) == (verdict, "mill/stone.py:20")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "no",
        "no flour",
        "must be given",
        "The stone is broken",
        "a multiple of 3",
        "of the",
        "x" * 50_000,
        "the mill " * 5000,
    ],
)
def test_what_is_not_claimed(text: str) -> None:
    assert found(text) == ("none", None)


def test_a_message_that_has_grown_since() -> None:
    text = "No room for the flour of one day. Try a larger `sack_count` when opening the mill."
    assert found(text, "RuntimeError") == ("closest", "mill/room.py:9")


def test_values_put_into_the_condition() -> None:
    best = find(MILL, Said("ValueError", GOOD)).best
    assert best is not None
    assert best.values == {"width": 64, "spacing": 3}
    assert [(check.code, check.holds) for check in best.checks] == [("64 % 3 != 0", True)]
    assert best.consistent is True


def test_values_that_do_not_explain_it() -> None:
    best = find(MILL, Said("ValueError", GOOD.replace("(3)", "(8)"))).best
    assert best is not None
    assert best.consistent is False


def test_a_frame_decides_between_twins() -> None:
    text = "Stone of kind soft cannot grind on old because its surface is worn"
    frame = Frame("/x/site-packages/mill/water.py", 5, "check")
    assert found(text, frames=(frame,)) == ("exact", "mill/water.py:5")


def test_a_value_that_names_the_file_decides_between_twins() -> None:
    assert found("Stone of kind water cannot grind on old because its surface is worn") == ("exact", "mill/water.py:5")


def test_a_frame_is_enough_for_few_words() -> None:
    assert found("no flour", frames=(Frame("/x/mill/stone.py", 41, "get"),)) == ("exact", "mill/stone.py:40")


def test_a_frame_without_the_words_is_not() -> None:
    assert found("something else", frames=(Frame("/x/mill/stone.py", 41, "get"),)) == ("none", None)


@pytest.mark.parametrize(
    ("path", "file"),
    [
        ("/usr/lib/python3/site-packages/mill/stone.py", "mill/stone.py"),
        ("mill/stone.py", "mill/stone.py"),
        ("C:\\x\\mill\\sub\\stone.py", "mill/sub/stone.py"),
        ("/home/mill.py", None),
        ("/x/other/stone.py", None),
    ],
)
def test_files_of_the_package(path: str, file: str | None) -> None:
    assert file_in_package(path, "mill") == file
