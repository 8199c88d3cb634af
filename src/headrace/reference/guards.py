"""When a site is reached."""

from __future__ import annotations

import ast

from headrace.reference.flow import Module
from headrace.reference.records import Condition


class Guards:
    """Finds the conditions of the sites of one module."""

    def __init__(self, module: Module) -> None:
        self._module = module

    def condition(self, statement: ast.stmt) -> Condition:
        """The condition under which a statement runs."""
        return Condition()
