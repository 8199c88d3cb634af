"""The routes against their own description, and before there is a model."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
import schemathesis
import tiny_models
import torch
from hypothesis import settings
from live_server import Live, listening, options, serving

from headrace.server.access import Serving
from headrace.server.app import build


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    directory = tiny_models.shared(tmp_path_factory.mktemp("models"), "llama", torch.float32)
    with serving(directory, max_model_len=40) as live:
        yield live


DESCRIPTION: Any = build(options(Path("none")), Serving()).openapi()
SCHEMA: Any = schemathesis.openapi.from_dict(DESCRIPTION)


@pytest.mark.slow
@SCHEMA.parametrize()
@settings(max_examples=10)
def test_no_request_makes_the_server_fail(case: Any, live: Live) -> None:
    """Neither what the description allows nor what it does not gives a 5xx."""
    response = case.call(base_url=live.url)
    assert response.status_code < 500, response.text
    if response.status_code >= 400 and not case.path.startswith("/errors"):
        assert response.json()["error"]["code"]


def test_before_the_model_is_there_the_server_lives_and_is_not_ready(tmp_path: Path) -> None:
    chosen = options(tmp_path)
    with listening(None, chosen) as port, httpx2.Client(base_url=f"http://127.0.0.1:{port}") as client:
        assert client.get("/health").status_code == 200
        assert client.get("/ready").status_code == 503
        assert client.get("/").status_code == 200
        for answer in (
            client.get("/v1/models"),
            client.get("/metrics"),
            client.get("/status"),
            client.post("/v1/completions", json={"prompt": "a"}),
        ):
            assert answer.status_code == 503
            assert answer.json()["error"]["code"] == "not_ready"
            assert "being loaded" in answer.json()["error"]["message"]


def test_a_server_that_stops_takes_no_more_requests(live: Live) -> None:
    stopping = listening(live.service, live.service.options, stopping=True)
    with stopping as port, httpx2.Client(base_url=f"http://127.0.0.1:{port}") as client:
        assert client.get("/ready").json()["reason"] == "it is stopping"
        assert client.post("/v1/completions", json={"prompt": "a"}).status_code == 503


def test_there_are_no_pages_that_load_from_elsewhere(live: Live) -> None:
    with live.client() as client:
        assert client.get("/docs").status_code == client.get("/redoc").status_code == 404
        assert client.get("/openapi.json").json() == DESCRIPTION


@pytest.mark.parametrize(
    "path", ["/../etc/passwd", "/%2e%2e/%2e%2e/etc/passwd", "/errors/..%2f..%2fetc%2fpasswd", "/v1/models//etc/passwd"]
)
def test_no_path_leads_to_a_file(live: Live, path: str) -> None:
    with live.client() as client:
        answer = client.get(path)
    assert answer.status_code == 404
    assert "root:" not in answer.text
