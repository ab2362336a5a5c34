"""What happens to an approval: asked for, decided, expired (PROTOCOL 7)."""

from __future__ import annotations

import sqlite3
from typing import Any

import orjson

from rebuno_sync.kernel import events, leases, refusals
from rebuno_sync.kernel.ids import new_id
from rebuno_sync.kernel.policy import Verdict
from rebuno_sync.kernel.store import Transaction


def request(tx: Transaction, step: dict[str, Any], verdict: Verdict) -> str:
    """Ask for a decision on ``step``, whose row was just made, and block the execution.

    Returns:
        the id of the approval.
    """
    approval_id = new_id(tx.now)
    execution_id, step_id = step["execution_id"], step["step_id"]
    timeout = verdict.approval_timeout
    tx.insert(
        "approvals",
        {
            "id": approval_id,
            "step_id": step_id,
            "execution_id": execution_id,
            "status": "pending",
            "approvers": orjson.dumps(verdict.approvers).decode(),
            "message": verdict.approval_message or verdict.reason,
            "timeout_at": None if timeout is None else tx.now + timeout,
            "created_at": tx.now,
        },
    )
    tx.run("UPDATE executions SET status = 'blocked' WHERE id = ?", execution_id)
    leases.hold(tx, execution_id)
    about = (step_id, step["kind"], step["target"])
    events.append(
        tx,
        execution_id,
        ("step.proposed", events.step_payload(*about)),
        ("step.awaiting_approval", events.step_payload(*about, rule_id=verdict.rule_id)),
        ("approval.requested", _payload(approval_id, execution_id, step_id, "pending")),
        ("execution.blocked", events.execution_payload(execution_id, "blocked")),
    )
    tx.queue_changed = timeout is not None
    return approval_id


def decide(
    tx: Transaction, approval_id: str, granted: bool, decided_by: str, rationale: str
) -> None:
    """Grant or deny an approval; the execution goes on with a new dispatch.

    Raises:
        NotFoundError: there is no such approval.
        ConflictError: it has been decided, or its time is over.
        ForbiddenError: it names approvers, and ``decided_by`` is none of them.
    """
    row = tx.one("SELECT * FROM approvals WHERE id = ?", approval_id)
    if row is None:
        raise refusals.not_found("approval", approval_id)
    if row["status"] != "pending":
        raise refusals.conflict(f"the approval has already been decided: {row['status']}")
    if row["timeout_at"] is not None and row["timeout_at"] <= tx.now:
        raise refusals.conflict("the time to decide the approval is over")
    approvers = orjson.loads(row["approvers"])
    if approvers and decided_by not in approvers:
        raise refusals.forbidden(
            f"{decided_by!r:.100} is not an approver; decided_by must be one of {approvers}"
        )
    status = "granted" if granted else "denied"
    decision = _close(tx, row, status, decided_by, rationale)
    if granted:
        tx.run("UPDATE steps SET status = 'allowed' WHERE step_id = ?", row["step_id"])
        outcome = ("step.allowed", _step_payload(tx, row["step_id"]))
    else:
        outcome = deny_step(tx, row["step_id"], rationale or "approval_denied")
    events.append(tx, row["execution_id"], decision, outcome)
    _resume(tx, row["execution_id"])


def expire(tx: Transaction) -> None:
    """Deny every step whose approval was not decided in time, and let its execution go on."""
    overdue = tx.all("SELECT * FROM approvals WHERE status = 'pending' AND timeout_at <= ?", tx.now)
    for row in overdue:
        decision = _close(tx, row, "expired", "", "timeout")
        outcome = deny_step(tx, row["step_id"], "approval_timeout")
        events.append(tx, row["execution_id"], decision, outcome)
        _resume(tx, row["execution_id"])


def abandon(tx: Transaction, execution_id: str, reason: str) -> list[tuple[str, dict[str, Any]]]:
    """Expire the pending approvals of an execution that has ended; return the events of it."""
    pending = tx.all(
        "SELECT * FROM approvals WHERE execution_id = ? AND status = 'pending'", execution_id
    )
    told: list[tuple[str, dict[str, Any]]] = []
    for row in pending:
        told += [_close(tx, row, "expired", "", reason), deny_step(tx, row["step_id"], reason)]
    return told


def deny_step(tx: Transaction, step_id: str, reason: str) -> tuple[str, dict[str, Any]]:
    """Deny a step that waited; return the event of it."""
    error = {"reason": reason}
    tx.run(
        "UPDATE steps SET status = 'denied', reason = ?, error = ?, completed_at = ?"
        " WHERE step_id = ?",
        reason,
        orjson.dumps(error).decode(),
        tx.now,
        step_id,
    )
    return ("step.denied", {**_step_payload(tx, step_id), "error": error})


def _close(
    tx: Transaction, row: sqlite3.Row, status: str, decided_by: str, rationale: str
) -> tuple[str, dict[str, Any]]:
    tx.run(
        "UPDATE approvals SET status = ?, decided_by = ?, rationale = ?, decided_at = ?"
        " WHERE id = ?",
        status,
        decided_by or None,
        rationale or None,
        tx.now,
        row["id"],
    )
    payload = _payload(row["id"], row["execution_id"], row["step_id"], status)
    if decided_by:
        payload["decided_by"] = decided_by
    if rationale:
        payload["rationale"] = rationale
    return (f"approval.{status}", payload)


def _resume(tx: Transaction, execution_id: str) -> None:
    row = tx.one("SELECT agent_id FROM executions WHERE id = ?", execution_id)
    assert row is not None
    tx.run("UPDATE executions SET status = 'running' WHERE id = ?", execution_id)
    payload = events.execution_payload(execution_id, "running")
    events.append(tx, execution_id, ("execution.resumed", payload))
    leases.release(tx, execution_id)
    leases.enqueue(tx, execution_id, row["agent_id"])


def _payload(approval_id: str, execution_id: str, step_id: str, status: str) -> dict[str, Any]:
    return {
        "approval_id": approval_id,
        "execution_id": execution_id,
        "step_id": step_id,
        "status": status,
    }


def _step_payload(tx: Transaction, step_id: str) -> dict[str, Any]:
    row = tx.one("SELECT kind, target FROM steps WHERE step_id = ?", step_id)
    assert row is not None
    return events.step_payload(step_id, row["kind"], row["target"])
