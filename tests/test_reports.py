"""The record that users see: what follows from its figures, and its JSON."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest

from headrace.core import Bound, MemoryPlan, Plan
from headrace.metrics import Counters
from headrace.reports import Category, Report


def report(**changes: Any) -> Report:
    plan = Plan(
        backend="prefetch",
        choices=(),
        streamed=(("layers.0", ("layers.0.weight",)),),
        gathered=(),
        slots=2,
        slot_bytes=4096,
        offloaded_bytes=5000,
        memory=MemoryPlan(0, 100, 8192, 64, 0, 0),
        bound=Bound(compute_s=0.5, moved_bytes=5000, link_bytes_per_s=1000.0),
    )
    facts: dict[str, Any] = {field.name: 0 for field in dataclasses.fields(Report)}
    facts |= {"backend": "prefetch", "requested_bytes": None, "counters": Counters(), "plan": plan, "fallbacks": ()}
    facts |= {"categories": (Category("disk", 5000, 5000, 8192),)}
    return Report(**{**facts, **changes})


def test_the_bound_takes_the_faster_of_the_planned_rate_and_the_one_seen() -> None:
    assert report().bound.link_bytes_per_s == 1000.0
    slower = Counters(read_bytes=500, busy_s=1.0)
    faster = Counters(read_bytes=3000, busy_s=1.0)
    assert report(counters=slower).bound.link_bytes_per_s == 1000.0
    assert report(counters=faster).bound.link_bytes_per_s == 3000.0
    assert report(counters=faster).bound.seconds == pytest.approx(5 / 3)


def test_bytes_per_pass() -> None:
    assert report().read_bytes_per_pass == 0.0
    assert report(counters=Counters(passes=4, read_bytes=10)).read_bytes_per_pass == 2.5


def test_json_says_it_all() -> None:
    data = json.loads(json.dumps(report(counters=Counters(passes=2, read_bytes=10)).to_json()))
    assert {field.name for field in dataclasses.fields(Report)} <= data.keys()
    assert data["categories"] == [
        {"name": "disk", "requested_bytes": 5000, "applied_bytes": 5000, "allocated_bytes": 8192}
    ]
    assert data["plan"]["memory"]["total_bytes"] == 100 + 8192 + 64
    assert data["plan"]["bound"]["limited_by"] == data["bound"]["limited_by"] == "disk"
    assert data["read_bytes_per_pass"] == 5.0
