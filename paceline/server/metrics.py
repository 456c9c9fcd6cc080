"""Metrics for Prometheus."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from paceline.engine import Engine
from paceline.engine.thread import EngineThread

_SECONDS = (0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300)


class ServerMetrics:
    """The metrics of one server, in a registry of their own."""

    def __init__(self, engine: Engine, thread: EngineThread) -> None:
        self.registry = CollectorRegistry()
        self.registry.register(_EngineCollector(engine, thread))
        self.requests = Counter("paceline_requests", "HTTP requests by endpoint and status.", ["endpoint", "status"],
                                registry=self.registry)
        self.duration = Histogram("paceline_request_duration_seconds", "Seconds from a request to the end of its answer.",
                                  buckets=_SECONDS, registry=self.registry)
        self.first_token = Histogram("paceline_time_to_first_token_seconds", "Seconds from a request to the first token of a "
                                     "streamed answer.", buckets=_SECONDS, registry=self.registry)


class _EngineCollector(Collector):
    """Figures of the engine, read when Prometheus asks."""

    def __init__(self, engine: Engine, thread: EngineThread) -> None:
        self._thread, self._suffix = thread, engine.drafting.suffix

    def collect(self) -> Iterator[Metric]:
        stats = self._thread.stats
        counters: dict[str, tuple[str, float]] = {
            "prompt_tokens": ("Prompt tokens that were computed.", stats.prompt_tokens),
            "cached_prompt_tokens": ("Prompt tokens found in the KV cache.", stats.cached_prompt_tokens),
            "generated_tokens": ("Generated tokens.", stats.generated_tokens),
            "draft_tokens": ("Draft tokens that were verified.", stats.drafted),
            "accepted_tokens": ("Draft tokens that were accepted.", stats.accepted),
            "preemptions": ("Requests that gave up their KV cache for others.", stats.preemptions)}
        gauges: dict[str, tuple[str, float]] = {
            "running_requests": ("Answers that are being generated.", stats.num_running),
            "waiting_requests": ("Answers that wait for the engine.", stats.num_waiting),
            "pending_answers": ("Answers that wait or are generated.", self._thread.num_pending),
            "kv_cache_usage": ("Share of the KV cache in use.", 1 - stats.free_pages / max(1, stats.total_pages)),
            "suffix_history_bytes": ("Size of the suffix drafter's history.", 0 if self._suffix is None else self._suffix.nbytes),
            "accept_length": ("Mean number of tokens per request and step since the start.", stats.tokens_per_verification)}
        for name, (text, value) in counters.items():
            yield CounterMetricFamily(f"paceline_{name}", text, value=value)
        for name, (text, value) in gauges.items():
            yield GaugeMetricFamily(f"paceline_{name}", text, value=value)
