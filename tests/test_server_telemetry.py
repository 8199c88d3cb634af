"""What Prometheus reads, and the dashboard that reads it from there."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import tiny_models
import torch
from live_server import Live, serving
from prometheus_client.parser import text_string_to_metric_families

from headrace.server.telemetry import hidden_fraction

DASHBOARD = Path(__file__).parent.parent / "grafana" / "headrace.json"


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    directory = tiny_models.shared(tmp_path_factory.mktemp("models"), "llama", torch.float32)
    with serving(directory, share=0.5) as live:
        yield live


def samples(live: Live) -> dict[str, float]:
    """By name, summed over labels."""
    with live.client() as client:
        text = client.get("/metrics").text
    values: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            values[sample.name] = values.get(sample.name, 0.0) + sample.value
    return values


def test_what_happened_is_counted(live: Live) -> None:
    before = samples(live)
    with live.client() as client:
        made = client.post("/v1/completions", json={"prompt": "abc", "max_tokens": 6, "logit_bias": {"2": -100}}).json()
    live.wait_idle()
    after = samples(live)
    change = {name: after[name] - before.get(name, 0.0) for name in after}
    assert change["headrace:prompt_tokens_total"] == made["usage"]["prompt_tokens"]
    assert change["headrace:generation_tokens_total"] == 6
    assert change["headrace:time_to_first_token_seconds_count"] == 1
    assert change["headrace:inter_token_latency_seconds_count"] == 5
    assert change["headrace:e2e_request_latency_seconds_count"] == 1
    assert change["headrace:request_success_total"] == 1
    assert change["headrace:passes_total"] == 6
    assert change["headrace:read_bytes_total"] > 0
    assert after["headrace:num_requests_running"] == after["headrace:num_requests_waiting"] == 0
    assert after["headrace:kv_cache_usage_perc"] == 0
    assert after["headrace:weights_offloaded_bytes"] == live.service.report.offloaded_bytes
    assert after["headrace:memory_budget_bytes"] == live.service.engine.memory_bytes
    assert after["headrace:ready"] == 1


def test_the_dashboard_reads_what_is_there(live: Live) -> None:
    """Every metric in it exists, and every metric that exists is in it, but for one that it can work out."""
    families = {name.removesuffix("_created") for name in samples(live)}
    # Counters with labels appear with their first failure.
    families |= {"headrace:request_failure_total", "headrace:request_success_total"}
    dashboard = json.loads(DASHBOARD.read_text())
    used = set(re.findall(r"headrace:[a-z0-9_]+", json.dumps(dashboard)))
    assert used <= families
    shown = {name for name in used if not name.endswith("_bucket")} | {name.removesuffix("_bucket") for name in used}
    told = {re.sub(r"_(bucket|count|sum)$", "", name) for name in families}
    told -= {re.sub(r"_total$", "", name) for name in told if name.endswith("_total")}
    assert told - shown == {"headrace:kv_cache_blocks", "headrace:generation_tokens_per_second"}


def test_the_share_of_reading_that_is_hidden() -> None:
    assert hidden_fraction(0.0, 0.0) == 1.0
    assert hidden_fraction(1.0, 4.0) == 0.75
    assert hidden_fraction(5.0, 4.0) == 0.0
