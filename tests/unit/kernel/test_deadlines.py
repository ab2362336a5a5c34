"""Executions that take longer than they may, on a kernel whose clock is moved."""

from __future__ import annotations

import datetime
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from rebuno_sync.kernel import Clock, EmbeddedKernel
from tests.unit.kernel.agent_double import Caller, Webhooks, eventually
from tests.unit.kernel.conftest import manifest
from tests.unit.kernel.test_dispatch import complete, create, execution, types

Start = Callable[..., EmbeddedKernel]
POLICY = {
    "default_action": "allow",
    "rules": [
        {"id": "ask", "when": {"target": "ask"}, "then": {"decision": "require_approval"}},
        {
            "id": "soon",
            "when": {"target": "soon"},
            "then": {"decision": "require_approval", "approval_config": {"timeout": "60s"}},
        },
    ],
}


@pytest.fixture
def kernel(kernels: Start, webhooks: Webhooks) -> EmbeddedKernel:
    return kernels(manifest=manifest(webhooks, policy=POLICY), deadline=60)


@pytest.fixture
def caller(kernel: EmbeddedKernel) -> Iterator[Caller]:
    caller = Caller(kernel.url)
    yield caller
    caller.close()


def submit(caller: Caller, lease: dict[str, Any], target: str) -> dict[str, Any]:
    path = f"/v0/executions/{lease['execution_id']}/steps"
    step = {"kind": "tool_call", "target": target}
    return dict(caller.agent("POST", path, step, lease=lease).json())


def seconds(text: str) -> float:
    return datetime.datetime.fromisoformat(text.replace("Z", "+00:00")).timestamp()


def test_the_deadline_is_shown(caller: Caller, webhooks: Webhooks) -> None:
    shown = execution(caller, create(caller))
    assert seconds(shown["deadline_at"]) - seconds(shown["created_at"]) == pytest.approx(60)


def test_without_one_there_is_none(kernels: Start, webhooks: Webhooks) -> None:
    kernel = kernels(manifest=manifest(webhooks))
    caller = Caller(kernel.url)
    id = create(caller)
    assert "deadline_at" not in execution(caller, id)
    kernel.advance(10_000_000)
    assert execution(caller, id)["status"] == "running"
    caller.close()


def test_one_that_runs_is_failed_and_its_agent_refused(
    kernel: EmbeddedKernel, caller: Caller, webhooks: Webhooks
) -> None:
    id = create(caller)
    lease = webhooks.next()
    step_id = submit(caller, lease, "t")["step_id"]
    kernel.advance(59)
    assert execution(caller, id)["status"] == "running"
    kernel.advance(1.1)
    ended = execution(caller, id)
    assert (ended["status"], ended["failure_reason"]) == ("failed", "deadline_exceeded")
    assert types(caller, id)[-2:] == ["execution.failed", "step.cancelled"]
    events = caller.client("GET", f"/v0/executions/{id}/events").json()
    assert events[-2]["payload"]["reason"] == "deadline_exceeded"
    assert events[-1]["payload"]["error"] == {"reason": "deadline_exceeded"}
    path = f"/v0/executions/{id}"
    done = caller.agent("POST", f"{path}/steps/{step_id}/complete", {"result": 1}, lease=lease)
    assert done.json() == {"decision": "execution_terminal"}
    assert submit(caller, lease, "t") == {"decision": "execution_terminal"}
    assert complete(caller, lease) == 409
    kernel.advance(10_000)
    assert webhooks.received.empty(), "it was delivered again"


def test_one_that_waits_for_a_person_is_failed_with_its_approval(
    kernel: EmbeddedKernel, caller: Caller, webhooks: Webhooks
) -> None:
    id = create(caller)
    asked = submit(caller, webhooks.next(), "ask")
    kernel.advance(61)
    assert types(caller, id)[-3:] == ["execution.failed", "approval.expired", "step.denied"]
    approval = caller.client("GET", f"/v0/approvals/{asked['approval_id']}").json()
    assert approval["status"] == "expired"
    grant = f"/v0/approvals/{asked['approval_id']}/grant"
    assert caller.client("POST", grant, {"decided_by": "ann"}).status_code == 409
    assert caller.client("GET", "/v0/approvals").json() == []


def test_the_deadline_goes_before_an_approval_that_runs_out_with_it(
    kernel: EmbeddedKernel, caller: Caller, webhooks: Webhooks
) -> None:
    id = create(caller)
    submit(caller, webhooks.next(), "soon")
    kernel.advance(1000)
    assert "execution.resumed" not in types(caller, id)
    assert execution(caller, id)["failure_reason"] == "deadline_exceeded"
    assert webhooks.received.empty()


def test_one_that_is_still_queued_is_failed_and_not_delivered(
    kernel: EmbeddedKernel, caller: Caller, webhooks: Webhooks
) -> None:
    webhooks.answer = lambda body: 500
    id = create(caller)
    webhooks.next()
    eventually(lambda: "dispatch.failed" in types(caller, id))
    kernel.advance(100)
    assert execution(caller, id)["failure_reason"] == "deadline_exceeded"
    assert webhooks.received.empty()


def test_one_that_ended_in_time_stays_as_it_ended(
    kernel: EmbeddedKernel, caller: Caller, webhooks: Webhooks
) -> None:
    id = create(caller)
    assert complete(caller, webhooks.next()) == 204
    before = types(caller, id)
    kernel.advance(1000)
    assert types(caller, id) == before
    assert execution(caller, id)["status"] == "completed"


def test_it_happens_while_nobody_looks(kernels: Start, webhooks: Webhooks) -> None:
    kernel = kernels(manifest=manifest(webhooks), deadline=0.2)
    caller = Caller(kernel.url)
    id = create(caller)
    # Nothing but the scheduler's own sleep ends this one.
    eventually(lambda: execution(caller, id)["status"] == "failed")
    caller.close()


def test_a_deadline_outlives_a_restart_without_the_option(
    kernels: Start, webhooks: Webhooks, tmp_path: Path
) -> None:
    clock = Clock()
    first = kernels(tmp_path / "k", manifest=manifest(webhooks), deadline=60, clock=clock)
    caller = Caller(first.url)
    id = create(caller)
    webhooks.next()
    first.stop()
    clock.advance(61)
    second = kernels(tmp_path / "k", manifest=manifest(webhooks), clock=clock)
    caller.url = second.url
    eventually(lambda: execution(caller, id)["status"] == "failed")
    assert "deadline_at" not in execution(caller, create(caller))
    caller.close()


@pytest.mark.parametrize("option", ["deadline", "retain", "lease_timeout"])
@pytest.mark.parametrize("value", [0, -1, float("inf"), float("nan")])
def test_seconds_that_are_none(option: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"{option} must be a number of seconds above 0"):
        EmbeddedKernel(**{option: value})
