"""Flags are read from the calls that declare them."""

from __future__ import annotations

import ast

from headrace.reference.options import by_spelling, read_flags

SOURCE = b"""
parser.add_argument("model")
parser.add_argument("--tensor-parallel-size", "-tp", type=int, help="how many")
group.add_argument("-v", "--verbose")
app.Option("--color/--no-color", help="--not-a-flag in a sentence")
other("--not-declared")
"""


def test_flags() -> None:
    flags = by_spelling(read_flags(ast.parse(SOURCE), SOURCE))
    assert flags == {
        "--tensor-parallel-size": "--tensor-parallel-size",
        "-tp": "--tensor-parallel-size",
        "-v": "--verbose",
        "--verbose": "--verbose",
        "--color": "--color",
        "--no-color": "--no-color",
    }


FIELDS = b"""
class ServeArgs:
    tool_call_parser: str | None = None
    enable_tools: bool = False
    other = 3

class Serve:
    def flags(parser):
        for key in fields(ServeArgs):
            parser.add_argument(*short, f"--{key}")
"""


def test_flags_that_are_the_fields_of_a_class() -> None:
    flags = by_spelling(read_flags(ast.parse(FIELDS), FIELDS))
    assert set(flags) == {"--tool-call-parser", "--enable-tools", "--no-enable-tools"}


def test_a_file_that_declares_none() -> None:
    assert read_flags(ast.parse(b"x = '--flag'"), b"x = '--flag'") == ()
