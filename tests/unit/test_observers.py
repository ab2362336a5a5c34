"""The seam to telemetry: what observers are told, and that they never break a run."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from rebuno_sync import (
    Agent,
    LeaseSuperseded,
    NetworkError,
    PolicyError,
    RateLimited,
    ToolError,
    bind_context,
    execution,
    observers,
    step,
    tool,
)
from rebuno_sync.agent import MAX_WEBHOOK_BYTES
from rebuno_sync.lease import Heartbeats, Lease
from rebuno_sync.observers import DispatchEvent, Event, Observer, RequestEvent, StepEvent
from rebuno_sync.signing import sign_body
from rebuno_sync.testing.in_process import TestKernel
from rebuno_sync.testing.runs import AgentRun, run_agent
from rebuno_sync.transport import Transport
from rebuno_sync.wire import MAX_BODY_BYTES, route_of
from tests.scripted import wait_until
from tests.unit.support import dispatch

POLICY = """
default_action: allow
rules:
- {id: d, when: {target: denied}, then: {decision: deny}}
- {id: a, when: {target: approved}, then: {decision: require_approval}}
- id: l
  when: {target: limited}
  then: {decision: allow, rate_limit: {max_calls: 1, window: 1h}}
"""


class Told(Observer):
    """Keeps everything that it is told."""

    def __init__(self) -> None:
        self.began_: list[Event] = []
        self.ended_: list[Event] = []
        self.decided_: list[tuple[str, str]] = []
        self.told: list[tuple[Any, ...]] = []
        self.loads: list[tuple[int, int, int, int]] = []
        self.depth: list[Any] = []

    def began(self, event: Event) -> Any:
        self.began_.append(event)
        return event

    def decided(self, event: StepEvent, kept: Any) -> None:
        assert kept is event
        self.decided_.append((event.target, event.decision))

    def ended(self, event: Event, kept: Any) -> None:
        assert kept is event
        assert event.seconds > 0
        self.ended_.append(event)

    def delivered(self, agent_id: str, outcome: str, reason: str) -> None:
        self.told.append(("delivered", agent_id, outcome, reason))

    def load(
        self, agent_id: str, *, waiting: int, running: int, max_queue: int, max_concurrency: int
    ) -> None:
        self.loads.append((waiting, running, max_queue, max_concurrency))

    def heartbeat_failed(self, agent_id: str) -> None:
        self.told.append(("heartbeat_failed", agent_id))

    def lease_lost(self, agent_id: str, why: str) -> None:
        self.told.append(("lease_lost", agent_id, why))

    @property
    def dispatches(self) -> list[DispatchEvent]:
        return [e for e in self.ended_ if isinstance(e, DispatchEvent)]

    @property
    def steps(self) -> list[tuple[str, str, str, str]]:
        """The steps that ended: kind, target, decision, outcome."""
        steps = [e for e in self.ended_ if isinstance(e, StepEvent)]
        return [(e.kind, e.target, e.decision, e.outcome) for e in steps]


@pytest.fixture
def told() -> Iterator[Told]:
    observer = Told()
    observers.install(observer)
    try:
        yield observer
    finally:
        observers.remove(observer)


def agent_of(handler: Callable[..., Any], **options: Any) -> Agent:
    agent = Agent("a1", secret="s", base_url="http://kernel.invalid", **options)
    agent.bind(handler)
    return agent


def run(handler: Callable[..., Any], input: Any = None) -> AgentRun:
    with TestKernel() as kernel:
        agent = agent_of(handler)
        found = run_agent(agent, {} if input is None else input, policy=POLICY, kernel=kernel)
        assert agent.join(30)
    return found


@tool
def fine(x: int = 1) -> int:
    return x


@tool
def broken() -> None:
    raise ValueError("no")


@tool
def denied() -> None: ...


@tool
def approved() -> None: ...


@tool
def limited(x: int) -> int:
    return x


# Dispatches


def exits() -> None:
    if execution().dispatch_attempt == 1:
        raise SystemExit


def fails() -> None:
    raise LookupError("k")


def wants(x: int) -> None: ...


@pytest.mark.parametrize(
    ("handler", "outcome", "reason"),
    [
        (fine.__wrapped__, "completed", ""),
        (fails, "failed", "agent_error: LookupError: k"),
        (wants, "failed", "input_invalid: "),
        (lambda: b"", "failed", "agent_error: TypeError: output is a bytes"),
        (approved, "blocked", ""),
        (denied, "failed", "policy_denied"),
    ],
    ids=["completed", "failed", "input", "output", "blocked", "denied"],
)
def test_how_dispatches_end(
    told: Told, handler: Callable[..., Any], outcome: str, reason: str
) -> None:
    found = run(handler)
    (event,) = told.dispatches
    assert (event.agent_id, event.execution_id, event.attempt) == ("a1", found.execution.id, 1)
    assert event.outcome == outcome
    assert event.reason.startswith(reason)
    assert bool(event.reason) == bool(reason)
    assert (event.error is not None) == (outcome == "failed")
    assert event.waited >= 0


def test_an_attempt_that_is_given_up_and_one_that_comes_too_late(told: Told) -> None:
    with TestKernel() as kernel:
        agent = agent_of(exits)
        kernel.attach(agent)
        with kernel.client() as client:
            created = client.create("a1", {})
            wait_until(lambda: told.dispatches)
            assert agent.join(30)
            kernel.advance(121)
            client.wait(created.id, 30)
            assert agent.join(30)
            body = json.dumps(
                {"execution_id": created.id, "dispatch_id": "d9", "dispatch_attempt": 9}
            ).encode()
            agent.deliver(body, sign_body("s", body))
            assert agent.join(30)
    assert [(e.attempt, e.outcome) for e in told.dispatches] == [
        (1, "abandoned"),
        (2, "completed"),
        (9, "ended_before"),
    ]


def test_a_lost_lease(told: Told) -> None:
    with TestKernel() as kernel:
        begun, go = threading.Event(), threading.Event()

        def handler() -> None:
            begun.set()
            assert go.wait(30)
            fine()

        agent = agent_of(handler)
        kernel.attach(agent)
        with kernel.client() as client:
            created = client.create("a1", {})
            assert begun.wait(30)
            client.cancel(created.id)
            go.set()
            assert agent.join(30)
    assert [e.outcome for e in told.dispatches] == ["terminated"]
    assert told.steps == [("tool_call", "fine", "execution_terminal", "")]


# Steps


def test_steps_and_how_they_are_decided(told: Told) -> None:
    def handler() -> None:
        fine()
        for failing, error in ((broken, ToolError), (denied, PolicyError)):
            with pytest.raises(error):
                failing()
        limited(1)
        with pytest.raises(RateLimited):
            limited(2)
        with pytest.raises(ValueError, match="bytes of JSON"):
            step("much", lambda text: text, {"text": "x" * MAX_BODY_BYTES})
        step("note", lambda: 1)
        if execution().dispatch_attempt == 1:
            raise SystemExit

    with TestKernel() as kernel:
        agent = agent_of(handler)
        kernel.attach(agent)
        with kernel.client() as client:
            client.set_policy("a1", POLICY)
            created = client.create("a1", {})
            wait_until(lambda: told.dispatches)
            assert agent.join(30)
            first, told.ended_ = told.steps, [e for e in told.ended_ if type(e) is DispatchEvent]
            kernel.advance(121)
            client.wait(created.id, 30)
            assert agent.join(30)
    unchanged = [
        ("tool_call", "denied", "denied", ""),
        ("tool_call", "limited", "rate_limited", ""),
        ("local", "much", "refused", ""),
    ]
    assert first == [
        ("tool_call", "fine", "proceed", "succeeded"),
        ("tool_call", "broken", "proceed", "failed"),
        unchanged[0],
        ("tool_call", "limited", "proceed", "succeeded"),
        *unchanged[1:],
        ("local", "note", "proceed", "succeeded"),
    ]
    assert told.steps == [
        ("tool_call", "fine", "replay", "succeeded"),
        ("tool_call", "broken", "replay", "failed"),
        unchanged[0],
        ("tool_call", "limited", "replay", "succeeded"),
        *unchanged[1:],
        ("local", "note", "replay", "succeeded"),
    ]
    assert told.decided_ == [(t, d) for _, t, d, _ in first + told.steps]


def test_a_step_out_of_time_ends_once_and_one_left_behind_is_abandoned(told: Told) -> None:
    late, left = threading.Event(), threading.Event()
    begun = threading.Event()

    @tool(timeout=0.01)
    def slow() -> None:
        wait_until(lambda: ("tool_call", "slow", "proceed", "failed") in told.steps)

    @tool
    def orphan() -> None:
        begun.set()
        assert left.wait(30)

    def handler() -> None:
        with pytest.raises(ToolError):
            slow()
        thread = threading.Thread(target=bind_context(lambda: _ended(orphan, late)))
        thread.start()
        assert begun.wait(30)

    run(handler)
    left.set()
    assert late.wait(30)
    assert told.steps == [
        ("tool_call", "slow", "proceed", "failed"),
        ("tool_call", "orphan", "proceed", "abandoned"),
    ]


def _ended(fn: Callable[[], Any], done: threading.Event) -> None:
    try:
        fn()
    except BaseException:
        pass
    finally:
        done.set()


class Away(Transport):
    """A kernel that is out of reach."""

    def __init__(self) -> None:
        super().__init__("http://kernel.invalid/base", timeout=1)

    def send_once(self, *request: Any) -> Any:
        raise NetworkError("away")


def test_requests_to_the_kernel(told: Told) -> None:
    run(fine.__wrapped__)
    requests = [e for e in told.ended_ if isinstance(e, RequestEvent)]
    ours = [(e.method, e.route, e.status) for e in requests]
    assert ("POST", "/v0/agents", 201) in ours
    assert ("GET", "/v0/executions/{id}", 200) in ours
    assert ("POST", "/v0/executions/{id}/complete", 204) in ours
    with pytest.raises(NetworkError):
        Away().request("GET", "/v0/ready", b"", lambda target: {})
    last = told.ended_[-1]
    assert isinstance(last, RequestEvent)
    assert (last.base_url, last.route, last.status) == (
        "http://kernel.invalid/base",
        "/v0/ready",
        None,
    )
    assert isinstance(last.error, NetworkError)


@pytest.mark.parametrize(
    ("path", "route"),
    [
        ("/v0/executions?cursor=a/b", "/v0/executions"),
        ("/v0/executions/e1", "/v0/executions/{id}"),
        ("/v0/executions/e1/steps?status=terminal", "/v0/executions/{id}/steps"),
        ("/v0/executions/e/steps/s/complete", "/v0/executions/{id}/steps/{id}/complete"),
        ("/v0/executions/e/resources/k/binding", "/v0/executions/{id}/resources/{id}/binding"),
        ("/v0/executions/e/resources/checkpoints", "/v0/executions/{id}/resources/checkpoints"),
        ("/v0/agents/a/metadata", "/v0/agents/{id}/metadata"),
        ("/v0/ready", "/v0/ready"),
    ],
)
def test_routes(path: str, route: str) -> None:
    assert route_of(path) == route


# Deliveries, load, leases


def test_deliveries(told: Told) -> None:
    held, go = threading.Event(), threading.Event()

    def handler() -> None:
        held.set()
        assert go.wait(30)

    with TestKernel() as kernel:
        agent = agent_of(handler, max_concurrency=1, max_queue=1)
        kernel.attach(agent)
        unbound = Agent("a2", secret="s", base_url="http://kernel.invalid")
        with kernel.client() as client:
            created = client.create("a1", {})
            assert held.wait(30)

            def deliver(to: Agent, **fields: Any) -> int:
                body = json.dumps({"execution_id": created.id, **fields}).encode()
                return to.deliver(body, sign_body("s", body))[0]

            told.told.clear()
            assert deliver(agent, dispatch_id="x", dispatch_attempt=1) == 202
            assert deliver(agent, dispatch_id="x", dispatch_attempt=1) == 202
            assert deliver(agent, dispatch_id="y", dispatch_attempt=1) == 503
            assert agent.deliver(b"{}", "sha256=no")[0] == 401
            assert agent.deliver(b"{}", None)[0] == 401
            assert agent.deliver(b"{}", "")[0] == 401
            assert agent.deliver(b" " * (MAX_WEBHOOK_BYTES + 1), None)[0] == 413
            assert deliver(agent) == 400
            assert deliver(unbound, dispatch_id="z") == 503
            assert told.loads[-1] == (1, 1, 1, 1)
            go.set()
            assert agent.join(30)
            assert told.loads[-1] == (0, 0, 1, 1)
            assert agent.close(30)
            assert deliver(agent, dispatch_id="w") == 503
    assert [each[1:] for each in told.told if each[0] == "delivered"] == [
        ("a1", "taken", ""),
        ("a1", "repeated", ""),
        ("a1", "refused", "queue_full"),
        ("a1", "refused", "signature"),
        ("a1", "refused", "unsigned"),
        ("a1", "refused", "unsigned"),
        ("a1", "refused", "too_large"),
        ("a1", "refused", "malformed"),
        ("a2", "refused", "no_handler"),
        ("a1", "refused", "closing"),
    ]


def test_leases(told: Told) -> None:
    lease = Lease(dispatch(1, 0.003), "a1")
    failed = threading.Event()

    def beat(lease: Lease, timeout: float) -> None:
        failed.set()
        raise NetworkError("away")

    beats = Heartbeats(beat, "hb")
    beats.add(lease)
    wait_until(lambda: ("heartbeat_failed", "a1") in told.told)
    beats.remove(lease)
    lease.lose(LeaseSuperseded(), "refused")
    lease.lose(LeaseSuperseded(), "shutdown")
    assert [t for t in told.told if t[0] == "lease_lost"] == [("lease_lost", "a1", "refused")]


def test_an_unreachable_kernel_costs_the_lease(told: Told) -> None:
    def handler() -> None:
        agent._kernel._transport = Away()
        fine()

    with TestKernel() as kernel:
        agent = agent_of(handler)
        kernel.attach(agent)
        with kernel.client() as client:
            client.create("a1", {})
            wait_until(lambda: told.dispatches)
            assert agent.join(30)
    assert ("lease_lost", "a1", "unreachable") in told.told
    assert told.steps == [("tool_call", "fine", "unanswered", "")]
    assert told.dispatches[0].outcome == "superseded"


# Observers themselves


class Bad(Observer):
    """Raises whatever it is asked."""


def _raise(self: Any, *args: Any, **named: Any) -> Any:
    raise RuntimeError("an observer of bad manners")


for _name in [n for n in vars(Observer) if not n.startswith("_")]:
    setattr(Bad, _name, _raise)


def test_what_an_observer_raises_breaks_no_run(
    told: Told, caplog: pytest.LogCaptureFixture
) -> None:
    bad = Bad()
    observers.install(bad)
    try:
        found = run(lambda: [fine(), step("n", lambda: 2)])
    finally:
        observers.remove(bad)
    assert (found.status, found.output) == ("completed", [1, 2])
    assert [e.outcome for e in told.dispatches] == ["completed"]
    assert "an observer failed in _raise" in caplog.text


def test_one_that_is_removed_still_hears_the_end(told: Told) -> None:
    def handler() -> None:
        observers.remove(told)
        fine()

    run(handler)
    assert [e.outcome for e in told.dispatches] == ["completed"]
    assert told.steps == []


def test_nothing_is_made_while_nobody_watches(monkeypatch: pytest.MonkeyPatch) -> None:
    assert observers.installed == ()

    def watch(*args: Any) -> Any:
        raise AssertionError("nobody watches")

    monkeypatch.setattr(observers, "Watch", watch)
    monkeypatch.setattr("rebuno_sync.step_watches.Watch", watch)
    monkeypatch.setattr(observers, "_safely", watch)
    assert run(lambda: [fine(), step("n", lambda: 2)]).output == [1, 2]
