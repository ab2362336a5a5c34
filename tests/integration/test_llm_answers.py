"""What a caller gets on the first run and on a replay, through requests, httpx2 and httpx."""

from __future__ import annotations

import base64
import gzip
import importlib
import json
import socket
import threading
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from examples.fake_provider import FakeProvider, dropped, error, raw, text
from rebuno_sync import ToolError, bind_context, execution, requests_session, tool
from tests.integration.llm_runs import (
    ASK,
    WEBS,
    Got,
    Seen,
    Web,
    agent_under,
    receive,
    run,
    run_twice,
)
from tests.scripted import GENERATION_3, ScriptedKernel, wait_until

CHAT = "/v1/chat/completions"


@pytest.fixture(params=WEBS, ids=repr)
def web(request: pytest.FixtureRequest) -> Web:
    return request.param


@pytest.fixture
def kernel() -> Iterator[ScriptedKernel]:
    with ScriptedKernel(GENERATION_3) as kernel:
        yield kernel


@contextmanager
def sending(answer: bytes) -> Iterator[str]:
    """A server that answers each request with these very bytes and hangs up; yields its URL."""
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            with connection:
                receive(connection)
                connection.sendall(answer)

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}{CHAT}"
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        thread.join()


def compressed(coding: str, body: bytes) -> bytes:
    if coding == "br":
        return bytes(importlib.import_module("brotli").compress(body))
    if coding == "zstd":
        return bytes(importlib.import_module("backports.zstd").compress(body))
    return zlib.compress(body) if coding == "deflate" else gzip.compress(body)


# The record


def test_a_call_is_a_step_of_kind_llm_call_with_the_models_name(
    web: Web, kernel: ScriptedKernel
) -> None:
    with FakeProvider([text("Snow.")]) as fake, web.client() as client:
        seen = run_twice(lambda: web.post(client, fake.url + CHAT), kernel)
    submissions = [r.json for r in kernel.sent("submit")]
    assert len(submissions) == 2
    for submission in submissions:
        assert submission == {
            "kind": "llm_call",
            "target": "test-model",
            "args": ASK,
            "idempotency": "safe_to_retry",
        }
    (result,) = seen.outcomes
    assert result == {
        "status": 200,
        "headers": {"content-type": "application/json"},
        "body": seen.values[0].text,
    }
    assert len(fake.asked) == 1


def test_a_caller_sees_the_recorded_headers_and_no_other(web: Web) -> None:
    reply = text("Snow.").with_headers(set_cookie="a=b", x_ratelimit_remaining_requests="9")
    with FakeProvider([reply]) as fake, web.client() as client:
        seen = run_twice(lambda: web.post(client, fake.url + CHAT))
    got: Got = seen.values[0]
    assert (got.status, got.reason) == (200, "OK")
    assert got.headers == {"content-type": "application/json"}
    assert json.loads(got.content)["choices"][0]["message"]["content"] == "Snow."


def test_how_a_library_spells_the_body_makes_no_difference(
    web: Web, kernel: ScriptedKernel
) -> None:
    said = b'[{"role":"user","content":"caf\\u00e9 \\ud83d\\ude00"}]'
    spellings = [
        b'{"model":"m","messages":' + said + b',"top_p":0.10}',
        b'{ "model" : "m", "messages":'
        + json.dumps(json.loads(said), ensure_ascii=False).encode()
        + b', "top_p": 1e-1}',
    ]
    with FakeProvider([text("Oui."), text("Non.")]) as fake, web.client() as client:
        run_twice(
            lambda: [web.post(client, fake.url + CHAT, content=s).text for s in spellings], kernel
        )
    first, second = [r.body for r in kernel.sent("submit")][:2]
    assert first == second
    assert '"content":"café 😀"}],"top_p":0.1}'.encode() in first
    assert [asked.body for asked in fake.asked] == spellings


def test_two_identical_requests_are_two_steps(web: Web) -> None:
    with FakeProvider([text("One."), text("Two.")]) as fake, web.client() as client:
        seen = run_twice(lambda: [web.post(client, fake.url + CHAT).text for _ in range(2)])
    assert "One." in seen.values[1][0]
    assert "Two." in seen.values[1][1]
    assert len(seen.steps) == len(fake.asked) == 2


@pytest.mark.parametrize(
    "body",
    [b"", b"[1]", b'"text"', b'{"model": "m"', b'{"model": NaN}', b'{"model": "\xff"}'],
    ids=["empty", "list", "text", "cut", "NaN", "not UTF-8"],
)
def test_what_is_no_json_object_passes_through(
    web: Web, kernel: ScriptedKernel, body: bytes
) -> None:
    answer = b"HTTP/1.1 201 Created\r\nContent-Length: 2\r\nX-Odd: yes\r\n\r\nok"
    with sending(answer) as url, web.client() as client:
        seen = run(kernel, lambda: web.post(client, url, content=body))
    got: Got = seen.values[0]
    assert (got.status, got.content, got.headers["x-odd"]) == (201, b"ok", "yes")
    assert seen.steps == []


def test_an_upload_is_not_read_into_memory(web: Web, kernel: ScriptedKernel) -> None:
    """A body that comes piece by piece is sent so, as it would be without us."""
    read: list[bool] = []
    pieces = [b"a", b"b"]

    def piecewise() -> Iterator[bytes]:
        yield from pieces

    if web.name == "requests":

        class Adapter(type(web.inner())):  # type: ignore[misc]
            def send(self, request: Any, **settings: Any) -> Any:
                read.append(isinstance(request.body, bytes))
                return super().send(request, **settings)

        inner: Any = Adapter()
    else:

        class Transport(type(web.inner())):  # type: ignore[misc]
            def handle_request(self, request: Any) -> Any:
                read.append(isinstance(request.stream, web.library.ByteStream))
                return super().handle_request(request)

        inner = Transport()
    headers = {"Authorization": "Bearer any", "Content-Length": "2"}
    with FakeProvider([]) as fake, web.client(inner=inner) as client:
        seen = run(
            kernel,
            lambda: web.post(client, fake.url + CHAT, content=piecewise(), headers=headers).status,
        )
    assert (seen.values, seen.steps, read) == ([400], [], [False])


def test_without_a_model_the_path_is_the_target(web: Web) -> None:
    answer = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}"
    with sending(answer) as url, web.client() as client:
        url = url.replace(CHAT, "/v1beta/models/gemini:generateContent?key=hidden")
        seen = run_twice(lambda: web.post(client, url, {"contents": []}))
    assert seen.steps == [("v1beta/models/gemini:generateContent", "succeeded")]


def test_outside_an_execution_nothing_is_touched(web: Web) -> None:
    reply = text("Snow.").with_headers(x_odd="yes")
    with FakeProvider([reply, error(429, retry_after=0.5)]) as fake, web.client() as client:
        got = web.post(client, fake.url + CHAT)
        limited = web.post(client, fake.url + CHAT)
    assert got.headers["x-odd"] == "yes"
    assert "x-request-id" in got.headers
    assert "idempotency-key" not in fake.asked[0].headers
    assert limited.status == 429
    assert limited.headers["retry-after"] == "0.5"


def test_the_request_carries_the_steps_id(web: Web) -> None:
    with FakeProvider([text("Snow.")]) as fake, web.client() as client:
        seen = run_twice(lambda: web.post(client, fake.url + CHAT))
    (step_id,) = seen.run.steps
    assert fake.asked[0].headers["idempotency-key"] == step_id


def test_an_idempotency_key_of_the_users_stays(web: Web) -> None:
    headers = {"Authorization": "Bearer any", "idempotency-key": "mine"}
    with FakeProvider([text("Snow.")]) as fake, web.client() as client:
        run_twice(lambda: web.post(client, fake.url + CHAT, headers=headers))
    assert fake.asked[0].headers["idempotency-key"] == "mine"


def test_the_callers_own_request_is_left_as_it_was(web: Web) -> None:
    with FakeProvider([text("Snow.")]) as fake, web.client() as client:

        def ask() -> list[str]:
            with web.opened(client, fake.url + CHAT) as response:
                return sorted(name.lower() for name in response.request.headers)

        seen = run_twice(ask)
    assert "idempotency-key" not in seen.values[0]


# Bodies


#: What each library decodes a coding with. All of these come with the ``dev`` extra, so a body
#: that stays packed is a failure and never a library that happens to be missing.
DECODERS = {
    "requests": {"gzip": "zlib", "deflate": "zlib", "br": "brotli", "zstd": "backports.zstd"},
    "httpx2": {"gzip": "zlib", "deflate": "zlib", "br": "brotli", "zstd": "backports.zstd"},
    "httpx": {"gzip": "zlib", "deflate": "zlib", "br": "brotli", "zstd": "zstandard"},
}


@pytest.mark.parametrize("coding", ["gzip", "deflate", "br", "zstd"])
@pytest.mark.parametrize("chunked", [False, True], ids=["whole", "chunked"])
def test_compressed_bodies_come_back_decoded(web: Web, coding: str, chunked: bool) -> None:
    importlib.import_module(DECODERS[web.name][coding])
    content = json.dumps({"text": "Snø " * 500}, ensure_ascii=False).encode()
    packed = compressed(coding, content)
    body: Any = [packed[:7], packed[7:50], packed[50:]] if chunked else packed
    reply = raw(body, headers={"content-encoding": coding})
    with FakeProvider([reply]) as fake, web.client() as client:
        seen = run_twice(lambda: web.post(client, fake.url + CHAT))
    got: Got = seen.values[0]
    assert got.content == content, f"{web} did not decode {coding}"
    assert got.headers == {"content-type": "application/json"}
    assert seen.outcomes[0]["body"] == content.decode()


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xef\xbb\xbf{}",
        "ünïcode \u2028 \ud7ff 😀".encode(),
        b"a\r\nb\rc\n",
        bytes(range(256)),
        "latin-1: \xe9".encode("latin-1"),
        b"{}\x00",
        b"\xed\xa0\x80",
    ],
    ids=["empty", "BOM", "unicode", "newlines", "binary", "latin-1", "NUL", "surrogate"],
)
@pytest.mark.parametrize("chunked", [False, True], ids=["whole", "chunked"])
def test_any_body_comes_back_byte_for_byte(web: Web, content: bytes, chunked: bool) -> None:
    body: Any = [content[:3], content[3:]] if chunked else content
    reply = raw(body, content_type="text/plain; charset=latin-1")
    with FakeProvider([reply]) as fake, web.client() as client:
        seen = run_twice(lambda: web.post(client, fake.url + CHAT))
    assert seen.values[0].content == content
    (result,) = seen.outcomes
    if "body_base64" in result:
        assert (result["body"], base64.b64decode(result["body_base64"])) == ("", content)
    else:
        assert result["body"].encode() == content
    assert "\\u0000" not in json.dumps(result)


@pytest.mark.parametrize("streamed", [False, True])
def test_a_body_that_ends_with_the_connection_is_whole(web: Web, streamed: bool) -> None:
    answer = b"HTTP/1.0 200 OK\r\nContent-Type: text/plain\r\n\r\nuntil the end"
    with sending(answer) as url, web.client() as client:
        seen = run_twice(lambda: web.post(client, url, {**ASK, "stream": streamed}))
    assert seen.values[0].content == b"until the end"


def test_an_answer_too_large_to_record_is_an_error_on_both_runs(web: Web) -> None:
    reply = raw(b"x" * (10 * 1024 * 1024))
    with FakeProvider([reply]) as fake, web.client() as client:
        seen = run_twice(lambda: web.post(client, fake.url + CHAT))
    got: Got = seen.values[0]
    assert got.status == 413
    assert "the kernel takes 10485760" in got.text
    assert got.headers["x-should-retry"] == "false"
    assert seen.steps == [("test-model", "failed")]
    assert len(fake.asked) == 1


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ({"model": "m", "text": "x" * 10_500_000}, "the step 'm' with its arguments has 10500"),
        ({"model": "m", "text": "cut \ud83d"}, "args.text has a lone surrogate"),
    ],
    ids=["too large", "lone surrogate"],
)
def test_a_request_that_cannot_be_recorded_is_not_sent(web: Web, body: Any, says: str) -> None:
    with FakeProvider([]) as fake, web.client() as client:
        content = json.dumps(body).encode()
        seen = run_twice(lambda: web.post(client, fake.url + CHAT, content=content))
    got: Got = seen.values[0]
    assert (got.status, got.headers["x-should-retry"]) == (400, "false")
    assert json.loads(got.content)["error"]["type"] == "rebuno_error"
    assert says in got.text
    assert fake.asked == []


# Failures


def test_an_error_answer_is_recorded_with_what_libraries_go_by(web: Web) -> None:
    reply = error(429, "slow down", retry_after=3).with_headers(x_should_retry="true")
    with FakeProvider([reply]) as fake, web.client() as client:
        seen = run_twice(lambda: web.post(client, fake.url + CHAT), same=False)
    first, second = seen.values
    assert (first.status, first.content) == (second.status, second.content)
    steering = {"retry-after": "3", "x-should-retry": "true"}
    assert first.headers == {"content-type": "application/json", **steering}
    # The replay may be retried at once.
    assert second.headers == {**first.headers, "retry-after-ms": "1"}
    assert seen.outcomes[0]["headers"] == first.headers
    assert seen.steps == [("test-model", "succeeded")]
    assert len(fake.asked) == 1


def test_a_refused_connection_comes_back_as_the_same_error(web: Web) -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    with web.client() as client:
        url = f"http://127.0.0.1:{port}{CHAT}"
        seen = run_twice(lambda: web.error(lambda: web.post(client, url)))
    name = "ConnectionError" if web.name == "requests" else "ConnectError"
    assert seen.values[0][0] == name
    assert seen.outcomes[0] == {"type": name, "message": seen.values[0][1]}
    assert seen.steps == [("test-model", "failed")]


def test_a_dropped_connection_comes_back_as_the_same_error(web: Web) -> None:
    with FakeProvider([dropped()]) as fake, web.client() as client:
        seen = run_twice(lambda: web.error(lambda: web.post(client, fake.url + CHAT)))
    name = "ConnectionError" if web.name == "requests" else "RemoteProtocolError"
    assert seen.values[0][0] == name
    assert len(fake.asked) == 1


def test_a_time_out_comes_back_as_the_same_error(web: Web) -> None:
    never = threading.Event()
    with FakeProvider([text("Too late.").held(never)]) as fake, web.client() as client:
        seen = run_twice(lambda: web.error(lambda: web.post(client, fake.url + CHAT, timeout=0.2)))
        never.set()
    assert seen.values[0][0] == "ReadTimeout"
    assert len(fake.asked) == 1


def test_a_plain_answer_that_is_cut_comes_back_as_the_same_error(web: Web) -> None:
    with FakeProvider([text("Snow.").cut(20)]) as fake, web.client() as client:
        seen = run_twice(lambda: web.error(lambda: web.post(client, fake.url + CHAT)))
    name = "ChunkedEncodingError" if web.name == "requests" else "RemoteProtocolError"
    assert seen.values[0][0] == name
    assert seen.steps == [("test-model", "failed")]


def test_a_body_that_cannot_be_decoded_comes_back_as_the_same_error(web: Web) -> None:
    reply = raw(b"this is not gzip", headers={"content-encoding": "gzip"})
    with FakeProvider([reply]) as fake, web.client() as client:
        seen = run_twice(lambda: web.error(lambda: web.post(client, fake.url + CHAT)))
    name = "ContentDecodingError" if web.name == "requests" else "DecodingError"
    assert seen.values[0][0] == name


def test_the_error_knows_its_request_and_hides_no_cause(web: Web) -> None:
    with FakeProvider([dropped()]) as fake, web.client() as client:

        def ask() -> Any:
            with pytest.raises(web.base_error) as caught:
                web.post(client, fake.url + CHAT)
            return caught.value.request.method, caught.value.__cause__

        seen = run_twice(ask)
    assert seen.values[0] == ("POST", None)


def failing_inside(web: Web, exc: BaseException) -> Any:
    """An inner adapter or transport that raises."""
    if web.name == "requests":

        class Adapter(type(web.inner())):  # type: ignore[misc]
            def send(self, request: Any, **settings: Any) -> Any:
                raise exc

        return Adapter()

    class Transport(web.library.BaseTransport):  # type: ignore[name-defined,misc]
        def handle_request(self, request: Any) -> Any:
            raise exc

    return Transport()


def test_an_error_of_no_library_becomes_one_of_the_library(web: Web) -> None:
    with web.client(inner=failing_inside(web, OSError("no route"))) as client:
        seen = run_twice(lambda: web.error(lambda: web.post(client, "http://x.test/v1/x")))
    name = "RequestException" if web.name == "requests" else "TransportError"
    assert seen.values[0] == (name, "OSError: no route")
    assert seen.outcomes[0] == {"type": "OSError", "message": "no route"}


def test_an_error_class_of_the_users_comes_back_as_its_base(web: Web) -> None:
    base = web.library.exceptions if web.name == "requests" else web.library

    class Custom(base.ConnectTimeout):  # type: ignore[name-defined,misc]
        pass

    with web.client(inner=failing_inside(web, Custom("took long"))) as client:
        seen = run_twice(lambda: web.error(lambda: web.post(client, "http://x.test/v1/x")))
    assert seen.values[0] == ("ConnectTimeout", "took long")


def test_control_flow_inside_is_no_outcome(web: Web, kernel: ScriptedKernel) -> None:
    class Unwinding(BaseException):
        pass

    def ask() -> str:
        with (
            web.client(inner=failing_inside(web, Unwinding())) as client,
            pytest.raises(Unwinding),
        ):
            web.post(client, "http://x.test/v1/x")
        return "through"

    seen = run(kernel, ask)
    assert seen.values == ["through"]
    assert seen.steps == [("test-model", "executing")]
    assert kernel.sent("step_fail") == []


def test_a_redirect_is_followed_on_both_runs(web: Web) -> None:
    with FakeProvider([text("Here.")]) as fake:
        moved = (
            f"HTTP/1.1 307 Temporary Redirect\r\nLocation: {fake.url}{CHAT}\r\n"
            "Content-Length: 0\r\n\r\n"
        )
        with sending(moved.encode()) as url, web.client() as client:
            # Credentials are not carried to another origin.
            seen = run_twice(lambda: web.post(client, url))
    assert seen.values[0].status == 401
    assert [outcome["status"] for outcome in seen.outcomes] == [307, 401]
    assert len(fake.asked) == 1


# Clients


@pytest.mark.parametrize("body", [ASK, {**ASK, "stream": True}], ids=["plain", "streamed"])
@pytest.mark.parametrize("chunked", [False, True], ids=["whole", "chunked"])
def test_connections_are_kept(web: Web, body: dict[str, Any], chunked: bool) -> None:
    connections: list[object] = []

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def setup(self) -> None:
            super().setup()
            connections.append(self.client_address)

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["content-length"]))
            self.send_response(200)
            if chunked:
                self.send_header("transfer-encoding", "chunked")
                said = b"2\r\n{}\r\n0\r\n\r\n"
            else:
                self.send_header("content-length", "2")
                said = b"{}"
            self.end_headers()
            self.wfile.write(said)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        url = f"http://127.0.0.1:{server.server_address[1]}{CHAT}"
        with web.client() as client:
            seen = run_twice(lambda: [web.post(client, url, body).text for _ in range(4)])
        server.shutdown()
        thread.join()
    assert seen.values[0] == ["{}"] * 4
    assert len(connections) == 1


def test_settings_of_the_inner_one_are_kept(web: Web) -> None:
    """What a user has configured underneath sends the request."""
    used: list[float] = []
    if web.name == "requests":

        class Adapter(type(web.inner())):  # type: ignore[misc]
            def send(self, request: Any, **settings: Any) -> Any:
                used.append(settings["timeout"])
                return super().send(request, **settings)

        inner: Any = Adapter()
    else:

        class Transport(type(web.inner())):  # type: ignore[misc]
            def handle_request(self, request: Any) -> Any:
                used.append(request.extensions["timeout"]["read"])
                return super().handle_request(request)

        inner = Transport()
    with FakeProvider([text("Snow.")]) as fake, web.client(inner=inner) as client:
        run_twice(lambda: web.post(client, fake.url + CHAT, timeout=29.0))
    assert used == [29.0]


def test_recording_twice_is_refused(web: Web) -> None:
    with web.client() as client:
        recording = client.get_adapter("https://x") if web.name == "requests" else client._transport
        with pytest.raises(ValueError, match="records already"):
            type(recording)(recording)


@pytest.mark.parametrize("retries", [-1, 1.5, "2", True])
def test_retries_is_a_number_of_tries(web: Web, retries: Any) -> None:
    with pytest.raises(ValueError, match="retries is a number of tries from 0 up"):
        web.client(retries=retries)


def test_a_session_takes_its_settings() -> None:
    session = requests_session(
        headers={"X-A": "1"}, verify="/ca.pem", proxies={"http": "http://p"}, auth=("u", "p")
    )
    assert session.headers["X-A"] == "1"
    assert "User-Agent" in session.headers
    assert (session.verify, session.proxies, session.auth) == (
        "/ca.pem",
        {"http": "http://p"},
        ("u", "p"),
    )
    with pytest.raises(TypeError, match="a session has no setting 'timeout'; it has"):
        requests_session(timeout=5)


def test_a_user_may_read_the_execution_around_a_call(web: Web) -> None:
    """A call made while the handler still waits for another belongs to the same execution."""
    with FakeProvider([text("Snow.")]) as fake, web.client() as client:
        seen = run_twice(lambda: (execution().id, web.post(client, fake.url + CHAT).status))
    assert seen.values[0] == (seen.run.id, 200)


def test_the_lease_is_kept_for_a_call_beside_a_tool_that_hangs(web: Web) -> None:
    """A body that hangs past its time-out deserves no lease; a call that runs does."""
    over, answer = threading.Event(), threading.Event()

    @tool("hanging", timeout=0.01)
    def hanging() -> None:
        over.wait(60)

    def ask() -> str:
        def elsewhere() -> None:
            with pytest.raises(ToolError):
                hanging()

        thread = threading.Thread(target=bind_context(elsewhere))
        thread.start()
        wait_until(lambda: kernel.sent("step_fail"))
        said = web.post(client, fake.url + CHAT).text
        over.set()
        thread.join()
        return said

    with (
        ScriptedKernel(GENERATION_3, lease_timeout=0.3) as kernel,
        FakeProvider([text("Snow.").held(answer)]) as fake,
        web.client() as client,
    ):
        seen = Seen(kernel.create({}))
        with agent_under(kernel, lambda: seen.values.append(ask())) as agent:
            kernel.deliver(seen.run)
            fake.wait_until_asked(1)
            before = len(kernel.sent("heartbeat"))
            wait_until(lambda: len(kernel.sent("heartbeat")) > before + 1)
            answer.set()
            assert agent.join(60)
    assert "Snow." in seen.values[0]
