"""What Prometheus reads, named as vLLM names it. Knows what is counted, not who counts it."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric

if TYPE_CHECKING:
    from headrace.server.service import Service

SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 1.5, 2.0, 3.0, 5.0, 7.5, 10.0, 15.0, 30.0, 60.0, 120.0, 300.0)
WINDOW_S = 30.0
"""Rates that are shown as one number are those of so many seconds."""


class Telemetry:
    """Counters of requests and tokens. Written on the event loop alone."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.first_token = self._histogram("time_to_first_token_seconds", "From a request to its first token.")
        self.inter_token = self._histogram("inter_token_latency_seconds", "From one token of an answer to the next.")
        self.request_s = self._histogram("e2e_request_latency_seconds", "From a request to the end of its answer.")
        self.prompt_tokens = self._counter("prompt_tokens", "Tokens of prompts.")
        self.generation_tokens = self._counter("generation_tokens", "Tokens that were generated.")
        self.finished = self._counter("request_success", "Answers that came to an end.", "finished_reason")
        self.failed = self._counter("request_failure", "Requests that ended in an error.", "code")
        self.rejected = self._counter("requests_rejected", "Requests that found the queue full.")
        self._times_s: deque[float] = deque(maxlen=10_000)

    def _histogram(self, name: str, text: str) -> Histogram:
        return Histogram(f"headrace:{name}", text, buckets=SECONDS, registry=self.registry)

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"headrace:{name}", text, labelnames=labels, registry=self.registry)

    def note_token(self, first: bool, seconds: float) -> None:
        """A token came, `seconds` after the one before it or after its request."""
        (self.first_token if first else self.inter_token).observe(seconds)
        self.generation_tokens.inc()
        self._times_s.append(time.perf_counter())

    @property
    def tokens_per_s(self) -> float:
        """Over the last WINDOW_S seconds."""
        since_s = time.perf_counter() - WINDOW_S
        while self._times_s and self._times_s[0] < since_s:
            self._times_s.popleft()
        if len(self._times_s) < 2:
            return 0.0
        return (len(self._times_s) - 1) / max(1e-9, self._times_s[-1] - self._times_s[0])

    def exposition(self) -> bytes:
        """Prometheus' text format."""
        return generate_latest(self.registry)


class ServiceCollector:
    """What is read off the engine and the batcher at the moment of a scrape."""

    def __init__(self, service: Service) -> None:
        self.service = service

    def collect(self) -> Iterator[Metric]:
        from headrace import machine

        service = self.service
        statistics = service.batcher.statistics()
        moved = service.engine.metrics.counters()
        bound = service.report.bound
        gauges = {
            "num_requests_running": ("Requests that are part of the passes.", statistics.running),
            "num_requests_waiting": ("Requests that wait for room.", statistics.waiting),
            "kv_cache_usage_perc": (
                "Share of the KV cache that is in use.",
                statistics.kv_blocks_used / statistics.kv_blocks,
            ),
            "kv_cache_blocks": ("Blocks of the KV cache.", statistics.kv_blocks),
            "generation_tokens_per_second": ("Tokens per second, of late.", service.telemetry.tokens_per_s),
            "read_bytes_per_pass": ("Bytes read from disk per pass.", moved.read_bytes / max(1, moved.passes)),
            "link_bytes_per_second": (
                "Rate of the disk while it read.",
                moved.read_bytes / moved.busy_s if moved.busy_s else 0,
            ),
            "link_limit_bytes_per_second": ("Rate of the disk as it was measured at start.", bound.link_bytes_per_s),
            "hidden_fraction": (
                "Share of the reading time that no pass waited for.",
                hidden_fraction(moved.stall_s, moved.busy_s),
            ),
            "pass_bound_seconds": ("The least that a pass can take.", bound.seconds),
            "memory_resident_bytes": ("Memory of the process.", machine.resident_bytes()),
            "memory_budget_bytes": (
                "Memory that the process may take; 0 is no limit.",
                service.engine.memory_bytes or 0,
            ),
            "weights_resident_bytes": ("Weights in memory.", service.report.resident_bytes),
            "weights_offloaded_bytes": ("Weights on disk.", service.report.offloaded_bytes),
            "ready": ("1 if requests are answered.", int(service.batcher.trouble() is None)),
        }
        for name, (text, value) in gauges.items():
            yield GaugeMetricFamily(f"headrace:{name}", text, value=value)
        counters = {
            "passes": ("Passes over the weights.", statistics.passes),
            "passes_failed": ("Passes that failed.", statistics.failed_passes),
            "read_bytes": ("Bytes read from disk.", moved.read_bytes),
            "stall_seconds": ("Seconds that blocks waited for their weights.", moved.stall_s),
            "slot_misses": ("Blocks that were not where they were expected.", moved.slot_misses),
            "read_errors": ("Reads that failed.", moved.read_errors),
        }
        for name, (text, value) in counters.items():
            yield CounterMetricFamily(f"headrace:{name}", text, value=value)


def hidden_fraction(stall_s: float, busy_s: float) -> float:
    """Share of the time in which the disk read that was spent computing as well; 1 if nothing is read."""
    return max(0.0, 1 - stall_s / busy_s) if busy_s > 0 else 1.0
