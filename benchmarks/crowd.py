"""Many executions at once on one gunicorn: do all complete, at the first attempt, in bounds?

    python -m benchmarks.crowd [--executions N] [--rounds N]

Two workers with 32 threads each get 500 executions of 10 steps at once, and each step sleeps for
50 ms. Far more are waiting than run, so their leases, which are shorter than the wait, have to be
kept. Then the same again, twice: what the first round needs is needed once, and what comes on
top in the later ones would come for ever.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import dataclasses
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks import service
from benchmarks.load import log_faults
from benchmarks.load_agents import STEPS
from benchmarks.service import Held
from benchmarks.steady_agent import AGENT
from rebuno_sync import Client

WORKERS, THREADS, ROUNDS = 2, 32, 3
PAUSE = 0.05
#: Shorter than most executions wait for their turn, in seconds.
LEASE = 5.0
#: The longest that a round may take, in seconds.
LIMIT = 300.0
#: A worker may hold so much more memory after the last round than after the first: noise of the
#: allocator, and far less than any round needs for its executions.
GROWTH = 1.10
#: gunicorn's threads, as many handlers, eight for heartbeats, and those that accept and watch.
MOST_THREADS = 2 * THREADS + 8 + 4


@dataclasses.dataclass(frozen=True)
class Round:
    """One round: how long it took, and what each worker held at most, and at its end."""

    seconds: float
    threads: int
    mib: list[float]


@dataclasses.dataclass(frozen=True)
class Crowd:
    """What was found; ``faults`` should be empty."""

    executions: int
    rounds: list[Round]
    faults: list[str]


def run(executions: int, rounds: int, console: Console) -> Crowd:
    """Run the rounds."""
    done, faults = [], []
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        url, _ = stack.enter_context(service.kernel(folder / "kernel.sqlite3"))
        master = stack.enter_context(
            service.agents(
                "benchmarks.steady_agent:app",
                url,
                {AGENT: "/webhook"},
                *("--workers", str(WORKERS), "--threads", str(THREADS)),
                lease_timeout=LEASE,
            )
        )
        client = stack.enter_context(Client(url))
        for number in range(rounds):
            with console.status(f"{executions} executions at once, round {number + 1}"):
                found, wrong = _round(client, executions, master)
            done.append(found)
            faults += wrong
    faults += [
        f"{len(r.mib)} workers were there, of {WORKERS}" for r in done if len(r.mib) != WORKERS
    ]
    for first, last in zip(done[0].mib, done[-1].mib, strict=False):
        if last > first * GROWTH:
            faults.append(f"a worker's memory grew from {first:.0f} to {last:.0f} MiB")
    threads = max(r.threads for r in done)
    if threads > MOST_THREADS:
        faults.append(f"a worker had {threads} threads, {MOST_THREADS} is what it needs")
    return Crowd(executions, done, faults)


def _round(client: Client, executions: int, master: int) -> tuple[Round, list[str]]:
    over = threading.Event()
    most: list[Held] = []

    def watch() -> None:
        while not over.wait(0.2):
            most.extend(service.held(worker) for worker in service.children(master))

    watcher = threading.Thread(target=watch)
    watcher.start()
    begin = time.monotonic()
    try:
        with concurrent.futures.ThreadPoolExecutor(THREADS) as pool:
            ids = list(
                pool.map(
                    lambda n: client.create(AGENT, {"start": n, "pause": PAUSE}).id,
                    range(executions),
                )
            )
        faults = []
        for number, execution_id in enumerate(ids):
            left = max(LIMIT + begin - time.monotonic(), 0.1)
            found = client.wait(execution_id, timeout=left)
            expected = sum(number + n for n in range(STEPS))
            if found.status != "completed" or found.output["total"] != expected:
                faults.append(f"{found.id} is {found.status}: {found.failure_reason}")
        seconds = time.monotonic() - begin
    finally:
        over.set()
        watcher.join()
    for execution_id in ids:
        faults += log_faults(execution_id, list(client.events(execution_id)))
    now = [service.held(worker).mib for worker in service.children(master)]
    return Round(seconds, max((h.threads for h in most), default=0), now), faults


def show(crowd: Crowd, console: Console) -> None:
    """Print what was found as a table."""
    table = Table(
        title=f"{crowd.executions} executions at once, {STEPS} steps of {PAUSE * 1e3:.0f} ms,"
        f" {WORKERS} workers × {THREADS} threads"
    )
    table.add_column("")
    for number in range(len(crowd.rounds)):
        table.add_column(f"round {number + 1}", justify="right")
    table.add_row("seconds", *(f"{r.seconds:.1f}" for r in crowd.rounds))
    ideal = crowd.executions * STEPS * PAUSE / (WORKERS * THREADS)
    table.add_row("of these, sleep alone", *(f"{ideal:.1f}" for _ in crowd.rounds))
    table.add_row(
        f"threads of a worker, at most (≤ {MOST_THREADS})", *(str(r.threads) for r in crowd.rounds)
    )
    table.add_row(
        "memory of the workers after it, MiB",
        *(" ".join(f"{mib:.1f}" for mib in r.mib) for r in crowd.rounds),
    )
    console.print(table)
    console.print("all completed at the first attempt, in bounds" if not crowd.faults else "")
    for fault in crowd.faults[:20]:
        console.print(f"[red]{fault}[/]")


def as_json(crowd: Crowd) -> dict[str, Any]:
    """Return the figures."""
    return dataclasses.asdict(crowd)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--executions", type=int, default=500)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    given = parser.parse_args()
    console = Console()
    crowd = run(given.executions, given.rounds, console)
    show(crowd, console)
    return 1 if crowd.faults else 0


if __name__ == "__main__":
    sys.exit(main())
