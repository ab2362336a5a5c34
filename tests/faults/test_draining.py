"""Workers that end while a handler runs on beyond its time, in each way that gives it time.

A stop, a reload and ``max_requests``, under each worker class: from then on dispatches are answered
503; the handler that does not end is given up, by name; the next attempt goes on elsewhere.
"""

from __future__ import annotations

import contextlib
import json
import math
import re
import signal
import socket
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from rebuno_sync.signing import sign_body
from tests.faults.fleet import Fleet
from tests.faults.sides import AGENT, SECRET
from tests.faults.test_worker_matrix import CLASSES, STEPS, check, fleet_for, wait_until_gone
from tests.scripted import wait_until

BODY = json.dumps({"execution_id": "e", "dispatch_id": "d", "dispatch_attempt": 1}).encode()
#: More of the configuration: the worker tells when it has been told to go.
TELLS = """
import pathlib, signal

before = post_worker_init


def post_worker_init(worker):
    before(worker)
    first = signal.getsignal(signal.SIGTERM)

    def told(number, frame):
        first(number, frame)
        (pathlib.Path(__file__).parent / "told").touch()

    signal.signal(signal.SIGTERM, told)
"""


class Late:
    """A webhook that is under way for as long as the test wants."""

    def __init__(self, fleet: Fleet, *, expect: bool) -> None:
        self._socket = socket.create_connection(fleet.listener.getsockname(), timeout=30)
        head = [
            "POST /webhook HTTP/1.1",
            "Host: a",
            f"Content-Length: {len(BODY)}",
            f"Rebuno-Signature: {sign_body(SECRET, BODY)}",
            *["Expect: 100-continue"] * expect,
        ]
        # All but the last empty line, which makes it a request.
        self._socket.sendall("\r\n".join(head).encode("ascii") + b"\r\n")
        if expect:
            self._socket.sendall(b"\r\n")
            assert self._read().startswith(b"HTTP/1.1 100 ")
        self._rest = BODY if expect else b"\r\n" + BODY

    def finish(self) -> bytes:
        """Send the rest and return the head of the answer."""
        self._socket.sendall(self._rest)
        with self._socket:
            return self._read()

    def _read(self) -> bytes:
        found = b""
        while b"\r\n\r\n" not in found and (piece := self._socket.recv(4096)):
            found += piece
        return found


@contextlib.contextmanager
def one_worker(
    journal: Path,
    worker_class: str,
    monkeypatch: pytest.MonkeyPatch,
    *options: str,
    shutdown_timeout: float,
) -> Iterator[Fleet]:
    monkeypatch.setenv("SHUTDOWN_TIMEOUT", str(shutdown_timeout))
    with fleet_for(journal, worker_class, "--workers=1", *options, more=TELLS) as fleet:
        yield fleet


@pytest.mark.parametrize("worker_class", CLASSES)
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP], ids=["stop", "reload"])
def test_a_worker_that_gunicorn_tells_to_go(
    tmp_path: Path, worker_class: str, number: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    with one_worker(tmp_path, worker_class, monkeypatch, shutdown_timeout=0.2) as fleet:
        created = fleet.client.create(AGENT, {"how": "go"})
        ((_, _, worker),) = wait_until(lambda: fleet.noted("waiting"))
        late = Late(fleet, expect=True)
        fleet.master.send_signal(number)
        wait_until((tmp_path / "told").exists)
        assert late.finish().startswith(b"HTTP/1.1 503 ")
        wait_until_gone(worker)
        if number == signal.SIGTERM:
            fleet.restart()
        goes_on_elsewhere(fleet, created.id, worker)


@pytest.mark.parametrize("worker_class", CLASSES)
def test_a_worker_that_has_had_its_requests(
    tmp_path: Path, worker_class: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Enough to get to the step that stands still: the worker ends with the request that brought it.
    options = ("--max-requests=1",)
    with one_worker(tmp_path, worker_class, monkeypatch, *options, shutdown_timeout=5) as fleet:
        # A sync worker serves nothing after the request that reaches the number.
        late = None if worker_class == "sync" else Late(fleet, expect=False)
        created = fleet.client.create(AGENT, {"how": "go"})
        ((_, _, worker),) = wait_until(lambda: fleet.noted("waiting"))
        wait_until(lambda: "Autorestarting worker after current request" in fleet.log)
        if late is not None:
            assert late.finish().startswith(b"HTTP/1.1 503 ")
        wait_until_gone(worker)
        goes_on_elsewhere(fleet, created.id, worker)


def goes_on_elsewhere(fleet: Fleet, execution_id: str, worker: int) -> None:
    """The log names the execution, our hook came before the user's own, nothing has failed."""
    given_up = re.search(rf"execution {execution_id} \(.*still ran after .* is given up", fleet.log)
    done = re.search(rf"worker {worker} is done", fleet.log)
    assert given_up is not None, fleet.log
    assert done is not None, fleet.log
    assert given_up.start() < done.start()
    created = fleet.client.get(execution_id)
    assert created.status == "running"
    found = fleet.finish(created)
    check(fleet, created, found)
    assert fleet.attempts(created) == 2


@pytest.mark.parametrize(
    ("worker_class", "number", "jitter", "executions"),
    [*((name, 1, 3, 12) for name in CLASSES), ("gthread", 7, 5, 30), ("sync", 25, 5, 70)],
)
def test_workers_that_are_replaced_all_the_time(
    tmp_path: Path, worker_class: str, number: int, jitter: int, executions: int
) -> None:
    """With jitter, so that some end with the first webhooks and others later."""
    options = (f"--max-requests={number}", f"--max-requests-jitter={jitter}")
    with fleet_for(tmp_path, worker_class, *options) as fleet:
        created = [fleet.client.create(AGENT, {}).id for _ in range(executions)]
        for execution_id in created:
            found = fleet.client.wait(execution_id, timeout=120)
            assert (found.status, found.output) == ("completed", list(range(1, STEPS + 1)))
        effects = Counter(what for what, _, _ in fleet.noted())
        assert effects == {f"effect-{n}": len(created) for n in range(1, STEPS + 1)}
        # Two workers may each be one short of the most that they could have been given.
        most = number + jitter
        least = math.ceil((executions - 2 * (most - 1)) / most)
        assert least >= 1
        wait_until(lambda: fleet.log.count("Autorestarting") >= least)
