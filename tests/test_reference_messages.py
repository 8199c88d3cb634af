"""What logging adds to a line is taken away, and nothing else."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.reference.messages import MOST_CHARACTERS, by_source, clean, one_line

TEXT = "ValueError: 3 + 4 is not 8"


@pytest.mark.parametrize(
    "prefix",
    [
        "(EngineCore_DP0 pid=1094) ",
        "(Worker_TP4_EP4 pid=2532) ERROR 12-29 15:21:11 [multiproc_executor.py:751] ",
        "\x1b[36m(RayWorkerWrapper pid=12, ip=10.0.0.1)\x1b[0m ",
        "[rank0]: ",
        "[1,0]<stderr>:",
        "vllm-1  | ERROR 11-18 18:07:28 engine.py:366] ",
        "my-pod-7f9 | ",
        "2024-11-18T18:07:28.123Z stderr F ",
        "2024-11-18 18:07:28,123 - vllm.engine - ERROR - ",
        "[2024-11-18 18:07:28] ERROR: ",
        "2024-11-18 18:07:28 | ERROR    | stderr | ",
        "Nov 18 18:07:28 host vllm[123]: ",
        "E1118 18:07:28.123456  1234 engine.py:366] ",
        "ERROR:vllm.engine:",
        "[ERROR] ",
        "ERROR 11-18 18:07:28 [core.py:708] ",
        "E   ",
        "> ",
        "[multiproc_executor.py:492] ",
    ],
)
def test_a_prefix_is_taken_away(prefix: str) -> None:
    (line,) = clean(prefix + TEXT)
    assert line.text == TEXT
    assert line.begins_record


@pytest.mark.parametrize(
    "text",
    [
        TEXT,
        "(8) must be <= (4)",
        "[1, 2] is no shape",
        "ERROR handling is off",
        "Error: no such option",
        "int | None is not allowed",
        "11 is not 12",
        "engine.py is missing",
        "    indented",
        "E is not known",
    ],
)
def test_a_message_stays_as_it_is(text: str) -> None:
    (line,) = clean(text)
    assert line.text == text
    assert not line.begins_record


def test_a_prefix_tells_who_wrote_and_how_bad_it_is() -> None:
    (line,) = clean("(APIServer pid=7) WARNING 01-02 03:04:05 [x.py:1] words")
    assert (line.source, line.level, line.number) == ("APIServer pid=7", "WARNING", 1)


def test_the_indentation_behind_a_prefix_stays() -> None:
    (line,) = clean('ERROR 11-18 18:07:28 [core.py:708]   File "a.py", line 3, in f')
    assert line.text == '  File "a.py", line 3, in f'


def test_typographic_quotes_become_plain() -> None:
    assert clean("\u2018a\u2019 and \u201cb\u201d")[0].text == "'a' and \"b\""


def test_processes_that_write_between_each_other() -> None:
    lines = clean("(A pid=1) one\n(B pid=2) two\n(A pid=1) three\nwithout a prefix\n(B pid=2) four")
    told = [[line.text for line in stream] for stream in by_source(lines)]
    assert told == [["one", "three", "without a prefix"], ["two", "four"]]


def test_only_the_end_of_a_long_paste_is_read() -> None:
    lines = clean("x" * MOST_CHARACTERS + "\nthe end")
    assert lines[-1].text == "the end"
    assert sum(len(line.text) for line in lines) < MOST_CHARACTERS


def test_one_line() -> None:
    assert one_line(" a\n  b\tc ") == "a b c"


@given(st.text(st.sampled_from("(|[]) pid=:-.,0123456789TZERROR \t\x1b'E>"), max_size=3000))
def test_no_text_takes_long(text: str) -> None:
    """Steps, not seconds, are bounded: each prefix is taken away at most a dozen times."""
    for line in clean(text):
        assert len(line.text) <= len(text)


def test_a_line_made_to_backtrack() -> None:
    start = time.process_time()
    for part in ("(pid=" * 5000, "a.b" * 20000, "[" * 50000, "1" * 60000, "\x1b[" * 30000, " " * 60000 + "|"):
        clean(part * 2)
    assert time.process_time() - start < 30, "quadratic time would be minutes"
