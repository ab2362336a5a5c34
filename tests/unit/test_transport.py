"""Requests to one kernel: time-outs, retries, what an answer means, forks."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import socket
import subprocess
import sys
import textwrap
import threading
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from rebuno_sync import transport as transport_module
from rebuno_sync.errors import (
    APIError,
    ConflictError,
    ForbiddenError,
    NetworkError,
    NotFoundError,
    UnauthorizedError,
    ValidationError,
)
from rebuno_sync.transport import Answer, Resend, Transport, process_session
from tests.scripted import wait_until
from tests.unit.sockets import Connection, SocketServer, reserved_port

ROOT = Path(__file__).resolve().parents[2]
NEVER_ARRIVED = Resend.NEVER_ARRIVED


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport_module, "_FIRST_PAUSE", 0.001)
    monkeypatch.setattr(transport_module, "_LONGEST_PAUSE", 0.01)


def send(
    url: str,
    method: str = "POST",
    path: str = "/v0/x",
    body: bytes = b"{}",
    *,
    timeout: float = 30.0,
    **options: Any,
) -> Answer:
    return Transport(url, timeout=timeout).request(
        method, path, body, lambda target: {"X-Target": target}, **options
    )


def answering(
    *answers: Callable[[Connection], None],
) -> tuple[Callable[[Connection], None], list[bytes]]:
    """A server that treats its nth request as the nth answer says, the last one for all after."""
    seen: list[bytes] = []
    lock = threading.Lock()

    def serve(connection: Connection) -> None:
        while request := connection.request():
            with lock:
                seen.append(request)
                nth = min(len(seen), len(answers)) - 1
            answers[nth](connection)

    return serve, seen


def status(line: str, body: bytes = b"", *headers: str) -> Callable[[Connection], None]:
    return lambda connection: connection.answer(body, line, *headers)


OK = status("200 OK", b'{"ok":true}', "Content-Type: application/json")


def hangs_up(connection: Connection) -> None:
    connection.reset()


def says_nothing(connection: Connection) -> None:
    connection.request()


# The URL


@pytest.mark.parametrize(
    "url", ["", "127.0.0.1:8080", "ftp://x", "http://", "http:///v0", "https:/x", "HTTP//x"]
)
def test_what_is_no_url(url: str) -> None:
    with pytest.raises(ValueError, match="is not a kernel URL; it looks like http://127"):
        Transport(url, timeout=1)


@pytest.mark.parametrize("url", ["http://x?a=1", "http://x/#top", "http://x/a?b"])
def test_a_url_without_a_query(url: str) -> None:
    with pytest.raises(ValueError, match="has a query or a fragment"):
        Transport(url, timeout=1)


def test_a_url_without_a_user() -> None:
    with pytest.raises(ValueError, match="has a user name in it") as caught:
        Transport("https://ann:hunter2@kernel.example/x", timeout=1)
    assert "hunter2" not in str(caught.value)
    assert Transport("http://x/a@b", timeout=1).prefix == "/a@b"


@pytest.mark.parametrize(
    ("base", "prefix"),
    [
        ("", ""),
        ("/", ""),
        ("/kernel", "/kernel"),
        ("/kernel/", "/kernel"),
        ("/a b", "/a%20b"),
        ("/a%2fb", "/a%2Fb"),
        ("/é", "/%C3%A9"),
        ("/a/../b", "/b"),
    ],
)
def test_what_is_signed_is_what_is_sent(base: str, prefix: str) -> None:
    serve, seen = answering(OK)
    with SocketServer(serve) as server:
        transport = Transport(server.url + base, timeout=30)
        assert transport.prefix == prefix
        signed: list[str] = []

        def headers(target: str) -> dict[str, str]:
            signed.append(target)
            return {}

        for path in ("/v0/x", "/v0/a%2Fb%20c/steps?status=terminal", "/v0/%C3%A9?q=%26+"):
            transport.request("GET", path, b"", headers)
        sent = [request.split(b" ")[1].decode() for request in seen]
    assert sent == signed
    assert sent[0] == prefix + "/v0/x"


# Requests and answers


def test_a_request_as_it_goes_out() -> None:
    serve, seen = answering(OK)
    with SocketServer(serve) as server:
        answer = send(server.url, body='{"a":"é"}'.encode())
        send(server.url, "GET", body=b"")
        assert server.connections == 1, "connections are kept"
    head, _, body = seen[0].partition(b"\r\n\r\n")
    rows = head.decode().split("\r\n")
    assert rows[0] == "POST /v0/x HTTP/1.1"
    names = {row.partition(":")[0].lower(): row.partition(": ")[2] for row in rows[1:]}
    assert names["host"] == server.url.partition("//")[2]
    assert names["x-target"] == "/v0/x"
    assert names["user-agent"].startswith("rebuno-sync/")
    assert names["content-length"] == "10"
    assert body == '{"a":"é"}'.encode()
    assert (answer.status, answer.json()) == (200, {"ok": True})
    assert answer.headers["content-type"] == "application/json"


def test_answers_of_every_framing() -> None:
    def chunked(connection: Connection) -> None:
        connection.sock.sendall(
            b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
            b"5\r\n[1,2,\r\n2\r\n3]\r\n0\r\n\r\n"
        )

    def until_close(connection: Connection) -> None:
        connection.sock.sendall(b"HTTP/1.0 200 OK\r\n\r\n[4]")
        connection.sock.shutdown(socket.SHUT_RDWR)

    def closing(connection: Connection) -> None:
        connection.answer(b"[5]", "200 OK", "Connection: close")
        connection.sock.shutdown(socket.SHUT_RDWR)

    def empty(connection: Connection) -> None:
        connection.sock.sendall(b"HTTP/1.1 204 No Content\r\n\r\n")

    def after_hints(connection: Connection) -> None:
        connection.sock.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
        connection.answer(b"[6]")

    serve, seen = answering(chunked, until_close, closing, empty, after_hints, OK)
    with SocketServer(serve) as server:
        bodies = [send(server.url).body for _ in range(6)]
    assert bodies == [b"[1,2,3]", b"[4]", b"[5]", b"", b"[6]", b'{"ok":true}']
    assert len(seen) == 6


@pytest.mark.parametrize(
    ("line", "kind"),
    [
        ("400 Bad Request", ValidationError),
        ("401 Unauthorized", UnauthorizedError),
        ("403 Forbidden", ForbiddenError),
        ("404 Not Found", NotFoundError),
        ("409 Conflict", ConflictError),
        ("418 Teapot", APIError),
        ("500 Oops", APIError),
        ("302 Found", APIError),
    ],
)
def test_statuses(line: str, kind: type[APIError]) -> None:
    body = json.dumps({"code": "some_code", "message": "words", "details": [1]}).encode()
    serve, _ = answering(status(line, body))
    with SocketServer(serve) as server:
        answer = send(server.url)
    with pytest.raises(kind) as caught:
        answer.raise_for_status()
    assert type(caught.value) is kind
    assert (caught.value.code, caught.value.details) == ("some_code", [1])
    assert caught.value.message.startswith("words")
    assert caught.value.status_code == int(line[:3])


@pytest.mark.parametrize(
    ("body", "code", "message"),
    [
        (b"", "http_404", "the kernel gave no reason"),
        (b"404 page not found\n", "http_404", "the kernel answered '404 page not found'"),
        (b"<html>no</html>", "http_404", "the kernel answered '<html>no</html>'"),
        (b"\xff\xfe", "http_404", "the kernel answered '\ufffd\ufffd'"),
        (b"[]", "http_404", "the kernel answered '[]'"),
        (b'{"message":5}', "http_404", "5"),
        (b'{"code":"not_found"}', "not_found", 'the kernel answered \'{"code":"not_found"}\''),
        (b'{"code":null,"message":null}', "http_404", "the kernel answered"),
        (b"x" * 5000, "http_404", "the kernel answered '" + "x" * 200 + "'"),
    ],
    ids=repr,
)
def test_error_bodies_of_any_kind(body: bytes, code: str, message: str) -> None:
    with pytest.raises(NotFoundError) as caught:
        Answer(404, {}, body).raise_for_status()
    assert caught.value.code == code
    assert caught.value.message.startswith(message)


def test_redirects_are_not_followed() -> None:
    serve, seen = answering(OK)
    with SocketServer(serve) as elsewhere:
        to = f"Location: {elsewhere.url}/v0/x"
        serve_redirect, _ = answering(
            *(status(f"{n} Moved", b"", to) for n in (301, 302, 307, 308))
        )
        with SocketServer(serve_redirect) as server:
            for _ in range(4):
                answer = send(server.url)
                with pytest.raises(APIError, match=rf"it points to {elsewhere.url}/v0/x, and redi"):
                    answer.raise_for_status()
            with pytest.raises(APIError, match="set the base URL to where the kernel is"):
                Transport(server.url, timeout=30).open_stream("/v0/s", {}, read_timeout=30)
        assert seen == []


@pytest.mark.parametrize("body", [b"<html>log in</html>", b"ok", b'{"half":', b"\xff"], ids=repr)
def test_a_page_in_place_of_an_answer(body: bytes) -> None:
    page = status("200 OK", body, "Content-Type: text/html")
    serve, seen = answering(page, OK)
    with SocketServer(serve) as server:
        with pytest.raises(
            NetworkError, match=r"HTTP 200 with a body that is not JSON \(text/html"
        ):
            send(server.url, resend=NEVER_ARRIVED, patience=60)
        assert len(seen) == 1
    serve, seen = answering(page, page, OK)
    with SocketServer(serve) as server:
        assert send(server.url, patience=60).json() == {"ok": True}
        assert len(seen) == 3


# Retries


@pytest.mark.parametrize(
    "trouble",
    [
        status("500 Oops"),
        status("502 Bad Gateway", b"<html>"),
        status("503 Busy"),
        status("504 Late"),
        status("408 Slow"),
        status("425 Early"),
        status("429 Many"),
        hangs_up,
        lambda connection: connection.answer(b"{", length=500) or connection.reset(),
        lambda connection: connection.sock.sendall(b"garbage\r\n\r\n") or connection.reset(),
    ],
    ids=["500", "502", "503", "504", "408", "425", "429", "reset", "truncated", "garbage"],
)
def test_what_may_be_repeated_is_and_a_submission_is_not(
    trouble: Callable[[Connection], None],
) -> None:
    serve, seen = answering(trouble, trouble, OK)
    with SocketServer(serve) as server:
        assert send(server.url, patience=60).status == 200
        assert len(seen) == 3
    serve, seen = answering(trouble, OK)
    with SocketServer(serve) as server:
        try:
            assert send(server.url, resend=NEVER_ARRIVED, patience=60).status >= 400
        except NetworkError as exc:
            assert not exc.never_arrived  # noqa: PT017
        assert len(seen) == 1


@pytest.mark.parametrize("line", ["400 Bad", "401 No", "403 No", "404 None", "409 Busy", "501 No"])
def test_what_says_something_about_the_request_is_final(line: str) -> None:
    serve, seen = answering(status(line), OK)
    with SocketServer(serve) as server:
        answer = send(server.url, patience=0.0 if line.startswith("5") else 60)
        assert answer.status == int(line[:3])
        assert len(seen) == 1


@pytest.mark.parametrize("resend", list(Resend))
def test_a_refused_connection_is_tried_again(resend: Resend) -> None:
    serve, seen = answering(OK)
    with reserved_port() as reserved:
        port = reserved.getsockname()[1]
        transport = Transport(f"http://127.0.0.1:{port}", timeout=30)
        with pytest.raises(NetworkError) as caught:
            transport.request("POST", "/v0/x", b"{}", lambda target: {}, resend=resend)
        assert caught.value.never_arrived
        assert str(caught.value) == (
            f"the kernel at http://127.0.0.1:{port} could not be reached: "
            f"[Errno {errno.ECONNREFUSED}] {os.strerror(errno.ECONNREFUSED)}"
        )
        stop = threading.Event()
        attempts: list[str] = []

        def headers(target: str) -> dict[str, str]:
            attempts.append(target)
            if len(attempts) == 5:
                stop.set()
            return {}

        with pytest.raises(NetworkError):
            transport.request(
                "POST", "/v0/x", b"{}", headers, resend=resend, patience=600, stop=stop
            )
        assert len(attempts) == 5, "each try is signed afresh, and none after stop was set"
    with SocketServer(serve) as server:
        assert send(server.url, resend=resend).status == 200
        assert len(seen) == 1


def test_a_server_that_comes_back_gets_one_submission() -> None:
    serve, seen = answering(OK)
    tries: list[str] = []
    with contextlib.ExitStack() as stack, reserved_port() as reserved:
        port = reserved.getsockname()[1]

        def headers(target: str) -> dict[str, str]:
            tries.append(target)
            if len(tries) == 3:
                stack.enter_context(SocketServer(serve, reserved=reserved))
            return {}

        answer = Transport(f"http://127.0.0.1:{port}", timeout=30).request(
            "POST", "/v0/x", b"{}", headers, resend=NEVER_ARRIVED, patience=60
        )
        stack.close()
    assert answer.status == 200
    assert (len(tries), len(seen)) == (3, 1)


def test_a_kept_connection_that_was_closed_costs_nothing() -> None:
    """The server ends the connection between two submissions: the second goes out once, anew."""
    seen: list[bytes] = []
    closed = threading.Event()

    def serve(connection: Connection) -> None:
        seen.append(connection.request())
        connection.answer()
        connection.sock.shutdown(socket.SHUT_RDWR)
        closed.set()

    with SocketServer(serve) as server:
        transport = Transport(server.url, timeout=30)
        for n in range(3):
            closed.clear()
            answer = transport.request(
                "POST", f"/v0/{n}", b"{}", lambda target: {}, resend=NEVER_ARRIVED
            )
            assert answer.status == 200
            assert closed.wait(30)
            _wait_for_fin(transport)
        assert server.connections == 3
    assert [request.split(b" ")[1] for request in seen] == [b"/v0/0", b"/v0/1", b"/v0/2"]


def _wait_for_fin(transport: Transport) -> None:
    """Until the client's end of the kept connection has been told that it was closed."""
    pool = transport._current_way().pool
    connection = pool._get_conn()
    try:
        sock = connection.sock
        if sock is not None:
            wait_until(lambda: not connection.is_connected)
    finally:
        pool._put_conn(connection)


def test_an_answer_that_stays_away() -> None:
    serve, seen = answering(says_nothing)
    with (
        SocketServer(serve) as server,
        pytest.raises(NetworkError, match="Read timed out") as caught,
    ):
        send(server.url, timeout=0.05, resend=NEVER_ARRIVED, patience=60)
    assert not caught.value.never_arrived
    assert len(seen) == 1
    serve, seen = answering(says_nothing, OK)
    with SocketServer(serve) as server:
        assert send(server.url, timeout=0.2, patience=60).status == 200
    assert len(seen) == 2


def test_a_timeout_for_one_call() -> None:
    serve, _ = answering(says_nothing)
    with SocketServer(serve) as server:
        transport = Transport(server.url, timeout=1000)
        with pytest.raises(NetworkError, match=r"read timeout=0\.05"):
            transport.request("POST", "/", b"", lambda target: {}, timeout=0.05)


def test_a_server_that_takes_no_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    """A full backlog swallows connections: nothing was sent, so a submission may go again."""
    monkeypatch.setattr(transport_module, "CONNECT_TIMEOUT", 0.05)
    with socket.socket() as full:
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        address = full.getsockname()
        fillers = []
        try:
            for _ in range(4):
                filler = socket.socket()
                filler.setblocking(False)
                filler.connect_ex(address)
                fillers.append(filler)
            with pytest.raises(NetworkError, match="could not be reached") as caught:
                send(f"http://127.0.0.1:{address[1]}", resend=NEVER_ARRIVED)
            assert caught.value.never_arrived
        finally:
            for filler in fillers:
                filler.close()


def test_a_name_that_does_not_resolve() -> None:
    with pytest.raises(NetworkError, match="could not be reached") as caught:
        send("http://kernel.invalid")
    assert caught.value.never_arrived


def test_patience_is_how_long_another_try_may_begin(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    waits: list[float] = []

    def wait(stop: threading.Event | None, seconds: float) -> bool:
        waits.append(seconds)
        now[0] += seconds
        return False

    monkeypatch.setattr(transport_module, "_stopped_within", wait)
    monkeypatch.setattr(transport_module, "_FIRST_PAUSE", 0.05)
    monkeypatch.setattr(transport_module, "_LONGEST_PAUSE", 5.0)
    monkeypatch.setattr(transport_module, "time", types.SimpleNamespace(monotonic=lambda: now[0]))
    serve, seen = answering(status("500 Oops"))
    with SocketServer(serve) as server:
        assert send(server.url, patience=60).status == 500
    assert len(seen) == len(waits) + 1
    assert 50 < now[0] <= 60
    assert all(0.0375 * 2**n <= w <= 0.0625 * 2**n for n, w in enumerate(waits[:6]))
    assert max(waits) <= 6.25


@pytest.mark.parametrize(
    ("header", "least", "most"),
    [("3", 3, 3), ("900", 5, 5), ("soon", 0, 1), ("-1", 0, 1), ("", 0, 1), ("٣", 0, 1)],
)
def test_retry_after(
    header: str, least: float, most: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: list[float] = []
    monkeypatch.setattr(
        transport_module, "_stopped_within", lambda stop, seconds: waits.append(seconds)
    )
    monkeypatch.setattr(transport_module, "_LONGEST_PAUSE", 5.0)
    encoded = header.encode("utf-8").decode("latin-1")
    serve, _ = answering(status("429 Many", b"", f"Retry-After: {encoded}"), OK)
    with SocketServer(serve) as server:
        assert send(server.url, patience=60).status == 200
    assert len(waits) == 1
    assert least <= waits[0] <= most


def test_stop_ends_the_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport_module, "_FIRST_PAUSE", 1000.0)
    stop = threading.Event()

    def oops(connection: Connection) -> None:
        connection.answer(b"", "503 Busy")
        stop.set()

    serve, seen = answering(oops)
    with SocketServer(serve) as server:
        assert send(server.url, patience=1e6, stop=stop).status == 503
    assert len(seen) == 1


# Streams


def test_an_open_stream_and_its_errors() -> None:
    serve, seen = answering(status("200 OK", b"data: 1\n"))
    with SocketServer(serve) as server:
        transport = Transport(server.url + "/base", timeout=30)
        with transport.open_stream("/v0/s", {"Authorization": "Bearer t"}, read_timeout=30) as open:
            assert list(open.iter_lines()) == [b"data: 1"]
    assert seen[0].startswith(b"GET /base/v0/s HTTP/1.1\r\n")
    assert b"Authorization: Bearer t\r\n" in seen[0]
    cases: list[tuple[Any, type[Exception]]] = [
        (status("404 None", b"{}"), NotFoundError),
        (status("500 Oops", b"x"), APIError),
        (status("204 None"), NetworkError),
        (hangs_up, NetworkError),
        (lambda connection: connection.answer(b"{", "500 Oops", length=99), NetworkError),
    ]
    for trouble, expected in cases:

        def once(connection: Connection, trouble: Any = trouble) -> None:
            connection.request()
            trouble(connection)

        with SocketServer(once) as server, pytest.raises(expected):
            Transport(server.url, timeout=30).open_stream("/v0/s", {}, read_timeout=30)
    with reserved_port() as reserved, pytest.raises(NetworkError, match="could not be reached"):
        Transport(f"http://127.0.0.1:{reserved.getsockname()[1]}", timeout=30).open_stream(
            "/", {}, read_timeout=30
        )


def test_netrc_does_not_replace_the_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    netrc = tmp_path / "netrc"
    netrc.write_text("default login someone password else\n")
    netrc.chmod(0o600)
    monkeypatch.setenv("NETRC", str(netrc))
    serve, seen = answering(OK)
    with SocketServer(serve) as server:
        transport = Transport(server.url, timeout=30)
        with transport.open_stream("/s", {"Authorization": "Bearer t"}, read_timeout=30):
            pass
        transport.request("GET", "/v0/x", b"", lambda target: {"Authorization": "Bearer t"})
    assert [b"Authorization: Bearer t\r\n" in request for request in seen] == [True, True]


# One session per process


def test_there_is_one_session() -> None:
    assert process_session() is process_session()
    found: list[Any] = []
    threads = [threading.Thread(target=lambda: found.append(process_session())) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert set(map(id, found)) == {id(process_session())}


def test_the_session_is_made_on_first_use() -> None:
    script = """
        from rebuno_sync import Agent, Client, transport
        Client("http://127.0.0.1:1")
        Agent("a", secret="s", base_url="http://127.0.0.1:1")
        assert transport._process.session is None
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(script)], check=True, cwd=ROOT)


@pytest.fixture
def peers() -> Iterator[tuple[SocketServer, list[tuple[bytes, int]]]]:
    seen: list[tuple[bytes, int]] = []

    def serve(connection: Connection) -> None:
        port = connection.sock.getpeername()[1]
        while request := connection.request():
            seen.append((request.split(b" ")[1], port))
            connection.answer()

    with SocketServer(serve) as server:
        yield server, seen


def test_a_fork_gets_connections_of_its_own(
    peers: tuple[SocketServer, list[tuple[bytes, int]]],
) -> None:
    server, seen = peers
    script = f"""
        import os
        from rebuno_sync import transport
        kernel = transport.Transport({server.url!r}, timeout=30)

        def call(name):
            answer = kernel.request("POST", "/" + name, b"{{}}", lambda target: {{}})
            assert answer.status == 200, answer

        call("parent-1")
        session = transport.process_session()
        # The worst moment to fork: another thread holds the lock that guards the session.
        transport._process.lock.acquire()
        child = os.fork()
        if child == 0:
            call("child-1")
            assert transport.process_session() is not session
            call("child-2")
            os._exit(0)
        transport._process.lock.release()
        assert os.waitpid(child, 0)[1] == 0
        call("parent-2")
        assert transport.process_session() is session
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(script)], check=True, cwd=ROOT)
    ports = dict(seen)
    assert len(seen) == 4
    assert ports[b"/parent-1"] == ports[b"/parent-2"]
    assert ports[b"/child-1"] == ports[b"/child-2"]
    assert ports[b"/child-1"] != ports[b"/parent-1"]


def test_many_threads_share_the_pool() -> None:
    serve, seen = answering(OK)
    with SocketServer(serve) as server:
        transport = Transport(server.url, timeout=30)
        failures: list[BaseException] = []

        def work(n: int) -> None:
            try:
                for i in range(20):
                    answer = transport.request("POST", f"/{n}/{i}", b"{}", lambda target: {})
                    assert answer.json() == {"ok": True}
            except BaseException as exc:
                failures.append(exc)

        threads = [threading.Thread(target=work, args=(n,)) for n in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert failures == []
        assert server.connections <= 8
    assert len(seen) == 160
