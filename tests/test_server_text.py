"""From tokens to text, reasoning and tool calls."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from transformers.cli.serving.utils import _RESPONSE_TEMPLATE_FALLBACKS
from transformers.utils.chat_parsing import ResponseParser

from headrace.server.text import AnswerParts, Piece, StopStrings, ToolCall

QWEN = next(template for types, template in _RESPONSE_TEMPLATE_FALLBACKS.items() if "qwen3" in types)

TEXT = st.text(alphabet="ab", max_size=30)
STOP = st.text(alphabet="ab", min_size=1, max_size=4)


@given(pieces=st.lists(TEXT, max_size=8), stops=st.lists(STOP, min_size=1, max_size=3))
def test_text_ends_before_the_first_stop_string_however_it_comes_in_pieces(pieces: list[str], stops: list[str]) -> None:
    whole = "".join(pieces)
    found = [position for stop in stops if (position := whole.find(stop)) >= 0]
    watcher = StopStrings(stops)
    told = ""
    for piece in pieces:
        told += watcher.feed(piece)
        if watcher.stopped:
            break
    else:
        told += watcher.flush()
    assert watcher.stopped == bool(found)
    # Pieces end at tokens: within one, the first stop string in the text counts.
    assert whole.startswith(told)
    if found:
        assert len(told) >= min(found)
        assert not any(stop in told for stop in stops)
    else:
        assert told == whole


def test_nothing_is_held_back_without_need() -> None:
    watcher = StopStrings(["END"])
    assert watcher.feed("the E") == "the "
    assert watcher.feed("nd") == "End"
    assert watcher.feed("EN") == ""
    assert watcher.feed("D more") == ""
    assert watcher.stopped


def sorted_in_pieces(text: str, size: int) -> tuple[Piece, bool]:
    parts = AnswerParts(ResponseParser(QWEN, prefix="<|im_start|>assistant\n"))
    whole = parts.begin()
    pieces = [parts.feed(text[start : start + size]) for start in range(0, len(text), size)]
    for piece in [*pieces, parts.end()]:
        whole.text += piece.text
        whole.reasoning += piece.reasoning
        whole.tool_calls += piece.tool_calls
    return whole, parts.called_tools


def test_reasoning_and_tool_calls_are_told_from_text() -> None:
    text = '<think>\nhm\n</think>\n\n<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call><|im_end|>'
    for size in (1, 5, 1000):
        whole, called = sorted_in_pieces(text, size)
        assert called
        assert whole.reasoning.strip() == "hm"
        assert whole.text.strip() == ""
        assert whole.tool_calls == [ToolCall("add", '{"a": 1}')]


def test_an_answer_that_ends_within_a_tool_call_calls_nothing() -> None:
    whole, called = sorted_in_pieces('well <tool_call>\n{"name": "ad', 3)
    assert not called
    assert whole.text.strip() == "well"


def test_without_a_template_all_is_text() -> None:
    parts = AnswerParts()
    assert parts.begin().is_empty
    assert parts.feed("<think>") == Piece(text="<think>")
    assert parts.end().is_empty
