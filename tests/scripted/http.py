"""A small HTTP server over real sockets that hands each request to one function."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from email.message import Message
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any

JSON_TYPE = "application/json; charset=utf-8"


@dataclass(frozen=True)
class Raw:
    """JSON text that goes into an answer exactly as it came."""

    text: str


def dump(value: Any) -> str:
    """Encode JSON in which :class:`Raw` values keep their own text."""
    if isinstance(value, Raw):
        return value.text
    if isinstance(value, dict):
        return "{" + ",".join(f"{json.dumps(k)}:{dump(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(dump(v) for v in value) + "]"
    return json.dumps(value, ensure_ascii=False)


@dataclass(frozen=True)
class Answer:
    """What a server says to one request."""

    status: int
    body: bytes = b""
    content_type: str = ""
    headers: tuple[tuple[str, str], ...] = ()

    @classmethod
    def json(cls, value: Any, status: int = 200) -> Answer:
        """An answer in JSON."""
        return cls(status, dump(value).encode("utf-8"), JSON_TYPE)

    @classmethod
    def error(cls, status: int, code: str, message: str = "") -> Answer:
        """An error in the kernel's form."""
        return cls.json({"code": code, "message": message or code.replace("_", " ")}, status)


@dataclass
class Recorded:
    """One request as it came in, and the answer it got."""

    method: str
    target: str
    headers: Message
    body: bytes
    call: str = ""
    answer: Answer = field(default=Answer(0))

    @property
    def path(self) -> str:
        return self.target.partition("?")[0]

    @property
    def json(self) -> Any:
        return json.loads(self.body)


class Server:
    """Serves ``respond`` on a free port of the loop-back interface until it is closed.

    An exception in ``respond`` closes the connection and comes out of :meth:`close`.
    """

    def __init__(self, respond: Callable[[Recorded], Answer]) -> None:
        self._connections: set[socket.socket] = set()
        self._lock = threading.Lock()
        self._failures: list[BaseException] = []
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            disable_nagle_algorithm = True

            def setup(self) -> None:
                super().setup()
                with outer._lock:
                    outer._connections.add(self.connection)

            def finish(self) -> None:
                with outer._lock:
                    outer._connections.discard(self.connection)
                super().finish()

            def handle(self) -> None:
                try:
                    super().handle()
                except OSError:
                    self.close_connection = True

            def answer(self) -> None:
                length = int(self.headers.get("Content-Length") or 0)
                body = self.rfile.read(length)
                try:
                    answer = respond(Recorded(self.command, self.path, self.headers, body))
                except BaseException as exc:
                    outer._failures.append(exc)
                    self.close_connection = True
                    return
                head = [f"HTTP/1.1 {answer.status} Status"]
                if answer.content_type:
                    head.append(f"Content-Type: {answer.content_type}")
                if answer.status != 204:
                    head.append(f"Content-Length: {len(answer.body)}")
                head += [f"{name}: {value}" for name, value in answer.headers]
                self.wfile.write("\r\n".join([*head, "", ""]).encode("latin-1") + answer.body)

            do_GET = do_POST = do_PUT = do_DELETE = answer

            def log_message(self, format: str, *args: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = False
        self._thread = threading.Thread(
            target=self._server.serve_forever, kwargs={"poll_interval": 0.02}
        )
        self._thread.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def close(self) -> None:
        """Stop, end every connection and thread, and raise the first failure there was."""
        self._server.shutdown()
        self._thread.join()
        with self._lock:
            for connection in self._connections:
                connection.shutdown(socket.SHUT_RDWR)
        self._server.server_close()
        if self._failures:
            raise self._failures[0]

    def __enter__(self) -> Server:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        exc: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
