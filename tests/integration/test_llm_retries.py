"""``retries=``: a transient failure is tried again inside the one step."""

from __future__ import annotations

import json
import socket
import threading
import time
from typing import Any

import pytest

from examples.fake_provider import FakeProvider, Reply, dropped, error, raw, text
from rebuno_sync import execution
from rebuno_sync.effects import llm_call
from tests.integration.llm_runs import ASK, WEBS, Seen, Web, agent_under, receive, run_twice
from tests.scripted import GENERATION_3, ScriptedKernel, wait_until

CHAT = "/v1/chat/completions"


@pytest.fixture(params=WEBS, ids=repr)
def web(request: pytest.FixtureRequest) -> Web:
    return request.param


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llm_call, "_FIRST_PAUSE", 0.001)


TRANSIENT = [
    dropped(),
    error(408),
    error(409),
    error(429),
    error(500),
    error(503),
    error(529),
    text("Never whole.").cut(30),
]


@pytest.mark.parametrize("failing", TRANSIENT, ids=lambda r: str(r.status or "dropped"))
def test_a_transient_failure_is_tried_again_in_the_same_step(web: Web, failing: Reply) -> None:
    with FakeProvider([failing, text("Snow.")]) as fake, web.client(retries=1) as client:
        seen = run_twice(lambda: web.post(client, fake.url + CHAT))
    assert "Snow." in seen.values[0].text
    assert seen.steps == [("test-model", "succeeded")]
    first, second = fake.asked
    assert first.body == second.body
    assert first.headers["idempotency-key"] == second.headers["idempotency-key"]


@pytest.mark.parametrize("failing", TRANSIENT, ids=lambda r: str(r.status or "dropped"))
def test_nothing_is_tried_again_unless_asked_for(web: Web, failing: Reply) -> None:
    def ask() -> Any:
        try:
            return web.post(client, fake.url + CHAT).status
        except web.base_error as exc:
            return type(exc).__name__

    with FakeProvider([failing]) as fake, web.client() as client:
        run_twice(ask)
    assert len(fake.asked) == 1


@pytest.mark.parametrize(
    "failing",
    [
        error(400),
        error(401),
        error(404),
        error(422),
        error(429).with_headers(x_should_retry="false"),
        error(503, retry_after=121),
    ],
    ids=["400", "401", "404", "422", "told not to", "a long wait"],
)
def test_what_another_try_cannot_mend_is_recorded_at_once(web: Web, failing: Reply) -> None:
    with FakeProvider([failing]) as fake, web.client(retries=3) as client:
        seen = run_twice(lambda: web.post(client, fake.url + CHAT).status)
    assert seen.values[0] == failing.status
    assert len(fake.asked) == 1


def test_only_the_last_failure_is_recorded(web: Web) -> None:
    replies = [error(500, "first"), dropped(), error(503, "last")]
    with FakeProvider(replies) as fake, web.client(retries=2) as client:
        seen = run_twice(lambda: web.post(client, fake.url + CHAT).text)
    assert "last" in seen.values[0]
    assert "first" not in json.dumps(seen.outcomes)
    assert len(seen.steps) == 1


def test_a_stream_is_tried_again_until_it_begins(web: Web) -> None:
    replies = [error(503), text("Snow.", "!")]
    with FakeProvider(replies) as fake, web.client(retries=1) as client:
        body = {**ASK, "stream": True}
        seen = run_twice(lambda: web.post(client, fake.url + CHAT, body).content)
    assert b"Snow." in seen.values[0]


def test_a_stream_that_has_begun_is_not_tried_again(web: Web) -> None:
    def ask() -> tuple[str, str]:
        body = {**ASK, "stream": True}
        return web.error(lambda: web.post(client, fake.url + CHAT, body))

    with FakeProvider([text("Snow.", "!").cut(2)]) as fake, web.client(retries=3) as client:
        run_twice(ask)
    assert len(fake.asked) == 1


def test_a_refused_connection_is_tried_again(web: Web) -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        url = f"http://127.0.0.1:{closed.getsockname()[1]}{CHAT}"
    answers: list[Any] = []

    def listen() -> None:
        with socket.create_server(("127.0.0.1", int(url.split(":")[2].split("/")[0]))) as server:
            listening.set()
            connection, _ = server.accept()
            with connection:
                receive(connection)
                connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")

    listening = threading.Event()
    thread = threading.Thread(target=listen)

    def ask() -> str:
        if not answers:
            answers.append(None)
            thread.start()
        return web.post(client, url).text

    with web.client(retries=50) as client:
        seen = run_twice(ask)
    thread.join()
    assert seen.values[0] == "ok"


@pytest.mark.parametrize("form", ["seconds", "milliseconds", "date"])
def test_retry_after_is_honoured(web: Web, form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []
    began = time.time()
    date = time.strftime("%a, %d %b %Y %H:%M:%S GMT", time.gmtime(began + 60))
    headers = {
        "seconds": {"retry-after": "59"},
        "milliseconds": {"retry-after-ms": "59000", "retry-after": "1"},
        "date": {"retry-after": date},
    }[form]
    replies = [raw(b"{}", status=503, headers=headers), text("Snow.")]

    def ask() -> str:
        monkeypatch.setattr(execution().cancelled, "wait", lambda s: waits.append(s) and False)
        return web.post(client, fake.url + CHAT).text

    with FakeProvider(replies) as fake, web.client(retries=1) as client:
        run_twice(ask)
    (wait,) = waits
    assert 30 < wait <= 60


def test_pauses_grow(web: Web, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llm_call, "_FIRST_PAUSE", 0.5)
    waits: list[float] = []

    def ask() -> str:
        monkeypatch.setattr(execution().cancelled, "wait", lambda s: waits.append(s) and False)
        return web.post(client, fake.url + CHAT).text

    with FakeProvider([error(500)] * 8 + [text("Snow.")]) as fake, web.client(retries=8) as client:
        run_twice(ask)
    for n, wait in enumerate(waits):
        base = min(0.5 * 2**n, 30.0)
        assert 0.75 * base <= wait <= 1.25 * base


def test_the_lease_is_kept_while_waiting_and_a_lost_one_ends_it() -> None:
    """A pause longer than the lease; then another attempt takes over in a pause."""
    web = WEBS[0]
    with ScriptedKernel(GENERATION_3, lease_timeout=0.3) as kernel:
        replies = [error(503, retry_after=1), error(503, retry_after=100), text("Snow.")]

        def ask() -> str:
            return web.post(client, fake.url + CHAT).text

        seen = Seen(kernel.create({}))
        with (
            FakeProvider(replies) as fake,
            web.client(retries=3) as client,
            agent_under(kernel, lambda: seen.values.append(ask())) as agent,
        ):
            kernel.deliver(seen.run)
            fake.wait_until_asked(2)
            # Now it pauses for 100 seconds, which the lease is kept for and must not outlast.
            wait_until(lambda: len(kernel.sent("heartbeat")) >= 3)
            kernel.deliver(seen.run)
            assert agent.join(60)
    assert seen.run.status == "completed"
    assert len(fake.asked) == 3
    assert len(kernel.sent("step_complete")) == 1
