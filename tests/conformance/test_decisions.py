"""What comes with each decision (PROTOCOL 5)."""

from __future__ import annotations

import pytest

from tests.conformance.driver import Attempt, Kernel, done

POLICY = """
default_action: allow
rules:
  - {id: no, when: {target: no}, then: {decision: deny, reason: never on fridays}}
  - {id: few, when: {target: few}, then: {decision: allow, rate_limit: {max_calls: 1, window: 1h}}}
  - {id: ask, when: {target: ask}, then: {decision: require_approval}}
"""


@pytest.fixture
def governed(kernel: Kernel) -> Attempt:
    return kernel.agent(policy=POLICY, lease_timeout=kernel.span(60, 4)).start()


def test_proceed(governed: Attempt) -> None:
    """5: proceed comes with step_id."""
    decision = governed.decision("t")
    assert decision["decision"] == "proceed"
    assert decision["step_id"]


def test_replay_of_a_result(governed: Attempt) -> None:
    """5: replay comes with step_id and result."""
    step = governed.ran("t", None, {"v": [1]})
    assert governed.lapse().decision("t") == {
        "decision": "replay",
        "step_id": step,
        "result": {"v": [1]},
    }


def test_replay_of_null(governed: Attempt) -> None:
    """5: a recorded null is a result."""
    governed.ran("t", None, None)
    decision = governed.lapse().decision("t")
    assert decision["decision"] == "replay"
    assert decision.get("result") is None
    assert decision.get("error") is None


def test_replay_of_an_error(governed: Attempt) -> None:
    """5: replay comes with step_id and error."""
    step = governed.proceed("t")
    error = {"message": "boom", "type": "ValueError"}
    governed.fail_step(step, error)
    decision = governed.lapse().decision("t")
    assert decision["decision"] == "replay"
    assert decision["step_id"] == step
    assert decision["error"] == error
    assert decision.get("result") is None


def test_denied(governed: Attempt) -> None:
    """5: denied comes with step_id, reason and, in generation 3, rule_id."""
    decision = governed.decision("no")
    assert decision["decision"] == "denied"
    assert decision["reason"] == "never on fridays"
    assert decision["rule_id"] == "no"
    assert governed.step(decision["step_id"])["status"] == "denied"


def test_rate_limited(governed: Attempt) -> None:
    """5: rate_limited comes with a reason."""
    governed.proceed("few")
    decision = governed.decision("few")
    assert decision["decision"] == "rate_limited"
    assert decision["reason"] == "rate_limit_exceeded"


def test_blocked(governed: Attempt) -> None:
    """5: blocked comes with step_id and approval_id when a person must decide."""
    decision = governed.decision("ask")
    assert decision["decision"] == "blocked"
    assert governed.step(decision["step_id"])["status"] == "awaiting_approval"
    assert governed.kernel.approval(decision["approval_id"])["status"] == "pending"


def test_execution_blocked(governed: Attempt) -> None:
    """5: an earlier step waits, no new effect may start."""
    governed.blocked("ask")
    assert governed.decision("t") == {"decision": "execution_blocked"}
    assert [row["target"] for row in governed.steps()] == ["ask"]


def test_execution_terminal(governed: Attempt) -> None:
    """5: execution_terminal."""
    done(governed.complete())
    assert governed.decision("t") == {"decision": "execution_terminal"}
    assert governed.steps() == []
