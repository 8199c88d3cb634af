"""A file of requests, one JSON object a line, and the file of their answers, which a killed run can go on with.

Lines are checked before anything is loaded. An answer is one appended line, so that a run that is killed has written
whole lines and at most one torn one. No torch, no model.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError, model_validator

from headrace.errors import BadBatchLine, InvalidSetting, OtherBatch, OutputFailed, Reason

Text = Annotated[str, StringConstraints(min_length=1)]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class Message(_Strict):
    """One turn of a conversation."""

    role: Literal["system", "user", "assistant", "developer", "tool"]
    content: str


class _Settings(_Strict):
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: Annotated[float, Field(ge=0, le=10)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    seed: Annotated[int, Field(ge=0, lt=2**63)] | None = None
    prompt: Text | None = None
    messages: Annotated[list[Message], Field(min_length=1)] | None = None

    @model_validator(mode="after")
    def _one_question(self) -> Self:
        if (self.prompt is None) == (self.messages is None):
            raise Reason("it needs either 'prompt' or 'messages'")
        return self


class _Plain(_Settings):
    id: str | int | None = None


class _Body(_Settings):
    """OpenAI's name for the longest answer is another one in newer requests; the model is the one that runs."""

    model: str | None = None
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None


class _OpenAI(_Strict):
    custom_id: str
    method: Literal["POST"] = "POST"
    url: Literal["/v1/chat/completions", "/v1/completions"] | None = None
    body: _Body


@dataclass(frozen=True, slots=True)
class Request:
    """One line, checked."""

    index: int
    """From 0, among the lines that are not blank."""
    line: int
    """From 1, in the file."""
    id: str | int | None
    messages: tuple[dict[str, str], ...]
    """The conversation; a prompt is one message of a user."""
    raw: bool
    """Continue the text without the chat template: OpenAI's completions."""
    max_tokens: int | None
    temperature: float | None
    top_p: float | None
    seed: int | None
    digest: str
    """16 hex digits over what the line says and what the run adds to it: equal for equal questions."""


def read_requests(path: Path, asked: Mapping[str, Any]) -> list[Request]:
    """Every line of `path`. `asked` is what the whole run was asked for, and a part of each digest.

    Raises: InvalidSetting if it cannot be read, BadBatchLine for the first line that is wrong.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise InvalidSetting(
            setting="--batch",
            value=f"{str(path)!r} ({error.strerror})",
            allowed="a file that can be read",
            suggestion="with a file of one JSON object a line",
        ) from None
    requests: list[Request] = []
    ids: dict[str | int, int] = {}
    for number, line in enumerate(data.removeprefix(b"\xef\xbb\xbf").split(b"\n"), start=1):
        if not line.strip():
            continue
        try:
            request = _request(line, len(requests), number, asked)
        except Reason as error:
            raise BadBatchLine(file=str(path), line=number, reason=str(error)) from None
        if request.id is not None and ids.setdefault(request.id, number) != number:
            reason = f"line {ids[request.id]} has the id {request.id!r} too"
            raise BadBatchLine(file=str(path), line=number, reason=reason)
        requests.append(request)
    if not requests:
        raise BadBatchLine(file=str(path), line=1, reason="there is not one request in the file")
    return requests


def _request(line: bytes, index: int, number: int, asked: Mapping[str, Any]) -> Request:
    try:
        said = json.loads(line.decode())
    except UnicodeDecodeError:
        raise Reason("it is not UTF-8 text") from None
    except (json.JSONDecodeError, RecursionError) as error:
        raise Reason(f"it is not JSON ({error})") from None
    if not isinstance(said, dict):
        raise Reason(f"it is a JSON {type(said).__name__}, not an object")
    settings: _Plain | _Body
    name: str | int | None
    is_completion = False
    try:
        if "body" in said or "custom_id" in said:
            whole = _OpenAI.model_validate(said)
            settings, name = whole.body, whole.custom_id
            is_completion = whole.url == "/v1/completions" or (whole.url is None and settings.prompt is not None)
            if whole.url is not None and is_completion != (settings.prompt is not None):
                raise Reason(f"{whole.url} takes {'a prompt' if is_completion else 'messages'}")
            longest = settings.max_completion_tokens or settings.max_tokens
        else:
            settings = _Plain.model_validate(said)
            name, longest = settings.id, settings.max_tokens
    except ValidationError as error:
        raise Reason(_told(error)) from None
    question: Sequence[Message] = settings.messages or [Message(role="user", content=settings.prompt or "")]
    canonical = json.dumps([said, dict(asked)], sort_keys=True, ensure_ascii=False)
    return Request(
        index=index,
        line=number,
        id=name,
        messages=tuple(message.model_dump() for message in question),
        raw=is_completion,
        max_tokens=longest,
        temperature=settings.temperature,
        top_p=settings.top_p,
        seed=settings.seed,
        digest=hashlib.sha256(canonical.encode("utf-8", "surrogatepass")).hexdigest()[:16],
    )


def _told(error: ValidationError) -> str:
    """The first finding, with the place in the object."""
    first = error.errors(include_url=False)[0]
    inner = first.get("ctx", {}).get("error")
    if isinstance(inner, Reason):
        return str(inner)
    place = ".".join(str(part) for part in first["loc"])
    if first["type"] == "extra_forbidden":
        return f"there is no field {place!r} here"
    text = first["msg"]
    return f"{place}: {text[:1].lower()}{text[1:]}" if place else text


# --- answers --------------------------------------------------------------------------------------------------------


class Answers:
    """The file of answers, open for one run at a time. A line is there whole, or not at all."""

    def __init__(self, path: Path, requests: Sequence[Request]) -> None:
        """Cuts a torn last line away, and takes over what is answered already.

        Raises: OtherBatch if what is there answers something else, OutputFailed.
        """
        self.path = path
        if path.exists() and not path.is_file():
            raise OutputFailed(output=f"answers to {str(path)!r}", reason="it is no file to go on with")
        with self._failing():
            self._file = path.open("a+b", buffering=0)
        try:
            self._lock()
            self.done = self._done(requests)
        except BaseException:
            self._file.close()
            raise

    def _lock(self) -> None:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            reason = "another run writes to it at this moment"
            raise OutputFailed(output=f"answers to {str(self.path)!r}", reason=reason) from None

    def _done(self, requests: Sequence[Request]) -> set[int]:
        self._file.seek(0)
        data = self._file.read()
        whole = data.rfind(b"\n") + 1
        done: set[int] = set()
        for number, line in enumerate(data[:whole].splitlines(), start=1):
            index, digest = _whose(line)
            if index >= len(requests) or requests[index].digest != digest:
                raise OtherBatch(output=str(self.path), line=number)
            done.add(index)
        if whole < len(data):
            self._file.truncate(whole)
        return done

    def write(self, request: Request, answer: Mapping[str, Any]) -> None:
        """Append one line, with what tells whose answer it is. Raises: OutputFailed."""
        head: dict[str, Any] = {"index": request.index}
        if request.id is not None:
            head["id"] = request.id
        line = json.dumps({**head, **answer, "digest": request.digest}, ensure_ascii=False, allow_nan=False)
        data = line.encode("utf-8", "replace") + b"\n"
        with self._failing():
            start = os.fstat(self._file.fileno()).st_size
            try:
                written = 0
                while written < len(data):
                    written += self._file.write(data[written:]) or 0
            except BaseException:
                self._file.truncate(start)
                raise
        self.done.add(request.index)

    def close(self) -> None:
        self._file.close()

    def _failing(self) -> _Failing:
        return _Failing(self.path)


class _Failing:
    """Turns an OSError of the file into ours."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if isinstance(error, OSError) and not isinstance(error, OutputFailed):
            reason = error.strerror or str(error)
            raise OutputFailed(output=f"answers to {str(self._path)!r}", reason=reason) from error


def _whose(line: bytes) -> tuple[int, str]:
    """Index and digest of an answer; beyond every index if it is none."""
    try:
        said = json.loads(line)
        index, digest = said["index"], said["digest"]
    except (ValueError, KeyError, TypeError):
        return sys.maxsize, ""
    return (index, digest) if type(index) is int and index >= 0 else (sys.maxsize, "")


def unanswered(requests: Sequence[Request], answers: Answers) -> Iterator[Request]:
    """What is left to do, in the order of the file."""
    return (request for request in requests if request.index not in answers.done)
