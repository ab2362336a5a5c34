"""The HTTP routes: who may call them, what they refuse, what they answer."""

from __future__ import annotations

import contextlib
import threading
import time
import uuid
from collections.abc import Callable
from typing import Any

import pytest

from rebuno_sync import signing
from rebuno_sync.kernel import EmbeddedKernel, dispatch
from rebuno_sync.kernel.clock import Clock
from tests.unit.kernel.agent_double import PATIENCE, Caller, Webhooks, eventually
from tests.unit.kernel.conftest import manifest

NOTHING = str(uuid.uuid4())


def create(caller: Caller, **body: Any) -> dict[str, Any]:
    answer = caller.client("POST", "/v0/executions", {"agent_id": "a1", **body})
    assert answer.status_code == 201, answer.text
    return dict(answer.json())


def refused(answer: Any, status: int, code: str, word: str = "") -> None:
    assert (answer.status_code, answer.json()["code"]) == (status, code), answer.text
    assert word in answer.json()["message"]


# Authentication


@pytest.mark.parametrize("body_signature", [True, False])
def test_either_signature_will_do(body_signature: bool, caller: Caller, webhooks: Webhooks) -> None:
    path = f"/v0/executions/{create(caller)['id']}"
    lease = webhooks.next()
    step = {"kind": "tool_call", "target": "t", "args": {"a": 1}}
    answer = caller.agent("POST", f"{path}/steps", step, lease=lease, body_signature=body_signature)
    assert answer.json()["decision"] == "proceed"
    for read in (path, f"{path}/steps", f"{path}/steps?status=executing&x=%20%2F"):
        assert caller.agent("GET", read, body_signature=body_signature).status_code == 200


def test_body_signatures_can_be_refused(
    kernels: Callable[..., EmbeddedKernel], webhooks: Webhooks
) -> None:
    kernel = kernels(manifest=manifest(webhooks), accept_body_signatures=False)
    caller = Caller(kernel.url)
    path = f"/v0/executions/{create(caller)['id']}"
    refused(caller.agent("GET", path, body_signature=True), 401, "unauthorized", "v1=")
    assert caller.agent("GET", path).status_code == 200
    caller.close()


@pytest.mark.parametrize(
    "headers",
    [
        {"Rebuno-Signature": "v1=00"},
        {"Rebuno-Signature": "v2=00"},
        {"Rebuno-Signature": "sha256=00"},
        {"Rebuno-Signature": ""},
        {"Rebuno-Agent-Id": ""},
        {"Rebuno-Agent-Id": "nobody"},
        {"Rebuno-Agent-Id": "a2"},
        {"Rebuno-Timestamp": ""},
        {"Rebuno-Timestamp": "soon"},
        {"Rebuno-Timestamp": "-5"},
        {"Rebuno-Timestamp": str(int(time.time()) - 301)},
        {"Rebuno-Timestamp": str(int(time.time()) + 400)},
        {"Rebuno-Dispatch-Id": NOTHING},
        {"Rebuno-Dispatch-Attempt": "7"},
    ],
)
def test_a_request_that_was_not_signed_so_is_refused(
    headers: dict[str, str], caller: Caller, webhooks: Webhooks
) -> None:
    other = {"id": "a2", "webhook_url": webhooks.url, "secret": "another"}
    assert caller.client("POST", "/v0/agents", other).status_code == 201
    path = f"/v0/executions/{create(caller)['id']}/heartbeat"
    lease = webhooks.next()
    assert caller.agent("POST", path, lease=lease).status_code == 204
    refused(caller.agent("POST", path, lease=lease, extra=headers), 401, "unauthorized")


def test_a_signature_is_of_one_request(caller: Caller, webhooks: Webhooks) -> None:
    path = f"/v0/executions/{create(caller)['id']}"
    timestamp = str(int(time.time()))
    signature = signing.sign_request(caller.secret, "GET", path, timestamp, b"")
    headers = {
        "Rebuno-Agent-Id": "a1",
        "Rebuno-Timestamp": timestamp,
        "Rebuno-Signature": signature,
    }
    session = caller.session
    assert session.get(caller.url + path, headers=headers).status_code == 200
    assert session.get(f"{caller.url}{path}?x=1", headers=headers).status_code == 401
    assert session.get(f"{caller.url}{path}/steps", headers=headers).status_code == 401
    assert session.get(caller.url + path, headers=headers, data=b"x").status_code == 401
    assert session.head(caller.url + path, headers=headers).status_code == 401


def test_signatures_follow_the_machine_s_clock(kernel: EmbeddedKernel, caller: Caller) -> None:
    path = f"/v0/executions/{create(caller)['id']}"
    kernel.advance(100_000)
    assert caller.agent("GET", path).status_code == 200


def test_another_agent_may_not_read(caller: Caller, webhooks: Webhooks) -> None:
    other = {"id": "a2", "webhook_url": webhooks.url, "secret": "another"}
    caller.client("POST", "/v0/agents", other)
    path = f"/v0/executions/{create(caller)['id']}"
    stranger = Caller(caller.url, "a2", "another")
    for read in (path, f"{path}/steps", f"{path}/previous"):
        refused(stranger.agent("GET", read), 403, "forbidden")
    refused(stranger.agent("PUT", "/v0/agents/a1/metadata", {}), 403, "forbidden")
    stranger.close()


def test_a_token_guards_what_is_not_an_agent_s(
    kernels: Callable[..., EmbeddedKernel], webhooks: Webhooks
) -> None:
    kernel = kernels(manifest=manifest(webhooks), bearer_token="tökén")
    caller = Caller(kernel.url)
    token = {"Authorization": "Bearer tökén".encode().decode("latin-1")}
    execution = caller.client("POST", "/v0/executions", {"agent_id": "a1"}, **token)
    assert execution.status_code == 201
    path = f"/v0/executions/{execution.json()['id']}"
    guarded = [
        ("POST", "/v0/executions"),
        ("GET", "/v0/executions"),
        ("GET", path),
        ("GET", f"{path}/steps"),
        ("GET", f"{path}/events"),
        ("GET", f"{path}/stream"),
        ("POST", f"{path}/cancel"),
        ("POST", "/v0/agents"),
        ("GET", "/v0/agents"),
        ("GET", "/v0/agents/a1"),
        ("DELETE", "/v0/agents/a1"),
        ("POST", "/v0/policies/a1"),
        ("GET", "/v0/approvals"),
        ("GET", f"/v0/approvals/{NOTHING}"),
        ("POST", f"/v0/approvals/{NOTHING}/grant"),
        ("POST", f"/v0/approvals/{NOTHING}/deny"),
    ]
    for method, route in guarded:
        for authorization in ("", "Bearer other", "Basic tökén", "Bearer"):
            header = {"Authorization": authorization.encode().decode("latin-1")}
            refused(caller.client(method, route, **header), 401, "unauthorized")
    assert caller.client("GET", path, **token).status_code == 200
    assert caller.agent("GET", path).status_code == 200
    for route in ("/v0/health", "/v0/ready"):
        assert caller.client("GET", route).status_code == 200
    # A token is no signature.
    refused(caller.client("POST", f"{path}/heartbeat", **token), 401, "unauthorized")
    caller.close()


# Leases in headers


@pytest.mark.parametrize(
    ("lease", "status", "word"),
    [
        ({}, 400, "Rebuno-Dispatch-Id is missing"),
        ({"dispatch_id": NOTHING}, 400, "Rebuno-Dispatch-Attempt is missing"),
        ({"dispatch_id": "zzz", "dispatch_attempt": "1"}, 400, "UUID"),
        ({"dispatch_id": NOTHING, "dispatch_attempt": "0"}, 400, "at least 1"),
        ({"dispatch_id": NOTHING, "dispatch_attempt": "-1"}, 400, "at least 1"),
        ({"dispatch_id": NOTHING, "dispatch_attempt": "1.0"}, 400, "at least 1"),
        ({"dispatch_id": NOTHING, "dispatch_attempt": "x"}, 400, "at least 1"),
        ({"dispatch_id": NOTHING, "dispatch_attempt": "1"}, 409, "no dispatch"),
    ],
)
def test_leases_that_will_not_do(
    lease: dict[str, Any], status: int, word: str, caller: Caller, webhooks: Webhooks
) -> None:
    path = f"/v0/executions/{create(caller)['id']}"
    good = webhooks.next()
    step = caller.agent("POST", f"{path}/steps", {"kind": "local", "target": "t"}, lease=good)
    step_path = f"{path}/steps/{step.json()['step_id']}"
    calls: list[tuple[str, Any]] = [
        (f"{path}/steps", {"kind": "local", "target": "t"}),
        (f"{step_path}/complete", {"result": 1}),
        (f"{step_path}/fail", {"error": 1}),
        (f"{step_path}/stream", {"seq": 0, "data": ""}),
        (f"{path}/heartbeat", None),
        (f"{path}/complete", {"output": 1}),
        (f"{path}/fail", {"error": ""}),
    ]
    code = "validation_error" if status == 400 else "lease_superseded"
    headers = {}
    if "dispatch_id" in lease:
        headers["Rebuno-Dispatch-Id"] = lease["dispatch_id"]
    if "dispatch_attempt" in lease:
        headers["Rebuno-Dispatch-Attempt"] = lease["dispatch_attempt"]
    for route, body in calls:
        refused(caller.agent("POST", route, body, lease=lease or None), status, code, word)
    assert caller.agent("POST", f"{path}/heartbeat", lease=good).status_code == 204


def test_generation_2_streams_without_a_lease(caller: Caller, webhooks: Webhooks) -> None:
    path = f"/v0/executions/{create(caller)['id']}/steps"
    lease = webhooks.next()
    step = caller.agent("POST", path, {"kind": "local", "target": "t"}, lease=lease).json()
    delta = f"{path}/{step['step_id']}/stream"
    assert caller.agent("POST", delta, {"seq": 0, "data": "x"}, body_signature=True).ok
    refused(caller.agent("POST", delta, {"seq": 0, "data": "x"}), 400, "validation_error")


# Bodies


@pytest.mark.parametrize(
    ("body", "word"),
    [
        (b"", "no body"),
        (b" ", "no body"),
        (b"{", "not a JSON object"),
        (b"[]", "not a JSON object"),
        (b"null", "not a JSON object"),
        (b'{"agent_id":"a1"}x', "not a JSON object"),
        (b"\xef\xbb\xbf{}", "not a JSON object"),
        (b'{"agent_id":"a1","input":NaN}', "NaN"),
        (b'{"agent_id":"a1","input":01}', "not a JSON object"),
        (b"{}", "agent_id is missing"),
        (b'{"agent_id":""}', "agent_id is missing"),
        (b'{"agent_id":null}', "agent_id is missing"),
        (b'{"agent_id":7}', "agent_id must be text"),
        (b'{"agent_id":"a1","Input":1}', "unknown field 'Input'"),
        (b'{"agent_id":"a1","session":[]}', "session must be text"),
        (b'{"agent_id":"a1","parent_execution_id":"x"}', "parent_execution_id must be a UUID"),
        (b'{"agent_id":"a1","spawned_by":"x"}', "spawned_by must be an object"),
        (b'{"agent_id":"a1","spawned_by":{"step_id":"x"}}', "spawned_by must be an object"),
    ],
)
def test_malformed_creations(body: bytes, word: str, caller: Caller) -> None:
    refused(caller.client("POST", "/v0/executions", body), 400, "validation_error", word)
    assert caller.client("GET", "/v0/executions").json() == {"executions": []}


@pytest.mark.parametrize(
    ("body", "word"),
    [
        (b'{"target":"t"}', "kind is missing"),
        (b'{"kind":"dance","target":"t"}', "kind must be one of tool_call"),
        (b'{"kind":"local"}', "target is missing"),
        (b'{"kind":"local","target":""}', "target is missing"),
        (b'{"kind":"local","target":7}', "target must be text"),
        (b'{"kind":"local","target":"t","idempotency":"maybe"}', "idempotency must be one of"),
        (b'{"kind":"local","target":"t","extra":[]}', "unknown field 'extra'"),
        (b'{"kind":"local","target":"t","resources":["disk"]}', "resources names some"),
        (b'{"kind":"local","target":"t","args":}', "not a JSON object"),
    ],
)
def test_malformed_submissions(body: bytes, word: str, caller: Caller, webhooks: Webhooks) -> None:
    path = f"/v0/executions/{create(caller)['id']}/steps"
    answer = caller.agent("POST", path, body, lease=webhooks.next())
    refused(answer, 400, "validation_error", word)
    assert caller.client("GET", path).json() == []


def test_values_keep_their_very_text(caller: Caller, webhooks: Webhooks) -> None:
    created = caller.client(
        "POST", "/v0/executions", b'{"agent_id":"a1","input": {"n": 1.50, "big":1e400} }'
    )
    assert b'"input":{"n": 1.50, "big":1e400}' in created.content
    path = f"/v0/executions/{created.headers and created.text.split(chr(34))[3]}"
    lease = webhooks.next()
    step = caller.agent(
        "POST",
        f"{path}/steps",
        b'{"kind":"local","target":"t","args":[ -0, 123456789012345678901234567890 ]}',
        lease=lease,
    ).json()["step_id"]
    caller.agent("POST", f"{path}/steps/{step}/complete", b'{"result":1.0}', lease=lease)
    text = caller.client("GET", f"{path}/steps/{step}").content
    assert b'"args":[ -0, 123456789012345678901234567890 ]' in text
    assert b'"result":1.0,' in text
    caller.agent("POST", f"{path}/complete", b'{"output":"\\ud800\xff<"}', lease=lease)
    # What is no Unicode is mended; nothing else is touched.
    assert '"output":"\\ufffd\ufffd<"'.encode() in caller.client("GET", path).content
    assert b'"output":"\\ufffd' in caller.client("GET", f"{path}/events").content


def test_absent_args_are_null(caller: Caller, webhooks: Webhooks) -> None:
    path = f"/v0/executions/{create(caller)['id']}/steps"
    lease = webhooks.next()
    first = caller.agent("POST", path, b'{"kind":"local","target":"t"}', lease=lease).json()
    body = b'{"kind":"local","target":"t","args":null,"idempotency":null}'
    second = caller.agent("POST", path, body, lease=lease).json()
    steps = caller.client("GET", path).json()
    assert [step["step_id"] for step in steps] == [first["step_id"], second["step_id"]]
    assert [step["occurrence"] for step in steps] == [0, 1]
    assert steps[0]["args_hash"] == steps[1]["args_hash"]


# Ids and routes


def test_malformed_and_unknown_ids(caller: Caller) -> None:
    for route in ("", "/steps", "/events", "/stream"):
        malformed = caller.client("GET", f"/v0/executions/not-a-uuid{route}")
        refused(malformed, 400, "validation_error", "UUID")
        refused(caller.client("GET", f"/v0/executions/{NOTHING}{route}"), 404, "not_found")
    refused(caller.client("POST", f"/v0/executions/{NOTHING}/cancel"), 404, "not_found")
    refused(caller.client("GET", "/v0/approvals/x"), 400, "validation_error", "UUID")
    for route in (f"/v0/approvals/{NOTHING}/grant", f"/v0/approvals/{NOTHING}/deny"):
        refused(caller.client("POST", route, {"decided_by": "ann"}), 404, "not_found")
    refused(caller.client("POST", "/v0/policies/nobody", {"bundle": ""}), 404, "not_found")
    refused(caller.client("DELETE", "/v0/agents/nobody"), 404, "not_found")


def test_ids_are_read_in_either_case(caller: Caller, webhooks: Webhooks) -> None:
    path = f"/v0/executions/{create(caller)['id'].upper()}"
    lease = webhooks.next()
    lease["dispatch_id"] = lease["dispatch_id"].upper()
    step = {"kind": "local", "target": "t"}
    step_id = caller.agent("POST", f"{path}/steps", step, lease=lease).json()["step_id"]
    assert [s["step_id"] for s in caller.client("GET", f"{path}/steps").json()] == [step_id]
    assert len(caller.client("GET", f"{path}/events").json()) == 7


def test_ids_are_uuids_of_version_7_in_order(caller: Caller, webhooks: Webhooks) -> None:
    ids = [create(caller)["id"] for _ in range(20)]
    assert ids == sorted(ids)
    parsed = [uuid.UUID(id) for id in [*ids, webhooks.next()["dispatch_id"]]]
    assert all(id.version == 7 and id.variant == uuid.RFC_4122 for id in parsed)
    assert all(abs((id.int >> 80) / 1000 - time.time()) < 60 for id in parsed)


def test_unknown_routes_and_methods(caller: Caller) -> None:
    for route in ("/v0", "/v0/nothing", "/v0/agents/", f"/v0/executions/{NOTHING}/suspend"):
        answer = caller.client("POST", route, {})
        assert (answer.status_code, answer.text) == (404, "404 page not found\n")
    answer = caller.client("PUT", "/v0/executions")
    assert (answer.status_code, answer.content) == (405, b"")


# Executions


def test_optional_fields_are_kept(caller: Caller) -> None:
    parent = create(caller)["id"]
    fields = {
        "session": "s",
        "parent_execution_id": parent,
        "idempotency_key": "k",
        "spawned_by": {"execution_id": parent, "step_id": "0" * 64},
        "on_behalf_of": "ann",
        "input": [1],
    }
    created = create(caller, **fields)
    assert {name: created[name] for name in fields} == fields
    read = caller.client("GET", f"/v0/executions/{created['id']}").json()
    assert read == {**created, "updated_at": read["updated_at"]}
    assert create(caller, idempotency_key="k")["id"] == created["id"]
    plain = create(caller)
    assert plain.keys() == {"id", "agent_id", "input", "status", "created_at", "updated_at"}


def test_previous(caller: Caller, webhooks: Webhooks) -> None:
    def previous_of(parent: str | None, **output: Any) -> tuple[Any, str]:
        more = {} if parent is None else {"parent_execution_id": parent}
        id = create(caller, **more)["id"]
        lease = webhooks.next()
        state = caller.agent("GET", f"/v0/executions/{id}/previous").json()
        done = caller.agent("POST", f"/v0/executions/{id}/complete", output, lease=lease)
        assert done.status_code == 204
        return state, id

    state, first = previous_of(None, output="out")
    assert state == {"state": None}
    state, second = previous_of(first, output="out", state={"turn": 2})
    assert state == {"state": "out"}
    state, _ = previous_of(second, output=None)
    assert state == {"state": {"turn": 2}}
    refused(caller.client("GET", f"/v0/executions/{first}/previous"), 401, "unauthorized")


def test_pages_of_executions(caller: Caller) -> None:
    ids = [create(caller, session=f"s{i % 2}")["id"] for i in range(5)]
    caller.client("POST", f"/v0/executions/{ids[0]}/cancel")

    def page(query: str = "") -> tuple[list[str], str | None]:
        answer = caller.client("GET", f"/v0/executions?{query}").json()
        return [e["id"] for e in answer["executions"]], answer.get("next_cursor")

    assert page() == (ids[::-1], None)
    assert page("limit=2") == (ids[:2:-1], ids[3])
    assert page(f"limit=2&cursor={ids[3]}") == ([ids[2], ids[1]], ids[1])
    assert page(f"limit=2&cursor={ids[1]}") == ([ids[0]], None)
    assert page("limit=5") == (ids[::-1], None)
    assert page("limit=100000") == (ids[::-1], None)
    assert page("session=s1") == ([ids[3], ids[1]], None)
    assert page("status=cancelled&agent_id=a1") == ([ids[0]], None)
    assert page("agent_id=other") == ([], None)
    for query in ("limit=0", "limit=-1", "limit=x", "limit=1.5", "limit=²", "cursor=x"):
        refused(caller.client("GET", f"/v0/executions?{query}"), 400, "validation_error")
    refused(caller.client("GET", f"/v0/executions?cursor={NOTHING}"), 400, "validation_error")


def test_pages_of_events(caller: Caller, webhooks: Webhooks) -> None:
    id = create(caller)["id"]
    eventually(lambda: len(caller.client("GET", f"/v0/executions/{id}/events").json()) == 4)

    def page(query: str) -> list[int]:
        answer = caller.client("GET", f"/v0/executions/{id}/events?{query}")
        return [event["event_seq"] for event in answer.json()]

    assert page("limit=2") == [1, 2]
    assert page("after_seq=2&limit=2") == [3, 4]
    assert page("after_seq=4") == []
    assert page("limit=5000") == [1, 2, 3, 4]
    assert page("after_seq=-7") == [1, 2, 3, 4]
    assert page(f"after_seq={10**30}") == []
    refused(caller.client("GET", f"/v0/executions/{id}/events?limit=x"), 400, "validation_error")


# Agents and approvals


def test_an_agent_s_secret_is_told_nobody(caller: Caller, webhooks: Webhooks) -> None:
    agent = {"id": "a2", "webhook_url": webhooks.url, "secret": "much-secret"}
    answers = [
        caller.client("POST", "/v0/agents", {**agent, "lease_timeout_seconds": 7}),
        caller.client("GET", "/v0/agents"),
        caller.client("GET", "/v0/agents/a2"),
        caller.client("POST", "/v0/agents", {**agent, "webhook_url": "much-secret"}),
    ]
    assert [answer.status_code for answer in answers] == [201, 200, 200, 400]
    assert answers[2].json()["lease_timeout_seconds"] == 7
    for answer in answers[:3]:
        assert "much-secret" not in answer.text


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"id": None}, "id is missing"),
        ({"webhook_url": ""}, "webhook_url is missing"),
        ({"webhook_url": "x"}, "webhook_url must be"),
        ({"secret": None}, "secret is missing"),
        ({"lease_timeout_seconds": "5"}, "lease_timeout_seconds must be a number"),
        ({"lease_timeout_seconds": 10**400}, "lease_timeout_seconds must be a number"),
        ({"lease_timeout_seconds": True}, "lease_timeout_seconds must be a number"),
        ({"lease_timeout_seconds": 0}, "lease_timeout_seconds must be a number above 0"),
        ({"surprise": 1}, "unknown field"),
    ],
)
def test_agents_that_will_not_do(change: dict[str, Any], word: str, caller: Caller) -> None:
    agent = {"id": "a2", "webhook_url": "http://x/", "secret": "s", **change}
    refused(caller.client("POST", "/v0/agents", agent), 400, "validation_error", word)
    refused(caller.client("GET", "/v0/agents/a2"), 404, "not_found")


def test_metadata(caller: Caller) -> None:
    described = {"description": "d", "input_schema": {"type": "object"}, "output_schema": None}
    assert caller.agent("PUT", "/v0/agents/a1/metadata", described).status_code == 204
    agent = caller.client("GET", "/v0/agents/a1").json()
    assert (agent["description"], agent["input_schema"]) == ("d", {"type": "object"})
    assert "output_schema" not in agent
    assert caller.agent("PUT", "/v0/agents/a1/metadata", {}).status_code == 204
    assert "description" not in caller.client("GET", "/v0/agents/a1").json()
    refused(caller.agent("PUT", "/v0/agents/a1/metadata", {"tools": []}), 400, "validation_error")


def test_policies_and_approvals(caller: Caller, webhooks: Webhooks) -> None:
    bundle = "rules: [{id: ask, then: {decision: require_approval}}]"
    assert caller.client("POST", "/v0/policies/a1", {"bundle": bundle}).status_code == 204
    for bad in ({"bundle": "rules: [{}]"}, {"bundle": 7}, {}, {"bundle": bundle, "x": 1}):
        refused(caller.client("POST", "/v0/policies/a1", bad), 400, "validation_error")
    assert caller.client("GET", "/v0/agents/a1").json()["policy_bundle"] == bundle
    assert caller.client("GET", "/v0/approvals").json() == []

    path = f"/v0/executions/{create(caller)['id']}/steps"
    step = {"kind": "tool_call", "target": "t"}
    asked = caller.agent("POST", path, step, lease=webhooks.next()).json()
    (approval,) = caller.client("GET", "/v0/approvals").json()
    assert approval == caller.client("GET", f"/v0/approvals/{asked['approval_id']}").json()
    assert approval.keys() == {
        "id",
        "step_id",
        "execution_id",
        "status",
        "approvers",
        "created_at",
    }
    decide = f"/v0/approvals/{approval['id']}"
    refused(caller.client("POST", f"{decide}/grant", {"by": "x"}), 400, "validation_error")
    refused(caller.client("POST", f"{decide}/grant", {"decided_by": 7}), 400, "validation_error")
    decision = {"decided_by": "ann", "rationale": "ok"}
    assert caller.client("POST", f"{decide}/grant", decision).status_code == 204
    decided = caller.client("GET", decide).json()
    assert (decided["status"], decided["decided_by"], decided["rationale"]) == (
        "granted",
        "ann",
        "ok",
    )
    assert caller.client("GET", "/v0/approvals").json() == []
    refused(caller.client("POST", f"{decide}/deny", decision), 409, "conflict")
    assert caller.agent("POST", path, step, lease=webhooks.next()).json() == {
        "decision": "proceed",
        "step_id": asked["step_id"],
    }


def test_metrics_count_what_there_is(
    kernel: EmbeddedKernel, caller: Caller, webhooks: Webhooks
) -> None:
    webhooks.answer = lambda body: 500
    ids = [create(caller)["id"] for _ in range(3)]
    caller.client("POST", f"/v0/executions/{ids[0]}/cancel")
    for _ in ids:
        webhooks.next()

    def figures() -> dict[str, float]:
        answer = caller.client("GET", "/metrics")
        assert answer.headers["Content-Type"].startswith("text/plain; version=0.0.4")
        rows = [row for row in answer.text.splitlines() if not row.startswith("#")]
        return {name: float(value) for name, value in (row.rsplit(" ", 1) for row in rows)}

    eventually(lambda: figures()["rebuno_dispatches_queued"] == 2)
    webhooks.answer = lambda body: 200
    kernel.advance(10)
    # A dispatch is in flight from its claim on, and delivered when its agent has answered.
    eventually(lambda: figures()['rebuno_delivery_seconds_bucket{le="+Inf"}'] == 2)
    found = figures()
    expected = {
        'rebuno_executions{status="cancelled"}': 1,
        'rebuno_executions{status="running"}': 2,
        "rebuno_dispatches_queued": 0,
        "rebuno_dispatch_overdue_seconds": 0,
        "rebuno_dispatches_in_flight": 2,
        "rebuno_approvals_pending": 0,
        "rebuno_replay_ratio": 0,
        "rebuno_lease_reclaims_total": 0,
    }
    assert {name: found[name] for name in expected} == expected


def test_metrics_tell_how_long_the_queue_has_been_overdue(
    kernels: Callable[..., EmbeddedKernel], webhooks: Webhooks
) -> None:
    standing = Clock(source=lambda: 1_790_000_000.0)  # moved by the test alone
    kernel = kernels(manifest=manifest(webhooks), clock=standing)
    release = threading.Event()
    webhooks.answer = lambda body: 200 if release.wait(PATIENCE) else 500

    with contextlib.closing(Caller(kernel.url)) as caller:

        def figure(name: str) -> float:
            rows = caller.client("GET", "/metrics").text.splitlines()
            (row,) = (row for row in rows if row.startswith(f"rebuno_{name} "))
            return float(row.rsplit(" ", 1)[1])

        def overdue() -> float:
            return figure("dispatch_overdue_seconds")

        # As many as one agent is sent at a time, none of which it answers.
        for _ in range(dispatch._MAX_DELIVERIES_PER_AGENT):
            create(caller)
            webhooks.next()
        assert (figure("dispatches_queued"), overdue()) == (0, 0)
        create(caller)
        kernel.advance(4)
        assert (figure("dispatches_queued"), overdue()) == (1, 4)
        create(caller)
        kernel.advance(6)
        assert (figure("dispatches_queued"), overdue()) == (2, 10)
        release.set()
        eventually(lambda: figure("dispatches_queued") == 0)
        assert overdue() == 0


def test_metrics_tell_steps_decisions_replays_and_lost_leases(
    kernel: EmbeddedKernel, caller: Caller, webhooks: Webhooks
) -> None:
    execution_id = create(caller)["id"]
    path = f"/v0/executions/{execution_id}/steps"
    step = {"kind": "tool_call", "target": "t", "args": {}}
    lease = webhooks.next()
    step_id = caller.agent("POST", path, step, lease=lease).json()["step_id"]
    caller.agent("POST", f"{path}/{step_id}/complete", {"result": 1}, lease=lease)
    kernel.advance(121)
    assert caller.agent("POST", path, step, lease=webhooks.next()).json()["decision"] == "replay"
    text = caller.client("GET", "/metrics").text
    for row in (
        'rebuno_steps{kind="tool_call",status="succeeded"} 1.0',
        'rebuno_submissions{decision="proceed",kind="tool_call"} 1.0',
        'rebuno_submissions{decision="replay",kind="tool_call"} 1.0',
        "rebuno_replay_ratio 0.5",
        "rebuno_lease_reclaims_total 1.0",
    ):
        assert row in text.splitlines()


# Live output


def test_deltas_that_will_not_do(caller: Caller, webhooks: Webhooks) -> None:
    path = f"/v0/executions/{create(caller)['id']}/steps"
    lease = webhooks.next()
    step = caller.agent("POST", path, {"kind": "local", "target": "t"}, lease=lease).json()
    delta = f"{path}/{step['step_id']}/stream"
    good = {"seq": 0, "data": "é" * 3500}
    assert caller.agent("POST", delta, good, lease=lease).status_code == 204
    for bad in (
        {"seq": 0, "data": "é" * 3500 + "x"},
        {"seq": -1, "data": ""},
        {"seq": 1.0, "data": ""},
        {"seq": True, "data": ""},
        {"seq": "0", "data": ""},
        {"seq": 2**63, "data": ""},
        {"data": ""},
        {"seq": 0},
        {"seq": 0, "data": 7},
        {"seq": 0, "data": "", "x": 1},
    ):
        refused(caller.agent("POST", delta, bad, lease=lease), 400, "validation_error")
    unknown = f"{path}/{'0' * 64}/stream"
    refused(caller.agent("POST", unknown, good, lease=lease), 404, "not_found")
    caller.agent("POST", f"{path}/{step['step_id']}/complete", {"result": 1}, lease=lease)
    refused(caller.agent("POST", delta, good, lease=lease), 409, "conflict")


def test_what_fails_inside_is_told_without_its_secrets(
    kernel: EmbeddedKernel, caller: Caller, caplog: pytest.LogCaptureFixture
) -> None:
    kernel.app.view_functions["health"] = lambda: 1 / 0
    answer = caller.client("GET", "/v0/health")
    refused(answer, 500, "internal_error", "ZeroDivisionError")
    assert "division by zero" not in answer.text
    assert "division by zero" in caplog.text
