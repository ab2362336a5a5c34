"""Delivery of webhooks, on a running kernel whose clock is moved."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from typing import Any

import pytest

from rebuno_sync.kernel import EmbeddedKernel, dispatch
from rebuno_sync.kernel.deliveries import Claim
from tests.unit.kernel.agent_double import Caller, Webhooks, eventually
from tests.unit.kernel.conftest import manifest


def create(caller: Caller, agent_id: str = "a1") -> str:
    answer = caller.client("POST", "/v0/executions", {"agent_id": agent_id})
    assert answer.status_code == 201, answer.text
    return str(answer.json()["id"])


def types(caller: Caller, execution_id: str) -> list[str]:
    answer = caller.client("GET", f"/v0/executions/{execution_id}/events?limit=1000")
    return [event["type"] for event in answer.json()]


def reasons(caller: Caller, execution_id: str) -> list[str]:
    """Return why deliveries failed, as the events say."""
    answer = caller.client("GET", f"/v0/executions/{execution_id}/events?limit=1000")
    failed = [e["payload"] for e in answer.json() if e["type"] == "dispatch.failed"]
    assert all(
        payload.keys() == {"dispatch_id", "execution_id", "status", "attempt", "reason"}
        for payload in failed
    )
    return [payload["reason"] for payload in failed]


def execution(caller: Caller, execution_id: str) -> dict[str, Any]:
    return dict(caller.client("GET", f"/v0/executions/{execution_id}").json())


def complete(caller: Caller, webhook: dict[str, Any]) -> int:
    path = f"/v0/executions/{webhook['execution_id']}/complete"
    return caller.agent("POST", path, {"output": 1}, lease=webhook).status_code


def test_a_webhook_says_what_generation_3_says(caller: Caller, webhooks: Webhooks) -> None:
    execution_id = create(caller)
    webhook = webhooks.next()
    assert webhook.keys() == {
        "execution_id",
        "dispatch_id",
        "dispatch_attempt",
        "lease_timeout_seconds",
    }
    assert webhook["execution_id"] == execution_id
    assert webhook["dispatch_attempt"] == 1
    assert webhook["lease_timeout_seconds"] == 120
    eventually(lambda: "dispatch.acked" in types(caller, execution_id))
    assert complete(caller, webhook) == 204


def test_what_is_due_is_delivered_at_once(
    kernels: Callable[..., EmbeddedKernel], webhooks: Webhooks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By word of whoever made it due; the next look at the queue would come in an hour."""
    monkeypatch.setattr(dispatch, "_LONGEST_SLEEP", 3600.0)
    caller = Caller(kernels(manifest=manifest(webhooks)).url)
    create(caller)
    webhooks.next()
    bundle = "rules: [{id: ask, then: {decision: require_approval}}]"
    caller.client("POST", "/v0/policies/a1", {"bundle": bundle})
    asks = create(caller)
    lease = webhooks.next()
    step = {"kind": "tool_call", "target": "t", "args": {}}
    blocked = caller.agent("POST", f"/v0/executions/{asks}/steps", step, lease=lease).json()
    grant = f"/v0/approvals/{blocked['approval_id']}/grant"
    assert caller.client("POST", grant, {"decided_by": "ada"}).status_code == 204
    resumed = webhooks.next()
    assert resumed["execution_id"] == asks
    assert resumed["dispatch_id"] != lease["dispatch_id"]
    caller.close()


def test_a_lost_lease_is_delivered_again(
    kernel: EmbeddedKernel, caller: Caller, webhooks: Webhooks
) -> None:
    execution_id = create(caller)
    first = webhooks.next()
    kernel.advance(119)
    beat = f"/v0/executions/{execution_id}/heartbeat"
    assert caller.agent("POST", beat, lease=first).status_code == 204
    kernel.advance(119)
    assert caller.agent("POST", beat, lease=first).status_code == 204
    kernel.advance(121)
    second = webhooks.next()
    assert second["dispatch_id"] == first["dispatch_id"]
    assert second["dispatch_attempt"] == 2
    answer = caller.agent("POST", beat, lease=first)
    assert (answer.status_code, answer.json()["code"]) == (409, "lease_superseded")
    assert complete(caller, second) == 204


@pytest.mark.parametrize("status", [500, 404, 301, 401, 300])
def test_a_refused_webhook_is_tried_again_five_times(
    status: int, kernel: EmbeddedKernel, caller: Caller, webhooks: Webhooks
) -> None:
    webhooks.answer = lambda body: status
    execution_id = create(caller)
    for attempt in range(1, 6):
        assert webhooks.next()["dispatch_attempt"] == attempt
        failed = ["dispatch.failed"] * attempt
        eventually(lambda failed=failed: types(caller, execution_id)[3 : 3 + len(failed)] == failed)
        kernel.advance(1.25 * 2 ** (attempt - 1))
    assert types(caller, execution_id)[-1] == "execution.failed"
    assert execution(caller, execution_id)["failure_reason"] == "dispatch_exhausted"
    assert reasons(caller, execution_id) == [f"answered HTTP {status}"] * 5
    kernel.advance(1000)
    assert webhooks.received.empty()


def test_an_agent_that_is_away_gets_its_webhook_when_it_is_back(
    kernel: EmbeddedKernel, webhooks: Webhooks
) -> None:
    caller = Caller(kernel.url)
    away = {"id": "away", "webhook_url": "http://127.0.0.1:1/", "secret": "s"}
    assert caller.client("POST", "/v0/agents", away).status_code == 201
    execution_id = create(caller, "away")
    eventually(lambda: "dispatch.failed" in types(caller, execution_id))
    assert reasons(caller, execution_id) == ["Connection refused"]
    caller.client("POST", "/v0/agents", {**away, "webhook_url": webhooks.url})
    kernel.advance(1.3)
    assert webhooks.next()["dispatch_attempt"] == 2
    caller.close()


def test_steps_that_come_before_the_answer_stand_after_the_ack(
    caller: Caller, webhooks: Webhooks
) -> None:
    may_answer = threading.Event()

    def answer(body: bytes) -> int:
        may_answer.wait(30)
        return 200

    webhooks.answer = answer
    execution_id = create(caller)
    webhook = webhooks.next()
    step = caller.agent(
        "POST",
        f"/v0/executions/{execution_id}/steps",
        {"kind": "local", "target": "t"},
        lease=webhook,
    )
    assert step.json()["decision"] == "proceed"
    assert complete(caller, webhook) == 204
    may_answer.set()
    expected = [
        "execution.created",
        "execution.started",
        "dispatch.queued",
        "dispatch.acked",
        "step.proposed",
        "step.allowed",
        "step.executing",
        "execution.completed",
    ]
    assert types(caller, execution_id) == expected
    # The next delivery shows that the late answer has been dealt with, and said nothing.
    other = create(caller)
    assert webhooks.next()["execution_id"] == other
    assert types(caller, execution_id) == expected


def test_a_slow_agent_holds_up_nobody_else(
    caller: Caller, webhooks: Webhooks, kernel: EmbeddedKernel
) -> None:
    slow = Webhooks()
    may_answer = threading.Event()
    slow.answer = lambda body: 200 if may_answer.wait(30) else 500
    try:
        caller.client("POST", "/v0/agents", {"id": "slow", "webhook_url": slow.url, "secret": "s"})
        waiting = [create(caller, "slow") for _ in range(20)]
        started = {slow.next()["execution_id"] for _ in range(8)}
        assert started == set(waiting[:8])
        quick = create(caller)
        assert webhooks.next()["execution_id"] == quick
        assert slow.received.empty()
        may_answer.set()
        rest = {slow.next()["execution_id"] for _ in range(12)}
        assert rest == set(waiting[8:])
    finally:
        may_answer.set()
        slow.close()


def test_a_deleted_agent_exhausts_its_dispatches(
    kernel: EmbeddedKernel, caller: Caller, webhooks: Webhooks
) -> None:
    webhooks.answer = lambda body: 503
    execution_id = create(caller)
    eventually(lambda: "dispatch.failed" in types(caller, execution_id))
    assert caller.client("DELETE", "/v0/agents/a1").status_code == 204

    def ended() -> bool:
        kernel.advance(10)
        return execution(caller, execution_id)["status"] == "failed"

    eventually(ended)
    assert webhooks.received.qsize() == 1


def test_an_approval_expires_while_nobody_looks(
    kernels: Callable[..., EmbeddedKernel], webhooks: Webhooks
) -> None:
    rule = {
        "id": "ask",
        "then": {"decision": "require_approval", "approval_config": {"timeout": "200ms"}},
    }
    kernel = kernels(manifest=manifest(webhooks, policy={"rules": [rule]}))
    caller = Caller(kernel.url)
    execution_id = create(caller)
    path, step = f"/v0/executions/{execution_id}/steps", {"kind": "tool_call", "target": "t"}
    asked = caller.agent("POST", path, step, lease=webhooks.next())
    assert asked.json()["decision"] == "blocked"
    # Nothing but the scheduler's own sleep ends this one.
    denied = caller.agent("POST", path, step, lease=webhooks.next())
    assert (denied.json()["decision"], denied.json()["reason"]) == ("denied", "approval_timeout")
    caller.close()


def test_a_stopped_kernel_delivers_after_the_next_start(
    kernels: Callable[..., EmbeddedKernel], webhooks: Webhooks, tmp_path: Any
) -> None:
    kernel = kernels(tmp_path / "k.sqlite3", manifest=manifest(webhooks))
    caller = Caller(kernel.url)
    webhooks.answer = lambda body: 500
    execution_id = create(caller)
    assert webhooks.next()["dispatch_attempt"] == 1
    eventually(lambda: "dispatch.failed" in types(caller, execution_id))
    kernel.stop()
    webhooks.answer = lambda body: 200
    kernel.start()
    kernel.advance(1.3)
    caller.url = kernel.url
    assert webhooks.next()["dispatch_attempt"] == 2
    eventually(lambda: types(caller, execution_id)[-1] == "dispatch.acked")
    caller.close()


def test_occurrences_survive_a_restart_in_the_middle_of_an_attempt(
    kernels: Callable[..., EmbeddedKernel], webhooks: Webhooks, tmp_path: Any
) -> None:
    kernel = kernels(tmp_path / "k.sqlite3", manifest=manifest(webhooks))
    caller = Caller(kernel.url)
    path, step = (
        f"/v0/executions/{create(caller)}/steps",
        {"kind": "tool_call", "target": "t", "args": [1]},
    )
    lease = webhooks.next()
    first = caller.agent("POST", path, step, lease=lease).json()
    kernel.stop()
    kernel.start()
    caller.url = kernel.url
    second = caller.agent("POST", path, step, lease=lease).json()
    assert [first["decision"], second["decision"]] == ["proceed", "proceed"]
    assert first["step_id"] != second["step_id"]
    steps = caller.client("GET", path).json()
    assert [step["occurrence"] for step in steps] == [0, 1]
    caller.close()


REFUSED = "Connection refused"


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("http://user:password@127.0.0.1:{port}/webhook?token=x", REFUSED),
        ("https://user:password@127.0.0.1:{port}/webhook?token=x", REFUSED),
        ("http://user:password@nowhere.invalid:{port}/webhook?token=x", "Name or service|resol"),
        ("http://user:password@:{port}/webhook?token=x", "^InvalidURL$"),
        ("http://user:password@a..b:{port}/webhook?token=x", "^(InvalidURL|LocationParseError)$"),
        ("gopher://user:password@127.0.0.1:{port}/webhook?token=x", "^InvalidSchema$"),
        (None, "^the agent is not registered any more$"),
    ],
)
def test_why_a_webhook_did_not_answer_is_told_without_what_is_secret(
    url: str | None, why: str, caplog: pytest.LogCaptureFixture
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    claim = Claim("d", "e", "a1", 1, 1.0, 0.0, url and url.format(port=port), "s")
    with pytest.raises(dispatch.Unanswered, match=why) as caught:
        dispatch.post_webhook(claim)
    if why == REFUSED:
        told = f"the webhook of agent a1 at 127.0.0.1:{port} did not answer: Connection refused"
        assert caplog.messages == [told]
        assert str(caught.value) == REFUSED
    for secret in ("password", "token=x"):
        assert secret not in f"{caught.value} {caplog.text}"


def test_a_server_that_speaks_something_else_is_told_by_what_it_broke() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer() -> None:
            connection, _ = server.accept()
            with connection:
                connection.recv(65536)
                connection.sendall(b"+OK POP3 password ready\r\n")

        thread = threading.Thread(target=answer)
        thread.start()
        url = f"http://127.0.0.1:{server.getsockname()[1]}/webhook"
        with pytest.raises(dispatch.Unanswered, match=r"^BadStatusLine$"):
            dispatch.post_webhook(Claim("d", "e", "a1", 1, 1.0, 0.0, url, "s"))
        thread.join(30)


def test_a_webhook_is_waited_for_as_long_as_is_asked(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(dispatch, "WEBHOOK_TIMEOUT", 600.0)  # the test would hang
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}/webhook"
        claim = Claim("d", "e", "a1", 1, 1.0, 0.0, url, "s")
        with pytest.raises(dispatch.Unanswered, match=r"^timed out after 0.1 s$"):
            dispatch.post_webhook(claim, timeout=0.1)
    assert "timed out after 0.1 s" in caplog.text
