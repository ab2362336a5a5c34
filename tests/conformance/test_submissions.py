"""What the kernel does with a submission, case by case (PROTOCOL 7)."""

from __future__ import annotations

import pytest

from tests.conformance.driver import ONCE, SAFE, Attempt, Kernel, done, ok, refused

ASK = "rules: [{id: ask, when: {target: ask}, then: {decision: require_approval}}]"


def payloads(attempt: Attempt, step: str) -> list[tuple[str, dict[str, object]]]:
    """The events of one step, in order."""
    return [
        (event["type"], event["payload"])
        for event in attempt.kernel.events(attempt.execution_id)
        if event["payload"].get("step_id") == step and event["type"].startswith("step.")
    ]


@pytest.mark.parametrize("end", ["complete", "fail", "cancel"])
def test_1_execution_terminal(attempt: Attempt, end: str) -> None:
    """7.1: a terminal execution answers execution_terminal, before the lease is asked about."""
    if end == "cancel":
        done(attempt.kernel.send("POST", f"/v0/executions/{attempt.execution_id}/cancel"))
    else:
        done(getattr(attempt, end)("x"))
    assert attempt.decision("t") == {"decision": "execution_terminal"}


def test_1_lease_not_good(leased: Attempt) -> None:
    """7.1: the lease is not good: 409, and nothing is recorded."""
    following = leased.lapse()
    refused(leased.submit("t"), 409, "lease_superseded")
    assert following.steps() == []


@pytest.mark.parametrize("idempotency", [SAFE, ONCE])
def test_2_succeeded(leased: Attempt, idempotency: str) -> None:
    """7.2: succeeded is replayed; no event is added."""
    step = leased.ran("t", {"a": 1}, {"v": 1}, idempotency=idempotency)
    before = payloads(leased, step)
    following = leased.lapse()
    decision = following.decision("t", {"a": 1}, idempotency=idempotency)
    assert (decision["decision"], decision["result"]) == ("replay", {"v": 1})
    assert payloads(leased, step) == before


@pytest.mark.parametrize("idempotency", [SAFE, ONCE])
def test_2_failed(leased: Attempt, idempotency: str) -> None:
    """7.2: failed is replayed."""
    step = leased.proceed("t", idempotency=idempotency)
    leased.fail_step(step, {"message": "boom"})
    decision = leased.lapse().decision("t", idempotency=idempotency)
    assert (decision["decision"], decision["error"]) == ("replay", {"message": "boom"})
    assert decision["step_id"] == step


def test_2_denied(leased: Attempt) -> None:
    """7.2: denied is answered with the stored reason, whatever the policy says by now."""
    leased.agent.policy("rules: [{id: no, then: {decision: deny, reason: never on fridays}}]")
    step = leased.decision("t")["step_id"]
    leased.agent.policy("default_action: allow")
    decision = leased.lapse().decision("t")
    assert decision["decision"] == "denied"
    assert decision["step_id"] == step
    assert decision["reason"] == "never on fridays"
    assert decision["rule_id"] == "no"


def test_2_approved_and_never_run(attempt: Attempt) -> None:
    """7.2: allowed becomes executing, and proceeds; the policy is not asked again."""
    attempt.agent.policy(ASK)
    blocked = attempt.blocked("ask")
    attempt.agent.policy("default_action: deny")
    done(attempt.kernel.decide(blocked["approval_id"], "grant", decided_by="ann"))
    assert attempt.step(blocked["step_id"])["status"] == "allowed"
    following = attempt.next()
    assert following.proceed("ask") == blocked["step_id"]
    assert following.step(blocked["step_id"])["status"] == "executing"
    assert payloads(following, blocked["step_id"])[-1][0] == "step.executing"


def test_2_orphan_safe_to_retry(leased: Attempt) -> None:
    """7.2: an executing step of a dead attempt proceeds again when it is safe to retry."""
    step = leased.proceed("t", {"a": 1})
    following = leased.lapse()
    assert following.proceed("t", {"a": 1}) == step
    assert ok(following.complete_step(step, 1)) == {"decision": "recorded"}


def test_2_orphan_at_most_once(leased: Attempt) -> None:
    """7.2: an at_most_once orphan fails as indeterminate, and that is replayed."""
    step = leased.proceed("t", {"a": 1}, idempotency=ONCE)
    following = leased.lapse()
    decision = following.decision("t", {"a": 1}, idempotency=ONCE)
    assert decision["decision"] == "replay"
    assert decision["step_id"] == step
    assert decision["error"]["reason"] == "indeterminate"
    assert decision["error"]["message"]
    row = following.step(step)
    assert (row["status"], row["error"]) == ("failed", decision["error"])
    type, payload = payloads(following, step)[-1]
    assert type == "step.failed"
    assert payload["error"] == decision["error"]


def test_2_late_completion_of_an_indeterminate_step(leased: Attempt) -> None:
    """7.2 and 4: the step is terminal; the new attempt's report is answered replay."""
    step = leased.proceed("t", idempotency=ONCE)
    following = leased.lapse()
    following.decision("t", idempotency=ONCE)
    assert ok(following.complete_step(step, {"late": 1}))["decision"] == "replay"
    assert following.step(step)["status"] == "failed"


def test_2_the_stored_idempotency_decides(leased: Attempt) -> None:
    """7.2: it is the recorded step that is at most once."""
    step = leased.proceed("t", idempotency=ONCE)
    decision = leased.lapse().decision("t", idempotency=SAFE)
    assert decision["step_id"] == step
    assert decision["error"]["reason"] == "indeterminate"


def test_2_cancelled(attempt: Attempt) -> None:
    """7.2: a cancelled step answers execution_terminal."""
    step = attempt.proceed("t")
    done(attempt.kernel.send("POST", f"/v0/executions/{attempt.execution_id}/cancel"))
    assert attempt.step(step)["status"] == "cancelled"
    assert attempt.decision("t") == {"decision": "execution_terminal"}


def test_3_new_step_while_blocked(attempt: Attempt) -> None:
    """7.3: a new step of a blocked execution answers execution_blocked, recording nothing."""
    attempt.agent.policy(ASK + "\ndefault_action: allow")
    attempt.blocked("ask")
    before = attempt.kernel.types(attempt.execution_id)
    for target in ("t", "ask", "other"):
        assert attempt.decision(target) == {"decision": "execution_blocked"}
    assert attempt.kernel.types(attempt.execution_id) == before


def indeterminate(attempt: Attempt, target: str = "t", args: object = None) -> Attempt:
    """End a step as indeterminate; returns the attempt that was told."""
    attempt.proceed(target, args, idempotency=ONCE)
    following = attempt.lapse()
    decision = following.decision(target, args, idempotency=ONCE)
    assert decision["error"]["reason"] == "indeterminate"
    return following


def test_4_retry_of_an_indeterminate_step(leased: Attempt) -> None:
    """7.4: denied under the rule __indeterminate_retry."""
    following = indeterminate(leased)
    decision = following.decision("t", idempotency=ONCE)
    assert decision["decision"] == "denied"
    assert decision["rule_id"] == "__indeterminate_retry"
    assert decision["reason"]
    events = payloads(following, decision["step_id"])
    assert [type for type, _ in events] == ["step.proposed", "step.denied"]
    assert events[1][1]["rule_id"] == "__indeterminate_retry"


def test_4_denial_comes_before_the_policy(leased: Attempt) -> None:
    """7.4: the policy, case 5, is not reached."""
    following = indeterminate(leased)
    following.agent.policy("rules: [{id: ask, then: {decision: require_approval}}]")
    decision = following.decision("t", idempotency=ONCE)
    assert (decision["decision"], decision["rule_id"]) == ("denied", "__indeterminate_retry")


def test_4_only_the_same_call_is_denied(leased: Attempt) -> None:
    """7.4: whose kind, target and args_hash ended indeterminate."""
    following = indeterminate(leased, "t", {"a": 1})
    following.proceed("t", {"a": 2}, idempotency=ONCE)
    following.proceed("u", {"a": 1}, idempotency=ONCE)
    following.proceed("t", {"a": 1}, kind="local", idempotency=ONCE)


def test_4_only_at_most_once_is_denied(leased: Attempt) -> None:
    """7.4: a new at_most_once step."""
    indeterminate(leased).proceed("t", idempotency=SAFE)


def test_4_only_in_this_execution(leased: Attempt) -> None:
    """7.4: in this execution."""
    indeterminate(leased)
    leased.agent.start().proceed("t", idempotency=ONCE)


def test_4_an_ordinary_failure_is_no_indeterminate_one(attempt: Attempt) -> None:
    """7.4: only what ended indeterminate, whatever an agent calls its own error."""
    attempt.fail_step(attempt.proceed("t", idempotency=ONCE), {"message": "card declined"})
    attempt.proceed("t", idempotency=ONCE)


def test_5_allow(attempt: Attempt) -> None:
    """7.5: step.proposed, step.allowed with rule_id, step.executing, then proceed."""
    step = attempt.proceed("t", {"secret": 1}, kind="llm_call")
    common = {"step_id": step, "step_type": "llm_call", "target": "t"}
    assert payloads(attempt, step) == [
        ("step.proposed", common),
        ("step.allowed", {**common, "rule_id": "permissive"}),
        ("step.executing", common),
    ]


def test_5_deny(attempt: Attempt) -> None:
    """7.5: step.proposed, step.denied."""
    attempt.agent.policy("rules: [{id: no, then: {decision: deny, reason: never}}]")
    decision = attempt.decision("t")
    common = {"step_id": decision["step_id"], "step_type": "tool_call", "target": "t"}
    proposed, denied = payloads(attempt, decision["step_id"])
    assert proposed == ("step.proposed", common)
    assert denied[0] == "step.denied"
    assert common.items() <= denied[1].items()
    assert denied[1]["rule_id"] == "no"
    assert denied[1]["error"] == {"reason": "never", "rule_id": "no"}
    row = attempt.step(decision["step_id"])
    assert row["status"] == "denied"
    assert row["error"]["reason"] == "never"
    assert attempt.kernel.execution(attempt.execution_id)["status"] == "running"


def test_5_deny_without_a_reason(attempt: Attempt) -> None:
    """7.5: reason defaults to policy_denied."""
    attempt.agent.policy("rules: [{id: no, then: {decision: deny}}]")
    assert attempt.decision("t")["reason"] == "policy_denied"
    assert attempt.kernel.event(attempt.execution_id, "step.denied")["error"]["reason"] == (
        "policy_denied"
    )


def test_5_require_approval(attempt: Attempt) -> None:
    """7.5: its four events, in order; the execution becomes blocked."""
    attempt.agent.policy(ASK)
    before = len(attempt.kernel.events(attempt.execution_id))
    blocked = attempt.blocked("ask")
    events = attempt.kernel.events(attempt.execution_id)[before:]
    step = {"step_id": blocked["step_id"], "step_type": "tool_call", "target": "ask"}
    assert [(event["type"], event["payload"]) for event in events] == [
        ("step.proposed", step),
        ("step.awaiting_approval", {**step, "rule_id": "ask"}),
        (
            "approval.requested",
            {
                "approval_id": blocked["approval_id"],
                "step_id": blocked["step_id"],
                "execution_id": attempt.execution_id,
                "status": "pending",
            },
        ),
        ("execution.blocked", {"execution_id": attempt.execution_id, "status": "blocked"}),
    ]
    assert attempt.kernel.execution(attempt.execution_id)["status"] == "blocked"


def test_5_a_blocked_execution_has_no_dispatch(kernel: Kernel) -> None:
    """7.5: its dispatches are retired: no lease, no delivery when it would have run out."""
    agent = kernel.agent(lease_timeout=kernel.span(60, 4), policy=ASK)
    attempt = agent.start()
    attempt.blocked("ask")
    refused(attempt.heartbeat(), 409, "lease_superseded")
    kernel.needs_clock()
    kernel.pass_time(61)
    agent.no_delivery(attempt.execution_id)
