"""Metrics for Prometheus."""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_FIRST_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
_TOKEN_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5)


class Metrics:
    """The metrics of one server, in a registry of its own; their names start with tinyllm_."""

    def __init__(self, running: Callable[[], float], waiting: Callable[[], float]) -> None:
        registry = self.registry = CollectorRegistry()
        self.requests = Counter("tinyllm_requests", "Requests answered", ["route", "status"], registry=registry)
        self.prompt_tokens = Counter("tinyllm_prompt_tokens", "Tokens of prompts taken in", registry=registry)
        self.completion_tokens = Counter("tinyllm_completion_tokens", "Tokens of finished choices", registry=registry)
        self.dropped = Counter("tinyllm_dropped_clients", "Clients that hung up before the end", registry=registry)
        self.failed = Counter("tinyllm_failed_requests", "Requests that the engine failed", registry=registry)
        self.updates = Counter("tinyllm_weight_updates", "Weight updates, by outcome", ["outcome"], registry=registry)
        self.first_token_s = Histogram(
            "tinyllm_time_to_first_token_seconds", "From request to first token", buckets=_FIRST_S, registry=registry
        )
        self.token_s = Histogram(
            "tinyllm_time_per_token_seconds", "Of each further token, a choice's mean", buckets=_TOKEN_S,
            registry=registry,
        )  # fmt: skip
        Gauge("tinyllm_running", "Samples that hold a slot", registry=registry).set_function(running)
        Gauge("tinyllm_waiting", "Samples that wait for a slot", registry=registry).set_function(waiting)
        self._revision = Gauge(
            "tinyllm_revision_info", "1 for the weights in use", ["version", "hash"], registry=registry
        )

    def revision(self, version: str, content: str) -> None:
        """The weights in use now."""
        self._revision.clear()
        self._revision.labels(version, content).set(1)

    def text(self) -> bytes:
        return generate_latest(self.registry)
