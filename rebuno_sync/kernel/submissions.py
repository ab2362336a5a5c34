"""Which attempt submitted which step, and what it was told.

A step that an earlier attempt recorded and a later one gets replayed leaves no event, so the log
alone cannot tell what an attempt did. This is for whoever looks on: no decision reads it.
"""

from __future__ import annotations

import sqlite3

from rebuno_sync.kernel.store import Transaction


def note(
    tx: Transaction, dispatch: sqlite3.Row, step_id: str, kind: str, target: str, decision: str
) -> None:
    """Note the answer to a submission; of several for one step in one attempt the last stays.

    Args:
        dispatch: the row of the dispatch under which the step was submitted.
        step_id: the step, which has no row when it was refused before it was recorded.
        kind: the kind of the step.
        target: the name of the tool, model or local step.
        decision: what the agent is answered (PROTOCOL 5).
    """
    tx.run(
        "INSERT OR REPLACE INTO submissions VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
        dispatch["execution_id"],
        dispatch["seq"],
        dispatch["attempt"],
        step_id,
        kind,
        target,
        decision,
        tx.now,
    )


def of_execution(tx: Transaction, execution_id: str) -> list[sqlite3.Row]:
    """Return what the attempts of an execution submitted, attempt by attempt, in order."""
    return tx.all(
        "SELECT * FROM submissions WHERE execution_id = ?"
        " ORDER BY dispatch_seq, attempt, submitted_at",
        execution_id,
    )
