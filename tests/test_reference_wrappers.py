"""What carries another message is taken off, layer by layer, and remembered."""

from __future__ import annotations

import json

import pytest

from headrace.reference.wrappers import Said, unwrap

MESSAGE = "rank 64 is greater than 16, see 'help'"


def innermost(error_class: str, text: str) -> tuple[str, str, list[str]]:
    said = unwrap(Said(error_class, text))[0]
    return said.error_class, said.message, [wrapper.kind for wrapper in said.wrappers]


PYDANTIC = (
    "1 validation error for ModelConfig\n  Value error, {} [type=value_error, input_value=Args((), {{'a': [1]}}), "
    "input_type=Args]\n    For further information visit https://errors.pydantic.dev/2.12/v/value_error"
)


@pytest.mark.parametrize(
    ("error_class", "text", "inner_class", "kinds"),
    [
        ("pydantic_core._pydantic_core.ValidationError", PYDANTIC.format(MESSAGE), "ValueError", ["pydantic"]),
        ("", f"Value error, {MESSAGE}", "ValueError", ["pydantic"]),
        ("", f"Assertion failed, {MESSAGE} [type=assertion_error, input_value=1]", "AssertionError", ["pydantic"]),
        (
            "ValidationError",
            f"1 validation error for M\nfield\n  {MESSAGE} (type=value_error)",
            "ValueError",
            ["pydantic"],
        ),
        ("", f"vllm serve: error: argument --x/-y: {MESSAGE}", "ArgumentTypeError", ["argparse"]),
        ("", f"usage: serve [-h]\n  [--x X]\nserve: error: {MESSAGE}", "ArgumentTypeError", ["argparse"]),
        ("", f"error: {MESSAGE}", "", ["class"]),
        ("openai.BadRequestError", "Error code: 400 - " + repr({"error": {"message": MESSAGE}}), "", ["openai"]),
        (
            "openai.BadRequestError",
            "Error code: 400 - " + repr({"object": "error", "message": MESSAGE}),
            "",
            ["openai"],
        ),
        ("", json.dumps({"error": {"message": MESSAGE, "code": 400}}), "", ["http"]),
        ("", "HTTP 400: " + json.dumps({"detail": MESSAGE}), "", ["http"]),
        ("DeadError", f"it ended: ValueError({MESSAGE!r}).", "ValueError", ["repr"]),
        ("DeadError", f"it ended with TypeError: {MESSAGE}", "TypeError", ["class"]),
        ("RayTaskError", f"ray::work() (pid=3) ValueError: {MESSAGE}", "ValueError", ["ray"]),
        ("KeyError", repr(MESSAGE), "KeyError", ["quotes"]),
        ("ValueError", "[address=0.0.0.0:3, pid=4] " + MESSAGE, "ValueError", ["class"]),
    ],
)
def test_one_layer(error_class: str, text: str, inner_class: str, kinds: list[str]) -> None:
    assert innermost(error_class, text) == (inner_class, MESSAGE, kinds)


def test_layers_in_layers() -> None:
    text = f"it ended: RuntimeError({('Value error, ' + MESSAGE)!r})"
    assert innermost("DeadError", text) == ("ValueError", MESSAGE, ["repr", "pydantic"])


def test_the_outer_ones_come_after_the_inner() -> None:
    text = f"Value error, {MESSAGE}"
    assert [said.message for said in unwrap(Said("", text))] == [MESSAGE, text]


def test_several_findings_of_pydantic() -> None:
    text = (
        "2 validation errors for Config\n  Value error, no room [type=value_error, input_value=1, input_type=int]\n"
        "    For further information visit https://errors.pydantic.dev/2/v/value_error\n"
        "size\n  Input should be a valid integer [type=int_type, input_value='x', input_type=str]"
    )
    first, second, whole = unwrap(Said("ValidationError", text))
    assert (first.message, first.owner) == ("no room", "")
    assert (second.message, second.owner) == ("Input should be a valid integer", "pydantic")
    assert "field size" in second.wrappers[0].detail
    assert whole.message == text


def test_argparse_speaks_for_itself() -> None:
    said = unwrap(Said("", "serve: error: argument --mode: invalid choice: 'c' (choose from a, b)"))[0]
    assert said.owner == "argparse"


def test_a_tuple_is_joined() -> None:
    assert innermost("ValueError", "('rank 64 is ', 'too large', 3)") == (
        "ValueError",
        "rank 64 is  too large 3",
        ["tuple"],
    )


def test_a_body_that_is_cut_off_or_broken_by_a_line() -> None:
    text = "Error code: 400 - {'object': 'error', 'message': 'rank 64\n is gre"
    assert innermost("openai.BadRequestError", text) == ("", "rank 64 is gre", ["openai"])


def test_a_plain_message_is_itself() -> None:
    assert unwrap(Said("ValueError", MESSAGE)) == [Said("ValueError", MESSAGE)]


def test_what_is_nested_without_end_ends() -> None:
    text = "ValueError('" * 2000
    assert len(unwrap(Said("", text))) < 50
