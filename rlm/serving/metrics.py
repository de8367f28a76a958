"""Prometheus metrics. The values of labels come from fixed lists, never from a client."""

from __future__ import annotations

import time

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from rlm.serving.engine import Engine, RunningRequest

SECONDS = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 60, 120)


class Metrics:
    """The metrics of one server, with their own registry: a process may run several servers."""

    def __init__(self, engine: Engine) -> None:
        self._registry = registry = CollectorRegistry()

        def counter(name: str, help: str, *labels: str) -> Counter:
            return Counter(f"rlm_{name}", help, labels, registry=registry)

        def histogram(name: str, help: str) -> Histogram:
            return Histogram(f"rlm_{name}", help, buckets=SECONDS, registry=registry)

        self.finished = counter("requests", "Requests by protocol and outcome", "api", "outcome")
        self.rejected = counter("rejected", "Requests rejected by a full queue", "reason")
        self.thinking = counter("thinking", "Completions by the end of their reasoning", "status")
        self.first_token = histogram("first_token_seconds", "From acceptance to the first token")
        self.total = histogram("request_seconds", "From acceptance to the last token")
        for name, help, value in (
            ("tokens_drawn", "Tokens generated since the start", lambda: engine.tokens_drawn),
            ("rows_running", "Completions in the batch or waiting", lambda: engine.rows_running),
            ("engine_alive", "1 if the engine is alive, else 0", lambda: engine.alive),
        ):
            Gauge(f"rlm_{name}", help, registry=registry).set_function(value)

    def count(self, request: RunningRequest) -> None:
        """Count a finished, failed or aborted request."""
        self.finished.labels(request.api, request.outcome).inc()
        if request.outcome == "finished":
            self.total.observe(time.monotonic() - request.started)
            self.first_token.observe(request.first_token_seconds)
            for completion in request.stream.completions:
                self.thinking.labels(completion.status).inc()

    def text(self) -> bytes:
        return generate_latest(self._registry)
