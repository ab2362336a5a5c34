"""What an agent may send, and what it gets back (PROTOCOL 4)."""

from __future__ import annotations

import json
import uuid
from typing import Any

import pytest
import requests

from tests.conformance.driver import ONCE, SAFE, Attempt, done, ok, refused, wait_until

MIB = 1024 * 1024


# The execution


def test_get_execution(attempt: Attempt) -> None:
    """4: GET / answers the execution."""
    execution = ok(attempt.send("GET", ""))
    assert execution["id"] == attempt.execution_id
    assert execution["agent_id"] == attempt.agent.id
    assert execution["input"] == {"n": 1}
    assert execution["status"] == "running"
    assert execution["created_at"]
    assert execution["updated_at"]
    assert not execution.get("failure_reason")
    assert execution.get("output") is None


@pytest.mark.parametrize(
    "value",
    [
        None,
        True,
        "grün 🌳 \u2028 <&>",
        "",
        0,
        -1.5,
        [1, [2]],
        {"b": 1, "a": {"c": None}},
        12345678901234567,
        0.1,
    ],
)
def test_values_come_back_as_they_were_sent(attempt: Attempt, value: Any) -> None:
    """4: input, args, result and output are any JSON."""
    again = attempt.agent.start(value)
    assert ok(again.send("GET", ""))["input"] == value
    step = again.ran("t", value, value)
    row = again.step(step)
    assert (row["args"], row["result"]) == (value, value)
    done(again.complete(value))
    execution = again.kernel.execution(again.execution_id)
    assert (execution["status"], execution["output"]) == ("completed", value)


# Steps


def test_submit_a_step(attempt: Attempt) -> None:
    """4: POST /steps answers 200 with a decision."""
    decision = attempt.decision("t", {"a": 1})
    assert decision["decision"] == "proceed"
    assert len(decision["step_id"]) == 64
    assert set(decision["step_id"]) <= set("0123456789abcdef")


def test_complete_a_step(attempt: Attempt) -> None:
    """4: POST /steps/{step}/complete answers recorded."""
    step = attempt.proceed()
    assert ok(attempt.complete_step(step, {"ok": True})) == {"decision": "recorded"}
    row = attempt.step(step)
    assert row["status"] == "succeeded"
    assert row["result"] == {"ok": True}
    assert row["completed_at"]


def test_complete_a_step_again(attempt: Attempt) -> None:
    """4: replay with the stored result if it was terminal already."""
    step = attempt.ran("t", None, {"ok": True})
    again = ok(attempt.complete_step(step, {"other": 1}))
    assert again["decision"] == "replay"
    assert again["result"] == {"ok": True}
    assert attempt.step(step)["result"] == {"ok": True}


def test_fail_a_step_that_succeeded(attempt: Attempt) -> None:
    """4: the same for fail; the first outcome stays."""
    step = attempt.ran("t", None, 1)
    assert ok(attempt.fail_step(step, {"message": "late"}))["decision"] == "replay"
    assert attempt.step(step)["status"] == "succeeded"


@pytest.mark.parametrize("error", [{"message": "boom", "type": "X", "more": [1]}, "text", 7, None])
def test_fail_a_step(attempt: Attempt, error: Any) -> None:
    """4: error is any JSON, and recorded as it is."""
    step = attempt.proceed()
    assert ok(attempt.fail_step(step, error)) == {"decision": "recorded"}
    row = attempt.step(step)
    assert row["status"] == "failed"
    assert row.get("error") == error


def test_fail_a_step_again(attempt: Attempt) -> None:
    """4: replay if it was terminal already."""
    step = attempt.proceed()
    attempt.fail_step(step, {"message": "first"})
    assert ok(attempt.fail_step(step, {"message": "second"}))["decision"] == "replay"
    assert ok(attempt.complete_step(step, 1))["decision"] == "replay"
    row = attempt.step(step)
    assert (row["status"], row["error"]) == ("failed", {"message": "first"})


def test_report_on_a_step_after_the_end(attempt: Attempt) -> None:
    """4: execution_terminal."""
    step, recorded = attempt.proceed("a"), attempt.ran("b")
    done(attempt.complete(1))
    for id in (step, recorded):
        assert ok(attempt.complete_step(id, 2))["decision"] == "execution_terminal"
        assert ok(attempt.fail_step(id, {}))["decision"] == "execution_terminal"
    assert attempt.step(step)["status"] != "succeeded"


def test_report_on_an_unknown_step(attempt: Attempt) -> None:
    """4: 404 not_found."""
    refused(attempt.complete_step("0" * 64, 1), 404, "not_found")
    refused(attempt.fail_step("0" * 64, {}), 404, "not_found")


def test_report_on_a_step_of_another_execution(attempt: Attempt) -> None:
    """4: a step belongs to one execution."""
    other = attempt.agent.start()
    refused(attempt.complete_step(other.proceed(), 1), 404, "not_found")


def test_complete_fail_and_heartbeat_may_be_sent_again(attempt: Attempt) -> None:
    """6: sent twice, nothing is recorded twice."""
    step = attempt.ran("t", None, 1)
    ok(attempt.complete_step(step, 1))
    done(attempt.heartbeat())
    done(attempt.heartbeat())
    done(attempt.complete("first"))
    refused(attempt.complete("second"), 409, "execution_terminal", "lease_superseded")
    refused(attempt.fail("third"), 409, "execution_terminal", "lease_superseded")
    types = attempt.kernel.types(attempt.execution_id)
    assert types.count("step.succeeded") == 1
    assert types.count("execution.completed") == 1
    assert attempt.kernel.execution(attempt.execution_id)["output"] == "first"


def test_list_steps(attempt: Attempt) -> None:
    """4: GET /steps and its fields."""
    first = attempt.ran("a", {"x": 1}, {"y": 2})
    second = attempt.proceed("b", [1], kind="llm_call", idempotency=ONCE)
    rows = {row["step_id"]: row for row in attempt.steps()}
    assert set(rows) == {first, second}
    assert rows[first]["execution_id"] == attempt.execution_id
    assert rows[first]["kind"] == "tool_call"
    assert rows[first]["target"] == "a"
    assert rows[first]["occurrence"] == 0
    assert rows[first]["status"] == "succeeded"
    assert rows[first]["idempotency"] == SAFE
    assert rows[first]["args"] == {"x": 1}
    assert rows[first]["result"] == {"y": 2}
    assert rows[first].get("error") is None
    assert len(rows[first]["args_hash"]) == 64
    assert rows[first]["started_at"] <= rows[first]["completed_at"]
    assert rows[second]["kind"] == "llm_call"
    assert rows[second]["status"] == "executing"
    assert rows[second]["idempotency"] == ONCE
    assert rows[second]["started_at"]
    assert rows[second].get("completed_at") is None


def test_list_terminal_steps(attempt: Attempt) -> None:
    """4: GET /steps?status=terminal."""
    recorded, running, failed = attempt.ran("a"), attempt.proceed("b"), attempt.proceed("c")
    attempt.fail_step(failed, {"message": "x"})
    rows = {row["step_id"]: row["status"] for row in attempt.steps("?status=terminal")}
    assert rows == {recorded: "succeeded", failed: "failed"}
    assert attempt.step(running)["status"] == "executing"


def test_denied_steps_are_terminal(attempt: Attempt) -> None:
    """4: GET /steps?status=terminal."""
    attempt.agent.policy("default_action: deny")
    denied = attempt.decision("no")["step_id"]
    assert [row["step_id"] for row in attempt.steps("?status=terminal")] == [denied]


def test_get_an_unknown_step(attempt: Attempt) -> None:
    """4: 404 not_found."""
    refused(attempt.send("GET", f"/steps/{'0' * 64}"), 404, "not_found")


def test_idempotency_is_safe_to_retry_when_left_out(attempt: Attempt) -> None:
    """4: recorded exchange, a submission without idempotency."""
    decision = ok(attempt.send("POST", "/steps", {"kind": "tool_call", "target": "t", "args": {}}))
    assert attempt.step(decision["step_id"])["idempotency"] == SAFE


# Live output


def test_stream(attempt: Attempt) -> None:
    """4: POST /steps/{step}/stream answers 204."""
    step = attempt.proceed()
    for seq, data in enumerate(["a", "", "grün 🌳\n", "x" * 7000, "é" * 3500]):
        done(attempt.stream(step, seq, data))


@pytest.mark.parametrize("data", ["x" * 7001, "é" * 3501, "🌳" * 1751])
def test_stream_of_too_much(attempt: Attempt, data: str) -> None:
    """4: at most 7000 bytes of UTF-8, else 400."""
    refused(attempt.stream(attempt.proceed(), 0, data), 400, "validation_error")


@pytest.mark.parametrize(("seq", "data"), [(-1, "x"), ("0", "x"), (1.5, "x"), (0, 1), (0, None)])
def test_stream_of_something_else(attempt: Attempt, seq: Any, data: Any) -> None:
    """4: seq is an int from 0, data is text."""
    refused(attempt.stream(attempt.proceed(), seq, data), 400, "validation_error")


def test_stream_of_a_step_that_does_not_execute(attempt: Attempt) -> None:
    """4, generation 3: 409 when the step is not executing."""
    refused(attempt.stream(attempt.ran("t"), 0, "x"), 409, "conflict", "lease_superseded")


# The end


def test_complete(attempt: Attempt) -> None:
    """4: POST /complete answers 204."""
    done(attempt.complete({"done": True}))
    execution = attempt.kernel.execution(attempt.execution_id)
    assert (execution["status"], execution["output"]) == ("completed", {"done": True})
    event = attempt.kernel.events(attempt.execution_id)[-1]
    assert event["type"] == "execution.completed"
    assert event["payload"]["output"] == {"done": True}
    assert event["payload"]["status"] == "completed"


def test_complete_with_state(attempt: Attempt) -> None:
    """4, generation 3: complete optionally carries state."""
    done(attempt.send("POST", "/complete", {"output": 1, "state": {"memory": []}}))
    assert attempt.kernel.execution(attempt.execution_id)["output"] == 1


def test_fail(attempt: Attempt) -> None:
    """4: POST /fail answers 204; the error is text."""
    done(attempt.fail("agent_error: ValueError: no"))
    execution = attempt.kernel.execution(attempt.execution_id)
    assert execution["status"] == "failed"
    assert execution["failure_reason"] == "agent_error: ValueError: no"
    event = attempt.kernel.events(attempt.execution_id)[-1]
    assert event["type"] == "execution.failed"
    assert event["payload"]["reason"] == "agent_error: ValueError: no"
    assert event["payload"]["status"] == "failed"


@pytest.mark.parametrize("error", [1, True, {"message": "x"}, ["x"]])
def test_fail_with_something_else(attempt: Attempt, error: Any) -> None:
    """4: error is text."""
    refused(attempt.fail(error), 400, "validation_error")
    assert attempt.kernel.execution(attempt.execution_id)["status"] == "running"


def test_previous_without_a_parent(attempt: Attempt) -> None:
    """4, generation 3: GET /previous answers null without a parent."""
    assert ok(attempt.send("GET", "/previous")) == {"state": None}


# Metadata


def test_put_metadata(attempt: Attempt) -> None:
    """4, generation 3: PUT /v0/agents/{agent}/metadata; each may be null."""
    agent = attempt.agent
    path = f"/v0/agents/{agent.id}/metadata"
    schema = {"type": "object", "properties": {"n": {"type": "integer"}}}
    full = {"description": "d", "input_schema": schema, "output_schema": None}
    done(agent.send("PUT", path, full))
    row = ok(agent.kernel.send("GET", f"/v0/agents/{agent.id}"))
    assert row["description"] == "d"
    assert row["input_schema"] == schema
    empty = {"description": None, "input_schema": None, "output_schema": None}
    done(agent.send("PUT", path, empty))


def test_put_metadata_of_another_agent(attempt: Attempt) -> None:
    """4: 403 forbidden, not yours."""
    other = attempt.kernel.agent()
    body = {"description": "mine", "input_schema": None, "output_schema": None}
    refused(attempt.agent.send("PUT", f"/v0/agents/{other.id}/metadata", body), 403, "forbidden")


def test_put_metadata_with_an_unknown_field(attempt: Attempt) -> None:
    """2 and 4: an unknown field is 400."""
    path = f"/v0/agents/{attempt.agent.id}/metadata"
    refused(attempt.agent.send("PUT", path, {"surprise": 1}), 400, "validation_error")


# Malformed requests


@pytest.mark.parametrize("id", ["not-a-uuid", "1", "0192f3a4-1111-7222-8333-44445555666g"])
@pytest.mark.parametrize(
    ("method", "path"),
    [("GET", ""), ("POST", "/steps"), ("POST", "/heartbeat"), ("POST", "/complete")],
)
def test_malformed_execution_id(shared_attempt: Attempt, id: str, method: str, path: str) -> None:
    """4: 400, malformed id."""
    response = shared_attempt.agent.send(
        method,
        f"/v0/executions/{id}{path}",
        {"output": 1} if path == "/complete" else None,
        dispatch_id=shared_attempt.dispatch_id,
        dispatch_attempt="1",
    )
    refused(response, 400, "validation_error")


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("GET", "", None),
        ("GET", "/steps", None),
        ("POST", "/steps", {"kind": "tool_call", "target": "t", "args": {}}),
        ("POST", "/heartbeat", None),
        ("POST", "/complete", {"output": 1}),
        ("POST", "/fail", {"error": "x"}),
    ],
)
def test_unknown_execution(shared_attempt: Attempt, method: str, path: str, body: Any) -> None:
    """4: 404 not_found."""
    response = shared_attempt.agent.send(
        method,
        f"/v0/executions/{uuid.uuid4()}{path}",
        body,
        dispatch_id=shared_attempt.dispatch_id,
        dispatch_attempt="1",
    )
    refused(response, 404, "not_found")


BODIES: dict[str, dict[str, Any]] = {
    "/steps": {"kind": "tool_call", "target": "t", "args": {}, "idempotency": SAFE},
    "/steps/{step}/complete": {"result": 1},
    "/steps/{step}/fail": {"error": {"message": "x"}},
    "/steps/{step}/stream": {"seq": 0, "data": "x"},
    "/complete": {"output": 1},
    "/fail": {"error": "x"},
}


@pytest.mark.parametrize("data", [b"{", b"", b"[]", b"3", b'"x"', b"\xff", b"{}{}", b"{'a':1}"])
@pytest.mark.parametrize("path", BODIES)
def test_malformed_body(shared_attempt: Attempt, path: str, data: bytes) -> None:
    """4: 400, malformed body."""
    step = shared_attempt.proceed()
    response = shared_attempt.send("POST", path.format(step=step), data=data)
    refused(response, 400, "validation_error")
    assert shared_attempt.step(step)["status"] == "executing"
    assert shared_attempt.kernel.execution(shared_attempt.execution_id)["status"] == "running"


@pytest.mark.parametrize("path", BODIES)
def test_unknown_field(shared_attempt: Attempt, path: str) -> None:
    """2: a JSON body with a field that the kernel does not know is refused."""
    step = shared_attempt.proceed()
    body = {**BODIES[path], "surprise": 1}
    refused(shared_attempt.send("POST", path.format(step=step), body), 400, "validation_error")
    assert shared_attempt.step(step)["status"] == "executing"
    assert shared_attempt.kernel.execution(shared_attempt.execution_id)["status"] == "running"


@pytest.mark.parametrize(
    "change",
    [
        {"kind": "dance"},
        {"kind": ""},
        {"kind": None},
        {"kind": 1},
        {"target": ""},
        {"target": None},
        {"target": 1},
        {"idempotency": "maybe"},
        {"idempotency": 1},
    ],
)
def test_strict_submissions(shared_attempt: Attempt, change: dict[str, Any]) -> None:
    """4: the embedded kernel refuses what old kernels let pass."""
    if not shared_attempt.kernel.embedded:
        pytest.skip("old kernels were careless here")
    body = {**BODIES["/steps"], **change}
    refused(shared_attempt.send("POST", "/steps", body), 400, "validation_error")


@pytest.mark.parametrize("missing", ["kind", "target"])
def test_incomplete_submissions(shared_attempt: Attempt, missing: str) -> None:
    """4: the embedded kernel refuses what old kernels let pass."""
    if not shared_attempt.kernel.embedded:
        pytest.skip("old kernels were careless here")
    body = {name: value for name, value in BODIES["/steps"].items() if name != missing}
    refused(shared_attempt.send("POST", "/steps", body), 400, "validation_error")


def test_a_large_body(attempt: Attempt) -> None:
    """4: bodies up to 10 MiB are taken."""
    args = "x" * (9 * MIB)
    step = attempt.proceed("t", args)
    assert ok(attempt.complete_step(step, args)) == {"decision": "recorded"}
    assert attempt.step(step)["result"] == args


def test_a_body_over_10_mib_is_refused(attempt: Attempt) -> None:
    """4: request bodies over 10 MiB are refused."""
    body = json.dumps({"kind": "tool_call", "target": "t", "args": "x" * (10 * MIB)}).encode()
    try:
        response = attempt.send("POST", "/steps", data=body)
    except requests.ConnectionError:
        pass  # the kernel may close before it has read all of it
    else:
        assert response.status_code in (400, 413)
    assert attempt.steps() == []


# Leases


CALLS: dict[str, tuple[str, Any]] = {
    "submit": ("/steps", BODIES["/steps"]),
    "stream": ("/steps/{step}/stream", {"seq": 0, "data": "x"}),
    "heartbeat": ("/heartbeat", None),
    "step complete": ("/steps/{step}/complete", {"result": 1}),
    "step fail": ("/steps/{step}/fail", {"error": {}}),
    "complete": ("/complete", {"output": 1}),
    "fail": ("/fail", {"error": "x"}),
}


@pytest.fixture(scope="module")
def shared_attempt(shared_kernel: Any) -> Attempt:
    """One running execution for all tests that only send what is refused."""
    attempt: Attempt = shared_kernel.agent().start({"n": 1})
    return attempt


@pytest.mark.parametrize(
    ("dispatch_id", "number"),
    [
        ("", None),
        ("zzz", None),
        ("0192f3a4", None),
        (None, ""),
        (None, "x"),
        (None, "0"),
        (None, "-1"),
        (None, "1.0"),
        (None, "99999999999999999999"),
    ],
)
@pytest.mark.parametrize("call", CALLS)
def test_missing_or_malformed_lease(
    shared_attempt: Attempt, call: str, dispatch_id: str | None, number: str | None
) -> None:
    """4: a missing or malformed header is 400."""
    path, body = CALLS[call]
    step = shared_attempt.proceed()
    path = path.format(step=step)
    response = shared_attempt.send("POST", path, body, dispatch_id=dispatch_id, attempt=number)
    refused(response, 400, "validation_error")
    assert shared_attempt.step(step)["status"] == "executing"
    assert shared_attempt.kernel.execution(shared_attempt.execution_id)["status"] == "running"


@pytest.mark.parametrize("lease", ["unknown", "of another execution", "of a later attempt"])
@pytest.mark.parametrize("call", CALLS)
def test_wrong_lease(shared_attempt: Attempt, call: str, lease: str) -> None:
    """4: anything but a good lease is 409 lease_superseded."""
    path, body = CALLS[call]
    step = shared_attempt.proceed()
    dispatch_id, number = shared_attempt.dispatch_id, "1"
    if lease == "unknown":
        dispatch_id = str(uuid.uuid4())
    elif lease == "of another execution":
        dispatch_id = shared_attempt.agent.start().dispatch_id
    else:
        number = "2"
    path = path.format(step=step)
    response = shared_attempt.send("POST", path, body, dispatch_id=dispatch_id, attempt=number)
    refused(response, 409, "lease_superseded")
    assert shared_attempt.step(step)["status"] == "executing"
    assert shared_attempt.kernel.execution(shared_attempt.execution_id)["status"] == "running"


@pytest.mark.parametrize("call", CALLS)
def test_lease_of_an_earlier_attempt(leased: Attempt, call: str) -> None:
    """4: the attempt must be the dispatch's current one, else 409 lease_superseded."""
    path, body = CALLS[call]
    step = leased.proceed()
    leased.lapse()
    refused(leased.send("POST", path.format(step=step), body), 409, "lease_superseded")
    assert leased.step(step)["status"] == "executing"


@pytest.mark.parametrize("call", [name for name in CALLS if name not in ("complete", "fail")])
def test_every_call_renews_the_lease(leased: Attempt, call: str) -> None:
    """4: every call that carries a good lease renews it."""
    leased.kernel.needs_clock()
    path, body = CALLS[call]
    for number in range(3):
        step = leased.proceed(f"t{number}")
        leased.kernel.pass_time(40)
        response = leased.send("POST", path.format(step=step), body)
        assert response.status_code in (200, 204), response.text
        leased.kernel.pass_time(40)
    done(leased.heartbeat())
    assert leased.agent.inbox.untaken(leased.execution_id) == []


def test_a_lease_that_nothing_renews_runs_out(leased: Attempt) -> None:
    """4 and 7: it is not good any more, and the next attempt has it."""
    following = leased.lapse()
    assert following.dispatch_id == leased.dispatch_id
    assert following.attempt == 2
    refused(leased.heartbeat(), 409, "lease_superseded")
    done(following.heartbeat())


def test_a_refused_call_does_not_renew_the_lease(leased: Attempt) -> None:
    """4: only a good lease is renewed."""
    leased.kernel.needs_clock()
    leased.kernel.pass_time(40)
    refused(leased.send("POST", "/heartbeat", attempt="2"), 409, "lease_superseded")
    leased.kernel.pass_time(21)
    assert leased.next().attempt == 2


def test_step_reports_need_only_the_dispatch_and_attempt(attempt: Attempt) -> None:
    """4: an effect already running when the execution blocked can record its outcome."""
    attempt.agent.policy(
        "default_action: allow\n"
        "rules: [{id: ask, when: {target: ask}, then: {decision: require_approval}}]"
    )
    first, second = attempt.proceed("a"), attempt.proceed("b")
    attempt.blocked("ask")
    refused(attempt.heartbeat(), 409, "lease_superseded")
    refused(attempt.stream(first, 0, "x"), 409, "lease_superseded")
    refused(attempt.complete(1), 409, "lease_superseded")
    refused(attempt.fail("x"), 409, "lease_superseded")
    assert ok(attempt.complete_step(first, 1)) == {"decision": "recorded"}
    assert ok(attempt.fail_step(second, {"message": "x"})) == {"decision": "recorded"}
    wait_until(lambda: attempt.step(second)["status"] == "failed")
    assert attempt.kernel.execution(attempt.execution_id)["status"] == "blocked"
