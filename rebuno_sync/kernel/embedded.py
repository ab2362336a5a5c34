"""The embedded development kernel: the whole protocol in one process."""

from __future__ import annotations

import dataclasses
import math
import os
import threading
from collections.abc import Collection, Mapping
from types import TracebackType
from typing import Any

from flask import Flask

from rebuno_sync.kernel import manifest as manifests
from rebuno_sync.kernel import queries
from rebuno_sync.kernel.activity import Activity
from rebuno_sync.kernel.api import Api
from rebuno_sync.kernel.auth import Authenticator
from rebuno_sync.kernel.clock import Clock
from rebuno_sync.kernel.dispatch import Dispatcher, Post
from rebuno_sync.kernel.hosts import Hosts
from rebuno_sync.kernel.live import Hub
from rebuno_sync.kernel.metrics import Metrics
from rebuno_sync.kernel.page import Page
from rebuno_sync.kernel.retention import Retention
from rebuno_sync.kernel.server import Server
from rebuno_sync.kernel.store import Store

_WEBHOOKS_SECONDS = 0.5
_REQUESTS_SECONDS = 2.0


class EmbeddedKernel:
    """A Rebuno kernel inside this process, on SQLite; for development and tests.

    It sends generation 3 webhooks and serves agents of generations 2 and 3 (PROTOCOL 9).

    Args:
        path: the SQLite file; ``None`` keeps everything in memory. A file belongs to one kernel
            at a time, and what it was doing goes on when it is started again.
        manifest: agents to register at each start: the path of a YAML file, or what it would
            hold; see :mod:`rebuno_sync.kernel.manifest`.
        lease_timeout: for agents that were registered without one, in seconds.
        bearer_token: what clients must send; ``None`` lets every client in.
        host: the address to listen on.
        port: the port to listen on; 0 takes a free one, which :attr:`url` then tells.
        accept_body_signatures: whether agents may sign the body alone (generations 1 and 2).
        accept_generation_1: whether agents are served that send no ``Rebuno-Dispatch-Attempt``.
        clock: the time; by default one of its own, see :meth:`advance`.
        allowed_hosts: names besides loopback ones and ``host`` under which browsers may ask for
            the page, and clients for the API where there is no ``bearer_token``.
        post: how a claimed dispatch reaches its agent; by HTTP by default.
        serve: whether to listen from the start; :meth:`serve` does so later.
        deadline: how long an execution may take from its creation, in seconds; one that has not
            ended by then fails with ``deadline_exceeded``. ``None`` for as long as it needs.
        retain: how long an execution is kept after its end, in seconds; then it is deleted with
            everything of it. ``None`` for ever.

    Raises:
        ManifestError: the manifest cannot be used.
        ValueError: ``lease_timeout``, ``deadline`` or ``retain`` is not above 0, or
            ``bearer_token`` is empty, or one of ``allowed_hosts`` is no host name.
    """

    def __init__(
        self,
        path: str | os.PathLike[str] | None = None,
        *,
        manifest: str | os.PathLike[str] | Mapping[str, Any] | None = None,
        lease_timeout: float = 120.0,
        bearer_token: str | None = None,
        host: str = "127.0.0.1",
        port: int = 0,
        accept_body_signatures: bool = True,
        accept_generation_1: bool = False,
        clock: Clock | None = None,
        allowed_hosts: Collection[str] = (),
        post: Post | None = None,
        serve: bool = True,
        deadline: float | None = None,
        retain: float | None = None,
    ) -> None:
        for name, seconds in (
            ("lease_timeout", lease_timeout),
            ("deadline", deadline),
            ("retain", retain),
        ):
            if seconds is not None and not 0 < seconds < math.inf:
                raise ValueError(f"{name} must be a number of seconds above 0, got {seconds!r}")
        if bearer_token == "":  # refused  # nosec B105
            raise ValueError("bearer_token is empty; leave it out to let every client in")
        self._path = path
        self._manifest = manifest
        self._lease_timeout = lease_timeout
        self._bearer_token = bearer_token
        self._host = host
        self._hosts = Hosts(host, allowed_hosts)
        self._port = port
        self._accept_body_signatures = accept_body_signatures
        self._accept_generation_1 = accept_generation_1
        self._clock = clock or Clock()
        self._post = post
        self._serve = serve
        self._deadline = deadline
        self._retain = retain
        self._lock = threading.Lock()
        self._parts: _Parts | None = None

    def start(self) -> EmbeddedKernel:
        """Start listening and delivering; safe to repeat.

        Raises:
            StoreError: the database is in use by another kernel or cannot be opened.
            SchemaError: the database was written by a newer kernel.
            OSError: the address cannot be listened on.
        """
        with self._lock:
            if self._parts is None:
                self._parts = self._assemble()
        return self

    def _assemble(self) -> _Parts:
        entries = () if self._manifest is None else manifests.load(self._manifest)
        store = Store(self._path, self._clock)
        try:
            with store.read() as tx:
                self._clock.not_before(queries.last_change(tx))
            with store.write() as tx:
                manifests.apply(tx, entries)
            hub = Hub()
            metrics = Metrics(store)
            auth = Authenticator(
                store,
                self._bearer_token,
                self._hosts,
                self._accept_body_signatures,
                self._accept_generation_1,
            )
            app = Api(store, hub, auth, metrics, self._deadline).app()
            app.register_blueprint(Page(store, hub, self._hosts, self._bearer_token).blueprint())
            server = Server(app, self._host, self._port) if self._serve else None
        except BaseException:
            store.close()
            raise
        dispatcher = Dispatcher(store, self._clock, self._lease_timeout, metrics, self._post)
        store.on_queue = dispatcher.wake
        if server is not None:
            server.start()
        dispatcher.start()
        retention = None
        if self._retain is not None:
            retention = Retention(store, self._clock, self._retain)
            retention.start()
        return _Parts(store, hub, app, server, dispatcher, retention)

    def stop(self) -> None:
        """Stop within moments and close every connection; safe to repeat.

        Nothing is lost: leases run on, and what was queued is delivered after the next start.
        """
        with self._lock:
            parts, self._parts = self._parts, None
        if parts is None:
            return
        # Deliveries first: their agents may call back to end them. Then the streams, which would
        # else count as requests that do not end.
        parts.dispatcher.stop(_WEBHOOKS_SECONDS)
        if parts.retention is not None:
            parts.retention.stop()
        parts.hub.close()
        if parts.server is not None:
            parts.server.stop(_REQUESTS_SECONDS)
        parts.store.close()

    def serve(self) -> None:
        """Listen for HTTP, unless it does already.

        Raises:
            RuntimeError: the kernel is not running.
            OSError: the address cannot be listened on.
        """
        with self._lock:
            parts = self._running()
            if parts.server is None:
                parts.server = Server(parts.app, self._host, self._port)
                parts.server.start()

    def advance(self, seconds: float) -> None:
        """Move the kernel's clock forward, for tests.

        Leases that ran out are back in the queue, overdue approvals expired, and deliveries that
        became due begun, when this returns.
        """
        self._clock.advance(seconds)

    def activity(self) -> Activity:
        """Return the events of every execution from now on.

        Raises:
            RuntimeError: the kernel is not running.
        """
        return Activity(self._running().store)

    @property
    def url(self) -> str:
        """The base URL, such as ``http://127.0.0.1:8080``.

        Raises:
            RuntimeError: the kernel is not running, or not listening.
        """
        server = self._running().server
        if server is None:
            raise RuntimeError("the kernel does not listen for HTTP; call serve()")
        host = f"[{self._host}]" if ":" in self._host else self._host
        return f"http://{host}:{server.port}"

    @property
    def app(self) -> Flask:
        """The WSGI application of the running kernel.

        Raises:
            RuntimeError: the kernel is not running.
        """
        return self._running().app

    def _running(self) -> _Parts:
        parts = self._parts
        if parts is None:
            raise RuntimeError("the kernel is not running; call start(), or use it in a with block")
        return parts

    def __enter__(self) -> EmbeddedKernel:
        return self.start()

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop()

    def __repr__(self) -> str:
        parts = self._parts
        state = "stopped" if parts is None else "running" if parts.server is None else self.url
        return f"<EmbeddedKernel {self._path or 'in memory'} {state}>"


@dataclasses.dataclass
class _Parts:
    """What runs while the kernel runs."""

    store: Store
    hub: Hub
    app: Flask
    server: Server | None
    dispatcher: Dispatcher
    retention: Retention | None
