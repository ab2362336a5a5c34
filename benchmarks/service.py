"""A kernel and a gunicorn, each in processes of their own, and what these hold."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from rebuno_sync import Client

SECRET = "a-secret-for-the-load"


@dataclasses.dataclass(frozen=True)
class Held:
    """What a process holds: its resident memory in MiB, its threads, its files and sockets."""

    mib: float
    threads: int
    files: int
    sockets: int


def held(pid: int) -> Held:
    """Look at a process; nought of everything where there is no ``/proc``."""
    folder = Path(f"/proc/{pid}")
    try:
        pages = int((folder / "statm").read_text().split()[1])
        threads = len(os.listdir(folder / "task"))
        names = os.listdir(folder / "fd")
    except OSError:
        return Held(0.0, 0, 0, 0)
    sockets = 0
    for name in names:
        with contextlib.suppress(OSError):
            sockets += os.readlink(folder / "fd" / name).startswith("socket:")
    mib = pages * os.sysconf("SC_PAGE_SIZE") / 2**20
    return Held(mib, threads, len(names) - sockets, sockets)


def children(pid: int) -> list[int]:
    """The processes that a process has started; none where the system does not tell."""
    try:
        return sorted(map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split()))
    except OSError:
        return []


@contextlib.contextmanager
def kernel(path: Path, *, retain: float | None = None) -> Iterator[tuple[str, int]]:
    """Run an embedded kernel on a file; give its URL and its process id.

    Args:
        path: the file.
        retain: for how many seconds ended executions are kept.
    """
    command = [sys.executable, "-m", "benchmarks.load_kernel", str(path)]
    process = subprocess.Popen(
        [*command, *([] if retain is None else [str(retain)])],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        yield process.stdout.readline().strip(), process.pid
    finally:
        process.communicate(timeout=60)


@contextlib.contextmanager
def agents(
    app: str,
    kernel_url: str,
    paths: Mapping[str, str],
    *options: str,
    lease_timeout: float | None = None,
) -> Iterator[int]:
    """Serve agents with gunicorn and register them; give the master's process id.

    Args:
        app: where the WSGI application is, as gunicorn takes it.
        kernel_url: the kernel.
        paths: the path of each agent's webhook.
        options: more of gunicorn's.
        lease_timeout: in seconds; the kernel's by default.
    """
    listener = socket.create_server(("127.0.0.1", 0), backlog=512)
    port = listener.getsockname()[1]
    command = [sys.executable, "-m", "gunicorn", "--log-level", "error", *options]
    process = subprocess.Popen(
        [*command, "--bind", f"fd://{listener.fileno()}", app],
        env={**os.environ, "REBUNO_URL": kernel_url, "REBUNO_AGENT_SECRET": SECRET},
        pass_fds=[listener.fileno()],
    )
    listener.close()
    try:
        with Client(kernel_url) as client:
            for agent_id, path in paths.items():
                webhook = f"http://127.0.0.1:{port}{path}"
                client.register_agent(
                    agent_id, webhook, SECRET, lease_timeout_seconds=lease_timeout
                )
        yield process.pid
    finally:
        process.terminate()
        process.wait(60)
