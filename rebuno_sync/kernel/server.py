"""The HTTP server of the embedded kernel: a thread for each connection, kept alive."""

from __future__ import annotations

import contextlib
import io
import logging
import math
import re
import socket
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from werkzeug.serving import DechunkedInput, ThreadedWSGIServer, WSGIRequestHandler

from rebuno_sync.slow_peers import UntilDeadline
from rebuno_sync.wire import MAX_BODY_BYTES

if TYPE_CHECKING:
    from _typeshed.wsgi import WSGIApplication

_log = logging.getLogger(__name__)

_DECIMAL = re.compile(r"[0-9]{1,18}")
_NO_BODY = frozenset({204, 304})
#: How much of a refused body is read, in bytes and seconds, so that the refusal can be seen.
_MAX_DRAIN = 8 * MAX_BODY_BYTES
_DRAIN_SECONDS = 5.0
#: How long a request may take to arrive, its head and then its body, in seconds.
_HEAD_SECONDS, _BODY_SECONDS = 30.0, 120.0
#: How long a peer may take to receive a piece of an answer of so many bytes, in seconds.
_SEND_SECONDS, _PIECE = 30.0, 1 << 16


class RequestHandler(WSGIRequestHandler):
    """Serves one connection until either side closes it.

    Connections stay open however long they are idle between requests: an agent whose kept-alive
    connection closes under a submission has to give up its attempt. A request that has begun must
    go on, and so must the reading of its answer.
    """

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: Server

    def setup(self) -> None:
        super().setup()
        # A peer that vanished without a word is noticed in the end, and its thread with it.
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        # A peer that is slow on purpose would otherwise keep a thread for as long as it likes.
        self._reader = UntilDeadline(self.connection, self.rfile.detach())
        self._reader.deadline = time.monotonic() + _HEAD_SECONDS
        self.rfile = self._requests = io.BufferedReader(self._reader)
        self.wfile = _Writer(self.connection)
        self.server.opened(self.connection)

    def handle_one_request(self) -> None:
        """Wait for a request, and answer it."""
        if self._requests.peek(1):
            self._reader.deadline = time.monotonic() + _HEAD_SECONDS
        super().handle_one_request()
        self._reader.deadline = math.inf

    def finish(self) -> None:
        self.server.closed(self.connection)
        super().finish()

    def run_wsgi(self) -> None:
        """Answer one request. Its body is read first, which leaves the connection clean."""
        with self.server.busy(self.connection):
            self._reader.deadline = time.monotonic() + _BODY_SECONDS
            try:
                body = self._read_body()
            except ValueError as exc:
                self.close_connection = True
                self._respond(
                    "400 Bad Request", [("Content-Type", "text/plain")], [f"{exc}\n".encode()]
                )
                return
            environ = self.make_environ()
            environ["wsgi.input"] = io.BytesIO(body)
            environ.pop("HTTP_TRANSFER_ENCODING", None)
            environ["CONTENT_LENGTH"] = str(len(body))
            self._call(self.server.app, environ)
            if len(body) > MAX_BODY_BYTES:
                self._drain()

    def _read_body(self) -> bytes:
        """Return the body, or its first bytes when it is over the limit."""
        encoding = self.headers.get("Transfer-Encoding", "").strip().lower()
        length = self.headers.get("Content-Length", "0").strip()
        if encoding:
            if encoding != "chunked" or "Content-Length" in self.headers:
                raise ValueError("send either Content-Length or Transfer-Encoding: chunked")
            try:
                chunked = DechunkedInput(self.rfile)  # type: ignore[arg-type]
                body = io.BufferedReader(chunked).read(MAX_BODY_BYTES + 1)  # type: ignore[type-var]
            except OSError as exc:
                raise ValueError(str(exc)) from None
        else:
            if not _DECIMAL.fullmatch(length):
                raise ValueError("Content-Length must be a decimal number")
            body = self.rfile.read(min(int(length), MAX_BODY_BYTES + 1))
            if len(body) < min(int(length), MAX_BODY_BYTES + 1):
                raise ConnectionResetError("the connection closed within a request")
        if len(body) > MAX_BODY_BYTES:
            self.close_connection = True
        return body

    def _drain(self) -> None:
        # Closing with unread data would reset the connection before the answer is read.
        self.connection.shutdown(socket.SHUT_WR)
        self._reader.silence, self._reader.deadline = 1.0, time.monotonic() + _DRAIN_SECONDS
        drained = 0
        while drained < _MAX_DRAIN:
            data = self.rfile.read1(1 << 16)
            if not data:
                return
            drained += len(data)

    def _call(self, app: WSGIApplication, environ: dict[str, Any]) -> None:
        started: list[Any] = []

        def start_response(
            status: str, headers: list[tuple[str, str]], exc_info: Any = None
        ) -> Any:
            started[:] = [status, headers]
            return lambda data: self.wfile.write(data)

        chunks = app(environ, start_response)
        try:
            status, headers = started
            self._respond(status, headers, chunks)
        finally:
            close = getattr(chunks, "close", None)
            if close is not None:
                close()

    def _respond(
        self, status: str, headers: list[tuple[str, str]], chunks: Iterable[bytes]
    ) -> None:
        """Send an answer: in one piece when its length is known, else in chunks."""
        code = int(status[:3])
        lines = [f"HTTP/1.1 {status}", f"Date: {self.date_time_string()}"]
        lines += [f"{name}: {value}" for name, value in headers]
        sized = code in _NO_BODY or any(name.lower() == "content-length" for name, _ in headers)
        if not isinstance(chunks, (list, tuple)) and not sized:
            self._stream(lines, chunks)
            return
        body = b"".join(chunks)
        if not sized:
            lines.append(f"Content-Length: {len(body)}")
        self._send_head(lines, b"" if self.command == "HEAD" else body)

    def _stream(self, lines: list[str], chunks: Iterable[bytes]) -> None:
        if self.request_version < "HTTP/1.1":
            self.close_connection = True  # which is how the end of the answer is told then
            self._send_head(lines)
            for data in chunks:
                self.wfile.write(data)
            return
        self._send_head([*lines, "Transfer-Encoding: chunked"])
        for data in chunks:
            self.wfile.write(b"%x\r\n%b\r\n" % (len(data), data))
        self.wfile.write(b"0\r\n\r\n")

    def _send_head(self, lines: list[str], body: bytes = b"") -> None:
        lines.append("Connection: close" if self.close_connection else "Connection: keep-alive")
        head = "\r\n".join(lines) + "\r\n\r\n"
        self.wfile.write(head.encode("latin-1") + body)

    def log(self, type: str, message: str, *args: Any) -> None:
        """Log what the base class reports, which is broken requests; nobody else's are told."""
        _log.debug(message.rstrip(), *args)


class _Writer(io.BufferedIOBase):
    """Sends to a socket, piece by piece, each in its time."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        whole = memoryview(data)
        for start in range(0, len(whole), _PIECE):
            self._connection.settimeout(_SEND_SECONDS)
            self._connection.sendall(whole[start : start + _PIECE])
        return len(whole)


class Server(ThreadedWSGIServer):
    """Listens on ``host:port``; port 0 takes a free one, which is then ``port``.

    Raises:
        OSError: the address cannot be listened on.
    """

    def __init__(self, app: WSGIApplication, host: str, port: int) -> None:
        self._lock = threading.Condition()
        self._connections: set[socket.socket] = set()
        self._busy: set[socket.socket] = set()
        self._stopping = False
        self._thread: threading.Thread | None = None
        listener = _listen(host, port)
        with listener:
            super().__init__(host, port, app, RequestHandler, fd=listener.fileno())

    def start(self) -> None:
        """Serve on a thread of its own."""
        self._thread = threading.Thread(
            target=self.serve_forever, args=(0.05,), name="rebuno-kernel-http", daemon=True
        )
        self._thread.start()

    def stop(self, timeout: float) -> None:
        """Accept nothing more, give requests ``timeout`` seconds to end, close all connections."""
        self.shutdown()
        if self._thread is not None:
            self._thread.join()
        with self._lock:
            if not self._lock.wait_for(lambda: not self._busy, timeout):
                _log.warning("%d requests were cut off", len(self._busy))
            self._stopping = True
            connections = list(self._connections)
        for connection in connections:
            _shut(connection)

    def opened(self, connection: socket.socket) -> None:
        """Note a connection, so that :meth:`stop` can close it."""
        with self._lock:
            self._connections.add(connection)
            late = self._stopping
        if late:
            _shut(connection)

    def closed(self, connection: socket.socket) -> None:
        """Forget a connection."""
        with self._lock:
            self._connections.discard(connection)

    @contextlib.contextmanager
    def busy(self, connection: socket.socket) -> Iterator[None]:
        """Mark a connection as having a request answered, which :meth:`stop` waits for."""
        with self._lock:
            self._busy.add(connection)
        try:
            yield
        finally:
            with self._lock:
                self._busy.discard(connection)
                self._lock.notify_all()

    def process_request(self, request: Any, client_address: Any) -> None:
        """Serve a new connection on a thread of its own."""
        threading.Thread(
            target=self.process_request_thread,
            args=(request, client_address),
            name="rebuno-kernel-connection",
            daemon=True,
        ).start()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Log the failure of a connection; a peer that went away is none."""
        if not isinstance(sys.exc_info()[1], OSError):
            _log.exception("a connection failed")


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(128)
    except OSError as exc:
        listener.close()
        raise OSError(exc.errno, f"cannot listen on {host}:{port}: {exc.strerror}") from exc
    return listener


def _shut(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):  # the peer was faster
        connection.shutdown(socket.SHUT_RDWR)
