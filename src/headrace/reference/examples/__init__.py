"""For each error of Headrace: what leads to it, and the same without it. All of them are run by the tests.

A step is a command line (`headrace ...`, one a line), a server with requests to it (`headrace serve ...`, then a
`curl` a line) or Python. It runs in an empty directory; an example with a
`checkpoint` finds a small one in `models/tiny`, as `save_pretrained` writes it.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """Steps that raise one error, and steps that do not."""

    error: str
    """The name of the class."""
    before: str
    after: str
    given: str = ""
    """Python that comes before either."""
    checkpoint: bool = False
    """A small checkpoint is there. Examples without one need no torch."""


def examples() -> dict[str, Example]:
    """Every example by the name of its error."""
    from headrace.reference.examples import (
        of_benchmarks,
        of_files,
        of_modules,
        of_plans,
        of_quantizing,
        of_runs,
        of_servers,
        of_settings,
    )

    modules = (of_settings, of_files, of_quantizing, of_runs, of_modules, of_plans, of_servers, of_benchmarks)
    return {example.error: example for module in modules for example in module.EXAMPLES}
