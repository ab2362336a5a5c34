"""Executions that took longer than they may."""

from __future__ import annotations

from typing import Final

from rebuno_sync.kernel import transitions
from rebuno_sync.kernel.store import Transaction

REASON: Final = "deadline_exceeded"

#: Spelled as in the index, which would else not be used.
_GOING_ON: Final = "deadline_at IS NOT NULL AND status IN ('pending', 'running', 'blocked')"


def next_due(tx: Transaction) -> float | None:
    """Return when the next deadline is, ``None`` when there is none."""
    row = tx.one(f"SELECT min(deadline_at) AS due FROM executions WHERE {_GOING_ON}")
    return None if row is None else row["due"]


def expire(tx: Transaction) -> None:
    """Fail every execution whose deadline is over, with what waits or runs in it."""
    overdue = tx.all(
        f"SELECT id FROM executions WHERE {_GOING_ON} AND deadline_at <= ? ORDER BY deadline_at",
        tx.now,
    )
    for row in overdue:
        transitions.stop(tx, row["id"], "failed", REASON, REASON)
