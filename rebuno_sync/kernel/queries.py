"""What clients and agents read."""

from __future__ import annotations

import sqlite3

from rebuno_sync.kernel import refusals
from rebuno_sync.kernel.store import Transaction
from rebuno_sync.wire import TERMINAL_STEP


def execution(tx: Transaction, execution_id: str) -> sqlite3.Row:
    """Return an execution.

    Raises:
        NotFoundError: there is none.
    """
    row = tx.one("SELECT * FROM executions WHERE id = ?", execution_id)
    if row is None:
        raise refusals.not_found("execution", execution_id)
    return row


def last_change(tx: Transaction) -> float:
    """Return when an execution last changed, in seconds since the Unix epoch; 0 without any."""
    row = tx.one("SELECT max(updated_at) AS last FROM executions")
    return 0.0 if row is None or row["last"] is None else float(row["last"])


def executions(
    tx: Transaction,
    filters: dict[str, str],
    cursor: str | None,
    limit: int,
    columns: str = "*",
) -> tuple[list[sqlite3.Row], str | None]:
    """Return a page of executions, newest first, and the cursor of the next page.

    Args:
        filters: the values that columns must have.
        cursor: the id of the last execution of the page before.
        limit: how many at most.
        columns: what to read of each, ``id`` among it.

    Raises:
        ValidationError: the cursor is of no execution.
    """
    conditions = [f"{column} = ?" for column in filters]
    values: list[object] = list(filters.values())
    if cursor is not None:
        last = tx.one("SELECT seq FROM executions WHERE id = ?", cursor)
        if last is None:
            raise refusals.invalid("the cursor is unknown; use next_cursor of the page before")
        conditions.append("seq < ?")
        values.append(last["seq"])
    where = f" WHERE {' AND '.join(conditions)}" if conditions else ""
    rows = tx.all(
        f"SELECT {columns} FROM executions{where} ORDER BY seq DESC LIMIT ?", *values, limit + 1
    )
    more = len(rows) > limit
    return rows[:limit], rows[limit - 1]["id"] if more else None


def events(tx: Transaction, execution_id: str, after_seq: int, limit: int) -> list[sqlite3.Row]:
    """Return the events after ``after_seq``, in order, at most ``limit``."""
    return tx.all(
        "SELECT * FROM events WHERE execution_id = ? AND event_seq > ? ORDER BY event_seq LIMIT ?",
        execution_id,
        after_seq,
        limit,
    )


def steps(tx: Transaction, execution_id: str, status: str | None) -> list[sqlite3.Row]:
    """Return the steps of an execution in the order in which they came.

    Args:
        status: a status that they must have; ``terminal`` for those that have ended.
    """
    wanted = TERMINAL_STEP if status == "terminal" else {status}
    rows = tx.all("SELECT * FROM steps WHERE execution_id = ? ORDER BY seq", execution_id)
    return [row for row in rows if status is None or row["status"] in wanted]


def previous(tx: Transaction, execution: sqlite3.Row) -> str:
    """Return the state of an execution's parent as raw JSON: its output when it kept none."""
    parent = None
    if execution["parent_execution_id"] is not None:
        parent = tx.one(
            "SELECT state, output FROM executions WHERE id = ?", execution["parent_execution_id"]
        )
    if parent is None:
        return "null"
    return str(parent["state"] or parent["output"] or "null")


def approvals(tx: Transaction) -> list[sqlite3.Row]:
    """Return the approvals that wait for a decision, oldest first."""
    return tx.all("SELECT * FROM approvals WHERE status = 'pending' ORDER BY seq")


def approval(tx: Transaction, approval_id: str) -> sqlite3.Row:
    """Return an approval.

    Raises:
        NotFoundError: there is none.
    """
    row = tx.one("SELECT * FROM approvals WHERE id = ?", approval_id)
    if row is None:
        raise refusals.not_found("approval", approval_id)
    return row


def agents(tx: Transaction) -> list[sqlite3.Row]:
    """Return all agents by id."""
    return tx.all("SELECT * FROM agents ORDER BY id")
