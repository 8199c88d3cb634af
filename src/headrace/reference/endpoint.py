"""A model behind an API like OpenAI's, asked about one error at a time. Knows no pages."""

from __future__ import annotations

import http.client
import json
import os
import urllib.error
import urllib.parse
import urllib.request
from dataclasses import dataclass
from typing import Any

from headrace.errors import EndpointFailed, InvalidSetting

_TIMEOUT_S = 600.0
"""A model that streams its weights on a busy machine takes minutes for an answer."""
_LONGEST_ANSWER = 200
"""Tokens."""
_LARGEST_BYTES = 2**20
_INSTRUCTIONS = (
    "You are shown one place in the source of a Python package that raises an error. In one to three short sentences "
    "say in which situations a user runs into it. Begin each sentence with 'This happens when'. Use plain words. "
    "Name no identifier, flag, number, file or product that is not in the source. Give no advice and no code."
)


class _StayHere(urllib.request.HTTPRedirectHandler):
    """The key is for this address: a redirection is an answer like any other that is no answer."""

    def redirect_request(self, *redirection: Any) -> None:
        return None


_OPENER = urllib.request.build_opener(_StayHere)


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where a model answers."""

    url: str
    """Of the API: `http://127.0.0.1:8000/v1`."""
    model: str
    key: str | None = None

    @classmethod
    def open(cls, url: str, model: str | None) -> Endpoint:
        """With the first model that it serves, if none is named. Raises: InvalidSetting, EndpointFailed."""
        parts = urllib.parse.urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.netloc:
            raise InvalidSetting(
                setting="--prose-from",
                value=repr(url),
                allowed="the address of an API like OpenAI's",
                suggestion="http://127.0.0.1:8000/v1",
            )
        path = parts.path.rstrip("/").removesuffix("/chat/completions") or "/v1"
        base = urllib.parse.urlunsplit((parts.scheme, parts.netloc, path, "", ""))
        key = os.environ.get("OPENAI_API_KEY") or None
        if model is None:
            served = cls(base, "", key)._call("/models", None).get("data")
            try:
                model = str(served[0]["id"])  # type: ignore[index]
            except (TypeError, LookupError):
                raise EndpointFailed(url=base, reason="it names no model that it serves", written=0) from None
        return cls(base, model, key)

    def answer(self, question: str) -> str:
        """What the model says about an error. Raises: EndpointFailed."""
        body = {
            "model": self.model,
            "messages": [
                {"role": "system", "content": _INSTRUCTIONS},
                {"role": "user", "content": question},
            ],
            "temperature": 0,
            "max_tokens": _LONGEST_ANSWER,
        }
        answer = self._call("/chat/completions", body)
        try:
            content = answer["choices"][0]["message"]["content"]
        except (TypeError, LookupError):
            raise EndpointFailed(url=self.url, reason="its answer has no message in it", written=0) from None
        return content if isinstance(content, str) else ""

    def _call(self, route: str, body: dict[str, Any] | None) -> dict[str, Any]:
        headers = {"Content-Type": "application/json", "Accept": "application/json"}
        if self.key:
            headers["Authorization"] = f"Bearer {self.key}"
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + route, data, headers)
        try:
            with _OPENER.open(request, timeout=_TIMEOUT_S) as response:
                answer = json.loads(response.read(_LARGEST_BYTES))
        except urllib.error.HTTPError as error:
            raise EndpointFailed(url=self.url, reason=_told(error), written=0) from error
        except urllib.error.URLError as error:
            raise EndpointFailed(url=self.url, reason=str(error.reason), written=0) from error
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise EndpointFailed(url=self.url, reason=f"{type(error).__name__}: {error}", written=0) from error
        if not isinstance(answer, dict):
            raise EndpointFailed(url=self.url, reason="its answer is no JSON object", written=0)
        return answer


def _told(error: urllib.error.HTTPError) -> str:
    """The status, and what the endpoint says about it."""
    try:
        told = json.loads(error.read())["error"]["message"]
        return f"{error.code} {' '.join(str(told).split())[:300]}".rstrip(". ")
    except (OSError, ValueError, LookupError, TypeError):
        return f"{error.code} {error.reason}".rstrip(". ")
