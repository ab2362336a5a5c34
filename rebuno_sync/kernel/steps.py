"""What happens to steps: submitted, decided, settled, each in one transaction (PROTOCOL 7)."""

from __future__ import annotations

import dataclasses
import functools
import sqlite3
from typing import Any, Final

import orjson

from rebuno_sync.kernel import (
    approvals,
    budgets,
    events,
    identity,
    leases,
    limits,
    refusals,
    submissions,
    transitions,
)
from rebuno_sync.kernel.leases import Lease
from rebuno_sync.kernel.policy import PERMISSIVE, Bundle, Verdict
from rebuno_sync.kernel.store import Transaction
from rebuno_sync.wire import TERMINAL_EXECUTION, TERMINAL_STEP, Idempotency

_INDETERMINATE: Final = {
    "reason": "indeterminate",
    "message": "outcome unknown: this may already have taken effect."
    " Check the state before continuing.",
}
_RETRY_REFUSED: Final = Verdict(
    "deny", "__indeterminate_retry", reason="prior attempt outcome unknown; retry refused"
)


@dataclasses.dataclass(frozen=True)
class Submission:
    """A step that an agent submits; ``args`` are raw JSON text."""

    kind: str
    target: str
    args: str
    args_hash: str
    idempotency: str = Idempotency.SAFE_TO_RETRY.value


def submit(
    tx: Transaction, agent_id: str, execution_id: str, lease: Lease, submission: Submission
) -> dict[str, Any]:
    """Decide on a submitted step (PROTOCOL 7).

    Raises:
        NotFoundError: there is no such execution.
        ForbiddenError: it is another agent's.
        ConflictError: ``lease_superseded``.
    """
    execution = transitions.owned(tx, execution_id, agent_id)
    if execution["status"] in TERMINAL_EXECUTION:
        return {"decision": "execution_terminal"}
    dispatch = leases.matching(tx, execution_id, lease)
    held = dispatch["state"] == "held"
    if not held and dispatch["state"] != "in_flight":
        raise leases.not_in_flight(dispatch)

    occurrence = _occurrence(tx, execution_id, submission)
    step_id = identity.step_id(
        execution_id, submission.kind, submission.target, submission.args_hash, occurrence
    )
    step = tx.one("SELECT * FROM steps WHERE step_id = ?", step_id)
    if step is not None:
        answer, counts = _decide_known(tx, step, held)
    elif held:
        answer, counts = {"decision": "execution_blocked"}, False
    else:
        answer, counts = _decide_new(tx, execution, step_id, occurrence, submission)
    if counts:
        _count(tx, execution_id, submission, occurrence + 1)
    submissions.note(tx, dispatch, step_id, submission.kind, submission.target, answer["decision"])
    return answer


def settle_step(
    tx: Transaction,
    agent_id: str,
    execution_id: str,
    lease: Lease,
    step_id: str,
    succeeded: bool,
    outcome: str,
) -> dict[str, Any]:
    """Record the outcome of a step, ``outcome`` being the raw JSON of its result or error.

    The lease only has to match: an effect that ran when the execution blocked is recorded too.

    Raises:
        NotFoundError: there is no such execution or step.
        ForbiddenError: it is another agent's.
        ConflictError: ``lease_superseded``, or the step is not executing.
    """
    execution = transitions.owned(tx, execution_id, agent_id)
    if execution["status"] in TERMINAL_EXECUTION:
        return {"decision": "execution_terminal"}
    leases.matching(tx, execution_id, lease)
    step = known_step(tx, execution_id, step_id)
    if step["status"] in TERMINAL_STEP:
        return {"decision": "replay", **_outcome(step)}
    if step["status"] != "executing":
        raise refusals.conflict(f"the step is not executing, it is {step['status']}")
    status, column = ("succeeded", "result") if succeeded else ("failed", "error")
    tx.run(
        f"UPDATE steps SET status = ?, {column} = ?, completed_at = ? WHERE step_id = ?",
        status,
        outcome,
        tx.now,
        step_id,
    )
    budgets.record(tx, step, outcome, succeeded)
    payload = events.step_payload(step_id, step["kind"], step["target"])
    if not succeeded:
        payload["error"] = orjson.Fragment(outcome)
    events.append(tx, execution_id, (f"step.{status}", payload))
    return {"decision": "recorded"}


def streaming(
    tx: Transaction, agent_id: str, execution_id: str, lease: Lease | None, step_id: str
) -> None:
    """Check that a step may publish live output now, and renew the lease where there is one.

    Raises:
        NotFoundError: there is no such execution or step.
        ForbiddenError: it is another agent's.
        ConflictError: ``lease_superseded``, or the step is not executing.
    """
    transitions.owned(tx, execution_id, agent_id)
    step = known_step(tx, execution_id, step_id)
    if lease is not None:
        leases.good(tx, execution_id, lease)
    if step["status"] != "executing":
        raise refusals.conflict(f"the step is not executing, it is {step['status']}")


def known_step(tx: Transaction, execution_id: str, step_id: str) -> sqlite3.Row:
    """Return the row of a step of this execution.

    Raises:
        NotFoundError: there is no such step.
    """
    step = tx.one(
        "SELECT * FROM steps WHERE step_id = ? AND execution_id = ?", step_id, execution_id
    )
    if step is None:
        raise refusals.not_found("step", step_id)
    return step


@functools.lru_cache(maxsize=128)
def _bundle(policy: str) -> Bundle:
    return Bundle.parse(policy)


def _occurrence(tx: Transaction, execution_id: str, submission: Submission) -> int:
    row = tx.one(
        "SELECT next FROM occurrences"
        " WHERE execution_id = ? AND args_hash = ? AND target = ? AND kind = ?",
        execution_id,
        submission.args_hash,
        submission.target,
        submission.kind,
    )
    return 0 if row is None else int(row["next"])


def _count(tx: Transaction, execution_id: str, submission: Submission, following: int) -> None:
    tx.run(
        "INSERT OR REPLACE INTO occurrences (execution_id, kind, target, args_hash, next)"
        " VALUES (?, ?, ?, ?, ?)",
        execution_id,
        submission.kind,
        submission.target,
        submission.args_hash,
        following,
    )


def _outcome(step: sqlite3.Row) -> dict[str, Any]:
    """Return the recorded result or error of a step that has one."""
    if step["status"] == "succeeded":
        return {"result": orjson.Fragment(step["result"])}
    return {"error": orjson.Fragment(step["error"])}


def _denied(step_id: str, reason: str, rule_id: str | None) -> dict[str, Any]:
    answer = {"decision": "denied", "step_id": step_id, "reason": reason}
    return {**answer, "rule_id": rule_id} if rule_id else answer


def _decide_known(tx: Transaction, step: sqlite3.Row, held: bool) -> tuple[dict[str, Any], bool]:
    """Decide on a step that was recorded; also tell whether its occurrence counts."""
    step_id, status = step["step_id"], step["status"]
    if status in ("succeeded", "failed"):
        return {"decision": "replay", "step_id": step_id, **_outcome(step)}, True
    if status == "denied":
        return _denied(step_id, step["reason"], step["rule_id"]), True
    if status == "awaiting_approval":
        approval = tx.one("SELECT id FROM approvals WHERE step_id = ?", step_id)
        assert approval is not None
        return {"decision": "blocked", "step_id": step_id, "approval_id": approval["id"]}, True
    if status == "cancelled":
        return {"decision": "execution_terminal"}, False
    if held:
        return {"decision": "execution_blocked"}, False
    about = (step_id, step["kind"], step["target"])
    if status == "executing":
        if step["idempotency"] == Idempotency.AT_MOST_ONCE.value:
            return _give_up_orphan(tx, step), True
    else:
        tx.run(
            "UPDATE steps SET status = 'executing', started_at = ? WHERE step_id = ?",
            tx.now,
            step_id,
        )
        executing = ("step.executing", events.step_payload(*about))
        events.append(tx, step["execution_id"], executing)
    return {"decision": "proceed", "step_id": step_id}, True


def _give_up_orphan(tx: Transaction, step: sqlite3.Row) -> dict[str, Any]:
    error = orjson.dumps(_INDETERMINATE).decode()
    tx.run(
        "UPDATE steps SET status = 'failed', error = ?, reason = 'indeterminate',"
        " completed_at = ? WHERE step_id = ?",
        error,
        tx.now,
        step["step_id"],
    )
    payload = events.step_payload(
        step["step_id"], step["kind"], step["target"], error=_INDETERMINATE
    )
    events.append(tx, step["execution_id"], ("step.failed", payload))
    return {"decision": "replay", "step_id": step["step_id"], "error": orjson.Fragment(error)}


def _decide_new(
    tx: Transaction,
    execution: sqlite3.Row,
    step_id: str,
    occurrence: int,
    submission: Submission,
) -> tuple[dict[str, Any], bool]:
    """Decide on a step that is not recorded yet; also tell whether its occurrence counts."""
    execution_id, agent_id = execution["id"], execution["agent_id"]
    if _is_refused_retry(tx, execution_id, submission):
        verdict = _RETRY_REFUSED
    else:
        agent = tx.one("SELECT policy FROM agents WHERE id = ?", agent_id)
        policy = None if agent is None else agent["policy"]
        bundle = PERMISSIVE if policy is None else _bundle(policy)
        verdict = bundle.decide(
            agent_id, submission.kind, submission.target, submission.args.encode("utf-8")
        )
        verdict = budgets.check(tx, verdict, submission.kind, execution_id, agent_id)
        limited = _limit(tx, execution, step_id, verdict)
        if limited is not None:
            return limited, False

    step: dict[str, Any] = {
        "step_id": step_id,
        "execution_id": execution_id,
        "occurrence": occurrence,
        "status": "executing",
        "rule_id": verdict.rule_id,
        **dataclasses.asdict(submission),
    }
    budgets.begin(tx, step_id, submission.kind, execution_id, agent_id, verdict)
    about = (step_id, submission.kind, submission.target)
    if verdict.action == "allow":
        tx.insert("steps", {**step, "started_at": tx.now})
        events.append(
            tx,
            execution_id,
            ("step.proposed", events.step_payload(*about)),
            ("step.allowed", events.step_payload(*about, rule_id=verdict.rule_id)),
            ("step.executing", events.step_payload(*about)),
        )
        return {"decision": "proceed", "step_id": step_id}, True
    if verdict.action == "require_approval":
        # A person will decide, so a refusal is not the rule's.
        tx.insert("steps", {**step, "status": "awaiting_approval", "rule_id": None})
        approval_id = approvals.request(tx, step, verdict)
        return {"decision": "blocked", "step_id": step_id, "approval_id": approval_id}, True
    reason = verdict.reason or "policy_denied"
    error = {"reason": reason, "rule_id": verdict.rule_id}
    tx.insert(
        "steps",
        {
            **step,
            "status": "denied",
            "reason": reason,
            "error": orjson.dumps(error).decode(),
            "completed_at": tx.now,
        },
    )
    events.append(
        tx,
        execution_id,
        ("step.proposed", events.step_payload(*about)),
        ("step.denied", events.step_payload(*about, rule_id=verdict.rule_id, error=error)),
    )
    return _denied(step_id, reason, verdict.rule_id), True


def _is_refused_retry(tx: Transaction, execution_id: str, submission: Submission) -> bool:
    """Tell whether an equal effect may already have happened, nobody knows."""
    if submission.idempotency != Idempotency.AT_MOST_ONCE.value:
        return False
    row = tx.one(
        "SELECT 1 FROM steps WHERE execution_id = ? AND args_hash = ? AND target = ? AND kind = ?"
        " AND reason = 'indeterminate' AND status = 'failed'",
        execution_id,
        submission.args_hash,
        submission.target,
        submission.kind,
    )
    return row is not None


def _limit(
    tx: Transaction, execution: sqlite3.Row, step_id: str, verdict: Verdict
) -> dict[str, Any] | None:
    """Take the token that the verdict asks for; the answer to give when there is none."""
    limit = verdict.rate_limit
    if limit is None:
        return None
    execution_id, agent_id = execution["id"], execution["agent_id"]
    try:
        wait = limits.take(tx, limit, verdict.rule_id, execution_id, agent_id)
    except sqlite3.Error:
        if tx.is_lost:
            raise
        if limit.on_limiter_error == "allow":
            return None
        return {"decision": "rate_limited", "reason": "rate_limiter_unavailable"}
    if wait == 0:
        return None
    parked = tx.one(
        "SELECT 1 FROM parked WHERE execution_id = ? AND step_id = ?", execution_id, step_id
    )
    if wait > limit.max_wait or parked is not None:
        return {"decision": "rate_limited", "reason": "rate_limit_exceeded"}
    tx.insert("parked", {"execution_id": execution_id, "step_id": step_id})
    leases.hold(tx, execution_id)
    leases.enqueue(tx, execution_id, agent_id, available_at=tx.now + wait)
    return {"decision": "blocked", "step_id": step_id}
