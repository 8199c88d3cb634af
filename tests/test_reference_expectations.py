"""Tests of a package that expect an error, read and led to the page of that error."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path

import pytest
import tiny_reference

from headrace.cli.app import main
from headrace.reference.attribution import attributed
from headrace.reference.build import build
from headrace.reference.database import Catalogue
from headrace.reference.document import page_document
from headrace.reference.expectations import read_expectations
from headrace.reference.explain import explain_page
from headrace.reference.overlap import expression_tokens, overlap
from headrace.reference.packages import PackageSource, directory, is_test
from headrace.reference.records import Condition, Expectation, Page, Placeholder, Site

TESTS = """
import re
import pytest
from mill import Stone, turn, Wheel

WORDS = "must be a multiple"

@pytest.mark.parametrize(("width", "words"), [(64, r"\\(64\\) must be a multiple"), pytest.param(7, "is gone")])
def test_width(width, words):
    with pytest.raises(ValueError, match=words):
        Stone(stone_width=width).check()

def test_turning():
    with pytest.raises(RuntimeError) as caught:
        turn("a hole")
    assert str(caught.value) == "The turning ended with: a hole"

class TestPlace:
    def test_nowhere(self):
        with self.assertRaisesRegex(Exception, "cannot be stored in this place"):
            Stone().store(
                None
            )

    def test_wrong(self):
        self.assertRaisesRegex(TypeError, "cannot be stored in this place", Stone().store, None)

def test_two_pages_could_be_meant():
    with pytest.raises(ValueError, match="is full of water"):
        fill()

def test_python_says_it():
    with pytest.raises(AttributeError, match="object has no attribute 'grind'"):
        Stone().grind()

def test_too_little():
    with pytest.raises(ValueError, match="be"):
        Stone().check()
"""
MORE = """

class Missing(AttributeError):
    pass

def fill(level, name):
    if level > 3:
        raise ValueError(f"basin {name} is full of water")
    if level > 2:
        raise ValueError(f"pond {name} is full of water")

def look(name):
    raise Missing(f"{name} object has no attribute {name}")
"""


def project(folder: Path, tests: str = TESTS) -> PackageSource:
    (folder / "src" / "mill").mkdir(parents=True, exist_ok=True)
    (folder / "tests").mkdir(exist_ok=True)
    (folder / "src" / "mill" / "__init__.py").write_text(tiny_reference.SECOND + MORE)
    (folder / "tests" / "test_mill.py").write_text(tests)
    (folder / "tests" / "helpers.py").write_text(tests)
    (folder / "pyproject.toml").write_text(
        '[project]\nname = "mill"\nversion = "2.0"\n[project.urls]\nsource = "https://github.com/water/mill"\n'
    )
    return directory(folder, package="mill")


def expected_in(catalogue: Catalogue) -> dict[str, list[str]]:
    """The tests of each page, by the first words of its message."""
    return {
        str(page.template[0])[:12]: [each.test for each in catalogue.expectations(page.id)]
        for page in catalogue.pages()
        if catalogue.expectations(page.id)
    }


def test_each_page_has_the_tests_that_mean_it_alone(tmp_path: Path) -> None:
    source = project(tmp_path / "project")
    assert source.tests == ("../tests/test_mill.py",)
    with Catalogue.open(build(source, path=tmp_path / "mill.sqlite")) as catalogue:
        assert expected_in(catalogue) == {
            "stone_width ": ["test_width"],
            "the stone ca": ["TestPlace.test_nowhere"],
            "The turning ": ["test_turning"],
        }
        (page,) = catalogue.search("stone_width multiple")
        error = page_document(explain_page(page, catalogue))
    (found,) = error["when"]["tests"]
    assert found["basis"] == "test"
    assert found["call"] == "width = 64\nStone(stone_width=width).check()"
    first, last = found["lines"]
    assert TESTS.splitlines()[first - 1 : last] == ["        Stone(stone_width=width).check()"]
    assert found["permalink"] == f"https://github.com/water/mill/blob/v2.0/tests/test_mill.py#L{first}"
    assert [each["text"] for each in error["prevention"]] == [
        "What is tested is set by `--stone-width` and `--groove-spacing`.",
        "`except ValueError` catches it.",
    ]


def test_a_test_that_changed_is_read_again(tmp_path: Path) -> None:
    path = tmp_path / "mill.sqlite"
    build(project(tmp_path / "project"), path=path)
    build(project(tmp_path / "project", TESTS.replace("test_turning", "test_the_turning")), path=path)
    with Catalogue.open(path) as catalogue:
        assert expected_in(catalogue)["The turning "] == ["test_the_turning"]


def test_the_terminal_tells_them_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with Catalogue.open(build(project(tmp_path / "project"))) as catalogue:
        (page,) = catalogue.search("turning ended")
    assert main(["explain", page.id, "--package", "mill"]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert 'tests tests/test_mill.py:15 in test_turning: turn("a hole")' in printed
    assert "prevent `except RuntimeError` catches it." in printed


@pytest.mark.parametrize(
    ("written", "pattern"),
    [
        ('with pytest.raises(ValueError, match="a b"):', "a b"),
        ('with raises(ValueError, match=re.escape("a (b)")):', r"a\ \(b\)"),
        ('with pytest.raises(ValueError, match=f"a {x} b"):', "a .* b"),
        ('with pytest.raises(ValueError, match=re.escape(f"a ({x})")):', r"a\ \(.*\)"),
        ('with pytest.raises(ValueError, match="a" + WORDS):', "amany words"),
        ("with pytest.raises(ValueError, match=WORDS):", "many words"),
        ("with pytest.raises(ValueError, match=local):", "few words"),
    ],
)
def test_where_the_words_stand(written: str, pattern: str) -> None:
    source = f"WORDS = 'many words'\ndef test_it():\n    local = 'few words'\n    {written}\n        call(1)\n"
    (found,) = read_expectations("tests/test_it.py", source.encode())
    assert (found.pattern, found.call, found.classes, found.line) == (pattern, "call(1)", ("ValueError",), 5)


@pytest.mark.parametrize(
    "written",
    [
        "with pytest.raises(ValueError):",
        "with pytest.raises(ValueError, match=unknown):",
        "with pytest.raises(ValueError, match=words()):",
        'with open("raises", match="a b"):',
        "with pytest.raises(:",
    ],
)
def test_nothing_is_guessed(written: str) -> None:
    assert read_expectations("tests/test_it.py", f"def test_it():\n    {written}\n        call(1)\n".encode()) == ()


def test_of_several_lines_the_first_are_shown() -> None:
    body = textwrap.indent("\n".join(f"step({number})" for number in range(9)), "        ")
    source = f"def test_it():\n    with pytest.raises(ValueError, match='a b'):\n{body}\n"
    (found,) = read_expectations("tests/test_it.py", source.encode())
    assert found.call == "step(0)\nstep(1)\nstep(2)\nstep(3) ..."


@pytest.mark.parametrize(
    ("file", "expected"),
    [
        ("../tests/test_a.py", True),
        ("mill/tests/deep/a_test.py", True),
        ("tests/conftest.py", False),
        ("mill/test_utils.py", False),
        ("mill/testing/test_a.py", False),
    ],
)
def test_what_counts_as_a_test(file: str, expected: bool) -> None:
    assert is_test(file) is expected


TEMPLATE = ("width (", Placeholder("self.width"), ") must be a multiple of ", Placeholder("x", "int"), ", not more")


@pytest.mark.parametrize(
    ("pattern", "letters", "words"),
    [
        ("must be a multiple of", 17, 4),
        (r"width \(64\) must be", 11, 3),
        (r"width \(\d+\) must .* not more$", 16, 4),
        ("ust be a mult", 10, 3),
        ("^width", 5, 1),
        ("multiples?", 8, 1),
        (r"of 3, not (?:more|less)", 5, 2),
    ],
)
def test_what_an_expression_and_a_template_both_say(pattern: str, letters: int, words: int) -> None:
    found = overlap(pattern, expression_tokens(pattern), TEMPLATE)
    assert found is not None
    assert (found.letters, found.words) == (letters, words)
    assert re.search(pattern, found.text)
    assert re.fullmatch(r"width \(.*\) must be a multiple of .*, not more", found.text)


@pytest.mark.parametrize(
    "pattern",
    ["must be a divisor", "^must be", "more than", r"(?!a)must", "must be [", r"width (64) must", "not more x"],
)
def test_an_expression_that_the_template_cannot_meet(pattern: str) -> None:
    assert overlap(pattern, expression_tokens(pattern), TEMPLATE) is None


def page(page_id: str, error_class: str, text: str, *decorators: str) -> Page:
    site = Site(
        "a.py", 1, 1, "f", error_class, "raise", ((text,),), Condition(), decorators=decorators, function_line=1
    )
    return Page(page_id, "mill", error_class, (text,), (site,))


@pytest.mark.parametrize(
    ("error_class", "decorators", "expected", "found"),
    [
        ("ValueError", (), ("ValueError",), True),
        ("ValueError", (), ("Exception",), True),
        ("ValueError", (), ("KeyError", "ValueError"), True),
        ("ValueError", (), ("TypeError",), False),
        ("Dry", (), ("Drought",), True),
        ("Dry", (), ("ValueError",), True),
        ("Drought", (), ("Dry",), False),
        ("ValueError", ("model_validator(mode='after')",), ("ValidationError",), True),
        ("ValueError", (), ("ValidationError",), False),
        ("TypeError", ("model_validator(mode='after')",), ("ValidationError",), False),
    ],
)
def test_the_class_decides(
    error_class: str, decorators: tuple[str, ...], expected: tuple[str, ...], found: bool
) -> None:
    bases = {"Dry": ["Drought", "ValueError"], "Drought": ["ValueError"]}
    expectation = Expectation("t.py", 1, 1, "test_it", expected, "the river is dry", "call()")
    pages = [page("0" * 16, error_class, "the river is dry now", *decorators)]
    assert attributed([expectation], pages, bases) == ([("0" * 16, expectation)] if found else [])
