"""How not to run into an error, and how to catch it: as far as the source tells. Nothing here is advice of ours.

flags that set the values which are tested
what to catch where the error arrives: the class and those above it, or what pydantic wraps it in
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from headrace.reference import commands
from headrace.reference.hierarchy import WRAPPED_BY_PYDANTIC, above
from headrace.reference.matching import Catalogue
from headrace.reference.records import Expectation, Site
from headrace.reference.solve import settable_names
from headrace.reference.statements import Statement

_PYDANTIC = re.compile(r"(?:pydantic\.)?(?:field_validator|model_validator|root_validator|validator)\(")
_EVERYTHING = {"Exception", "BaseException"}


def prevention(site: Site, catalogue: Catalogue) -> list[Statement]:
    """What sets the values that are tested, and what catches the error."""
    return [*_flags(site, catalogue), *_catching(site, catalogue)]


def _flags(site: Site, catalogue: Catalogue) -> Iterator[Statement]:
    atoms = [atom for atom in site.condition.atoms if not atom.early_exit]
    names = dict.fromkeys(name for atom in atoms for name in settable_names(atom.substituted or atom.code))
    known = catalogue.flags()
    flags = dict.fromkeys(flag for name in names if (flag := commands.flag_of(name, known)))
    if flags:
        lines = (min(atom.line for atom in atoms), max(atom.line for atom in atoms))
        listed = _listed([f"`{flag}`" for flag in flags], "and")
        yield Statement(f"What is tested is set by {listed}.", "guard", site.qualname, site.file, lines)


def _catching(site: Site, catalogue: Catalogue) -> Iterator[Statement]:
    if site.kind not in ("raise", "reraise") or site.caught_locally:
        return
    name = site.error_class.rpartition(".")[2]
    higher = above(name, catalogue.bases(name))
    owner = site.qualname.rpartition(".")[0]
    if owner and WRAPPED_BY_PYDANTIC.intersection((name, *higher)) and any(map(_PYDANTIC.match, site.decorators)):
        text = f"pydantic wraps it: where `{owner}` is made, `except pydantic.ValidationError` catches it."
    else:
        others = [f"`except {each}`" for each in higher if each not in _EVERYTHING]
        more = f", and so does {_listed(others, 'or')}" if others else ""
        text = f"`except {site.error_class}` catches it{more}."
    yield Statement(text, "guard", site.qualname, site.file, (site.line, site.end_line))


def expected_by(expected: Expectation) -> Statement:
    """What one of the package's own tests says."""
    file = expected.file.removeprefix("../")
    return Statement(
        f"`{expected.test}` in `{file}` expects this error.",
        "test",
        expected.test,
        file,
        (expected.line, expected.end_line),
    )


def _listed(parts: list[str], word: str) -> str:
    return f"{', '.join(parts[:-1])} {word} {parts[-1]}" if len(parts) > 1 else parts[0]
