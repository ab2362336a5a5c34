"""Figures in the Prometheus text format (PROTOCOL 9)."""

from __future__ import annotations

from rebuno_sync.kernel.store import Transaction

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


def render(tx: Transaction) -> str:
    """Return what there is now: executions, queued and leased dispatches, pending approvals."""
    statuses = tx.all("SELECT status, count(*) AS n FROM executions GROUP BY status")
    in_flight = tx.one("SELECT count(*) AS n FROM dispatches WHERE state = 'in_flight'")
    approvals = tx.one("SELECT count(*) AS n FROM approvals WHERE status = 'pending'")
    queue = tx.one(
        "SELECT count(*) AS n, min(available_at) AS oldest FROM dispatches WHERE state = 'pending'"
    )
    assert in_flight is not None
    assert approvals is not None
    assert queue is not None
    waiting = 0.0 if queue["oldest"] is None else max(0.0, tx.now - queue["oldest"])
    lines = [
        *_gauge(
            "rebuno_executions",
            "Executions by status.",
            {f'{{status="{row["status"]}"}}': row["n"] for row in statuses},
        ),
        *_gauge("rebuno_dispatches_queued", "Dispatches in the queue.", {"": queue["n"]}),
        *_gauge(
            "rebuno_dispatch_overdue_seconds",
            "How long the dispatch that waits longest could have been delivered.",
            {"": round(waiting, 3)},
        ),
        *_gauge(
            "rebuno_dispatches_in_flight",
            "Dispatches under a lease.",
            {"": in_flight["n"]},
        ),
        *_gauge(
            "rebuno_approvals_pending", "Approvals that wait for a person.", {"": approvals["n"]}
        ),
    ]
    return "\n".join(lines) + "\n"


def _gauge(name: str, help: str, samples: dict[str, float]) -> list[str]:
    rows = [f"{name}{labels} {value}" for labels, value in samples.items()]
    return [f"# HELP {name} {help}", f"# TYPE {name} gauge", *rows]
