"""Conditions are computed without being run, and what is not known stays unknown."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.reference.evaluate import normal, read_value, truth, with_values

VALUES = {"n": 8, "self.g": 4, "name": "half", "flag": True, "none": None, "items": ["a", "b"]}


@pytest.mark.parametrize(
    ("code", "holds"),
    [
        ("n > self.g", True),
        ("n % self.g != 0", False),
        ("not n % 3", False),
        ("0 < n <= self.g", False),
        ("name not in ('auto', 'float')", True),
        ("name == 'half' and flag", True),
        ("none is None", True),
        ("none is not None", False),
        ("isinstance(n, int)", True),
        ("isinstance(name, (int, float))", False),
        ("len(items) > 1", True),
        ("len(items) + n // 3 == 4", True),
        ("max(n, self.g) < 9", True),
        ("-n < 0", True),
        ("n if flag else other", True),
        ("unknown > 3", None),
        ("unknown > 3 and n < 0", False),
        ("unknown > 3 or n > 0", True),
        ("unknown > 3 and n > 0", None),
        ("n < 'text'", None),
        ("n % 0", None),
        ("n ** 999999999", None),
        ("'a' * n", None),
        ("10**18 * n", None),
        ("run(n)", None),
        ("n.__class__", None),
        ("(lambda: 1)()", None),
        ("[x for x in items]", None),
        ("isinstance(n, torch.Tensor)", None),
        ("not python", None),
        ("n >", None),
    ],
)
def test_truth(code: str, holds: bool | None) -> None:
    assert truth(code, VALUES) is holds


def test_values_are_found_however_they_are_written() -> None:
    assert truth("(self . g)==4", VALUES) is True
    assert normal(" self . g ") == "self.g"
    assert truth("f(x , 1) > 2", {normal("f(x,1)"): 3}) is True


def test_values_put_in() -> None:
    assert with_values("n > self.g", VALUES) == "8 > 4"
    assert with_values("self.other > self.g", VALUES) == "self.other > 4"
    assert with_values("n >", VALUES) == "n >"


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("8", 8),
        ("-3", -3),
        ("262,144", 262144),
        ("3.5", 3.5),
        ("1e-5", 1e-5),
        ("None", None),
        ("True", True),
        ("'half'", "half"),
        ("half", "half"),
        ("['a', 'b']", ["a", "b"]),
        ("{ hermes, llama3_json }", ["hermes", "llama3_json"]),
        ("{'EngineCore_0': 1}", {"EngineCore_0": 1}),
        ("Config(a=1, b=2)", "Config(a=1, b=2)"),
        ("{A: [x, y]}", "{A: [x, y]}"),
        ("3.18 GiB", "3.18 GiB"),
        ("[" * 3000, "[" * 3000),
        ("9" * 30, float("9" * 30)),
    ],
)
def test_reading_values(text: str, value: Any) -> None:
    assert read_value(text) == value
    assert type(read_value(text)) is type(value)


@given(st.text(max_size=60))
def test_no_text_breaks_it(text: str) -> None:
    read_value(text)
    truth(text, VALUES)
    with_values(text, VALUES)
