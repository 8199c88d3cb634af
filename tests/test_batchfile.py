"""Lines of requests, and answers that a killed run leaves behind: each is there once, whole."""

from __future__ import annotations

import contextlib
import json
import resource
import signal
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.batchfile import Answers, Request, read_requests, unanswered
from headrace.errors import BadBatchLine, InvalidSetting, OtherBatch, OutputFailed


def file_of(path: Path, *lines: Any) -> Path:
    path.write_bytes(b"\n".join(line if isinstance(line, bytes) else json.dumps(line).encode() for line in lines))
    return path


def read(tmp_path: Path, *lines: Any, asked: dict[str, Any] | None = None) -> list[Request]:
    return read_requests(file_of(tmp_path / "questions.jsonl", *lines), asked or {})


# --- lines ----------------------------------------------------------------------------------------------------------


def test_each_form_of_a_line(tmp_path: Path) -> None:
    chat = [{"role": "system", "content": "Be short."}, {"role": "user", "content": "Hi"}]
    plain, talk, ours, theirs, continued = read(
        tmp_path,
        {"prompt": "Hi"},
        b"",
        {"messages": chat, "id": 7, "max_tokens": 3, "temperature": 0.5, "top_p": 0.9, "seed": 1},
        {"prompt": "Hi", "id": "a"},
        {
            "custom_id": "b",
            "method": "POST",
            "url": "/v1/chat/completions",
            "body": {"model": "m", "messages": chat, "max_completion_tokens": 9},
        },
        {"custom_id": "c", "url": "/v1/completions", "body": {"prompt": "Hi", "max_tokens": 2}},
    )
    assert (plain.index, plain.line, plain.id, plain.raw) == (0, 1, None, False)
    assert plain.messages == ({"role": "user", "content": "Hi"},)
    assert (talk.index, talk.line, talk.id) == (1, 3, 7)
    assert talk.messages == tuple(chat)
    assert (talk.max_tokens, talk.temperature, talk.top_p, talk.seed) == (3, 0.5, 0.9, 1)
    assert (ours.id, ours.max_tokens) == ("a", None)
    assert (theirs.id, theirs.max_tokens, theirs.raw) == ("b", 9, False)
    assert (continued.id, continued.max_tokens, continued.raw) == ("c", 2, True)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (b"{", "not JSON"),
        (b"\xff", "not UTF-8"),
        (b"[1]", "a JSON list, not an object"),
        ({}, "either 'prompt' or 'messages'"),
        ({"prompt": "a", "messages": [{"role": "user", "content": "b"}]}, "either 'prompt' or 'messages'"),
        ({"promt": "a"}, "no field 'promt'"),
        ({"prompt": ""}, "prompt: string should have at least 1 character"),
        ({"prompt": 3}, "prompt: input should be a valid string"),
        ({"prompt": "a", "max_tokens": 0}, "max_tokens: input should be greater than or equal to 1"),
        ({"prompt": "a", "max_tokens": True}, "max_tokens: input should be a valid integer"),
        ({"messages": []}, "messages: list should have at least 1 item"),
        ({"messages": [{"role": "nobody", "content": "b"}]}, "messages.0.role"),
        (b'{"prompt": "a", "temperature": NaN}', "temperature"),
        ({"custom_id": "a", "body": {"prompt": "a", "logit_bias": {}}}, "no field 'body.logit_bias'"),
        ({"custom_id": "a", "url": "/v1/embeddings", "body": {"prompt": "a"}}, "url"),
        (
            {"custom_id": "a", "url": "/v1/completions", "body": {"messages": [{"role": "user", "content": "b"}]}},
            "takes",
        ),
        ({"id": "x", "prompt": "a"}, "line 1 has the id 'x' too"),
    ],
)
def test_a_line_that_is_no_request_is_told_by_its_place(tmp_path: Path, line: Any, words: str) -> None:
    with pytest.raises(BadBatchLine) as caught:
        read(tmp_path, {"prompt": "Hi", "id": "x"}, b"", line)
    assert caught.value.line == 3
    assert words.lower() in caught.value.reason.lower()
    assert "questions.jsonl" in caught.value.message


def test_a_file_that_is_not_there_or_empty(tmp_path: Path) -> None:
    with pytest.raises(InvalidSetting, match="No such file"):
        read_requests(tmp_path / "none", {})
    with pytest.raises(BadBatchLine, match="not one request"):
        read(tmp_path, b"", b"  ")


def test_a_digest_tells_apart_what_is_asked_and_how(tmp_path: Path) -> None:
    same = read(tmp_path, {"prompt": "a", "max_tokens": 3})[0].digest
    assert read(tmp_path, b'{"max_tokens":3,  "prompt":"a"}')[0].digest == same
    others = [
        read(tmp_path, {"prompt": "b", "max_tokens": 3})[0].digest,
        read(tmp_path, {"prompt": "a"})[0].digest,
        read(tmp_path, {"prompt": "a", "max_tokens": 3}, asked={"model": "m"})[0].digest,
    ]
    assert len({same, *others}) == 4


# --- answers --------------------------------------------------------------------------------------------------------


def test_answers_are_lines_with_whose_they_are(tmp_path: Path) -> None:
    requests = read(tmp_path, {"prompt": "a", "id": "x"}, {"prompt": "b"})
    out = tmp_path / "answers.jsonl"
    with contextlib.closing(Answers(out, requests)) as answers:
        assert answers.done == set()
        answers.write(requests[1], {"text": "zwei\n\u2028"})
        answers.write(requests[0], {"text": "one"})
        assert list(unanswered(requests, answers)) == []
    lines = [json.loads(line) for line in out.read_bytes().split(b"\n")[:-1]]
    assert [(line["index"], line.get("id"), line["text"]) for line in lines] == [
        (1, None, "zwei\n\u2028"),
        (0, "x", "one"),
    ]


@given(
    answered=st.lists(st.integers(0, 7), unique=True),
    cut=st.integers(0, 10**6),
    texts=st.lists(st.text(max_size=20), min_size=8, max_size=8),
)
def test_killed_at_any_byte_the_next_run_leaves_each_answer_exactly_once(
    tmp_path_factory: pytest.TempPathFactory, answered: list[int], cut: int, texts: list[str]
) -> None:
    folder = tmp_path_factory.mktemp("batch")
    requests = read(folder, *({"prompt": f"question {number}"} for number in range(8)))
    out = folder / "answers.jsonl"
    with contextlib.closing(Answers(out, requests)) as answers:
        for index in answered:
            answers.write(requests[index], {"text": texts[index]})
    data = out.read_bytes()
    out.write_bytes(data[: cut % (len(data) + 1)])
    whole = out.read_bytes().count(b"\n")
    with contextlib.closing(Answers(out, requests)) as answers:
        assert answers.done == set(answered[:whole])
        for request in unanswered(requests, answers):
            answers.write(request, {"text": texts[request.index]})
    lines = [json.loads(line) for line in out.read_bytes().split(b"\n")[:-1]]
    assert sorted(line["index"] for line in lines) == list(range(8))
    # A lone surrogate is no text: it is replaced, as everywhere.
    assert all(
        line["text"].encode("utf-8", "replace") == texts[line["index"]].encode("utf-8", "replace") for line in lines
    )


@pytest.mark.parametrize(
    "line", [b"{}", b"nonsense", b'{"index": 9, "digest": "0"}', b'{"index": 0, "digest": "0"}', b'{"index": true}']
)
def test_what_answers_something_else_is_left_alone(tmp_path: Path, line: bytes) -> None:
    requests = read(tmp_path, {"prompt": "a"})
    out = tmp_path / "answers.jsonl"
    out.write_bytes(line + b"\n")
    with pytest.raises(OtherBatch, match="Line 1"):
        Answers(out, requests)
    assert out.read_bytes() == line + b"\n"


def test_two_runs_do_not_write_to_one_file(tmp_path: Path) -> None:
    requests = read(tmp_path, {"prompt": "a"})
    with contextlib.closing(Answers(tmp_path / "out", requests)), pytest.raises(OutputFailed, match="another run"):
        Answers(tmp_path / "out", requests)
    Answers(tmp_path / "out", requests).close()


def test_a_place_that_cannot_be_written(tmp_path: Path) -> None:
    requests = read(tmp_path, {"prompt": "a"})
    with pytest.raises(OutputFailed, match="No such file or directory"):
        Answers(tmp_path / "nowhere" / "out", requests)
    with pytest.raises(OutputFailed, match="no file to go on with"):
        Answers(Path("/dev/full"), requests)


def test_an_answer_that_finds_no_room_is_not_there_in_part(tmp_path: Path) -> None:
    requests = read(tmp_path, {"prompt": "a"}, {"prompt": "b"})
    out = tmp_path / "answers.jsonl"
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    with contextlib.closing(Answers(out, requests)) as answers:
        answers.write(requests[0], {"text": "short"})
        size = out.stat().st_size
        resource.setrlimit(resource.RLIMIT_FSIZE, (size + 40, before[1]))
        try:
            with pytest.raises(OutputFailed, match="File too large"):
                answers.write(requests[1], {"text": "long" * 100})
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
            signal.signal(signal.SIGXFSZ, ignored)
        assert out.stat().st_size == size
        assert answers.done == {0}
        answers.write(requests[1], {"text": "long" * 100})
    with contextlib.closing(Answers(out, requests)) as answers:
        assert answers.done == {0, 1}
