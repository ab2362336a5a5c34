"""Token buckets (PROTOCOL 8)."""

from __future__ import annotations

import json
import uuid
from typing import Any

import pytest

from tests.conformance.driver import Agent, Attempt, Kernel, done, refused


@pytest.fixture
def id() -> str:
    """A rule of no other test: global buckets are keyed by it."""
    return f"limit-{uuid.uuid4().hex[:12]}"


def policy(id: str, decision: str = "allow", **limit: Any) -> str:
    rule = {"id": id, "when": {"target": "lim*"}, "then": {"decision": decision}}
    rule["then"]["rate_limit"] = limit  # type: ignore[index]
    return json.dumps({"default_action": "allow", "rules": [rule]})


def limited(attempt: Attempt, target: str = "lim", args: Any = None) -> None:
    decision = attempt.decision(target, args)
    assert decision["decision"] == "rate_limited", decision
    assert decision["reason"] == "rate_limit_exceeded"


def test_over_the_limit(kernel: Kernel, id: str) -> None:
    """8: max_calls, then rate_limited, whatever the target and args under the rule."""
    attempt = kernel.agent(policy=policy(id, max_calls=2, window="1h")).start()
    attempt.proceed("lim")
    attempt.proceed("lim2", {"a": 1})
    limited(attempt)
    limited(attempt, "lim3", {"b": 1})
    attempt.proceed("other")


def test_nothing_is_recorded(kernel: Kernel, id: str) -> None:
    """6 and 7: a submission over the limit leaves no step and no event."""
    attempt = kernel.agent(policy=policy(id, max_calls=1, window="1h")).start()
    attempt.proceed("lim")
    before = kernel.types(attempt.execution_id)
    limited(attempt)
    assert kernel.types(attempt.execution_id) == before
    assert len(attempt.steps()) == 1
    assert kernel.execution(attempt.execution_id)["status"] == "running"


def test_replay_takes_no_token(kernel: Kernel, id: str) -> None:
    """7: a step with that id exists: it is answered before policy is asked."""
    text = policy(id, max_calls=2, window="10000h")
    agent = kernel.agent(policy=text, lease_timeout=kernel.span(60, 4))
    attempt = agent.start()
    attempt.ran("lim")
    following = attempt.lapse()
    assert following.decision("lim")["decision"] == "replay"
    following.proceed("lim")
    limited(following)


def test_refill(kernel: Kernel, id: str) -> None:
    """8: refilled over window."""
    window = kernel.span(60, 3)
    agent = kernel.agent(policy=policy(id, max_calls=2, window=f"{window:g}s"))
    attempt = agent.start()
    attempt.proceed("lim")
    attempt.proceed("lim")
    limited(attempt)
    kernel.needs_clock()
    kernel.pass_time(60)
    done(attempt.heartbeat())
    attempt.proceed("lim")
    attempt.proceed("lim")
    limited(attempt)


def test_refill_is_gradual(kernel: Kernel, id: str) -> None:
    """8: a token bucket: half the window brings half the calls."""
    kernel.needs_clock()
    attempt = kernel.agent(
        policy=policy(id, max_calls=2, window="1000s"), lease_timeout=3600
    ).start()
    attempt.proceed("lim")
    attempt.proceed("lim")
    kernel.pass_time(501)
    attempt.proceed("lim")
    limited(attempt)


def test_a_bucket_holds_no_more_than_max_calls(kernel: Kernel, id: str) -> None:
    """8: a bucket of max_calls."""
    kernel.needs_clock()
    attempt = kernel.agent(policy=policy(id, max_calls=1, window="10s"), lease_timeout=3600).start()
    attempt.proceed("lim")
    kernel.pass_time(1000)
    attempt.proceed("lim")
    limited(attempt)


def test_scope_execution(kernel: Kernel, id: str) -> None:
    """8: execution is the default scope."""
    agent = kernel.agent(policy=policy(id, max_calls=1, window="1h"))
    first, second = agent.start(), agent.start()
    first.proceed("lim")
    second.proceed("lim")
    limited(first)
    limited(second)


def test_scope_execution_by_name(kernel: Kernel, id: str) -> None:
    """8: per_what: execution."""
    agent = kernel.agent(policy=policy(id, max_calls=1, window="1h", per_what="execution"))
    first, second = agent.start(), agent.start()
    first.proceed("lim")
    second.proceed("lim")


def test_scope_agent(kernel: Kernel, id: str) -> None:
    """8: per_what: agent: shared by its executions, not by other agents."""
    text = policy(id, max_calls=1, window="1h", per_what="agent")
    agent, other = kernel.agent(policy=text), kernel.agent(policy=text)
    first, second = agent.start(), agent.start()
    first.proceed("lim")
    limited(second)
    other.start().proceed("lim")


def test_scope_global(kernel: Kernel, id: str) -> None:
    """8: per_what: global: shared by all under the rule."""
    text = policy(id, max_calls=1, window="1h", per_what="global")
    agent, other = kernel.agent(policy=text), kernel.agent(policy=text)
    agent.start().proceed("lim")
    limited(other.start())


def test_buckets_are_keyed_by_rule(kernel: Kernel, id: str) -> None:
    """8: keyed by rule and scope."""
    agent = kernel.agent(policy=policy(id, max_calls=1, window="1h", per_what="agent"))
    attempt = agent.start()
    attempt.proceed("lim")
    limited(attempt)
    agent.policy(policy(id + "-other", max_calls=1, window="1h", per_what="agent"))
    attempt.proceed("lim")


def test_the_limit_comes_before_the_decision(kernel: Kernel, id: str) -> None:
    """7.5: policy, its rate limit first."""
    text = policy(id, "require_approval", max_calls=1, window="1h")
    attempt = kernel.agent(policy=text).start()
    blocked = attempt.blocked("lim")
    done(kernel.decide(blocked["approval_id"], "grant", decided_by="ann"))
    following = attempt.next()
    assert following.proceed("lim") == blocked["step_id"]
    limited(following, "lim2")


# Parking


@pytest.fixture
def parking(kernel: Kernel, id: str) -> Agent:
    """An agent whose steps wait for a refill; one bucket for all its executions."""
    window = kernel.span(60, 4)
    text = policy(id, max_calls=1, window=f"{window:g}s", per_what="agent", max_wait="2m")
    return kernel.agent(policy=text, lease_timeout=3600)


def test_parks_until_the_bucket_has_refilled(parking: Agent) -> None:
    """8: blocked without an approval; running; dispatched again when the bucket has refilled."""
    kernel, attempt = parking.kernel, parking.start()
    attempt.ran("lim", {"n": 1}, "first")
    decision = attempt.blocked("lim", {"n": 2})
    assert not decision.get("approval_id")
    assert kernel.execution(attempt.execution_id)["status"] == "running"
    kernel.pass_time(61)
    following = attempt.next()
    assert (following.dispatch_id, following.attempt) != (attempt.dispatch_id, attempt.attempt)
    assert following.decision("lim", {"n": 1})["result"] == "first"
    following.ran("lim", {"n": 2}, "second")
    done(following.complete("done"))
    assert kernel.execution(attempt.execution_id)["status"] == "completed"


def test_a_parked_attempt_has_lost_its_lease(parking: Agent) -> None:
    """8: the dispatch unwinds; the next one has the lease."""
    attempt = parking.start()
    attempt.proceed("lim", {"n": 1})
    attempt.blocked("lim", {"n": 2})
    parking.kernel.pass_time(61)
    following = attempt.next()
    refused(attempt.heartbeat(), 409, "lease_superseded")
    done(following.heartbeat())


def test_is_not_dispatched_before_the_refill(parking: Agent) -> None:
    """8: dispatched again when the bucket has refilled, not before."""
    kernel = parking.kernel
    kernel.needs_clock()
    attempt = parking.start()
    attempt.proceed("lim", {"n": 1})
    attempt.blocked("lim", {"n": 2})
    kernel.pass_time(20)
    parking.no_delivery(attempt.execution_id)
    kernel.pass_time(41)
    attempt.next().proceed("lim", {"n": 2})


def test_parks_once(parking: Agent) -> None:
    """8: it parks once: whoever finds the bucket empty again is over the limit."""
    kernel = parking.kernel
    hungry, patient = parking.start(), parking.start()
    hungry.proceed("lim", {"n": 1})
    patient.blocked("lim", {"n": 2})
    kernel.pass_time(61)
    following = patient.next()
    taken = hungry.decision("lim", {"n": 3})["decision"]
    assert taken == "proceed"
    limited(following, "lim", {"n": 2})


def test_does_not_park_for_a_refill_beyond_max_wait(kernel: Kernel, id: str) -> None:
    """8: with max_wait and a refill within it; else rate_limited."""
    text = policy(id, max_calls=1, window="1h", max_wait="5s")
    attempt = kernel.agent(policy=text).start()
    attempt.proceed("lim")
    limited(attempt)


def test_cancelling_a_parked_execution(parking: Agent) -> None:
    """7 and 8: it is not dispatched again."""
    kernel, attempt = parking.kernel, parking.start()
    attempt.proceed("lim", {"n": 1})
    attempt.blocked("lim", {"n": 2})
    done(kernel.send("POST", f"/v0/executions/{attempt.execution_id}/cancel"))
    kernel.needs_clock()
    kernel.pass_time(61)
    parking.no_delivery(attempt.execution_id)
