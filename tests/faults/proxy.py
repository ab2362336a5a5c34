"""A proxy between an agent and its kernel that spoils chosen calls, over real sockets.

It stands in front of either: of a kernel for what agents send, or of an agent for its webhooks.
"""

from __future__ import annotations

import contextlib
import enum
import http.client
import socket
import struct
import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import Any
from urllib.parse import urlsplit

from rebuno_sync.wire import EXECUTION_ID_HEADER
from tests.scripted.routes import call_of
from tests.scripted.serving import wait_until

_FIN_WAIT_1 = 4
_HTML = b"<html><body><h1>Something else lives here</h1></body></html>"


#: Stands for every call, where one is picked by its count among all.
ANY = "any"


class Fault(enum.Enum):
    """What becomes of one call."""

    #: The connection breaks before anything reaches the kernel.
    DROPPED = "cut before the request"
    #: Half of the request reaches the kernel, then both connections break.
    CUT = "request cut midway"
    #: The kernel does it; the answer never arrives.
    LOST = "answer lost"
    #: The kernel does it; the answer stays away until the caller hangs up.
    LATE = "answer late"
    #: The kernel never hears of it; the answer is a 500.
    ERROR_BEFORE = "500, not processed"
    #: The kernel does it; the answer is a 500.
    ERROR_AFTER = "500, processed"
    #: The kernel never hears of it; the answer is 200 with a page.
    HTML_BEFORE = "200 with HTML, not processed"
    #: The kernel does it; the answer is 200 with a page.
    HTML_AFTER = "200 with HTML, processed"
    #: The kernel never hears of it; a proxy says so.
    GATEWAY_BEFORE = "502, not processed"
    #: The kernel does it; a proxy gave up waiting.
    GATEWAY_AFTER = "504, processed"
    #: The connection is half open: the request goes nowhere, and nobody says so.
    HALF_OPEN = "half-open connection"
    #: It arrives twice at once, on connections of its own.
    TWICE = "delivered twice"
    #: The caller hears nothing; it arrives after the next one for the same execution.
    OVERTAKEN = "overtaken by the next"


@dataclass(frozen=True)
class Passed:
    """One request that came by: its call, what spoiled it, and the kernel's status if any."""

    call: str
    head: bytes
    body: bytes
    fault: Fault | None
    status: int | None

    def header(self, name: str) -> str:
        """A header's value, empty without it."""
        return _header(self.head, name)


class FaultProxy:
    """Stands in front of a kernel.

    :meth:`spoil` picks a call by name and count; :meth:`refuse` and :meth:`drop_idle` act on
    connections at once, for the moment just before a call.

    Args:
        upstream: the URL of what it stands in front of.

    Attributes:
        passed: every request that came by, oldest first.
        refused: how many connections were refused.
    """

    def __init__(self, upstream: str) -> None:
        self.pass_to(upstream)
        self.passed: list[Passed] = []
        self.refused = 0
        self._refusals_left = 0
        self._faults: dict[tuple[str, int], Fault] = {}
        self._seen: Counter[str] = Counter()
        self._changed = threading.Condition()
        self._clients: set[socket.socket] = set()
        self._idle: set[socket.socket] = set()
        self._threads: list[threading.Thread] = []
        self._overtaken: dict[str, bytes] = {}
        # Bound but not listening: it keeps the port while connections are refused.
        self._guard = _bound(("127.0.0.1", 0))
        self.address: tuple[str, int] = self._guard.getsockname()
        self._listen()

    @property
    def url(self) -> str:
        """The kernel's address as the agent knows it."""
        return f"http://{self.address[0]}:{self.address[1]}"

    def pass_to(self, upstream: str) -> None:
        """Pass what comes from now on to another place."""
        url = urlsplit(upstream)
        assert url.hostname is not None
        assert url.port is not None
        self._upstream = (url.hostname, url.port)

    def spoil(self, call: str, nth: int, fault: Fault, times: int = 1) -> None:
        """Let ``fault`` happen to the ``nth`` arrival of a call, and to ``times - 1`` more.

        ``ANY`` counts the arrivals of all calls.
        """
        for i in range(times):
            self._faults[call, nth + i] = fault

    def refuse(self, times: int = 1) -> None:
        """Refuse the next ``times`` connections; the connections that are open and idle end.

        They are counted where this process makes them (see :func:`counting_refusals`).
        """
        with self._changed:
            self._refusals_left = times
        self.close_port()

    def close_port(self) -> None:
        """Refuse every connection until :meth:`open_port`; those that are idle end."""
        self._unlisten()
        self.drop_idle()

    def open_port(self) -> None:
        """Take connections again."""
        self._listen()

    def drop_idle(self) -> None:
        """End every kept-alive connection; on return the other side has been told."""
        with self._changed:
            idle = list(self._idle)
        for connection in idle:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_WR)
                if hasattr(socket, "TCP_INFO"):
                    _until_peer_knows(connection)

    def note_refusal(self) -> None:
        """Count a refused connection; the last one that was asked for opens the port again."""
        with self._changed:
            self.refused += 1
            self._refusals_left -= 1
            again = self._refusals_left == 0
            self._changed.notify_all()
        if again:
            self._listen()

    def wait_for(self, condition: Any, timeout: float = 30.0) -> None:
        """Wait until ``condition``, asked anew after each request, holds."""
        with self._changed:
            if not self._changed.wait_for(condition, timeout):
                raise TimeoutError(f"it never came true; passed so far: {self.passed}")

    def spoiled(self) -> list[Passed]:
        """The requests that a fault happened to."""
        return [p for p in self.passed if p.fault is not None]

    def calls(self, call: str) -> list[Passed]:
        """The requests of one call."""
        return [p for p in self.passed if p.call == call]

    # Sockets

    def _listen(self) -> None:
        listener = _bound(self.address)
        listener.listen(64)
        thread = threading.Thread(target=self._accept, args=(listener,))
        self._listener, self._acceptor = listener, thread
        thread.start()

    def _unlisten(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._acceptor.join()
        self._listener.close()

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                client, _ = listener.accept()
            except OSError:
                return
            client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            thread = threading.Thread(target=self._converse, args=(client,))
            with self._changed:
                self._clients.add(client)
                self._threads.append(thread)
            thread.start()

    def _converse(self, client: socket.socket) -> None:
        reader = client.makefile("rb")
        try:
            # A kernel that dies within an answer leaves half a one.
            with contextlib.suppress(OSError, http.client.HTTPException):
                while self._one(client, reader):
                    pass
        finally:
            reader.close()
            with self._changed:
                self._clients.discard(client)
                self._idle.discard(client)
            client.close()

    def _one(self, client: socket.socket, reader: Any) -> bool:
        """Pass one request on; false when the connection is over."""
        line = reader.readline()
        with self._changed:
            self._idle.discard(client)
        if not line:
            return False
        head = line
        while (row := reader.readline()) not in (b"\r\n", b""):
            head += row
        head += b"\r\n"
        length = int(_header(head, "Content-Length") or 0)
        body = reader.read(length)
        if len(body) < length:
            return False
        method, target, _ = line.decode("latin-1").split(" ")
        call = call_of(method, target)
        with self._changed:
            fault = self._faults.pop((call, self._seen[call]), None)
            fault = self._faults.pop((ANY, self._seen[ANY]), None) or fault
            self._seen.update((call, ANY))
        status, answer = self._pass_on(method, head, body, fault)
        self._note(Passed(call, head, body, fault, status))
        return self._reply(client, reader, fault, answer)

    def _pass_on(
        self, method: str, head: bytes, body: bytes, fault: Fault | None
    ) -> tuple[int | None, bytes]:
        if fault in _NEVER_ARRIVES:
            return None, b""
        whole = head + body
        if fault is Fault.OVERTAKEN:
            with self._changed:
                self._overtaken[_header(head, EXECUTION_ID_HEADER)] = whole
            return None, b""
        if fault is Fault.TWICE:
            self._repeat(whole)
        with socket.create_connection(self._upstream, timeout=30) as kernel:
            if fault is Fault.CUT:
                # A request without a body is cut inside its headers.
                kernel.sendall(whole[: len(head) + len(body) // 2] if body else head[:-6])
                return None, b""
            kernel.sendall(whole)
            response = http.client.HTTPResponse(kernel, method=method)
            response.begin()
            content = response.read()
            rows = [f"HTTP/1.1 {response.status} {response.reason}"]
            rows += [
                f"{name}: {value}"
                for name, value in response.getheaders()
                if name.lower() not in ("connection", "transfer-encoding", "content-length")
            ]
            if response.status != 204:
                rows.append(f"Content-Length: {len(content)}")
            status = response.status
            response.close()
        with self._changed:
            earlier = self._overtaken.pop(_header(head, EXECUTION_ID_HEADER), None)
        if earlier is not None:
            self._repeat(earlier)
        return status, "\r\n".join([*rows, "", ""]).encode("latin-1") + content

    def _repeat(self, whole: bytes) -> None:
        """Send a request on a connection of its own; nobody waits for the answer."""

        def send() -> None:
            with (
                contextlib.suppress(OSError),
                socket.create_connection(self._upstream, timeout=30) as again,
            ):
                again.sendall(whole)
                again.recv(1)

        thread = threading.Thread(target=send)
        with self._changed:
            self._threads.append(thread)
        thread.start()

    def _reply(
        self, client: socket.socket, reader: Any, fault: Fault | None, answer: bytes
    ) -> bool:
        if fault in (Fault.DROPPED, Fault.CUT, Fault.LOST, Fault.OVERTAKEN):
            # Linger of nought: the connection is reset rather than ended.
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            return False
        if fault in (Fault.LATE, Fault.HALF_OPEN):
            reader.read(1)
            return False
        with self._changed:
            # In one go: whoever has the answer can count on the connection being idle.
            client.sendall(_SPOILED.get(fault, answer) if fault else answer)
            self._idle.add(client)
        return True

    def _note(self, passed: Passed) -> None:
        with self._changed:
            self.passed.append(passed)
            self._changed.notify_all()

    def close(self) -> None:
        """Stop, and end every connection and thread."""
        with contextlib.suppress(OSError):
            self._unlisten()
        with self._changed:
            clients = list(self._clients)
        for client in clients:
            with contextlib.suppress(OSError):
                client.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join()
        self._guard.close()

    def __enter__(self) -> FaultProxy:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        exc: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


@contextlib.contextmanager
def counting_refusals(proxy: FaultProxy) -> Iterator[None]:
    """Tell ``proxy`` of every connection to it that this process was refused."""
    real = socket.socket.connect

    def connect(self: socket.socket, address: Any) -> None:
        try:
            real(self, address)
        except ConnectionRefusedError:
            if address == proxy.address:
                proxy.note_refusal()
            raise

    socket.socket.connect = connect  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        socket.socket.connect = real  # type: ignore[method-assign]


def _bound(address: tuple[str, int]) -> socket.socket:
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    sock.bind(address)
    return sock


def _until_peer_knows(sock: socket.socket) -> None:
    """Wait until the other side's TCP has taken notice that ``sock`` was shut down."""
    wait_until(lambda: sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] != _FIN_WAIT_1)


def _header(head: bytes, wanted: str) -> str:
    for row in head.decode("latin-1").split("\r\n"):
        name, _, value = row.partition(":")
        if name.lower() == wanted.lower():
            return value.strip()
    return ""


def _page(status: str, content_type: str, body: bytes) -> bytes:
    rows = (f"HTTP/1.1 {status}", f"Content-Type: {content_type}", f"Content-Length: {len(body)}")
    return "\r\n".join([*rows, "", ""]).encode("latin-1") + body


_NEVER_ARRIVES = {
    Fault.DROPPED,
    Fault.ERROR_BEFORE,
    Fault.HTML_BEFORE,
    Fault.GATEWAY_BEFORE,
    Fault.HALF_OPEN,
}
_INTERNAL = b'{"code":"internal_error","message":"internal error"}'
_SPOILED = {
    Fault.ERROR_BEFORE: _page("500 Internal Server Error", "application/json", _INTERNAL),
    Fault.ERROR_AFTER: _page("500 Internal Server Error", "application/json", _INTERNAL),
    Fault.HTML_BEFORE: _page("200 OK", "text/html", _HTML),
    Fault.HTML_AFTER: _page("200 OK", "text/html", _HTML),
    Fault.GATEWAY_BEFORE: _page("502 Bad Gateway", "text/html", _HTML),
    Fault.GATEWAY_AFTER: _page("504 Gateway Timeout", "text/html", _HTML),
}
