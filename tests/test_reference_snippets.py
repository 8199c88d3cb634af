"""A check before calling raises when the site would, or there is none."""

from __future__ import annotations

import pytest

from headrace.reference.records import Atom, Condition, Placeholder, Site, Template
from headrace.reference.snippets import check_before_calling

TEMPLATE: Template = (
    "group {",
    Placeholder("self.config.n"),
    "} of ",
    Placeholder("size"),
    " in ",
    Placeholder("name()"),
)


def site(*codes: str, complete: bool = True, kind: str = "other", error_class: str = "ValueError") -> Site:
    atoms = tuple(Atom(code, 1, kind=kind) for code in codes)
    return Site("a.py", 1, 1, "f", error_class, "raise", (TEMPLATE,), Condition(atoms, complete))


def test_it_raises_the_same() -> None:
    snippet = check_before_calling(site("self.config.n > size", "size > 0 or self.on"))
    assert snippet is not None
    names: dict[str, object] = {}
    exec(snippet, names)
    check = names["check"]
    assert callable(check)
    check(3, 4, False)
    check(3, -1, False)
    with pytest.raises(ValueError, match=r"group \{8\} of 4 in name\(\)"):
        check(8, 4, False)


@pytest.mark.parametrize(
    "code",
    [
        "probe(n) > 3",
        "n > LIMIT",
        "Mode.FAST == n",
        "any(x for x in n)",
        "torch.cuda.is_available()",
        "n[0].x > 3",
        "n >",
    ],
)
def test_what_needs_more_than_its_inputs(code: str) -> None:
    assert check_before_calling(site(code)) is None


def test_an_incomplete_condition() -> None:
    assert check_before_calling(site("n > 3", complete=False)) is None
    assert check_before_calling(site()) is None
    assert check_before_calling(site("n > 3", kind="handler")) is None


def test_names_that_collide_or_are_reserved() -> None:
    snippet = check_before_calling(
        site("a.n > b.n and self.lambda_ > 1 and isinstance(a.n, int)", error_class="mill.Bad")
    )
    assert snippet is not None
    assert snippet.startswith("def check(n, n_, lambda_):")
    assert "raise ValueError(" in snippet
    compile(snippet, "snippet", "exec")
