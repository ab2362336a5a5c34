"""The two sides of a run, each in processes of its own that can be killed and started again."""

from __future__ import annotations

import contextlib
import http.client
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import IO

from rebuno_sync import Client
from tests.faults.fleet import ROOT, gunicorn
from tests.faults.machine import Machine
from tests.faults.plan import Plan

#: What a process may take to come up or to end, in seconds.
PATIENCE = 30.0
_HOOKS = "from rebuno_sync.serving.gunicorn_hooks import *\n"


class KernelSide:
    """An embedded kernel on a file (see :mod:`tests.faults.kernel_process`).

    Attributes:
        machine: the machine that it lives on.
        client: an operator's client of the running kernel, which has another port each time.
        said: what it has logged.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.machine = Machine(folder / "kernel.machine")
        self.said: list[str] = []
        self.start()

    def start(self) -> None:
        """Start it, as often as it takes: a full disk ends a kernel that is about to begin."""
        deadline = time.monotonic() + PATIENCE
        while True:
            self._process = subprocess.Popen(
                [
                    *(sys.executable, "-m", "tests.faults.kernel_process"),
                    *(str(self._folder / "kernel.sqlite3"), str(self._folder / "kernel.machine")),
                ],
                cwd=ROOT,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            assert self._process.stdout is not None
            # A pipe, since a limit on the size of files would hold for a log as well.
            listening = threading.Thread(target=self._listen, args=(self._process.stderr,))
            listening.start()
            self.url = self._process.stdout.readline().strip()
            if self.url:
                break
            self.kill()
            assert time.monotonic() < deadline, f"the kernel does not start: {self.said[-20:]}"
        self.client = Client(self.url, timeout=5.0)

    def _listen(self, lines: IO[str]) -> None:
        with lines, (self._folder / "kernel.log").open("a") as log:
            for line in lines:
                self.said.append(line)
                log.write(line)
                log.flush()

    def times_said(self, text: str) -> int:
        """How many lines of its log have this in them."""
        return sum(text in line for line in list(self.said))

    def kill(self) -> None:
        """Kill it, unless it has ended."""
        self._process.kill()
        self._process.wait()
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.stdout.close()

    def limit_files(self, size: int) -> None:
        """Let it write no file beyond a size, in bytes; -1 for no limit."""
        resource.prlimit(self._process.pid, resource.RLIMIT_FSIZE, (size, -1))

    def stop(self) -> bool:
        """End it in order; tell whether it did."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            return False
        finally:
            self.kill()
        return True


class AgentSide:
    """Two workers with the agent of :mod:`tests.faults.thirty_steps`.

    Attributes:
        machine: the machine that they live on.
        url: where they listen, under whatever master.
    """

    def __init__(self, plan: Plan, kernel_url: str, folder: Path) -> None:
        self._plan = plan
        self._kernel_url = kernel_url
        self._folder = folder
        self.machine = Machine(folder / "agents.machine")
        config = folder / "gunicorn.conf.py"
        config.write_text("control_socket_disable = True\n" + (_HOOKS if plan.hooks else ""))
        # It outlives each master, as a socket of systemd does.
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=64)
        self._port = self._listener.getsockname()[1]
        self.url = f"http://127.0.0.1:{self._port}"
        self._masters: list[subprocess.Popen[bytes]] = []
        self.start()

    def start(self) -> None:
        """Start a master."""
        options = ["--worker-class", self._plan.worker_class, "--threads", "4"]
        options += ["--config", str(self._folder / "gunicorn.conf.py")]
        options += ["--timeout", "30", "--graceful-timeout", "5"]
        options += ["--preload"] if self._plan.preload else []
        self._masters.append(
            gunicorn(
                "thirty_steps",
                self._kernel_url,
                self._folder,
                self._listener,
                tuple(options),
                SIGNATURE=self._plan.signature,
                REBUNO_CLAIMS_DIR=str(self._folder),
            )
        )

    def wait(self) -> None:
        """Wait until a worker answers."""
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=PATIENCE)
        connection.request("GET", "/")
        connection.getresponse().read()
        connection.close()

    def workers(self) -> list[int]:
        """The workers of the newest master, by age."""
        master = self._masters[-1].pid
        with contextlib.suppress(OSError):
            return sorted(
                map(int, Path(f"/proc/{master}/task/{master}/children").read_text().split())
            )
        return []

    def kill_master(self) -> None:
        """Kill the master, and start another, whether or not its workers have noticed."""
        self._masters[-1].kill()
        self._masters[-1].wait()
        self.start()

    def stop(self) -> bool:
        """End the newest master in order, and kill what is left of all; tell whether it did."""
        newest = self._masters[-1]
        newest.send_signal(signal.SIGTERM)
        in_order = True
        try:
            newest.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            in_order = False
        for master in self._masters:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(master.pid, signal.SIGKILL)
            master.wait()
        self._listener.close()
        return in_order
