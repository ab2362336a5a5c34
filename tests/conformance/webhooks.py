"""The receiving end of webhooks: keeps every delivery and answers as it is told."""

from __future__ import annotations

import dataclasses
import json
import threading
import time
from collections import deque
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

WAIT = 60.0
"""How long anything is waited for before the test gives up, in seconds."""


@dataclasses.dataclass(frozen=True)
class Delivery:
    """One request that the kernel made. Header names are lower case."""

    method: str
    path: str
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


Answer = tuple[int, dict[str, str]]


class Inbox:
    """What came in on one path. Answers 200 unless told otherwise."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._untaken: list[Delivery] = []
        self._answers: deque[Answer] = deque()
        self.default: Answer = (200, {})
        #: Called before the answer is sent, in the server's thread.
        self.during: Callable[[Delivery], None] | None = None
        self.all: list[Delivery] = []

    def answer_next(self, *statuses: int) -> None:
        """Answer the next deliveries with these statuses, then as by default."""
        self._answers.extend((status, {}) for status in statuses)

    def receive(self, delivery: Delivery) -> Answer:
        during = self.during
        with self._changed:
            answer = self._answers.popleft() if self._answers else self.default
            self.all.append(delivery)
            self._untaken.append(delivery)
            self._changed.notify_all()
        if during is not None:
            during(delivery)
        return answer

    def take(self, execution_id: str | None = None) -> Delivery:
        """Return the oldest delivery that was not taken yet, waiting for one if need be."""
        deadline = time.monotonic() + WAIT
        with self._changed:
            while True:
                for delivery in self._untaken:
                    if execution_id in (None, delivery.json["execution_id"]):
                        self._untaken.remove(delivery)
                        return delivery
                left = deadline - time.monotonic()
                if left <= 0:
                    raise TimeoutError(f"no delivery of {execution_id or 'anything'} came")
                self._changed.wait(left)

    def untaken(self, execution_id: str) -> list[Delivery]:
        """Return the deliveries of an execution that nobody took."""
        with self._changed:
            return [d for d in self._untaken if d.json["execution_id"] == execution_id]


class WebhookServer:
    """An HTTP server on a free port of the loop-back interface, with an inbox per path."""

    def __init__(self) -> None:
        self._inboxes: dict[str, Inbox] = {}
        inboxes = self._inboxes

        class Handler(BaseHTTPRequestHandler):
            def _serve(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                headers = {name.lower(): value for name, value in self.headers.items()}
                delivery = Delivery(self.command, self.path, headers, body)
                inbox = inboxes.get(self.path)
                status, extra = inbox.receive(delivery) if inbox else (404, {})
                self.send_response(status)
                for name, value in extra.items():
                    self.send_header(name, value)
                self.send_header("Content-Length", "0")
                self.end_headers()

            do_GET = do_POST = _serve

            def log_message(self, format: str, *args: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(
            target=self._server.serve_forever, kwargs={"poll_interval": 0.02}
        )
        self._thread.start()

    def inbox(self, path: str) -> tuple[str, Inbox]:
        """Open a path; returns its URL and what comes in there."""
        box = self._inboxes.setdefault(path, Inbox())
        return f"http://127.0.0.1:{self._server.server_port}{path}", box

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()
