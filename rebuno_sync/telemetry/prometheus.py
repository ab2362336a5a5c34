"""Metrics of the agent's side for Prometheus.

Needs the extra ``prometheus``. The app shows its registry as it does anyway; with several worker
processes in the multiprocess mode of ``prometheus_client``.
"""

from __future__ import annotations

import weakref
from typing import Any

from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge, Histogram

from .. import observers
from ..observers import DispatchEvent, Event, Observer, RequestEvent, StepEvent

#: Of handlers and steps, which may take hours, and of requests, in seconds.
_LONG = (0.01, 0.05, 0.1, 0.5, 1, 5, 10, 30, 60, 300, 1800, 7200)
_SHORT = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)


def instrument(registry: CollectorRegistry = REGISTRY) -> None:
    """Keep metrics of the agents and clients of this process, from now on.

    Call it once, before or after a fork; called again, the last registry counts.

    Args:
        registry: where the metrics are registered; the default one by default.

    Raises:
        ValueError: the registry has other metrics of these names.
    """
    global _metrics
    found = _made.get(registry)
    if found is None:
        found = _made[registry] = _Metrics(registry)
    if found is not _metrics:
        uninstrument()
        _metrics = found
        observers.install(found)


def uninstrument() -> None:
    """Keep metrics no longer; what has been counted stays in the registry."""
    global _metrics
    if _metrics is not None:
        observers.remove(_metrics)
    _metrics = None


class _Metrics(Observer):
    def __init__(self, registry: CollectorRegistry) -> None:
        def named(kind: type, name: str, text: str, *labels: str, **options: Any) -> Any:
            return kind(f"rebuno_agent_{name}", text, labels, registry=registry, **options)

        def gauge(name: str, text: str) -> Any:
            # Of the processes that live: the sum of what each says.
            return named(Gauge, name, text, "agent_id", multiprocess_mode="livesum")

        self._deliveries = named(
            Counter,
            "deliveries",
            "Webhooks that were taken, repeated, or refused for a reason.",
            "agent_id",
            "outcome",
            "reason",
        )
        self._waiting = gauge("queue_length", "Dispatches that wait for a thread.")
        self._max_queue = gauge("queue_limit", "Dispatches that may wait; more are refused.")
        self._running = gauge("handlers_running", "Dispatches whose handlers run.")
        self._max_running = gauge("handlers_limit", "Handlers that may run at once.")
        self._waited = named(
            Histogram,
            "queue_seconds",
            "How long dispatches waited for a thread.",
            "agent_id",
            buckets=_LONG,
        )
        self._dispatches = named(
            Histogram,
            "dispatch_seconds",
            "How long dispatches took, by how they ended.",
            "agent_id",
            "outcome",
            buckets=_LONG,
        )
        self._decisions = named(
            Counter,
            "steps",
            "Submitted steps by the kernel's decision; replay is the word for recorded ones.",
            "agent_id",
            "kind",
            "decision",
        )
        self._steps = named(
            Histogram,
            "step_seconds",
            "How long steps took whose body ran, from submission to record.",
            "agent_id",
            "kind",
            "outcome",
            buckets=_LONG,
        )
        self._requests = named(
            Histogram,
            "kernel_request_seconds",
            "How long requests to the kernel took, each try by itself.",
            "method",
            "route",
            buckets=_SHORT,
        )
        self._failures = named(
            Counter,
            "kernel_request_failures",
            "Requests to the kernel that came to an error status, or to none.",
            "method",
            "route",
            "status",
        )
        self._heartbeats = named(
            Counter,
            "heartbeat_failures",
            "Renewals of a lease that failed and were tried again.",
            "agent_id",
        )
        self._leases = named(
            Counter,
            "leases_lost",
            "Leases that were lost or given up.",
            "agent_id",
            "reason",
        )

    def delivered(self, agent_id: str, outcome: str, reason: str) -> None:
        self._deliveries.labels(agent_id, outcome, reason).inc()

    def load(
        self, agent_id: str, *, waiting: int, running: int, max_queue: int, max_concurrency: int
    ) -> None:
        self._waiting.labels(agent_id).set(waiting)
        self._running.labels(agent_id).set(running)
        self._max_queue.labels(agent_id).set(max_queue)
        self._max_running.labels(agent_id).set(max_concurrency)

    def decided(self, event: StepEvent, kept: Any) -> None:
        self._decisions.labels(event.agent_id, event.kind, event.decision).inc()

    def ended(self, event: Event, kept: Any) -> None:
        if isinstance(event, DispatchEvent):
            self._waited.labels(event.agent_id).observe(event.waited)
            self._dispatches.labels(event.agent_id, event.outcome).observe(event.seconds)
        elif isinstance(event, StepEvent):
            if event.decision == "proceed":
                labels = event.agent_id, event.kind, event.outcome
                self._steps.labels(*labels).observe(event.seconds)
        else:
            self._end_request(event)

    def _end_request(self, event: RequestEvent) -> None:
        self._requests.labels(event.method, event.route).observe(event.seconds)
        if event.status is None or event.status >= 300:
            status = "none" if event.status is None else str(event.status)
            self._failures.labels(event.method, event.route, status).inc()

    def heartbeat_failed(self, agent_id: str) -> None:
        self._heartbeats.labels(agent_id).inc()

    def lease_lost(self, agent_id: str, why: str) -> None:
        self._leases.labels(agent_id, why).inc()


_metrics: _Metrics | None = None
_made: weakref.WeakKeyDictionary[CollectorRegistry, _Metrics] = weakref.WeakKeyDictionary()
