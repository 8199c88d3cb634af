"""Conditions put to the test: each site's own function is run with values that meet its condition and that do not.

Nothing is run here: workers are processes of their own that lock themselves in (`running.jail`) before they read a line
of the package, and answer many sites each. This room chooses the sites, feeds the workers, and ends those that hang.
"""

from __future__ import annotations

import ast
import collections
import concurrent.futures
import contextlib
import json
import os
import queue
import re
import select
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from headrace.reference.packages import PackageSource
from headrace.reference.records import Page, Pair, Placeholder, Site, Template

SITE_SECONDS = 20.0
"""After so long without an answer a worker is ended, and another goes on with the next site."""
REFUTED = "run with values that meet it, the function did not raise"
_LONGEST_CONSTANT = 4_000
_START = (
    "import sys; sys.path.insert(0, sys.argv[1]); from headrace.reference.running.worker import main; main(sys.argv[2])"
)

Key = tuple[str, int, str, int, str]
Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of one site."""

    verdict: str
    """verified, refuted, or not run."""
    why: str = ""
    pair: Pair | None = None


def key_of(site: Site) -> Key:
    """What tells the sites of one version apart."""
    return site.file, site.line, site.qualname, site.ordinal, site.error_class


def can_be_run(site: Site) -> bool:
    """Whether a site has what is needed: a function, a message, and a condition that is complete."""
    raised = site.kind in ("raise", "assert") and bool(site.templates)
    return raised and site.condition.complete and site.qualname != "<module>" and not site.fragment


def verify(source: PackageSource, sites: Sequence[Site], on_progress: Progress | None = None) -> dict[Key, Outcome]:
    """Run what can be run, in as many workers as there are processors."""
    by_file: dict[str, list[Site]] = collections.defaultdict(list)
    for site in sites:
        if can_be_run(site):
            by_file[site.file].append(site)
    todo: queue.SimpleQueue[tuple[str, list[Site]]] = queue.SimpleQueue()
    for entry in sorted(by_file.items(), key=lambda entry: -len(entry[1])):
        todo.put(entry)
    total, outcomes = sum(map(len, by_file.values())), {}
    constants = Constants(source)
    count = min(len(os.sched_getaffinity(0)), max(1, len(by_file)))
    with concurrent.futures.ThreadPoolExecutor(count) as pool:
        done: queue.SimpleQueue[tuple[Key, Outcome] | None] = queue.SimpleQueue()
        running = [pool.submit(_work, todo, constants, done) for _ in range(count)]
        for future in running:
            future.add_done_callback(lambda future: done.put(None))
        ended = 0
        while ended < count:
            answer = done.get()
            if answer is None:
                ended += 1
                continue
            outcomes[answer[0]] = answer[1]
            if on_progress is not None:
                on_progress(len(outcomes), total)
        for future in running:
            future.result()
    return outcomes


def with_outcomes(pages: Iterable[Page], outcomes: Mapping[Key, Outcome]) -> list[Page]:
    """The pages with what was run; a condition that its own values refute is no longer complete."""
    return [
        replace(page, sites=tuple(_with(site, outcomes.get(key_of(site))) for site in page.sites)) for page in pages
    ]


def _with(site: Site, outcome: Outcome | None) -> Site:
    if outcome is None or outcome.verdict == "not run":
        return site
    if outcome.verdict == "refuted":
        return replace(site, condition=replace(site.condition, complete=False, incomplete=REFUTED))
    return replace(site, pair=outcome.pair)


def remembered(pages: Iterable[Page], unchanged: set[str]) -> dict[Key, Outcome]:
    """What was found out before about the sites of files that did not change."""
    found = {}
    for page in pages:
        for site in page.sites:
            if site.file in unchanged and site.pair is not None:
                found[key_of(site)] = Outcome("verified", pair=site.pair)
            elif site.file in unchanged and site.condition.incomplete == REFUTED:
                found[key_of(site)] = Outcome("refuted", REFUTED)
    return found


# --- workers --------------------------------------------------------------------------------------------------------


def _work(todo: queue.SimpleQueue[tuple[str, list[Site]]], constants: Constants, done: queue.SimpleQueue[Any]) -> None:
    with contextlib.ExitStack() as stack:
        worker: _Worker | None = None
        while True:
            try:
                file, sites = todo.get_nowait()
            except queue.Empty:
                return
            opening = constants.opening(file)
            fresh = True
            for site in sites:
                if worker is None:
                    worker, fresh = stack.enter_context(_Worker()), True
                answer = worker.ask([*([opening] if fresh else []), {"site": _plain(site)}])
                fresh = False
                if answer is None:
                    worker.end()
                    worker = None
                done.put((key_of(site), _outcome(answer)))


def _plain(site: Site) -> dict[str, Any]:
    atoms = [(atom.substituted or atom.code, atom.line, atom.early_exit, atom.kind) for atom in site.condition.atoms]
    return {
        "qualname": site.qualname,
        "line": site.line,
        "end_line": site.end_line,
        "error_class": site.error_class,
        "moves": site.caught_locally or bool(site.condition.reassigned),
        "atoms": atoms,
        "patterns": [_pattern(template) for template in site.templates],
    }


def _pattern(template: Template) -> str:
    return "".join(".*" if isinstance(piece, Placeholder) else re.escape(piece) for piece in template)


def _outcome(answer: dict[str, Any] | None) -> Outcome:
    if answer is None:
        return Outcome("not run", "it hung, or ended its process")
    if answer["verdict"] != "verified":
        why = f"{answer['why']} (what it reads is computed on the way)" if answer.get("open") else answer["why"]
        return Outcome(answer["verdict"], why)
    before, after = (tuple((name, value) for name, value in answer[side]) for side in ("before", "after"))
    return Outcome("verified", pair=Pair(before, after, answer["ends"]))


class _Worker:
    """A process that answers lines of JSON, in a directory of its own."""

    def __enter__(self) -> _Worker:
        self._directory = tempfile.TemporaryDirectory(prefix="headrace-run-")
        root = Path(__file__).parents[2]
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-B", "-c", _START, str(root), self._directory.name],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={},
        )
        return self

    def __exit__(self, *failure: object) -> None:
        self.end()

    def end(self) -> None:
        """Kill it if it still runs."""
        self._process.kill()
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                with contextlib.suppress(BrokenPipeError):
                    stream.close()
        self._process.wait()
        self._directory.cleanup()

    def ask(self, messages: Iterable[Any]) -> dict[str, Any] | None:
        """The answer to the last of the messages; None if there is none in time."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            for message in messages:
                self._process.stdin.write(json.dumps(message).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            return None
        if not select.select([self._process.stdout], [], [], SITE_SECONDS)[0]:
            return None
        line = self._process.stdout.readline()
        return json.loads(line) if line.endswith(b"\n") else None


# --- what a file takes from others ----------------------------------------------------------------------------------


class Constants:
    """Reads the constants and enumerations that files import from each other."""

    def __init__(self, source: PackageSource) -> None:
        self._source = source
        self._files = set(source.files)
        self._definitions: dict[str, dict[str, str]] = {}

    def opening(self, file: str) -> dict[str, Any]:
        """The message that goes before the sites of a file."""
        text = self._text(file)
        return {"source": text, "elsewhere": dict(self._imported(ast.parse(text), file))}

    def _text(self, file: str) -> str:
        ((_, content),) = self._source.read([file])
        return content.decode("utf-8", "replace")

    def _imported(self, tree: ast.Module, file: str) -> Iterator[tuple[str, str]]:
        folders = file.removesuffix(".py").split("/")
        for node in ast.walk(tree):
            if not isinstance(node, ast.ImportFrom):
                continue
            base = folders[: len(folders) - node.level] if node.level else []
            path = "/".join([*base, *(node.module or "").split(".")])
            there = next((each for each in (f"{path}.py", f"{path}/__init__.py") if each in self._files), None)
            names = [alias for alias in node.names if alias.name[:1].isupper()]
            if there is None or not names:
                continue
            known = self._definitions_of(there)
            yield from ((alias.asname or alias.name, known[alias.name]) for alias in names if alias.name in known)

    def _definitions_of(self, file: str) -> dict[str, str]:
        if file not in self._definitions:
            self._definitions[file] = dict(_constants(ast.parse(self._text(file))))
        return self._definitions[file]


def _constants(tree: ast.Module) -> Iterator[tuple[str, str]]:
    for statement in tree.body:
        match statement:
            case (
                ast.Assign(targets=[ast.Name(id=name)], value=value)
                | ast.AnnAssign(target=ast.Name(id=name), value=ast.expr() as value)
            ) if name[:1].isupper():
                code = ast.unparse(value)
            case ast.ClassDef(name=name, bases=[_, *_]):
                body: list[ast.stmt] = [each for each in statement.body if isinstance(each, ast.Assign)]
                code = ast.unparse(ast.ClassDef(name, statement.bases, [], body or [ast.Pass()], []))
            case _:
                continue
        if len(code) <= _LONGEST_CONSTANT:
            yield name, code
