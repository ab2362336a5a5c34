"""Peers that send, or read, as slowly as they like: they get their time and no more."""

from __future__ import annotations

import contextlib
import http.server
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import pytest

from rebuno_sync import Client, NetworkError, connections
from rebuno_sync.kernel import EmbeddedKernel, dispatch, server
from rebuno_sync.kernel.deliveries import Claim
from rebuno_sync.transport import Transport
from tests.unit.kernel.agent_double import PATIENCE, Caller, Webhooks

DRIP = 0.02


@pytest.fixture
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "_HEAD_SECONDS", 0.3)
    monkeypatch.setattr(server, "_BODY_SECONDS", 0.3)
    monkeypatch.setattr(server, "_SEND_SECONDS", 0.3)


def connect(kernel: EmbeddedKernel) -> socket.socket:
    address = urlsplit(kernel.url)
    return socket.create_connection((address.hostname, address.port), PATIENCE)


def drip(connection: socket.socket, piece: bytes) -> None:
    """Send for as long as the other end listens."""
    deadline = time.monotonic() + PATIENCE
    with contextlib.suppress(OSError):
        while time.monotonic() < deadline:
            connection.sendall(piece)
            time.sleep(DRIP)
    assert time.monotonic() < deadline, "it listens for ever"


HEAD = b"POST /v0/executions HTTP/1.1\r\nHost: localhost\r\n"


@pytest.mark.parametrize(
    ("limit", "begun", "piece"),
    [
        ("_HEAD_SECONDS", b"", b""),
        ("_HEAD_SECONDS", b"G", b"E"),
        ("_HEAD_SECONDS", HEAD, b"X-Header: 1\r\n"),
        ("_BODY_SECONDS", HEAD + b"Content-Length: 1000000\r\n\r\n", b" "),
        ("_BODY_SECONDS", HEAD + b"Transfer-Encoding: chunked\r\n\r\n", b"1\r\n \r\n"),
        ("_BODY_SECONDS", HEAD + b"Transfer-Encoding: chunked\r\n\r\n", b"0"),
    ],
    ids=["silence", "request line", "headers", "body", "chunks", "chunk size"],
)
def test_a_request_that_comes_slowly_is_given_up(
    limit: str, begun: bytes, piece: bytes, monkeypatch: pytest.MonkeyPatch, kernel: EmbeddedKernel
) -> None:
    for name in ("_HEAD_SECONDS", "_BODY_SECONDS"):
        monkeypatch.setattr(server, name, 0.3 if name == limit else 10 * PATIENCE)
    with connect(kernel) as slow:
        slow.sendall(begun)
        if piece:
            drip(slow, piece)
        else:
            assert slow.recv(1) == b""
    with Client(kernel.url) as client:
        assert client.health()


def test_a_connection_may_rest_between_requests(hurried: None, kernel: EmbeddedKernel) -> None:
    ask = b"GET /v0/health HTTP/1.1\r\nHost: localhost\r\n\r\n"
    with connect(kernel) as resting:
        for _ in range(2):
            resting.sendall(ask)
            answered = b""
            while not answered.endswith(b'{"status":"ok"}'):
                answered += resting.recv(4096)
            resting.settimeout(0.6)
            with pytest.raises(TimeoutError):
                resting.recv(1)  # still open after twice the time that a request has
            resting.settimeout(PATIENCE)


def test_an_answer_that_nobody_reads_is_given_up(
    hurried: None, kernel: EmbeddedKernel, caller: Caller, webhooks: Webhooks
) -> None:
    body = b'{"agent_id":"a1","input":"' + b"x" * 9_000_000 + b'"}'
    id = caller.client("POST", "/v0/executions", body).json()["id"]
    parts = kernel._running()
    assert parts.server is not None
    with connect(kernel) as deaf:
        deaf.sendall(f"GET /v0/executions/{id} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
        assert deaf.recv(1, socket.MSG_PEEK) == b"H"
        here = deaf.getsockname()

        def served() -> bool:
            with contextlib.suppress(OSError):
                return any(c.getpeername() == here for c in list(parts.server._connections))
            return True

        deadline = time.monotonic() + PATIENCE
        while served():
            assert time.monotonic() < deadline, "it is waited for, for ever"
            time.sleep(DRIP)


# Slow answers


@contextlib.contextmanager
def dripping(first: bytes, piece: bytes) -> Iterator[tuple[str, threading.Event]]:
    """A server that answers each request like this; the event is set when it was hung up on."""
    listener = socket.create_server(("127.0.0.1", 0))
    left = threading.Event()

    def serve() -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = listener.accept()
                with connection:
                    connection.recv(1 << 16)
                    connection.sendall(first)
                    drip(connection, piece)
                    left.set()

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}", left
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        thread.join(PATIENCE)


OK = b"HTTP/1.1 200 OK\r\n"
DRIPS = pytest.mark.parametrize(
    ("first", "piece"),
    [
        (b"HTTP/1.1 2", b"0"),
        (OK, b"X-Header: 1\r\n"),
        (OK + b"Content-Length: 1000000\r\n\r\n", b" "),
        (OK + b"Transfer-Encoding: chunked\r\n\r\n", b"1\r\n \r\n"),
        (OK + b"Connection: close\r\n\r\n", b" "),
    ],
    ids=["status", "headers", "body", "chunks", "until it closes"],
)


@DRIPS
def test_a_kernel_that_answers_slowly_is_given_up(
    first: bytes, piece: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections._PromptAnswer, "times", 2.0)
    with dripping(first, piece) as (url, left):
        transport = Transport(url, timeout=0.2)
        with pytest.raises(NetworkError):
            transport.request("GET", "/", b"", lambda target: {})
        assert left.wait(PATIENCE)


def test_an_answer_may_take_longer_than_its_first_byte(monkeypatch: pytest.MonkeyPatch) -> None:
    """The time-out is for silence; the whole gets four times that."""
    assert connections._PromptAnswer.times == 4.0

    class Slow(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Length", "4")
            self.end_headers()
            for piece in (b"n", b"u", b"l", b"l"):
                time.sleep(0.15)
                self.wfile.write(piece)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    monkeypatch.setattr(connections._PromptAnswer, "times", 1000.0)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Slow) as slow:
        threading.Thread(target=slow.serve_forever, args=(0.02,), daemon=True).start()
        transport = Transport(f"http://127.0.0.1:{slow.server_port}", timeout=0.5)
        assert transport.request("GET", "/", b"", lambda target: {}).body == b"null"
        slow.shutdown()


@pytest.mark.parametrize(
    ("first", "piece"), [(b"HTTP/1.1 2", b"0"), (OK, b"X-Header: 1\r\n")], ids=["status", "headers"]
)
def test_an_agent_that_answers_slowly_has_not_answered(first: bytes, piece: bytes) -> None:
    with dripping(first, piece) as (url, left):
        claim = Claim("d", "e", "a1", 1, 60.0, 0.0, url, "s")
        with pytest.raises(dispatch.Unanswered, match=r"^timed out after 0.3 s$"):
            dispatch.post_webhook(claim, 0.3)
        assert left.wait(PATIENCE)


def test_what_an_agent_says_after_its_status_is_not_waited_for() -> None:
    with dripping(OK + b"Content-Length: 1000000\r\n\r\n", b" ") as (url, left):
        claim = Claim("d", "e", "a1", 1, 60.0, 0.0, url, "s")
        assert dispatch.post_webhook(claim) == 200
        assert left.wait(PATIENCE)
