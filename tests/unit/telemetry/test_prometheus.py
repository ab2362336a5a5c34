"""Metrics of the agent's side, in one process; for several see the tests under gunicorn."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
from prometheus_client import REGISTRY, CollectorRegistry, Counter, generate_latest

from rebuno_sync import Agent, LeaseSuperseded, NotFoundError, ToolError, observers, step, tool
from rebuno_sync.lease import Lease
from rebuno_sync.telemetry import prometheus as telemetry
from rebuno_sync.testing.in_process import TestKernel
from tests.scripted import wait_until
from tests.unit.support import dispatch


@pytest.fixture
def registry() -> Iterator[CollectorRegistry]:
    found = CollectorRegistry()
    telemetry.instrument(found)
    try:
        yield found
    finally:
        telemetry.uninstrument()
        assert observers.installed == ()


@tool
def broken() -> None:
    raise ValueError("no")


def test_what_a_run_leaves(registry: CollectorRegistry) -> None:
    attempts: list[int] = []
    held, go = threading.Event(), threading.Event()

    def handler() -> None:
        step("note", lambda: 1)
        with pytest.raises(ToolError):
            broken()
        attempts.append(1)
        if len(attempts) == 1:
            held.set()
            assert go.wait(30)
            raise SystemExit

    def value(name: str, **labels: str) -> float | None:
        return registry.get_sample_value(f"rebuno_agent_{name}", {"agent_id": "a1", **labels})

    with TestKernel() as kernel:
        agent = Agent(
            "a1", secret="s", base_url="http://kernel.invalid", max_concurrency=3, max_queue=7
        )
        agent.bind(handler)
        kernel.attach(agent)
        with kernel.client() as client:
            created = client.create("a1", {})
            assert held.wait(30)
            assert value("handlers_running") == 1
            go.set()
            assert agent.join(30)
            kernel.advance(121)
            client.wait(created.id, 30)
            assert agent.join(30)
        assert agent.deliver(b"{}", None)[0] == 401
        assert agent.deliver(b"{}", "sha256=no")[0] == 401
    assert (value("handlers_running"), value("handlers_limit")) == (0, 3)
    assert (value("queue_length"), value("queue_limit")) == (0, 7)
    assert value("deliveries_total", outcome="taken", reason="") == 2
    for reason in ("unsigned", "signature"):
        assert value("deliveries_total", outcome="refused", reason=reason) == 1
    assert value("queue_seconds_count") == 2
    assert value("dispatch_seconds_count", outcome="abandoned") == 1
    assert value("dispatch_seconds_count", outcome="completed") == 1
    for kind, outcome in (("local", "succeeded"), ("tool_call", "failed")):
        assert value("steps_total", kind=kind, decision="proceed") == 1
        assert value("steps_total", kind=kind, decision="replay") == 1
        assert value("step_seconds_count", kind=kind, outcome=outcome) == 1
    route = {"method": "POST", "route": "/v0/executions/{id}/steps"}
    assert registry.get_sample_value("rebuno_agent_kernel_request_seconds_count", route) == 4
    text = generate_latest(registry).decode()
    assert created.id not in text, "an id as a label would make a series for each execution"


def test_failures_of_the_kernel_and_of_leases(registry: CollectorRegistry) -> None:
    with TestKernel() as kernel, kernel.client() as client, pytest.raises(NotFoundError):
        client.get("01a2285c-898b-79a9-a7b7-b89ed21939d8")
    labels = {"method": "GET", "route": "/v0/executions/{id}", "status": "404"}
    assert registry.get_sample_value("rebuno_agent_kernel_request_failures_total", labels) == 1
    observers.tell("heartbeat_failed", "a1")
    Lease(dispatch(1), "a1").lose(LeaseSuperseded(), "unreachable")
    found = registry.get_sample_value("rebuno_agent_heartbeat_failures_total", {"agent_id": "a1"})
    assert found == 1
    lost = {"agent_id": "a1", "reason": "unreachable"}
    assert registry.get_sample_value("rebuno_agent_leases_lost_total", lost) == 1


def test_switching_on_twice_counts_nothing_twice(registry: CollectorRegistry) -> None:
    telemetry.instrument(registry)
    assert len(observers.installed) == 1
    observers.tell("heartbeat_failed", "a1")
    found = registry.get_sample_value("rebuno_agent_heartbeat_failures_total", {"agent_id": "a1"})
    assert found == 1


def test_switching_off_and_on_again_goes_on_counting(registry: CollectorRegistry) -> None:
    for _ in range(2):
        observers.tell("heartbeat_failed", "a1")
        telemetry.uninstrument()
        observers.tell("heartbeat_failed", "a1")
        telemetry.instrument(registry)
    found = registry.get_sample_value("rebuno_agent_heartbeat_failures_total", {"agent_id": "a1"})
    assert found == 2


def test_the_last_registry_counts(registry: CollectorRegistry) -> None:
    other = CollectorRegistry()
    telemetry.instrument(other)
    observers.tell("heartbeat_failed", "a1")
    name, labels = "rebuno_agent_heartbeat_failures_total", {"agent_id": "a1"}
    assert registry.get_sample_value(name, labels) is None
    assert other.get_sample_value(name, labels) == 1


def test_metrics_of_the_same_name_are_refused() -> None:
    taken = CollectorRegistry()
    Counter("rebuno_agent_steps", "Mine.", registry=taken)
    with pytest.raises(ValueError, match="rebuno_agent_steps"):
        telemetry.instrument(taken)
    assert observers.installed == ()


def test_the_default_registry_is_the_one_that_apps_show() -> None:
    assert (telemetry.instrument.__defaults__ or ())[0] is REGISTRY


def test_the_load_is_told_as_it_changes(registry: CollectorRegistry) -> None:
    go = threading.Event()
    with TestKernel() as kernel:
        agent = Agent("a1", secret="s", base_url="http://kernel.invalid", max_concurrency=1)
        agent.bind(lambda: go.wait(30))
        kernel.attach(agent)
        with kernel.client() as client:
            for _ in range(3):
                client.create("a1", {})

            def load() -> tuple[float | None, ...]:
                names = ("queue_length", "handlers_running")
                labels = {"agent_id": "a1"}
                return tuple(registry.get_sample_value(f"rebuno_agent_{n}", labels) for n in names)

            wait_until(lambda: load() == (2, 1))
            assert not agent.close(0)
            assert load() == (0, 1), "what had not begun is given up"
            go.set()
            assert agent.join(30)
            assert load() == (0, 0)
