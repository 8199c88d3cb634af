"""Flags are found by the name of a field, and a command line gets values that work."""

from __future__ import annotations

from typing import Any

import pytest

from headrace.reference.commands import corrected, flag_of, values_given
from headrace.reference.records import Atom, Condition
from headrace.reference.solve import fixes

FLAGS = {
    "--tensor-parallel-size": "--tensor-parallel-size",
    "-tp": "--tensor-parallel-size",
    "--enable-lora": "--enable-lora",
    "--no-enable-lora": "--no-enable-lora",
    "--dtype": "--dtype",
    "--max-loras": "--max-loras",
}


@pytest.mark.parametrize(
    ("expr", "flag"),
    [
        ("parallel_config.tensor_parallel_size", "--tensor-parallel-size"),
        ("tensor_parallel_size", "--tensor-parallel-size"),
        ("self._dtype", "--dtype"),
        ("len(dtype)", "--dtype"),
        ("self.hidden_size", None),
        ("'x'[0]", None),
    ],
)
def test_the_flag_of_a_field(expr: str, flag: str | None) -> None:
    assert flag_of(expr, FLAGS) == flag


@pytest.mark.parametrize(
    ("command", "value"),
    [
        ("serve m --tensor-parallel-size 3", 3),
        ("serve m --tensor-parallel-size=3", 3),
        ("serve m --tensor_parallel_size 3", 3),
        ("serve m -tp 3 --dtype half", 3),
        ("serve m -tp 1 \\\n -tp 3", 3),
    ],
)
def test_what_a_command_gives(command: str, value: Any) -> None:
    assert values_given(command, ["config.tensor_parallel_size"], FLAGS) == {"config.tensor_parallel_size": value}


def test_a_flag_without_a_value_is_on() -> None:
    assert values_given("serve --enable-lora --dtype half", ["x.enable_lora"], FLAGS) == {"x.enable_lora": True}


def after(command: str, code: str, values: dict[str, Any]) -> str | None:
    made = corrected(command, fixes(Condition((Atom(code, 1),), complete=True), values), FLAGS)
    return made and made.after


HEADS = ("heads % tensor_parallel_size != 0", {"heads": 64, "tensor_parallel_size": 3})


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        ("serve m -tp 3 --dtype half", "serve m -tp 4 --dtype half"),
        ("serve m --tensor-parallel-size=3", "serve m --tensor-parallel-size=4"),
        ("serve m --tensor_parallel_size 3", "serve m --tensor_parallel_size 4"),
        ("serve 'a b' -tp 3", "serve 'a b' -tp 4"),
        ("serve m", "serve m --tensor-parallel-size 4"),
        ("serve 'broken -tp 3", "serve ''\"'\"'broken' -tp 4"),
    ],
)
def test_a_corrected_value(command: str, expected: str) -> None:
    assert after(command, *HEADS) == expected


def test_what_the_command_says_is_changed_before_anything_is_added() -> None:
    values = {"tensor_parallel_size": 8, "max_loras": 4}
    assert after("serve --max-loras 4", "tensor_parallel_size > max_loras", values) == "serve --max-loras 8"


def test_switches() -> None:
    assert after("serve m --enable-lora", "enable_lora", {"enable_lora": True}) == "serve m --no-enable-lora"
    assert after("serve m", "not enable_lora", {"enable_lora": False}) == "serve m --enable-lora"


def test_what_no_flag_sets_is_left() -> None:
    assert after("serve m -tp 3", "hidden % 7 != 0", {"hidden": 64}) is None


def test_both_lines_and_the_change_are_told() -> None:
    made = corrected("serve m -tp 3", fixes(Condition((Atom(HEADS[0], 1),), complete=True), HEADS[1]), FLAGS)
    assert made is not None
    assert (made.before, made.changes) == ("serve m -tp 3", (("--tensor-parallel-size", "-tp 3", "-tp 4"),))
