"""Read every message that Headrace can show, the way a user would, and name what is wrong with it.

Error classes are rendered from their `example`; the rest is read from the source without running it. What a message
tells people to type is compared with the real command line. Knows nothing of how errors are raised or shown.

    python scripts/lint_messages.py [DIRECTORY OF THE PACKAGE]
"""

from __future__ import annotations

import ast
import builtins
import importlib
import importlib.util
import inspect
import os
import re
import string
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer
import typer.main

from headrace.errors import HeadraceError, concrete_errors
from headrace.reference import literals

FLAG = re.compile(r"(?<![\w-])--[a-z][a-z0-9]*+(?:-[a-z0-9]++)*+(?![\w{-])")
COMMAND = re.compile(r"(?<![\w./'-])headrace ([a-z][a-z-]*+)(?![\w=])")
# What other programs take is theirs to document: `hf download --local-dir x`, "Run: pip install --upgrade x".
QUOTED = re.compile(r"`([^`]*)`")
FOREIGN_COMMAND = re.compile(r"\b(?:(?:pip|python|git|hf) (?:install|-m|clone|download)|curl )[^`\n]*")

# Python itself asks for these (a module's __getattr__, an abstract method, an iterator's end).
# AssertionError is what an assert raises: it speaks to us, not to users.
PROTOCOL_EXCEPTIONS = {
    "AssertionError",
    "AttributeError",
    "GeneratorExit",
    "KeyboardInterrupt",
    "NotImplementedError",
    "StopAsyncIteration",
    "StopIteration",
    "SystemExit",
}
BUILTIN_EXCEPTIONS = {
    name: value
    for name, value in vars(builtins).items()
    if isinstance(value, type) and issubclass(value, BaseException) and not issubclass(value, Warning)
}


@dataclass(frozen=True, order=True)
class Fault:
    """One thing to mend: where, which rule, and in words."""

    where: str
    rule: str
    what: str

    def __str__(self) -> str:
        return f"{self.where}: {self.rule}: {self.what}"


# --- the command line ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class CommandLine:
    """The commands that exist, each with its flags; the empty name is `headrace` itself."""

    flags: Mapping[str, frozenset[str]]

    @property
    def every_flag(self) -> frozenset[str]:
        return frozenset().union(*self.flags.values())


def command_line() -> CommandLine | None:
    """The real command line, or None if the package has none at all. One that cannot be imported is an error."""
    try:
        if importlib.util.find_spec("headrace.cli.app") is None:
            return None
    except ModuleNotFoundError as missing:
        if missing.name in {"headrace.cli", "headrace.cli.app"}:
            return None
        raise
    return read_command_line(importlib.import_module("headrace.cli.app").app)


def read_command_line(app: typer.Typer) -> CommandLine:
    """Commands and flags of a typer app."""
    root: Any = typer.main.get_command(app)
    commands = {"": root, **getattr(root, "commands", {})}
    return CommandLine({name: _flags(command, whole=name != "") for name, command in commands.items()})


def _flags(command: Any, *, whole: bool) -> frozenset[str]:
    """The flags of a command; `whole` takes those of the commands below it (`headrace reference build`) as its own."""
    flags = {flag for param in command.params for flag in (*param.opts, *param.secondary_opts)} | {"--help"}
    for below in getattr(command, "commands", {}).values() if whole else ():
        flags |= _flags(below, whole=True)
    return frozenset(flags)


def lint_advice(text: str, cli: CommandLine, *, is_message: bool) -> Iterator[tuple[str, str]]:
    """Rule and words for each flag or command in `text` that the command line does not have.

    Other texts than messages (the name of a thread, say) may begin with the word headrace, so there only what is
    quoted is a command.
    """
    # Whole quotes first: a pattern that skips some of them would pair the end of one with the start of the next.
    ours = QUOTED.sub(lambda quote: quote[0] if quote[1].startswith(("headrace ", "-")) else "", text)
    ours = FOREIGN_COMMAND.sub("", ours)
    for name in COMMAND.findall(ours) if is_message else re.findall(r"`headrace ([a-z][a-z-]*+)", ours):
        if name not in cli.flags:
            yield "unknown-command", f"there is no `headrace {name}`"
    for quoted in re.findall(r"`headrace ([^`]+)`", ours):
        name = quoted.split()[0]
        for flag in FLAG.findall(quoted):
            if flag in cli.every_flag and name in cli.flags and flag not in cli.flags[name] | cli.flags[""]:
                yield "unknown-flag", f"`headrace {name}` has no {flag}"
    for flag in FLAG.findall(ours):
        if flag not in cli.every_flag:
            yield "unknown-flag", f"no command has the flag {flag}"


# --- error classes ------------------------------------------------------------------------------------------------


def placeholders(template: str) -> set[str]:
    """Names of the facts that a template uses; an empty name or a number for one that is counted."""
    names: set[str] = set()
    for _, name, spec, _ in string.Formatter().parse(template):
        if name is not None:
            names.add(re.split(r"[.\[]", name)[0])
        if spec:
            names |= placeholders(spec)
    return names


def lint_class(cls: type[HeadraceError], cli: CommandLine | None) -> Iterator[Fault]:
    """What is wrong with the words of one error class."""
    where = f"{cls.__module__}.{cls.__qualname__}"
    fields = set(cls.fields)
    try:
        used = placeholders(cls.template) | placeholders(cls.remedy)
    except ValueError as broken:
        yield Fault(where, "broken-template", f"the braces do not match: {broken}")
        return
    for name in sorted(used - fields):
        yield Fault(where, "unknown-field", f"the words use {{{name}}}, which is not a field")
    for name in sorted(fields - used):
        yield Fault(where, "unused-field", f"{name!r} is asked for and never shown")
    for name in sorted(fields ^ set(cls.example)):
        yield Fault(where, "example", f"{name!r} is {'missing from' if name in fields else 'not a field, but in'} it")
    if used - fields or fields ^ set(cls.example):
        return

    try:
        error = cls(**cls.example)
        parts = {"template": error.what, "remedy": error.fix}
    except Exception as broken:
        yield Fault(where, "render", f"{type(broken).__name__}: {broken}")
        return
    for part, text in parts.items():
        if not text:
            continue
        if "{" in text or "}" in text:
            yield Fault(where, "unfilled-brace", f"{part}: {text!r}")
        if "  " in text:
            yield Fault(where, "double-space", f"{part}: {text!r}")
        if text != text.strip():
            yield Fault(where, "outer-space", f"{part}: {text!r}")
        # What is pasted as a whole, a command or a line of flags, would be pasted with a full stop behind it.
        to_paste = part == "remedy" and re.match(r"Run: \S|--[a-z]|headrace ", text.splitlines()[-1])
        if not text.endswith((".", "!", "?")) and not to_paste:
            yield Fault(where, "final-punctuation", f"{part}: {text!r}")
        if re.search(r"(?<!\.)\.\.(?!\.)|[,;:]\.|\.,", text):
            yield Fault(where, "double-punctuation", f"{part}: {text!r}")
        if cli:
            yield from (Fault(where, rule, f"{part}: {what}") for rule, what in lint_advice(text, cli, is_message=True))


# --- source -------------------------------------------------------------------------------------------------------


def lint_seams(source: str) -> Iterator[tuple[int, str, str]]:
    """Where two literals of one sentence meet without a space, or one of them lacks the f that another one has."""
    for run in literals.runs(source):
        for literal, missing in run.lacking_f():
            yield literal.line, "missing-f", f"{missing} is shown as it stands: the other parts have an f in front"
        if not all(literal.is_plain_text for literal in run.literals):
            continue
        if not any(" " in literal.body for literal in run.literals):
            continue
        for left, right in run.seams():
            glued = re.search(r"[\w.,:;!?)}\]%'`\"]$", left.body) and re.match(r"[\w({\['`\"-]", right.body)
            if glued and not left.body.endswith((r"\n", r"\t")):
                yield right.line, "seam", f"no space between {left.body[-20:]!r} and {right.body[:20]!r}"


def has_words(node: ast.AST) -> bool:
    """Whether an expression holds text that somebody wrote for people to read."""
    return any(
        isinstance(part, ast.Constant)
        and isinstance(part.value, str)
        and re.search(r"[A-Za-z]\s|\s[A-Za-z]", part.value)
        for part in ast.walk(node)
    )


def lint_raise(node: ast.Raise, *, words_live_here: bool) -> Iterator[tuple[int, str, str]]:
    """A raise that prints a tuple, or that carries words which belong into errors.py."""
    call = node.exc
    if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name):
        return
    name = call.func.id
    kind = BUILTIN_EXCEPTIONS.get(name)
    if kind is None:
        return
    is_text = [isinstance(arg, ast.JoinedStr | ast.Constant) and not _is_number(arg) for arg in call.args]
    if issubclass(kind, OSError):
        prints_tuple = len(call.args) > 1 and is_text[0]  # OSError(errno, text, file) is Python's own form.
    else:
        prints_tuple = len(call.args) > 1 and not issubclass(kind, UnicodeError)
    if prints_tuple:
        yield node.lineno, "tuple", f"{name} with {len(call.args)} arguments is shown as a tuple; make it one text"
    if not words_live_here and name not in PROTOCOL_EXCEPTIONS and any(has_words(arg) for arg in call.args):
        yield node.lineno, "foreign-words", f"{name} carries a message; give the words a class in errors.py"


def _is_number(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and not isinstance(node.value, str)


def _docstrings(tree: ast.AST) -> set[int]:
    """Ids of the nodes that are documentation: a text on a line of its own, also below a field."""
    return {
        id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    }


def _filled_later(tree: ast.AST) -> set[int]:
    """Ids of the nodes below something that fills braces itself: a template, `.format`, a column, a route."""
    says_so = re.compile(r"template|remedy|format|column", re.IGNORECASE)
    fillers: list[ast.AST] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            if any(says_so.search(ast.unparse(target)) for target in targets) and node.value:
                fillers.append(node.value)
        elif isinstance(node, ast.keyword) and says_so.search(node.arg or ""):
            fillers.append(node.value)
        elif isinstance(node, ast.Call) and says_so.search(_last_name(node.func)):
            fillers.append(node)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            fillers.extend(node.decorator_list)
    return {id(below) for filler in fillers for below in ast.walk(filler)}


def _last_name(node: ast.expr) -> str:
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def lint_source(source: str, *, words_live_here: bool, cli: CommandLine | None) -> Iterator[tuple[int, str, str]]:
    """Line, rule and words for what is wrong in one module. `words_live_here` is true of errors.py alone."""
    tree = ast.parse(source)
    yield from lint_seams(source)
    documentation, filled_later = _docstrings(tree), _filled_later(tree)
    inside_f_string = {
        id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in ast.walk(node)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Raise):
            yield from lint_raise(node, words_live_here=words_live_here)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in documentation:
            if id(node) not in filled_later | inside_f_string and (missing := literals.BRACED.search(node.value)):
                yield node.lineno, "missing-f", f"{missing[0]} is shown as it stands: the text has no f in front"
            if cli:
                yield from ((node.lineno, rule, what) for rule, what in lint_advice(node.value, cli, is_message=False))


# --- all of it ----------------------------------------------------------------------------------------------------


def lint_package(package: Path, cli: CommandLine | None) -> Iterator[Fault]:
    """Faults of all modules below a directory."""
    for path in sorted(package.rglob("*.py")):
        words_live_here = path == package / "errors.py"
        for line, rule, what in lint_source(path.read_text(encoding="utf-8"), words_live_here=words_live_here, cli=cli):
            yield Fault(f"{os.path.relpath(path)}:{line}", rule, what)


def own_errors() -> list[type[HeadraceError]]:
    """The classes that can be raised, without those that a test has made up."""
    return [cls for cls in concrete_errors() if cls.__module__.startswith("headrace.")]


def main(arguments: Iterable[str], show: Callable[[str], None] = print) -> int:
    """Lint the package in the directory given, or the one that `import headrace` finds; 1 if anything is wrong."""
    paths = list(arguments) or [str(Path(inspect.getfile(HeadraceError)).parent)]
    cli = command_line()
    if cli is None:
        show("There is no headrace.cli.app yet, so flags and commands in messages are not checked.")
    faults = [fault for cls in own_errors() for fault in lint_class(cls, cli)]
    for path in paths:
        faults += lint_package(Path(path), cli)
    for fault in sorted(set(faults)):
        show(str(fault))
    show(f"{len(own_errors())} errors rendered, {len(set(faults))} faults.")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
