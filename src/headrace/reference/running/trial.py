"""One error put to the test: its function run with values that meet the condition, and with values that do not.

Runs what it is given, so it is for the inside of the jail only. A run is cut off after a second by an alarm that no
`except Exception` of the function keeps. Each is made in two worlds: where stubs guess no, and where they guess yes;
what comes out differently is not shown.
"""

from __future__ import annotations

import ast
import builtins
import contextlib
import inspect
import itertools
import re
import signal
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import FrameType
from typing import Any

from headrace.reference import solve
from headrace.reference.records import Atom, Condition
from headrace.reference.running import jail
from headrace.reference.running.inputs import Search, domains
from headrace.reference.running.leaves import Question, Scope, text_of, unfolded
from headrace.reference.running.names import HARMLESS, Names, safe_builtins
from headrace.reference.running.slices import NAME, Slice, definitions, imported_names, local_names
from headrace.reference.running.stubs import GUESSES, Stub, texts_of
from headrace.reference.running.worlds import Assignment, Kind, Marker, Path, Same, World, shown

RUN_SECONDS = 1.0
_SLOW = "took too long"
_MOST_BEFORE = 4
_MOST_AFTER = 24
_MOST_TESTS_AFTER = 1_000


class TookTooLong(BaseException):
    """The alarm."""


@dataclass(slots=True)
class Ending:
    """How one run of a function ended."""

    kind: str
    """raises (the error asked for), returns, other (another error of its own), stuck (a stub did not do)."""
    detail: str = ""
    lines: frozenset[int] = frozenset()
    guesses: int = 0


class Trial:
    """One site, its function cut out, and the search for its values."""

    def __init__(self, names: Names, site: Mapping[str, Any]) -> None:
        self._site = site
        found = names.cut(site["qualname"], site["line"])
        if found is None:
            raise Unfit("it stands in no function")
        self._slice: Slice = found
        self._code = compile(found.module, "<cut out>", "exec")
        local = local_names(found.function)
        self._imported = imported_names(found.function)
        free = (found.free | set(self._imported)) - local
        self._constants = names.resolve(free, found.errors)
        self._fields = {key: value for key, each in found.fields.items() if _is_plain(value := _literal(each))}
        self._defaults = {
            key: value
            for key, each in found.parameters.items()
            if each is not None and _is_plain(value := _literal(each))
        }
        self._assignable = {name for name in free if not hasattr(builtins, name) and not self._is_known(name)}
        self._scope = Scope(found.parameters, self._assignable, local)
        self._defined = definitions(found.function)
        self._questions = self._asked(self._defined, local)
        self._domains = domains(self._questions, self._fields, self._defaults, self._constants, found.annotations)
        self._pattern = [re.compile(pattern, re.DOTALL) for pattern in site["patterns"]]

    def _is_known(self, name: str) -> bool:
        """Whether a name has a value of its own; what is only known to be a class or a function can still be called."""
        return name in self._constants and not isinstance(self._constants[name], Stub)

    def _asked(self, defined: Mapping[str, ast.expr], local: set[str]) -> list[Question]:
        """The condition as questions; what follows a `for some x in xs` belongs to it."""
        questions: list[Question] = []
        atoms = self._site["atoms"]
        for number, (code, line, early, kind) in enumerate(atoms):
            if kind == "always":
                continue
            if kind == "handler":
                questions += self._raising(code, line, early, defined)
                continue
            if kind == "exists" and code.startswith("for "):
                later = [each for each in atoms[number + 1 :] if each[3] not in ("handler", "always")]
                test = " and ".join(f"({each[0]})" for each in later) or "True"
                questions.append(self._question(f"any({test} {code})", line, False, defined, local))
                break
            questions.append(self._question(code, line, early, defined, local))
        return questions

    def _question(
        self, code: str, line: int, early: bool, defined: Mapping[str, ast.expr], local: set[str]
    ) -> Question:
        node = unfolded(ast.parse(code, mode="eval").body, defined)
        bound = {
            each.id
            for part in ast.walk(node)
            if isinstance(part, ast.comprehension)
            for each in ast.walk(part.target)
            if isinstance(each, ast.Name)
        }
        names = {each.id for each in ast.walk(node) if isinstance(each, ast.Name)} - bound
        code = ast.unparse(node)
        leaves = list(dict.fromkeys(self._scope.leaves(node)))
        question = Question(code, line, early, leaves, names - set(vars(builtins)), bool(names & local))
        question.compiled = compile(code, "<test>", "eval")
        return question

    def _raising(self, code: str, line: int, early: bool, defined: Mapping[str, ast.expr]) -> Iterator[Question]:
        """`int(x) raises ValueError` as a question; that it does not raise needs no values."""
        what, found, kinds = code.rpartition(" raises ")
        if not found or " does not raise " in code:
            return
        try:
            statement = ast.parse(what).body[-1]
        except SyntaxError:
            raise Unfit("what has to fail is no expression") from None
        value = getattr(statement, "value", None)
        if not isinstance(value, ast.expr) or "\n" in what or len(ast.parse(what).body) != 1:
            raise Unfit("what has to fail is no expression")
        question = self._question(ast.unparse(value), line, early, defined, set())
        kind = kinds.partition(" but not ")[0].strip("()").partition(",")[0]
        question.raises = "Exception" if kind == "any exception" else kind
        yield question

    # --- running ---

    def run(self, assignment: Assignment, *, answer: bool) -> Ending:
        """Run the function once in a world where stubs guess `answer`."""
        GUESSES.answer, GUESSES.count = answer, 0
        world = World(assignment, self._constants, self._fields)
        roots: dict[str, Any] = {}

        def root(name: str) -> Any:
            if name not in roots:
                roots[name] = world.root(name)
            return roots[name]

        around = {name: root(name) for name in self._slice.free if name not in safe_builtins()}
        around["super"] = Stub("super")
        own = safe_builtins() | {"__import__": _Importer(self._imported, root)}
        scope: dict[str, Any] = {"__builtins__": own, "__name__": "cut_out", **around}
        lines: set[int] = set()
        try:
            exec(self._code, scope)
            arguments = {name: self._argument(name, assignment, root) for name in self._slice.parameters}
            with _alarm(), _traced(lines):
                result = self._call(scope[NAME], arguments)
                if inspect.isgenerator(result):
                    for _ in result:
                        pass
        except jail.Refused as refused:
            return Ending("stuck", f"asked for {refused}", frozenset(lines))
        except TookTooLong:
            return Ending("stuck", _SLOW, frozenset(lines))
        except (MemoryError, RecursionError) as error:
            return Ending("stuck", type(error).__name__, frozenset(lines))
        except BaseException as error:
            return self._ended(error, frozenset(lines))
        return Ending("returns", "", frozenset(lines), GUESSES.count)

    def _call(self, function: Any, arguments: Mapping[str, Any]) -> Any:
        """Positional-only parameters have no name that a caller can use."""
        spec = self._slice.function.args
        positional = [arguments[each.arg] for each in spec.posonlyargs]
        named = {name: value for name, value in arguments.items() if name not in {e.arg for e in spec.posonlyargs}}
        return function(*positional, **named)

    def _argument(self, name: str, assignment: Assignment, root: Any) -> Any:
        if name in self._defaults and not any(path[0] == name for path in assignment):
            return self._defaults[name]
        return root(name)

    def _ended(self, error: BaseException, lines: frozenset[int]) -> Ending:
        site = self._site
        trace = error.__traceback__
        line, innermost = 0, None
        while trace is not None:
            if trace.tb_frame.f_code.co_filename == "<cut out>":
                line, innermost = trace.tb_lineno, trace
            trace = trace.tb_next
        own = innermost is not None and innermost.tb_next is None
        name = type(error).__name__
        if own and site["line"] <= line <= site["end_line"] and name == site["error_class"].rpartition(".")[2]:
            if any(pattern.fullmatch(text) for pattern in self._pattern for text in texts_of(error)):
                return Ending("raises", "", lines, GUESSES.count)
            return Ending("stuck", "its text is not the template's", lines, GUESSES.count)
        of_its_own = own and not site["line"] <= line <= site["end_line"] and error.__context__ is None
        if of_its_own and name in self._raised_at(line):
            return Ending("other", f"{name} at line {line}", lines, GUESSES.count)
        return Ending("stuck", f"{name} at line {line}", lines, GUESSES.count)

    def _raised_at(self, line: int) -> set[str]:
        """The classes that the statement at a line raises itself, by name."""
        found: set[str] = set()
        for node in ast.walk(self._slice.function):
            if isinstance(node, ast.Raise | ast.Assert) and node.lineno <= line <= (node.end_lineno or node.lineno):
                error = node.exc.func if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) else None
                name = "AssertionError" if isinstance(node, ast.Assert) else ast.unparse(error) if error else ""
                found.add(name.rpartition(".")[2])
        return found

    # --- searching ---

    def answer(self) -> dict[str, Any]:
        """What came of it, as plain data."""
        followed = [question for question in self._questions if not question.open]
        known = [question for question in followed if question.leaves or question.raises]
        told_whole = (
            len(known) == len(self._questions)
            and not self._site["moves"]
            and not self._sets_inputs()
            and not self._is_in_try()
        )
        search = Search(known, self._constants, self._fields, self._domains)
        wanted = [(question, True) for question in sorted(known, key=lambda each: each.early)]
        why = "no values were found that meet it"
        for before in itertools.islice(search.solutions(wanted, {}), _MOST_BEFORE):
            endings = self._both(before)
            if all(ending.kind == "raises" for ending in endings):
                return self._after(search, known, before)
            other = next(ending for ending in endings if ending.kind != "raises")
            why = other.detail or other.kind
            if why == _SLOW:
                break
            if told_whole and any(ending.kind in ("returns", "other") for ending in endings):
                return {"verdict": "refuted", "why": why, "before": _told(before)}
        return {"verdict": "not run", "why": why, "open": len(followed) < len(self._questions)}

    def _sets_inputs(self) -> bool:
        """Whether the function sets what the condition reads, which then speaks of a later value."""
        nodes = ast.walk(self._slice.function)
        targets = [node for node in nodes if isinstance(getattr(node, "ctx", None), ast.Store | ast.Del)]
        loads = [ast.parse(ast.unparse(target), mode="eval").body for target in targets]
        stored = {ast.unparse(unfolded(node, self._defined) if "." in ast.unparse(node) else node) for node in loads}
        texts = {text_of(leaf) for question in self._questions for leaf in question.leaves}
        return any(text == each or text.startswith((f"{each}.", f"{each}[")) for text in texts for each in stored)

    def _is_in_try(self) -> bool:
        """Whether a handler stands around the error; whether it catches it, stand-ins do not tell."""
        attempts = [node for node in ast.walk(self._slice.function) if isinstance(node, ast.Try) and node.handlers]
        line = self._site["line"]
        return any(each.body[0].lineno <= line <= (each.body[-1].end_lineno or 0) for each in attempts)

    def _both(self, assignment: Assignment) -> list[Ending]:
        return [self.run(assignment, answer=answer) for answer in (False, True)]

    def _after(self, search: Search, questions: list[Question], before: Assignment) -> dict[str, Any]:
        search.left = _MOST_TESTS_AFTER
        for after, guard in itertools.islice(self._mended(search, questions, before), _MOST_AFTER):
            endings = self._both(after)
            if any(ending.detail == _SLOW for ending in endings):
                break
            if all(ending.kind == "returns" for ending in endings):
                return _pair(before, after, "returns")
            if all(self._went_past(ending, guard) for ending in endings):
                return _pair(before, after, "goes on")
        return {"verdict": "not run", "why": "no values were found that mend it", "open": False}

    def _went_past(self, ending: Ending, guard: int) -> bool:
        """The test was made, and the function went on below the error."""
        if ending.kind == "raises" or not any(line >= guard for line in ending.lines):
            return False
        return ending.kind == "returns" or max(ending.lines) > self._site["end_line"]

    def _mended(
        self, search: Search, questions: list[Question], before: Assignment
    ) -> Iterator[tuple[Assignment, int]]:
        """Assignments with one reason made false, and the line that tests it; the fixes of the page first."""
        reasons = [question for question in reversed(questions) if not question.early] or questions[::-1]
        for candidates in (self._proposed, self._changed):
            for question in reasons:
                above = [each for each in questions if each.line < question.line]
                for after in candidates(question, before):
                    search.left -= 1
                    if search.left <= 0:
                        return
                    stays = all(search.holds(each, after) is not False for each in above)
                    if stays and search.holds(question, after) is False:
                        yield after, question.line

    def _changed(self, question: Question, before: Assignment) -> Iterator[Assignment]:
        for leaf in question.leaves:
            yield from (before | {leaf: value} for value in self._domains[leaf])

    def _proposed(self, question: Question, before: Assignment) -> Iterator[Assignment]:
        """What the fixes of the page say, with these values put in."""
        by_text = {text_of(path): path for path in question.leaves}
        values = {name: value for name, value in self._constants.items() if _is_plain(value)}
        values |= {text: before[path] for text, path in by_text.items() if _is_plain(before.get(path, Same("")))}
        atom = Atom(question.code, question.line)
        for fix in solve.fixes(Condition((atom,), complete=True), values):
            if fix.verified and all(change.expr in by_text for change in fix.changes):
                yield before | {by_text[change.expr]: change.value for change in fix.changes}


class Unfit(Exception):
    """A site that cannot be run at all."""


class _Importer:
    """Stands for `__import__`: harmless modules are real, all others stubs whose names are those of the world."""

    def __init__(self, names: Mapping[str, str], root: Any) -> None:
        self._here = {there: here for here, there in names.items()}
        self._root = root

    def __call__(self, name: str, around: Any = None, local: Any = None, wanted: Any = (), level: int = 0) -> Any:
        if not level and name in sys.modules and name in HARMLESS:
            return __import__(name, fromlist=wanted or ())
        if not wanted:
            return self._root(self._here.get(name, name.partition(".")[0]))
        module = Stub(name, constant=True)
        for each in wanted:
            module.__dict__[each] = self._root(self._here.get(each, each))
        return module


def _literal(node: ast.expr) -> Any:
    try:
        return ast.literal_eval(node)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return Same("")


def _is_plain(value: Any) -> bool:
    return not isinstance(value, Same | Kind | Marker) and isinstance(
        value, bool | int | float | str | list | dict | set | tuple | None
    )


@contextlib.contextmanager
def _alarm() -> Iterator[None]:
    """Raise TookTooLong again and again once the time is over, in case the first is caught."""
    signal.setitimer(signal.ITIMER_REAL, RUN_SECONDS, 0.05)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def ring(number: int, frame: FrameType | None) -> None:
    """What the alarm does."""
    raise TookTooLong


@contextlib.contextmanager
def _traced(lines: set[int]) -> Iterator[None]:
    """Note the lines of the cut-out function that run."""

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        if frame.f_code.co_filename != "<cut out>":
            return None
        if event == "line":
            lines.add(frame.f_lineno)
        return trace

    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(None)


def _told(assignment: Assignment) -> list[list[str]]:
    return [
        [text_of(path) if path[-1][0] != "contains" else _contains(path), shown(value)]
        for path, value in assignment.items()
    ]


def _contains(path: Path) -> str:
    return f"{path[-1][1]!r} in {text_of(path[:-1])}"


def _pair(before: Assignment, after: Assignment, ends: str) -> dict[str, Any]:
    changed = {path: value for path, value in after.items() if before.get(path, _NOTHING) is not value}
    return {"verdict": "verified", "before": _told(before), "after": _told(changed), "ends": ends}


_NOTHING = object()
