"""Metrics for Prometheus: what requests took, by model, and what the engine is doing when it is asked."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from lorry.errors import EngineUnavailable
from lorry.server.client import EngineClient
from lorry.types import EngineStats

SCRAPE_SECONDS = 2.0
"""How long the engine may take to say what it does; then the last known values stay."""

OTHERS = "other"
"""Label of the models past the bound."""

_FIRST_TOKEN = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
_GAP = (0.0025, 0.005, 0.01, 0.015, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 1, 2.5)
_WHOLE = (0.1, 0.5, 1, 2.5, 5, 10, 20, 40, 60, 120, 300)

GAUGES: dict[str, tuple[str, str]] = {
    "num_running": ("lorry_requests_running", "Requests that are in steps"),
    "num_waiting": ("lorry_requests_waiting", "Requests that wait for a place in a step"),
    "num_waiting_for_adapter": ("lorry_requests_waiting_for_adapter", "Requests that wait for their adapter"),
    "pages_in_use": ("lorry_kv_pages_in_use", "Pages of the KV pool that requests hold"),
    "pages_total": ("lorry_kv_pages", "Pages of the KV pool"),
    "prefix_hit_tokens": ("lorry_prefix_hit_tokens", "Tokens of prompts that were found in the prefix cache"),
    "prefix_query_tokens": ("lorry_prefix_query_tokens", "Tokens of prompts that were looked for there"),
    "num_preemptions": ("lorry_preemptions", "Requests that gave up their pages and were computed again"),
    "adapter_references": ("lorry_adapter_references", "Requests that have an adapter"),
    "adapters_registered": ("lorry_adapters_registered", "Versions of adapters that are known"),
    "adapters_on_host": ("lorry_adapters_on_host", "Versions in the host's memory"),
    "adapters_on_device": ("lorry_adapters_on_device", "Versions on the device"),
    "adapter_host_bytes": ("lorry_adapter_host_bytes", "Bytes of adapters in the host's memory"),
    "adapter_device_bytes": ("lorry_adapter_device_bytes", "Bytes of adapters on the device"),
    "num_adapter_reads": ("lorry_adapter_reads", "Times that an adapter's files were read again"),
    "num_adapter_copies": ("lorry_adapter_copies", "Times that an adapter was copied to the device"),
    "num_adapter_evictions": ("lorry_adapter_evictions", "Times that an adapter left the device for another"),
    "num_adapter_drains": ("lorry_adapter_drains", "Times that an adapter drained for a waiting one"),
}
"""Of each field of `EngineStats`: the metric's name, and what it is."""


class Metrics:
    """A registry of its own. At most `max_models` names of models get labels of their own, the first that come."""

    def __init__(self, client: EngineClient, max_models: int) -> None:
        self._client = client
        self._max_models = max_models
        self._models: set[str] = set()
        registry = self._registry = CollectorRegistry()
        labels = ["model"]
        self._requests = Counter(
            "lorry_requests", "Requests that ended, by reason", [*labels, "reason"], registry=registry
        )
        self._prompt = Counter("lorry_prompt_tokens", "Tokens of prompts", labels, registry=registry)
        self._generated = Counter("lorry_generated_tokens", "Tokens of answers", labels, registry=registry)

        def seconds(name: str, what: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(f"lorry_{name}_seconds", what, labels, buckets=buckets, registry=registry)

        self._first = seconds("time_to_first_token", "From arrival to the first token", _FIRST_TOKEN)
        self._gap = seconds("inter_token", "From one token to the next", _GAP)
        self._whole = seconds("request", "From arrival to the last token", _WHOLE)
        self._up = Gauge("lorry_engine_up", "1 where the engine answers", registry=registry)
        self._gauges = {field: Gauge(*named, registry=registry) for field, named in GAUGES.items()}
        self._residency = Gauge(
            "lorry_adapter_residency", "1 for the best place that holds an adapter's weights",
            [*labels, "residency"], registry=registry,
        )  # fmt: skip
        self._of_adapter = {
            state: Gauge(
                f"lorry_adapter_requests_{state}",
                f"Requests of an adapter that are {state}",
                labels,
                registry=registry,
            )
            for state in ("running", "waiting")
        }

    def request(self, model: str, num_prompt_tokens: int) -> RequestTimes:
        """A request arrives."""
        label = self._label(model)
        self._prompt.labels(label).inc(num_prompt_tokens)
        return RequestTimes(self, label)

    def forget(self, model: str) -> None:
        """A model is gone, and its label with it."""
        if model in self._models:
            self._models.remove(model)
            for metric in (self._prompt, self._generated, self._first, self._gap, self._whole):
                metric.remove_by_labels({"model": model})
            self._requests.remove_by_labels({"model": model})

    async def text(self) -> bytes:
        """All metrics in Prometheus' text format."""
        try:
            async with asyncio.timeout(SCRAPE_SECONDS):
                stats, listed = await self._client.stats(), await self._client.adapter_list()
        except (EngineUnavailable, TimeoutError):
            self._up.set(0)
            return generate_latest(self._registry)
        self._up.set(1)
        for field, value in _counts(stats):
            self._gauges[field].set(value)
        for gauge in (self._residency, *self._of_adapter.values()):
            gauge.clear()
        for status in listed.adapters[: self._max_models]:
            self._residency.labels(status.info.name, status.residency).set(1)
            self._of_adapter["running"].labels(status.info.name).set(status.num_running)
            self._of_adapter["waiting"].labels(status.info.name).set(status.num_waiting)
        return generate_latest(self._registry)

    def _label(self, model: str) -> str:
        if model not in self._models and len(self._models) < self._max_models:
            self._models.add(model)
        return model if model in self._models else OTHERS

    def tokens(self, label: str, count: int, seconds: float, is_first: bool) -> None:
        """Tokens came, so long after the arrival or after those before."""
        self._generated.labels(label).inc(count)
        if is_first:
            self._first.labels(label).observe(seconds)
        else:
            for _ in range(count):
                self._gap.labels(label).observe(seconds / count)

    def ended(self, label: str, reason: str, seconds: float) -> None:
        self._requests.labels(label, reason).inc()
        self._whole.labels(label).observe(seconds)


class RequestTimes:
    """The clock of one sequence that is generated."""

    def __init__(self, metrics: Metrics, label: str) -> None:
        self._metrics = metrics
        self._label = label
        self._arrived = self._last = time.perf_counter()
        self._has_tokens = self._has_ended = False

    def tokens(self, count: int) -> None:
        """So many tokens have come just now."""
        now = time.perf_counter()
        if count and not self._has_ended:
            self._metrics.tokens(self._label, count, now - self._last, not self._has_tokens)
            self._has_tokens, self._last = True, now

    def end(self, reason: str) -> None:
        """It is over; what comes after the first time does not count."""
        if not self._has_ended:
            self._has_ended = True
            self._metrics.ended(self._label, reason, time.perf_counter() - self._arrived)


def _counts(stats: EngineStats) -> Iterator[tuple[str, int]]:
    for field in GAUGES:
        yield field, getattr(stats, field)
