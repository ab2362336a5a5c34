"""What happens to a dispatch between the queue and its agent (PROTOCOL 7)."""

from __future__ import annotations

import dataclasses
import random
import sqlite3
from collections.abc import Collection

from rebuno_sync.kernel import events, leases, transitions
from rebuno_sync.kernel.store import Transaction
from rebuno_sync.wire import TERMINAL_EXECUTION

#: After this many failed deliveries in a row the execution fails.
MAX_FAILURES = 5
_LONGEST_DELAY = 30.0


@dataclasses.dataclass(frozen=True)
class Claim:
    """One attempt, to be delivered now. ``webhook_url`` is ``None`` when the agent is gone;
    ``due_at`` is when it could have been delivered, by the kernel's clock."""

    dispatch_id: str
    execution_id: str
    agent_id: str
    attempt: int
    lease_timeout: float
    due_at: float
    webhook_url: str | None
    secret: str = dataclasses.field(repr=False)


def next_due(tx: Transaction, busy_agents: Collection[str] | None) -> float | None:
    """Return when the next thing is due: a lease, an approval, or a delivery to an agent that is
    not among ``busy_agents``; ``None`` stands for all agents."""
    pending = None
    if busy_agents is not None:
        pending = _pending(tx, "d.available_at AS due", busy_agents)
    lease = tx.one("SELECT min(lease_deadline) AS due FROM dispatches WHERE state = 'in_flight'")
    approval = tx.one("SELECT min(timeout_at) AS due FROM approvals WHERE status = 'pending'")
    times = [row["due"] for row in (pending, lease, approval) if row is not None]
    return min((t for t in times if t is not None), default=None)


def reclaim(tx: Transaction) -> int:
    """Put every dispatch whose lease ran out back into the queue; return how many."""
    return tx.run(
        "UPDATE dispatches SET state = 'pending', available_at = ?"
        " WHERE state = 'in_flight' AND lease_deadline <= ?",
        tx.now,
        tx.now,
    )


def claim(tx: Transaction, busy_agents: Collection[str], lease_timeout: float) -> Claim | None:
    """Claim the dispatch that waits longest, but for agents with enough to do; its next attempt
    begins.

    Args:
        busy_agents: whose dispatches are left in the queue for now.
        lease_timeout: for agents that were registered without one, in seconds.
    """
    while True:
        row = _pending(
            tx, "d.*, e.status, a.webhook_url, a.secret, a.lease_timeout AS own", busy_agents
        )
        if row is None or row["available_at"] > tx.now:
            return None
        if row["status"] not in TERMINAL_EXECUTION:
            break
        _discard(tx, row)
    timeout = lease_timeout if row["own"] is None else row["own"]
    tx.run(
        "UPDATE dispatches SET state = 'in_flight', attempt = attempt + 1, lease_timeout = ?,"
        " lease_deadline = ? WHERE seq = ?",
        timeout,
        tx.now + timeout,
        row["seq"],
    )
    leases.release(tx, row["execution_id"])
    # Every attempt runs the handler from the top, and so counts from the start.
    tx.run("DELETE FROM occurrences WHERE execution_id = ?", row["execution_id"])
    return Claim(
        dispatch_id=row["id"],
        execution_id=row["execution_id"],
        agent_id=row["agent_id"],
        attempt=row["attempt"] + 1,
        lease_timeout=timeout,
        due_at=row["available_at"],
        webhook_url=row["webhook_url"],
        secret=row["secret"] or "",
    )


def delivered(tx: Transaction, claim: Claim) -> None:
    """Record that the agent took the dispatch."""
    row = _current(tx, claim)
    if row is not None:
        leases.acknowledge(tx, row)
        tx.run("UPDATE dispatches SET failures = 0 WHERE seq = ?", row["seq"])


def undelivered(tx: Transaction, claim: Claim, answered: bool, reason: str) -> None:
    """Record that a delivery failed; try again later, or fail the execution after too many.

    Args:
        answered: whether the agent said no, rather than nothing. An agent that said nothing but
            has used its lease since is at work, and is left to it.
        reason: what it said, or what kept it from saying anything; it stands in the event.
    """
    row = _current(tx, claim)
    if row is None:
        return
    if not answered and row["acked"] == row["attempt"]:
        tx.run("UPDATE dispatches SET failures = 0 WHERE seq = ?", row["seq"])
        return
    failures = row["failures"] + 1
    payload = events.dispatch_payload(row["id"], row["execution_id"], "failed", row["attempt"])
    payload["reason"] = reason
    events.append(tx, row["execution_id"], ("dispatch.failed", payload))
    tx.run(
        "UPDATE dispatches SET state = 'pending', failures = ?, available_at = ? WHERE seq = ?",
        failures,
        tx.now + backoff(row["attempt"]),
        row["seq"],
    )
    if failures >= MAX_FAILURES:
        transitions.end(tx, row["execution_id"], "failed", reason="dispatch_exhausted")
    tx.queue_changed = True


def backoff(attempt: int) -> float:
    """Return how long to wait after the delivery of this attempt failed, in seconds."""
    delay = min(_LONGEST_DELAY, 2.0 ** min(attempt - 1, 10))
    return delay * (1 + random.random() / 4)


def _pending(tx: Transaction, columns: str, busy_agents: Collection[str]) -> sqlite3.Row | None:
    marks = ",".join("?" * len(busy_agents))
    return tx.one(
        f"SELECT {columns} FROM dispatches d JOIN executions e ON e.id = d.execution_id"
        " LEFT JOIN agents a ON a.id = d.agent_id"
        f" WHERE d.state = 'pending' AND d.agent_id NOT IN ({marks})"
        " ORDER BY d.available_at, d.seq LIMIT 1",
        *busy_agents,
    )


def _current(tx: Transaction, claim: Claim) -> sqlite3.Row | None:
    """Return the claimed dispatch, unless it has moved on since."""
    return tx.one(
        "SELECT * FROM dispatches WHERE id = ? AND attempt = ? AND state = 'in_flight'",
        claim.dispatch_id,
        claim.attempt,
    )


def _discard(tx: Transaction, row: sqlite3.Row) -> None:
    attempt = row["attempt"] + 1
    tx.run(
        "UPDATE dispatches SET state = 'discarded', attempt = ? WHERE seq = ?", attempt, row["seq"]
    )
    payload = events.dispatch_payload(row["id"], row["execution_id"], "discarded", attempt)
    events.append(tx, row["execution_id"], ("dispatch.discarded", payload))
