"""Creation and delivery: the queue, its retries, its leases (PROTOCOL 2, 7)."""

from __future__ import annotations

import threading
import uuid
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from typing import Any

import pytest

from tests.conformance.driver import (
    WAIT,
    Agent,
    Attempt,
    Delivery,
    Kernel,
    done,
    ok,
    refused,
    wait_until,
)


def occurred(event: object) -> float:
    assert isinstance(event, dict)
    whole, _, fraction = event["occurred_at"].rstrip("Z").partition(".")
    return datetime.fromisoformat(f"{whole}.{(fraction + '000000')[:6]}+00:00").timestamp()


def is_uuid7(text: str) -> bool:
    return str(uuid.UUID(text)) == text and uuid.UUID(text).version == 7


# Creation


def test_creation(kernel: Kernel, agent: Agent) -> None:
    """7: execution.created, execution.started, dispatch.queued; 201 with status running."""
    response = kernel.send("POST", "/v0/executions", {"agent_id": agent.id, "input": {"n": 1}})
    assert response.status_code == 201
    execution = response.json()
    assert execution["status"] == "running"
    assert execution["agent_id"] == agent.id
    assert execution["input"] == {"n": 1}
    attempt = agent.next(execution["id"])
    events = [(e["type"], e["payload"]) for e in kernel.events(execution["id"])[:3]]
    assert events == [
        ("execution.created", {"execution_id": execution["id"], "status": "pending"}),
        ("execution.started", {"execution_id": execution["id"], "status": "running"}),
        (
            "dispatch.queued",
            {
                "dispatch_id": attempt.dispatch_id,
                "execution_id": execution["id"],
                "status": "pending",
                "attempt": 0,
            },
        ),
    ]


def test_creation_for_an_unknown_agent(shared_kernel: Kernel) -> None:
    """7: 404."""
    response = shared_kernel.send("POST", "/v0/executions", {"agent_id": "nobody", "input": 1})
    refused(response, 404, "not_found")


def test_creation_without_input(agent: Agent) -> None:
    """9: recorded exchange, an execution without input."""
    response = agent.kernel.send("POST", "/v0/executions", {"agent_id": agent.id})
    assert response.status_code == 201
    assert (
        agent.next(response.json()["id"]).kernel.execution(response.json()["id"])["input"] is None
    )


def test_ids_are_uuid7(kernel: Kernel) -> None:
    """9: ids of executions, dispatches and approvals are UUIDv7."""
    attempt = kernel.agent(policy="rules: [{id: a, then: {decision: require_approval}}]").start()
    blocked = attempt.blocked("t")
    assert is_uuid7(attempt.execution_id)
    assert is_uuid7(attempt.dispatch_id)
    assert is_uuid7(blocked["approval_id"])


# The webhook


def test_webhook(attempt: Attempt) -> None:
    """2 and 7: POSTed to the webhook URL, with the body of generation 3."""
    delivery = attempt.delivery
    assert delivery.method == "POST"
    assert delivery.headers["content-type"].startswith("application/json")
    assert delivery.headers["rebuno-execution-id"] == attempt.execution_id
    body = delivery.json
    assert set(body) == {
        "execution_id",
        "dispatch_id",
        "dispatch_attempt",
        "lease_timeout_seconds",
    }
    assert body["dispatch_attempt"] == 1
    assert type(body["dispatch_attempt"]) is int
    assert body["lease_timeout_seconds"] > 0


def test_lease_timeout_is_120_seconds_by_default(attempt: Attempt) -> None:
    """7: default 120 s."""
    if not attempt.kernel.embedded:
        pytest.skip("another kernel may be configured otherwise")
    assert attempt.delivery.json["lease_timeout_seconds"] == 120


@pytest.mark.parametrize("seconds", [7, 2.5])
def test_lease_timeout_of_the_agent(shared_kernel: Kernel, seconds: float) -> None:
    """9: lease_timeout_seconds of the agent is in its webhooks."""
    attempt = shared_kernel.agent(lease_timeout=seconds).start()
    assert attempt.delivery.json["lease_timeout_seconds"] == seconds


@pytest.mark.parametrize("status", [200, 201, 202, 204])
def test_2xx_is_acked(agent: Agent, status: int) -> None:
    """7: 2xx: dispatch.acked, the dispatch stays in flight under its lease."""
    agent.inbox.answer_next(status)
    attempt = agent.start()
    acked = attempt.kernel.event(attempt.execution_id, "dispatch.acked")
    assert acked == {
        "dispatch_id": attempt.dispatch_id,
        "execution_id": attempt.execution_id,
        "status": "acked",
        "attempt": 1,
    }
    done(attempt.heartbeat())


def failed(attempt: Attempt) -> dict[str, Any]:
    """Wait until the kernel knows that this delivery failed; returns the event's payload."""

    def found() -> dict[str, Any] | None:
        for event in attempt.kernel.events(attempt.execution_id):
            if (
                event["type"] == "dispatch.failed"
                and event["payload"]["attempt"] == attempt.attempt
            ):
                return dict(event["payload"])
        return None

    told: dict[str, Any] = wait_until(found, WAIT, "the delivery did not fail")
    return told


def retried(attempt: Attempt) -> Attempt:
    """Let the back-off of a failed delivery pass; returns the next attempt."""
    failed(attempt)
    attempt.kernel.pass_time(1.25 * 2 ** (attempt.attempt - 1))
    return attempt.next()


@pytest.mark.parametrize("status", [400, 401, 404, 409, 500, 503])
def test_anything_else_is_failed_and_retried(agent: Agent, status: int) -> None:
    """7: anything else: dispatch.failed, retried with the next attempt of the same dispatch."""
    agent.inbox.answer_next(status)
    first = agent.start()
    told = failed(first)
    told.pop("reason", None)  # a kernel may say more than it has to
    assert told == {
        "dispatch_id": first.dispatch_id,
        "execution_id": first.execution_id,
        "status": "failed",
        "attempt": 1,
    }
    second = retried(first)
    assert (second.dispatch_id, second.attempt) == (first.dispatch_id, 2)
    done(second.complete("done"))
    assert agent.kernel.types(first.execution_id) == [
        "execution.created",
        "execution.started",
        "dispatch.queued",
        "dispatch.failed",
        "dispatch.acked",
        "execution.completed",
    ]


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_a_redirect_is_not_followed(agent: Agent, status: int) -> None:
    """3 and 7: no 2xx, and what is signed goes nowhere else."""
    elsewhere, trap = agent.kernel.webhooks.inbox(f"/{agent.id}/elsewhere")
    agent.inbox.default = (status, {"Location": elsewhere})
    first = agent.start()
    failed(first)
    agent.inbox.default = (200, {})
    retried(first)
    assert trap.all == []


def test_an_unreachable_agent_is_retried(kernel: Kernel) -> None:
    """7: a refused connection is no 2xx either."""
    agent = kernel.agent()
    reachable, agent.webhook_url = agent.webhook_url, "http://127.0.0.1:1/webhook"
    agent.register()
    execution_id = agent.create()
    kernel.event(execution_id, "dispatch.failed")
    agent.webhook_url = reachable
    agent.register()
    kernel.pass_time(1.25)
    assert agent.next(execution_id).attempt == 2


def waited(attempt: Attempt) -> tuple[float, Attempt]:
    """Let time pass bit by bit; returns how long the retry took by the kernel's clock, and it."""
    kernel, agent, id = attempt.kernel, attempt.agent, attempt.execution_id
    failed(attempt)
    bit = 2 ** (attempt.attempt - 1) / 20

    def came() -> bool:
        kernel.pass_time(bit)
        return bool(agent.inbox.untaken(id))

    wait_until(came, WAIT, "no retry came")
    following = agent.next(id)
    times = {
        (e["type"], e["payload"].get("attempt")): occurred(e)
        for e in kernel.events(id)
        if e["type"] in ("dispatch.failed", "dispatch.acked")
    }
    before = times["dispatch.failed", attempt.attempt]
    after = (
        times.get(("dispatch.acked", following.attempt))
        or times["dispatch.failed", following.attempt]
    )
    return after - before, following


def test_back_off(agent: Agent) -> None:
    """7: retried after 1 s × 2^(attempt−1) plus up to 25 % jitter."""
    agent.inbox.answer_next(500, 500, 500, 500)
    attempt = agent.start()
    for least in (1, 2, 4, 8):
        wait, attempt = waited(attempt)
        assert wait >= least - 0.01
    assert attempt.attempt == 5


def test_back_off_counts_attempts_whose_lease_ran_out(kernel: Kernel) -> None:
    """7: 1 s × 2^(attempt−1): the attempt, which also a lapsed lease has put up."""
    agent = kernel.agent(lease_timeout=kernel.span(60, 4))
    agent.inbox.answer_next(200, 200, 500)
    wait, following = waited(agent.start().lapse().lapse())
    assert following.attempt == 4
    assert wait >= 4 - 0.01


def test_back_off_is_30_seconds_at_most(kernel: Kernel) -> None:
    """7: min(30 s, 1 s × 2^(attempt−1)) plus up to 25 % jitter."""
    kernel.needs_clock()
    agent = kernel.agent(lease_timeout=60)
    agent.inbox.answer_next(*[200] * 6, 500)
    attempt = agent.start()
    while attempt.attempt < 7:
        attempt = attempt.lapse()
    wait, _ = waited(attempt)
    bit = 2**6 / 20
    assert 30 - 0.01 <= wait <= 30 * 1.25 + bit


def test_exhausted(agent: Agent) -> None:
    """7: after 5 attempts the execution fails with dispatch_exhausted."""
    agent.inbox.default = (500, {})
    attempt = agent.start()
    while attempt.attempt < 5:
        attempt = retried(attempt)
    execution = agent.kernel.status(attempt.execution_id, "failed")
    assert execution["failure_reason"] == "dispatch_exhausted"
    events = agent.kernel.events(attempt.execution_id)
    assert [e["type"] for e in events[3:]] == ["dispatch.failed"] * 5 + ["execution.failed"]
    assert events[-1]["payload"]["reason"] == "dispatch_exhausted"
    agent.inbox.default = (200, {})
    agent.no_delivery(attempt.execution_id)


def test_the_lease_is_good_while_the_webhook_is_answered(agent: Agent) -> None:
    """4 and 7: a claimed dispatch is in flight: the agent may call before it has answered."""
    seen: list[object] = []

    def during(delivery: Delivery) -> None:
        agent.inbox.during = None
        attempt = Attempt(agent, delivery)
        seen.append(attempt.decision("t")["decision"])
        seen.append(attempt.heartbeat().status_code)

    agent.inbox.during = during
    attempt = agent.start()
    wait_until(lambda: len(seen) == 2, WAIT, "the agent was not called")
    assert seen == ["proceed", 204]
    done(attempt.heartbeat())


def test_completed_while_the_webhook_is_answered(agent: Agent) -> None:
    """7: an execution that ended meanwhile is not dispatched again, whatever the answer was."""
    agent.inbox.answer_next(500)
    ended = threading.Event()

    def during(delivery: Delivery) -> None:
        agent.inbox.during = None
        done(Attempt(agent, delivery).complete("early"))
        ended.set()

    agent.inbox.during = during
    execution_id = agent.create()
    assert ended.wait(60)
    agent.inbox.take(execution_id)
    assert agent.kernel.status(execution_id, "completed")["output"] == "early"
    agent.kernel.needs_clock()
    agent.kernel.pass_time(300)
    agent.no_delivery(execution_id)
    assert "dispatch.queued" not in agent.kernel.types(execution_id)[3:]


def test_every_execution_is_delivered_once(agent: Agent) -> None:
    """7: many at once: each has its own dispatch, delivered with attempt 1."""
    with ThreadPoolExecutor(4) as pool:
        ids = list(pool.map(agent.create, range(20)))
    attempts = [agent.next(execution_id) for execution_id in ids]
    assert {attempt.attempt for attempt in attempts} == {1}
    assert len({attempt.dispatch_id for attempt in attempts}) == 20
    assert len(agent.inbox.all) == 20


def test_a_slow_agent_does_not_hold_up_another(kernel: Kernel) -> None:
    """7: a new dispatch is delivered at once, also while another webhook is unanswered."""
    slow, quick = kernel.agent(), kernel.agent()
    release = threading.Event()
    slow.inbox.during = lambda delivery: (release.wait(60), None)[1]
    try:
        held = slow.create()
        slow.inbox.take(held)
        done(quick.start().complete("quick"))
        assert "dispatch.acked" not in kernel.types(held)
    finally:
        release.set()
    kernel.event(held, "dispatch.acked")


# Reclaiming


def test_reclaim(leased: Attempt) -> None:
    """7: a lease not renewed in time is claimed again with the next attempt."""
    following = leased.lapse()
    assert following.dispatch_id == leased.dispatch_id
    assert following.attempt == 2
    acked = leased.kernel.event(leased.execution_id, "dispatch.acked", 1)
    assert acked["attempt"] == 2
    assert leased.kernel.execution(leased.execution_id)["status"] == "running"


def test_no_reclaim_while_the_lease_is_good(leased: Attempt) -> None:
    """7: a lease not renewed within its time-out, and no other."""
    leased.kernel.needs_clock()
    leased.kernel.pass_time(30)
    leased.agent.no_delivery(leased.execution_id)
    done(leased.heartbeat())


def test_reclaim_leaves_the_steps(leased: Attempt) -> None:
    """1: resume is replay: recorded outcomes stay, and the handler goes on from them."""
    step = leased.ran("a", {"x": 1}, "A")
    following = leased.lapse()
    assert following.decision("a", {"x": 1})["result"] == "A"
    following.ran("b", None, "B")
    last = following.lapse()
    assert last.attempt == 3
    assert last.decision("a", {"x": 1})["step_id"] == step
    assert last.decision("b")["result"] == "B"
    done(last.complete("done"))
    assert leased.kernel.status(leased.execution_id, "completed")["output"] == "done"


def test_the_earlier_attempt_cannot_end_the_execution(leased: Attempt) -> None:
    """4: 409 lease_superseded."""
    following = leased.lapse()
    refused(leased.complete("old"), 409, "lease_superseded")
    refused(leased.fail("old"), 409, "lease_superseded")
    done(following.complete("new"))
    assert leased.kernel.execution(leased.execution_id)["output"] == "new"


def test_the_earlier_attempt_cannot_record_an_outcome(leased: Attempt) -> None:
    """4: the dispatch's attempt has moved on, so it does not match."""
    step = leased.proceed("t")
    following = leased.lapse()
    assert following.proceed("t") == step
    refused(leased.complete_step(step, "old"), 409, "lease_superseded")
    assert ok(following.complete_step(step, "new")) == {"decision": "recorded"}


def test_an_ended_execution_is_not_reclaimed(leased: Attempt) -> None:
    """7: there is nothing to deliver once it ended."""
    done(leased.complete(1))
    leased.kernel.needs_clock()
    leased.kernel.pass_time(61)
    leased.agent.no_delivery(leased.execution_id)


def test_an_agent_that_acks_and_is_silent_is_delivered_again_and_again(leased: Attempt) -> None:
    """7: a lapsed lease goes back to the queue; the execution stays running."""
    attempt = leased
    for number in range(2, 4):
        attempt = attempt.lapse()
        assert attempt.attempt == number
    assert leased.kernel.execution(leased.execution_id)["status"] == "running"
