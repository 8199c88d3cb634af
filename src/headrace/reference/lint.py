"""Faults in the messages of a package: what is printed otherwise than it was meant. Prints nothing itself.

Precision first: a rule that cannot be sure says nothing. What a class of the package's own does with its arguments is
not guessed, so most rules look only at classes that are Python's own, or that add nothing to one of those.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from headrace.reference import lint_rules
from headrace.reference.flow import read_module
from headrace.reference.lint_classes import Definition, PlainClasses, definitions
from headrace.reference.packages import PackageSource
from headrace.reference.reading import Progress, each_file
from headrace.reference.spoken import messages

Level = Literal["error", "warning", "note"]


@dataclass(frozen=True, slots=True)
class Rule:
    """One kind of fault."""

    name: str
    level: Level
    says: str
    """What is wrong, in one sentence."""
    mend: str
    """What to write instead."""


RULES = (
    Rule(
        "tuple-message",
        "error",
        "An error is given several arguments, so it prints them as a tuple.",
        "Make one text of them, usually an f-string.",
    ),
    Rule(
        "unfilled-percent",
        "error",
        "A text with %s is printed as it stands, because nothing is filled in.",
        "Use an f-string, or put `% values` behind the text.",
    ),
    Rule(
        "unfilled-braces",
        "error",
        "A text with {} is printed as it stands, because `.format` is not called.",
        "Use an f-string, or call `.format`.",
    ),
    Rule(
        "missing-f",
        "error",
        "A name in braces is printed as it stands, because the literal has no f in front.",
        "Put an f in front of the literal.",
    ),
    Rule(
        "missing-space",
        "warning",
        "Two literals are joined without the space between their words.",
        "End the first literal with a space.",
    ),
    Rule(
        "double-space",
        "note",
        "Two literals are joined with a space on either side.",
        "Take one of the spaces away.",
    ),
    Rule(
        "key-error-escapes",
        "warning",
        "KeyError prints the repr of its text, so a line break in it is shown as \\n.",
        "Use one line, or another class.",
    ),
    Rule(
        "no-words",
        "note",
        "The message is only a value, and does not say what is wrong with it.",
        "Say what was expected, and what was found.",
    ),
    Rule(
        "empty-message",
        "note",
        "The error has no message.",
        "Say what was expected, and what was found.",
    ),
    Rule(
        "text-against-test",
        "warning",
        "The message asks for another bound than the test that raises it.",
        "Make the words and the test agree.",
    ),
)
_BY_NAME = {rule.name: rule for rule in RULES}


@dataclass(frozen=True, slots=True, order=True)
class Finding:
    """A fault and where it is."""

    file: str
    """Relative to the folder that holds the package, with slashes."""
    line: int
    rule: str
    what: str
    """What is printed, or why the rule says so."""
    qualname: str = ""

    @property
    def level(self) -> Level:
        return _BY_NAME[self.rule].level


def rule(name: str) -> Rule:
    """The rule of a finding."""
    return _BY_NAME[name]


@dataclass(frozen=True, slots=True)
class FileFindings:
    """What one file has, as far as it can be told without the other files."""

    classes: tuple[Definition, ...]
    findings: tuple[tuple[Finding, str, bool | None], ...]
    """With the error's class, and whether it has to print its arguments (None: either way)."""


def lint(source: PackageSource, on_progress: Progress | None = None) -> list[Finding]:
    """The faults in a package, by file and line. A file that is no Python is left out. Raises: SourceUnusable.

    `on_progress(label, done_files, all_files)` is called as files are read.
    """
    classes = PlainClasses()
    found: list[tuple[Finding, str, bool | None]] = []
    for part in each_file(lint_files, source, source.files, f"linting {source.name} {source.version}", on_progress):
        classes.add(part.classes)
        found += part.findings
    return sorted(finding for finding, name, plain in found if plain in (None, classes.prints_arguments(name)))


def lint_files(source: PackageSource, files: Sequence[str]) -> list[FileFindings]:
    """What each of some files has."""
    return [lint_file(file, content) for file, content in source.read(files)]


def lint_file(file: str, content: bytes) -> FileFindings:
    """What one file has."""
    try:
        text = content.decode()
        module = read_module(text)
    except (SyntaxError, ValueError, RecursionError):
        return FileFindings((), ())
    found: dict[tuple[Finding, str, bool | None], None] = {}
    for message in messages(module):
        place = module.qualname(message.place.scope)
        either, plain, other = (
            [Finding(file, *fault, place) for fault in faults]
            for faults in (
                [*lint_rules.of_substance(message, module), *lint_rules.of_test(message, module)],
                list(lint_rules.of_words(message, module, text, plain=True)),
                list(lint_rules.of_words(message, module, text, plain=False)),
            )
        )
        either += [finding for finding in plain if finding in other]
        for findings, condition in ((either, None), (plain, True), (other, False)):
            for finding in findings:
                if condition is None or finding not in either:
                    found[finding, message.error_class, condition] = None
    return FileFindings(tuple(definitions(module.tree)), tuple(found))
