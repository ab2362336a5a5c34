"""The server: routes a request to an API, asks the script, and sends the reply as it is meant."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import json
import socket
import threading
import zlib
from collections.abc import Iterable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any

from .asked import Asked
from .chat import Chat
from .dialect import THEN, Answering, BadRequest, Dialect, openai_error
from .messages import Messages
from .replies import Reply
from .responses import Responses
from .script import Script, ScriptError, as_script

_JSON = "application/json"
_SSE = "text/event-stream; charset=utf-8"
_DIALECTS: dict[str, Dialect] = {
    "/v1/chat/completions": Chat(),
    "/v1/responses": Responses(),
    "/v1/messages": Messages(),
}


class FakeProvider:
    """Serves the APIs on the loop-back interface until it is closed.

    A request that the script cannot answer is answered with a 500 that asks not to be retried,
    and comes out of :meth:`close` as a :class:`ScriptError`, so a test cannot miss it.

    Args:
        script: the replies in order, or a function of the request.
        port: where to listen; 0 for any free port.
        api_key: other keys are refused with 401; ``None`` takes any.
        models: what the list of models holds.

    Attributes:
        asked: the requests for an answer, oldest first; the list of models is not among them.
    """

    def __init__(
        self,
        script: Script | Iterable[Reply] = (),
        *,
        port: int = 0,
        api_key: str | None = None,
        models: Iterable[str] = ("test-model",),
    ) -> None:
        self.asked: list[Asked] = []
        self._script = as_script(script)
        self._api_key = api_key
        self._models = tuple(models)
        self._changed = threading.Condition()
        self._times: collections.Counter[str] = collections.Counter()
        self._tool_names: dict[str, str] = {}
        self._failures: list[BaseException] = []
        self._closing = threading.Event()
        self._connections: set[socket.socket] = set()
        self._server = _Listener(("127.0.0.1", port), _handler(self))
        self._thread = threading.Thread(
            target=self._server.serve_forever,
            kwargs={"poll_interval": 0.02},
            name="fake-provider",
            daemon=True,
        )
        self._thread.start()

    @property
    def url(self) -> str:
        """The address; what the Anthropic library takes as ``base_url``."""
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    @property
    def openai_url(self) -> str:
        """What the OpenAI library takes as ``base_url``."""
        return f"{self.url}/v1"

    @property
    def times_asked(self) -> dict[str, int]:
        """How often each distinct request came: the count, by :attr:`Asked.digest`."""
        with self._changed:
            return dict(collections.Counter(asked.digest for asked in self.asked))

    def wait_until_asked(self, times: int, timeout: float = 30.0) -> None:
        """Wait until so many requests have come in all.

        Raises:
            TimeoutError: they had not after ``timeout`` seconds.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: len(self.asked) >= times, timeout):
                raise TimeoutError(f"asked {len(self.asked)} times, not {times}")

    def close(self) -> None:
        """Stop, end every connection, and raise the first failure of the script, if any."""
        self._closing.set()
        self._server.shutdown()
        self._thread.join()
        with self._changed:
            for connection in self._connections:
                _hang_up(connection)
        self._server.server_close()
        if self._failures:
            raise self._failures[0]

    def __enter__(self) -> FakeProvider:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        exc: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _failed(self, exc: BaseException) -> None:
        with self._changed:
            self._failures.append(exc)

    # One request

    def _answer(self, out: _Out, asked: Asked) -> None:
        if asked.path == "/v1/models" or asked.path.startswith("/v1/models/"):
            out.json(200, self._model_list(asked), ())
            return
        dialect = _DIALECTS.get(asked.path)
        if dialect is None or asked.method != "POST":
            status = 404 if dialect is None else 405
            out.json(
                status, openai_error(status, f"no such route: {asked.method} {asked.path}"), ()
            )
            return
        with self._changed:
            asked = dataclasses.replace(asked, number=len(self.asked) + 1)
            self.asked.append(asked)
            self._times[asked.digest] += 1
            tag = f"{asked.digest}{self._times[asked.digest]:02d}"
            known = dict(self._tool_names)
            self._changed.notify_all()
        asked = dataclasses.replace(asked, tool_names=known)
        ids = (("x-request-id", f"req_{tag}"), ("request-id", f"req_{tag}"))
        refusal = self._refusal(asked, dialect)
        if refusal is not None:
            status, message = refusal
            out.json(status, dialect.error(status, message, f"req_{tag}"), ids)
            return
        try:
            reply = self._script(asked)
            self._check_reply(reply, asked)
        except BaseException as exc:
            self._failed(exc)
            said = dialect.error(500, f"the script failed: {exc}", f"req_{tag}")
            out.json(500, said, (*ids, ("x-should-retry", "false")))
            return
        answering = Answering(asked, reply, tag)
        with self._changed:
            for index, call in enumerate(reply.tool_calls):
                self._tool_names[answering.call_id(dialect.call_prefix, index)] = call.name
        self._send(out, answering, dialect, ids)

    def _refusal(self, asked: Asked, dialect: Dialect) -> tuple[int, str] | None:
        key = asked.headers.get("x-api-key") or asked.headers.get("authorization", "")
        key = key.removeprefix("Bearer ")
        if not key or (self._api_key is not None and key != self._api_key):
            return 401, "the API key is missing or wrong"
        if not isinstance(asked.json, dict):
            return 400, "the body is not a JSON object"
        try:
            dialect.check(asked, self._tool_names)
        except BadRequest as exc:
            return 400, str(exc)
        return None

    @staticmethod
    def _check_reply(reply: Reply, asked: Asked) -> None:
        for call in reply.tool_calls:
            if call.name not in asked.tools:
                raise ScriptError(
                    f"the script calls {call.name!r}, and the request offers {list(asked.tools)}"
                )

    def _send(
        self,
        out: _Out,
        answering: Answering,
        dialect: Dialect,
        ids: tuple[tuple[str, str], ...],
    ) -> None:
        reply = answering.reply
        self._closing.wait(reply.delay) if reply.delay else None
        if reply.hold is not None and reply.hold_after == 0:
            self._wait_for(reply.hold)
        headers = (*ids, *reply.headers)
        if reply.status == 0:
            out.hang_up()
        elif reply.body is not None:
            out.raw(reply.status, reply.body, headers, reply.cut_after)
        elif reply.status >= 400:
            request_id = dict(ids)["request-id"]
            said = dialect.error(reply.status, reply.message, request_id)
            out.json(reply.status, said, headers)
        elif answering.asked.stream:
            out.stream(self._paced(reply, _chunks(answering, dialect)), headers, gzip=reply.gzip)
        else:
            said = dialect.plain(answering)
            out.json(200, said, headers, cut_after=reply.cut_after, gzip=reply.gzip)

    def _paced(self, reply: Reply, chunks: Iterable[bytes]) -> Iterator[bytes | None]:
        """Yield the chunks of a stream when it is their time; ``None`` breaks the connection."""
        for number, chunk in enumerate(chunks):
            if number == reply.cut_after:
                yield None
                return
            if number and number == reply.hold_after and reply.hold is not None:
                self._wait_for(reply.hold)
            if number and reply.gap:
                self._closing.wait(reply.gap)
            yield chunk

    def _wait_for(self, event: threading.Event) -> None:
        while not event.wait(0.02) and not self._closing.is_set():
            pass

    def _model_list(self, asked: Asked) -> dict[str, Any]:
        if "anthropic-version" in asked.headers:
            found: list[dict[str, Any]] = [
                {
                    "type": "model",
                    "id": name,
                    "display_name": name,
                    "created_at": "2023-11-14T22:13:20Z",
                    "lifecycle": "active",
                }
                for name in self._models
            ]
            ends = {"first_id": found[0]["id"], "last_id": found[-1]["id"]} if found else {}
            listed: dict[str, Any] = {"data": found, "has_more": False, **ends}
        else:
            found = [
                {"id": name, "object": "model", "created": THEN, "owned_by": "fake-provider"}
                for name in self._models
            ]
            listed = {"object": "list", "data": found}
        wanted = asked.path.removeprefix("/v1/models").strip("/")
        return next((m for m in found if m["id"] == wanted), listed)


def _chunks(answering: Answering, dialect: Dialect) -> Iterator[bytes]:
    encoded = []
    for number, event in enumerate(dialect.events(answering)):
        if number == answering.reply.error_after:
            encoded.append(dialect.error_event(answering.reply.message).encode())
            break
        encoded.append(event.encode())
    size = answering.reply.chunk_bytes
    if size is None:
        yield from encoded
        return
    whole = b"".join(encoded)
    for at in range(0, len(whole), size):
        yield whole[at : at + size]


class _Listener(ThreadingHTTPServer):
    request_queue_size = 128
    daemon_threads = False


def _hang_up(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):  # the other side was faster
        connection.shutdown(socket.SHUT_RDWR)


class _Out:
    """Writes one answer to a connection."""

    def __init__(self, handler: BaseHTTPRequestHandler) -> None:
        self._handler = handler

    def json(
        self,
        status: int,
        said: Any,
        headers: Iterable[tuple[str, str]],
        *,
        cut_after: int | None = None,
        gzip: bool = False,
    ) -> None:
        body = json.dumps(said, ensure_ascii=False).encode()
        if gzip:
            packer = _gzip()
            body = packer.compress(body) + packer.flush()
            headers = (*headers, ("content-encoding", "gzip"))
        self.raw(status, (body,), (("content-type", _JSON), *headers), cut_after)

    def raw(
        self,
        status: int,
        chunks: tuple[bytes, ...],
        headers: Iterable[tuple[str, str]],
        cut_after: int | None,
    ) -> None:
        if len(chunks) == 1:
            self._head(status, (*headers, ("content-length", str(len(chunks[0])))))
            self._handler.wfile.write(chunks[0][:cut_after])
            if cut_after is not None and cut_after < len(chunks[0]):
                self.hang_up()
            return
        self._head(status, (*headers, ("transfer-encoding", "chunked")))
        for number, chunk in enumerate(chunks):
            if number == cut_after:
                self.hang_up()
                return
            self._chunk(chunk)
        self._handler.wfile.write(b"0\r\n\r\n")

    def stream(
        self,
        chunks: Iterable[bytes | None],
        headers: Iterable[tuple[str, str]],
        *,
        gzip: bool,
    ) -> None:
        packer = _gzip() if gzip else None
        packed = (("content-encoding", "gzip"),) if gzip else ()
        streamed = (("content-type", _SSE), ("transfer-encoding", "chunked"))
        self._head(200, (*streamed, *packed, *headers))
        for chunk in chunks:
            if chunk is None:
                self.hang_up()
                return
            if packer is not None:
                chunk = packer.compress(chunk) + packer.flush(zlib.Z_SYNC_FLUSH)
            self._chunk(chunk)
        if packer is not None:
            self._chunk(packer.flush())
        self._handler.wfile.write(b"0\r\n\r\n")

    def hang_up(self) -> None:
        self._handler.close_connection = True
        self._handler.wfile.flush()
        _hang_up(self._handler.connection)

    def _head(self, status: int, headers: Iterable[tuple[str, str]]) -> None:
        lines = [f"HTTP/1.1 {status} Status", *(f"{name}: {value}" for name, value in headers)]
        self._handler.wfile.write("\r\n".join([*lines, "", ""]).encode("latin-1"))

    def _chunk(self, chunk: bytes) -> None:
        if chunk:
            self._handler.wfile.write(b"%x\r\n%b\r\n" % (len(chunk), chunk))


def _gzip() -> Any:
    return zlib.compressobj(wbits=zlib.MAX_WBITS | 16)


def _handler(provider: FakeProvider) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True

        def setup(self) -> None:
            super().setup()
            with provider._changed:
                provider._connections.add(self.connection)

        def finish(self) -> None:
            with provider._changed:
                provider._connections.discard(self.connection)
            super().finish()

        def handle(self) -> None:
            try:
                super().handle()
            except OSError:
                self.close_connection = True  # the client went away

        def answer(self) -> None:
            body = self.rfile.read(int(self.headers.get("content-length") or 0))
            path, _, query = self.path.partition("?")
            headers = {name.lower(): value for name, value in self.headers.items()}
            try:
                provider._answer(_Out(self), Asked(0, self.command, path, query, headers, body))
            except OSError:
                raise
            except BaseException as exc:
                provider._failed(exc)
                self.close_connection = True

        do_GET = do_POST = do_PUT = do_DELETE = do_PATCH = answer

        def log_message(self, format: str, *args: Any) -> None:
            pass

    return Handler
