"""From expressions of the source to the flags of a command line, and a command line with better values. Pure.

A flag is named only if the package has it. `flags` maps every way to write a flag to the way it is best written:
`{"--tensor-parallel-size": "--tensor-parallel-size", "-tp": "--tensor-parallel-size"}`.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from headrace.reference.evaluate import read_value
from headrace.reference.solve import Change, Fix

Flags = Mapping[str, str]
_LAST_NAME = re.compile(r"([A-Za-z_]\w*)\W*$")


@dataclass(frozen=True, slots=True)
class Corrected:
    """A command line before and after a fix."""

    before: str
    after: str
    changes: tuple[tuple[str, str, str], ...]
    """Flag, what was given, what is given now; empty for nothing."""


def flag_of(expr: str, flags: Flags) -> str | None:
    """`--max-num-seqs` for `self.scheduler_config.max_num_seqs`, if there is such a flag."""
    found = _LAST_NAME.search(expr)
    if found is None:
        return None
    name = found[1].strip("_")
    for written in (f"--{name.replace('_', '-')}", f"--{name}"):
        if written in flags:
            return flags[written]
    return None


def shown(value: Any) -> str:
    """A value as it is written after a flag."""
    return shlex.quote(str(value))


@dataclass(slots=True)
class _Given:
    """One flag of a command line: the words that make it up."""

    flag: str
    start: int
    end: int
    value: str | None


def given_flags(words: Sequence[str], flags: Flags) -> list[_Given]:
    """The flags of a command line that the package knows, with their values."""
    found: list[_Given] = []
    position = 0
    while position < len(words):
        word = words[position]
        name, equals, value = word.partition("=")
        flag = flags.get(name) or flags.get(name.replace("_", "-"))
        start, position = position, position + 1
        if flag is None:
            continue
        if equals:
            found.append(_Given(flag, start, position, value))
        elif position < len(words) and not _is_flag(words[position]):
            position += 1
            found.append(_Given(flag, start, position, words[start + 1]))
        else:
            found.append(_Given(flag, start, position, None))
    return found


def _is_flag(word: str) -> bool:
    return word.startswith("-") and not re.fullmatch(r"-\d+(\.\d+)?", word)


def values_given(command: str, exprs: Iterable[str], flags: Flags) -> dict[str, Any]:
    """What a command line says about the expressions of a condition."""
    words = split(command)
    given = {each.flag: each.value for each in given_flags(words, flags)}
    found: dict[str, Any] = {}
    for expr in exprs:
        flag = flag_of(expr, flags)
        if flag in given:
            value = given[flag]
            found[expr] = True if value is None else read_value(value)
    return found


def split(command: str) -> list[str]:
    """The words of a command line; blanks decide if its quotes do not match."""
    command = command.replace("\\\n", " ")
    try:
        return shlex.split(command)
    except ValueError:
        return command.split()


def corrected(command: str, fixes: Sequence[Fix], flags: Flags) -> Corrected | None:
    """The command line with the values of the first fix that it can take; a fix of what it already says goes first."""
    words = split(command)
    given = {each.flag for each in given_flags(words, flags)}
    able = [fix for fix in fixes if all(change.has_value and flag_of(change.expr, flags) for change in fix.changes)]
    able.sort(
        key=lambda fix: (not fix.verified, not all(flag_of(change.expr, flags) in given for change in fix.changes))
    )
    for fix in able:
        after, changes = list(words), []
        for change in fix.changes:
            after, told = _with_change(after, change, flags)
            changes.append(told)
        if after != words:
            return Corrected(shlex.join(words), shlex.join(after), tuple(changes))
    return None


def _with_change(words: Sequence[str], change: Change, flags: Flags) -> tuple[list[str], tuple[str, str, str]]:
    flag = flag_of(change.expr, flags)
    assert flag is not None
    new = _words_for(flag, change.value, flags)
    present = [each for each in given_flags(words, flags) if each.flag == flag]
    if not present:
        return [*words, *new], (flag, "", shlex.join(new))
    # The last one counts, as in argparse; its place and its spelling are kept.
    last = present[-1]
    before = list(words[last.start : last.end])
    if len(new) == 2:
        name = before[0].partition("=")[0]
        new = [f"{name}={new[1]}"] if "=" in before[0] else [name, new[1]]
    return [*words[: last.start], *new, *words[last.end :]], (flag, shlex.join(before), shlex.join(new))


def _words_for(flag: str, value: Any, flags: Flags) -> list[str]:
    if value is None:
        return []
    if value is True:
        return [flag]
    if value is False:
        opposite = f"--no-{flag.removeprefix('--')}"
        return [opposite] if opposite in flags else []
    return [flag, str(value)]
