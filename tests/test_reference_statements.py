"""Docstrings and comments around an error."""

from __future__ import annotations

import textwrap

import pytest

from headrace.reference.extract import read_file
from headrace.reference.statements import statements


def said(source: str) -> list[tuple[str, str]]:
    text = textwrap.dedent(source)
    (draft,) = read_file("a.py", text.encode()).drafts
    return [(each.basis, each.text) for each in statements(draft.site, text.splitlines())]


def function(docstring: str, body: str = 'raise ValueError("no such mill")') -> str:
    return f'def f(x):\n    """{docstring}"""\n{textwrap.indent(textwrap.dedent(body), "    ")}\n'


@pytest.mark.parametrize(
    "section",
    [
        "Raises:\n        ValueError: If there is\n            no mill.\n        KeyError: Never.",
        "Raises\n    ------\n    KeyError\n        Never.\n    ValueError\n        If there is no mill.",
        ":raises ValueError: If there is\n        no mill.\n    :raises KeyError: Never.",
    ],
    ids=["google", "numpy", "sphinx"],
)
def test_the_section_about_errors(section: str) -> None:
    found = said(function(f"Grind.\n\n    {section}\n    "))
    assert found == [("docstring", "If there is no mill."), ("docstring", "Grind.")]


def test_a_summary_is_the_first_paragraph() -> None:
    assert said(function("Grind\n    what is there.\n\n    More.\n    ")) == [("docstring", "Grind what is there.")]


def test_a_long_summary_ends_with_a_sentence() -> None:
    ((_, text),) = said(function("It grinds. " * 200))
    assert len(text) <= 480
    assert text.endswith("grinds.")


@pytest.mark.parametrize("signature", ["def f(x: dict = {'a': 1}) -> 'int':", "def f(\n    x=(1, 2),  # why: so\n):"])
def test_any_signature(signature: str) -> None:
    assert said(f'{signature}\n    "Grind."\n    raise ValueError("no such mill")\n') == [("docstring", "Grind.")]


@pytest.mark.parametrize(
    "body",
    ["pass", "f'{x} is no docstring'", "b'nor is this'", "x = 'nor this'"],
)
def test_no_docstring(body: str) -> None:
    assert said(f'def f(x):\n    {body}\n    raise ValueError("no such mill")\n') == []


def test_comments_above_the_error_and_above_its_test() -> None:
    body = """
        # The mill stands still
        # in winter.
        if x:
            # Nobody is there then.
            raise ValueError("no such mill")
    """
    found = said(function("", body))
    assert found == [("comment", "Nobody is there then."), ("comment", "The mill stands still in winter.")]


@pytest.mark.parametrize(
    "comment",
    ["# noqa: E501 this is long", "# TODO: make it better", "# if x: return x + 1", "# one", "#"],
)
def test_comments_that_say_nothing_about_it(comment: str) -> None:
    assert said(function("", f'{comment}\nraise ValueError("no such mill")')) == []


def test_a_string_is_no_comment() -> None:
    body = 'x = """\n# this is a text\n"""\nraise ValueError("no such mill")'
    assert said(f"def f(x):\n    {body}".replace("\nraise", "\n    raise")) == []


def test_a_method_has_its_class() -> None:
    source = 'class Mill:\n    "What grinds."\n\n    def f(self):\n        raise ValueError("no such mill")\n'
    assert said(source) == [("docstring", "What grinds.")]


def test_a_module_has_neither() -> None:
    assert said('"""A module."""\nif x:\n    raise ValueError("no such mill")\n') == []
