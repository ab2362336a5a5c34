"""Calls that the kernel does not let happen, and how a handler learns of it (PROTOCOL 11)."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from examples.fake_provider import FakeProvider, raw, text
from rebuno_sync import (
    Blocked,
    LeaseSuperseded,
    PolicyError,
    RateLimited,
    Terminated,
    bind_context,
    raise_for_refusal,
)
from tests.integration.llm_runs import WEBS, Got, Seen, Web, agent_under, run, run_twice
from tests.scripted import GENERATION_3, Answer, Recorded, ScriptedKernel, Verdict

CHAT = "/v1/chat/completions"
ODD = 'don\'t "call" it: {too} dear,\n\\ really'


@pytest.fixture(params=WEBS, ids=repr)
def web(request: pytest.FixtureRequest) -> Web:
    return request.param


@pytest.fixture
def kernel() -> Iterator[ScriptedKernel]:
    with ScriptedKernel(GENERATION_3) as kernel:
        yield kernel


def raise_for_status(web: Web, client: Any, url: str) -> None:
    """POST, and raise the library's own error for an error status."""
    with web.opened(client, url) as response:
        _ = response.content if web.name == "requests" else response.read()
        response.raise_for_status()


REFUSALS = [
    ({"decision": "blocked", "step_id": "s1", "approval_id": "a1"}, 403, "blocked", Blocked),
    ({"decision": "execution_blocked"}, 403, "blocked", Blocked),
    ({"decision": "execution_terminal"}, 403, "execution_terminal", Terminated),
    (
        {"decision": "denied", "step_id": "s1", "reason": "too dear"},
        403,
        "denied reason=too dear",
        PolicyError,
    ),
    ({"decision": "denied", "step_id": "s1"}, 403, "denied reason=policy_denied", PolicyError),
    (
        {"decision": "rate_limited", "reason": "rate_limit_exceeded"},
        429,
        "rate_limited reason=rate_limit_exceeded",
        RateLimited,
    ),
]


@pytest.mark.parametrize(("told", "status", "says", "signal"), REFUSALS)
def test_a_refusal_is_an_answer_that_is_not_retried(
    web: Web,
    kernel: ScriptedKernel,
    told: dict[str, Any],
    status: int,
    says: str,
    signal: type[BaseException],
) -> None:
    kernel.decide_steps(lambda submission: told)
    seen: list[Got] = []
    with FakeProvider([]) as fake, web.client(retries=3) as client:
        run(kernel, lambda: seen.append(web.post(client, fake.url + CHAT)))
    (got,) = seen
    assert got.status == status
    assert got.headers == {"content-type": "application/json", "x-should-retry": "false"}
    assert json.loads(got.content) == {
        "error": {"type": "rebuno_refusal", "message": f"rebuno_refusal: {says}"}
    }
    assert len(kernel.sent("submit")) == 1
    assert fake.asked == []


def test_a_lost_lease_is_a_409(web: Web, kernel: ScriptedKernel) -> None:
    def lost(request: Recorded) -> Answer | None:
        if request.call == "submit":
            return Answer.error(409, "lease_superseded")
        return None

    kernel.intercept(lost)
    seen: list[Got] = []
    with FakeProvider([]) as fake, web.client() as client:
        run(kernel, lambda: seen.append(web.post(client, fake.url + CHAT)))
    assert seen[0].status == 409
    assert json.loads(seen[0].content)["error"]["message"] == "rebuno_refusal: lease_superseded"
    assert kernel.sent("complete") == kernel.sent("fail") == []


@pytest.mark.parametrize(
    ("told", "signal", "ends"),
    [(told, signal, signal in (Blocked, Terminated)) for told, _, _, signal in REFUSALS],
)
def test_the_agent_finds_a_refusal_in_what_leaves_the_handler(
    web: Web,
    kernel: ScriptedKernel,
    told: dict[str, Any],
    signal: type[BaseException],
    ends: bool,
) -> None:
    kernel.decide_steps(lambda submission: told)
    with FakeProvider([]) as fake, web.client() as client:
        seen = run(kernel, lambda: raise_for_status(web, client, fake.url + CHAT))
    if ends:
        assert kernel.sent("complete") == kernel.sent("fail") == []
        return
    assert seen.run.status == "failed"
    reasons = {"too dear": "policy_denied: too dear"}
    told_reason = told.get("reason", "policy_denied")
    assert seen.run.failure_reason == reasons.get(told_reason, told_reason)


def test_a_swallowed_refusal_still_ends_the_dispatch(web: Web, kernel: ScriptedKernel) -> None:
    kernel.decide_steps(lambda submission: {"decision": "blocked", "step_id": "s1"})
    with FakeProvider([]) as fake, web.client() as client:
        run(kernel, lambda: web.post(client, fake.url + CHAT).status)
        run(kernel, lambda: web.post(client, fake.url + CHAT).status)
    assert kernel.sent("complete") == kernel.sent("fail") == []


def test_a_reason_comes_through_whatever_is_in_it(web: Web, kernel: ScriptedKernel) -> None:
    kernel.decide_steps(lambda submission: {"decision": "denied", "step_id": "s1", "reason": ODD})
    found: list[str] = []

    def ask() -> None:
        try:
            raise_for_status(web, client, fake.url + CHAT)
        except Exception as exc:
            with pytest.raises(PolicyError) as caught:
                raise_for_refusal(exc)
            found.append(caught.value.reason)

    with FakeProvider([]) as fake, web.client() as client:
        run(kernel, ask)
    assert found == [ODD]


def test_a_call_waits_for_its_approval(web: Web) -> None:
    def policy(kind: str, target: str, args: Any) -> Verdict:
        return Verdict("require_approval")

    with (
        ScriptedKernel(GENERATION_3, policy=policy) as kernel,
        FakeProvider([text("Snow.")]) as fake,
        web.client() as client,
    ):
        seen = Seen(kernel.create({}))

        def ask() -> None:
            with web.opened(client, fake.url + CHAT) as response:
                response.raise_for_status()
                _ = response.content if web.name == "requests" else response.read()
                seen.values.append(response.text)

        with agent_under(kernel, ask) as agent:
            kernel.deliver(seen.run)
            assert agent.join(60)
            assert (seen.run.status, fake.asked) == ("blocked", [])
            (approval,) = seen.run.approvals.values()
            kernel.decide(approval, grant=True)
            kernel.deliver(seen.run)
            assert agent.join(60)
    assert seen.run.status == "completed"
    assert "Snow." in seen.values[0]


def test_a_denied_call_is_denied_again_on_replay(web: Web) -> None:
    def policy(kind: str, target: str, args: Any) -> Verdict:
        return Verdict("deny", "r1", reason="too dear")

    with (
        ScriptedKernel(GENERATION_3, policy=policy) as kernel,
        FakeProvider([]) as fake,
        web.client() as client,
    ):
        seen = run_twice(lambda: web.post(client, fake.url + CHAT), kernel)
    assert seen.values[0].status == 403


def test_a_call_after_the_handler_returned_is_refused(web: Web, kernel: ScriptedKernel) -> None:
    over, seen = threading.Event(), []

    def late() -> None:
        over.wait(30)
        seen.append(web.post(client, fake.url + CHAT))

    threads: list[threading.Thread] = []

    def ask() -> None:
        threads.append(threading.Thread(target=bind_context(late)))
        threads[0].start()

    with FakeProvider([]) as fake, web.client() as client:
        run(kernel, ask)
        over.set()
        threads[0].join()
    assert seen[0].status == 403
    assert len(kernel.sent("submit")) == 0


# When the outcome cannot be recorded


def test_an_outcome_that_comes_after_the_execution_ended(web: Web, kernel: ScriptedKernel) -> None:
    def ended(request: Recorded) -> Answer | None:
        if request.call == "step_complete":
            return Answer.json({"decision": "execution_terminal"})
        return None

    kernel.intercept(ended)
    seen: list[Got] = []
    with FakeProvider([text("Snow.")]) as fake, web.client() as client:
        run(kernel, lambda: seen.append(web.post(client, fake.url + CHAT)))
    assert seen[0].status == 403
    assert b"execution_terminal" in seen[0].content
    assert kernel.sent("complete") == kernel.sent("fail") == []


def test_an_outcome_that_the_kernel_refuses_is_not_handed_out(
    web: Web, kernel: ScriptedKernel
) -> None:
    def refusing(request: Recorded) -> Answer | None:
        if request.call == "step_complete":
            return Answer.error(400, "validation_error", "no such thing")
        return None

    kernel.intercept(refusing)
    seen: list[Got] = []
    with FakeProvider([text("Snow.")]) as fake, web.client() as client:
        run(kernel, lambda: seen.append(web.post(client, fake.url + CHAT)))
    assert seen[0].status == 400
    assert "no such thing" in json.loads(seen[0].content)["error"]["message"]


def test_a_decision_of_a_later_protocol_fails_the_execution(
    web: Web, kernel: ScriptedKernel
) -> None:
    kernel.decide_steps(lambda submission: {"decision": "postponed", "step_id": "s1"})
    with FakeProvider([]) as fake, web.client() as client:
        seen = run(kernel, lambda: web.post(client, fake.url + CHAT).status)
    assert seen.run.status == "failed"
    assert "postponed" in seen.run.failure_reason


@pytest.mark.parametrize("result", ["text", {"status": "x"}, {"body": "x"}, None, [1]])
def test_a_record_that_is_no_answer_is_an_error(
    web: Web, kernel: ScriptedKernel, result: Any
) -> None:
    kernel.decide_steps(
        lambda submission: {"decision": "replay", "step_id": "s1", "result": result}
    )
    seen: list[Got] = []
    with FakeProvider([]) as fake, web.client() as client:
        run(kernel, lambda: seen.append(web.post(client, fake.url + CHAT)))
    assert (seen[0].status, seen[0].headers["x-should-retry"]) == (400, "false")
    assert "step s1 holds what is no answer" in seen[0].text


@pytest.mark.parametrize("error", ["gone", {"message": "gone"}, {"message": "gone", "type": "X"}])
def test_a_failure_that_another_sdk_recorded(web: Web, kernel: ScriptedKernel, error: Any) -> None:
    kernel.decide_steps(lambda submission: {"decision": "replay", "step_id": "s1", "error": error})
    seen: list[tuple[str, str]] = []
    with FakeProvider([]) as fake, web.client() as client:
        run(kernel, lambda: seen.append(web.error(lambda: web.post(client, fake.url + CHAT))))
    name = "RequestException" if web.name == "requests" else "TransportError"
    has_type = isinstance(error, dict) and "type" in error
    assert seen == [(name, "X: gone" if has_type else "gone")]


def test_an_answer_that_another_sdk_recorded(web: Web, kernel: ScriptedKernel) -> None:
    """Its record has the three fields of PROTOCOL 11 and no more."""
    result = {"status": 200, "headers": {"content-type": "application/json"}, "body": "{}"}
    kernel.decide_steps(
        lambda submission: {"decision": "replay", "step_id": "s1", "result": result}
    )
    seen: list[Got] = []
    with FakeProvider([]) as fake, web.client() as client:
        run(kernel, lambda: seen.append(web.post(client, fake.url + CHAT)))
    assert seen == [Got(200, "OK", {"content-type": "application/json"}, b"{}", "{}")]


# A gateway before the provider that refuses in the same way


def gateway_says(decision: str) -> bytes:
    message = f"rebuno_refusal: {decision}"
    return json.dumps({"error": {"type": "rebuno_refusal", "message": message}}).encode()


@pytest.mark.parametrize("decision", ["blocked", "execution_terminal", "lease_superseded"])
def test_a_gateway_that_ends_the_dispatch_leaves_no_outcome(
    web: Web, kernel: ScriptedKernel, decision: str
) -> None:
    status = 409 if decision == "lease_superseded" else 403
    with (
        FakeProvider([raw(gateway_says(decision), status=status)]) as fake,
        web.client(retries=2) as client,
    ):
        seen = run(kernel, lambda: web.post(client, fake.url + CHAT).status)
    assert seen.steps == [("test-model", "executing")]
    assert kernel.sent("complete") == kernel.sent("fail") == []
    assert len(fake.asked) == 1


@pytest.mark.parametrize(
    ("decision", "status", "reason"),
    [
        ("denied reason=too dear", 403, "policy_denied: too dear"),
        ("rate_limited reason=rate_limit_exceeded", 429, "rate_limit_exceeded"),
    ],
)
def test_a_gateway_that_denies_is_an_outcome(
    web: Web, kernel: ScriptedKernel, decision: str, status: int, reason: str
) -> None:
    reply = raw(gateway_says(decision), status=status)
    with FakeProvider([reply]) as fake, web.client(retries=2) as client:
        seen = run(kernel, lambda: raise_for_status(web, client, fake.url + CHAT))
    assert (seen.run.status, seen.run.failure_reason) == ("failed", reason)
    assert seen.outcomes[0]["headers"]["x-should-retry"] == "false"
    assert len(fake.asked) == 1


def test_a_model_that_speaks_of_refusals_refuses_nothing(web: Web) -> None:
    said = "It said 'rebuno_refusal: blocked', whatever that means."
    replies = [
        text(said),
        raw(json.dumps({"error": {"message": said}}).encode(), status=403),
        raw(b"rebuno_refusal: blocked", status=403, content_type="text/plain"),
    ]
    with FakeProvider(replies) as fake, web.client() as client:
        seen = run_twice(lambda: [web.post(client, fake.url + CHAT).status for _ in replies])
    assert seen.values[0] == [200, 403, 403]


def test_lease_superseded_is_remembered(web: Web, kernel: ScriptedKernel) -> None:
    """After it, no further call reaches the kernel, whatever the handler catches."""

    def lost(request: Recorded) -> Answer | None:
        if request.call == "submit":
            return Answer.error(409, "lease_superseded")
        return None

    kernel.intercept(lost)
    seen: list[Any] = []

    def ask() -> None:
        for _ in range(3):
            try:
                raise_for_status(web, client, fake.url + CHAT)
            except Exception as exc:
                with pytest.raises(LeaseSuperseded):
                    raise_for_refusal(exc)
                seen.append(exc)

    with FakeProvider([]) as fake, web.client() as client:
        run(kernel, ask)
    assert len(seen) == 3
    assert len(kernel.sent("submit")) == 1
