"""What requests may contain. A field that is not here is refused by name; so is a value that would have no effect.

Fields with one value that changes nothing (`frequency_penalty` 0, `store` false) take that value, because clients send
it; any other value of theirs would be ignored, so it is refused too.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, StringConstraints

from headrace.batching.sampling import SamplingParams

Penalty = Annotated[float, Field(ge=-2, le=2, allow_inf_nan=False)]
Stop = Annotated[str, StringConstraints(min_length=1, max_length=256)]
Stops = Annotated[list[Stop], Field(max_length=16)]
TokenId = Annotated[int, Field(ge=0, lt=2**31)]


class _Request(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class StreamOptions(_Request):
    """How a stream ends."""

    include_usage: bool = False


class TextFormat(_Request):
    """The only format of an answer: text as the model writes it."""

    type: Literal["text"]


class _Sampled(_Request):
    """What every kind of request can say about how tokens are chosen; None is the model's own default."""

    model: str | None = None
    """The name that the server was started with; may be left out, since there is only one."""
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, lt=2**31)] | None = None
    """0 and -1 are off."""
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Field(ge=0.01, le=10)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    stream: bool | None = None

    def params(self, defaults: dict[str, Any], seed: int, **others: Any) -> SamplingParams:
        """With the model's `defaults` for what was left out, and a seed for this answer."""
        names = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
        given = {name: value for name in names if (value := getattr(self, name)) is not None}
        chosen = {**defaults, **given}
        chosen["top_k"] = max(0, chosen.get("top_k", 0))
        return SamplingParams(**chosen, **others, seed=seed % 2**63)


class _Completed(_Sampled):
    frequency_penalty: Penalty | None = None
    presence_penalty: Penalty | None = None
    logit_bias: (
        dict[Annotated[str, StringConstraints(pattern=r"^\d{1,9}$")], Annotated[float, Field(ge=-100, le=100)]] | None
    ) = None
    n: Annotated[int, Field(ge=1, le=128)] | None = None
    stop: Stop | Stops | None = None
    stream_options: StreamOptions | None = None

    @property
    def stops(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else self.stop or []

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def asked_logprobs(self) -> int | None:
        raise NotImplementedError

    def answer_params(self, defaults: dict[str, Any], seed: int) -> SamplingParams:
        bias = tuple((int(token), value) for token, value in (self.logit_bias or {}).items())
        return self.params(
            defaults,
            seed,
            frequency_penalty=self.frequency_penalty or 0.0,
            presence_penalty=self.presence_penalty or 0.0,
            logit_bias=bias,
            logprobs=self.asked_logprobs,
        )


class CompletionRequest(_Completed):
    """POST /v1/completions: text, or tokens, that are continued."""

    prompt: (
        str
        | Annotated[list[str], Field(min_length=1, max_length=128)]
        | Annotated[list[TokenId], Field(min_length=1)]
        | Annotated[list[Annotated[list[TokenId], Field(min_length=1)]], Field(min_length=1, max_length=128)]
    )
    max_tokens: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    """None is 16, as it has always been for this route."""
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    echo: Literal[False] | None = None
    best_of: Literal[1] | None = None
    suffix: None = None

    @property
    def asked_logprobs(self) -> int | None:
        return self.logprobs

    @property
    def prompts(self) -> list[str | list[int]]:
        given: Any = self.prompt
        several = isinstance(given, list) and not isinstance(given[0], int)
        return list(given) if several else [given]


class Function(_Request):
    """A function that the model may ask for."""

    name: Annotated[str, StringConstraints(min_length=1, max_length=256)]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    """JSON Schema."""
    strict: Literal[False] | None = None


class Tool(_Request):
    """The only kind of tool."""

    type: Literal["function"]
    function: Function


def _json(text: str) -> str:
    json.loads(text)
    return text


JsonText = Annotated[str, AfterValidator(_json)]


class CalledFunction(_Request):
    """A call that the model made earlier in the conversation."""

    name: str
    arguments: JsonText


class MadeToolCall(_Request):
    """A tool call of an earlier answer."""

    id: str
    type: Literal["function"] = "function"
    function: CalledFunction
    index: int | None = None


class TextPart(_Request):
    """Part of a message. Images and sound are not understood."""

    type: Literal["text"]
    text: str


class Message(_Request):
    """One turn of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart] | None = None
    name: str | None = None
    tool_calls: list[MadeToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    refusal: None = None


class ChatRequest(_Completed):
    """POST /v1/chat/completions: a conversation whose next turn is answered."""

    messages: Annotated[list[Message], Field(min_length=1, max_length=4096)]
    max_tokens: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    """The newer name of the same. None for both is all that the context leaves."""
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    tools: list[Tool] | None = None
    tool_choice: Literal["auto", "none"] | None = None
    parallel_tool_calls: Literal[True] | None = None
    response_format: TextFormat | None = None
    store: Literal[False] | None = None
    service_tier: Literal["auto", "default"] | None = None

    @property
    def asked_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def answer_tokens(self) -> int | None:
        return self.max_completion_tokens if self.max_completion_tokens is not None else self.max_tokens


class ResponseTextFormat(_Request):
    """Where the Responses API says that an answer is text."""

    format: TextFormat | None = None
    verbosity: Literal["medium"] | None = None


class ResponseTool(_Request):
    """A function, in the flat form of the Responses API."""

    type: Literal["function"]
    name: Annotated[str, StringConstraints(min_length=1, max_length=256)]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class InputPart(_Request):
    """Part of a message of the Responses API; what only answers have may come back with them."""

    type: Literal["input_text", "output_text"]
    text: str
    annotations: list[Any] | None = None
    logprobs: list[Any] | None = None


class InputMessage(_Request):
    """One turn of a conversation, in the form of the Responses API."""

    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[InputPart]
    id: str | None = None
    status: str | None = None
    annotations: list[Any] | None = None


class InputFunctionCall(_Request):
    """A call that the model made earlier in the conversation."""

    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: JsonText
    id: str | None = None
    status: str | None = None


class InputFunctionOutput(_Request):
    """What a called function gave."""

    type: Literal["function_call_output"]
    call_id: str
    output: str
    id: str | None = None
    status: str | None = None


class ResponseRequest(_Sampled):
    """POST /v1/responses: one turn; nothing is stored between requests."""

    input: (
        str
        | Annotated[list[InputMessage | InputFunctionCall | InputFunctionOutput], Field(min_length=1, max_length=4096)]
    )
    instructions: str | None = None
    max_output_tokens: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    tools: list[ResponseTool] | None = None
    tool_choice: Literal["auto", "none"] | None = None
    parallel_tool_calls: Literal[True] | None = None
    text: ResponseTextFormat | None = None
    store: Literal[False] | None = None
    background: Literal[False] | None = None
    truncation: Literal["disabled"] | None = None
    service_tier: Literal["auto", "default"] | None = None
