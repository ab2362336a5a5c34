"""Real servers: ``agent.run`` and gunicorn with its usual workers."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rebuno_sync.agent import MAX_WEBHOOK_BYTES
from tests.scripted import GENERATION_3, ScriptedKernel, wait_until
from tests.scripted.state import Execution
from tests.unit.serving.test_flask_blueprint import post

ROOT = Path(__file__).resolve().parents[3]
APP = "tests.unit.serving.wsgi_app"


@pytest.fixture
def kernel() -> Iterator[ScriptedKernel]:
    with ScriptedKernel(GENERATION_3) as kernel:
        yield kernel


class Served:
    """A server process; its log is read all the time and shown when a test fails."""

    def __init__(self, kernel: ScriptedKernel, *command: str) -> None:
        environment = {
            **os.environ,
            "REBUNO_URL": kernel.url,
            "REBUNO_AGENT_SECRET": kernel.secret,
            "PYTHONUNBUFFERED": "1",
        }
        self.process = subprocess.Popen(
            [sys.executable, *command],
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self.log = ""
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.log += line
            print(line, end="")

    def url(self) -> str:
        """Wait until it listens, and return where."""
        pattern = re.compile(r"(?:Listening at|Running on):? (http://[0-9.]+:\d+)")
        return str(wait_until(lambda: pattern.search(self.log), what="it never listened")[1])

    def terminate(self) -> int:
        """Ask it to go as a service manager does, and return its exit status."""
        self.process.send_signal(signal.SIGTERM)
        return self.wait()

    def wait(self) -> int:
        status = self.process.wait(60)
        self._reader.join()
        return status


@contextlib.contextmanager
def started(kernel: ScriptedKernel, *command: str) -> Iterator[Served]:
    server = Served(kernel, *command)
    try:
        yield server
    finally:
        # Only this server's own process group, and only when the test has not ended it.
        if server.process.poll() is None:
            os.killpg(server.process.pid, signal.SIGKILL)
        server.wait()
        assert server.process.stdout is not None
        server.process.stdout.close()


def output(run: Execution) -> dict[str, Any]:
    assert run.status == "completed", (run.status, run.failure_reason)
    found: dict[str, Any] = json.loads(run.output.text)  # type: ignore[union-attr]
    return found


def finished(kernel: ScriptedKernel, run: Execution) -> dict[str, Any]:
    kernel.wait_for(lambda: run.status != "running")
    return output(run)


RUN = f"from {APP} import agent; agent.run(port=0, workers={{workers}}, threads=2)"


@pytest.mark.parametrize("workers", [1, 2])
def test_run_serves_until_sigterm_and_drains(
    kernel: ScriptedKernel, tmp_path: Path, workers: int
) -> None:
    go = tmp_path / "go"
    with started(kernel, "-c", RUN.format(workers=workers)) as server:
        url = server.url()
        kernel.agent_url = f"{url}/webhook"
        first = kernel.create({})
        assert kernel.deliver(first).status == 202
        found = finished(kernel, first)
        assert found["app"] == "rebuno_sync.agent"
        assert found["pid"] != server.process.pid, "handlers run in the workers"

        slow = kernel.create({"go": str(go)})
        assert kernel.deliver(slow).status == 202
        kernel.wait_for(lambda: any(s.status == "succeeded" for s in slow.steps.values()))
        server.process.send_signal(signal.SIGTERM)
        wait_until(lambda: "Worker exiting" in server.log)
        assert server.process.poll() is None, "it waits for the handler"
        assert slow.status == "running"
        go.touch()
        assert server.wait() == 0
        assert output(slow)["end"] == "done"
    assert kernel.calls("fail") == []


def test_run_without_work_ends_at_once(kernel: ScriptedKernel) -> None:
    with started(kernel, "-c", RUN.format(workers=1)) as server:
        server.url()
        assert server.terminate() == 0


def test_two_servers_of_one_user(
    kernel: ScriptedKernel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither leaves anything in the user's home, nor takes the other's place there."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    command = ("-c", RUN.format(workers=1))
    with started(kernel, *command) as one, started(kernel, *command) as two:
        for server in (one, two):
            kernel.agent_url = f"{server.url()}/webhook"
            run = kernel.create({})
            assert kernel.deliver(run).status == 202
            assert finished(kernel, run)["end"] == "done"
        assert (one.terminate(), two.terminate()) == (0, 0)
    assert list(tmp_path.iterdir()) == []


def test_run_without_gunicorn(kernel: ScriptedKernel) -> None:
    script = f"""
import sys
sys.modules["gunicorn.app.base"] = None
from {APP} import agent
agent.run(port=0)
"""
    with started(kernel, "-c", script) as server:
        url = server.url()
        assert "serving with Werkzeug's development server" in server.log
        kernel.agent_url = f"{url}/webhook"
        run = kernel.create({})
        assert kernel.deliver(run).status == 202
        assert finished(kernel, run)["end"] == "done"


WORKERS = [
    ("sync", ["--worker-class", "sync"]),
    ("gthread", ["--worker-class", "gthread", "--threads", "2"]),
    ("preloaded", ["--worker-class", "gthread", "--threads", "2", "--workers", "2", "--preload"]),
]


@pytest.mark.parametrize("options", [o for _, o in WORKERS], ids=[name for name, _ in WORKERS])
def test_under_gunicorn(kernel: ScriptedKernel, tmp_path: Path, options: list[str]) -> None:
    go = tmp_path / "go"
    command = ["-m", "gunicorn", "--bind", "127.0.0.1:0", *options, f"{APP}:create_app()"]
    with started(kernel, *command) as server:
        url = server.url()
        hook = kernel.agent_url = f"{url}/agents/a1/webhook"

        # A plain body and a chunked one, both read by the app before the webhook is called.
        run = kernel.create({})
        assert kernel.deliver(run).status == 202
        assert finished(kernel, run)["app"] == "the app"
        run = kernel.create({})
        kernel.take(run)
        body = kernel.webhook_body(run)
        pieces = [body[n : n + 9] for n in range(0, len(body), 9)]
        assert post(hook, pieces)[:2] == (202, b"taken")
        assert finished(kernel, run)["end"] == "done"

        # Over the limit, both ways; and the connection is fit for the next request.
        over = b"x" * (MAX_WEBHOOK_BYTES + 1)
        assert post(hook, over)[0] == 413
        assert post(hook, [over[:40_000], over[40_000:]])[0] == 413
        assert post(hook, over * 4)[0] == 413
        assert post(hook, b"{}", "sha256=no")[:2] == (401, b"")
        assert post(hook, b"{}")[0] == 400

        slow = kernel.create({"go": str(go)})
        assert kernel.deliver(slow).status == 202
        kernel.wait_for(lambda: any(s.status == "succeeded" for s in slow.steps.values()))
        server.process.send_signal(signal.SIGTERM)
        wait_until(lambda: "Worker exiting" in server.log)
        go.touch()
        assert server.wait() == 0
        assert output(slow)["end"] == "done"
