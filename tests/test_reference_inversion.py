"""A template finds itself in what it prints, whatever the values, and says what it captured."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.reference.inversion import Fit, fit, own_letters, squeeze, suits
from headrace.reference.records import Placeholder, Template

GROUP: Template = ("num_in_group (", Placeholder("self.n"), ") must be <= group_size (", Placeholder("self.g"), ")")


def found(template: Template, text: str) -> Fit:
    result = fit(template, squeeze(text))
    assert result is not None
    return result


@pytest.mark.parametrize(
    ("text", "mode", "captured"),
    [
        ("num_in_group (8) must be <= group_size (4)", "full", ("8", "4")),
        ("num_in_group (8) must be <= group_size (4) and so on", "longer", ("8", "4")),
        ("num_in_group (8) must be <= gro", "cut", ("8", None)),
        ("num_in_group (8) must be <= group_size (4", "cut", ("8", "4")),
        ("num_in_group (8) must be...", "cut", ("8", None)),
        ("Sorry, num_in_group (8) must be <= group_size (4). Bye", "inside", ("8", "4")),
        ("num_in_group(8)must\n be <=\tgroup_size ( 4 )", "full", ("8", "4")),
        ("num_in_group (a b) must be <= group_size ()", "full", ("a b", "")),
    ],
)
def test_modes(text: str, mode: str, captured: tuple[str | None, ...]) -> None:
    result = found(GROUP, text)
    assert (result.mode, result.captured) == (mode, captured)


@pytest.mark.parametrize("text", ["", "num_in_gruop (8) must be <= group_size (4)", "must be", "something else"])
def test_what_does_not_fit(text: str) -> None:
    assert fit(GROUP, squeeze(text)) is None


def test_values_decide_where_a_literal_stands() -> None:
    template: Template = (Placeholder("a"), " is not ", Placeholder("b", "int"), " is not ", Placeholder("c", "int"))
    result = found(template, "what is not 3 is not 4")
    assert result.captured == ("what", "3", "4")
    assert not result.misfits


def test_a_value_of_another_kind_is_counted() -> None:
    assert found(("rank ", Placeholder("r", "int"), " is too large"), "rank abc is too large").misfits == 1


def test_a_template_without_words_fits_nothing() -> None:
    assert fit((Placeholder("a"),), squeeze("anything")) is None
    assert fit((Placeholder("a"), ": ", Placeholder("b")), squeeze("a: b")) is None


def test_placeholders_side_by_side_are_taken_together() -> None:
    assert found(("no ", Placeholder("a"), Placeholder("b"), "!"), "no 12!").captured == ("12", None)


def test_how_much_of_it_was_found() -> None:
    half = found(GROUP, "num_in_group (8) must be")
    assert half.share == pytest.approx(half.letters / own_letters(GROUP))
    assert 0.4 < half.share < 0.9
    assert found(GROUP, "num_in_group (8) must be <= group_size (4)").explained > 0.9


WORDS = st.text(st.sampled_from("abcdefgh .:(),'"), min_size=3, max_size=12).filter(
    lambda text: any(map(str.isalpha, text))
)
VALUES = {
    "any": st.text(st.characters(codec="utf-8", exclude_categories=("Cs", "Cc", "Z")), min_size=1, max_size=8),
    "int": st.integers(-(10**9), 10**9).map(str),
    "float": st.floats(0.01, 1e6).map(lambda value: f"{value:.2f}"),
    "quoted": st.text(st.sampled_from("abc_/"), max_size=6).map(repr),
}


@st.composite
def rendered(draw: st.DrawFn) -> tuple[Template, str]:
    pieces: list[str | Placeholder] = [draw(WORDS)]
    text = str(pieces[0])
    for number in range(draw(st.integers(0, 4))):
        kind = draw(st.sampled_from(sorted(VALUES)))
        literal = draw(WORDS)
        pieces += [Placeholder(f"v{number}", kind), literal]  # type: ignore[arg-type]
        text += draw(VALUES[kind]) + literal
    return tuple(pieces), text


@given(rendered())
def test_a_template_fits_what_it_prints(case: tuple[Template, str]) -> None:
    template, text = case
    result = found(template, text)
    assert result.mode == "full"
    assert result.share == 1


@given(rendered(), st.integers(1, 60))
def test_a_template_fits_the_beginning_of_what_it_prints(case: tuple[Template, str], length: int) -> None:
    template, text = case
    result = fit(template, squeeze(text[:length]))
    assert result is not None or not text[:length].strip()


def test_a_template_made_to_backtrack_ends() -> None:
    template: Template = tuple(piece for number in range(40) for piece in (Placeholder(f"v{number}", "int"), "a"))
    assert found((*template, "b"), "a" * 5000 + "c").mode == "cut"


@pytest.mark.parametrize(
    ("kind", "text", "good"),
    [
        ("int", "-3", True),
        ("int", "3.5", False),
        ("int", "1,024", True),
        ("float", "45.01", True),
        ("float", "1e-5", True),
        ("float", "GiB", False),
        ("bool", "True", True),
        ("quoted", "'a'", True),
        ("quoted", "'a", False),
        ("any", "what ever", True),
    ],
)
def test_kinds(kind: str, text: str, good: bool) -> None:
    assert suits(kind, text) is good
