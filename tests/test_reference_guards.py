"""The condition of a site: complete and right, or marked incomplete."""

from __future__ import annotations

import textwrap

import pytest

from headrace.reference.extract import finished, read_file
from headrace.reference.records import Condition, Site
from headrace.reference.sentences import condition_sentence
from headrace.reference.snippets import check_before_calling


def last(source: str) -> Site:
    """The last site of a file."""
    return list(finished([read_file("package/module.py", textwrap.dedent(source).encode())]))[-1]


def told(source: str) -> tuple[list[str], list[str]]:
    """The reasons and the earlier checks of the last site, whose condition is complete."""
    condition = last(source).condition
    assert condition.complete, condition.incomplete
    reasons = [atom.code for atom in condition.atoms if not atom.early_exit]
    return reasons, [atom.code for atom in condition.atoms if atom.early_exit]


def why_incomplete(source: str) -> str:
    condition = last(source).condition
    assert not condition.complete, condition
    return condition.incomplete or ""


# --- asserts in earlier blocks --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("before", "early"),
    [
        ("assert x", ["x"]),
        ("if y:\n        assert x", ["not y or x"]),
        ("if y:\n        pass\n    else:\n        assert x", ["y or x"]),
        ("if y:\n        assert x\n    else:\n        return", ["x", "y"]),
        ("with y:\n        assert x", ["x"]),
        ("for e in x:\n        assert e.ok", ["not any((not e.ok for e in x))"]),
        ("if y:\n        assert x\n        return", ["not y"]),
    ],
)
def test_an_assert_before_counts_where_it_was_reached(before: str, early: list[str]) -> None:
    found = told(f"def f(x, y, z):\n    {before}\n    if z:\n        raise ValueError('no')")
    assert found[0] == ["z"]
    assert sorted(found[1]) == sorted(early)


@pytest.mark.parametrize(
    "before",
    [
        "while y:\n        assert x",
        "try:\n        assert x\n    except AssertionError:\n        pass",
        "with suppress(AssertionError):\n        assert x",
        "for e in x:\n        n = g(e)\n        assert n",
    ],
)
def test_an_assert_before_that_no_test_can_tell(before: str) -> None:
    assert "too involved" in why_incomplete(f"def f(x, y, z):\n    {before}\n    if z:\n        raise ValueError('no')")


# --- loops ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "other",
    [
        "if e.a:\n            raise KeyError(e)",
        "assert e.a",
        "if e.a:\n            break",
        "if e.a:\n            return",
        "if e.a:\n            sys.exit(1)",
        "for d in e:\n            assert d",
    ],
)
@pytest.mark.parametrize("first", [True, False])
def test_a_turn_before_may_have_ended_the_loop(other: str, first: bool) -> None:
    own = "if e.b:\n            raise ValueError('no')"
    body = f"{other}\n        {own}" if first else f"{own}\n        {other}"
    source = f"def f(xs):\n    for e in xs:\n        {body}"
    site = next(
        site for site in finished([read_file("package/module.py", source.encode())]) if site.error_class == "ValueError"
    )
    assert site.condition.incomplete == "an earlier turn of the loop at line 2 can end it"


def test_a_loop_with_this_error_alone() -> None:
    source = """
        def f(xs):
            for e in xs:
                if e.skip:
                    continue
                if e.b:
                    raise ValueError("no")
    """
    assert told(source) == (["for e in xs", "e.b"], ["not e.skip"])


def test_after_a_loop_that_errors_can_end() -> None:
    source = """
        def f(xs, z):
            for e in xs:
                if e.a:
                    raise KeyError(e)
                if e.b:
                    raise TypeError(e)
            if z:
                raise ValueError("no")
    """
    assert told(source) == (
        ["z"],
        ["not any((e.a for e in xs))", "not any((not e.a and e.b for e in xs))"],
    )


def test_the_else_of_a_loop_that_errors_can_end() -> None:
    source = """
        def f(xs):
            for e in xs:
                if e.a:
                    raise KeyError(e)
                if e.b:
                    break
            else:
                raise ValueError("no")
    """
    reasons, _ = told(source)
    assert sorted(reasons) == ["not any((e.a for e in xs))", "not any((not e.a and e.b for e in xs))"]


def test_what_a_loop_leaves_behind_is_not_what_was_there_before() -> None:
    """A branch that ends a turn changes what comes after the loop, too."""
    source = """
        def f(xs):
            found = None
            for e in xs:
                if e.ok:
                    found = e
                    break
            if found is None:
                raise ValueError("no")
    """
    (atom,) = last(source).condition.atoms
    assert (atom.code, atom.substituted) == ("found is None", None)


# --- handlers -------------------------------------------------------------------------------------------------------

HANDLERS = """
    def f(x):
        try:
            n = int(x)
        except {above}:
            {does}
        except {own}:
            raise ValueError("no")
"""


@pytest.mark.parametrize(
    ("above", "own", "code"),
    [
        ("KeyError", "TypeError", "n = int(x) raises TypeError"),
        ("KeyError", "Exception", "n = int(x) raises Exception but not KeyError"),
        ("KeyError", "LookupError", "n = int(x) raises LookupError but not KeyError"),
        ("zmq.Again", "TypeError", "n = int(x) raises TypeError but not zmq.Again"),
        ("(KeyError, OSError)", "OSError", "n = int(x) raises OSError but not (KeyError, OSError)"),
    ],
)
def test_a_handler_gets_what_those_above_leave(above: str, own: str, code: str) -> None:
    assert told(HANDLERS.format(above=above, own=own, does="return")) == ([code], [])


def test_a_handler_that_gets_less_as_a_sentence() -> None:
    site = last(HANDLERS.format(above="KeyError", own="Exception", does="return"))
    assert condition_sentence(site.condition) == "Raised when `n = int(x)` raises `Exception` but not `KeyError`."


@pytest.mark.parametrize(
    ("above", "own", "early"),
    [
        ("KeyError", "TypeError", ["n = int(x) does not raise TypeError"]),
        ("KeyError", "Exception", None),
    ],
)
def test_after_a_try_whose_handlers_above_go_on(above: str, own: str, early: list[str] | None) -> None:
    source = HANDLERS.format(above=above, own=own, does="pass") + "        if x:\n            raise KeyError('late')\n"
    if early is None:
        assert "too involved" in why_incomplete(source)
    else:
        assert told(source) == (["x"], early)


def test_checks_before_a_handler_or_a_case_are_told_once() -> None:
    assert told("def f(x, y):\n    if y:\n        return\n" + textwrap.indent(BODY, "    "))[1] == ["not y"]


BODY = """match x:
    case 1:
        raise ValueError("no")
"""


def test_a_block_that_errors_leave_quietly() -> None:
    source = """
        def f(x, d):
            with contextlib.suppress(KeyError):
                return d[x]
            raise ValueError("no")
    """
    assert "too involved" in why_incomplete(source)


def test_a_case_below_one_that_goes_on() -> None:
    source = """
        def f(x, y, z):
            match x:
                case 1 if y:
                    pass
                case 1:
                    return
            if z:
                raise ValueError("no")
    """
    assert told(source) == (["z"], ["x == 1 and y or x != 1"])


# --- what changes ---------------------------------------------------------------------------------------------------


def test_one_attribute_says_nothing_about_another() -> None:
    assert told("def f(self):\n    if self.a:\n        return\n    self.b = 1\n    raise ValueError('no')")[0] == [
        "not self.a"
    ]
    assert "`self.a` may change" in why_incomplete(
        "def f(self):\n    if self.a:\n        return\n    self.a = 1\n    raise ValueError('no')"
    )


def test_a_call_looks_into_what_it_is_given() -> None:
    assert "`c.n` may change" in why_incomplete(
        "def f(c):\n    if good(c):\n        return\n    c.n = 1\n    raise ValueError('no')"
    )


def test_a_test_of_sets_is_not_turned_round() -> None:
    assert told("def f(a, b):\n    if not a <= b:\n        raise ValueError('no')")[0] == ["not a <= b"]


@pytest.mark.parametrize(
    ("final", "complete"), [("if wrong:", True), ("if len(wrong) > 0:", True), ("if strict and wrong:", False)]
)
def test_a_piece_of_a_message_is_shown_if_the_message_is(final: str, complete: bool) -> None:
    source = f"""
        def f(rank, most, strict):
            wrong = []
            if rank > most:
                wrong.append(f"rank {{rank}} is above {{most}}.")
            {final}
                raise ValueError(" ".join(wrong))
    """
    condition: Condition = last(source).condition
    assert [atom.code for atom in condition.atoms] == ["rank > most"]
    assert condition.complete is complete


# --- parameters that are set anew -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "before",
    ["n = round(n)", "if m:\n        n = m", "for n in m:\n        pass", "n += 1"],
)
def test_no_check_before_calling_for_what_a_caller_does_not_hold(before: str) -> None:
    site = last(f"def f(n, m):\n    {before}\n    if n > 3:\n        raise ValueError('no')")
    assert site.condition.complete
    assert site.condition.reassigned == ("n",)
    assert check_before_calling(site) is None


def test_a_check_before_calling_for_what_it_does() -> None:
    site = last("def f(n, m):\n    m = n\n    if n > 3:\n        raise ValueError('no')")
    assert site.condition.reassigned == ()
    assert check_before_calling(site) is not None


def test_an_attribute_that_is_set_before_the_test() -> None:
    site = last("def f(self):\n    self.n = self.n or 1\n    if self.n > 3:\n        raise ValueError('no')")
    assert site.condition.reassigned == ("self.n",)
