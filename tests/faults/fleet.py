"""A gunicorn with the agent of :mod:`tests.faults.gunicorn_app`, and its kernel."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from rebuno_sync import Client
from rebuno_sync.kernel import EmbeddedKernel
from rebuno_sync.wire import Execution
from tests.faults.sides import AGENT, SECRET
from tests.scripted import wait_until

ROOT = Path(__file__).resolve().parents[2]
LEASE = 60.0
#: What the agent returns when nothing went wrong.
OUTPUT = {"reserve": "reserved", "pay": "paid", "ship": "shipped"}


@dataclass
class Fleet:
    """A gunicorn with our agent, its kernel, and what it noted."""

    kernel: EmbeddedKernel
    client: Client
    journal: Path
    master: subprocess.Popen[bytes]
    app: str
    options: tuple[str, ...]
    listener: socket.socket

    def noted(self, what: str = "") -> list[tuple[str, int, int]]:
        """The lines of the journal: what, the attempt, the process."""
        file = self.journal / "effects"
        rows = file.read_text().splitlines() if file.exists() else []
        split = [row.split() for row in rows]
        return [(w, int(a), int(p)) for w, a, p in split if not what or w == what]

    def start(self, at: str) -> tuple[Execution, int]:
        """Start an execution that waits at a place; return it and the worker that waits."""
        created = self.client.create(AGENT, {"at": at})
        rows = wait_until(lambda: self.noted(f"waiting-{at}"), what=f"no worker came to {at}")
        return created, rows[0][2]

    def finish(self, created: Execution) -> Execution:
        """Let the lease run out and wait for the end."""
        self.kernel.advance(LEASE + 1)
        return self.client.wait(created.id, timeout=60)

    def count(self, what: str) -> int:
        return len(self.noted(what))

    @property
    def log(self) -> str:
        """What gunicorn and its workers have logged."""
        return (self.journal / "log").read_text()

    def attempts(self, created: Execution) -> int:
        """The attempts that an agent took."""
        return sum(e.type == "dispatch.acked" for e in self.client.events(created.id))

    def restart(self) -> None:
        """Start another gunicorn after the first one has ended."""
        self.master.wait(60)
        self.master = _start(self.kernel.url, self.journal, self.listener, self.app, self.options)


@contextlib.contextmanager
def fleet_of(journal: Path, *options: str, app: str = "gunicorn_app") -> Iterator[Fleet]:
    """Start a gunicorn of two workers with further ``options``; it notes things in ``journal``."""
    with (
        EmbeddedKernel() as kernel,
        Client(kernel.url) as client,
        # The port is taken here and handed over, so nobody can come between.
        socket.create_server(("127.0.0.1", 0)) as listener,
    ):
        webhook = f"http://127.0.0.1:{listener.getsockname()[1]}/webhook"
        client.register_agent(AGENT, webhook, SECRET, lease_timeout_seconds=LEASE)
        master = _start(kernel.url, journal, listener, app, options)
        fleet = Fleet(kernel, client, journal, master, app, options, listener)
        try:
            yield fleet
        finally:
            (journal / "go").touch()
            fleet.master.terminate()
            try:
                fleet.master.wait(30)
            except subprocess.TimeoutExpired:
                fleet.master.kill()
                fleet.master.wait()


def _start(
    kernel_url: str, journal: Path, listener: socket.socket, app: str, options: tuple[str, ...]
) -> subprocess.Popen[bytes]:
    always = ["--timeout=300", "--graceful-timeout=5", "--no-control-socket"]
    # With more than one thread gunicorn takes "sync" for "gthread".
    if not any(option.startswith("--worker-class") for option in options):
        always += ["--worker-class=gthread", "--threads=4"]
    return gunicorn(app, kernel_url, journal, listener, (*always, *options))


def gunicorn(
    module: str,
    kernel_url: str,
    journal: Path,
    listener: socket.socket,
    options: tuple[str, ...],
    **environment: str,
) -> subprocess.Popen[bytes]:
    """Start a gunicorn of two workers with the app of a module beside this one.

    It leads a process group of its own, and writes its log to ``log`` in the journal.
    """
    environment = {
        **os.environ,
        "REBUNO_URL": kernel_url,
        "REBUNO_AGENT_SECRET": SECRET,
        "JOURNAL": str(journal),
        **environment,
    }
    command = [sys.executable, "-m", "gunicorn", f"tests.faults.{module}:app", "--workers", "2"]
    with (journal / "log").open("ab") as log:
        return subprocess.Popen(
            [*command, "--bind", f"fd://{listener.fileno()}", *options],
            cwd=ROOT,
            env=environment,
            stdout=log,
            stderr=log,
            pass_fds=[listener.fileno()],
            start_new_session=True,
        )
