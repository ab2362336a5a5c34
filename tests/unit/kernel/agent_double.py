"""An agent's two ends for kernel tests: it receives webhooks, and signs requests."""

from __future__ import annotations

import http.server
import json
import queue
import threading
import time
from collections.abc import Callable
from typing import Any

import requests

from rebuno_sync import signing, wire

#: How long a condition may take to become true before the test fails, in seconds.
PATIENCE = 30.0


def eventually(condition: Callable[[], Any]) -> Any:
    """Return the first true value of ``condition``, asked again and again."""
    deadline = time.monotonic() + PATIENCE
    while True:
        value = condition()
        if value:
            return value
        assert time.monotonic() < deadline, "the condition did not become true"
        time.sleep(0.005)


class Webhooks:
    """A server that keeps what is posted to it and answers as told."""

    def __init__(self) -> None:
        self.received: queue.Queue[tuple[dict[str, str], bytes]] = queue.Queue()
        #: Called with the body; returns the status to answer.
        self.answer: Callable[[bytes], int] = lambda body: 200
        outer = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                outer.received.put((dict(self.headers.items()), body))
                self.send_response(outer.answer(body))
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, format: str, *args: Any) -> None:
                pass

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,))
        self._thread.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}/webhook"

    def next(self) -> dict[str, Any]:
        """Return the body of the next webhook."""
        return dict(json.loads(self.received.get(timeout=PATIENCE)[1]))

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


class Caller:
    """Sends requests to a kernel, as a client or signed as an agent."""

    def __init__(self, url: str, agent_id: str = "a1", secret: str = "orchard-secret") -> None:
        self.url = url
        self.agent_id = agent_id
        self.secret = secret
        self.session = requests.Session()
        self.session.trust_env = False

    def close(self) -> None:
        self.session.close()

    def client(self, method: str, path: str, body: Any = None, **headers: str) -> requests.Response:
        return self._send(method, path, _encode(body), headers)

    def agent(
        self,
        method: str,
        path: str,
        body: Any = None,
        *,
        lease: dict[str, Any] | None = None,
        body_signature: bool = False,
        extra: dict[str, str] | None = None,
    ) -> requests.Response:
        data = _encode(body)
        headers = {wire.AGENT_ID_HEADER: self.agent_id}
        if lease is not None:
            headers[wire.DISPATCH_ID_HEADER] = lease["dispatch_id"]
            if "dispatch_attempt" in lease:
                headers[wire.DISPATCH_ATTEMPT_HEADER] = str(lease["dispatch_attempt"])
        if body_signature:
            headers[wire.SIGNATURE_HEADER] = signing.sign_body(self.secret, data)
        else:
            timestamp = str(int(time.time()))
            headers[wire.TIMESTAMP_HEADER] = timestamp
            headers[wire.SIGNATURE_HEADER] = signing.sign_request(
                self.secret,
                method,
                path,
                timestamp,
                data,
                dispatch_id=headers.get(wire.DISPATCH_ID_HEADER, ""),
                dispatch_attempt=headers.get(wire.DISPATCH_ATTEMPT_HEADER, ""),
            )
        return self._send(method, path, data, {**headers, **(extra or {})})

    def _send(
        self, method: str, path: str, data: bytes, headers: dict[str, str]
    ) -> requests.Response:
        return self.session.request(
            method,
            self.url + path,
            data=data,
            headers=headers,
            timeout=PATIENCE,
            allow_redirects=False,
        )


def _encode(body: Any) -> bytes:
    if body is None:
        return b""
    return body if isinstance(body, bytes) else json.dumps(body).encode()
