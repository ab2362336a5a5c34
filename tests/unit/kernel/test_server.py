"""The HTTP server under the routes: connections, bodies, streams, the end."""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import urlsplit

import pytest

from rebuno_sync.kernel import EmbeddedKernel, live
from rebuno_sync.wire import MAX_BODY_BYTES
from tests.unit.kernel.agent_double import PATIENCE, Caller, Webhooks, eventually


@pytest.fixture
def raw(kernel: EmbeddedKernel) -> Iterator[Callable[[], socket.socket]]:
    """Open plain connections to the kernel."""
    address = urlsplit(kernel.url)
    opened: list[socket.socket] = []

    def connect() -> socket.socket:
        opened.append(socket.create_connection((address.hostname, address.port), PATIENCE))
        return opened[-1]

    yield connect
    for connection in opened:
        connection.close()


def answer(connection: socket.socket) -> tuple[http.client.HTTPResponse, bytes]:
    with http.client.HTTPResponse(connection) as response:
        response.begin()
        return response, response.read()


HEALTH = b"GET /v0/health HTTP/1.1\r\nHost: localhost\r\n\r\n"


def post(body: bytes, *headers: bytes) -> bytes:
    head = [b"POST /v0/executions HTTP/1.1", b"Host: localhost", *headers]
    return b"\r\n".join(head) + b"\r\n\r\n" + body


def test_a_connection_is_kept_alive(raw: Callable[[], socket.socket]) -> None:
    connection = raw()
    for _ in range(3):
        connection.sendall(HEALTH)
        response, body = answer(connection)
        assert (response.status, json.loads(body)) == (200, {"status": "ok"})
        assert response.headers["Connection"] == "keep-alive"
    connection.sendall(post(b"{}", b"Content-Length: 2"))
    assert answer(connection)[0].status == 400  # a refusal of what it asks is no reason to close
    connection.sendall(HEALTH)
    assert answer(connection)[0].status == 200


def test_a_connection_closes_when_asked_to(raw: Callable[[], socket.socket]) -> None:
    for request in (
        b"GET /v0/health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n",
        b"GET /v0/health HTTP/1.0\r\n\r\n",
    ):
        connection = raw()
        connection.sendall(request)
        response, _ = answer(connection)
        assert response.status == 200
        assert response.headers["Connection"] == "close"
        assert connection.recv(1) == b""


def test_chunked_bodies(raw: Callable[[], socket.socket]) -> None:
    connection = raw()
    chunks = b'9\r\n{"agent_i\r\n7\r\nd":"a1"\r\n1\r\n}\r\n0\r\n\r\n'
    for _ in range(2):
        connection.sendall(post(chunks, b"Transfer-Encoding: chunked"))
        response, body = answer(connection)
        assert response.status == 201, body


@pytest.mark.parametrize(
    ("body", "headers"),
    [
        (b"zz\r\n", [b"Transfer-Encoding: chunked"]),
        (b"2\r\n{}xy\r\n", [b"Transfer-Encoding: chunked"]),
        (b"{}", [b"Transfer-Encoding: gzip"]),
        (b"0\r\n\r\n", [b"Transfer-Encoding: chunked", b"Content-Length: 5"]),
        (b"{}", [b"Content-Length: two"]),
        (b"{}", [b"Content-Length: -2"]),
    ],
)
def test_framing_that_cannot_be_trusted_ends_the_connection(
    body: bytes, headers: list[bytes], raw: Callable[[], socket.socket]
) -> None:
    connection = raw()
    connection.sendall(post(body, *headers))
    response, _ = answer(connection)
    assert response.status == 400
    assert response.headers["Connection"] == "close"


def test_bodies_up_to_the_limit(caller: Caller) -> None:
    head, tail = b'{"agent_id":"a1","input":"', b'"}'
    room = MAX_BODY_BYTES - len(head) - len(tail)
    largest = caller.client("POST", "/v0/executions", head + b"x" * room + tail)
    assert largest.status_code == 201
    stored = caller.client("GET", f"/v0/executions/{largest.json()['id']}").json()
    assert stored["input"] == "x" * room
    over = caller.client("POST", "/v0/executions", head + b"x" * (room + 1) + tail)
    assert (over.status_code, over.json()["code"]) == (413, "validation_error")
    much = caller.client("POST", "/v0/executions", b"x" * (3 * MAX_BODY_BYTES))
    assert much.status_code == 413
    assert caller.client("GET", "/v0/health").status_code == 200


def test_chunked_bodies_over_the_limit(caller: Caller) -> None:
    chunks = (b"x" * 65536 for _ in range(2 * MAX_BODY_BYTES // 65536))
    answer = caller.session.post(f"{caller.url}/v0/executions", data=chunks, timeout=PATIENCE)
    assert (answer.status_code, answer.json()["code"]) == (413, "validation_error")


def test_expect_100_continue(raw: Callable[[], socket.socket]) -> None:
    connection = raw()
    body = b'{"agent_id":"a1"}'
    connection.sendall(post(b"", b"Expect: 100-continue", b"Content-Length: %d" % len(body)))
    assert connection.recv(100).startswith(b"HTTP/1.1 100 ")
    connection.sendall(body)
    assert answer(connection)[0].status == 201


def test_garbage_is_answered_and_forgotten(raw: Callable[[], socket.socket]) -> None:
    connection = raw()
    connection.sendall(b"\x16\x03\x01 nonsense\r\n\r\n")
    while connection.recv(4096):
        pass
    connection = raw()
    connection.sendall(post(b"{", b"Content-Length: 100"))
    connection.close()
    connection = raw()
    connection.sendall(HEALTH)
    assert answer(connection)[0].status == 200


def running_step(caller: Caller, webhooks: Webhooks) -> tuple[str, str, dict[str, Any]]:
    execution = caller.client("POST", "/v0/executions", {"agent_id": "a1"}).json()
    lease = webhooks.next()
    path = f"/v0/executions/{execution['id']}"
    step = {"kind": "tool_call", "target": "t"}
    step_id = caller.agent("POST", f"{path}/steps", step, lease=lease).json()["step_id"]
    return path, step_id, lease


def test_live_output(kernel: EmbeddedKernel, caller: Caller, webhooks: Webhooks) -> None:
    path, step_id, lease = running_step(caller, webhooks)

    def publish(seq: int, data: str) -> None:
        body = {"seq": seq, "data": data}
        sent = caller.agent("POST", f"{path}/steps/{step_id}/stream", body, lease=lease)
        assert sent.status_code == 204

    publish(0, "nobody listens, and it is not kept")
    watchers = [Caller(kernel.url) for _ in range(2)]
    streams = [
        watcher.session.get(f"{kernel.url}{path}/stream", stream=True, timeout=PATIENCE)
        for watcher in watchers
    ]
    publish(1, "hé \n")
    publish(2, "")
    for stream in streams:
        assert stream.headers["Content-Type"] == "text/event-stream"
        lines = (line for line in stream.iter_lines() if line.startswith(b"data: "))
        assert next(lines) == f'data: {{"step_id":"{step_id}","seq":1,"data":"hé \\n"}}'.encode()
        assert next(lines) == f'data: {{"step_id":"{step_id}","seq":2,"data":""}}'.encode()
        stream.close()
    for watcher in watchers:
        watcher.close()
    # Deltas to watchers that left are no trouble.
    for seq in range(3, 10):
        publish(seq, "x" * 7000)


def test_live_output_for_a_client_of_http_1_0(
    raw: Callable[[], socket.socket], caller: Caller, webhooks: Webhooks
) -> None:
    path, step_id, lease = running_step(caller, webhooks)
    connection = raw()
    connection.sendall(f"GET {path}/stream HTTP/1.0\r\nHost: localhost\r\n\r\n".encode())
    with connection.makefile("rb") as lines:
        head = [line.rstrip().lower() for line in iter(lines.readline, b"\r\n")]
        assert b"connection: close" in head
        assert b"transfer-encoding: chunked" not in head
        assert [lines.readline(), lines.readline()] == [b": connected\n", b"\n"]
        body = {"seq": 0, "data": "x"}
        caller.agent("POST", f"{path}/steps/{step_id}/stream", body, lease=lease)
        assert lines.readline().startswith(b"data: {")


def test_a_silent_stream_keeps_its_connection(
    kernel: EmbeddedKernel, caller: Caller, webhooks: Webhooks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live, "KEEP_ALIVE", 0.01)
    path, _, _ = running_step(caller, webhooks)
    with caller.session.get(f"{kernel.url}{path}/stream", stream=True, timeout=PATIENCE) as stream:
        lines = stream.iter_lines()
        assert [next(lines) for _ in range(5)] == [
            b": connected",
            b"",
            b": keep-alive",
            b"",
            b": keep-alive",
        ]


def test_a_watcher_that_never_reads_slows_nobody(
    kernel: EmbeddedKernel, caller: Caller, webhooks: Webhooks
) -> None:
    parts = kernel._running()
    assert parts.server is not None
    # Connections get these small buffers from their listener, so that an unread one soon is full.
    parts.server.socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 16)
    path, step_id, lease = running_step(caller, webhooks)
    address = urlsplit(kernel.url)
    with contextlib.ExitStack() as stack:
        deaf = stack.enter_context(socket.socket())
        deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 12)
        deaf.settimeout(PATIENCE)
        deaf.connect((address.hostname, address.port))
        deaf.sendall(f"GET {path}/stream HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
        assert deaf.recv(1, socket.MSG_PEEK) == b"H"  # it watches, and has read nothing
        (unread,) = parts.hub._subscriptions[path.rpartition("/")[2]]
        session = stack.enter_context(contextlib.closing(Caller(kernel.url))).session
        stream = session.get(f"{kernel.url}{path}/stream", stream=True, timeout=PATIENCE)
        stack.callback(stream.close)

        seen: list[int] = []
        last = live._BACKLOG + 150

        def read() -> None:
            for line in stream.iter_lines(chunk_size=1 << 14):
                if line.startswith(b"data: "):
                    seen.append(json.loads(line[6:])["seq"])
                    if seen[-1] == last:
                        return

        reading = threading.Thread(target=read, daemon=True)
        reading.start()
        for seq in range(last + 1):
            body = {"seq": seq, "data": "x" * 7000}
            sent = caller.agent("POST", f"{path}/steps/{step_id}/stream", body, lease=lease)
            assert sent.status_code == 204
        assert unread._frames.full(), "the watcher was never behind"
        reading.join(PATIENCE)
        assert seen[-50:] == list(range(last - 49, last + 1))


def test_stopping_ends_what_is_open(
    kernels: Callable[..., EmbeddedKernel], raw: Callable[[], socket.socket]
) -> None:
    kernel = kernels()
    address = urlsplit(kernel.url)
    idle = socket.create_connection((address.hostname, address.port), PATIENCE)
    idle.sendall(HEALTH)
    assert answer(idle)[0].status == 200
    kernel.stop()
    assert idle.recv(1) == b""
    idle.close()
    with pytest.raises(OSError, match=r"."):
        socket.create_connection((address.hostname, address.port), 1)


def test_stopping_ends_live_streams(
    kernel: EmbeddedKernel, caller: Caller, webhooks: Webhooks
) -> None:
    path, _, _ = running_step(caller, webhooks)
    stream = caller.session.get(f"{kernel.url}{path}/stream", stream=True, timeout=PATIENCE)
    kernel.stop()
    assert [line for line in stream.iter_lines() if line] == [b": connected"]


def test_stopping_lets_a_request_end(
    kernel: EmbeddedKernel, caller: Caller, webhooks: Webhooks
) -> None:
    entered, leave = threading.Event(), threading.Event()
    health = kernel.app.view_functions["health"]

    def slow() -> Any:
        entered.set()
        leave.wait(PATIENCE)
        return health()

    kernel.app.view_functions["health"] = slow
    answers: list[int] = []
    asking = threading.Thread(
        target=lambda: answers.append(caller.client("GET", "/v0/health").status_code)
    )
    asking.start()
    assert entered.wait(PATIENCE)
    stopping = threading.Thread(target=kernel.stop)
    stopping.start()
    leave.set()
    stopping.join()
    asking.join()
    assert answers == [200]


def test_no_thread_is_left_behind(kernels: Callable[..., EmbeddedKernel]) -> None:
    kernel = kernels()
    caller = Caller(kernel.url)
    assert caller.client("GET", "/v0/health").status_code == 200
    kernel.stop()
    caller.close()
    eventually(lambda: not [t for t in threading.enumerate() if t.name.startswith("rebuno-kernel")])
