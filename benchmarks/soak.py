"""A bounded load for a long time: does anything grow that should not?

    python -m benchmarks.soak [--minutes N]

Executions of ten steps, a few at a time and at an even rate, on one gunicorn of two workers and a
kernel that forgets ended executions after a while. All the time it is looked at what the processes
hold and how long a step takes beside its body: two kernel calls, each a commit. In the end the
first quarter and the last are compared. What comes before, while pools and caches fill, counts for
neither; what grows for ever has grown between the two, since they are half the time apart.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import dataclasses
import itertools
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks import service
from benchmarks.load_agents import STEPS
from benchmarks.processes import Kernel, RawSocket
from benchmarks.service import Held
from benchmarks.steady_agent import AGENT
from rebuno_sync import Client

#: How many executions begin in a second, and how many are under way at most.
RATE, OUTSTANDING = 5.0, 8
#: How long a step's body takes, in seconds.
PAUSE = 0.005
#: How many looks are taken in all, and how often at most, in seconds.
LOOKS, MOST_OFTEN = 400, 0.25
#: Of the time, this much is for filling pools and caches, at most so many seconds.
WARM_UP, LONGEST_WARM_UP = 0.2, 120.0
#: Ended executions are kept for this part of the time, so that as many are there all the time.
RETAINED = 0.1
#: The longest that one execution may take, in seconds.
LIMIT = 60.0


@dataclasses.dataclass(frozen=True)
class Bound:
    """How far the last quarter's median may be above the first's: by a part, and by an amount.

    The amount is what noise makes of a small figure; the part is what it makes of a large one.
    """

    part: float
    amount: float

    def of(self, first: float) -> float:
        return first * (1 + self.part) + self.amount


#: Memory: the allocators of Python and of SQLite keep pieces, by chance some more of them. Threads
#: and files: a busy moment fills pools, which have one for each execution under way at most. The
#: latency is that of the quickest tenth, since what else the machine does only adds to it; where
#: that has slowed down two bare round trips between processes, a step may be slower in proportion.
MEMORY, FILES, LATENCY = Bound(0.05, 4.0), Bound(0.0, OUTSTANDING), Bound(0.25, 0.5)


Typical = Callable[[Sequence[float]], float]


@dataclasses.dataclass(frozen=True)
class Look:
    """What was seen at one time: the kernel, the workers together, the time a step took, and
    the time of two round trips to a server that does nothing."""

    at: float
    kernel: Held
    workers: Held
    step_ms: float
    bare_ms: float


@dataclasses.dataclass(frozen=True)
class Row:
    """One figure in the first and in the last quarter, and the most that the last may be."""

    name: str
    first: float
    last: float
    most: float


@dataclasses.dataclass(frozen=True)
class Soak:
    """What was found; ``faults`` should be empty."""

    seconds: float
    executions: int
    rows: list[Row]
    faults: list[str]


class _Load:
    """Begins executions at an even rate until it is told to stop, and keeps what they told."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._lock = threading.Lock()
        self._step_ms: list[float] = []
        self.done = 0
        self.faults: list[str] = []

    def run(self, until: float) -> None:
        begin = time.monotonic()
        with concurrent.futures.ThreadPoolExecutor(OUTSTANDING) as pool:
            free = threading.Semaphore(OUTSTANDING)
            for number in itertools.count():
                time.sleep(max(0.0, begin + number / RATE - time.monotonic()))
                if time.monotonic() >= until or len(self.faults) > 20:
                    return
                free.acquire()
                pool.submit(self._one, number).add_done_callback(lambda _: free.release())

    def _one(self, number: int) -> None:
        try:
            created = self._client.create(AGENT, {"start": number, "pause": PAUSE})
            found = self._client.wait(created.id, timeout=LIMIT)
        except Exception as exc:
            with self._lock:
                self.faults.append(f"execution {number}: {type(exc).__name__}: {exc}")
            return
        with self._lock:
            self.done += 1
            if found.status != "completed":
                self.faults.append(f"{found.id} is {found.status}: {found.failure_reason}")
            elif found.output["total"] != sum(number + n for n in range(STEPS)):
                self.faults.append(f"{found.id} has a wrong output")
            else:
                self._step_ms += [seconds * 1e3 for seconds in found.output["seconds"]]

    def take_step_ms(self) -> float | None:
        """The median of what steps took since it was asked last; ``None`` without any."""
        with self._lock:
            taken, self._step_ms = self._step_ms, []
        return statistics.median(taken) if taken else None


def run(seconds: float, console: Console) -> Soak:
    """Soak for so many seconds."""
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        url, kernel = stack.enter_context(
            service.kernel(folder / "kernel.sqlite3", retain=max(seconds * RETAINED, 1.0))
        )
        options = ("--workers", "2", "--threads", "8")
        master = stack.enter_context(
            service.agents("benchmarks.steady_agent:app", url, {AGENT: "/webhook"}, *options)
        )
        client = stack.enter_context(Client(url))
        load = _Load(client)
        begin = time.monotonic()
        thread = threading.Thread(target=load.run, args=(begin + seconds,))
        thread.start()
        bare = Kernel()
        stack.callback(bare.close)
        socket = RawSocket(bare)
        stack.callback(socket.close)
        looks = _watch(load, kernel, master, socket, begin, seconds, console)
        thread.join()
    rows, faults = compare(looks, seconds)
    return Soak(seconds, load.done, rows, [*load.faults, *faults])


def _watch(
    load: _Load,
    kernel: int,
    master: int,
    socket: RawSocket,
    begin: float,
    seconds: float,
    console: Console,
) -> list[Look]:
    looks: list[Look] = []
    every = max(seconds / LOOKS, MOST_OFTEN)
    told = begin
    while (now := time.monotonic()) < begin + seconds and len(load.faults) <= 20:
        # On a busy machine no execution may have ended since the last look.
        step_ms = load.take_step_ms() or (looks[-1].step_ms if looks else None)
        if step_ms is not None:
            workers = [service.held(pid) for pid in service.children(master)]
            together = Held(
                sum(h.mib for h in workers),
                sum(h.threads for h in workers),
                sum(h.files for h in workers),
                sum(h.sockets for h in workers),
            )
            bare_ms = socket.seconds_per_pair(20) * 1e3
            looks.append(Look(now - begin, service.held(kernel), together, step_ms, bare_ms))
        if looks and now - told >= seconds / 20:
            told = now
            console.print(_line(looks[-1], load.done), highlight=False)
        time.sleep(every)
    return looks


def _line(look: Look, done: int) -> str:
    k, w = look.kernel, look.workers
    return (
        f"{look.at / 60:6.1f} min  {done:6} executions"
        f"  kernel {k.mib:.1f} MiB, {k.threads} threads, {k.files}+{k.sockets} files and sockets"
        f"  workers {w.mib:.1f} MiB, {w.threads} threads, {w.files}+{w.sockets}"
        f"  step {look.step_ms:.1f} ms"
    )


def compare(looks: list[Look], seconds: float) -> tuple[list[Row], list[str]]:
    """Compare the first quarter with the last; return the figures and what grew."""
    warm = min(seconds * WARM_UP, LONGEST_WARM_UP)
    quarter = (seconds - warm) / 4
    first = [look for look in looks if warm <= look.at < warm + quarter]
    last = [look for look in looks if look.at >= seconds - quarter]
    if not first or not last:
        return [], [f"{len(looks)} looks are too few to compare; let it take longer"]
    figures: list[tuple[str, Callable[[Look], float], Bound, Typical]] = []
    for who in ("kernel", "workers"):

        def of(field: str, who: str = who) -> Callable[[Look], float]:
            return lambda look: float(getattr(getattr(look, who), field))

        figures += [
            (f"memory of the {who}, MiB", of("mib"), MEMORY, statistics.median),
            (f"threads of the {who}", of("threads"), FILES, statistics.median),
            (f"files of the {who}", of("files"), FILES, statistics.median),
            (f"sockets of the {who}", of("sockets"), FILES, statistics.median),
        ]
    figures.append(("a step beside its body, ms", lambda look: look.step_ms, LATENCY, _quickest))
    bare = [_quickest([look.bare_ms for look in part]) for part in (first, last)]
    slower = max(1.0, bare[1] / bare[0])
    rows, faults = [], []
    for name, figure, bound, typical in figures:
        before, after = (typical([figure(look) for look in part]) for part in (first, last))
        row = Row(name, before, after, bound.of(before * (slower if bound is LATENCY else 1.0)))
        rows.append(row)
        if row.last > row.most:
            faults.append(f"{name} grew from {row.first:.1f} to {row.last:.1f}")
    return rows, faults


def _quickest(values: Sequence[float]) -> float:
    return sorted(values)[len(values) // 10]


def show(soak: Soak, console: Console) -> None:
    """Print what was found as a table."""
    table = Table(title=f"{soak.executions} executions in {soak.seconds / 60:.1f} min")
    for column in ("typical", "first quarter", "last quarter", "at most"):
        table.add_column(column, justify="left" if column == "typical" else "right")
    for row in soak.rows:
        table.add_row(row.name, *(f"{value:.1f}" for value in (row.first, row.last, row.most)))
    console.print(table)
    console.print("nothing has grown" if not soak.faults else "")
    for fault in soak.faults[:20]:
        console.print(f"[red]{fault}[/]")


def as_json(soak: Soak) -> dict[str, Any]:
    """Return the figures."""
    return dataclasses.asdict(soak)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=60.0)
    console = Console()
    soak = run(parser.parse_args().minutes * 60, console)
    show(soak, console)
    return 1 if soak.faults else 0


if __name__ == "__main__":
    sys.exit(main())
