"""The state changes of executions, each one function in one transaction (PROTOCOL 7).

Every function takes an open transaction, whose ``now`` is the time, and returns what to answer;
a refusal is raised, and rolls the transaction back.
"""

from __future__ import annotations

import dataclasses
import sqlite3
from typing import Any

import orjson

from rebuno_sync.kernel import approvals, events, leases, limits, refusals
from rebuno_sync.kernel.ids import new_id
from rebuno_sync.kernel.leases import Lease
from rebuno_sync.kernel.store import Transaction
from rebuno_sync.wire import TERMINAL_EXECUTION


@dataclasses.dataclass(frozen=True)
class NewExecution:
    """What a client asks for; JSON values are raw text. ``deadline`` is in seconds from now."""

    agent_id: str
    input: str = "null"
    session: str | None = None
    parent_execution_id: str | None = None
    idempotency_key: str | None = None
    spawned_by: str | None = None
    on_behalf_of: str | None = None
    deadline: float | None = None


def create(tx: Transaction, new: NewExecution) -> sqlite3.Row:
    """Create and start an execution; an idempotency key seen before gives that one back.

    Raises:
        NotFoundError: the agent, or the parent execution, is not there.
    """
    if tx.one("SELECT 1 FROM agents WHERE id = ?", new.agent_id) is None:
        raise refusals.not_found("agent", new.agent_id)
    if new.idempotency_key is not None:
        known = tx.one(
            "SELECT * FROM executions WHERE agent_id = ? AND idempotency_key = ?",
            new.agent_id,
            new.idempotency_key,
        )
        if known is not None:
            return known
    if new.parent_execution_id is not None:
        _execution(tx, new.parent_execution_id)
    execution_id = new_id(tx.now)
    tx.insert(
        "executions",
        {
            "id": execution_id,
            "status": "running",
            "last_event": 0,
            "created_at": tx.now,
            "updated_at": tx.now,
            "deadline_at": None if new.deadline is None else tx.now + new.deadline,
            **{name: value for name, value in vars(new).items() if name != "deadline"},
        },
    )
    events.append(
        tx,
        execution_id,
        ("execution.created", events.execution_payload(execution_id, "pending")),
        ("execution.started", events.execution_payload(execution_id, "running")),
    )
    leases.enqueue(tx, execution_id, new.agent_id)
    return _execution(tx, execution_id)


def heartbeat(tx: Transaction, agent_id: str, execution_id: str, lease: Lease) -> None:
    """Renew a lease.

    Raises:
        NotFoundError: there is no such execution.
        ForbiddenError: it is another agent's.
        ConflictError: ``lease_superseded``.
    """
    owned(tx, execution_id, agent_id)
    if lease.dispatch_id is None:  # generation 1: the beat of an agent that holds no lease
        leases.matching(tx, execution_id, lease)
    else:
        leases.good(tx, execution_id, lease)


def complete(
    tx: Transaction,
    agent_id: str,
    execution_id: str,
    lease: Lease,
    output: str,
    state: str | None = None,
) -> None:
    """Complete an execution; ``output`` and ``state`` are raw JSON.

    Raises:
        NotFoundError: there is no such execution.
        ForbiddenError: it is another agent's.
        ConflictError: ``execution_terminal`` or ``lease_superseded``.
    """
    _leased(tx, agent_id, execution_id, lease)
    tx.run("UPDATE executions SET output = ?, state = ? WHERE id = ?", output, state, execution_id)
    end(tx, execution_id, "completed", output=orjson.Fragment(output))


def fail(tx: Transaction, agent_id: str, execution_id: str, lease: Lease, reason: str) -> None:
    """Fail an execution as its agent reports.

    Raises:
        NotFoundError: there is no such execution.
        ForbiddenError: it is another agent's.
        ConflictError: ``execution_terminal`` or ``lease_superseded``.
    """
    _leased(tx, agent_id, execution_id, lease)
    end(tx, execution_id, "failed", reason=reason)


def cancel(tx: Transaction, execution_id: str) -> None:
    """Cancel an execution, with what waits or runs in it.

    Raises:
        NotFoundError: there is no such execution.
        ConflictError: ``execution_terminal``.
    """
    execution = _execution(tx, execution_id)
    if execution["status"] in TERMINAL_EXECUTION:
        raise refusals.execution_terminal(execution["status"])
    stop(tx, execution_id, "cancelled", "client_cancelled", "execution_cancelled")


def stop(tx: Transaction, execution_id: str, status: str, reason: str, step_reason: str) -> None:
    """End an execution from outside, with what waits or runs in it.

    Args:
        status: how it ends.
        reason: why.
        step_reason: why its steps are denied or cancelled.
    """
    end(tx, execution_id, status, reason=reason)
    told = approvals.abandon(tx, execution_id, step_reason)
    error = {"reason": step_reason}
    running = tx.all(
        "SELECT * FROM steps WHERE execution_id = ? AND status = 'executing' ORDER BY seq",
        execution_id,
    )
    for step in running:
        payload = events.step_payload(step["step_id"], step["kind"], step["target"], error=error)
        told.append(("step.cancelled", payload))
    tx.run(
        "UPDATE steps SET status = 'cancelled', error = ?, completed_at = ?"
        " WHERE execution_id = ? AND status = 'executing'",
        orjson.dumps(error).decode(),
        tx.now,
        execution_id,
    )
    if told:
        events.append(tx, execution_id, *told)


def end(tx: Transaction, execution_id: str, status: str, **more: Any) -> None:
    """Bring an execution to its end: the status, the event, and nothing left in the queue."""
    tx.run(
        "UPDATE executions SET status = ?, failure_reason = ? WHERE id = ?",
        status,
        more.get("reason"),
        execution_id,
    )
    payload = events.execution_payload(execution_id, status, **more)
    events.append(tx, execution_id, (f"execution.{status}", payload))
    leases.retire(tx, execution_id)
    limits.forget(tx, execution_id)
    tx.run("DELETE FROM occurrences WHERE execution_id = ?", execution_id)
    tx.run("DELETE FROM parked WHERE execution_id = ?", execution_id)


def owned(tx: Transaction, execution_id: str, agent_id: str) -> sqlite3.Row:
    """Return the row of an execution of this agent.

    Raises:
        NotFoundError: there is no such execution.
        ForbiddenError: it is another agent's.
    """
    execution = _execution(tx, execution_id)
    if execution["agent_id"] != agent_id:
        raise refusals.forbidden("the execution belongs to another agent")
    return execution


def _execution(tx: Transaction, execution_id: str) -> sqlite3.Row:
    row = tx.one("SELECT * FROM executions WHERE id = ?", execution_id)
    if row is None:
        raise refusals.not_found("execution", execution_id)
    return row


def _leased(tx: Transaction, agent_id: str, execution_id: str, lease: Lease) -> None:
    execution = owned(tx, execution_id, agent_id)
    if execution["status"] in TERMINAL_EXECUTION:
        raise refusals.execution_terminal(execution["status"])
    leases.good(tx, execution_id, lease)
