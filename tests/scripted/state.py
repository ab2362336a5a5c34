"""Executions, steps and approvals in memory, and the transitions of PROTOCOL 7.

No locks and no HTTP in here: the kernel calls in under its own lock.
"""

from __future__ import annotations

import datetime
import json
import uuid
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from rebuno_sync.kernel import identity
from tests.scripted.http import Raw

TERMINAL = ("completed", "failed", "cancelled")
TERMINAL_STEP = ("succeeded", "failed", "denied", "cancelled")
INDETERMINATE = {
    "message": "outcome unknown: this may already have taken effect. "
    "Check the state before continuing.",
    "reason": "indeterminate",
}


def now() -> str:
    """The time as the kernel writes it."""
    return datetime.datetime.now(datetime.timezone.utc).isoformat().replace("+00:00", "Z")


def new_id() -> str:
    """A new id of an execution, a dispatch or an approval."""
    return str(uuid.uuid4())


@dataclass(frozen=True)
class Verdict:
    """What the policy says of a new step: ``allow``, ``deny``, ``require_approval`` or ``limit``.

    ``rule_id`` goes into events, ``reason`` to the agent, the rest into the approval.
    """

    action: str = "allow"
    rule_id: str = "permissive"
    reason: str = ""
    approvers: tuple[str, ...] = ()
    message: str = ""


@dataclass
class Step:
    """One effect."""

    step_id: str
    kind: str
    target: str
    args_hash: str
    occurrence: int
    idempotency: str
    args: Raw
    status: str = "proposed"
    result: Raw | None = None
    error: Raw | None = None
    approval_id: str = ""
    started_at: str = ""
    completed_at: str = ""

    def end(self, status: str, *, result: Raw | None = None, error: Raw | None = None) -> None:
        self.status, self.result, self.error = status, result, error
        self.completed_at = now()


@dataclass
class Approval:
    """A decision that a person must take."""

    id: str
    step_id: str
    approvers: tuple[str, ...]
    message: str
    status: str = "pending"
    decided_by: str = ""
    rationale: str = ""
    decided_at: str = ""
    created_at: str = field(default_factory=now)


@dataclass
class Execution:
    """One run of an agent. ``attempt`` is that of its one dispatch; 0 until it is claimed."""

    id: str
    agent_id: str
    input: Raw
    status: str = "running"
    output: Raw | None = None
    failure_reason: str = ""
    dispatch_id: str = ""
    attempt: int = 0
    retired: set[str] = field(default_factory=set)
    in_flight: bool = False
    steps: dict[str, Step] = field(default_factory=dict)
    approvals: dict[str, Approval] = field(default_factory=dict)
    events: list[dict[str, Any]] = field(default_factory=list)
    occurrences: Counter[tuple[str, str, str]] = field(default_factory=Counter)
    created_at: str = field(default_factory=now)

    def log(self, type: str, **payload: Any) -> None:
        self.events.append(
            {
                "execution_id": self.id,
                "event_seq": len(self.events) + 1,
                "type": type,
                "payload": payload,
                "occurred_at": now(),
            }
        )

    def log_self(self, type: str, **more: Any) -> None:
        self.log(type, execution_id=self.id, status=self.status, **more)

    def log_step(self, step: Step, type: str, **more: Any) -> None:
        self.log(type, step_id=step.step_id, step_type=step.kind, target=step.target, **more)

    def log_dispatch(self, type: str, status: str) -> None:
        self.log(
            type,
            dispatch_id=self.dispatch_id,
            execution_id=self.id,
            status=status,
            attempt=self.attempt,
        )

    def log_approval(self, approval: Approval, type: str) -> None:
        told = {k: v for k in ("decided_by", "rationale") if (v := getattr(approval, k))}
        self.log(
            type,
            approval_id=approval.id,
            step_id=approval.step_id,
            execution_id=self.id,
            status=approval.status,
            **told,
        )


def create(agent_id: str, input: Raw) -> Execution:
    """A new execution with its dispatch queued."""
    run = Execution(new_id(), agent_id, input)
    run.log("execution.created", execution_id=run.id, status="pending")
    run.log_self("execution.started")
    queue(run)
    return run


def queue(run: Execution) -> None:
    """Queue a new dispatch; the one before it is retired."""
    run.retired.add(run.dispatch_id)
    run.dispatch_id, run.attempt, run.in_flight = new_id(), 0, False
    run.log_dispatch("dispatch.queued", "pending")


def claim(run: Execution) -> None:
    """Claim the dispatch: the next attempt, with occurrences counted from nought."""
    run.attempt += 1
    run.in_flight = True
    run.occurrences.clear()


def end(run: Execution, status: str, *, output: Raw | None = None, reason: str = "") -> None:
    """End an execution."""
    run.status, run.output, run.failure_reason = status, output, reason
    run.in_flight = False
    told = {"output": output} if output is not None else {"reason": reason}
    run.log_self(f"execution.{status}", **told)


def submit(
    run: Execution,
    fields: dict[str, str],
    policy: Callable[[str, str, Any], Verdict],
) -> dict[str, Any]:
    """Decide a submission whose lease is good; ``fields`` are its members as JSON text."""
    if run.status in TERMINAL:
        return {"decision": "execution_terminal"}
    kind, target, idempotency = (
        json.loads(fields.get(name, default))
        for name, default in (("kind", '""'), ("target", '""'), ("idempotency", '"safe_to_retry"'))
    )
    args = fields.get("args", "null")
    args_hash = identity.args_hash(args.encode("utf-8"))
    key = (kind, target, args_hash)
    occurrence = run.occurrences[key]
    step_id = identity.step_id(run.id, kind, target, args_hash, occurrence)
    step = run.steps.get(step_id)
    if step is not None:
        answer = _known(run, step)
    elif run.status == "blocked":
        answer = {"decision": "execution_blocked"}
    else:
        step = Step(step_id, kind, target, args_hash, occurrence, idempotency, Raw(args))
        answer = _new(run, step, policy(kind, target, json.loads(args)))
    if answer["decision"] not in ("rate_limited", "execution_blocked", "execution_terminal"):
        run.occurrences[key] += 1
    return answer


def _known(run: Execution, step: Step) -> dict[str, Any]:
    if step.status in ("succeeded", "failed"):
        return {"decision": "replay", "step_id": step.step_id, **outcome(step)}
    if step.status == "denied":
        reason = json.loads(step.error.text)["reason"] if step.error else "policy_denied"
        return {"decision": "denied", "step_id": step.step_id, "reason": reason}
    if step.status == "awaiting_approval":
        return {"decision": "blocked", "step_id": step.step_id, "approval_id": step.approval_id}
    if step.status == "cancelled":
        return {"decision": "execution_terminal"}
    if step.status == "executing" and step.idempotency == "at_most_once":
        step.end("failed", error=Raw(json.dumps(INDETERMINATE)))
        run.log_step(step, "step.failed", error=INDETERMINATE)
        return {"decision": "replay", "step_id": step.step_id, **outcome(step)}
    if step.status == "allowed":
        _start(run, step)
    return {"decision": "proceed", "step_id": step.step_id}


def outcome(step: Step) -> dict[str, Raw]:
    """The recorded outcome as a replay tells it."""
    if step.status == "succeeded":
        return {"result": step.result or Raw("null")}
    return {"error": step.error or Raw("null")}


def _new(run: Execution, step: Step, verdict: Verdict) -> dict[str, Any]:
    key = (step.kind, step.target, step.args_hash)
    if step.idempotency == "at_most_once" and any(
        (s.kind, s.target, s.args_hash) == key and s.error and "indeterminate" in s.error.text
        for s in run.steps.values()
    ):
        verdict = Verdict(
            "deny", "__indeterminate_retry", "prior attempt outcome unknown; retry refused"
        )
    if verdict.action == "limit":
        return {"decision": "rate_limited", "reason": "rate_limit_exceeded"}
    run.steps[step.step_id] = step
    run.log_step(step, "step.proposed")
    if verdict.action == "deny":
        error = {"reason": verdict.reason or "policy_denied", "rule_id": verdict.rule_id}
        step.end("denied", error=Raw(json.dumps(error)))
        run.log_step(step, "step.denied", error=error, rule_id=verdict.rule_id)
        told = {"reason": verdict.reason} if verdict.reason else {}
        return {"decision": "denied", "step_id": step.step_id, **told}
    if verdict.action == "require_approval":
        approval = Approval(new_id(), step.step_id, verdict.approvers, verdict.message)
        run.approvals[approval.id] = approval
        step.status, step.approval_id = "awaiting_approval", approval.id
        run.log_step(step, "step.awaiting_approval", rule_id=verdict.rule_id)
        run.log_approval(approval, "approval.requested")
        run.status = "blocked"
        run.log_self("execution.blocked")
        return {"decision": "blocked", "step_id": step.step_id, "approval_id": approval.id}
    step.status = "allowed"
    run.log_step(step, "step.allowed", rule_id=verdict.rule_id)
    _start(run, step)
    return {"decision": "proceed", "step_id": step.step_id}


def _start(run: Execution, step: Step) -> None:
    step.status = "executing"
    step.started_at = now()
    run.log_step(step, "step.executing")


def report(
    run: Execution, step: Step, *, result: Raw | None = None, error: Raw | None = None
) -> dict[str, Any]:
    """Record the outcome of a step, once."""
    if run.status in TERMINAL:
        return {"decision": "execution_terminal"}
    if step.status in TERMINAL_STEP:
        # As recorded: only a second result is told the first; an error is never told.
        told = {"result": step.result} if result is not None and step.result else {}
        return {"decision": "replay", **told}
    if result is not None:
        step.end("succeeded", result=result)
        run.log_step(step, "step.succeeded")
    else:
        step.end("failed", error=error)
        run.log_step(step, "step.failed", error=error)
    return {"decision": "recorded"}


def decide(run: Execution, approval: Approval, grant: bool, by: str, rationale: str) -> None:
    """Settle a pending approval as a person said, and dispatch again."""
    approval.decided_by = by
    if grant:
        _settle(run, approval, "granted", rationale)
        step = run.steps[approval.step_id]
        step.status = "allowed"
        run.log_step(step, "step.allowed")
    else:
        _settle(run, approval, "denied", rationale)
        _deny(run, run.steps[approval.step_id], rationale or "approval_denied")
    _resume(run)


def expire(run: Execution, approval: Approval) -> None:
    """Let the time of a pending approval run out, and dispatch again."""
    _settle(run, approval, "expired", "timeout")
    _deny(run, run.steps[approval.step_id], "approval_timeout")
    _resume(run)


def cancel(run: Execution) -> None:
    """End an execution from outside, with all that it waits for."""
    end(run, "cancelled", reason="client_cancelled")
    reason = "execution_cancelled"
    for approval in run.approvals.values():
        if approval.status == "pending":
            _settle(run, approval, "expired", reason)
            _deny(run, run.steps[approval.step_id], reason)
    for step in run.steps.values():
        if step.status not in TERMINAL_STEP:
            step.end("cancelled", error=Raw(json.dumps({"reason": reason})))
            run.log_step(step, "step.cancelled", error={"reason": reason})


def _settle(run: Execution, approval: Approval, status: str, rationale: str) -> None:
    approval.status, approval.rationale, approval.decided_at = status, rationale, now()
    run.log_approval(approval, f"approval.{status}")


def _deny(run: Execution, step: Step, reason: str) -> None:
    error = {"reason": reason}
    step.end("denied", error=Raw(json.dumps(error)))
    run.log_step(step, "step.denied", error=error)


def _resume(run: Execution) -> None:
    run.status = "running"
    run.log_self("execution.resumed")
    queue(run)
