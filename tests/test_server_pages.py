"""What the status page is told, and the page of each error. A browser tries the page itself, in scripts/browser."""

from __future__ import annotations

import importlib.resources
import re
from collections.abc import Iterator

import pytest
import tiny_models
import torch
from live_server import Live, serving

from headrace.errors import concrete_errors

PAGE = importlib.resources.files("headrace.server").joinpath("page.html").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    directory = tiny_models.shared(tmp_path_factory.mktemp("models"), "llama", torch.float32)
    with serving(directory, share=0.5) as live:
        yield live


def test_the_page_asks_nobody_but_this_server(live: Live) -> None:
    with live.client() as client:
        answer = client.get("/")
    assert answer.text == PAGE
    assert "default-src 'none'" in answer.headers["Content-Security-Policy"]
    addresses = set(re.findall(r"https?://[^\s\"'<>]+", PAGE))
    assert addresses == {"http://www.w3.org/2000/svg"}  # a name, which nobody opens


def test_every_weight_is_in_one_tier(live: Live) -> None:
    with live.client() as client:
        status = client.get("/status").json()
    report = live.service.report
    assert sum(block["disk_bytes"] for block in status["tiers"]) == report.offloaded_bytes > 0
    device = sum(block["device_bytes"] for block in status["tiers"])
    assert device == report.resident_bytes - report.buffer_bytes
    assert status["memory"]["planned_bytes"] == report.plan.memory.total_bytes
    assert status["memory"]["resident_bytes"] > 0
    assert status["requests"]["num_seqs"] == 4


def test_what_moves_is_recorded_while_somebody_looks(live: Live) -> None:
    with live.client() as client:
        client.get("/status")
        client.post("/v1/completions", json={"prompt": "a", "max_tokens": 5})
        status = client.get("/status").json()
    categories = {span["category"] for span in status["timeline"]}
    assert {"read", "run", "pass"} <= categories
    assert all(span["start_s"] < 0 < span["duration_s"] for span in status["timeline"])
    assert status["rates"]["read_bytes"] > 0
    assert 0 <= status["rates"]["hidden_fraction"] <= 1


def test_the_page_names_only_what_it_is_told(live: Live) -> None:
    """Each field that its script reads off /status is there."""
    with live.client() as client:
        status = client.get("/status").json()
    for part in ("rates", "memory", "requests"):
        names = set(re.findall(rf"\b{part}\.([a-z_]+)", PAGE)) - {"length"}
        assert names
        assert names <= status[part].keys()


def test_each_error_has_its_page(live: Live) -> None:
    with live.client() as client:
        for kind in concrete_errors():
            if kind.__module__ != "headrace.errors":
                continue  # other tests plant faulty ones
            page = client.get(f"/errors/{kind.error_id()}")
            assert page.status_code == 200
            assert f"<h1>{kind.__name__}</h1>" in page.text
        assert client.get("/errors/0123456789abcdef").status_code == 404
