"""Executions that took longer than they may."""

from __future__ import annotations

from typing import Final

from rebuno_sync.kernel import transitions
from rebuno_sync.kernel.store import Transaction

REASON: Final = "deadline_exceeded"

#: The condition is that of the index, which holds these and nothing else.
_GOING_ON: Final = (
    "executions INDEXED BY executions_by_deadline"
    " WHERE deadline_at IS NOT NULL AND status IN ('pending', 'running', 'blocked')"
)


def next_due(tx: Transaction) -> float | None:
    """Return when the next deadline is, ``None`` when there is none."""
    row = tx.one(f"SELECT deadline_at AS due FROM {_GOING_ON} ORDER BY deadline_at LIMIT 1")
    return None if row is None else float(row["due"])


def expire(tx: Transaction) -> None:
    """Fail every execution whose deadline is over, with what waits or runs in it."""
    overdue = tx.all(
        f"SELECT id FROM {_GOING_ON} AND deadline_at <= ? ORDER BY deadline_at",
        tx.now,
    )
    for row in overdue:
        transitions.stop(tx, row["id"], "failed", REASON, REASON)
