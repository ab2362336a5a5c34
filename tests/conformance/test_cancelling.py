"""Cancelling an execution (PROTOCOL 7)."""

from __future__ import annotations

import uuid

import pytest

from tests.conformance.driver import Attempt, Kernel, done, ok, refused

ASK = (
    "default_action: allow\n"
    "rules: [{id: ask, when: {target: ask}, then: {decision: require_approval}}]"
)


def cancel(attempt: Attempt) -> None:
    done(attempt.kernel.send("POST", f"/v0/executions/{attempt.execution_id}/cancel"))


def test_cancel(attempt: Attempt) -> None:
    """7 and 9: 204; the execution is cancelled, with an event."""
    cancel(attempt)
    execution = attempt.kernel.execution(attempt.execution_id)
    assert execution["status"] == "cancelled"
    payload = attempt.kernel.event(attempt.execution_id, "execution.cancelled")
    assert payload["status"] == "cancelled"


def test_steps_in_executing_become_cancelled(attempt: Attempt) -> None:
    """7: steps in executing become cancelled; recorded ones stay."""
    recorded, running = attempt.ran("a", None, 1), attempt.proceed("b")
    cancel(attempt)
    assert attempt.step(running)["status"] == "cancelled"
    assert attempt.step(recorded)["status"] == "succeeded"
    assert attempt.kernel.event(attempt.execution_id, "step.cancelled")["step_id"] == running


def test_pending_approvals_are_expired(kernel: Kernel) -> None:
    """7: pending approvals are expired, their steps denied, in this order of events."""
    attempt = kernel.agent(policy=ASK).start()
    running = attempt.proceed("t")
    blocked = attempt.blocked("ask")
    before = len(kernel.events(attempt.execution_id))
    cancel(attempt)
    events = kernel.events(attempt.execution_id)[before:]
    assert [event["type"] for event in events] == [
        "execution.cancelled",
        "approval.expired",
        "step.denied",
        "step.cancelled",
    ]
    assert events[1]["payload"]["approval_id"] == blocked["approval_id"]
    assert events[1]["payload"]["status"] == "expired"
    assert events[2]["payload"]["step_id"] == blocked["step_id"]
    assert events[3]["payload"]["step_id"] == running
    assert attempt.step(blocked["step_id"])["status"] == "denied"
    approval = kernel.approval(blocked["approval_id"])
    assert approval["status"] == "expired"
    response = kernel.decide(blocked["approval_id"], "grant", decided_by="ann")
    refused(response, 409, "conflict")
    assert kernel.execution(attempt.execution_id)["status"] == "cancelled"


def test_dispatches_are_retired(leased: Attempt) -> None:
    """7: dispatches are retired: the lease is gone and nothing is delivered any more."""
    cancel(leased)
    refused(leased.heartbeat(), 409, "lease_superseded", "execution_terminal")
    refused(leased.complete(1), 409, "lease_superseded", "execution_terminal")
    refused(leased.fail("x"), 409, "lease_superseded", "execution_terminal")
    leased.kernel.needs_clock()
    leased.kernel.pass_time(61)
    leased.agent.no_delivery(leased.execution_id)
    assert leased.kernel.execution(leased.execution_id)["status"] == "cancelled"


def test_a_dispatch_that_waits_for_a_retry_is_retired(kernel: Kernel) -> None:
    """7: dispatches are retired, also those in the queue."""
    agent = kernel.agent()
    agent.inbox.answer_next(500)
    attempt = agent.start()
    cancel(attempt)
    kernel.needs_clock()
    kernel.pass_time(60)
    agent.no_delivery(attempt.execution_id)
    assert kernel.types(attempt.execution_id)[-1] == "execution.cancelled"


def test_report_on_a_cancelled_step(attempt: Attempt) -> None:
    """4: execution_terminal."""
    step = attempt.proceed("t")
    cancel(attempt)
    assert ok(attempt.complete_step(step, 1))["decision"] == "execution_terminal"
    assert ok(attempt.fail_step(step, {}))["decision"] == "execution_terminal"
    assert attempt.step(step)["status"] == "cancelled"


@pytest.mark.parametrize("end", ["cancel", "complete", "fail"])
def test_cancel_of_a_terminal_execution(attempt: Attempt, end: str) -> None:
    """7: a terminal execution cancelled again answers 409."""
    cancel(attempt) if end == "cancel" else done(getattr(attempt, end)("x"))
    before = attempt.kernel.execution(attempt.execution_id)
    response = attempt.kernel.send("POST", f"/v0/executions/{attempt.execution_id}/cancel")
    refused(response, 409, "execution_terminal", "conflict")
    assert attempt.kernel.execution(attempt.execution_id) == before


def test_cancel_of_an_unknown_execution(shared_kernel: Kernel) -> None:
    """4: 404 not_found; 400 for what is no id."""
    response = shared_kernel.send("POST", f"/v0/executions/{uuid.uuid4()}/cancel")
    refused(response, 404, "not_found")
    response = shared_kernel.send("POST", "/v0/executions/no-id/cancel")
    refused(response, 400, "validation_error")
