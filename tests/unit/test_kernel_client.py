"""What an agent says to its kernel: signatures, lease headers, bodies, odd answers."""

from __future__ import annotations

import json
import time
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from rebuno_sync import Client, signing, wire
from rebuno_sync import kernel_client as kernel_client_module
from rebuno_sync import transport as transport_module
from rebuno_sync.agent_secrets import Secrets
from rebuno_sync.errors import (
    APIError,
    ConflictError,
    NetworkError,
    NotFoundError,
    UnauthorizedError,
)
from rebuno_sync.kernel import EmbeddedKernel
from rebuno_sync.kernel_client import KernelClient, Signature
from rebuno_sync.lease import Lease
from rebuno_sync.transport import Answer as Received
from rebuno_sync.transport import Transport
from rebuno_sync.wire import Dispatch, Idempotency, Kind
from tests.scripted import (
    GENERATION_1,
    GENERATION_2,
    GENERATION_3,
    Answer,
    Generation,
    Recorded,
    ScriptedKernel,
)
from tests.scripted.http import Server
from tests.scripted.state import Execution
from tests.unit.support import dispatch


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport_module, "_FIRST_PAUSE", 0.001)
    monkeypatch.setattr(transport_module, "_LONGEST_PAUSE", 0.001)


def client_of(kernel: ScriptedKernel, signature: Signature = "auto") -> KernelClient:
    return KernelClient(
        kernel.agent_id, Secrets(kernel.secret), Transport(kernel.url, timeout=30), signature
    )


def begin(kernel: ScriptedKernel, input: Any = None) -> tuple[Execution, Lease]:
    run = kernel.create(input)
    kernel.take(run)
    attempt = run.attempt if kernel.generation.sends_attempt else None
    return run, Lease(dispatch(attempt, execution_id=run.id, dispatch_id=run.dispatch_id))


def submit(
    client: KernelClient, run: Execution, lease: Lease, args: bytes = b"{}"
) -> wire.Decision:
    return client.submit(run.id, lease, Kind.TOOL_CALL, "t", args, Idempotency.AT_MOST_ONCE)


@pytest.fixture(params=[GENERATION_1, GENERATION_2, GENERATION_3], ids=str)
def kernel(request: pytest.FixtureRequest) -> Iterator[ScriptedKernel]:
    with ScriptedKernel(request.param) as kernel:
        yield kernel


@pytest.fixture
def kernel3() -> Iterator[ScriptedKernel]:
    with ScriptedKernel(GENERATION_3) as kernel:
        yield kernel


# Every call, in every generation


def test_every_call(kernel: ScriptedKernel) -> None:
    run, lease = begin(kernel, {"n": 10**30, "x": 1.0})
    client = client_of(kernel)
    assert client.execution(run.id, lease).input == {"n": 10**30, "x": 1.0}
    assert client.terminal_steps(run.id, lease) == []
    done = submit(client, run, lease, b'{"a":1.0}')
    assert done.decision == "proceed"
    client.stream(run.id, lease, done.step_id, 0, "é")
    assert client.complete_step(run.id, lease, done.step_id, b'{"b":[1.0]}').decision == "recorded"
    failed = submit(client, run, lease, b'{"a":2}')
    assert (
        client.fail_step(run.id, lease, failed.step_id, b'{"message":"m"}').decision == "recorded"
    )
    client.heartbeat(run.id, lease, 5.0)
    assert client.step(run.id, done.step_id, lease).result == {"b": [1.0]}
    found = {s.step_id: s for s in client.terminal_steps(run.id, lease)}
    assert found[failed.step_id].error == {"message": "m"}
    assert found[done.step_id].args == {"a": 1.0}
    client.complete(run.id, lease, b'{"done":true}', None)
    assert run.status == "completed"
    refused = [r.answer.status for r in kernel.requests if r.answer.status >= 400]
    assert refused == ([401] if kernel.generation is GENERATION_3 else [])


def test_headers_of_mutations_and_reads(kernel: ScriptedKernel) -> None:
    run, lease = begin(kernel)
    client = client_of(kernel)
    client.execution(run.id, lease)
    submit(client, run, lease)
    client.heartbeat(run.id, lease, 5.0)
    (submission,) = kernel.sent("submit")
    assert submission.headers["Rebuno-Agent-Id"] == "a1"
    assert submission.headers["Rebuno-Dispatch-Id"] == run.dispatch_id
    expected = None if kernel.generation is GENERATION_1 else "1"
    assert submission.headers.get("Rebuno-Dispatch-Attempt") == expected
    assert submission.headers["Content-Type"] == "application/json"
    for read in kernel.sent("read"):
        assert read.headers.get("Rebuno-Dispatch-Id") is None
    (beat,) = kernel.sent("heartbeat")
    assert beat.body == b""
    prefix = kernel.generation.signature_prefix
    assert submission.headers["Rebuno-Signature"].startswith(prefix)


def test_the_submission_byte_for_byte(kernel3: ScriptedKernel) -> None:
    run, lease = begin(kernel3)
    client = client_of(kernel3, "v1")
    args = '{"z":1.0,"a":"é<\\u0001"}'.encode()
    client.submit(run.id, lease, Kind.LOCAL, 'näme "x"', args, Idempotency.SAFE_TO_RETRY)
    (request,) = kernel3.sent("submit")
    assert (
        request.body
        == (
            '{"kind":"local","target":"näme \\"x\\"","args":{"z":1.0,"a":"é<\\u0001"},'
            '"idempotency":"safe_to_retry"}'
        ).encode()
    )
    assert kernel3.calls() == ["submit"]


def test_fields_are_sent_only_when_used(kernel3: ScriptedKernel) -> None:
    run, lease = begin(kernel3)
    client = client_of(kernel3, "v1")
    client.complete(run.id, lease, b"1.0", None)
    run, lease = begin(kernel3)
    client.complete(run.id, lease, b"null", b'{"turn":1}')
    assert [r.body for r in kernel3.sent("complete")] == [
        b'{"output":1.0}',
        b'{"output":null,"state":{"turn":1}}',
    ]


def test_a_failure_reason_is_always_text_that_fits(kernel3: ScriptedKernel) -> None:
    client = client_of(kernel3, "v1")
    for reason in ("input_invalid: \ud800", "x" * 20_000_000):
        run, lease = begin(kernel3)
        client.fail(run.id, lease, reason)
        assert run.status == "failed"
    first, second = (r.json["error"] for r in kernel3.sent("fail"))
    assert first == "input_invalid: ?"
    assert len(second) < 70_000


def test_a_name_with_a_lone_surrogate(kernel3: ScriptedKernel) -> None:
    run, lease = begin(kernel3)
    with pytest.raises(TypeError, match="the name has a lone surrogate"):
        client_of(kernel3).submit(
            run.id, lease, Kind.LOCAL, "a\ud800", b"{}", Idempotency.SAFE_TO_RETRY
        )
    assert kernel3.requests == []


def test_a_body_that_no_kernel_takes(kernel3: ScriptedKernel) -> None:
    run, lease = begin(kernel3)
    message = (
        r"the step 't' with its arguments has \d+ bytes of JSON, and the kernel takes 10485760"
    )
    with pytest.raises(ValueError, match=message):
        submit(client_of(kernel3), run, lease, b'"' + b"x" * wire.MAX_BODY_BYTES + b'"')
    assert kernel3.requests == []


def test_metadata(kernel3: ScriptedKernel) -> None:
    client_of(kernel3, "v1").put_metadata(None, {"type": "object"}, None)
    (request,) = kernel3.sent("metadata")
    assert (request.method, request.target) == ("PUT", "/v0/agents/a1/metadata")
    assert request.json == {
        "description": None,
        "input_schema": {"type": "object"},
        "output_schema": None,
    }


# Signatures


def test_auto_steps_up_once_and_stays(kernel3: ScriptedKernel) -> None:
    run, lease = begin(kernel3)
    client = client_of(kernel3, "auto")
    client.execution(run.id, lease)
    submit(client, run, lease)
    client.heartbeat(run.id, lease, 5.0)
    assert kernel3.calls() == ["read", "read", "submit", "heartbeat"]
    prefixes = [r.headers["Rebuno-Signature"].split("=")[0] for r in kernel3.requests]
    assert prefixes == ["sha256", "v1", "v1", "v1"]


def test_auto_never_steps_down() -> None:
    with ScriptedKernel(GENERATION_2) as kernel:
        run, lease = begin(kernel)
        client = client_of(kernel, "auto")
        client._signs_request = True
        with pytest.raises(UnauthorizedError):
            client.execution(run.id, lease)
        assert kernel.calls() == ["read"]


@pytest.mark.parametrize("second", [401, 500, 503, 429])
def test_auto_keeps_only_what_worked(second: int) -> None:
    """A 401 of something on the way must not turn a generation 2 agent away for good."""
    statuses = [401, second]
    with ScriptedKernel(GENERATION_2) as kernel:
        kernel.intercept(lambda request: Answer.error(statuses.pop(0), "x") if statuses else None)
        run, lease = begin(kernel)
        client = client_of(kernel, "auto")
        with pytest.raises(APIError):
            client.heartbeat(run.id, lease, 5.0)
        client.execution(run.id, lease)
        submit(client, run, lease)


@pytest.mark.parametrize(
    ("signature", "generation"), [("body", GENERATION_3), ("v1", GENERATION_2)]
)
def test_a_pinned_signature_is_all_there_is(signature: Signature, generation: Generation) -> None:
    with ScriptedKernel(generation) as kernel:
        run, lease = begin(kernel)
        with pytest.raises(UnauthorizedError):
            client_of(kernel, signature).execution(run.id, lease)
        assert kernel.calls() == ["read"]


def test_a_submission_refused_for_its_signature_is_made_once(kernel3: ScriptedKernel) -> None:
    run, lease = begin(kernel3)
    decision = submit(client_of(kernel3, "auto"), run, lease)
    assert decision.decision == "proceed"
    assert [r.answer.status for r in kernel3.sent("submit")] == [401, 200]
    assert len(run.steps) == 1


@pytest.mark.parametrize("off", [-600.0, 600.0], ids=["back", "ahead"])
@pytest.mark.parametrize("signature", ["auto", "v1"])
def test_a_clock_that_is_off_is_made_up_for(
    monkeypatch: pytest.MonkeyPatch, signature: Signature, off: float
) -> None:
    machine = types.SimpleNamespace(time=lambda: time.time() + off)
    monkeypatch.setattr(kernel_client_module, "time", machine)
    with EmbeddedKernel(accept_body_signatures=False) as kernel, Client(kernel.url) as operator:
        # Nobody is there to take it; the dispatch is what this test makes of it.
        operator.register_agent("a1", "http://127.0.0.1:1/", "orchard-secret")
        created = operator.create("a1", None)
        transport = Transport(kernel.url, timeout=5.0)
        client = KernelClient("a1", Secrets("orchard-secret"), transport, signature)
        sent: list[str] = []
        once = transport.send_once

        def noting(*args: Any, **kwargs: Any) -> Received:
            answer = once(*args, **kwargs)
            sent.append(str(answer.status))
            return answer

        monkeypatch.setattr(transport, "send_once", noting)
        lease = Lease(Dispatch(created.id, "0192f3a4-0000-7000-8000-000000000000", 1, 60.0))
        assert client.execution(created.id, lease).id == created.id
        refused = ["401", "401"] if signature == "auto" else ["401"]
        assert sent == [*refused, "200"]
        client.execution(created.id, lease)
        assert sent == [*refused, "200", "200"], "the clock is asked for once"
        machine.time = time.time  # and set right
        client.execution(created.id, lease)
        assert sent[-2:] == ["401", "200"]


def test_a_clock_that_is_right_is_not_blamed() -> None:
    with EmbeddedKernel() as kernel, Client(kernel.url) as operator:
        operator.register_agent("a1", "http://127.0.0.1:1/", "orchard-secret")
        created = operator.create("a1", None)
        client = KernelClient("a1", Secrets("another"), Transport(kernel.url, timeout=5.0), "v1")
        lease = Lease(Dispatch(created.id, "0192f3a4-0000-7000-8000-000000000000", 1, 60.0))
        with pytest.raises(UnauthorizedError):
            client.execution(created.id, lease)
        assert client._clock_offset == 0.0


def test_each_try_is_signed_afresh(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(1_700_000_000, 1_700_000_100))
    fake = types.SimpleNamespace(time=lambda: float(next(clock)))
    monkeypatch.setattr(kernel_client_module, "time", fake)
    with ScriptedKernel(GENERATION_3) as kernel:
        answers = [Answer(500), Answer(502), Answer(204)]
        kernel.intercept(lambda request: answers.pop(0))
        run, lease = begin(kernel)
        client_of(kernel, "v1").complete(run.id, lease, b"1", None)
    stamps = [r.headers["Rebuno-Timestamp"] for r in kernel.requests]
    assert stamps == ["1700000000", "1700000001", "1700000002"]
    for request in kernel.requests:
        assert request.headers["Rebuno-Signature"] == signing.sign_request(
            kernel.secret,
            "POST",
            request.target,
            request.headers["Rebuno-Timestamp"],
            request.body,
            dispatch_id=run.dispatch_id,
            dispatch_attempt="1",
        )


def test_a_signature_below_a_path(kernel3: ScriptedKernel) -> None:
    """A gateway may serve the kernel below a path; the kernel there sees the path too."""
    run, lease = begin(kernel3)
    seen: list[Recorded] = []

    def respond(request: Recorded) -> Answer:
        seen.append(request)
        return Answer.json({"decision": "proceed", "step_id": "s"})

    with Server(respond) as gateway:
        client = KernelClient(
            "a1", Secrets("secret"), Transport(gateway.url + "/tenants/a b/", timeout=30), "v1"
        )
        submit(client, run, lease)
    (request,) = seen
    assert request.target == f"/tenants/a%20b/v0/executions/{run.id}/steps"
    assert request.headers["Rebuno-Signature"] == signing.sign_request(
        "secret",
        "POST",
        request.target,
        request.headers["Rebuno-Timestamp"],
        request.body,
        dispatch_id=run.dispatch_id,
        dispatch_attempt="1",
    )


# Leases


def test_calls_renew_the_lease(kernel3: ScriptedKernel) -> None:
    run, lease = begin(kernel3)
    client = client_of(kernel3, "v1")
    for call, renews in (
        (lambda: client.execution(run.id, lease), False),
        (lambda: submit(client, run, lease), True),
        (lambda: client.heartbeat(run.id, lease, 5.0), True),
    ):
        lease._renewed_at = -1.0
        call()
        assert (lease._renewed_at != -1.0) is renews


def test_the_lease_counts_from_when_it_was_asked_for(
    kernel3: ScriptedKernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process may stand still before the answer is read; each try is asked for anew."""
    clock = [100.0]
    monkeypatch.setattr(kernel_client_module, "now", lambda: clock[0])
    answers = [Answer(503), None]

    def tick(request: Recorded) -> Answer | None:
        clock[0] += 50.0
        return answers.pop(0)

    run, lease = begin(kernel3)
    lease._renewed_at = 0.0
    kernel3.intercept(tick)
    client_of(kernel3, "v1").complete(run.id, lease, b"1", None)
    assert clock == [200.0]
    assert lease._renewed_at == 150.0


def test_a_refused_call_renews_nothing(kernel3: ScriptedKernel) -> None:
    run, lease = begin(kernel3)
    kernel3.take(run)
    lease._renewed_at = -1.0
    with pytest.raises(ConflictError):
        client_of(kernel3, "v1").heartbeat(run.id, lease, 5.0)
    assert lease._renewed_at == -1.0


def test_a_lost_lease_ends_the_retries(kernel3: ScriptedKernel) -> None:
    run, lease = begin(kernel3)

    def busy(request: Recorded) -> Answer:
        if len(kernel3.requests) == 3:
            lease.cancelled.set()
        return Answer(503)

    kernel3.intercept(busy)
    with pytest.raises(APIError):
        client_of(kernel3, "v1").complete(run.id, lease, b"1", None)
    assert kernel3.calls() == ["complete"] * 4


# What is retried (truth 4)


def calls(client: KernelClient, run: Execution, lease: Lease) -> dict[str, Callable[[], Any]]:
    return {
        "read": lambda: client.execution(run.id, lease),
        "steps": lambda: client.terminal_steps(run.id, lease),
        "step_complete": lambda: client.complete_step(run.id, lease, "s", b"1"),
        "step_fail": lambda: client.fail_step(run.id, lease, "s", b"{}"),
        "complete": lambda: client.complete(run.id, lease, b"1", None),
        "fail": lambda: client.fail(run.id, lease, "r"),
        "submit": lambda: submit(client, run, lease),
        "stream": lambda: client.stream(run.id, lease, "s", 0, "x"),
        "heartbeat": lambda: client.heartbeat(run.id, lease, 5.0),
    }


@pytest.mark.parametrize(
    "name", ["read", "steps", "step_complete", "step_fail", "complete", "fail"]
)
def test_what_may_be_repeated(kernel3: ScriptedKernel, name: str) -> None:
    run, lease = begin(kernel3)
    step = submit(client_of(kernel3, "v1"), run, lease)
    kernel3.requests.clear()
    answers = [Answer(500), Answer(503), Answer(200, b"<html>", "text/html")]
    kernel3.intercept(lambda request: answers.pop(0) if answers else None)
    client = client_of(kernel3, "v1")
    todo = calls(client, run, lease)
    todo["step_complete"] = lambda: client.complete_step(run.id, lease, step.step_id, b"1")
    todo["step_fail"] = lambda: client.fail_step(run.id, lease, step.step_id, b"{}")
    todo[name]()
    assert kernel3.calls() == [name] * 4


@pytest.mark.parametrize("name", ["submit", "stream", "heartbeat"])
def test_what_is_tried_once(kernel3: ScriptedKernel, name: str) -> None:
    run, lease = begin(kernel3)
    for answer in (Answer(500), Answer(503), Answer(200, b"<html>", "text/html")):
        kernel3.requests.clear()
        kernel3.intercept(lambda request, answer=answer: answer)
        with pytest.raises((APIError, NetworkError)):
            calls(client_of(kernel3, "v1"), run, lease)[name]()
        assert kernel3.calls() == [name]
        kernel3._interceptors.clear()


# Odd answers


def test_an_outcome_that_stands_already(kernel3: ScriptedKernel) -> None:
    run, lease = begin(kernel3)
    client = client_of(kernel3, "v1")
    step = submit(client, run, lease)
    client.complete_step(run.id, lease, step.step_id, b'{"first":true}')
    again = client.complete_step(run.id, lease, step.step_id, b'{"first":false}')
    assert (again.decision, again.result) == ("replay", {"first": True})
    assert "step" not in kernel3.calls()


@pytest.mark.parametrize("stored", ["result", "error"])
def test_a_kernel_that_does_not_say_which_outcome(kernel3: ScriptedKernel, stored: str) -> None:
    run, lease = begin(kernel3)
    client = client_of(kernel3, "v1")
    step = submit(client, run, lease)
    if stored == "result":
        client.complete_step(run.id, lease, step.step_id, b"[1]")
    else:
        client.fail_step(run.id, lease, step.step_id, b'{"message":"m"}')
    kernel3.intercept(
        lambda request: Answer.json({"decision": "replay"}) if request.call == "step_fail" else None
    )
    found = client.fail_step(run.id, lease, step.step_id, b'{"message":"other"}')
    expected = ([1], None) if stored == "result" else (None, {"message": "m"})
    assert (found.decision, found.step_id) == ("replay", step.step_id)
    assert (found.result, found.error) == expected


@pytest.mark.parametrize(
    ("name", "body"),
    [
        ("read", "[]"),
        ("read", '{"id":"x"}'),
        ("read", "null"),
        ("steps", '{"steps":[]}'),
        ("steps", "[1]"),
        ("steps", '[{"step_id":"s"}]'),
        ("submit", '"proceed"'),
        ("submit", "{}"),
        ("step_complete", "null"),
    ],
)
def test_answers_that_make_no_sense(kernel3: ScriptedKernel, name: str, body: str) -> None:
    run, lease = begin(kernel3)
    kernel3.intercept(lambda request: Answer(200, body.encode(), "application/json"))
    with pytest.raises(NetworkError, match="the kernel's answer makes no sense"):
        calls(client_of(kernel3, "v1"), run, lease)[name]()


def test_an_empty_list_as_null(kernel3: ScriptedKernel) -> None:
    run, lease = begin(kernel3)
    kernel3.intercept(lambda request: Answer(200, b"null", "application/json"))
    assert client_of(kernel3, "v1").terminal_steps(run.id, lease) == []


# previous


def test_previous(kernel3: ScriptedKernel) -> None:
    run, lease = begin(kernel3)
    for body, expected in (
        ({"state": {"a": [1]}}, {"a": [1]}),
        ({"state": None}, None),
        ({}, None),
        (None, None),
    ):
        kernel3._interceptors.clear()
        kernel3.intercept(lambda request, body=body: Answer.json(body))
        assert client_of(kernel3, "v1").previous(run.id, lease) == expected
    assert kernel3.requests[-1].target == f"/v0/executions/{run.id}/previous"


def test_previous_of_kernels_that_know_no_sessions(kernel: ScriptedKernel) -> None:
    run, lease = begin(kernel)
    assert client_of(kernel).previous(run.id, lease) is None


def test_an_execution_that_is_not_there(kernel: ScriptedKernel) -> None:
    _, lease = begin(kernel)
    with pytest.raises(NotFoundError):
        client_of(kernel).execution("0192f3a4-1111-7222-8333-444455556666", lease)


def test_bodies_are_json(kernel3: ScriptedKernel) -> None:
    run, lease = begin(kernel3)
    client = client_of(kernel3, "v1")
    step = submit(client, run, lease)
    client.stream(run.id, lease, step.step_id, 3, 'a"é\n')
    client.complete_step(run.id, lease, step.step_id, b"[1]")
    client.fail(run.id, lease, "why")
    bodies = {r.call: json.loads(r.body) for r in kernel3.requests}
    assert bodies["stream"] == {"seq": 3, "data": 'a"é\n'}
    assert bodies["step_complete"] == {"result": [1]}
    assert bodies["fail"] == {"error": "why"}


@pytest.mark.parametrize("generation", [GENERATION_2, GENERATION_3])
def test_a_secret_is_replaced_without_a_lost_call(generation: Generation) -> None:
    """The agent has both while the kernel is given the new one."""
    with ScriptedKernel(generation, secret="old") as kernel:
        run, lease = begin(kernel)
        transport = Transport(kernel.url, timeout=30)
        client = KernelClient(kernel.agent_id, Secrets(["new", "old"]), transport)
        submit(client, run, lease)
        assert len(run.steps) == 1
        refused = len(kernel.requests) - 1
        client.heartbeat(run.id, lease, 5.0)
        assert len(kernel.requests) == refused + 2, "what the kernel knows is tried first"
        kernel.secret = "new"
        submit(client, run, lease, b'{"n":2}')
        client.heartbeat(run.id, lease, 5.0)
        assert len(run.steps) == 2
        answers = [r.answer.status for r in kernel.requests[refused + 2 :]]
        assert answers.count(401) == (1 if generation is GENERATION_3 else 2)
        kernel.secret = "neither"
        with pytest.raises(UnauthorizedError):
            client.heartbeat(run.id, lease, 5.0)
