"""Servers that do to a connection what a test says, byte by byte."""

from __future__ import annotations

import contextlib
import socket
import ssl
import threading
from collections.abc import Callable
from types import TracebackType


class Connection:
    """One accepted connection: requests as they came, answers as they are given."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self._file = sock.makefile("rb")

    def request(self) -> bytes:
        """Read one request, head and body; empty when the other side has closed."""
        if self._file.closed:
            return b""
        head = b""
        while not head.endswith(b"\r\n\r\n"):
            line = self._file.readline()
            if not line:
                return b""
            head += line
        length = 0
        for row in head.split(b"\r\n"):
            if row.lower().startswith(b"content-length:"):
                length = int(row.split(b":")[1])
        return head + self._file.read(length)

    def answer(
        self, body: bytes = b"{}", status: str = "200 OK", *headers: str, length: int | None = None
    ) -> None:
        """Send an answer; ``length`` tells another length than that of the body."""
        told = len(body) if length is None else length
        rows = [f"HTTP/1.1 {status}", f"Content-Length: {told}", *headers, "", ""]
        self.sock.sendall("\r\n".join(rows).encode("latin-1") + body)

    def reset(self) -> None:
        """Break the connection with a RST."""
        linger = (1).to_bytes(4, "little") + (0).to_bytes(4, "little")
        self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        self.close()

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._file.close()
            self.sock.close()


class SocketServer:
    """Runs ``serve`` on a thread for each connection; closes it when ``serve`` returns.

    Args:
        tls: how to speak TLS, if it shall.
        reserved: a socket from :func:`reserved_port` to listen on.

    Attributes:
        connections: how many were accepted.
    """

    def __init__(
        self,
        serve: Callable[[Connection], None],
        *,
        tls: ssl.SSLContext | None = None,
        reserved: socket.socket | None = None,
    ) -> None:
        self._serve = serve
        self._tls = tls
        self._listener = reserved or reserved_port()
        self._listener.listen()
        self.port: int = self._listener.getsockname()[1]
        self._open: set[socket.socket] = set()
        self._lock = threading.Lock()
        self._threads: list[threading.Thread] = []
        self._failures: list[BaseException] = []
        self.connections = 0
        self._acceptor = threading.Thread(target=self._accept)
        self._acceptor.start()

    @property
    def url(self) -> str:
        return f"{'https' if self._tls else 'http'}://127.0.0.1:{self.port}"

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                return
            with self._lock:
                self.connections += 1
                self._open.add(sock)
            thread = threading.Thread(target=self._handle, args=(sock,))
            self._threads.append(thread)
            thread.start()

    def _handle(self, sock: socket.socket) -> None:
        try:
            if self._tls is not None:
                plain, sock = sock, self._tls.wrap_socket(sock, server_side=True)
                with self._lock:
                    self._open.remove(plain)
                    self._open.add(sock)
            connection = Connection(sock)
            try:
                self._serve(connection)
            finally:
                connection.close()
        except OSError:
            pass  # the other side went away, or this server was closed
        except BaseException as exc:
            self._failures.append(exc)
        finally:
            with self._lock:
                self._open.discard(sock)
            sock.close()

    def close(self) -> None:
        """Stop accepting, break what is open, and raise the first failure there was."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._acceptor.join()
        with self._lock:
            for sock in self._open:
                with contextlib.suppress(OSError):
                    sock.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join()
        if self._failures:
            raise self._failures[0]

    def __enter__(self) -> SocketServer:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        exc: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def reserved_port() -> socket.socket:
    """A socket with a port of its own, which refuses connections until it listens."""
    sock = socket.socket()
    sock.bind(("127.0.0.1", 0))
    return sock


def pump(one: socket.socket, other: socket.socket) -> None:
    """Carry bytes from one socket to the other until one of them ends."""
    with contextlib.suppress(OSError):
        while data := one.recv(65536):
            other.sendall(data)
        other.shutdown(socket.SHUT_WR)
