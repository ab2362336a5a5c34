"""Ids that are more than ids: in paths, in headers, in what is told back."""

from __future__ import annotations

import http.client
from typing import Any
from urllib.parse import urlsplit

import pytest

from rebuno_sync import APIError, Client, NotFoundError, wire
from rebuno_sync.kernel import EmbeddedKernel
from tests.unit.kernel.agent_double import Caller, Webhooks

HOSTILE = [
    "a/b",
    "../agents",
    "a1/../a1",
    "a1%2Fmetadata",
    "a1?x=1",
    "a1#x",
    "a1\r\nX-Injected: 1",
    "a1\n",
    "a1\0",
    "a1;v=1",
    "a1\\..\\x",
    "\u2025/\u202e",
    "%",
    "a" * 5000,
]


@pytest.mark.parametrize("id", HOSTILE, ids=ascii)
def test_an_id_is_one_segment_of_a_path(id: str) -> None:
    path = wire.execution_path(id, "steps", id, "complete")
    assert path.split("/")[3::2] == [wire.segment(id)] * 2
    assert path.count("/") == 6
    assert set(path) <= set("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-._~%/")


def calls(client: Client, id: str) -> list[Any]:
    return [
        lambda: client.get(id),
        lambda: client.cancel(id),
        lambda: list(client.events(id)),
        lambda: list(client.steps(id)),
        lambda: client.step(id, id),
        lambda: client.step("01a22858-90c6-7f9f-87bd-f638f4b4a5dd", id),
        lambda: next(client.stream(id)),
        lambda: client.approval(id),
        lambda: client.grant(id, decided_by="x"),
        lambda: client.deny(id, decided_by="x"),
        lambda: client.agent(id),
        lambda: client.delete_agent(id),
        lambda: client.set_policy(id, "default_action: deny"),
        lambda: client.test_policy(id, [{"target": "t"}]),
        lambda: client.delete_api_key(id),
    ]


@pytest.mark.parametrize("id", HOSTILE, ids=ascii)
def test_no_id_reaches_another_route(id: str, kernel: EmbeddedKernel) -> None:
    with Client(kernel.url) as client:
        for call in calls(client, id):
            with pytest.raises(APIError) as refused:
                call()
            assert refused.value.status_code in (400, 404)
            # Refused by the kernel as an id: not by its router, which knows no such code.
            assert refused.value.code in ("validation_error", "not_found")
        assert [agent.id for agent in client.agents()] == ["a1"]


@pytest.mark.parametrize("id", ["", ".", ".."])
def test_what_is_no_id_is_not_even_sent(id: str, kernel: EmbeddedKernel) -> None:
    with Client(kernel.url) as client:
        for call in calls(client, id)[:5]:
            with pytest.raises(ValueError, match="not an id"):
                call()


@pytest.mark.parametrize("slash", ["%2f", "%2F"])
def test_an_encoded_slash_is_no_slash(slash: str, caller: Caller, webhooks: Webhooks) -> None:
    id = caller.client("POST", "/v0/executions", {"agent_id": "a1"}).json()["id"]
    lease = webhooks.next()
    for method, path in (
        ("GET", f"/v0/executions/{id}{slash}events"),
        ("GET", f"/v0{slash}agents"),
        ("POST", f"/v0/executions/{id}{slash}cancel"),
        ("DELETE", f"/v0/agents{slash}a1"),
        ("GET", f"/executions{slash}{id}"),
    ):
        answer = caller.client(method, path)
        assert answer.status_code == 400, path
        assert "encoded slash" in answer.text
    signed = caller.agent("POST", f"/v0/executions/{id}{slash}complete", {}, lease=lease)
    assert signed.status_code == 400
    assert caller.client("GET", f"/v0/executions/{id}").json()["status"] == "running"
    # In a query it is what it always was.
    assert caller.client("GET", f"/v0/executions?session=a{slash}b").json() == {"executions": []}


@pytest.mark.parametrize(
    "path",
    [
        "/v0/executions/../agents",
        "/v0/executions/%2e%2e/agents",
        "/v0/./agents",
        "/static/../page.py",
        "/static/%2e%2e/page.py",
        "/static/..%5cpage.py",
        "/v0/agents/..",
        "*",
        "/%",
        "/v0\\agents",
    ],
)
def test_dots_lead_nowhere(path: str, kernel: EmbeddedKernel) -> None:
    address = urlsplit(kernel.url)
    connection = http.client.HTTPConnection(str(address.hostname), address.port, timeout=30)
    connection.putrequest("GET", path, skip_host=True)
    connection.putheader("Host", address.netloc)
    connection.endheaders()
    answer = connection.getresponse()
    assert answer.status == 404
    assert b"a1" not in answer.read()
    connection.close()


@pytest.mark.parametrize(
    "change",
    [
        {"id": "a\r\nX: y"},
        {"id": "a/b"},
        {"id": "\u00e9"},
        {"webhook_url": "http://h/\r\nX: y"},
        {"webhook_url": "http://h/ x"},
        {"webhook_url": "http://h\t/"},
        {"webhook_url": "file:///etc/passwd"},
        {"webhook_url": "gopher://h/"},
        {"webhook_url": "http://user:pass@h/"},
    ],
    ids=str,
)
def test_agents_that_would_be_more_than_agents(change: dict[str, str], caller: Caller) -> None:
    agent = {"id": "a2", "webhook_url": "http://h/", "secret": "s", **change}
    answer = caller.client("POST", "/v0/agents", agent)
    assert (answer.status_code, answer.json()["code"]) == (400, "validation_error")
    assert "pass@" not in answer.text


@pytest.mark.parametrize("target", ["t\r\nX: y", "../t", "a/b", "t\0", "\u202e", "<t>"])
def test_a_tool_may_be_called_anything(
    target: str, caller: Caller, webhooks: Webhooks, kernel: EmbeddedKernel
) -> None:
    id = caller.client("POST", "/v0/executions", {"agent_id": "a1"}).json()["id"]
    path = f"/v0/executions/{id}"
    step = {"kind": "tool_call", "target": target}
    answer = caller.agent("POST", f"{path}/steps", step, lease=webhooks.next())
    assert answer.json()["decision"] == "proceed"
    with Client(kernel.url) as client:
        (kept,) = client.steps(id)
        assert client.step(id, kept.step_id).target == target
    assert "X" not in caller.client("GET", path).headers


def test_a_name_has_its_limit(caller: Caller, webhooks: Webhooks) -> None:
    id = caller.client("POST", "/v0/executions", {"agent_id": "a1"}).json()["id"]
    lease = webhooks.next()
    for length, status in ((1000, 200), (1001, 400)):
        step = {"kind": "tool_call", "target": "t" * length}
        answer = caller.agent("POST", f"/v0/executions/{id}/steps", step, lease=lease)
        assert answer.status_code == status


def test_an_unknown_agent_is_named_but_not_believed(kernel: EmbeddedKernel) -> None:
    with Client(kernel.url) as client, pytest.raises(NotFoundError) as refused:
        client.create("x\r\nX: y")
    assert "\n" not in str(refused.value)
