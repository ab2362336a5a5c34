"""Figures of the kernel for Prometheus (PROTOCOL 9)."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.metrics_core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from rebuno_sync.kernel.store import Store, Transaction

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)


class Metrics(Collector):
    """What the database says when it is asked, and what only the running kernel sees.

    Attributes:
        delivery_seconds: from when a dispatch was due to when its agent took it.
        lease_reclaims: leases that ran out.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._registry = CollectorRegistry()
        self.delivery_seconds = Histogram(
            "rebuno_delivery_seconds",
            "From when a dispatch was due to when its agent took it.",
            buckets=_BUCKETS,
            registry=self._registry,
        )
        self.lease_reclaims = Counter(
            "rebuno_lease_reclaims",
            "Leases that ran out, whose dispatch went back to the queue.",
            registry=self._registry,
        )
        self._registry.register(self)

    def render(self) -> bytes:
        """Return the figures in the Prometheus text format."""
        return generate_latest(self._registry)

    def describe(self) -> Iterator[Metric]:
        """Register without reading the database."""
        return iter(())

    def collect(self) -> Iterator[Metric]:
        """Read what the database says now."""
        with self._store.read() as tx:
            yield from list(_collect(tx))


def _collect(tx: Transaction) -> Iterator[Metric]:
    yield _by(tx, "executions", "Executions by status.", "status", "executions", "status")
    yield _by(tx, "steps", "Steps by kind and status.", "kind status", "steps", "kind, status")
    decisions = _by(
        tx,
        "submissions",
        "Submitted steps by kind and decision.",
        "kind decision",
        "submissions",
        "kind, decision",
    )
    yield decisions
    total = sum(sample.value for sample in decisions.samples)
    replays = sum(s.value for s in decisions.samples if s.labels["decision"] == "replay")
    yield _gauge(
        "replay_ratio",
        "The share of submitted steps that were answered from the record.",
        replays / total if total else 0.0,
    )
    queue = tx.all(
        "SELECT count(*) AS n, min(available_at) AS oldest FROM dispatches WHERE state = 'pending'"
    )[0]
    waiting = 0.0 if queue["oldest"] is None else max(0.0, tx.now - queue["oldest"])
    yield _gauge("dispatches_queued", "Dispatches in the queue.", queue["n"])
    yield _gauge(
        "dispatch_overdue_seconds",
        "How long the dispatch that waits longest could have been delivered.",
        waiting,
    )
    yield _gauge(
        "dispatches_in_flight",
        "Dispatches under a lease.",
        _count(tx, "dispatches WHERE state = 'in_flight'"),
    )
    yield _gauge(
        "approvals_pending",
        "Approvals that wait for a person.",
        _count(tx, "approvals WHERE status = 'pending'"),
    )


def _by(
    tx: Transaction, name: str, help: str, labels: str, table: str, columns: str
) -> GaugeMetricFamily:
    family = GaugeMetricFamily(f"rebuno_{name}", help, labels=labels.split())
    for row in tx.all(f"SELECT {columns}, count(*) AS n FROM {table} GROUP BY {columns}"):
        *values, count = tuple(row)
        family.add_metric(values, count)
    return family


def _gauge(name: str, help: str, value: float) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"rebuno_{name}", help, value=value)


def _count(tx: Transaction, where: str) -> int:
    row = tx.one(f"SELECT count(*) AS n FROM {where}")
    assert row is not None
    return int(row["n"])
