"""Who may ask: webhooks, agents, operators (PROTOCOL 3 and 9)."""

from __future__ import annotations

import time

import pytest

from rebuno_sync import signing
from tests.conformance.driver import Agent, Attempt, Kernel, Make, done, ok, refused

STEP = b'{"kind":"tool_call","target":"t","args":{},"idempotency":"safe_to_retry"}'
REFUSED_CODES = ("unauthorized",)


def steps_path(attempt: Attempt) -> str:
    return f"/v0/executions/{attempt.execution_id}/steps"


def signed(attempt: Attempt, path: str = "", **more: str) -> dict[str, str]:
    """The headers of a well-signed submission of ``STEP``."""
    return attempt.agent.headers(
        "POST", path or steps_path(attempt), STEP, attempt.dispatch_id, str(attempt.attempt), **more
    )


def body_signed(attempt: Attempt, body: bytes = STEP) -> dict[str, str]:
    return {
        "Rebuno-Agent-Id": attempt.agent.id,
        "Rebuno-Signature": signing.sign_body(attempt.agent.secret, body),
        "Rebuno-Dispatch-Id": attempt.dispatch_id,
        "Rebuno-Dispatch-Attempt": str(attempt.attempt),
    }


def test_webhook_is_signed_over_its_raw_body(attempt: Attempt) -> None:
    """3: kernel to agent, sha256 over the raw body, every generation."""
    delivery = attempt.delivery
    assert delivery.headers["rebuno-signature"] == signing.sign_body(
        attempt.agent.secret, delivery.body
    )


def test_request_signature_is_accepted(attempt: Attempt) -> None:
    """3: agent to kernel, request signature."""
    response = attempt.kernel.send_as(signed(attempt), "POST", steps_path(attempt), data=STEP)
    assert ok(response)["decision"] == "proceed"


@pytest.mark.parametrize("skew", [-290, 290])
def test_request_signature_within_300_seconds_is_accepted(attempt: Attempt, skew: int) -> None:
    """3: the kernel allows 300 s either way."""
    headers = signed(attempt, timestamp=str(int(time.time()) + skew))
    ok(attempt.kernel.send_as(headers, "POST", steps_path(attempt), data=STEP))


@pytest.mark.parametrize("skew", [-330, 330])
def test_request_signature_beyond_300_seconds_is_refused(attempt: Attempt, skew: int) -> None:
    """3: the kernel allows 300 s either way."""
    headers = signed(attempt, timestamp=str(int(time.time()) + skew))
    response = attempt.kernel.send_as(headers, "POST", steps_path(attempt), data=STEP)
    refused(response, 401, *REFUSED_CODES)


@pytest.mark.parametrize("timestamp", ["", "x", "1.5", "-1", "99999999999999999999999"])
def test_request_signature_with_a_malformed_timestamp_is_refused(
    attempt: Attempt, timestamp: str
) -> None:
    """3: Rebuno-Timestamp is decimal Unix seconds."""
    headers = signed(attempt, timestamp=timestamp)
    response = attempt.kernel.send_as(headers, "POST", steps_path(attempt), data=STEP)
    assert response.status_code in (400, 401)
    refused(response, response.status_code, "validation_error", "unauthorized")


def test_request_signature_without_a_timestamp_is_refused(attempt: Attempt) -> None:
    """3: the timestamp is one of the signed fields."""
    headers = signed(attempt)
    del headers["Rebuno-Timestamp"]
    response = attempt.kernel.send_as(headers, "POST", steps_path(attempt), data=STEP)
    assert response.status_code in (400, 401)


@pytest.mark.parametrize(
    "name", ["Rebuno-Dispatch-Id", "Rebuno-Dispatch-Attempt", "Rebuno-Timestamp"]
)
def test_request_signature_covers_the_headers(attempt: Attempt, name: str) -> None:
    """3: the message holds the timestamp and both dispatch headers."""
    other = attempt.agent.start()
    headers = signed(attempt)
    headers[name] = {
        "Rebuno-Dispatch-Id": other.dispatch_id,
        "Rebuno-Dispatch-Attempt": "2",
        "Rebuno-Timestamp": str(int(headers["Rebuno-Timestamp"]) + 1),
    }[name]
    response = attempt.kernel.send_as(headers, "POST", steps_path(attempt), data=STEP)
    refused(response, 401, *REFUSED_CODES)


def test_request_signature_covers_path_query_method_and_body(attempt: Attempt) -> None:
    """3: the message holds the method, the target exactly as sent, and the body."""
    other, path = attempt.agent.start(), steps_path(attempt)
    send = attempt.kernel.send_as
    refused(send(signed(attempt), "POST", steps_path(other), data=STEP), 401, *REFUSED_CODES)
    refused(send(signed(attempt), "POST", path + "?a=b", data=STEP), 401, *REFUSED_CODES)
    refused(send(signed(attempt), "POST", path, data=STEP + b" "), 401, *REFUSED_CODES)
    get = attempt.agent.headers("POST", path, b"")
    refused(send(get, "GET", path), 401, *REFUSED_CODES)
    assert attempt.steps() == []


def test_request_signature_over_a_query(attempt: Attempt) -> None:
    """3: the raw query is signed exactly as sent."""
    assert ok(attempt.send("GET", "/steps?status=terminal&x=%C3%A9&x=1%2F2")) in ([], None)


@pytest.mark.parametrize("signature", ["", "v1=", "v1=00", "sha256=", "é", "v2=abc"])
def test_a_wrong_signature_is_refused(attempt: Attempt, signature: str) -> None:
    """4: 401 unauthorized."""
    headers = {**signed(attempt), "Rebuno-Signature": signature}
    encoded = {name: value.encode("utf-8") for name, value in headers.items()}
    response = attempt.kernel.send_as(encoded, "POST", steps_path(attempt), data=STEP)  # type: ignore[arg-type]
    refused(response, 401, *REFUSED_CODES)


def test_an_unknown_agent_is_refused(attempt: Attempt) -> None:
    """4: 401 unauthorized."""
    headers = {**signed(attempt), "Rebuno-Agent-Id": "nobody"}
    response = attempt.kernel.send_as(headers, "POST", steps_path(attempt), data=STEP)
    refused(response, 401, *REFUSED_CODES)


def test_no_signature_at_all_is_refused(attempt: Attempt) -> None:
    """4: 401 unauthorized."""
    lease = {
        "Rebuno-Dispatch-Id": attempt.dispatch_id,
        "Rebuno-Dispatch-Attempt": str(attempt.attempt),
    }
    response = attempt.kernel.send_as(lease, "POST", steps_path(attempt), data=STEP)
    refused(response, 401, *REFUSED_CODES)


def test_a_bearer_token_is_no_agent_signature(attempt: Attempt) -> None:
    """4: agent routes take an agent signature; only reads take either."""
    refused(attempt.kernel.send("POST", steps_path(attempt), data=STEP), 401, *REFUSED_CODES)


@pytest.mark.parametrize("path", ["", "/steps", "/steps?status=terminal"])
def test_reads_take_a_signature_or_a_bearer(attempt: Attempt, path: str) -> None:
    """3: GET of an execution and its steps."""
    target = f"/v0/executions/{attempt.execution_id}{path}"
    assert ok(attempt.agent.send("GET", target)) == ok(attempt.kernel.send("GET", target))


def test_read_of_one_step_takes_a_signature_or_a_bearer(attempt: Attempt) -> None:
    """3: GET of an execution and its steps."""
    target = f"{steps_path(attempt)}/{attempt.proceed()}"
    assert ok(attempt.agent.send("GET", target)) == ok(attempt.kernel.send("GET", target))


def test_another_agents_execution_is_forbidden(attempt: Attempt) -> None:
    """4: 403 forbidden, not yours."""
    step = attempt.proceed()
    stranger = Attempt(attempt.kernel.agent(), attempt.delivery)
    for response in (
        stranger.submit(),
        stranger.complete_step(step, 1),
        stranger.fail_step(step, {"message": "x"}),
        stranger.stream(step, 0, "x"),
        stranger.heartbeat(),
        stranger.complete(1),
        stranger.fail("x"),
        stranger.send("GET", ""),
        stranger.send("GET", "/steps"),
        stranger.send("GET", f"/steps/{step}"),
    ):
        refused(response, 403, "forbidden")
    assert attempt.kernel.execution(attempt.execution_id)["status"] == "running"
    assert attempt.step(step)["status"] == "executing"


OPERATOR_ROUTES = [
    ("POST", "/v0/executions", {"agent_id": "a", "input": 1}),
    ("GET", "/v0/executions", None),
    ("GET", "/v0/executions/{id}", None),
    ("GET", "/v0/executions/{id}/steps", None),
    ("GET", "/v0/executions/{id}/events", None),
    ("GET", "/v0/executions/{id}/stream", None),
    ("POST", "/v0/executions/{id}/cancel", None),
    ("POST", "/v0/agents", {"id": "a", "webhook_url": "http://127.0.0.1:9/", "secret": "s"}),
    ("GET", "/v0/agents", None),
    ("GET", "/v0/agents/{agent}", None),
    ("DELETE", "/v0/agents/{agent}", None),
    ("POST", "/v0/policies/{agent}", {"bundle": "default_action: allow"}),
    ("GET", "/v0/approvals", None),
    ("GET", "/v0/approvals/{id}", None),
    ("POST", "/v0/approvals/{id}/grant", {"decided_by": "ann"}),
    ("POST", "/v0/approvals/{id}/deny", {"decided_by": "ann"}),
]


@pytest.mark.parametrize("token", [None, "wrong", "", "é"])
@pytest.mark.parametrize(("method", "path", "body"), OPERATOR_ROUTES)
def test_operator_routes_need_the_bearer_token(
    shared_kernel: Kernel, method: str, path: str, body: object, token: str | None
) -> None:
    """3 and 4: Authorization: Bearer, when there is a token; else 401."""
    if shared_kernel.token is None:
        pytest.skip("this kernel has no token")
    agent = shared_kernel.agent()
    execution_id = agent.create()
    headers = {} if token is None else {"Authorization": f"Bearer {token}".encode()}
    path = path.format(id=execution_id, agent=agent.id)
    response = shared_kernel.send_as(headers, method, path, body)  # type: ignore[arg-type]
    refused(response, 401, "unauthorized")
    assert shared_kernel.execution(execution_id)["status"] == "running"
    ok(shared_kernel.send("GET", f"/v0/agents/{agent.id}"))


@pytest.mark.parametrize("path", ["/v0/health", "/v0/ready", "/metrics"])
def test_health_ready_and_metrics_need_no_authentication(shared_kernel: Kernel, path: str) -> None:
    """9: no authentication."""
    assert shared_kernel.send_as({}, "GET", path).status_code == 200


def test_body_signature_is_accepted(kernel: Kernel) -> None:
    """9: the embedded kernel accepts body signatures unless told otherwise."""
    if not kernel.embedded:
        pytest.skip("current kernels refuse body signatures")
    attempt = kernel.agent().start()
    response = kernel.send_as(body_signed(attempt), "POST", steps_path(attempt), data=STEP)
    assert ok(response)["decision"] == "proceed"
    heartbeat = f"/v0/executions/{attempt.execution_id}/heartbeat"
    done(kernel.send_as(body_signed(attempt, b""), "POST", heartbeat))
    wrong = body_signed(attempt, STEP + b" ")
    refused(kernel.send_as(wrong, "POST", steps_path(attempt), data=STEP), 401, "unauthorized")


def test_body_signature_is_refused_when_so_started(make_kernel: Make) -> None:
    """9: unless it was started with body signatures refused."""
    kernel = make_kernel(accept_body_signatures=False)
    attempt = kernel.agent().start()
    response = kernel.send_as(body_signed(attempt), "POST", steps_path(attempt), data=STEP)
    refused(response, 401, "unauthorized")
    ok(kernel.send_as(signed(attempt), "POST", steps_path(attempt), data=STEP))


def generation_1(agent: Agent, attempt: Attempt, path: str, body: bytes) -> dict[str, str]:
    headers = {
        "Rebuno-Agent-Id": agent.id,
        "Rebuno-Signature": signing.sign_body(agent.secret, body),
    }
    return {**headers, "Rebuno-Dispatch-Id": attempt.dispatch_id} if path == "/steps" else headers


def test_generation_1_agents_are_accepted_when_so_configured(make_kernel: Make) -> None:
    """2 and 9: a submission has no attempt header; other mutations have no lease at all."""
    kernel = make_kernel(accept_generation_1=True)
    agent = kernel.agent()
    attempt = agent.start()

    def send(path: str, body: bytes = b"") -> object:
        target = f"/v0/executions/{attempt.execution_id}{path}"
        headers = generation_1(agent, attempt, path, body)
        response = kernel.send_as(headers, "POST", target, data=body)
        return None if response.status_code == 204 else ok(response)

    decision = send("/steps", STEP)
    assert isinstance(decision, dict)
    assert decision["decision"] == "proceed"
    recorded = send(f"/steps/{decision['step_id']}/complete", b'{"result":1}')
    assert recorded == {"decision": "recorded"}
    assert send("/heartbeat") is None
    assert send("/complete", b'{"output":2}') is None
    assert kernel.execution(attempt.execution_id)["output"] == 2


def test_generation_1_agents_are_refused_otherwise(attempt: Attempt) -> None:
    """9: accepted only if so configured."""
    if not attempt.kernel.embedded:
        pytest.skip("needs a kernel whose configuration is known")
    headers = generation_1(attempt.agent, attempt, "/steps", STEP)
    response = attempt.kernel.send_as(headers, "POST", steps_path(attempt), data=STEP)
    refused(response, 400, "validation_error")
