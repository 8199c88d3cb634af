"""A paste made readable: colours, log prefixes and typographic quotes taken away. Knows no package and no template.

    (EngineCore_DP0 pid=7) ERROR 11-18 18:07:28 [core.py:708] ValueError: No room      a line as it was pasted
    ValueError: No room                                                                 what is left of it

What the prefix told (which process, which level) is kept beside the text.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

MOST_CHARACTERS = 200_000
"""Of a paste; the last ones are kept, since the error that ends a program stands at the end."""
LONGEST_MESSAGE = 20_000
"""Of one message, in characters."""


@dataclass(frozen=True, slots=True)
class Line:
    """One line of a paste without what the logging around it added."""

    text: str
    number: int
    """1 is the first line of the paste."""
    source: str = ""
    """The process that wrote it, as the prefix names it: `EngineCore_DP0 pid=7`."""
    level: str = ""
    """`ERROR`, `INFO` ...; empty if the prefix tells none."""
    begins_record: bool = False
    """There was a prefix, so this is where a log record may begin."""


_ANSI = re.compile(r"\x1b(?:\[[0-9;:?]*+[ -/]*+[@-~]|\][^\x07\x1b]*+(?:\x07|\x1b\\)|[@-Z\\^_])")
_TYPOGRAPHIC = str.maketrans(
    {
        "\u2018": "'",
        "\u2019": "'",
        "\u201c": '"',
        "\u201d": '"',
        "\u00a0": " ",
        "\u200b": None,
        "\ufeff": None,
        "\u2028": "\n",
    }
)
_LEVELS = "TRACE|DEBUG|INFO|NOTICE|WARNING|WARN|ERROR|CRITICAL|FATAL"
_CLOCK = r"\d{1,2}:\d\d:\d\d(?:[.,]\d++)?"

# Each is tried at the start of what is left of a line until none fits. None of them eats more than one blank behind
# itself, so that the indentation of a traceback stays. All are possessive or of fixed shape: no backtracking.
_PREFIXES = tuple(
    re.compile(pattern)
    for pattern in (
        # (EngineCore_DP0 pid=1094)   (RayWorkerWrapper pid=12, ip=10.0.0.1)   (pid=12)
        r"\((?P<source>(?:[\w.:/\-]++ )*+(?:pid|ip|rank)=[^()\n]*+)\) ?",
        r"\[(?P<source>(?:default)?rank ?\d++)\]:? ?",
        r"\[\d++,\d++\]<(?:stderr|stdout)>: ?",
        # docker compose, kubernetes with a selector: `vllm-1  | `
        r"(?P<source>[\w.\-/]*+)[ ]{2,}\| ?|(?P<source2>[\w.\-/]++(?<=\d)) ?\| ",
        # kubernetes' and containerd's own: `2024-11-18T18:07:28Z stderr F `
        r"(?:stderr|stdout) [FP] ",
        rf"\[?\d{{4}}[-/]\d\d[-/]\d\d[T ]{_CLOCK}(?: ?(?:Z|UTC|[+-]\d\d:?\d\d))?\]?:? ?(?:[-|] )?",
        rf"\[?\d\d[-/]\d\d {_CLOCK}\]?:? ?(?:[-|] )?",
        rf"\[?{_CLOCK}\]? (?:[-|] )?",
        # syslog: `Nov 18 18:07:28 host vllm[12]: `
        rf"(?:Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec) {{1,2}}\d{{1,2}} {_CLOCK} (?:[\w.\-]++ )?[\w.\-@/]++"
        r"(?:\[\d++\])?: ",
        # glog: `E1118 18:07:28.123456  1234 engine.py:366] `
        rf"[IWEF]\d{{4}} {_CLOCK} ++\d++ [\w./\-]++:\d++\] ?",
        # logging's own: `ERROR:vllm.engine:`, and `ERROR 11-18 ...`, `[ERROR]`, `ERROR - `, `| ERROR    |`
        rf"(?P<level>{_LEVELS}):[\w.\-]++: ?",
        rf"\[(?P<level>{_LEVELS})\]:? ?(?:[-|] ?)?",
        rf"(?P<level>{_LEVELS})(?: *+[-|] |: *+(?=\S)| (?=[\d\[])| ++(?=\[)| (?=[\w./\-]++:\d++\]))",
        # the place of the log call: `[core.py:708] `, `engine.py:366] `
        r"\[[\w./\-]++:\d++\] ?",
        r"[\w./\-]+?\.(?:py|cc|cpp|cu|rs):\d++\] ?",
        r"(?:stderr|stdout) ?[|:] ?|\[(?:stderr|stdout)\] ?",
        r"\| (?=\S)",
        # a reporter of tests marks the lines of an error, and the line that raised
        r"E {3}(?: {4})?",
        r">(?: |$)",
    )
)
_MOST_PREFIXES = 12
_DASHED = re.compile(rf"[\w.\-]++ - (?P<level>{_LEVELS}) - ")


def clean(paste: str) -> list[Line]:
    """The lines of a paste without colours and prefixes. Bounded: only the last `MOST_CHARACTERS` are read."""
    text = _ANSI.sub("", paste[-MOST_CHARACTERS:]).translate(_TYPOGRAPHIC)
    lines = (text.replace("\r\n", "\n").replace("\r", "\n")).split("\n")
    return [_stripped(line.rstrip(), number) for number, line in enumerate(lines, 1) if not line.startswith("```")]


def _stripped(text: str, number: int) -> Line:
    source = level = ""
    stripped = False
    for _ in range(_MOST_PREFIXES):
        found = next((match for prefix in _PREFIXES if (match := prefix.match(text)) and match.end()), None)
        if found is None and level == "" and stripped:
            found = _DASHED.match(text)
        if found is None:
            break
        groups = found.groupdict()
        source = groups.get("source") or groups.get("source2") or source
        level = groups.get("level") or level
        text, stripped = text[found.end() :], True
    return Line(text, number, source, level, stripped)


def by_source(lines: list[Line]) -> list[list[Line]]:
    """Lines of each process together, since processes write between each other's lines; in order of last words.

    A line without a prefix continues the one before it.
    """
    streams: dict[str, list[Line]] = {}
    last: dict[str, int] = {}
    current = ""
    for line in lines:
        if line.source or line.begins_record:
            current = line.source
        streams.setdefault(current, []).append(line)
        last[current] = line.number
    return [streams[source] for source in sorted(streams, key=last.__getitem__)]


def one_line(text: str) -> str:
    """White space collapsed, and cut to what is ever compared."""
    return " ".join(text[:LONGEST_MESSAGE].split())
