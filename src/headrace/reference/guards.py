"""The condition of a site: what holds on the way from the start of its function to it. Knows no messages.

Precision comes before completeness: a condition that is marked complete holds exactly when the site is reached, apart
from errors that calls raise on the way. What cannot be told for certain makes it incomplete, with the reason.

The walk goes from the site outwards and so backwards in time. `_Walk.changed` holds what gets another value between the
current point and the site: a test that reads any of it says nothing about the values at the site.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from headrace.reference import atoms, exits
from headrace.reference.changes import Changes, conflict
from headrace.reference.definitions import Definitions
from headrace.reference.evaluate import parsed
from headrace.reference.flow import (
    FUNCTIONS,
    LOOPS,
    TRIES,
    WITHS,
    Module,
    Place,
    assigned_names,
    parameters,
    walrus_names,
)
from headrace.reference.patterns import pattern_tests
from headrace.reference.records import Atom, Condition


@dataclass(slots=True)
class Link:
    """One atom with its syntax tree."""

    atom: Atom
    test: ast.expr | None
    """None for what is no expression: `for x in xs`, `int(x) raises ValueError`."""
    at: ast.AST | None = None
    """The statement that evaluated the test."""
    dispatch: bool = False
    """An early exit that returned or went on, and so chose this way; not another error that was not raised."""
    changed: frozenset[str] = frozenset()
    """What gets another value between the test and the site."""


@dataclass(slots=True)
class _Walk:
    """The state on the way outwards."""

    links: list[Link] = field(default_factory=list)
    """The nearest first."""
    changed: set[str] = field(default_factory=set)
    incomplete: str | None = None

    def give_up(self, reason: str) -> None:
        self.incomplete = self.incomplete or reason


class Guards:
    """Finds the conditions of the sites of one module."""

    def __init__(self, module: Module) -> None:
        self._module = module
        self._changes = Changes(module)
        self._definitions = Definitions(module, self._changes)
        self._stays: dict[ast.stmt, list[exits.Stay] | None] = {}
        self._parts: dict[tuple[ast.expr, bool], list[tuple[ast.expr, str, str]]] = {}

    def condition(self, statement: ast.stmt) -> Condition:
        """The condition under which a statement runs, and for an assert, under which it fails."""
        walk = self._walk(statement)
        links = list(reversed(walk.links))
        if all(link.atom.early_exit for link in links):
            # Nothing stands around the site, so that what did not return before is the reason to get there.
            for link in links:
                if link.dispatch:
                    link.atom = replace(link.atom, early_exit=False)
        found = [self._finished(link) for link in links]
        if all(atom.early_exit for atom in found):
            found.append(Atom("always", statement.lineno, kind="always"))
        return Condition(
            tuple(found), walk.incomplete is None, walk.incomplete, self._reassigned(walk, statement, found)
        )

    def _reassigned(self, walk: _Walk, statement: ast.stmt, found: list[Atom]) -> tuple[str, ...]:
        """What the reasons read of the function's inputs and what it may have set anew before."""
        scope = self._module.places[statement].scope
        inputs = {each.arg for each in parameters(scope)} if isinstance(scope, FUNCTIONS) else set()
        trees = [parsed(atom.substituted or atom.code) for atom in found if not atom.early_exit]
        changed = [path for path in walk.changed if path.partition(".")[0] in inputs]
        return tuple(sorted({path for tree in trees if tree and (path := conflict(tree, changed)) is not None}))

    def piece(self, where: ast.stmt, at: ast.Raise, name: str) -> Condition:
        """The condition under which a piece of a message, put in the list `name` by `where`, is raised by `at`."""
        found, end = self.condition(where), self.condition(at)
        known = {(atom.code, atom.line) for atom in found.atoms}
        more = [atom for atom in end.atoms if not (atom.early_exit and (atom.code, atom.line) in known)]
        if not found.complete or (end.complete and all(atom.code in _filled(name) for atom in more)):
            return found
        return replace(found, complete=False, incomplete=f"what decides at line {at.lineno} is another question")

    def _finished(self, link: Link) -> Atom:
        """The atom, if it is a reason, also in terms of what the names in it were made from."""
        if link.atom.early_exit or link.test is None or link.at is None:
            return link.atom
        test = self._definitions.substituted(link.test, link.at, link.changed)
        return (
            link.atom if test is None else replace(link.atom, substituted=ast.unparse(test), kind=atoms.kind_of(test))
        )

    def tests_within(self, statement: ast.stmt, block_owner: ast.AST) -> list[ast.expr] | None:
        """The tests between the start of a block of `block_owner` and a statement in it; None if that is not known."""
        walk = self._walk(statement, stop=block_owner)
        tests = [link.test for link in reversed(walk.links)]
        if walk.incomplete is not None or any(test is None for test in tests):
            return None
        return [test for test in tests if test is not None]

    def changes_of(self, statement: ast.stmt) -> frozenset[str]:
        """What a statement may change."""
        return self._changes.of(statement)

    def _walk(self, statement: ast.stmt, stop: ast.AST | None = None) -> _Walk:
        walk = _Walk()
        if isinstance(statement, ast.Assert):
            self._add(walk, statement.test, False, statement)
        for node, place in self._module.ancestors(statement):
            for earlier in reversed(place.before):
                self._pass(walk, earlier)
            if place.parent is stop:
                break
            self._leave(walk, node, place, statement)
        return walk

    # --- atoms ---

    def _add(
        self, walk: _Walk, test: ast.expr, polarity: bool, at: ast.AST, *, early: bool = False, dispatch: bool = False
    ) -> None:
        """Note that `test` was `polarity` when `at` ran."""
        line = getattr(test, "lineno", 0)
        for part, code, kind in reversed(self._conjuncts(test, polarity)):
            here = getattr(part, "lineno", 0) or line or getattr(at, "lineno", 0)
            self._link(walk, part, Atom(code, here, None, kind, early), at, dispatch=dispatch)
        walk.changed |= set(walrus_names(test))

    def _conjuncts(self, test: ast.expr, polarity: bool) -> list[tuple[ast.expr, str, str]]:
        """The parts of a test with their code and kind."""
        key = (test, polarity)
        if key not in self._parts:
            found = atoms.conjuncts(test, polarity)
            self._parts[key] = [(part, ast.unparse(part), atoms.kind_of(part)) for part in found]
        return self._parts[key]

    def _link(self, walk: _Walk, test: ast.expr, atom: Atom, at: ast.AST, *, dispatch: bool = False) -> None:
        if isinstance(test, ast.Constant):
            walk.give_up("it stands where the source says that nothing comes")
            return
        changed = conflict(test, walk.changed)
        if changed is not None:
            walk.give_up(f"`{changed}` may change between line {atom.line} and the error")
            return
        walk.links.append(Link(atom, test, at, dispatch, frozenset(walk.changed)))

    # --- what ran before, in the same block ---

    def _pass(self, walk: _Walk, earlier: ast.stmt) -> None:
        """Go back over a statement that did not leave the block."""
        walk.changed |= self._changes.of(earlier)
        if earlier not in self._stays:
            self._stays[earlier] = exits.stays(earlier, self)
        stays = self._stays[earlier]
        if stays is None:
            walk.give_up(
                f"what starts at line {earlier.lineno} can leave the function or the loop in a way too involved"
            )
            return
        for stay in reversed(stays):
            if stay.test is None:
                atom = Atom(stay.code, stay.line, None, "handler", True)
                walk.links.append(Link(atom, None, dispatch=stay.dispatch))
            else:
                self._add(walk, stay.test, True, earlier, early=True, dispatch=stay.dispatch)

    # --- what stands around ---

    def _leave(self, walk: _Walk, node: ast.AST, place: Place, site: ast.stmt) -> None:
        """Go from a block to the statement that holds it."""
        parent = place.parent
        if isinstance(parent, ast.If):
            self._add(walk, parent.test, place.field == "body", parent)
        elif isinstance(parent, LOOPS):
            self._leave_loop(walk, parent, place, site)
        elif isinstance(parent, ast.ExceptHandler):
            self._leave_handler(walk, parent)
        elif isinstance(parent, TRIES):
            self._leave_try(walk, parent, place)
        elif isinstance(parent, ast.match_case):
            self._leave_case(walk, parent)
        elif isinstance(parent, WITHS):
            walk.changed |= set(assigned_names(parent))

    def _leave_loop(self, walk: _Walk, loop: ast.AST, place: Place, site: ast.stmt) -> None:
        assert isinstance(loop, LOOPS)
        if place.field == "orelse":
            self._leave_loop_else(walk, loop)
            return
        carried = exits.carried_over(loop, self)
        for link in walk.links:
            if link.test is not None and (name := conflict(link.test, carried)) is not None:
                walk.give_up(f"`{name}` is carried from one turn of the loop to the next")
        if exits.can_end_early(loop, site):
            walk.give_up(f"an earlier turn of the loop at line {loop.lineno} can end it")
        if isinstance(loop, ast.While):
            self._add(walk, loop.test, True, loop)
        else:
            changed = conflict(loop.iter, walk.changed)
            if changed is not None:
                walk.give_up(f"`{changed}` changes while the loop at line {loop.lineno} runs")
            code = f"for {ast.unparse(loop.target)} in {ast.unparse(loop.iter)}"
            walk.links.append(Link(Atom(code, loop.lineno, None, "exists"), None))
        walk.changed |= self._changes.anywhere(loop.body) | set(assigned_names(loop))

    def _leave_loop_else(self, walk: _Walk, loop: ast.AST) -> None:
        assert isinstance(loop, LOOPS)
        walk.changed |= self._changes.anywhere(loop.body) | set(assigned_names(loop))
        tests = exits.never_broken(loop, self)
        if tests is None:
            walk.give_up(f"how the loop at line {loop.lineno} ends is too involved")
        for test in reversed(tests or []):
            self._add(walk, test, True, loop)

    def _leave_handler(self, walk: _Walk, handler: ast.ExceptHandler) -> None:
        attempt = self._module.places[handler].parent
        assert isinstance(attempt, TRIES)
        walk.changed |= self._changes.anywhere(attempt.body)
        if handler.name:
            walk.changed.add(handler.name)
        walk.links.append(Link(Atom(exits.handled(attempt, handler), handler.lineno, None, "handler"), None))

    def _leave_try(self, walk: _Walk, attempt: ast.AST, place: Place) -> None:
        assert isinstance(attempt, TRIES)
        if place.field == "orelse":
            for earlier in reversed(attempt.body):
                self._pass(walk, earlier)
        elif place.field == "finalbody":
            walk.give_up("it stands in a `finally`, which runs however the block before it ends")

    def _leave_case(self, walk: _Walk, case: ast.match_case) -> None:
        place = self._module.places[case]
        match = place.parent
        assert isinstance(match, ast.Match)
        if case.guard is not None:
            self._add(walk, case.guard, True, match)
        for tests in (pattern_tests(match.subject, case.pattern), *self._earlier_cases(match, case)):
            if tests is None:
                walk.give_up(f"the patterns of the match at line {match.lineno} are too involved")
                continue
            for test in tests:
                self._add(walk, test, True, match)
        walk.changed |= set(assigned_names(match))

    @staticmethod
    def _earlier_cases(match: ast.Match, case: ast.match_case) -> Iterator[list[ast.expr] | None]:
        """That none of the cases above matched."""
        for other in match.cases[: match.cases.index(case)]:
            tests = pattern_tests(match.subject, other.pattern)
            yield None if tests is None else [atoms.negated(atoms.all_of([*tests, *_guard_of(other)]))]


def _filled(name: str) -> tuple[str, ...]:
    """Ways to ask whether anything is in a list."""
    return (name, f"len({name}) > 0", f"len({name}) != 0", f"len({name})", f"{name} != []")


def _guard_of(case: ast.match_case) -> Iterator[ast.expr]:
    if case.guard is not None:
        yield case.guard
