"""Leases under what happens to real processes: busy bodies, stopped and killed workers."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from rebuno_sync import Agent, Client, LeaseSuperseded, execution, tool
from rebuno_sync.kernel import EmbeddedKernel
from tests.faults.fleet import OUTPUT, Fleet, fleet_of
from tests.faults.proxy import FaultProxy
from tests.faults.sides import AGENT, SECRET
from tests.scripted import served, wait_until

ROOT = Path(__file__).resolve().parents[2]
LEASE = 60.0


def attempts(client: Client, execution_id: str) -> int:
    """The attempts that an agent took."""
    return sum(e.type == "dispatch.acked" for e in client.events(execution_id))


# In one process


def test_a_busy_body_keeps_its_lease() -> None:
    lease = 1.0

    @tool
    def busy() -> int:
        end = time.monotonic() + 3 * lease
        turns = 0
        while time.monotonic() < end:
            turns += 1
        return turns

    with EmbeddedKernel() as kernel, Client(kernel.url) as client:
        agent = Agent(AGENT, secret=SECRET, base_url=kernel.url)
        agent.bind(lambda: busy())
        with served(agent.app) as url:
            client.register_agent(AGENT, f"{url}/webhook", SECRET, lease_timeout_seconds=lease)
            created = client.create(AGENT, {})
            found = client.wait(created.id, timeout=60)
            assert agent.close(timeout=30)
        assert found.status == "completed"
        assert found.output > 0
        assert attempts(client, created.id) == 1


def test_an_attempt_whose_lease_was_taken_writes_nothing_more() -> None:
    ended: list[BaseException] = []
    first_waits, second_is_here, first_ended = (threading.Event() for _ in range(3))

    @tool
    def slow() -> str:
        if execution().dispatch_attempt == 1:
            first_waits.set()
            assert second_is_here.wait(30)
            return "by the first"
        second_is_here.set()
        assert first_ended.wait(30)
        return "by the second"

    @tool
    def after() -> str:
        return "after"

    def handler() -> list[str]:
        try:
            return [slow(), after()]
        except BaseException as exc:
            ended.append(exc)
            first_ended.set()
            raise

    with EmbeddedKernel() as kernel, FaultProxy(kernel.url) as proxy, Client(kernel.url) as client:
        # Two agents: the second stands for another process, which knows nothing of the first.
        first, second = (Agent(AGENT, secret=SECRET, base_url=proxy.url) for _ in range(2))
        first.bind(handler)
        second.bind(handler)
        with served(first.app) as first_url, served(second.app) as second_url:
            client.register_agent(
                AGENT, f"{first_url}/webhook", SECRET, lease_timeout_seconds=LEASE
            )
            created = client.create(AGENT, {})
            assert first_waits.wait(30)
            client.register_agent(
                AGENT, f"{second_url}/webhook", SECRET, lease_timeout_seconds=LEASE
            )
            kernel.advance(LEASE + 1)
            found = client.wait(created.id, timeout=30)
            assert first.close(timeout=30)
            assert second.close(timeout=30)
    assert (found.status, found.output) == ("completed", ["by the second", "after"])
    assert [type(exc) for exc in ended] == [LeaseSuperseded]
    stale = [p for p in proxy.passed if p.header("Rebuno-Dispatch-Attempt") == "1"]
    assert [(p.call, p.status) for p in stale] == [("submit", 200), ("step_complete", 409)]


# In gunicorn's processes


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Fleet]:
    with fleet_of(tmp_path) as fleet:
        yield fleet


def test_a_worker_killed_between_two_steps(fleet: Fleet) -> None:
    created, worker = fleet.start("between")
    os.kill(worker, signal.SIGKILL)
    found = fleet.finish(created)
    assert (found.status, found.output) == ("completed", OUTPUT)
    assert [fleet.count(w) for w in ("reserve", "pay", "ship")] == [1, 1, 1]
    assert fleet.attempts(created) == 2


def test_a_worker_killed_in_a_body_that_may_run_again(fleet: Fleet) -> None:
    created, worker = fleet.start("reserve")
    os.kill(worker, signal.SIGKILL)
    found = fleet.finish(created)
    assert (found.status, found.output) == ("completed", OUTPUT)
    assert [fleet.count(w) for w in ("reserve", "pay", "ship")] == [2, 1, 1]
    assert len(list(fleet.client.steps(created.id))) == 3


def test_a_worker_killed_in_a_body_that_runs_at_most_once(fleet: Fleet) -> None:
    created, worker = fleet.start("pay")
    os.kill(worker, signal.SIGKILL)
    found = fleet.finish(created)
    assert (found.status, found.output) == ("completed", {**OUTPUT, "pay": "indeterminate"})
    assert [fleet.count(w) for w in ("reserve", "pay", "ship")] == [1, 1, 1]


@pytest.mark.parametrize("at", ["reserve", "between", "pay"])
def test_a_worker_stopped_beyond_its_lease_writes_nothing_when_it_wakes(
    fleet: Fleet, at: str
) -> None:
    created, worker = fleet.start(at)
    os.kill(worker, signal.SIGSTOP)
    try:
        found = fleet.finish(created)
        (fleet.journal / "go").touch()
    finally:
        os.kill(worker, signal.SIGCONT)
    wait_until(lambda: fleet.noted("Terminated"), what="the worker did not notice")
    assert [row[1:] for row in fleet.noted("Terminated")] == [(1, worker)]

    unknown = {"pay": "indeterminate"} if at == "pay" else {}
    assert (found.status, found.output) == ("completed", {**OUTPUT, **unknown})
    assert fleet.count("reserve") == (2 if at == "reserve" else 1)
    assert [fleet.count(w) for w in ("pay", "ship")] == [1, 1]
    # What the woken worker wanted to record changed nothing.
    assert fleet.client.get(created.id).output == found.output
    assert len(list(fleet.client.steps(created.id))) == 3
