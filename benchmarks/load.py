"""Many executions on one embedded kernel: are all complete, in order, at what rate?

    python -m benchmarks.load [--executions N]

Twenty agents under one gunicorn, a kernel on a file, each in processes of their own. A fixed
number of executions is under way at any time; then every event log is read and checked.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import dataclasses
import datetime
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from benchmarks import service
from benchmarks.load_agents import AGENTS, STEPS
from rebuno_sync import Client
from rebuno_sync.wire import Event

#: How many executions are under way at a time.
OUTSTANDING = 32
#: The longest that one execution may take, in seconds.
LIMIT = 120.0
#: The kernel's memory after all may be so much of what it was after two fifths.
GROWTH = 1.15
_STEP = ["step.proposed", "step.allowed", "step.executing", "step.succeeded"]
_LOG = [
    *("execution.created", "execution.started", "dispatch.queued", "dispatch.acked"),
    *(_STEP * STEPS),
    "execution.completed",
]


@dataclasses.dataclass(frozen=True)
class Load:
    """What a run of the load found.

    Attributes:
        executions: how many were run.
        seconds: how long they took together.
        webhook_ms: from the creation of each to the acknowledgement of its webhook.
        kernel_mib: the kernel's memory, after each fifth of the run.
        faults: what was wrong; nothing should be.
    """

    executions: int
    seconds: float
    webhook_ms: list[float]
    kernel_mib: list[float]
    faults: list[str]


def run(executions: int, console: Console) -> Load:
    """Run the load."""
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        url, kernel = stack.enter_context(service.kernel(folder / "kernel.sqlite3"))
        paths = {f"agent-{number}": f"/{number}/webhook" for number in range(AGENTS)}
        stack.enter_context(
            service.agents("benchmarks.load_agents:app", url, paths, "--threads", "8")
        )
        client = stack.enter_context(Client(url))
        progress = stack.enter_context(Progress(console=console, transient=True))
        task = progress.add_task(f"{executions} executions of {STEPS} steps", total=executions)
        memory: list[float] = []
        ids: list[str] = []
        begin = time.monotonic()
        with concurrent.futures.ThreadPoolExecutor(OUTSTANDING) as pool:
            for done in pool.map(lambda n: _one(client, n), range(executions)):
                ids.append(done)
                progress.advance(task)
                if len(ids) % max(executions // 5, 1) == 0:
                    memory.append(service.held(kernel).mib)
        seconds = time.monotonic() - begin
        task = progress.add_task("reading their logs", total=executions)
        faults, latencies = [], []
        for execution_id in ids:
            events = list(client.events(execution_id))
            faults += log_faults(execution_id, events)
            latencies.append(_latency_ms(events))
            progress.advance(task)
    if len(memory) == 5 and memory[4] > memory[1] * GROWTH:
        faults.append(f"the kernel's memory grew from {memory[1]:.0f} to {memory[4]:.0f} MiB")
    return Load(executions, seconds, latencies, memory, faults)


def _one(client: Client, number: int) -> str:
    execution = client.create(f"agent-{number % AGENTS}", {"start": number})
    done = client.wait(execution.id, timeout=LIMIT)
    expected = sum(number + n for n in range(STEPS))
    assert (done.status, done.output) == ("completed", expected), done
    return done.id


def log_faults(execution_id: str, events: list[Event]) -> list[str]:
    """Return what is wrong with the log of an execution that took its steps in one attempt."""
    found = []
    if [event.event_seq for event in events] != list(range(1, len(events) + 1)):
        found.append(f"{execution_id}: its log has gaps")
    if [event.type for event in events] != _LOG:
        found.append(f"{execution_id}: its log is not in order")
    return found


def _latency_ms(events: list[Event]) -> float:
    times = {e.type: datetime.datetime.fromisoformat(_offset(e.occurred_at)) for e in events}
    return (times["dispatch.acked"] - times["execution.created"]).total_seconds() * 1e3


def _offset(text: str) -> str:
    return text.replace("Z", "+00:00")  # Python 3.10 knows no Z


def show(load: Load, console: Console) -> None:
    """Print what was found as a table."""
    table = Table(title=f"{AGENTS} agents, {load.executions} executions of {STEPS} steps")
    table.add_column("")
    table.add_column("", justify="right")
    cuts = statistics.quantiles(load.webhook_ms, n=100)
    table.add_row("executions per second", f"{load.executions / load.seconds:.1f}")
    table.add_row("steps per second", f"{load.executions * STEPS / load.seconds:.0f}")
    table.add_row("created to webhook, p50", f"{cuts[49]:.1f} ms")
    table.add_row("created to webhook, p99", f"{cuts[98]:.1f} ms")
    table.add_row(
        "kernel memory after each fifth", " ".join(f"{mib:.0f}" for mib in load.kernel_mib) + " MiB"
    )
    table.add_row("completed, logs gap-free and in order", "all" if not load.faults else "NO")
    console.print(table)
    for fault in load.faults[:20]:
        console.print(f"[red]{fault}[/]")


def as_json(load: Load) -> dict[str, Any]:
    """Return the figures that are worth keeping."""
    cuts = statistics.quantiles(load.webhook_ms, n=100)
    return {
        "executions": load.executions,
        "executions_per_second": load.executions / load.seconds,
        "webhook_ms": {"p50": cuts[49], "p99": cuts[98]},
        "kernel_mib": load.kernel_mib,
        "faults": load.faults,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--executions", type=int, default=2000)
    console = Console()
    load = run(parser.parse_args().executions, console)
    show(load, console)
    return 1 if load.faults else 0


if __name__ == "__main__":
    sys.exit(main())
