"""Dispatches in the queue and the leases that agents hold on them (PROTOCOL 4, 7).

The states of a dispatch::

    pending ──claim──▶ in_flight ──the execution ends──▶ retired
       ▲                │      └──the execution waits──▶ held ──it goes on──▶ retired
       └─lease ran out, ┘
         delivery failed
"""

from __future__ import annotations

import dataclasses
import sqlite3

from rebuno_sync.kernel import events, refusals
from rebuno_sync.kernel.ids import new_id
from rebuno_sync.kernel.store import Transaction


@dataclasses.dataclass(frozen=True)
class Lease:
    """What an agent shows of its lease; ``None`` where a generation 1 agent knows no better."""

    dispatch_id: str | None
    attempt: int | None


def enqueue(
    tx: Transaction, execution_id: str, agent_id: str, available_at: float | None = None
) -> None:
    """Queue a new dispatch, to be delivered at once or from ``available_at`` on."""
    dispatch_id = new_id(tx.now)
    tx.insert(
        "dispatches",
        {
            "id": dispatch_id,
            "execution_id": execution_id,
            "agent_id": agent_id,
            "state": "pending",
            "available_at": tx.now if available_at is None else available_at,
        },
    )
    payload = events.dispatch_payload(dispatch_id, execution_id, "pending", 0)
    events.append(tx, execution_id, ("dispatch.queued", payload))
    tx.queue_changed = True


def matching(tx: Transaction, execution_id: str, lease: Lease) -> sqlite3.Row:
    """Return the dispatch that ``lease`` names, whatever its state, and renew it if in flight.

    Raises:
        ConflictError: ``lease_superseded``: it is not this execution's, or the attempt is not
            its current one.
    """
    if lease.dispatch_id is None:
        row = tx.one(
            "SELECT * FROM dispatches WHERE execution_id = ? ORDER BY seq DESC LIMIT 1",
            execution_id,
        )
    else:
        row = tx.one(
            "SELECT * FROM dispatches WHERE id = ? AND execution_id = ?",
            lease.dispatch_id,
            execution_id,
        )
    if row is None:
        raise refusals.lease_superseded(
            f"the execution has no dispatch {lease.dispatch_id}; use the ids of the webhook"
        )
    if lease.attempt is not None and row["attempt"] != lease.attempt:
        raise refusals.lease_superseded(
            f"attempt {lease.attempt} was superseded by attempt {row['attempt']}"
        )
    if row["state"] == "in_flight":
        _renew(tx, row)
    return row


def good(tx: Transaction, execution_id: str, lease: Lease) -> sqlite3.Row:
    """Return the dispatch that ``lease`` names and renew it.

    Raises:
        ConflictError: ``lease_superseded``: the lease is not good.
    """
    row = matching(tx, execution_id, lease)
    if row["state"] != "in_flight":
        raise not_in_flight(row)
    return row


def not_in_flight(row: sqlite3.Row) -> Exception:
    """Return the refusal of a lease on a dispatch that is not in flight."""
    why = "its time ran out" if row["state"] == "pending" else "the dispatch was retired"
    return refusals.lease_superseded(f"the lease is no longer good: {why}")


def _renew(tx: Transaction, row: sqlite3.Row) -> None:
    acknowledge(tx, row)
    tx.run(
        "UPDATE dispatches SET lease_deadline = ? WHERE seq = ?",
        tx.now + row["lease_timeout"],
        row["seq"],
    )


def acknowledge(tx: Transaction, row: sqlite3.Row) -> None:
    """Record that the current attempt reached the agent, once.

    An agent that uses its lease shows so before its 2xx is read; recorded here, the event
    stands before those of the agent's steps.
    """
    if row["acked"] == row["attempt"]:
        return
    tx.run("UPDATE dispatches SET acked = attempt WHERE seq = ?", row["seq"])
    payload = events.dispatch_payload(row["id"], row["execution_id"], "acked", row["attempt"])
    events.append(tx, row["execution_id"], ("dispatch.acked", payload))


def hold(tx: Transaction, execution_id: str) -> None:
    """Take the dispatch in flight from its agent, because the execution has to wait."""
    tx.run(
        "UPDATE dispatches SET state = 'held' WHERE execution_id = ? AND state = 'in_flight'",
        execution_id,
    )


def release(tx: Transaction, execution_id: str) -> None:
    """Retire what was held: the execution goes on with another dispatch."""
    tx.run(
        "UPDATE dispatches SET state = 'retired' WHERE execution_id = ? AND state = 'held'",
        execution_id,
    )


def retire(tx: Transaction, execution_id: str) -> None:
    """Retire every dispatch of an execution that has ended."""
    tx.run(
        "UPDATE dispatches SET state = 'retired' WHERE execution_id = ?"
        " AND state IN ('pending', 'in_flight', 'held')",
        execution_id,
    )
