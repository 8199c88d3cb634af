"""A fix makes its condition false, and says so only if that was computed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from headrace.reference.evaluate import truth
from headrace.reference.records import Atom, Condition
from headrace.reference.solve import Fix, fixes, settable_names


def solved(code: str | tuple[str, ...], values: Mapping[str, Any]) -> list[Fix]:
    codes = (code,) if isinstance(code, str) else code
    return fixes(Condition(tuple(Atom(each, 1) for each in codes), complete=True), values)


def told(found: list[Fix]) -> list[tuple[str, str, Any, bool]]:
    return [(fix.strategy, fix.changes[0].expr, fix.changes[0].value, fix.verified) for fix in found]


@pytest.mark.parametrize(
    ("code", "values", "expected"),
    [
        ("a % b != 0", {"a": 64, "b": 3}, [("divisor", "b", 4, True), ("multiple", "a", 63, True)]),
        ("a % b", {"a": 64, "b": 3}, [("divisor", "b", 4, True), ("multiple", "a", 63, True)]),
        ("not a % b == 0", {"a": 10, "b": 4}, [("divisor", "b", 5, True), ("multiple", "a", 8, True)]),
        ("x % 8 != 0", {"x": 100}, [("multiple", "x", 96, True)]),
        ("n > g", {"n": 8, "g": 4}, [("bound", "n", 4, True), ("bound", "g", 8, True)]),
        ("n >= g", {"n": 8, "g": 4}, [("bound", "n", 3, True), ("bound", "g", 9, True)]),
        ("step < 1", {"step": 0}, [("bound", "step", 1, True)]),
        ("not 0 < x <= 1", {"x": 1.5}, [("bound", "x", 1, True)]),
        ("x != 3", {"x": 4}, [("equal", "x", 3, True)]),
        ("x not in ('auto', 'half')", {"x": "atuo"}, [("member", "x", "auto", True)]),
        ("x not in sizes", {"x": 12, "sizes": [8, 16, 32]}, [("member", "x", 8, True)]),
        ("flag", {"flag": True}, [("unset", "flag", False, True)]),
        ("not self.flag", {"self.flag": False}, [("set", "self.flag", True, True)]),
        ("x is None", {}, [("set", "x", None, False)]),
        ("x is not None", {"x": 3}, [("unset", "x", None, True)]),
        ("x is True", {"x": True}, [("set", "x", False, True)]),
        ("a and not b", {"a": True, "b": False}, [("unset", "a", False, True), ("set", "b", True, True)]),
        ("not isinstance(x, (int, float))", {"x": "a"}, [("type", "x", None, False)]),
        ("n > LIMIT", {"n": 8}, [("bound", "n", None, False)]),
        ("f(x) > 3", {}, []),
    ],
)
def test_one_condition(code: str, values: dict[str, Any], expected: list[tuple[str, str, Any, bool]]) -> None:
    assert told(solved(code, values)) == expected


def test_words() -> None:
    divisor, _ = solved("a % b != 0", {"a": 64, "b": 3})
    assert (divisor.changes[0].words, divisor.changes[0].others) == ("a divisor of 64", (2, 1))
    (type_fix,) = solved("not isinstance(x, (int, float))", {})
    assert type_fix.changes[0].words == "int or float"


def test_the_innermost_test_is_the_reason() -> None:
    found = solved(("backend == 'prefetch' or g > 0", "n > g"), {"n": 8, "g": 4})
    assert told(found) == [("bound", "n", 4, True), ("bound", "g", 8, True)]


def test_outer_tests_help_if_the_reason_cannot_be_computed() -> None:
    found = solved(("mode == 'fast'", "not check(x)"), {"mode": "fast"})
    assert [fix.changes[0].words for fix in found] == ["other than 'fast'"]


def test_all_parts_of_an_or_have_to_change() -> None:
    (fix, *_) = solved("a > 3 or b > 3", {"a": 5, "b": 6})
    assert [(change.expr, change.value) for change in fix.changes] == [("a", 3), ("b", 3)]
    assert fix.verified


def test_what_only_says_that_earlier_checks_passed_is_no_reason() -> None:
    condition = Condition((Atom("n < 0", 1, early_exit=True), Atom("n > 3", 2)), complete=True)
    assert told(fixes(condition, {"n": 5})) == [("bound", "n", 3, True)]


def test_a_constant_is_not_to_be_changed() -> None:
    assert settable_names("self.n > LIMIT and torch.float16 == kind and Mode.FAST") == ["self.n", "kind"]


VALUES = st.integers(0, 10_000)


@given(VALUES, VALUES, st.sampled_from(["a > b", "a >= b", "a < b", "a <= b", "a % b != 0", "a != b", "not a == b"]))
def test_every_checked_fix_makes_the_condition_false(a: int, b: int, code: str) -> None:
    assume(truth(code, {"a": a, "b": b}))
    found = solved(code, {"a": a, "b": b})
    assert found
    for fix in found:
        changed = {change.expr: change.value for change in fix.changes if change.has_value}
        if fix.verified:
            assert truth(code, {"a": a, "b": b} | changed) is False
            for other in fix.changes[0].others:
                assert truth(code, {"a": a, "b": b, fix.changes[0].expr: other}) is False
