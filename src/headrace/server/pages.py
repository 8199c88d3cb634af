"""The status page and the figures that it draws. All of it comes from this process."""

from __future__ import annotations

import dataclasses
import importlib.resources
import time
from collections import deque
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import HTMLResponse, Response

from headrace import machine
from headrace.metrics import Metrics, Span
from headrace.server.access import loaded_service, serving
from headrace.server.service import Service
from headrace.server.telemetry import hidden_fraction

router = APIRouter()

POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'; img-src data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
TIMELINE_SPANS = 1500


def _page(text: str, status: int = 200) -> HTMLResponse:
    headers = {"Content-Security-Policy": POLICY, "X-Content-Type-Options": "nosniff", "Cache-Control": "no-store"}
    return HTMLResponse(text, status, headers)


@router.get("/", response_class=HTMLResponse)
def status_page() -> Response:
    """The page. It asks /status for all that it shows."""
    return _page(importlib.resources.files("headrace.server").joinpath("page.html").read_text(encoding="utf-8"))


@router.get("/status")
def status(request: Request) -> dict[str, Any]:
    """Where the weights lie, what moves, and how fast: what the page draws."""
    service = loaded_service(request)
    return {
        "model": service.options.name,
        "trouble": serving(request).trouble(),
        "backend": service.report.backend,
        "tiers": [dataclasses.asdict(block) for block in service.tiers],
        "choices": [dataclasses.asdict(choice) for choice in service.report.plan.choices],
        "memory": _memory(service),
        "rates": _rates(service),
        "requests": dataclasses.asdict(service.batcher.statistics()) | {"num_seqs": service.options.max_num_seqs},
        "max_model_len": service.model_len,
        "timeline": _timeline(request, service.engine.metrics),
    }


def _memory(service: Service) -> dict[str, Any]:
    planned = service.report.plan.memory
    return {
        "budget_bytes": service.engine.memory_bytes,
        "resident_bytes": machine.resident_bytes(),
        "peak_bytes": machine.peak_resident_bytes(),
        "planned": dataclasses.asdict(planned),
        "planned_bytes": planned.total_bytes,
    }


def _rates(service: Service) -> dict[str, Any]:
    moved = service.engine.metrics.counters()
    bound = service.report.bound
    return {
        "tokens_per_s": service.telemetry.tokens_per_s,
        "passes": service.batcher.passes,
        "pass_s": service.batcher.pass_s,
        "bound_s": bound.seconds,
        "limited_by": bound.limited_by,
        "read_bytes": moved.read_bytes,
        "read_bytes_per_pass": moved.read_bytes / max(1, moved.passes),
        "link_bytes_per_s": moved.read_bytes / moved.busy_s if moved.busy_s else 0.0,
        "link_limit_bytes_per_s": bound.link_bytes_per_s,
        "stall_s": moved.stall_s,
        "hidden_fraction": hidden_fraction(moved.stall_s, moved.busy_s),
        "slot_misses": moved.slot_misses,
        "read_errors": moved.read_errors,
    }


def _timeline(request: Request, metrics: Metrics) -> list[dict[str, Any]]:
    """Spans of the last passes, `end_s` counted back from now. Recorded only while somebody looks."""
    recent: deque[Span] | None = getattr(request.app.state, "spans", None)
    if recent is None:
        recent = request.app.state.spans = deque(maxlen=TIMELINE_SPANS)
    metrics.trace_for(10.0)
    recent.extend(metrics.take_spans())
    now_s = time.perf_counter()
    return [
        {
            "name": span.name,
            "category": span.category,
            "thread": span.thread,
            "start_s": span.start_s - now_s,
            "duration_s": span.duration_s,
        }
        for span in recent
    ]
