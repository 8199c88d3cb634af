"""Every error can be built from its example, travels between processes, and stands where the drawing says."""

from __future__ import annotations

import builtins
import copy
import pickle
import re

import pytest

from headrace import errors
from headrace.errors import HeadraceError, concrete_errors


def own(classes: object) -> list[type[HeadraceError]]:
    """Without the classes that other tests have made up."""
    return [cls for cls in classes if cls.__module__ == "headrace.errors"]  # type: ignore[attr-defined]


CONCRETE = own(concrete_errors())
ALL = [value for value in vars(errors).values() if isinstance(value, type) and issubclass(value, HeadraceError)]
BRANCHES = [cls for cls in ALL if not cls.template and cls is not HeadraceError]

every_error = pytest.mark.parametrize("cls", CONCRETE, ids=lambda cls: cls.__name__)


@every_error
def test_it_renders_from_its_example(cls: type[HeadraceError]) -> None:
    error = cls(**cls.example)
    assert error.facts == cls.example
    assert str(error) == error.message
    assert error.message == (f"{error.what}\n{error.fix}" if cls.remedy else error.what)
    assert error.args == (error.message,)


@every_error
def test_facts_are_shown(cls: type[HeadraceError]) -> None:
    """The words change with each fact, so no fact is asked for in vain."""
    for name, value in cls.example.items():
        if isinstance(value, str):
            other = f"{value} (another)"
        elif isinstance(value, int):
            other = value * 8 + 1
        else:
            other = [*value, "another"]
        assert cls(**{**cls.example, name: other}).message != cls(**cls.example).message, name


@every_error
@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_it_survives_pickling(cls: type[HeadraceError], protocol: int) -> None:
    error = cls(**cls.example)
    back = pickle.loads(pickle.dumps(error, protocol))
    assert type(back) is cls
    assert back.facts == error.facts
    assert str(back) == str(error)


@every_error
def test_it_survives_copying(cls: type[HeadraceError]) -> None:
    error = cls(**cls.example)
    for back in (copy.copy(error), copy.deepcopy(error)):
        assert (type(back), back.facts, str(back)) == (cls, error.facts, str(error))


@every_error
def test_facts_are_passed_by_name_and_none_is_left_out(cls: type[HeadraceError]) -> None:
    with pytest.raises(TypeError):
        cls("a message")  # type: ignore[call-arg]
    with pytest.raises(TypeError):
        cls(**cls.example, made_up=1)
    for name in cls.example:
        with pytest.raises(TypeError, match=name):
            cls(**{key: value for key, value in cls.example.items() if key != name})


@every_error
def test_it_says_what_it_is_about(cls: type[HeadraceError]) -> None:
    assert cls.__doc__
    assert not cls.__doc__.startswith(f"{cls.__name__}("), "a generated docstring explains nothing"


@every_error
def test_it_is_caught_as_what_it_claims_to_be(cls: type[HeadraceError]) -> None:
    """By callers who know only Python's own exceptions, and by those who know ours."""
    claims = [base for base in cls.__mro__ if issubclass(base, Exception)]
    for claim in claims:
        with pytest.raises(claim):
            raise cls(**cls.example)


def test_a_branch_is_no_error_to_raise() -> None:
    for branch in BRANCHES:
        with pytest.raises(AssertionError, match="branch"):
            branch()


def test_exit_codes_tell_what_to_mend() -> None:
    """2 if another command or another file helps, 1 if the same command may work the next time."""
    assert {cls.exit_code for cls in CONCRETE} == {1, 2}
    assert all(cls.exit_code == 2 for cls in CONCRETE if issubclass(cls, errors.UserError | errors.CheckpointError))


def test_ids_are_short_hex_and_unique() -> None:
    ids = [cls.error_id() for cls in CONCRETE]
    assert all(re.fullmatch("[0-9a-f]{16}", error_id) for error_id in ids)
    assert len(set(ids)) == len(ids)


def test_an_id_changes_with_the_words_and_with_nothing_else() -> None:
    cls = errors.MissingPackage
    assert cls.error_id() == cls.error_id()

    def reworded(name: str, template: str, remedy: str = "") -> str:
        return type(name, (HeadraceError,), {"template": template, "remedy": remedy}).error_id()

    assert reworded("MissingPackage", cls.template) == cls.error_id()
    assert reworded("MissingPackage", cls.template, "Another remedy.") == cls.error_id()
    assert reworded("MissingPackage", "Other words.") != cls.error_id()
    assert reworded("MissingWheel", cls.template) != cls.error_id()


def test_sizes_and_lists_are_written_for_people() -> None:
    error = errors.BudgetTooSmall(**errors.BudgetTooSmall.example)
    assert "512 MiB" in error.what
    assert "--memory 1.5GiB" in error.fix
    assert "it has: nothing" in errors.NoWeights(directory="d", found=[]).what
    assert "it has: a, b" in errors.NoWeights(directory="d", found=["a", "b"]).what


# --- the drawing --------------------------------------------------------------------------------------------------

DRAWN = re.compile(
    r"^    (?P<indent>(?:│   |    )*)[├└]── (?P<name>\w+)(?P<more> \.\.\.)?(?: \(also an? (?P<claim>\w+)\))?"
)


def drawing() -> list[tuple[str, str, str | None]]:
    """Name, name of the parent and claimed builtin of each class in the drawing on top of errors.py."""
    assert errors.__doc__
    path = ["HeadraceError"]
    rows = []
    for line in errors.__doc__.splitlines():
        if match := DRAWN.match(line):
            depth = len(match["indent"]) // 4 + 1
            del path[depth:]
            rows.append((match["name"], path[-1], match["claim"]))
            path.append(match["name"])
    return rows


@pytest.mark.parametrize(("name", "parent", "claim"), drawing())
def test_what_is_drawn_is_so(name: str, parent: str, claim: str | None) -> None:
    cls = getattr(errors, name)
    assert cls.__bases__[0].__name__ == parent
    drawn_bases = () if claim is None else (getattr(builtins, claim),)
    assert cls.__bases__[1:] == drawn_bases


def test_what_is_so_is_drawn() -> None:
    """Every child of the root and every branch; the leaves of a branch may be left to the file."""
    drawn = {name for name, _, _ in drawing()}
    assert {cls.__name__ for cls in BRANCHES} <= drawn
    assert {cls.__name__ for cls in own(HeadraceError.__subclasses__())} <= drawn
    assert len(drawn) == len(drawing()), "a class is drawn twice"


def test_only_what_is_drawn_is_a_builtin_too() -> None:
    """A leaf takes Python's exceptions from its branch, where the drawing shows them."""
    claims = {name: claim for name, _, claim in drawing()}
    for cls in ALL:
        if cls is not HeadraceError and cls.__name__ not in claims:
            assert len(cls.__bases__) == 1, cls.__name__
