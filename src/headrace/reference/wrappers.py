"""What carries another error's message in its own: pydantic, argparse, HTTP clients, Ray, a repr. Knows no package.

Each rule looks at one message and yields the messages inside of it. `unwrap` applies them until nothing is inside.
Wrappers that a package writes itself (`Worker failed with error '...'`) are found by their template, not here.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from headrace.reference.messages import one_line


@dataclass(frozen=True, slots=True)
class Wrapper:
    """What stood around a message."""

    kind: str
    """`pydantic`, `argparse`, `openai`, `http`, `ray`, `repr`, `quotes`, `tuple`, `class`, `package`."""
    detail: str
    """In words, with what it tells: the model's name, the option, the class."""
    page_id: str = ""
    """The page of a wrapper that a package writes itself."""


@dataclass(frozen=True, slots=True)
class Said:
    """A class and a message, and what had to be taken away to get there, outermost first."""

    error_class: str
    message: str
    wrappers: tuple[Wrapper, ...] = ()
    owner: str = ""
    """Whose words these are, where the wrapper tells: pydantic's own checks, argparse's."""


_DEEPEST = 6
_MOST = 40


def unwrap(said: Said) -> list[Said]:
    """`said` and all that is inside of it, innermost first; an inner message stands before what carries it."""
    found: list[Said] = []

    def visit(outer: Said, depth: int) -> None:
        if depth < _DEEPEST and not outer.owner:
            for inner in _inside(outer):
                if len(found) < _MOST:
                    visit(inner, depth + 1)
        if (outer.error_class, outer.message) not in {(each.error_class, each.message) for each in found}:
            found.append(outer)

    visit(said, 0)
    return found


def _inside(said: Said) -> Iterator[Said]:
    for rule in _RULES:
        inner = list(rule(said))
        if inner:
            yield from inner
            return


def _within(said: Said, wrapper: Wrapper, message: str, error_class: str = "", owner: str = "") -> Said:
    return Said(error_class, message.strip(), (*said.wrappers, wrapper), owner)


# --- pydantic -----------------------------------------------------------------------------------------------------

_PYDANTIC_HEAD = re.compile(r"(?P<count>\d++) validation errors? for (?P<model>[\w.\[\],]++)")
_PYDANTIC_TAIL = re.compile(r"[\[(]type=(?P<type>[\w.]++)(?:[,;\])]|$)")
_PYDANTIC_VALUE = re.compile(r"(?P<kind>Value error|Assertion failed), ?")
_CLASS_OF = {"Value error": "ValueError", "Assertion failed": "AssertionError"}
_MORE_INFORMATION = re.compile(r"\s*For further information visit https?://\S++")
_OF_VALIDATORS = {"value_error", "assertion_error", "value_error.any"}


def _pydantic(said: Said) -> Iterator[Said]:
    head = _PYDANTIC_HEAD.search(said.message[:4000])
    if head is None:
        return
    for block in _pydantic_blocks(said.message[head.end() :]):
        tail = _last(_PYDANTIC_TAIL, block)
        text = (block[: tail.start()] if tail else block).strip()
        value = _PYDANTIC_VALUE.search(text)
        place = (text[: value.start()] if value else text.rpartition("\n")[0]).strip()
        wrapper = Wrapper("pydantic", f"validation of {head['model']}" + (f", field {place}" if place else ""))
        if value:
            yield _within(said, wrapper, text[value.end() :], _CLASS_OF[value["kind"]])
        elif tail and tail["type"] in _OF_VALIDATORS:
            yield _within(said, wrapper, text.rpartition("\n")[2], "ValueError")
        elif tail:
            yield _within(said, wrapper, text.rpartition("\n")[2], owner="pydantic")
        else:
            yield _within(said, wrapper, text.rpartition("\n")[2], "ValueError")


def _pydantic_blocks(text: str) -> Iterator[str]:
    """The findings one by one: each ends with its type, which a link may follow."""
    text = _MORE_INFORMATION.sub("\x00", text)
    start = 0
    for end in re.finditer(r"[\[(]type=[^\n\x00]*+(?:\n[^\n\x00]*?input_type=[^\n\x00]*+)?", text):
        yield text[start : end.end()].strip("\x00\n ")
        start = end.end()
    rest = text[start:].strip("\x00\n ")
    if rest and _PYDANTIC_VALUE.search(rest):
        yield rest


def _last(pattern: re.Pattern[str], text: str) -> re.Match[str] | None:
    return max(pattern.finditer(text), key=re.Match.start, default=None)


def _value_error(said: Said) -> Iterator[Said]:
    """A single finding of pydantic, without its head: `Value error, TEXT [type=value_error, ...`."""
    value = _PYDANTIC_VALUE.match(said.message)
    if value:
        tail = _last(_PYDANTIC_TAIL, said.message)
        text = said.message[value.end() : tail.start() if tail else None]
        yield _within(said, Wrapper("pydantic", "a validator"), text, _CLASS_OF[value["kind"]])


# --- argparse -----------------------------------------------------------------------------------------------------

_ARGPARSE = re.compile(r"(?:^|\n)(?P<program>[\w.\-/]++(?: [\w.\-]++){0,3}): error: (?P<message>[^\n].*+)", re.DOTALL)
_ARGUMENT = re.compile(r"argument (?P<option>[^:\n]++): (?P<message>.++)", re.DOTALL)
_ARGPARSE_OWN = re.compile(
    r"invalid choice: |invalid \w++ value: |unrecognized arguments: |the following arguments are required: |"
    r"expected (?:one|at least one|at most one|\d++) arguments?|ambiguous option: |not allowed with argument |"
    r"one of the arguments .+ is required|ignored explicit argument |too few arguments"
)


def _argparse(said: Said) -> Iterator[Said]:
    found = _ARGPARSE.search(said.message)
    program, message = (found["program"], found["message"]) if found else ("", said.message)
    option = _ARGUMENT.match(message)
    if found is None and option is None:
        return
    words = f"the command line of {program}" if program else "a command line"
    if option:
        words, message = f"{words}, {option['option']}", option["message"]
    own = "argparse" if _ARGPARSE_OWN.match(message) else ""
    yield _within(said, Wrapper("argparse", words), message, "" if own else "ArgumentTypeError", own)


_BARE_ERROR = re.compile(r"error: ")


def _bare_error(said: Said) -> Iterator[Said]:
    """What a command writes in front of its last words."""
    if not said.error_class and (bare := _BARE_ERROR.match(said.message)):
        yield _within(said, Wrapper("class", "an error line"), said.message[bare.end() :])


# --- HTTP bodies --------------------------------------------------------------------------------------------------

_BODY_KEY = re.compile(r"""(?P<key>['"](?:message|detail|error_message|msg)['"])\s*+:\s*+(?P<quote>['"])""")
_STATUS = re.compile(r"Error code: (?P<code>\d{3})")


def _http(said: Said) -> Iterator[Said]:
    if "{" not in said.message:
        return
    status = _STATUS.search(said.message)
    for key in _BODY_KEY.finditer(said.message):
        text = _quoted(said.message, key.end(), key["quote"])
        if text and "{" not in said.message[: key.start()].replace("{", "", 3):
            what = f"a server's answer{' with status ' + status['code'] if status else ''}"
            yield _within(said, Wrapper("openai" if status else "http", what), text)
            return


def _quoted(text: str, start: int, quote: str) -> str:
    """A string literal of JSON or Python from behind its opening quote on, unescaped; it may be cut off."""
    end = start
    while end < len(text) and text[end] != quote:
        end += 2 if text[end] == "\\" else 1
    body = text[start:end]
    # A line break inside of the literal comes from a narrow terminal.
    body = re.sub(r"\s*\n\s*", " ", body)
    if "\\" not in body:
        return body
    try:
        return str(ast.literal_eval(f"{quote}{body}{quote}"))
    except (ValueError, SyntaxError):
        return body.replace("\\n", "\n").replace(f"\\{quote}", quote)


# --- errors inside of a text --------------------------------------------------------------------------------------

_CLASS = r"(?P<error_class>(?:[A-Za-z_]\w*\.)*[A-Z]\w*(?:Error|Exception|Exit|Warning|Timeout|Failure))"
_REPR = re.compile(rf"\b{_CLASS}\((?P<quote>['\"])")
_NAMED = re.compile(rf"(?:^|[\s'\"(\[:,]){_CLASS}: ")
_RAY = re.compile(r"ray::\w")


def _repr(said: Said) -> Iterator[Said]:
    """`ValueError('TEXT')` somewhere in a text."""
    found = _REPR.search(said.message)
    if found:
        text = _quoted(said.message, found.end(), found["quote"])
        yield _within(said, Wrapper("repr", _carried(said)), text, found["error_class"])


def _named(said: Said) -> Iterator[Said]:
    """`ValueError: TEXT` somewhere in a text."""
    found = _NAMED.search(said.message)
    if found:
        kind = "ray" if _RAY.search(said.message[: found.start()]) else "class"
        text = said.message[found.end() :]
        opening = said.message[found.start() : found.start() + 1]
        if opening in "'\"" and opening in text:
            text = text[: text.rindex(opening)]
        yield _within(said, Wrapper(kind, _carried(said)), text, found["error_class"])


def _carried(said: Said) -> str:
    words = one_line(said.message)
    return f"{said.error_class or 'a text'}: {words[:60]}{'...' if len(words) > 60 else ''}"


_TAGS = re.compile(r"(?:\[[\w]+=[^\[\]]*+\] ?)+")


def _tagged(said: Said) -> Iterator[Said]:
    """`[address=0.0.0.0:1, pid=2] TEXT`, as actor frameworks mark the process."""
    tag = _TAGS.match(said.message)
    if tag and tag.end() < len(said.message):
        yield _within(
            said, Wrapper("class", f"the process {tag[0].strip()}"), said.message[tag.end() :], said.error_class
        )


def _whole_quotes(said: Said) -> Iterator[Said]:
    """A KeyError prints its message with quotes around it."""
    text = said.message.strip()
    if len(text) > 2 and text[0] in "'\"" and (said.error_class.endswith("KeyError") or not said.error_class):
        inner = _quoted(text, 1, text[0])
        if len(inner) > 1 and (" " in inner) and len(inner) >= len(text) - 3 - inner.count("\\") - text.count("\\"):
            yield _within(said, Wrapper("quotes", "the quotes of a KeyError"), inner, said.error_class)


_STRINGS = re.compile(r"'(?:[^'\\]|\\.)*+'|\"(?:[^\"\\]|\\.)*+\"|[^,'\"()]++")


def _tuple(said: Said) -> Iterator[Said]:
    """Several arguments are printed as a tuple: `('Text ', 'more text', 3)`."""
    text = said.message.strip()
    if not (text.startswith(("('", '("')) and text.endswith(")") and "," in text):
        return
    parts = [part.strip() for part in _STRINGS.findall(text[1:-1])]
    pieces = [_quoted(part, 1, part[0]) if part[:1] in "'\"" else part for part in parts if part]
    yield _within(said, Wrapper("tuple", "several arguments, printed as a tuple"), " ".join(pieces), said.error_class)


_RULES: tuple[Callable[[Said], Iterator[Said]], ...] = (
    _pydantic,
    _value_error,
    _argparse,
    _bare_error,
    _http,
    _tuple,
    _repr,
    _whole_quotes,
    _tagged,
    _named,
)
