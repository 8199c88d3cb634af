"""The errors that a paste tells of, with their frames: Python's own form, IPython's and pytest's. Knows no package.

Source lines that a traceback repeats are dropped: they hold the text of the message before it was filled in.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from headrace.reference.messages import LONGEST_MESSAGE, Line, by_source, clean

Link = Literal["", "cause", "context"]


@dataclass(frozen=True, slots=True)
class Frame:
    """One line of a traceback's stack."""

    file: str
    line: int
    """0 if the paste does not tell."""
    function: str
    """As told: the plain name, or with its class where Python told that; `<module>`."""


@dataclass(frozen=True, slots=True)
class Raised:
    """One error in a paste: a class and its message, and how it got there."""

    error_class: str
    """As printed: `ValueError`, `torch.OutOfMemoryError`; empty if the paste tells none."""
    message: str
    """With its line breaks."""
    frames: tuple[Frame, ...] = ()
    link: Link = ""
    """How the error printed before it is related: its cause, or what was being handled."""
    line: int = 0
    """Where in the paste the message begins."""
    level: str = ""


_HEADER = re.compile(r"^[\s|+]*(?:[\w.]++ +)?(?:Exception Group )?Traceback \(most recent call last\)")
_CAUSE = "The above exception was the direct cause of the following exception"
_CONTEXT = "During handling of the above exception, another exception occurred"
_FRAMES = (
    re.compile(r'^[\s|]*File "(?P<file>[^"]++)", line (?P<line>\d++)(?:, in (?P<function>.++))?$'),
    re.compile(r"^File (?P<file>[^\s:]++):(?P<line>\d++)(?:, in (?P<function>[\w.<>]++).*+)?$"),
    re.compile(r"^Cell In ?\[\d++\], line (?P<line>\d++)(?P<file>)(?P<function>)"),
    re.compile(r"^(?P<file>\S+?\.py|<ipython-input[^>]*+>) in (?P<function>[\w.<>]++)(?:\(.*+)?$(?P<line>)"),
)
_PYTEST_PLACE = re.compile(r"^(?P<file>\S+?\.py):(?P<line>\d++): (?P<error_class>[A-Za-z_][\w.]*+)$")
_ARROW = re.compile(r"^-+> (?P<line>\d++)")
_NAME = r"(?:[A-Za-z_]\w*+\.)*+[A-Za-z_]\w*+"
_ENDINGS = "Error|Exception|Exit|Interrupt|Warning|Iteration|Failure|Exhausted|Timeout|Fault|Violation|Died|Dead"
# Behind frames any name that may be a class; elsewhere it has to end like an error's, or tell a module and a class.
_AFTER_FRAMES = re.compile(rf"^(?P<error_class>{_NAME})(?:\((?P<inner>{_NAME})\))?(?:: ?(?P<message>.*+)|$)")
_HEAD = re.compile(
    rf"^(?P<error_class>(?:[A-Za-z_]\w*+\.)*?(?:[A-Za-z_]\w*?(?:{_ENDINGS})|(?<=\.)[A-Z]\w*[a-z]\w*))"
    rf"(?:\((?P<inner>{_NAME})\))?(?:: ?(?P<message>.*+)|$)"
)
_GROUP_RULE = re.compile(r"^\s*\+-[+\-]*(?: \d++ -+)?\s*$")
_MOST_MESSAGE_LINES = 60


def parse(paste: str) -> list[Raised]:
    """Every error of a paste, in the order that the processes ended; the text as a whole if no line names an error."""
    errors = [error for stream in by_source(clean(paste)) for error in _Parser(stream).run()]
    if errors:
        return errors
    return list(_records(clean(paste)))


def _records(lines: Sequence[Line]) -> Iterator[Raised]:
    """Log records, or a text without any class: each a message."""
    start = 0
    for position in range(1, len(lines) + 1):
        if position == len(lines) or lines[position].begins_record:
            message = "\n".join(line.text for line in lines[start:position]).strip()
            if message:
                yield Raised("", message[:LONGEST_MESSAGE], line=lines[start].number, level=lines[start].level)
            start = position


class _Parser:
    """Walks over the lines of one process."""

    def __init__(self, lines: Sequence[Line]) -> None:
        self._lines = lines
        self._errors: list[Raised] = []
        self._frames: list[Frame] = []
        self._link: Link = ""

    def run(self) -> list[Raised]:
        position = 0
        while position < len(self._lines):
            position = self._step(position)
        return self._errors

    def _step(self, position: int) -> int:
        """Read the line at `position`; the position of the next one to read."""
        text = self._lines[position].text
        if _HEADER.match(text):
            self._frames = []
        elif (link := _link(text)) is not None:
            self._link = link
        elif (frame := _frame(text)) is not None:
            self._frames.append(frame)
        elif place := _PYTEST_PLACE.match(text):
            self._place(Frame(place["file"], int(place["line"]), ""), place["error_class"])
        elif self._frames and (arrow := _ARROW.match(text)):
            self._frames[-1] = replace(self._frames[-1], line=int(arrow["line"]))
        elif head := self._head(text):
            return self._read_error(position, head)
        return position + 1

    def _head(self, text: str) -> re.Match[str] | None:
        if len(text) > LONGEST_MESSAGE:
            text = text[:LONGEST_MESSAGE]
        text = text.lstrip("| ") if text.startswith(("  | ", "    | ")) else text
        return (_AFTER_FRAMES if self._frames else _HEAD).match(text)

    def _read_error(self, position: int, head: re.Match[str]) -> int:
        first = self._lines[position]
        message = [head["message"] or ""]
        position += 1
        while position < len(self._lines) and len(message) < _MOST_MESSAGE_LINES and self._continues(position, first):
            message.append(self._lines[position].text)
            position += 1
        self._errors.append(
            Raised(
                error_class=head["inner"] or head["error_class"],
                message="\n".join(message).strip()[:LONGEST_MESSAGE],
                frames=tuple(self._frames),
                link=self._link,
                line=first.number,
                level=first.level,
            )
        )
        self._frames, self._link = [], ""
        return position

    def _continues(self, position: int, first: Line) -> bool:
        """Whether a line still belongs to the message that began at `first`."""
        line = self._lines[position]
        if (
            _HEADER.match(line.text)
            or _link(line.text) is not None
            or _frame(line.text)
            or _GROUP_RULE.match(line.text)
        ):
            return False
        if _HEAD.match(line.text[:200]) or _PYTEST_PLACE.match(line.text):
            return False
        if line.level and line.level != first.level:
            return False
        if first.begins_record and first.level and line.begins_record and line.level and line.text[:1].isalpha():
            # Of lines that all have a prefix, those of one message are the ones that could not begin another.
            return self._lines[position - 1].text.rstrip().endswith((",", "(", ":", "-", "is", "the", "to", "of"))
        if not line.text.strip():
            following = self._lines[position + 1].text if position + 1 < len(self._lines) else ""
            return following[:1].isspace()
        return True

    def _place(self, frame: Frame, error_class: str) -> None:
        """Where pytest says, behind the message, that it was raised."""
        if self._errors and self._errors[-1].error_class.endswith(error_class) and not self._errors[-1].frames:
            self._errors[-1] = replace(self._errors[-1], frames=(frame,))


def _link(text: str) -> Link | None:
    if _CAUSE in text:
        return "cause"
    return "context" if _CONTEXT in text else None


def _frame(text: str) -> Frame | None:
    if len(text) > 1000:
        return None
    for pattern in _FRAMES:
        if match := pattern.match(text):
            return Frame(match["file"], int(match["line"] or 0), match["function"] or "")
    return None
