"""/v1/responses as OpenAI's own client calls it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import openai
import pytest
import tiny_models
import torch
from live_server import serving


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    directory = tiny_models.shared(tmp_path_factory.mktemp("models"), "llama", torch.float32)
    with serving(directory) as live, live.openai() as client:
        yield client


def respond(client: Any, **others: Any) -> Any:
    arguments = {"model": "tiny", "input": "the theme", "max_output_tokens": 8, "temperature": 0, **others}
    return client.responses.create(**arguments)


def test_a_turn_is_answered(client: Any) -> None:
    made = respond(client)
    assert made.output_text
    assert made.usage.output_tokens == 8
    assert made.status == "incomplete"
    assert made.incomplete_details.reason == "max_output_tokens"


def test_the_stream_ends_in_what_the_whole_says(client: Any) -> None:
    whole = respond(client)
    events = list(respond(client, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert events[0].type == "response.created"
    assert events[-1].type == "response.incomplete"
    assert events[-1].response.output_text == whole.output_text
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(deltas) == whole.output_text


def test_a_conversation_goes_on_from_what_came_back(client: Any) -> None:
    first = respond(client)
    turns = [{"role": "user", "content": "the theme"}, *first.output, {"role": "user", "content": "more"}]
    assert respond(client, input=turns, instructions="be brief").output_text


def test_instructions_come_first(client: Any) -> None:
    plain, instructed = respond(client), respond(client, instructions="the")
    assert instructed.usage.input_tokens > plain.usage.input_tokens


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"store": True}, "store"),
        ({"background": True}, "background"),
        ({"input": []}, "input"),
        ({"max_output_tokens": 4000}, "max_output_tokens"),
        ({"tools": [{"type": "function", "name": "f", "parameters": {}}]}, "tools"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(client: Any, change: dict[str, Any], field: str) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        respond(client, **change)
    assert refused.value.param == field
