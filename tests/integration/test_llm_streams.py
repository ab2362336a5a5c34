"""Streamed answers: each way in which one can end, through requests, httpx2 and httpx."""

from __future__ import annotations

import base64
import dataclasses
import json
import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from examples.fake_provider import FakeProvider, Reply, error, raw, text
from rebuno_sync import (
    Blocked,
    ContextThreadPoolExecutor,
    LeaseSuperseded,
    Terminated,
    bind_context,
    execution,
    step,
    tool,
)
from rebuno_sync.effects import llm_live
from rebuno_sync.effects.llm_live import MAX_DELTA
from rebuno_sync.kernel_client import KernelClient
from tests.integration.llm_runs import (
    ASK,
    WEBS,
    Killed,
    Seen,
    Web,
    agent_under,
    receive,
    run,
    run_twice,
)
from tests.scripted import (
    GENERATION_1,
    GENERATION_2,
    GENERATION_3,
    Answer,
    Recorded,
    ScriptedKernel,
    Verdict,
    wait_until,
)

CHAT = "/v1/chat/completions"
STREAM = {**ASK, "stream": True}
WORDS = ("Snow", " in", " Tromsø,", " −4 °C.")


@pytest.fixture(params=WEBS, ids=repr)
def web(request: pytest.FixtureRequest) -> Web:
    return request.param


@pytest.fixture
def kernel() -> Iterator[ScriptedKernel]:
    with ScriptedKernel(GENERATION_3) as kernel:
        yield kernel


def read(web: Web, client: Any, url: str) -> tuple[bytes, tuple[str, str] | None]:
    """What comes of a stream, and the error it ends with."""
    came: list[bytes] = []
    with web.opened(client, url, STREAM) as response:
        try:
            for chunk in web.chunks(response):
                came.append(chunk)
        except web.base_error as exc:
            return b"".join(came), (type(exc).__name__, str(exc))
    return b"".join(came), None


def read_some(web: Web, client: Any, url: str, enough: bytes) -> bytes:
    """Read until ``enough`` has come, and close."""
    came = b""
    with web.opened(client, url, STREAM) as response:
        for chunk in web.chunks(response):
            came += chunk
            if enough in came:
                break
    return came[: came.index(enough)]


def noted(value: Any) -> Any:
    """Have an effect that may follow from what came before it."""
    step("note", lambda: "noted")
    return value


# Read to the end


def test_a_stream_is_passed_on_as_it_comes_and_recorded_at_its_end(
    web: Web, kernel: ScriptedKernel
) -> None:
    more = threading.Event()
    notes: list[list[str]] = []

    def ask() -> bytes:
        with web.opened(client, fake.url + CHAT, STREAM) as response:
            chunks = web.chunks(response)
            first = next(chunks)
            notes.append(kernel.calls("step_complete"))
            more.set()
            whole = first + b"".join(chunks)
        notes.append(kernel.calls("step_complete"))
        return whole

    with FakeProvider([text(*WORDS).held(more, after=1)]) as fake, web.client() as client:
        seen = run_twice(ask, kernel)
    assert notes[:2] == [[], ["step_complete"]]
    whole = seen.values[0]
    assert whole.endswith(b"data: [DONE]\n\n")
    assert seen.outcomes == [
        {
            "status": 200,
            "headers": {"content-type": "text/event-stream; charset=utf-8"},
            "body": whole.decode(),
        }
    ]
    assert len(fake.asked) == 1


@pytest.mark.parametrize("generation", [GENERATION_1, GENERATION_2, GENERATION_3], ids=str)
def test_the_first_chunk_waits_for_two_kernel_requests_at_most(
    web: Web, generation: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Counted up to when the caller has the chunk in hand, all that goes to the kernel included."""
    # A delta that falls due meanwhile on a slow machine holds nobody up: let none fall due.
    monkeypatch.setattr(llm_live, "FLUSH_AFTER", 1e6)
    more = threading.Event()
    made: list[list[str]] = []

    def ask() -> bytes:
        before = len(kernel.requests)
        with web.opened(client, fake.url + CHAT, STREAM) as response:
            chunks = web.chunks(response)
            first = next(chunks)
            made.append(kernel.calls()[before:])
            more.set()
            return first + b"".join(chunks)

    with (
        ScriptedKernel(generation) as kernel,
        FakeProvider([text(*WORDS).held(more, after=1)]) as fake,
        web.client() as client,
    ):
        seen = run(kernel, ask)
    (calls,) = made
    assert "submit" in calls
    assert len(calls) <= 2, calls
    assert seen.values[0].endswith(b"data: [DONE]\n\n")


def test_a_stream_has_the_recorded_headers_and_no_other(web: Web) -> None:
    def ask() -> dict[str, str]:
        with web.opened(client, fake.url + CHAT, STREAM) as response:
            assert b"".join(web.chunks(response))
            return {name.lower(): value for name, value in response.headers.items()}

    with FakeProvider([text(*WORDS)]) as fake, web.client() as client:
        seen = run_twice(ask)
    assert seen.values[0] == {"content-type": "text/event-stream; charset=utf-8"}


@pytest.mark.parametrize("size", [1, 7, 4096])
def test_chunks_may_fall_anywhere(web: Web, size: int) -> None:
    reply = text(*WORDS).in_chunks_of(size)
    with FakeProvider([reply]) as fake, web.client() as client:
        seen = run_twice(lambda: read(web, client, fake.url + CHAT))
    assert "Tromsø" in seen.outcomes[0]["body"]


def test_a_compressed_stream_comes_decoded_and_as_it_comes(web: Web) -> None:
    more = threading.Event()

    def ask() -> bytes:
        with web.opened(client, fake.url + CHAT, STREAM) as response:
            chunks = web.chunks(response)
            first = next(chunks)
            more.set()
            return first + b"".join(chunks)

    reply = text(*WORDS).gzipped().held(more, after=1)
    with FakeProvider([reply]) as fake, web.client() as client:
        seen = run_twice(ask)
    assert seen.values[0].startswith(b"data: {")


def test_event_streams_are_streamed_unasked(web: Web, kernel: ScriptedKernel) -> None:
    body = b"data: 1\n\ndata: 2\n\n"
    reply = raw([body[:9], body[9:]], content_type="text/event-stream")
    with FakeProvider([reply]) as fake, web.client() as client:
        seen = run_twice(lambda: web.post(client, fake.url + CHAT).content, kernel)
    assert seen.values[0] == body
    assert "".join(r.json["data"] for r in kernel.sent("stream")).encode() == body


def test_a_stream_that_is_not_chunked_comes_as_it_comes(web: Web) -> None:
    """It ends with the connection, as simple servers have it."""
    more = threading.Event()

    def serve() -> None:
        connection, _ = listener.accept()
        with connection:
            receive(connection)
            connection.sendall(b"HTTP/1.0 200 OK\r\nContent-Type: text/event-stream\r\n\r\n")
            connection.sendall(b"data: 1\n\n")
            assert more.wait(30)
            connection.sendall(b"data: 2\n\n")

    def ask() -> tuple[bytes, bytes]:
        with web.opened(client, url, STREAM) as response:
            chunks = web.chunks(response)
            first = next(chunks) if not more.is_set() else b""
            more.set()
            return first, first + b"".join(chunks)

    with socket.create_server(("127.0.0.1", 0)) as listener, web.client() as client:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}{CHAT}"
        thread = threading.Thread(target=serve)
        thread.start()
        seen = run_twice(ask, same=False)
        thread.join()
    assert seen.values[0] == (b"data: 1\n\n", b"data: 1\n\ndata: 2\n\n")
    assert seen.values[1][1] == b"data: 1\n\ndata: 2\n\n"


def test_an_error_to_a_streamed_request_is_a_plain_answer(web: Web, kernel: ScriptedKernel) -> None:
    with FakeProvider([error(400, "no such thing")]) as fake, web.client() as client:
        seen = run_twice(lambda: web.post(client, fake.url + CHAT, STREAM), kernel)
    assert (seen.values[0].status, seen.outcomes[0]["status"]) == (400, 400)
    assert kernel.sent("stream") == []


def test_a_binary_stream_comes_back_byte_for_byte(web: Web) -> None:
    content = bytes(range(256))
    reply = raw([content[:200], content[200:]], content_type="application/octet-stream")
    with FakeProvider([reply]) as fake, web.client() as client:
        seen = run_twice(lambda: read(web, client, fake.url + CHAT))
    assert seen.values[0] == (content, None)
    assert base64.b64decode(seen.outcomes[0]["body_base64"]) == content


def test_an_empty_stream_is_recorded(web: Web) -> None:
    with FakeProvider([raw(b"")]) as fake, web.client() as client:
        seen = run_twice(lambda: read(web, client, fake.url + CHAT))
    assert seen.values[0] == (b"", None)
    assert seen.outcomes[0]["body"] == ""


def test_reading_twice_is_the_librarys_own_error_on_both_runs(web: Web) -> None:
    def ask() -> str:
        with web.opened(client, fake.url + CHAT, STREAM) as response:
            assert b"".join(web.chunks(response))
            with pytest.raises((RuntimeError, TypeError)) as caught:
                b"".join(web.chunks(response))
            return type(caught.value).__name__

    with FakeProvider([text(*WORDS)]) as fake, web.client() as client:
        seen = run_twice(ask)
    name = "StreamConsumedError" if web.name == "requests" else "StreamConsumed"
    assert seen.values[0] == name


# Cut


def test_a_cut_stream_ends_in_the_same_error_after_the_same_bytes(web: Web) -> None:
    with FakeProvider([text(*WORDS).cut(3)]) as fake, web.client() as client:
        seen = run_twice(lambda: read(web, client, fake.url + CHAT))
    came, failure = seen.values[0]
    assert b" in" in came
    assert b"[DONE]" not in came
    name = "ChunkedEncodingError" if web.name == "requests" else "RemoteProtocolError"
    assert failure is not None
    assert failure[0] == name
    assert seen.steps == [("test-model", "failed")]
    assert seen.outcomes[0] == {
        "type": name,
        "message": failure[1],
        "response": {
            "status": 200,
            "headers": {"content-type": "text/event-stream; charset=utf-8"},
            "body": came.decode(),
        },
    }
    assert len(fake.asked) == 1


def test_a_stream_that_falls_silent_ends_in_the_same_error(web: Web) -> None:
    never = threading.Event()

    def ask() -> Any:
        came = b""
        with web.opened(client, fake.url + CHAT, STREAM, timeout=3.0) as response:
            chunks = web.chunks(response)
            came += next(chunks)
            return came, web.error(lambda: list(chunks))

    with FakeProvider([text(*WORDS).held(never, after=1)]) as fake, web.client() as client:
        seen = run_twice(ask)
        never.set()
    assert seen.values[0][1][0] == ("ConnectionError" if web.name == "requests" else "ReadTimeout")
    assert seen.steps == [("test-model", "failed")]


def test_reading_on_after_the_cut_ends_in_the_error_again() -> None:
    """A caller that tries once more, which requests lets it, must not take the cut for an end."""
    web = Web("requests")

    def ask() -> list[str]:
        names = []
        with web.opened(client, fake.url + CHAT, STREAM) as response:
            for _ in range(2):
                names.append(web.error(lambda: list(response.iter_content(None)))[0])
        return names

    with FakeProvider([text(*WORDS).cut(2)]) as fake, web.client() as client:
        seen = run_twice(ask)
    assert seen.values[0] == ["ChunkedEncodingError"] * 2


def test_a_stream_too_large_to_record_ends_in_an_error(web: Web) -> None:
    reply = raw([b"x" * (1 << 20)] * 11)
    with FakeProvider([reply]) as fake, web.client() as client:
        seen = run_twice(lambda: read(web, client, fake.url + CHAT)[1], same=False)
    first, second = seen.values
    assert "ResponseTooLarge" in first[1]
    # The next attempt is told so at once, by an answer that is not retried.
    assert second is None
    assert seen.steps == [("test-model", "failed")]
    assert seen.outcomes[0]["reason"] == "too_large"


# Closed early


def test_a_stream_closed_early_is_recorded_as_far_as_it_came(web: Web) -> None:
    never = threading.Event()
    with (
        FakeProvider([text(*WORDS).held(never, after=3)]) as fake,
        web.client() as client,
    ):
        seen = run_twice(lambda: noted(read_some(web, client, fake.url + CHAT, b" in")))
        never.set()
    outcome = seen.outcomes[0]
    assert outcome["closed_early"] is True
    assert outcome["body"].startswith(seen.values[0].decode())
    assert "[DONE]" not in outcome["body"]
    # It was there before the effect that may follow from it.
    assert seen.steps == [("test-model", "succeeded"), ("note", "succeeded")]
    assert len(fake.asked) == 1


def test_reading_past_an_early_close_on_replay_is_an_error(web: Web) -> None:
    never, attempts = threading.Event(), []

    def ask() -> Any:
        attempts.append(1)
        if len(attempts) == 1:
            return noted(read_some(web, client, fake.url + CHAT, b" in"))
        return read(web, client, fake.url + CHAT)

    with (
        FakeProvider([text(*WORDS).held(never, after=3)]) as fake,
        web.client() as client,
    ):
        seen = run_twice(ask, same=False)
        never.set()
    came, failure = seen.values[1]
    assert b" in" in came
    assert failure is not None
    assert "a handler must do the same on every run" in failure[1]


def test_a_stream_closed_early_is_recorded_when_the_handler_returns(
    web: Web, kernel: ScriptedKernel
) -> None:
    with FakeProvider([text(*WORDS)]) as fake, web.client() as client:
        seen = run(kernel, lambda: read_some(web, client, fake.url + CHAT, b" in"))
    assert seen.steps == [("test-model", "succeeded")]
    assert seen.outcomes[0]["closed_early"] is True


def test_an_effect_inside_a_stream_finds_all_of_it_recorded(
    web: Web, kernel: ScriptedKernel
) -> None:
    """What the effect follows from must be there when the handler runs again."""
    orders: list[list[str]] = []

    def ask() -> bytes:
        came = b""
        with web.opened(client, fake.url + CHAT, STREAM) as response:
            for chunk in web.chunks(response):
                came += chunk
                if len(orders) == 0:
                    noted(None)
                    orders.append(kernel.calls("submit", "step_complete"))
        return came

    with FakeProvider([text(*WORDS)]) as fake, web.client() as client:
        seen = run(kernel, ask)
    assert orders == [["submit", "step_complete", "submit", "step_complete"]]
    assert seen.values[0].endswith(b"data: [DONE]\n\n")
    assert seen.outcomes[0]["body"] == seen.values[0].decode()


def test_a_cut_that_is_found_before_an_effect_still_comes_in_its_place(web: Web) -> None:
    def ask() -> Any:
        came = b""
        with web.opened(client, fake.url + CHAT, STREAM) as response:
            chunks = web.chunks(response)
            came += noted(next(chunks))
            try:
                for chunk in chunks:
                    came += chunk
            except web.base_error as exc:
                return came, type(exc).__name__
        return came, None

    with FakeProvider([text(*WORDS).cut(4)]) as fake, web.client() as client:
        seen = run_twice(ask)
    assert b"Troms" in seen.values[0][0]
    assert seen.values[0][1] is not None
    assert seen.steps == [("test-model", "failed"), ("note", "succeeded")]


def test_a_stream_that_another_thread_reads_is_left_to_it(web: Web, kernel: ScriptedKernel) -> None:
    """An effect here waits for no answer that is read there."""
    more = threading.Event()

    def ask() -> str:
        began = threading.Event()

        def elsewhere() -> bytes:
            with web.opened(client, fake.url + CHAT, STREAM) as response:
                chunks = web.chunks(response)
                first = next(chunks)
                began.set()
                return first + b"".join(chunks)

        with ContextThreadPoolExecutor(1) as pool:
            reading = pool.submit(elsewhere)
            assert began.wait(30)
            noted(None)
            more.set()
            return reading.result(30).decode()

    with FakeProvider([text(*WORDS).held(more, after=2)]) as fake, web.client() as client:
        seen = run(kernel, ask)
    assert seen.values[0].endswith("data: [DONE]\n\n")
    assert seen.steps == [("test-model", "succeeded"), ("note", "succeeded")]


def test_a_stream_that_another_thread_reads_when_the_handler_returns(
    web: Web, kernel: ScriptedKernel
) -> None:
    more, began = threading.Event(), threading.Event()
    ended: list[Any] = []
    threads: list[threading.Thread] = []

    def elsewhere() -> None:
        try:
            with web.opened(client, fake.url + CHAT, STREAM) as response:
                chunks = web.chunks(response)
                next(chunks)
                began.set()
                ended.append(b"".join(chunks))
        except Terminated:
            ended.append("Terminated")

    def ask() -> None:
        threads.append(threading.Thread(target=bind_context(elsewhere)))
        threads[0].start()
        assert began.wait(30)

    with FakeProvider([text(*WORDS).held(more, after=2)]) as fake, web.client() as client:
        seen = run(kernel, ask)
        more.set()
        threads[0].join()
    assert ended == ["Terminated"]
    assert seen.run.status == "completed"


def test_a_stream_closed_after_its_last_words_is_whole(web: Web) -> None:
    """As the OpenAI library closes streams: without waiting for the connection to say so."""
    reply = raw([b"data: {}\n\n", b"data: [DONE]\n\n"], content_type="text/event-stream")
    with FakeProvider([reply]) as fake, web.client() as client:
        seen = run_twice(lambda: read_some(web, client, fake.url + CHAT, b"[DONE]"))
    assert "closed_early" not in seen.outcomes[0]


def test_a_stream_let_go_unread_is_not_recorded(web: Web, kernel: ScriptedKernel) -> None:
    """Neither read nor closed: no outcome, so the next attempt asks again."""
    kept: list[Any] = []
    replies = [text("One."), text("Two.")]

    def ask() -> int:
        if kept:
            return len(read(web, client, fake.url + CHAT)[0])
        opened = web.opened(client, fake.url + CHAT, STREAM)
        kept.extend([opened, opened.__enter__()])
        return 0

    with FakeProvider(replies) as fake, web.client() as client:
        seen = run_twice(ask, kernel, same=False)
        assert len(fake.asked) == 2
        assert "Two." in seen.outcomes[0]["body"]
        assert not kept[0].__exit__(Killed, Killed(), None)
    assert len(kernel.sent("step_complete")) == 1


# Attempts that are over


def test_reading_after_the_lease_is_lost_raises_and_records_nothing(
    web: Web, kernel: ScriptedKernel
) -> None:
    more, began = threading.Event(), threading.Event()
    ended: list[str] = []

    def ask() -> str:
        if execution().dispatch_attempt == 2:
            return read(web, client, fake.url + CHAT)[0].decode()
        with web.opened(client, fake.url + CHAT, STREAM) as response:
            chunks = web.chunks(response)
            next(chunks)
            began.set()
            for _ in range(2):  # a handler that swallows it does not get further
                try:
                    list(chunks)
                    if execution().cancelled.is_set():
                        ended.append("went on")
                except LeaseSuperseded:
                    ended.append("LeaseSuperseded")
        return "never reported"

    replies = [text("One.", "Two.").held(more, after=1), text("Three.")]
    with FakeProvider(replies) as fake, web.client() as client:
        seen = Seen(kernel.create({}))
        with agent_under(kernel, lambda: seen.values.append(ask())) as agent:
            kernel.deliver(seen.run)
            assert began.wait(30)
            kernel.deliver(seen.run)
            more.set()
            assert agent.join(60)
    assert ended[0] == "LeaseSuperseded"
    assert seen.run.status == "completed"
    assert "Three." in seen.outcomes[0]["body"]
    assert len(kernel.sent("step_complete")) == 1
    assert len(kernel.sent("complete")) == 1


def test_an_execution_that_ended_meanwhile_ends_the_stream(
    web: Web, kernel: ScriptedKernel
) -> None:
    def cancelled(request: Recorded) -> Answer | None:
        if request.call == "step_complete":
            return Answer.json({"decision": "execution_terminal"})
        return None

    kernel.intercept(cancelled)
    ended: list[type] = []

    def ask() -> None:
        try:
            read(web, client, fake.url + CHAT)
        except Terminated as exc:
            ended.append(type(exc))

    with FakeProvider([text(*WORDS)]) as fake, web.client() as client:
        run(kernel, ask)
    assert ended == [Terminated]
    assert kernel.sent("complete") == kernel.sent("fail") == []


@pytest.mark.parametrize("plain", [True, False], ids=["plain", "streamed"])
@pytest.mark.parametrize("same", [True, False], ids=["same", "other"])
def test_an_outcome_that_another_attempt_recorded_first(
    web: Web, kernel: ScriptedKernel, plain: bool, same: bool
) -> None:
    other = {"status": 200, "headers": {"content-type": "x/y"}, "body": "other"}

    def already(request: Recorded) -> Answer | None:
        if request.call == "step_complete":
            stored = request.json["result"] if same else other
            return Answer.json({"decision": "replay", "result": stored})
        return None

    kernel.intercept(already)

    def ask() -> Any:
        if plain:
            return web.post(client, fake.url + CHAT).text
        return read(web, client, fake.url + CHAT)[0].decode()

    with FakeProvider([text(*WORDS)]) as fake, web.client() as client:
        seen = run(kernel, ask)
    if same:
        assert "Troms" in seen.values[0]
    elif plain:
        assert seen.values == ["other"]
    else:
        # The caller has seen something else already: this attempt must not go on.
        assert seen.values == []
        assert kernel.sent("complete") == kernel.sent("fail") == []


@tool("gated")
def gated() -> str:
    return "opened"


def test_a_stream_left_because_a_tool_waits_is_read_to_its_end(web: Web) -> None:
    """The rest is recorded, so that the handler finds all of it when it is resumed."""

    def policy(kind: str, target: str, args: Any) -> Verdict:
        return Verdict("require_approval" if kind == "tool_call" else "allow")

    notes: list[str] = []

    def ask() -> str:
        came = b""
        with web.opened(client, fake.url + CHAT, STREAM) as response:
            for chunk in web.chunks(response):
                came += chunk
                if b" in" in came and "asked" not in notes[-1:]:
                    notes.append("asked")
                    try:
                        notes.append(gated())
                    except Blocked:
                        notes.append("blocked")
                        raise
        return came.decode()

    with (
        ScriptedKernel(GENERATION_3, policy=policy) as kernel,
        FakeProvider([text(*WORDS)]) as fake,
        web.client() as client,
    ):
        seen = Seen(kernel.create({}))
        with agent_under(kernel, lambda: seen.values.append(ask())) as agent:
            kernel.deliver(seen.run)
            assert agent.join(60)
            assert seen.run.status == "blocked"
            (approval,) = seen.run.approvals.values()
            kernel.decide(approval, grant=True)
            kernel.deliver(seen.run)
            assert agent.join(60)
        assert seen.run.status == "completed"
    assert notes[:4] == ["asked", "blocked", "asked", "opened"]
    assert seen.values[0].endswith("data: [DONE]\n\n")
    assert "closed_early" not in seen.outcomes[0]
    assert len(fake.asked) == 1


def test_a_stream_left_by_a_thread_that_is_ended_is_not_recorded(
    web: Web, kernel: ScriptedKernel
) -> None:
    def ask() -> str:
        if execution().dispatch_attempt == 2:
            return read(web, client, fake.url + CHAT)[0].decode()
        with web.opened(client, fake.url + CHAT, STREAM) as response:
            chunks = web.chunks(response)
            next(chunks)
            raise Killed

    with FakeProvider([text("One.", "Two."), text("Three.")]) as fake, web.client() as client:
        seen = Seen(kernel.create({}))
        with agent_under(kernel, lambda: seen.values.append(ask())) as agent:
            for _ in range(2):
                kernel.deliver(seen.run)
                assert agent.join(60)
    assert "Three." in seen.values[0]
    assert len(kernel.sent("step_complete")) == 1


# Live deltas


@pytest.mark.parametrize("generation", [GENERATION_1, GENERATION_2, GENERATION_3], ids=str)
def test_a_stream_is_published_on_the_steps_live_channel(web: Web, generation: Any) -> None:
    reply = text(*["日本語テキスト" * 40 for _ in range(40)])
    with (
        ScriptedKernel(generation) as kernel,
        FakeProvider([reply]) as fake,
        web.client() as client,
    ):
        seen = run_twice(lambda: read(web, client, fake.url + CHAT), kernel)
        deltas = [r.json for r in kernel.sent("stream") if r.answer.status == 204]
    (step_id,) = seen.run.steps
    assert [delta["seq"] for delta in deltas] == list(range(len(deltas)))
    assert "".join(delta["data"] for delta in deltas) == seen.values[0][0].decode()
    assert max(len(delta["data"]) for delta in deltas) == MAX_DELTA
    assert all(f"/steps/{step_id}/stream" in r.path for r in kernel.sent("stream"))
    # All of them came before the outcome; generation 3 takes none after it.
    assert kernel.calls("stream", "step_complete")[-1] == "step_complete"


def test_a_short_answer_is_published_as_well(web: Web, kernel: ScriptedKernel) -> None:
    more = threading.Event()

    def ask() -> None:
        with web.opened(client, fake.url + CHAT, STREAM) as response:
            chunks = web.chunks(response)
            first = next(chunks)
            # 50 ms after it came, however little it is, and before the stream has ended.
            wait_until(lambda: kernel.sent("stream"))
            assert kernel.sent("stream")[0].json == {"seq": 0, "data": first.decode()}
            more.set()
            list(chunks)

    with FakeProvider([text(*WORDS).held(more, after=1)]) as fake, web.client() as client:
        seen = run(kernel, ask)
    assert seen.values == [None]


@pytest.mark.parametrize("status", [400, 409, 500, 0])
def test_a_kernel_that_takes_no_deltas_fails_no_call(
    web: Web, kernel: ScriptedKernel, status: int
) -> None:
    def refusing(request: Recorded) -> Answer | None:
        if request.call != "stream":
            return None
        return Answer.error(status, "conflict") if status else Answer(200, b"not JSON", "x/y")

    kernel.intercept(refusing)
    with FakeProvider([text(*WORDS)]) as fake, web.client() as client:
        seen = run_twice(lambda: read(web, client, fake.url + CHAT), kernel)
    assert seen.values[0][1] is None
    assert kernel.sent("stream")


def test_a_kernel_that_hangs_on_deltas_holds_up_no_call(
    web: Web, kernel: ScriptedKernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(llm_live, "LAST_FLUSH", 0.05)
    over = threading.Event()
    monkeypatch.setattr(KernelClient, "stream", lambda *args: over.wait(60))
    with FakeProvider([text(*WORDS)]) as fake, web.client() as client:
        seen = run_twice(lambda: read(web, client, fake.url + CHAT), kernel)
        over.set()
    assert seen.values[0][1] is None
    assert len(kernel.sent("step_complete")) == 1


def test_deltas_are_published_once_and_not_on_replay(web: Web, kernel: ScriptedKernel) -> None:
    with FakeProvider([text(*WORDS)]) as fake, web.client() as client:
        run_twice(lambda: read(web, client, fake.url + CHAT), kernel)
    whole = "".join(r.json["data"] for r in kernel.sent("stream"))
    assert whole.count("[DONE]") == 1


def slow(reply: Reply) -> Reply:
    return dataclasses.replace(reply, gap=0.001)


def test_many_streams_at_once(kernel: ScriptedKernel) -> None:
    """Each thread's stream is its own step with its own channel."""
    web = WEBS[0]

    def ask() -> list[str]:
        def one(number: int) -> str:
            body = {**STREAM, "messages": [{"role": "user", "content": f"number {number}"}]}
            return web.post(client, fake.url + CHAT, body).text

        with ContextThreadPoolExecutor(8) as pool:
            return list(pool.map(one, range(16)))

    def script(asked: Any) -> Reply:
        return slow(text(*(f"{asked.user_text} " for _ in range(10))))

    with FakeProvider(script) as fake, web.client() as client:
        seen = run_twice(ask, kernel)
    assert [json.dumps(v).count(f"number {n} ") for n, v in enumerate(seen.values[0])] == [10] * 16
    assert len(fake.asked) == 16
