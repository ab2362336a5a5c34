"""run_agent and the fixtures: a whole execution within a test, without a socket."""

from __future__ import annotations

import socket
import threading

import pytest

from rebuno_sync import Agent, Client, ForbiddenError, execution, step, tool
from rebuno_sync.testing import TestKernel
from rebuno_sync.testing.plugin import RunAgent
from rebuno_sync.testing.runs import run_agent as run_alone
from tests.scripted import wait_until

ASK = {
    "default_action": "allow",
    "rules": [
        {
            "id": "ask",
            "when": {"target": "pay"},
            "then": {
                "decision": "require_approval",
                "approval_config": {"approvers": ["ann"], "timeout": "1h"},
            },
        }
    ],
}


@tool
def pay(cents: int) -> str:
    return f"paid {cents}"


@pytest.fixture
def agent() -> Agent:
    agent = Agent("payer")

    @agent.handler
    def handle(cents: int) -> list[str]:
        return [step("when", lambda: "now"), pay(cents)]

    return agent


def test_a_run_ends_with_its_steps_in_order(run_agent: RunAgent, agent: Agent) -> None:
    run = run_agent(agent, {"cents": 5})
    assert run.status == "completed"
    assert run.output == ["now", "paid 5"]
    assert [(s.kind, s.target, s.status, s.result) for s in run.steps] == [
        ("local", "when", "succeeded", "now"),
        ("tool_call", "pay", "succeeded", "paid 5"),
    ]
    assert run.events[-1].type == "execution.completed"


def test_no_socket_is_opened(monkeypatch: pytest.MonkeyPatch, agent: Agent) -> None:
    def refuse(*args: object, **kwargs: object) -> None:
        raise AssertionError("a socket was opened")

    monkeypatch.setattr(socket, "socket", refuse)
    monkeypatch.setattr(socket, "create_connection", refuse)
    assert run_alone(agent, {"cents": 5}).output == ["now", "paid 5"]


def test_a_failed_run_tells_why(run_agent: RunAgent, agent: Agent) -> None:
    run = run_agent(agent, {"cents": "five"})
    assert run.status == "failed"
    assert run.failure_reason.startswith("input_invalid: input.cents")


def test_a_run_waits_for_a_person_who_grants(run_agent: RunAgent, agent: Agent) -> None:
    run = run_agent(agent, {"cents": 5}, policy=ASK)
    assert (run.status, [a.approvers for a in run.approvals]) == ("blocked", [["ann"]])
    with pytest.raises(ForbiddenError):
        run.grant(decided_by="bob")
    assert run.grant(decided_by="ann").output == ["now", "paid 5"]


def test_a_person_who_denies(run_agent: RunAgent, agent: Agent) -> None:
    run = run_agent(agent, {"cents": 5}, policy=ASK).deny(decided_by="ann", rationale="too much")
    assert (run.status, run.failure_reason) == ("failed", "policy_denied: too much")


def test_an_approval_runs_out_when_the_clock_is_moved(run_agent: RunAgent, agent: Agent) -> None:
    run = run_agent(agent, {"cents": 5}, policy=ASK).advance(3601)
    assert (run.status, run.failure_reason) == ("failed", "approval_timeout")
    with pytest.raises(LookupError):
        run.grant()


def test_a_lease_runs_out_when_the_clock_is_moved(
    run_agent: RunAgent, rebuno_kernel: TestKernel
) -> None:
    dying = Agent("dying")
    attempts: list[int | None] = []

    @dying.handler
    def handle() -> str:
        attempts.append(execution().dispatch_attempt)
        said = pay(5)
        if len(attempts) == 1:
            raise SystemExit("as when a worker is killed")
        return said

    rebuno_kernel.attach(dying)
    with rebuno_kernel.client() as client:
        created = client.create("dying", None)
        wait_until(lambda: attempts)
        assert dying.join(30)
        assert client.get(created.id).status == "running"
        rebuno_kernel.advance(121)
        assert client.wait(created.id, timeout=30).output == "paid 5"
    assert attempts == [1, 2]


def test_a_limit_that_parks_goes_on_when_the_clock_is_moved(run_agent: RunAgent) -> None:
    limited = Agent("limited")

    @limited.handler
    def twice() -> list[str]:
        return [pay(1), pay(2)]

    limit = {"max_calls": 1, "window": "1h", "max_wait": "2h"}
    rule = {"id": "limit", "then": {"decision": "allow", "rate_limit": limit}}
    run = run_agent(limited, policy={"rules": [rule]})
    assert (run.status, [s.result for s in run.steps]) == ("running", ["paid 1"])
    assert run.advance(seconds=1800).status == "running"
    assert run.advance(seconds=1801).output == ["paid 1", "paid 2"]


def test_the_client_and_the_page_of_the_kernel(
    rebuno_client: Client, rebuno_kernel: TestKernel, run_agent: RunAgent, agent: Agent
) -> None:
    run = run_agent(agent, {"cents": 5})
    assert [e.id for e in rebuno_client.list()] == [run.execution.id]
    with Client(rebuno_kernel.url) as over_http:
        assert over_http.get(run.execution.id).output == ["now", "paid 5"]


def test_each_test_has_a_kernel_of_its_own(rebuno_client: Client) -> None:
    assert list(rebuno_client.list()) == []


def test_a_run_that_does_not_end_says_so(agent: Agent) -> None:
    slow = Agent("slow")
    release = threading.Event()
    slow.bind(lambda: release.wait(30))
    with TestKernel() as kernel:
        with pytest.raises(TimeoutError, match="still running"):
            run_alone(slow, kernel=kernel, limit=0.01)
        release.set()
        assert slow.join(30)
