"""The routes as OpenAI's own client calls them, and as anybody may."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest
import tiny_models
import torch
from fakes import one_thread
from live_server import Live, serving, wait_until
from test_batching_batcher import READ_ERROR, Failing

MESSAGES = [{"role": "user", "content": "the theme"}]


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    directory = tiny_models.shared(tmp_path_factory.mktemp("models"), "llama", torch.float32)
    with one_thread(), serving(directory, share=0.5) as live:
        assert live.service.report.offloaded_bytes > 0
        yield live


@pytest.fixture
def client(live: Live) -> Iterator[Any]:
    with live.openai() as client:
        yield client


def chat(client: Any, **others: Any) -> Any:
    return client.chat.completions.create(**{"model": "tiny", "messages": MESSAGES, "max_tokens": 8, **others})


def complete(client: Any, **others: Any) -> Any:
    return client.completions.create(**{"model": "tiny", "prompt": "the", "max_tokens": 8, **others})


def test_a_chat_is_answered(client: Any) -> None:
    made = chat(client, temperature=0)
    type(made).model_validate(made.model_dump())
    assert made.object == "chat.completion"
    assert made.choices[0].message.role == "assistant"
    assert made.choices[0].finish_reason in ("stop", "length")
    assert made.usage.total_tokens == made.usage.prompt_tokens + made.usage.completion_tokens
    assert made.usage.completion_tokens <= 8


def test_a_stream_says_the_same_as_the_whole(client: Any) -> None:
    whole = chat(client, temperature=0, logprobs=True, top_logprobs=2)
    chunks = list(
        chat(
            client,
            temperature=0,
            logprobs=True,
            top_logprobs=2,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    *chunks, last = chunks
    assert last.choices == []
    assert last.usage == whole.usage
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole.choices[0].message.content
    assert chunks[-1].choices[0].finish_reason == whole.choices[0].finish_reason
    streamed = [entry for chunk in chunks if chunk.choices[0].logprobs for entry in chunk.choices[0].logprobs.content]
    assert streamed == whole.choices[0].logprobs.content
    assert all(len(entry.top_logprobs) == 2 for entry in streamed)
    assert all(entry.logprob == entry.top_logprobs[0].logprob for entry in streamed)  # greedy: the likeliest


def test_several_answers_are_told_apart_and_come_again_with_the_seed(client: Any) -> None:
    first = [choice.message.content for choice in chat(client, n=3, seed=7, temperature=1.5).choices]
    again = [choice.message.content for choice in chat(client, n=3, seed=7, temperature=1.5).choices]
    assert first == again
    assert len(set(first)) == 3
    streamed = ["", "", ""]
    for chunk in chat(client, n=3, seed=7, temperature=1.5, stream=True):
        for choice in chunk.choices:
            streamed[choice.index] += choice.delta.content or ""
    assert streamed == first


def test_without_a_seed_answers_differ(client: Any) -> None:
    assert len({chat(client, temperature=2.0).choices[0].message.content for _ in range(3)}) > 1


def test_text_is_continued_for_several_prompts(client: Any) -> None:
    both = complete(client, prompt=["the", "theme"], temperature=0, n=2)
    assert [choice.index for choice in both.choices] == [0, 1, 2, 3]
    texts = [choice.text for choice in both.choices]
    assert texts[0] == texts[1] == complete(client, temperature=0).choices[0].text
    assert texts[2] == texts[3] == complete(client, prompt="theme", temperature=0).choices[0].text
    assert both.usage.prompt_tokens == sum(
        complete(client, prompt=prompt).usage.prompt_tokens for prompt in ("the", "theme")
    )


def test_tokens_are_as_good_as_text(live: Live, client: Any) -> None:
    ids = live.service.tokenizer("theme")["input_ids"]
    assert (
        complete(client, prompt=ids, temperature=0).choices[0].text
        == complete(client, prompt="theme", temperature=0).choices[0].text
    )
    assert complete(client, prompt=[ids, ids], temperature=0, max_tokens=1).usage.prompt_tokens == 2 * len(ids)


def test_an_answer_ends_before_its_stop_string(client: Any) -> None:
    text = complete(client, temperature=0, max_tokens=30).choices[0].text
    stop = text[4:6]
    made = complete(client, temperature=0, max_tokens=30, stop=[stop, "never comes up"])
    assert made.choices[0].text == text[: text.index(stop)]
    assert made.choices[0].finish_reason == "stop"
    streamed = "".join(
        chunk.choices[0].text for chunk in complete(client, temperature=0, max_tokens=30, stop=stop, stream=True)
    )
    assert streamed == made.choices[0].text


def test_logprobs_of_continued_text(client: Any) -> None:
    made = complete(client, temperature=0, logprobs=3).choices[0]
    assert len(made.logprobs.tokens) == len(made.logprobs.token_logprobs) == len(made.logprobs.text_offset)
    assert all(len(top) <= 3 for top in made.logprobs.top_logprobs)
    assert all(-100 < value <= 0 for value in made.logprobs.token_logprobs)


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"guided_regex": "a"}, "guided_regex"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"response_format": {"type": "json_object"}}, "response_format.type"),
        ({"temperature": 3.0}, "temperature"),
        ({"n": 0}, "n"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user", "content": "a", "who": "b"}]}, "messages[0].who"),
        ({"messages": [{"role": "nobody", "content": "a"}]}, "messages[0].role"),
        ({"user": "me"}, "user"),
        ({"logit_bias": {"99999": 1}}, "logit_bias"),
        ({"max_tokens": 4000}, "max_tokens"),
        ({"stream_options": {"include_usage": True, "more": 1}}, "stream_options.more"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(live: Live, change: dict[str, Any], field: str) -> None:
    body = {"model": "tiny", "messages": MESSAGES, "max_tokens": 1, **change}
    with live.client() as client:
        answer = client.post("/v1/chat/completions", json=body)
        error = answer.json()["error"]
        assert answer.status_code == 400
        assert error["param"] == field
        assert error["type"] == "invalid_request_error"
        assert error["param"].split(".")[-1].split("[")[0] in error["message"]
        page = client.get(error["doc_url"])
        assert page.status_code == 200
        assert error["doc_url"].rpartition("/")[2] in page.text


def test_what_changes_nothing_may_be_said(client: Any) -> None:
    chat(
        client,
        n=1,
        frequency_penalty=0,
        presence_penalty=0,
        logit_bias={},
        tool_choice="auto",
        parallel_tool_calls=True,
        store=False,
        response_format={"type": "text"},
        service_tier="auto",
    )


def test_a_model_that_is_not_here(client: Any) -> None:
    with pytest.raises(openai.NotFoundError, match="'tiny'"):
        chat(client, model="gpt-9")
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").id == "tiny"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("org/other")


def test_many_at_once_are_not_mixed_up(live: Live, client: Any) -> None:
    prompts = [chr(ord("a") + number) * (number + 1) for number in range(12)]

    def ask(prompt: str) -> str:
        return str(complete(client, prompt=prompt, temperature=0, max_tokens=12).choices[0].text)

    alone = [ask(prompt) for prompt in prompts]
    with ThreadPoolExecutor(12) as pool:
        assert list(pool.map(ask, prompts)) == alone
    live.wait_idle()


def test_a_reader_that_leaves_is_noticed(live: Live) -> None:
    before = live.service.telemetry.generation_tokens._value.get()
    with (
        live.client() as client,
        client.stream("POST", "/v1/completions", json={"prompt": "a", "max_tokens": 120, "stream": True}) as answer,
    ):
        next(answer.iter_lines())
    live.wait_idle()
    assert live.service.telemetry.generation_tokens._value.get() - before <= 120


@pytest.mark.parametrize("stream", [False, True])
def test_a_read_error_is_a_500_that_says_what_happened(tmp_path: Path, stream: bool) -> None:
    directory = tiny_models.write(tmp_path / "model", "llama", torch.float32)
    with serving(directory) as live, live.client() as client:
        failing = Failing(live.service, READ_ERROR)
        failing.left = 1
        body = {"prompt": "a", "max_tokens": 3, "stream": stream}
        answer = client.post("/v1/completions", json=body)
        assert answer.status_code == 500
        assert answer.json()["error"]["code"] == "read_error"
        assert READ_ERROR.what in answer.json()["error"]["message"]
        assert client.post("/v1/completions", json=body).status_code == 200
        assert client.get("/ready").status_code == 200
        failing.left = 3
        assert [client.post("/v1/completions", json=body).status_code for _ in range(3)] == [500, 500, 500]
        ready = client.get("/ready")
        assert ready.status_code == 503
        assert "Input/output error" in ready.json()["reason"]
        assert client.get("/health").status_code == 200


def test_an_error_in_the_middle_ends_the_stream_with_its_words(tmp_path: Path) -> None:
    directory = tiny_models.write(tmp_path / "model", "llama", torch.float32)
    with serving(directory) as live, live.client() as client:
        failing = Failing(live.service, READ_ERROR)
        request = {"prompt": "a", "max_tokens": 100, "stream": True}
        with client.stream("POST", "/v1/completions", json=request) as answer:
            lines = answer.iter_lines()
            assert json.loads(next(lines).removeprefix("data: "))["choices"]
            failing.left = 1
            *_, last = [line for line in lines if line]
        assert json.loads(last.removeprefix("data: "))["error"]["code"] == "read_error"


def test_a_full_queue_answers_at_once_and_says_when_to_come_back(tmp_path: Path) -> None:
    directory = tiny_models.write(tmp_path / "model", "llama", torch.float32)
    release = threading.Event()
    with serving(directory, max_num_seqs=1, max_waiting=1) as live, live.client() as client:
        forward = live.service.engine.model.forward
        live.service.engine.model.forward = lambda *args, **kwargs: (release.wait(), forward(*args, **kwargs))[1]
        body = {"prompt": "a", "max_tokens": 2}
        with ThreadPoolExecutor(2) as pool:
            served = [pool.submit(client.post, "/v1/completions", json=body) for _ in range(2)]
            try:
                wait_until(lambda: live.service.batcher.unfinished == 2)
                answer = client.post("/v1/completions", json=body)
            finally:
                release.set()
            assert answer.status_code == 429
            assert int(answer.headers["Retry-After"]) >= 1
            assert answer.json()["error"]["code"] == "rate_limit_exceeded"
            assert [each.result().status_code for each in served] == [200, 200]


def test_a_slow_reader_holds_nobody_up(live: Live) -> None:
    """One reader takes nothing at all while others are answered, and then gets all of it."""
    body = {"prompt": "a", "max_tokens": 100, "stream": True, "stream_options": {"include_usage": True}, "seed": 1}
    with live.client() as slow, live.client() as quick, slow.stream("POST", "/v1/completions", json=body) as answer:
        lines = answer.iter_lines()
        next(lines)
        for _ in range(5):
            assert quick.post("/v1/completions", json={"prompt": "b", "max_tokens": 5}).status_code == 200
        live.wait_idle()
        *_, last, done = [line for line in lines if line]
        assert done == "data: [DONE]"
        assert json.loads(last.removeprefix("data: "))["usage"]["completion_tokens"] > 20
