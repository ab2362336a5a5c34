"""Kills an agent in the middle of its work and shows that it finishes all the same.

``make demo``, or ``python -m examples.licence_report.demo``. Starts the embedded kernel on a
file, gunicorn with two workers, and one execution; kills the worker between two tools; shows
what ran, what was replayed, and the report. Exits 1 if anything ran twice or went wrong.
"""

from __future__ import annotations

import collections
import http.client
import json
import os
import queue
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from rich.console import Console
from rich.markdown import Markdown

from rebuno_sync import Client
from rebuno_sync.kernel import EmbeddedKernel

AGENT = "licence-report"
#: Short, so that the second attempt comes soon after the kill; in seconds.
LEASE = 5.0
#: The demonstration gives up after this many seconds.
LIMIT = 55.0

console = Console(highlight=False, soft_wrap=True)


def main() -> int:
    with TemporaryDirectory(prefix="licence-report-") as folder:
        return run(Path(folder))


def run(folder: Path) -> int:
    names = sorted({d.metadata["Name"] for d in metadata.distributions()}, key=str.lower)
    hold_after = max(len(names) // 2, 1)
    report, trace, effects = folder / "report.md", folder / "trace.jsonl", folder / "effects.jsonl"
    trace.touch()
    effects.touch()
    secret = secrets.token_hex(16)
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    kernel = EmbeddedKernel(str(folder / "kernel.sqlite3"), lease_timeout=LEASE)
    with kernel, Client(kernel.url) as client:
        say(f"kernel    {kernel.url}, on a file")
        client.register_agent(AGENT, f"http://127.0.0.1:{port}/agents/{AGENT}/webhook", secret)
        environment = {
            **os.environ,
            "REBUNO_URL": kernel.url,
            "REBUNO_AGENT_SECRET": secret,
            "LICENCE_REPORT_TRACE": str(trace),
            "LICENCE_REPORT_EFFECTS": str(effects),
            "LICENCE_REPORT_HOLD_AFTER": str(hold_after),
            "LICENCE_REPORT_HELD": str(folder / "held"),
        }
        gunicorn = subprocess.Popen(
            [
                *(sys.executable, "-m", "gunicorn", "--workers", "2", "--threads", "4"),
                *("--bind", f"fd://{listener.fileno()}", "--log-level", "error"),
                "examples.licence_report.app:create_app()",
            ],
            env=environment,
            pass_fds=[listener.fileno()],
            stderr=subprocess.PIPE,
            text=True,
        )
        listener.close()
        try:
            say(f"gunicorn  http://127.0.0.1:{port}, two workers, master pid {gunicorn.pid}")
            wait_for_http(port)
            notes: queue.SimpleQueue[str] = queue.SimpleQueue()
            killer = threading.Thread(target=kill_when_holding, args=(gunicorn, notes), daemon=True)
            killer.start()
            begun = time.monotonic()
            run = client.create(AGENT, {"names": names, "path": str(report)})
            say(f"execution {run.id}: {len(names)} installed distributions\n")
            attempts = show_until_ended(client, run.id, trace, notes)
            found = client.get(run.id)
            took = time.monotonic() - begun
        finally:
            gunicorn.terminate()
            gunicorn.wait(30)
        return verdict(found.status, found.output, attempts, lines(effects), report, took)


def wait_for_http(port: int) -> None:
    """Wait until gunicorn answers; a webhook sent before would use up its lease in the queue."""
    deadline = time.monotonic() + LIMIT
    while True:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=LIMIT)
        try:
            connection.request("GET", "/")
            connection.getresponse()
            return
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)
        finally:
            connection.close()


def kill_when_holding(gunicorn: subprocess.Popen[str], notes: queue.SimpleQueue[str]) -> None:
    """Send SIGKILL to the worker that says it stands between two tools."""
    assert gunicorn.stderr is not None
    for line in gunicorn.stderr:
        if line.startswith('{"holding"'):
            pid = json.loads(line)["holding"]
            os.kill(pid, signal.SIGKILL)
            notes.put(
                f"[bold red]SIGKILL   worker {pid}, between two tools[/]\n"
                f"          its lease runs out in {LEASE:g} s, then the kernel delivers again\n"
            )
        elif line.strip():
            notes.put(f"gunicorn  {line.rstrip()}")


def show_until_ended(
    client: Client, execution_id: str, trace: Path, notes: queue.SimpleQueue[str]
) -> dict[int, dict[str, int]]:
    """Print each step as it happens; return how many ran and were replayed in each attempt."""
    attempts: dict[int, dict[str, int]] = collections.defaultdict(collections.Counter)
    deadline = time.monotonic() + LIMIT
    shown = 0
    while True:
        ended = client.get(execution_id).done
        noted = notes.qsize()
        rows = list(lines(trace))
        for row in rows[shown:]:
            attempt, outcome = row["dispatch_attempt"], row["outcome"]
            if attempt not in attempts:
                say(f"[bold]attempt {attempt}[/], worker {row['pid']}")
            attempts[attempt][outcome] += 1
            if outcome != "runs":
                style = {"replayed": "cyan", "recorded": "green"}.get(outcome, "red")
                word = {"recorded": "ran"}.get(outcome, outcome)
                say(f"  [{style}]{word:9}[/] {row['target']:14} step {row['step_id'][:12]}")
        shown = len(rows)
        # What was noted before the rows were read stands behind them.
        for _ in range(noted):
            say(notes.get())
        if ended:
            return attempts
        if time.monotonic() > deadline:
            say(f"[red]not finished after {LIMIT:g} s[/]")
            return attempts
        time.sleep(0.05)


def lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the JSON objects of a file that others append to; a half-written line waits."""
    for line in path.read_text(encoding="utf-8").splitlines(keepends=True):
        if line.endswith("\n"):
            yield json.loads(line)


def verdict(
    status: str,
    output: Any,
    attempts: dict[int, dict[str, int]],
    effects: Iterator[dict[str, Any]],
    report: Path,
    took: float,
) -> int:
    """Show the report and tell whether everything happened exactly once."""
    ran = collections.Counter((row["effect"], row["subject"]) for row in effects)
    twice = [key for key, count in ran.items() if count > 1]
    if report.exists():
        console.print(Markdown(report.read_text(encoding="utf-8")))
    say(f"\n{status} after {took:.1f} s: {output}")
    for attempt, counts in sorted(attempts.items()):
        say(
            f"attempt {attempt}: {counts.get('recorded', 0)} steps ran, "
            f"{counts.get('replayed', 0)} replayed"
        )
    problems = [f"{effect} ran twice for {subject!r}" for effect, subject in twice]
    if status != "completed":
        problems.append(f"the execution is {status}")
    if len(attempts) < 2:
        problems.append("there was no second attempt")
    elif not attempts[max(attempts)].get("replayed"):
        problems.append("no step was replayed")
    for problem in problems:
        say(f"[bold red]{problem}[/]")
    if not problems:
        say(f"[bold green]{sum(ran.values())} effects, each exactly once[/]")
    return 1 if problems else 0


def say(text: str) -> None:
    console.print(text)


if __name__ == "__main__":
    sys.exit(main())
