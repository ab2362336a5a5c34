"""The append-only event log of an execution."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import orjson

from rebuno_sync import wire
from rebuno_sync.kernel.store import Transaction


def append(tx: Transaction, execution_id: str, *events: tuple[str, Mapping[str, Any]]) -> None:
    """Append events, each a type and its payload, and mark the execution as updated.

    ``event_seq`` starts at 1 and has no gaps: it is counted in the execution's own row.
    """
    tx.run(
        "UPDATE executions SET last_event = last_event + ?, updated_at = ? WHERE id = ?",
        len(events),
        tx.now,
        execution_id,
    )
    row = tx.one("SELECT last_event FROM executions WHERE id = ?", execution_id)
    assert row is not None
    first = row["last_event"] - len(events) + 1
    tx.insert_many(
        "INSERT INTO events (execution_id, event_seq, type, payload, occurred_at)"
        " VALUES (?, ?, ?, ?, ?)",
        [
            (execution_id, first + i, type, orjson.dumps(payload).decode(), tx.now)
            for i, (type, payload) in enumerate(events)
        ],
    )


def execution_payload(execution_id: str, status: str, **more: Any) -> dict[str, Any]:
    """Return the payload of an ``execution.*`` event."""
    return {"execution_id": execution_id, "status": status, **more}


def step_payload(step_id: str, kind: str, target: str, **more: Any) -> dict[str, Any]:
    """Return the payload of a ``step.*`` event."""
    return {"step_id": step_id, "step_type": kind, "target": target, **more}


def dispatch_payload(
    dispatch_id: str, execution_id: str, status: str, attempt: int
) -> dict[str, Any]:
    """Return the payload of a ``dispatch.*`` event."""
    return {
        "dispatch_id": dispatch_id,
        "execution_id": execution_id,
        "status": status,
        "attempt": attempt,
    }


def read_payload(text: str) -> dict[str, Any]:
    """Return a recorded payload; an empty one where it holds JSON deeper than Python reads."""
    try:
        payload: dict[str, Any] = wire.decode(text.encode("utf-8"))
    except ValueError:
        return {}
    return payload
