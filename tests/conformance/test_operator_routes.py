"""Client and admin routes (PROTOCOL 9)."""

from __future__ import annotations

import uuid
from typing import Any

import pytest

from tests.conformance.driver import Agent, Kernel, done, ok, refused


def listed(kernel: Kernel, query: str) -> Any:
    return ok(kernel.send("GET", f"/v0/executions?{query}"))


def ids(page: Any) -> list[str]:
    return [row["id"] for row in page["executions"] or []]


# Executions


def test_list_is_newest_first(kernel: Kernel, agent: Agent) -> None:
    """9: newest first."""
    created = [agent.create(n) for n in range(5)]
    page = listed(kernel, f"agent_id={agent.id}")
    assert ids(page) == created[::-1]
    assert [row["input"] for row in page["executions"]] == [4, 3, 2, 1, 0]
    assert not page.get("next_cursor")


def test_list_by_agent(kernel: Kernel, agent: Agent) -> None:
    """9: agent_id."""
    other = kernel.agent()
    mine, others = agent.create(), other.create()
    assert ids(listed(kernel, f"agent_id={agent.id}")) == [mine]
    assert ids(listed(kernel, f"agent_id={other.id}")) == [others]
    assert ids(listed(kernel, "agent_id=nobody")) == []
    assert {mine, others} <= set(ids(listed(kernel, "limit=200")))


def test_list_by_status(kernel: Kernel, agent: Agent) -> None:
    """9: status."""
    running, finished = agent.start(), agent.start()
    done(finished.complete(1))
    query = f"agent_id={agent.id}&status="
    assert ids(listed(kernel, query + "running")) == [running.execution_id]
    assert ids(listed(kernel, query + "completed")) == [finished.execution_id]
    assert ids(listed(kernel, query + "failed")) == []


def test_list_page_by_page(kernel: Kernel, agent: Agent) -> None:
    """9: cursor, limit, next_cursor: each execution once, in order, also when more come in."""
    created = [agent.create(n) for n in range(7)]
    seen: list[str] = []
    query = f"agent_id={agent.id}&limit=3"
    cursor = ""
    for size in (3, 3, 1):
        page = listed(kernel, query + cursor)
        assert len(ids(page)) == size
        seen += ids(page)
        agent.create("later")
        cursor = f"&cursor={page['next_cursor']}" if page.get("next_cursor") else ""
        assert bool(cursor) is (size == 3)
    assert seen == created[::-1]


def test_a_last_page_that_is_full(kernel: Kernel, agent: Agent) -> None:
    """9: following next_cursor ends."""
    created = [agent.create(n) for n in range(4)]
    seen, cursor = [], ""
    for _ in range(5):
        page = listed(kernel, f"agent_id={agent.id}&limit=2{cursor}")
        seen += ids(page)
        if not page.get("next_cursor"):
            break
        cursor = f"&cursor={page['next_cursor']}"
    else:
        pytest.fail("next_cursor never ends")
    assert seen == created[::-1]


def test_list_limits(kernel: Kernel, agent: Agent) -> None:
    """9: limit 50, at most 200."""
    for number in range(203):
        agent.create(number)
    assert len(ids(listed(kernel, f"agent_id={agent.id}"))) == 50
    assert len(ids(listed(kernel, f"agent_id={agent.id}&limit=200"))) == 200
    response = kernel.send("GET", f"/v0/executions?agent_id={agent.id}&limit=1000")
    if response.status_code == 200:
        assert len(ids(response.json())) <= 200
    else:
        refused(response, 400, "validation_error")


@pytest.mark.parametrize("query", ["limit=x", "limit=-1", "cursor=x"])
def test_list_with_a_malformed_query(shared_kernel: Kernel, query: str) -> None:
    """4: 400 validation_error."""
    refused(shared_kernel.send("GET", f"/v0/executions?{query}"), 400, "validation_error")


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"input": 1},
        {"agent_id": "", "input": 1},
        {"agent_id": 1, "input": 1},
        {"agent_id": None, "input": 1},
    ],
)
def test_create_without_an_agent(shared_kernel: Kernel, body: Any) -> None:
    """4: a missing agent_id is 400 in the embedded kernel."""
    if not shared_kernel.embedded:
        pytest.skip("old kernels were careless here")
    refused(shared_kernel.send("POST", "/v0/executions", body), 400, "validation_error")


def test_create_with_an_unknown_field(shared_kernel: Kernel) -> None:
    """2: 400 validation_error."""
    body = {"agent_id": shared_kernel.agent().id, "input": 1, "surprise": 1}
    refused(shared_kernel.send("POST", "/v0/executions", body), 400, "validation_error")


@pytest.mark.parametrize("data", [b"", b"{", b"[]", b"\xff"])
@pytest.mark.parametrize("path", ["/v0/executions", "/v0/agents"])
def test_malformed_bodies(shared_kernel: Kernel, path: str, data: bytes) -> None:
    """4: 400 validation_error."""
    refused(shared_kernel.send("POST", path, data=data), 400, "validation_error")


@pytest.mark.parametrize("path", ["", "/steps", "/events", "/stream"])
def test_unknown_execution(shared_kernel: Kernel, path: str) -> None:
    """4: 404 not_found; 400 for what is no id."""
    response = shared_kernel.send("GET", f"/v0/executions/{uuid.uuid4()}{path}")
    refused(response, 404, "not_found")
    response = shared_kernel.send("GET", f"/v0/executions/no-id{path}")
    refused(response, 400, "validation_error")


# Events


def event_page(kernel: Kernel, execution_id: str, query: str) -> list[int]:
    rows = ok(kernel.send("GET", f"/v0/executions/{execution_id}/events?{query}")) or []
    return [row["event_seq"] for row in rows]


def test_event_object(kernel: Kernel, agent: Agent) -> None:
    """7 and 9: an ordered list of events with event_seq, type, payload, occurred_at."""
    attempt = agent.start()
    rows = ok(kernel.send("GET", f"/v0/executions/{attempt.execution_id}/events"))
    assert [row["event_seq"] for row in rows] == [1, 2, 3, 4]
    for row in rows:
        assert set(row) == {"execution_id", "event_seq", "type", "payload", "occurred_at"}
    assert sorted(row["occurred_at"] for row in rows) == [row["occurred_at"] for row in rows]


def test_events_after_seq(kernel: Kernel, agent: Agent) -> None:
    """9: after_seq, limit."""
    execution_id = agent.start().execution_id
    assert event_page(kernel, execution_id, "after_seq=2") == [3, 4]
    assert event_page(kernel, execution_id, "after_seq=1&limit=2") == [2, 3]
    assert event_page(kernel, execution_id, "after_seq=4") == []
    assert event_page(kernel, execution_id, "after_seq=0&limit=1") == [1]


@pytest.mark.parametrize("after", ["abc", "-5", "9" * 30])
def test_events_after_something_else(kernel: Kernel, agent: Agent, after: str) -> None:
    """9: recorded exchange: an after_seq that is none counts as 0; nothing comes after the last."""
    path = f"/v0/executions/{agent.start().execution_id}/events?after_seq={after}"
    response = kernel.send("GET", path)
    if response.status_code == 400:
        refused(response, 400, "validation_error")
    else:
        assert [row["event_seq"] for row in ok(response) or []] in ([], [1, 2, 3, 4])


def test_event_limits(kernel: Kernel, agent: Agent) -> None:
    """9: limit 100, at most 1000."""
    attempt = agent.start()
    for number in range(333):
        attempt.proceed("t", number)
    execution_id = attempt.execution_id
    assert event_page(kernel, execution_id, "") == list(range(1, 101))
    assert event_page(kernel, execution_id, "limit=1000") == list(range(1, 1001))
    response = kernel.send("GET", f"/v0/executions/{execution_id}/events?limit=5000")
    if response.status_code == 200:
        assert len(response.json()) == 1000
    else:
        refused(response, 400, "validation_error")
    assert event_page(kernel, execution_id, "after_seq=1000") == [1001, 1002, 1003]


# Agents


def test_register_an_agent(shared_kernel: Kernel) -> None:
    """9: 201; the secret is never returned."""
    agent = shared_kernel.agent()
    body: dict[str, Any] = {
        "id": agent.id + "-2",
        "webhook_url": agent.webhook_url,
        "secret": "very-secret",
        "lease_timeout_seconds": 45,
    }
    response = shared_kernel.send("POST", "/v0/agents", body)
    assert response.status_code == 201
    shared_kernel.agents.append(body["id"])
    row = response.json()
    assert row["id"] == body["id"]
    assert row["webhook_url"] == agent.webhook_url
    assert row["lease_timeout_seconds"] == 45
    path = f"/v0/agents/{row['id']}"
    again, rows = shared_kernel.send("GET", path), shared_kernel.send("GET", "/v0/agents")
    assert ok(again)["id"] == row["id"]
    assert row["id"] in [r["id"] for r in ok(rows)]
    for answer in (response, again, rows):
        assert "very-secret" not in answer.text


def test_register_an_agent_again(kernel: Kernel, agent: Agent) -> None:
    """9: the same id takes the new URL and secret; its policy and executions stay."""
    agent.policy("rules: [{id: no, then: {decision: deny}}]")
    agent.secret = "another-secret"
    agent.webhook_url, agent.inbox = kernel.webhooks.inbox(f"/{agent.id}/moved")
    agent.register()
    attempt = agent.start()
    assert attempt.decision("t")["rule_id"] == "no"


@pytest.mark.parametrize(
    "change",
    [
        {"id": ""},
        {"id": None},
        {"id": 1},
        {"webhook_url": ""},
        {"webhook_url": None},
        {"webhook_url": "no url"},
        {"webhook_url": "ftp://127.0.0.1/"},
        {"lease_timeout_seconds": 0},
        {"lease_timeout_seconds": -1},
        {"lease_timeout_seconds": "60"},
        {"surprise": 1},
    ],
)
def test_register_something_else(shared_kernel: Kernel, change: dict[str, Any]) -> None:
    """4: an agent without id or URL is 400; so are an unknown field and no time-out."""
    if not shared_kernel.embedded and "surprise" not in change:
        pytest.skip("old kernels were careless here")
    body = {"id": "odd", "webhook_url": "http://127.0.0.1:9/", "secret": "s", **change}
    body = {name: value for name, value in body.items() if value is not None}
    refused(shared_kernel.send("POST", "/v0/agents", body), 400, "validation_error")
    refused(shared_kernel.send("GET", "/v0/agents/odd"), 404, "not_found")


def test_delete_an_agent(kernel: Kernel, agent: Agent) -> None:
    """9: DELETE /v0/agents/{id}; what is not there is 404."""
    done(kernel.send("DELETE", f"/v0/agents/{agent.id}"))
    refused(kernel.send("GET", f"/v0/agents/{agent.id}"), 404, "not_found")
    assert agent.id not in [row["id"] for row in ok(kernel.send("GET", "/v0/agents")) or []]
    response = kernel.send("POST", "/v0/executions", {"agent_id": agent.id, "input": 1})
    refused(response, 404, "not_found")
    if kernel.embedded:
        refused(kernel.send("DELETE", f"/v0/agents/{agent.id}"), 404, "not_found")


def test_a_deleted_agent_cannot_sign(kernel: Kernel, agent: Agent) -> None:
    """3: 401 for an agent that is not registered."""
    attempt = agent.start()
    done(kernel.send("DELETE", f"/v0/agents/{agent.id}"))
    refused(attempt.submit("t"), 401, "unauthorized")


def test_unknown_agent(shared_kernel: Kernel) -> None:
    """4: 404 not_found."""
    refused(shared_kernel.send("GET", "/v0/agents/nobody"), 404, "not_found")


# The rest


def test_health_ready_and_metrics(shared_kernel: Kernel) -> None:
    """9: recorded exchanges; metrics are text."""
    assert ok(shared_kernel.send_as({}, "GET", "/v0/health")) == {"status": "ok"}
    assert ok(shared_kernel.send_as({}, "GET", "/v0/ready")) == {"status": "ready"}
    metrics = shared_kernel.send_as({}, "GET", "/metrics")
    assert metrics.headers["Content-Type"].startswith("text/plain")
    assert "# TYPE" in metrics.text


@pytest.mark.parametrize(
    ("method", "path", "statuses"),
    [
        ("GET", "/v0/nothing", {404}),
        ("GET", "/", {200, 302, 303, 307, 404}),
        ("PUT", "/v0/executions", {404, 405}),
        ("DELETE", "/v0/approvals", {404, 405}),
        ("POST", "/v0/health", {404, 405}),
        ("GET", "/v0/executions/../../etc/passwd", {400, 404}),
    ],
)
def test_unknown_routes(shared_kernel: Kernel, method: str, path: str, statuses: set[int]) -> None:
    """4: the status decides."""
    response = shared_kernel.send(method, path, allow_redirects=False)
    assert response.status_code in statuses
