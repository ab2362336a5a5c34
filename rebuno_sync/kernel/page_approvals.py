"""Approvals as the page shows them."""

from __future__ import annotations

import dataclasses
import functools
import sqlite3
from collections.abc import Sequence
from typing import Final

import orjson

from rebuno_sync.kernel import events, page_values, queries, refusals
from rebuno_sync.kernel.page_values import READ, Shown
from rebuno_sync.kernel.store import Transaction

_DECIDED_LATELY: Final = 20


@dataclasses.dataclass(frozen=True)
class ApprovalCard:
    """An approval with the step that it is about."""

    row: sqlite3.Row
    approvers: Sequence[str]
    rule_id: str | None
    now: float

    @functools.cached_property
    def args(self) -> Shown:
        """The arguments of the step."""
        return page_values.shown(self.row["args"], self.row["args_size"])

    @property
    def is_pending(self) -> bool:
        """Whether it can still be decided."""
        timeout_at = self.row["timeout_at"]
        return self.row["status"] == "pending" and (timeout_at is None or timeout_at > self.now)


def pending_approvals(tx: Transaction) -> list[ApprovalCard]:
    """Return what waits for a decision, oldest first."""
    return [approval_card(tx, row["id"]) for row in queries.approvals(tx)]


def decided_approvals(tx: Transaction) -> list[sqlite3.Row]:
    """Return the approvals that were decided last, newest first."""
    return tx.all(
        "SELECT a.*, e.agent_id, s.target FROM approvals a"
        " JOIN executions e ON e.id = a.execution_id JOIN steps s ON s.step_id = a.step_id"
        " WHERE a.status != 'pending' ORDER BY a.decided_at DESC LIMIT ?",
        _DECIDED_LATELY,
    )


def count_pending(tx: Transaction) -> int:
    """Return how many approvals wait."""
    row = tx.one("SELECT count(*) AS n FROM approvals WHERE status = 'pending'")
    return 0 if row is None else int(row["n"])


def approval_card(tx: Transaction, approval_id: str) -> ApprovalCard:
    """Return an approval with what it is about.

    Raises:
        NotFoundError: there is no such approval.
    """
    row = tx.one(
        "SELECT a.*, e.agent_id, s.kind, s.target, s.idempotency,"
        f" substr(s.args, 1, {READ}) AS args, length(CAST(s.args AS BLOB)) AS args_size"
        " FROM approvals a JOIN executions e ON e.id = a.execution_id"
        " JOIN steps s ON s.step_id = a.step_id WHERE a.id = ?",
        approval_id,
    )
    if row is None:
        raise refusals.not_found("approval", approval_id)
    asked = tx.all(
        "SELECT payload FROM events WHERE execution_id = ? AND type = 'step.awaiting_approval'",
        row["execution_id"],
    )
    told = [events.read_payload(event["payload"]) for event in asked]
    return ApprovalCard(
        row=row,
        approvers=orjson.loads(row["approvers"]),
        rule_id=next((t["rule_id"] for t in told if t["step_id"] == row["step_id"]), None),
        now=tx.now,
    )
