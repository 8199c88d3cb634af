"""What is refused before a route sees it, and what is logged."""

from __future__ import annotations

import hmac
import logging
import socket
from collections.abc import Iterator

import pytest
import tiny_models
import torch
from live_server import Live, serving

from headrace.server.limits import MAX_HEADER_BYTES

KEY = "a-long-secret"


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    directory = tiny_models.shared(tmp_path_factory.mktemp("models"), "llama", torch.float32)
    with serving(directory, api_key=KEY, max_request_size="4KiB", enable_log_requests=False) as live:
        yield live


@pytest.mark.parametrize("header", [None, "Bearer wrong", f"Basic {KEY}", KEY, "Bearer", "Bearer " + KEY[:-1]])
@pytest.mark.parametrize("path", ["/v1/models", "/status"])
def test_without_the_key_nothing_is_told(live: Live, path: str, header: str | None) -> None:
    with live.client(**({"Authorization": header} if header is not None else {})) as client:
        answer = client.get(path)
    assert answer.status_code == 401
    assert answer.headers["WWW-Authenticate"] == "Bearer"
    assert answer.json()["error"]["code"] == "invalid_api_key"
    assert KEY not in answer.text


def test_with_the_key_all_is_told(live: Live) -> None:
    with live.client(Authorization=f"Bearer {KEY}") as client:
        assert client.get("/v1/models").status_code == client.get("/status").status_code == 200
    with live.openai(api_key=KEY) as client:
        assert client.completions.create(model="tiny", prompt="a", max_tokens=1).choices


def test_health_and_metrics_need_no_key(live: Live) -> None:
    with live.client() as client:
        assert {client.get(path).status_code for path in ("/", "/health", "/ready", "/metrics")} == {200}


def test_the_key_is_compared_in_constant_time(live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the one function for it, whatever the key's length: how long the comparison takes tells nothing."""
    compared: list[tuple[bytes, bytes]] = []
    plain = hmac.compare_digest
    monkeypatch.setattr(
        hmac, "compare_digest", lambda given, key: (compared.append((given, key)), plain(given, key))[1]
    )
    with live.client(Authorization="Bearer x") as client:
        assert client.get("/v1/models").status_code == 401
    assert compared == [(b"x", KEY.encode())]


def test_a_body_that_is_too_large_is_refused_whether_it_says_so_or_not(live: Live) -> None:
    with live.client(Authorization=f"Bearer {KEY}") as client:
        told = client.post("/v1/completions", content=b"x" * 5000)
        chunked = client.post("/v1/completions", content=iter([b"x" * 3000, b"x" * 3000]))
    assert told.status_code == chunked.status_code == 413
    assert told.json()["error"]["code"] == chunked.json()["error"]["code"] == "request_too_large"


def test_headers_that_are_too_large_are_refused(live: Live) -> None:
    with live.client(**{f"X-{number}": "y" * 4000 for number in range(5)}) as client:
        answer = client.get("/health")
    assert answer.status_code == 431
    assert answer.json()["error"]["code"] == "headers_too_large"
    # Those that do not end, uvicorn gives up on.
    with socket.create_connection(("127.0.0.1", live.port), timeout=10) as plain:
        plain.sendall(b"GET /health HTTP/1.1\r\nHost: a\r\nX: " + b"y" * (2 * MAX_HEADER_BYTES))
        assert plain.recv(100).startswith(b"HTTP/1.1 4")


def test_other_sites_may_not_read_answers(live: Live) -> None:
    with live.client(Origin="https://elsewhere.example") as client:
        answer = client.get("/health")
        preflight = client.options("/v1/completions", headers={"Access-Control-Request-Method": "POST"})
    assert not [name for name in [*answer.headers, *preflight.headers] if name.startswith("access-control")]
    assert preflight.status_code == 405


def test_what_requests_say_is_not_logged(live: Live, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG), live.client(Authorization=f"Bearer {KEY}") as client:
        for body in ({"prompt": "mysecret", "max_tokens": 2}, {"prompt": "mysecret", "nonsense": "mysecret"}):
            client.post("/v1/completions", json=body)
        client.get("/mysecret?mysecret")
        live.wait_idle()
    ours = [record.getMessage() for record in caplog.records if not record.name.startswith(("httpx", "httpcore"))]
    assert any("POST /v1/completions 200" in line for line in ours)
    assert not any("mysecret" in line or KEY in line for line in ours)


def test_what_requests_say_is_logged_if_that_is_asked_for(
    tmp_path_factory: pytest.TempPathFactory, caplog: pytest.LogCaptureFixture
) -> None:
    directory = tiny_models.shared(tmp_path_factory.mktemp("models"), "llama", torch.float32)
    with (
        caplog.at_level(logging.INFO),
        serving(directory, enable_log_requests=True) as live,
        live.client() as client,
    ):
        client.post("/v1/completions", json={"prompt": "mysecret", "max_tokens": 2})
    assert any("mysecret" in record.getMessage() for record in caplog.records if record.name == "headrace.server")
