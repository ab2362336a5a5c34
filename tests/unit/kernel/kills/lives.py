"""Kernels that live for a while: ``python -m tests.unit.kernel.kills.lives SOCKET``.

Each line on standard input begins a life, in a child that is forked from this process and connects
to ``SOCKET``. There it gets one JSON message a line and answers each; webhooks go the same way.
When the child is dead, how it ended is printed.

A life ends at its n-th *point*, a point being: before and after every statement that is sent to
SQLite (so also between a commit and its answer), before and after a webhook is posted, before and
after an answer is given. Without threads, with ids, back-offs and answers of agents drawn from the
seed of the life, and with a clock that the messages set, the n-th point is the same each time.
Other lives have the kernel's own threads and end at a moment instead, so also within SQLite, and
others do not end before they are told to.
"""

from __future__ import annotations

import gc
import json
import logging
import os
import random
import secrets
import signal
import socket
import sqlite3
import sys
import threading
import time
import types
from typing import Any

from flask import Blueprint, Flask
from werkzeug.test import Client

from rebuno_sync.kernel import (
    EmbeddedKernel,
    deliveries,
    dispatch,
    embedded,
    ids,
    keys,
    retention,
    store,
)
from rebuno_sync.kernel.api import Api
from rebuno_sync.kernel.clock import Clock
from rebuno_sync.kernel.deliveries import Claim
from rebuno_sync.kernel.dispatch import Unanswered, webhook_body

LEASE_SECONDS = 30.0
DEADLINE_SECONDS = 1e5
RETAIN_SECONDS = 1e9


class Points:
    """Counts the points of a life, and ends it at the last."""

    def __init__(self, last: int) -> None:
        self._left = last
        self._lock = threading.Lock()

    def reach(self) -> None:
        with self._lock:
            self._left -= 1
            if self._left == 0:
                os.kill(os.getpid(), signal.SIGKILL)


class Child:
    """One life.

    Args:
        life: the message that began it.
        connection: where its messages come from.
    """

    def __init__(self, life: dict[str, Any], connection: socket.socket) -> None:
        self._connection = connection
        self._sending = threading.Lock()
        self._points = Points(life["points"])
        self._chance = random.Random(life["seed"])
        self._now = float(life["now"])
        self._watch_statements(life["checkpoint_pages"], life["sabotaged"])
        if not life["threads"]:
            self._remove_chance(life["seed"])
        self._kernel = EmbeddedKernel(
            life["path"],
            clock=Clock(lambda: self._now),
            lease_timeout=LEASE_SECONDS,
            deadline=DEADLINE_SECONDS,
            retain=RETAIN_SECONDS,
            post=self._post,
            serve=False,
        )

    def run(self) -> None:
        """Serve until the connection is closed, or the life is over."""
        with self._kernel, self._connection.makefile("rb") as messages:
            client = Client(self._kernel.app)
            self._send({"ready": True})
            for line in messages:
                message = json.loads(line)
                self._now = message["now"]
                if "path" in message:
                    answer = client.open(
                        message["path"],
                        method=message["method"],
                        data=message["body"].encode(),
                        headers=message["headers"],
                        base_url="http://127.0.0.1",
                    )
                    told = {"status": answer.status_code, "body": answer.get_data(as_text=True)}
                else:
                    self._kernel.advance(0)
                    told = {"status": 204, "body": ""}
                self._points.reach()
                self._send(told)
                self._points.reach()
                self._kernel.advance(0)

    def _send(self, message: dict[str, Any]) -> None:
        with self._sending:
            self._connection.sendall(json.dumps(message).encode() + b"\n")

    def _post(self, claim: Claim) -> int:
        status = self._chance.choices([200, 503, None], [12, 1, 1])[0]
        self._points.reach()
        self._send({"webhook": json.loads(webhook_body(claim)), "status": status})
        self._points.reach()
        if status is None:
            raise Unanswered("Connection refused")
        return status

    def _watch_statements(self, checkpoint_pages: int, sabotaged: bool) -> None:
        points = self._points

        class Connection(sqlite3.Connection):
            late = False

            def execute(self, *args: Any) -> sqlite3.Cursor:
                points.reach()
                if sabotaged and self.in_transaction and args[0] in ("COMMIT", "BEGIN"):
                    # Answers first and commits with the next transaction.
                    self.late = args[0] == "COMMIT"
                    return super().execute("SELECT 1")
                if self.late and args[0] == "BEGIN IMMEDIATE":
                    super().execute("COMMIT")
                    self.late = False
                cursor = super().execute(*args)
                points.reach()
                return cursor

            def executemany(self, *args: Any) -> sqlite3.Cursor:
                points.reach()
                cursor = super().executemany(*args)
                points.reach()
                return cursor

        def connect(*args: Any, **more: Any) -> sqlite3.Connection:
            connection = sqlite3.connect(*args, factory=Connection, **more)
            sqlite3.Connection.execute(
                connection, f"PRAGMA wal_autocheckpoint = {checkpoint_pages}"
            )
            return connection

        store.sqlite3 = _changed(sqlite3, connect=connect)  # type: ignore[attr-defined]

    def _remove_chance(self, seed: int) -> None:
        drawn = random.Random(seed)
        ids.os = _changed(os, urandom=drawn.randbytes)  # type: ignore[attr-defined]
        secret = _changed(secrets, token_urlsafe=lambda size: drawn.randbytes(size).hex())
        keys.secrets = secret  # type: ignore[attr-defined]
        deliveries.random = drawn  # type: ignore[attr-defined]
        dispatch.threading = _changed(threading, Thread=_AtOnce)  # type: ignore[attr-defined]
        retention.threading = _changed(threading, Thread=_Never)  # type: ignore[attr-defined]


class _AtOnce:
    """Stands for a thread: it is over when it was started. The scheduler never begins."""

    def __init__(self, target: Any, name: str, args: Any = (), daemon: bool = True) -> None:
        self._run = lambda: target(*args)
        self._begins = name != "rebuno-kernel-scheduler"

    def start(self) -> None:
        if self._begins:
            self._run()

    def join(self) -> None:
        pass


class _Never(_AtOnce):
    def start(self) -> None:
        pass


def _changed(module: types.ModuleType, **names: Any) -> types.SimpleNamespace:
    return types.SimpleNamespace(**{**vars(module), **names})


def make_routes_once() -> None:
    """Have kernels of this process share one set of routes, which take longer than all else of a
    start; and leave the page out."""
    shared = Api(None, None, None, None, None)  # type: ignore[arg-type]
    app = shared.app()

    class OfThisKernel(Api):
        def app(self) -> Flask:
            vars(shared).update(vars(self))
            return app

    embedded.Api = OfThisKernel  # type: ignore[misc]
    embedded.Page.blueprint = lambda page: Blueprint("page", __name__)  # type: ignore[method-assign]


def serve(path: str) -> None:
    """Begin a life for each line that is read, and print how it ended."""
    with EmbeddedKernel(serve=False) as kernel:  # what is loaded on first use is loaded here
        Client(kernel.app).get("/v0/health", base_url="http://127.0.0.1")
    make_routes_once()
    logging.getLogger("rebuno_sync").setLevel(logging.ERROR)
    assert threading.active_count() == 1
    gc.collect()
    gc.freeze()
    for line in sys.stdin:
        life = json.loads(line)
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(path)
            pid = os.fork()
            if pid == 0:
                status = 1
                try:
                    Child(life, connection).run()
                    status = 0
                except BaseException:
                    sys.excepthook(*sys.exc_info())
                finally:
                    os._exit(status)
        if life["seconds"]:
            time.sleep(life["seconds"])
            os.kill(pid, signal.SIGKILL)
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)


if __name__ == "__main__":
    serve(sys.argv[1])
