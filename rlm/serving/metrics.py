"""Prometheus metrics. All label values come from fixed lists, never from a client."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from rlm.serving.engine import Engine, RunningRequest
from rlm.serving.errors import HTTPProblem

SECONDS = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 60, 120)


class Metrics:
    """The metrics of one server, with their own registry: a process may run several servers."""

    def __init__(self, engine: Engine) -> None:
        self._registry = registry = CollectorRegistry()

        def counter(name: str, help: str, *labels: str) -> Counter:
            return Counter(f"rlm_{name}", help, labels, registry=registry)

        def histogram(name: str, help: str) -> Histogram:
            return Histogram(f"rlm_{name}", help, buckets=SECONDS, registry=registry)

        responses = "HTTP responses by status code (499: the client disconnected)"
        self.responses = counter("http_responses", responses, "status")
        self.finished = counter("requests", "Requests by protocol and outcome", "api", "outcome")
        self.rejected = counter("rejected", "Requests rejected because of a full queue", "reason")
        thinking = "Completions of finished requests by how their reasoning ended"
        self.thinking = counter("thinking", thinking, "status")
        first = "Seconds from the acceptance of a finished request to its first token"
        self.first_token = histogram("first_token_seconds", first)
        last = "Seconds from the acceptance of a finished request to its last token"
        self.total = histogram("request_seconds", last)
        registry.register(_EngineState(engine))

    def count(self, request: RunningRequest) -> None:
        """Count a finished, failed or aborted request."""
        self.finished.labels(request.api, request.outcome).inc()
        if request.outcome == "finished":
            self.total.observe(request.seconds)
            self.first_token.observe(request.first_token_seconds)
            for completion in request.stream.completions:
                self.thinking.labels(completion.status).inc()

    def count_unprepared(self, api: str, error: BaseException) -> None:
        """Count an accepted request that ended with `error` before the engine received it."""
        outcome = error.code if isinstance(error, HTTPProblem) else "internal"
        if isinstance(error, asyncio.CancelledError):
            outcome = "cancelled"
        self.finished.labels(api, outcome).inc()

    def count_response(self, status: int) -> None:
        """Count an HTTP response, including those to rejected requests."""
        self.responses.labels(str(status)).inc()

    def text(self) -> bytes:
        return generate_latest(self._registry)


class _EngineState(Collector):
    """Reads the engine's counters and its state whenever the metrics are collected."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def collect(self) -> Iterator[Metric]:
        engine = self._engine
        drawn = "Tokens generated since the start"
        yield CounterMetricFamily("rlm_tokens_drawn", drawn, engine.tokens_drawn)
        running = "Completions in a batch or waiting for it"
        yield GaugeMetricFamily("rlm_rows_running", running, engine.rows_running)
        alive = "1 if the engine is alive, else 0"
        yield GaugeMetricFamily("rlm_engine_alive", alive, float(engine.alive))
