"""Granting, denying and expiring approvals (PROTOCOL 7 and 9)."""

from __future__ import annotations

from datetime import datetime
from typing import Any

import pytest

from tests.conformance.driver import Attempt, Kernel, done, ok, refused


def policy(**config: Any) -> str:
    fields = ", ".join(f"{name}: {value}" for name, value in config.items())
    return (
        "default_action: allow\n"
        "rules: [{id: ask, when: {target: 'ask*'}, then: "
        f"{{decision: require_approval, approval_config: {{{fields}}}}}}}]"
    )


class Waiting:
    """An execution that waits for an approval."""

    def __init__(self, attempt: Attempt) -> None:
        self.attempt = attempt
        self.kernel = attempt.kernel
        decision = attempt.blocked("ask", {"a": 1})
        self.step, self.approval = decision["step_id"], decision["approval_id"]
        self.before = len(self.kernel.events(attempt.execution_id))

    def decide(self, verdict: str, **body: Any) -> Any:
        return self.kernel.decide(self.approval, verdict, **body)

    def events(self) -> list[tuple[str, Any]]:
        """What happened up to the new dispatch."""
        events = self.kernel.events(self.attempt.execution_id)[self.before :]
        types = [event["type"] for event in events]
        events = events[: types.index("dispatch.queued") + 1]
        return [(event["type"], event["payload"]) for event in events]


@pytest.fixture
def waiting(kernel: Kernel) -> Waiting:
    return Waiting(kernel.agent(policy=policy(message="look twice")).start())


@pytest.fixture
def timed(kernel: Kernel) -> Waiting:
    """An approval that times out."""
    timeout = f"{kernel.span(300, 2):g}s"
    return Waiting(kernel.agent(policy=policy(timeout=timeout)).start())


def expire(timed: Waiting) -> Attempt:
    timed.kernel.pass_time(301)
    return timed.attempt.next()


def check_resumed(waiting: Waiting, first: list[tuple[str, Any]]) -> None:
    """Hold that ``first`` happened, and then a resumption with a new dispatch."""
    events = waiting.events()
    execution_id = waiting.attempt.execution_id
    assert events[:-2] == first
    assert events[-2] == (
        "execution.resumed",
        {"execution_id": execution_id, "status": "running"},
    )
    type, payload = events[-1]
    assert type == "dispatch.queued"
    assert payload["dispatch_id"] != waiting.attempt.dispatch_id
    assert payload["attempt"] == 0


def approval_event(waiting: Waiting, status: str, **more: Any) -> tuple[str, Any]:
    payload = {
        "approval_id": waiting.approval,
        "step_id": waiting.step,
        "execution_id": waiting.attempt.execution_id,
        "status": status,
        **more,
    }
    return (f"approval.{status}", payload)


def test_approval_object(waiting: Waiting) -> None:
    """9: id, step_id, execution_id, status, approvers, message, timeout_at, …, created_at."""
    approval = waiting.kernel.approval(waiting.approval)
    assert approval["id"] == waiting.approval
    assert approval["step_id"] == waiting.step
    assert approval["execution_id"] == waiting.attempt.execution_id
    assert approval["status"] == "pending"
    assert approval["message"] == "look twice"
    assert not approval.get("approvers")
    assert not approval.get("decided_by")
    assert not approval.get("decided_at")
    assert approval["created_at"]


def test_grant(waiting: Waiting) -> None:
    """7: approval.granted, step.allowed, execution.resumed, a new dispatch."""
    done(waiting.decide("grant", decided_by="ann", rationale="fine"))
    following = waiting.attempt.next()
    assert following.dispatch_id != waiting.attempt.dispatch_id
    assert following.attempt == 1
    step = {"step_id": waiting.step, "step_type": "tool_call", "target": "ask"}
    granted = approval_event(waiting, "granted", decided_by="ann", rationale="fine")
    check_resumed(waiting, [granted, ("step.allowed", step)])
    assert following.proceed("ask", {"a": 1}) == waiting.step
    approval = waiting.kernel.approval(waiting.approval)
    assert approval["status"] == "granted"
    assert approval["decided_by"] == "ann"
    assert approval["rationale"] == "fine"
    assert approval["decided_at"]


@pytest.mark.parametrize("rationale", ["not today", None, ""])
def test_deny(waiting: Waiting, rationale: str | None) -> None:
    """7: approval.denied, step.denied with the rationale, else approval_denied."""
    body = {} if rationale is None else {"rationale": rationale}
    done(waiting.decide("deny", decided_by="ann", **body))
    following = waiting.attempt.next()
    reason = rationale or "approval_denied"
    more = {"rationale": rationale} if rationale else {}
    step = {"step_id": waiting.step, "step_type": "tool_call", "target": "ask"}
    events = waiting.events()
    denied = approval_event(waiting, "denied", decided_by="ann", **more)
    assert events[0][0] == denied[0]
    assert {k: v for k, v in events[0][1].items() if v} == denied[1]
    assert events[1][0] == "step.denied"
    assert step.items() <= events[1][1].items()
    assert events[1][1]["error"]["reason"] == reason
    check_resumed(waiting, events[:2])
    decision = following.decision("ask", {"a": 1})
    assert decision["decision"] == "denied"
    assert decision["step_id"] == waiting.step
    assert decision["reason"] == reason
    assert waiting.kernel.approval(waiting.approval)["status"] == "denied"


def test_expire(timed: Waiting) -> None:
    """7: the same with approval.expired and the reason approval_timeout."""
    following = expire(timed)
    events = timed.events()
    assert [type for type, _ in events] == [
        "approval.expired",
        "step.denied",
        "execution.resumed",
        "dispatch.queued",
    ]
    assert events[0][1]["status"] == "expired"
    assert events[1][1]["error"]["reason"] == "approval_timeout"
    check_resumed(timed, events[:2])
    decision = following.decision("ask", {"a": 1})
    assert (decision["decision"], decision["reason"]) == ("denied", "approval_timeout")
    approval = timed.kernel.approval(timed.approval)
    assert approval["status"] == "expired"
    assert not approval.get("decided_by")


def test_timeout_at(timed: Waiting) -> None:
    """9: timeout_at is created_at plus the rule's timeout."""
    approval = timed.kernel.approval(timed.approval)
    created, due = (_time(approval[name]) for name in ("created_at", "timeout_at"))
    expected = timed.kernel.span(300, 2)
    assert abs((due - created).total_seconds() - expected) < 0.01


def _time(text: str) -> datetime:
    whole, _, fraction = text.rstrip("Z").partition(".")
    return datetime.fromisoformat(f"{whole}.{(fraction + '000000')[:6]}")


def test_no_timeout(waiting: Waiting) -> None:
    """9: an approval without a timeout waits as long as it must."""
    waiting.kernel.needs_clock()
    waiting.kernel.pass_time(30 * 24 * 3600)
    assert waiting.kernel.approval(waiting.approval)["status"] == "pending"
    assert waiting.kernel.approval(waiting.approval).get("timeout_at") is None
    done(waiting.decide("grant", decided_by="ann"))
    waiting.attempt.next().proceed("ask", {"a": 1})


@pytest.mark.parametrize("again", ["grant", "deny"])
@pytest.mark.parametrize("verdict", ["grant", "deny"])
def test_decided_again(waiting: Waiting, verdict: str, again: str) -> None:
    """7: a decided approval decided again answers 409 conflict."""
    done(waiting.decide(verdict, decided_by="ann"))
    refused(waiting.decide(again, decided_by="ann"), 409, "conflict")
    approval = waiting.kernel.approval(waiting.approval)
    assert approval["status"] == {"grant": "granted", "deny": "denied"}[verdict]


def test_decided_after_it_expired(timed: Waiting) -> None:
    """7: 409 conflict."""
    expire(timed)
    refused(timed.decide("grant", decided_by="ann"), 409, "conflict")


@pytest.mark.parametrize("verdict", ["grant", "deny"])
def test_approvers(kernel: Kernel, verdict: str) -> None:
    """7: decided_by must be one of approvers when these are set, else 403 forbidden."""
    agent = kernel.agent(policy=policy(approvers="[ann, eve]"))
    waiting = Waiting(agent.start())
    assert kernel.approval(waiting.approval)["approvers"] == ["ann", "eve"]
    for body in ({"decided_by": "bob"}, {"decided_by": "Ann"}, {"decided_by": ""}):
        response = waiting.decide(verdict, **body)
        assert response.status_code in ((403,) if body["decided_by"] else (400, 403))
    assert kernel.approval(waiting.approval)["status"] == "pending"
    done(waiting.decide(verdict, decided_by="eve"))
    waiting.attempt.next()


def test_not_an_approver_is_forbidden(kernel: Kernel) -> None:
    """7: 403 with the code forbidden."""
    waiting = Waiting(kernel.agent(policy=policy(approvers="[ann]")).start())
    refused(waiting.decide("grant", decided_by="bob"), 403, "forbidden")


def test_list_pending_approvals(waiting: Waiting) -> None:
    """9: GET /v0/approvals lists the pending ones."""
    kernel = waiting.kernel
    assert waiting.approval in [a["id"] for a in ok(kernel.send("GET", "/v0/approvals"))]
    done(waiting.decide("grant", decided_by="ann"))
    rows = ok(kernel.send("GET", "/v0/approvals")) or []
    assert waiting.approval not in [a["id"] for a in rows]


@pytest.mark.parametrize("path", ["", "/grant", "/deny"])
def test_unknown_approval(shared_kernel: Kernel, path: str) -> None:
    """9: 404 not_found; 400 for what is no id."""
    method, body = ("POST", {"decided_by": "ann"}) if path else ("GET", None)
    unknown = "0192f3a4-1111-7222-8333-444455556666"
    response = shared_kernel.send(method, f"/v0/approvals/{unknown}{path}", body)
    refused(response, 404, "not_found")
    response = shared_kernel.send(method, f"/v0/approvals/no-id{path}", body)
    refused(response, 400, "validation_error")


@pytest.mark.parametrize("data", [b"{", b"[]", b'{"decided_by":1}', b'{"surprise":1}'])
@pytest.mark.parametrize("verdict", ["grant", "deny"])
def test_malformed_decision(waiting: Waiting, verdict: str, data: bytes) -> None:
    """4: 400 validation_error."""
    path = f"/v0/approvals/{waiting.approval}/{verdict}"
    refused(waiting.kernel.send("POST", path, data=data), 400, "validation_error")
    assert waiting.kernel.approval(waiting.approval)["status"] == "pending"


def test_outcome_recorded_while_blocked(kernel: Kernel) -> None:
    """4 and 7: an effect already running when the execution blocked is replayed later."""
    attempt = kernel.agent(policy=policy()).start()
    running = attempt.proceed("t-par")
    waiting = Waiting(attempt)
    assert ok(attempt.complete_step(running, {"late": 1})) == {"decision": "recorded"}
    types = kernel.types(attempt.execution_id)
    assert types[-2:] == ["execution.blocked", "step.succeeded"]
    done(waiting.decide("grant", decided_by="ann"))
    following = attempt.next()
    assert following.decision("t-par")["result"] == {"late": 1}


def test_step_left_running_when_the_execution_blocked(kernel: Kernel) -> None:
    """7.2: it is an orphan of the retired dispatch; the new one takes it up."""
    attempt = kernel.agent(policy=policy()).start()
    running = attempt.proceed("t-par")
    waiting = Waiting(attempt)
    done(waiting.decide("grant", decided_by="ann"))
    following = attempt.next()
    assert following.proceed("t-par") == running
    refused(attempt.heartbeat(), 409, "lease_superseded")
    assert ok(following.complete_step(running, 2)) == {"decision": "recorded"}


def test_outcome_of_the_retired_dispatch_after_the_resumption(kernel: Kernel) -> None:
    """4: its dispatch and attempt still match, so the outcome is recorded, and replayed."""
    attempt = kernel.agent(policy=policy()).start()
    running = attempt.proceed("t-par")
    done(Waiting(attempt).decide("grant", decided_by="ann"))
    following = attempt.next()
    assert ok(attempt.complete_step(running, {"late": 1})) == {"decision": "recorded"}
    assert following.decision("t-par")["result"] == {"late": 1}


def test_the_retired_dispatch_after_the_resumption(waiting: Waiting) -> None:
    """7: the new dispatch has the lease: 409 for whatever else the earlier one sends."""
    earlier = waiting.attempt
    done(waiting.decide("grant", decided_by="ann"))
    following = earlier.next()
    refused(earlier.submit("t"), 409, "lease_superseded")
    refused(earlier.heartbeat(), 409, "lease_superseded")
    refused(earlier.complete(1), 409, "lease_superseded")
    done(following.heartbeat())
    assert [row["target"] for row in following.steps()] == ["ask"]


def test_one_approval_after_another(waiting: Waiting) -> None:
    """7: each approval has a dispatch of its own; what was recorded is replayed."""
    done(waiting.decide("grant", decided_by="ann"))
    second = waiting.attempt.next()
    second.ran("ask", {"a": 1}, "first")
    blocked = second.blocked("ask2")
    assert blocked["approval_id"] != waiting.approval
    done(waiting.kernel.decide(blocked["approval_id"], "deny", decided_by="ann"))
    third = second.next()
    assert third.decision("ask", {"a": 1})["result"] == "first"
    assert third.decision("ask2")["decision"] == "denied"
    done(third.complete("done"))
    assert waiting.kernel.execution(third.execution_id)["status"] == "completed"


def test_the_deadline_of_a_blocked_execution_is_not_its_lease(waiting: Waiting) -> None:
    """7: waiting for a person costs no attempts."""
    waiting.kernel.needs_clock()
    for _ in range(6):
        waiting.kernel.pass_time(500)
    done(waiting.decide("grant", decided_by="ann"))
    assert waiting.attempt.next().attempt == 1
