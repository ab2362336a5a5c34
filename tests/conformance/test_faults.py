"""What a kernel does when something of its own, or an agent, fails it (PROTOCOL 7, 8).

Most of these reach into the embedded kernel, and are skipped for another one.
"""

from __future__ import annotations

import json
import threading
import time
from typing import Any

import pytest

from tests.conformance.driver import Agent, Attempt, Delivery, Kernel, wait_until


def database(kernel: Kernel, *statements: str) -> None:
    """Change rows of the embedded kernel behind its back."""
    with kernel.embedded._running().store.write() as tx:
        for statement in statements:
            tx.run(statement)


def needs_faults(kernel: Kernel) -> None:
    if not kernel.embedded:
        pytest.skip("needs a kernel whose database can be reached")


def test_a_webhook_has_30_seconds(
    kernel: Kernel, agent: Agent, monkeypatch: pytest.MonkeyPatch
) -> None:
    """7: POSTed with a 30 s time-out; no answer within it is dispatch.failed, and retried."""
    seconds = 30.0
    if kernel.embedded:
        from rebuno_sync.kernel import dispatch

        assert seconds == dispatch.WEBHOOK_TIMEOUT
        seconds = 0.3  # as for all time that is not the kernel's own clock, nobody moves it
        monkeypatch.setattr(dispatch, "WEBHOOK_TIMEOUT", seconds)
    answered = threading.Event()

    def hold(delivery: Delivery) -> None:
        if delivery.json["dispatch_attempt"] == 1:
            answered.wait(120)

    agent.inbox.during = hold
    try:
        execution_id = agent.create()
        agent.inbox.take(execution_id)
        began = time.monotonic()
        failed = wait_until(
            lambda: [e for e in kernel.events(execution_id) if e["type"] == "dispatch.failed"],
            120,
            "the delivery never failed",
        )
        assert time.monotonic() - began >= seconds * 0.9
        assert failed[0]["payload"]["attempt"] == 1
        kernel.pass_time(1.25)
        following = agent.next(execution_id)
        assert following.attempt == 2
    finally:
        answered.set()


def test_a_dispatch_of_a_terminal_execution_is_discarded(attempt: Attempt) -> None:
    """7: a claimed dispatch of a terminal execution: dispatch.discarded, and no delivery."""
    kernel = attempt.kernel
    needs_faults(kernel)
    attempt.complete(1)
    # An end retires what is queued, so that one comes to be claimed only if it was missed.
    database(kernel, "UPDATE dispatches SET state = 'pending', available_at = 0")
    kernel.pass_time(1)
    payload = kernel.event(attempt.execution_id, "dispatch.discarded")
    assert payload["dispatch_id"] == attempt.dispatch_id
    assert (payload["status"], payload["attempt"]) == ("discarded", 2)
    attempt.agent.no_delivery(attempt.execution_id)
    assert kernel.execution(attempt.execution_id)["status"] == "completed"


def test_2_awaiting_approval(kernel: Kernel) -> None:
    """7.2: a step that waits for a decision answers blocked, with the same approval."""
    needs_faults(kernel)
    ask = "rules: [{id: ask, when: {target: ask}, then: {decision: require_approval}}]"
    attempt = kernel.agent(policy=ask).start()
    first = attempt.blocked("ask")
    # Within one attempt the count moves on, and another begins only with the decision.
    database(kernel, "DELETE FROM occurrences")
    assert attempt.blocked("ask") == first
    assert kernel.types(attempt.execution_id).count("approval.requested") == 1


@pytest.mark.parametrize(
    ("setting", "decision"), [({}, "rate_limited"), ({"on_limiter_error": "allow"}, "proceed")]
)
def test_a_limiter_that_fails(kernel: Kernel, setting: dict[str, Any], decision: str) -> None:
    """5 and 8: rate_limiter_unavailable, unless on_limiter_error allows the call."""
    needs_faults(kernel)
    limit = {"max_calls": 1, "window": "1h", **setting}
    rule = {"id": "limit", "then": {"decision": "allow", "rate_limit": limit}}
    attempt = kernel.agent(policy=json.dumps({"rules": [rule]})).start()
    database(kernel, "ALTER TABLE buckets RENAME TO away")
    answer = attempt.decision("t")
    database(kernel, "ALTER TABLE away RENAME TO buckets")
    assert answer["decision"] == decision
    if decision == "rate_limited":
        assert answer["reason"] == "rate_limiter_unavailable"
        assert attempt.steps() == []
