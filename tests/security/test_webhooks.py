"""Webhooks that the kernel did not send, not like this, not now, or not to this agent."""

from __future__ import annotations

import json
import logging
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from rebuno_sync import Agent, signing
from rebuno_sync.agent import MAX_WEBHOOK_BYTES
from rebuno_sync.testing.in_process import TestKernel

SECRET = "orchard-secret"
DISPATCH = {
    "execution_id": "01a22858-90c6-7f9f-87bd-f638f4b4a5dd",
    "dispatch_id": "01a22858-90c7-7f9f-87bd-f638f4b4a5dd",
    "dispatch_attempt": 1,
    "lease_timeout_seconds": 60,
}
BODY = json.dumps(DISPATCH).encode()


def agent(agent_id: str = "a1", **options: Any) -> Agent:
    return Agent(agent_id, base_url="http://127.0.0.1:9", **{"secret": SECRET, **options})


def signed(body: bytes, secret: str = SECRET) -> str:
    return signing.sign_body(secret, body)


def posted(body: bytes, signature: str | None) -> Any:
    """The answer of an agent without a handler: 503 is what a good webhook gets."""
    headers = {} if signature is None else {"Rebuno-Signature": signature}
    return agent().app.test_client().post("/webhook", data=body, headers=headers)


def test_a_good_webhook_gets_further() -> None:
    assert posted(BODY, signed(BODY)).status_code == 503


FORGED = {
    "unsigned": None,
    "empty": "",
    "no digest": "sha256=",
    "truncated": signed(BODY)[:-1],
    "lengthened": signed(BODY) + "0",
    "upper case": signed(BODY).upper(),
    "without its prefix": signed(BODY).removeprefix("sha256="),
    "another secret": signed(BODY, SECRET + "x"),
    "the empty secret": signed(BODY, ""),
    "another body": signed(BODY + b" "),
    "another algorithm": "md5=" + signed(BODY).removeprefix("sha256="),
    "a request signature": signing.sign_request(SECRET, "POST", "/webhook", "0", BODY),
    "two at once": f"{signed(BODY)}, {signed(BODY)}",
    "letters that are none": "sha256=" + "\u00e9" * 64,
}


@pytest.mark.parametrize("signature", FORGED.values(), ids=FORGED.keys())
def test_a_forged_signature_is_refused_without_a_word(signature: str | None) -> None:
    answer = posted(BODY, signature)
    assert (answer.status_code, answer.data) == (401, b"")


@pytest.mark.parametrize("cut", [0, 1, len(BODY) // 2, len(BODY) - 1])
def test_a_truncated_webhook_is_refused(cut: int) -> None:
    assert posted(BODY[:cut], signed(BODY)).status_code == 401


def test_a_webhook_is_verified_before_it_is_parsed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rebuno_sync.wire.decode", lambda data: pytest.fail("it was parsed"))
    assert posted(BODY, signed(b"")).status_code == 401


def test_an_oversized_webhook_is_refused_signed_or_not() -> None:
    body = BODY + b" " * (MAX_WEBHOOK_BYTES + 1 - len(BODY))
    assert posted(body, signed(body)).status_code == 413
    assert posted(body, None).status_code == 413
    assert posted(body[:-1], signed(body[:-1])).status_code == 503


@pytest.mark.parametrize(
    "change",
    [
        {"execution_id": "x\r\nX-Injected: 1"},
        {"dispatch_id": "x\r\nRebuno-Agent-Id: other"},
        {"execution_id": ".."},
        {"execution_id": "."},
        {"dispatch_id": "x\0"},
        {"dispatch_id": "\u00e9"},
        {"execution_id": ["x"]},
        {"dispatch_attempt": float("inf")},
        {"dispatch_attempt": 1e999},
        {"lease_timeout_seconds": float("nan")},
    ],
    ids=str,
)
def test_ids_that_would_be_more_than_ids_are_refused(change: dict[str, Any]) -> None:
    body = json.dumps({**DISPATCH, **change}).encode()
    assert posted(body, signed(body)).status_code == 400


BOMBS = {
    "depth": b"[" * 30_000 + b"]" * 30_000,
    "depth of objects": b'{"execution_id":' * 3000 + b"1" + b"}" * 3000,
    "an unknown field of depth": BODY[:-1] + b',"x":' + b"[" * 30_000 + b"]" * 30_000 + b"}",
    "a long attempt": BODY.replace(b'"dispatch_attempt": 1', b'"dispatch_attempt": ' + b"9" * 6000),
    "an infinite attempt": BODY.replace(b'"dispatch_attempt": 1', b'"dispatch_attempt": 1e999999'),
    "a list": b"[" + BODY + b"]",
    "text": b'"x"',
    "not UTF-8": BODY.replace(b"01a2", b"\xff1a2"),
}


@pytest.mark.parametrize("body", BOMBS.values(), ids=BOMBS.keys())
def test_bombs_are_refused_even_when_signed(body: bytes) -> None:
    assert posted(body, signed(body)).status_code == 400


def test_of_duplicate_fields_the_last_counts() -> None:
    doubled = BODY[:-1] + b', "dispatch_attempt": 0}'
    assert posted(doubled, signed(doubled)).status_code == 400


def test_a_replayed_delivery_runs_nothing_again() -> None:
    """An old webhook stays well signed for ever; the attempt in it is what is spent."""
    calls: list[int] = []
    seen: list[tuple[bytes, str]] = []
    worker = Agent("a1", secret=SECRET, base_url="http://kernel.invalid")
    worker.bind(lambda: calls.append(1))
    deliver = worker.deliver

    def spying(body: bytes, signature: str | None, *rest: Any) -> tuple[int, str]:
        seen.append((body, signature or ""))
        return deliver(body, signature, *rest)

    worker.deliver = spying  # type: ignore[method-assign]
    with TestKernel() as kernel:
        kernel.attach(worker)
        with kernel.client() as client:
            created = client.create("a1")
            assert client.wait(created.id, timeout=30).status == "completed"
            assert worker.join(30)
            # To the process that had it, and to one that never did.
            assert deliver(*seen[0]) == (202, "already held")
            other = Agent("a1", secret=SECRET, base_url="http://kernel.invalid")
            other.bind(lambda: calls.append(2))
            other.connect(kernel.transport())
            assert other.deliver(*seen[0])[0] == 202
            assert other.join(30)
            assert calls == [1]
            assert client.get(created.id).status == "completed"
        assert other.close(10)
        assert worker.close(10)


@pytest.mark.parametrize("lax", [False, True], ids=["this kernel", "a kernel that lets it read"])
def test_a_webhook_taken_by_another_agent_of_the_same_secret_runs_nothing(
    lax: bool, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Webhooks name no agent. The kernel refuses the read, and so would the agent itself."""
    with TestKernel() as kernel:
        thief = Agent("a2", secret=SECRET, base_url="http://kernel.invalid")
        thief.bind(lambda: pytest.fail("the handler ran"))
        kernel.attach(thief)
        with kernel.client() as client:
            client.register_agent("a1", "http://127.0.0.1:9/webhook", SECRET)
            created = client.create("a1")
            if lax:
                monkeypatch.setattr(
                    thief._kernel, "execution", lambda *args: client.get(created.id)
                )
            body = json.dumps({**DISPATCH, "execution_id": created.id}).encode()
            with caplog.at_level(logging.WARNING, "rebuno_sync"):
                assert thief.deliver(body, signed(body))[0] == 202
                assert thief.join(30)
            assert client.get(created.id).status == "running"
        assert "given up" in caplog.text
        assert ("a secret of its own" in caplog.text) is lax
        assert thief.close(10)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=8,
)
BODIES = (
    st.binary(max_size=200)
    | JSON.map(lambda value: json.dumps(value).encode())
    | st.dictionaries(st.sampled_from([*DISPATCH]), JSON).map(lambda f: json.dumps(f).encode())
    | st.fixed_dictionaries({}, optional=dict.fromkeys(DISPATCH, JSON)).map(
        lambda fields: json.dumps({**DISPATCH, **fields}).encode()
    )
)
SHARED = agent()
FUZZ = settings(
    max_examples=150, derandomize=True, suppress_health_check=[HealthCheck.too_slow], database=None
)


@FUZZ
@given(BODIES)
@example(BODY)
def test_any_signed_body_is_taken_or_refused(body: bytes) -> None:
    status, _ = SHARED.deliver(body, signed(body))
    assert status in (400, 503)
    if status == 503:
        fields = json.loads(body)
        assert all(isinstance(fields[name], str) for name in ("execution_id", "dispatch_id"))


@FUZZ
@given(BODIES, st.none() | st.text(max_size=80) | st.from_regex(r"\Asha256=[0-9a-f]{64}\Z"))
def test_any_other_signature_is_refused(body: bytes, signature: str | None) -> None:
    assert SHARED.deliver(body, signature) == (401, "")


CLIENT = SHARED.app.test_client()


@FUZZ
@given(
    BODIES,
    st.booleans(),
    st.dictionaries(
        st.sampled_from(["Content-Type", "Content-Encoding", "Transfer-Encoding", "Expect"]),
        st.text(st.characters(min_codepoint=32, max_codepoint=126), max_size=20),
    ),
    st.sampled_from(["POST", "GET", "PUT", "OPTIONS", "HEAD"]),
)
def test_the_route_never_fails(
    body: bytes, good: bool, headers: dict[str, str], method: str
) -> None:
    signature = signed(body if good else body + b"x")
    answer = CLIENT.open(
        "/webhook", method=method, data=body, headers={**headers, "Rebuno-Signature": signature}
    )
    if method != "POST":
        assert answer.status_code in (200, 405)
    else:
        assert answer.status_code in ((400, 401, 503) if good else (401,))
