"""The nouns of the error reference, frozen. Knows no parser, no database and no page.

A *site* is a place in the source that raises (or returns) an error. Sites whose canonical templates are equal share a
*page*, and the page has the id that users see.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

PlaceholderKind = Literal["int", "float", "bool", "str", "quoted", "class", "list", "exception", "any"]
SiteKind = Literal["raise", "assert", "returned", "reraise"]
Basis = Literal["guard", "docstring", "comment", "test", "note", "model"]


@dataclass(frozen=True, slots=True)
class Placeholder:
    """A value that is put into a message when it is raised."""

    expr: str
    """As written in the source: `self.prefetch.offload_num_in_group`."""
    kind: PlaceholderKind = "any"
    """What a value printed here can look like, as far as the source tells (`len(x)` is an int, `{x!r}` quoted)."""


Piece = str | Placeholder
Template = tuple[Piece, ...]
"""Literal text and placeholders in order; no two literals stand side by side."""


@dataclass(frozen=True, slots=True)
class Atom:
    """One test on the way to a site. The error is raised when every atom holds."""

    code: str
    """As written in the source, with the polarity applied: `num_in_group > group_size`."""
    line: int
    substituted: str | None = None
    """The same in terms of inputs, local names replaced by their only definition; None if nothing was replaced."""
    kind: str = "other"
    """modulo, order, equality, membership, none, truth, isinstance, exists, handler, always, other."""
    early_exit: bool = False
    """It only says that an earlier check did not leave the function: context, not the reason."""


@dataclass(frozen=True, slots=True)
class Condition:
    """When a site raises."""

    atoms: tuple[Atom, ...] = ()
    complete: bool = False
    """Whether `atoms` are the whole condition; if not, `incomplete` says why. A wrong condition is worse than none."""
    incomplete: str | None = None
    reassigned: tuple[str, ...] = ()
    """What the function was given and sets anew before it is tested: a caller does not hold what is compared."""


@dataclass(frozen=True, slots=True)
class Pair:
    """Values with which a site's own function was run: it raised with the first, and not with the second."""

    before: tuple[tuple[str, str], ...]
    """Expression and value, as code; everything else was stand-ins."""
    after: tuple[tuple[str, str], ...]
    """Only what changed."""
    ends: Literal["returns", "goes on"]
    """With the second the function returned, or went on below the error and then asked for more than stand-ins."""


@dataclass(frozen=True, slots=True)
class Site:
    """A place in the source that raises an error."""

    file: str
    """Relative to the folder that holds the package: `vllm/config/offload.py`."""
    line: int
    """Of the `raise`, `assert` or `return`; 1 is the first."""
    end_line: int
    qualname: str
    """`OffloadConfig.validate_offload_config`, or `<module>`."""
    error_class: str
    """As written: `ValueError`, `argparse.ArgumentTypeError`."""
    kind: SiteKind
    templates: tuple[Template, ...]
    """Every form the message can take (optional parts, branches), the fullest first; empty if it has no message."""
    condition: Condition = field(default_factory=Condition)
    fragment: bool = False
    """The template is one piece of a message that is put together from several."""
    wrapper: bool = False
    """The message only carries another error's message."""
    caught_locally: bool = False
    """A handler around it in the same function catches it, so that no user sees it."""
    ordinal: int = 0
    """Counts the sites of one template in one function."""
    function_line: int = 0
    decorators: tuple[str, ...] = ()
    pair: Pair | None = None
    """How the condition was tried, if it was."""


@dataclass(frozen=True, slots=True)
class Expectation:
    """A test of the package itself that is content only if an error is raised."""

    file: str
    """Relative to the folder that holds the package: `../tests/test_offload.py`."""
    line: int
    """The first of what is expected to fail."""
    end_line: int
    test: str
    """`TestOffload.test_group_size`."""
    classes: tuple[str, ...]
    """One of these is expected, or a class below one."""
    pattern: str
    """Regular expression that is searched for in the message."""
    call: str
    """The lines that are expected to fail; of a parametrised test with the values of the case."""


@dataclass(frozen=True, slots=True)
class Page:
    """All sites of one canonical template: what has an id."""

    id: str
    """16 hex digits over package, error class and canonical template (placeholders as `{}`, white space collapsed)."""
    package: str
    error_class: str
    template: Template
    sites: tuple[Site, ...]


@dataclass(frozen=True, slots=True)
class History:
    """The life of a page over the versions of its package that were looked at."""

    introduced: str | None = None
    """The version that it came with; None if the first version that was looked at had it."""
    removed: str | None = None
    """The version that has it no more; None if the current one has it."""
    successor: str | None = None
    """The id of the page that its message was reworded to."""
    predecessors: tuple[str, ...] = ()
    """Ids of pages that were reworded to this one."""


@dataclass(frozen=True, slots=True)
class Prose:
    """What a model wrote about a page from its source alone."""

    page: str
    """The id."""
    fingerprint: str
    """Of what the model was given: what it wrote counts only as long as that is the same."""
    model: str
    sentences: tuple[str, ...]
    """Those that name nothing which is not in the source; perhaps none."""
