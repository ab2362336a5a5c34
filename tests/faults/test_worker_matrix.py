"""Every worker class, loading and end of a worker, while an execution of ten steps runs in it.

The cells, and what each comes to, are those of the table in docs/serving.md: what it says is
what is tested.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
import re
import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from rebuno_sync.wire import Execution
from tests.documentation.pages import ROOT, blocks
from tests.faults.fleet import Fleet, fleet_of
from tests.faults.sides import AGENT
from tests.scripted import wait_until

PAGE = ROOT / "docs" / "serving.md"
THIS = Path(__file__).name
CLASSES = ("sync", "gthread", "gevent")
LOADINGS = ("plain", "preload")
#: Of the handler in matrix_app.py: its steps, and the one that stands still.
STEPS, WAITS = 10, 5
ENDS = ("SIGTERM", "max-requests", "kill -9", "timeout")

#: What the cells of the table say: the attempts it takes, and whether the log names the execution.
FINISHES, NEXT, NAMED = "finishes", "next attempt", "given up, next attempt"
MEANS = {FINISHES: (1, False), NEXT: (2, False), NAMED: (2, True)}


@dataclasses.dataclass(frozen=True)
class Cell:
    worker_class: str
    loading: str
    end: str
    comes_to: str

    def __str__(self) -> str:
        return f"{self.worker_class}-{self.loading}-{self.end}"


def table() -> list[Cell]:
    """Read the table of the page: a row for each class and loading, a column for each end."""
    rows = [
        [cell.strip(" `") for cell in line.strip("|").split("|")]
        for line in PAGE.read_text(encoding="utf-8").splitlines()
        if re.match(r"\| *(worker class|`(sync|gthread|gevent)`) *\|", line)
    ]
    (_, _, *ends), *lines = rows
    return [
        Cell(worker_class, loading, end, comes_to)
        for worker_class, loading, *cells in lines
        for end, comes_to in zip(ends, cells, strict=True)
    ]


def test_the_table_has_every_cell_once_and_nothing_else() -> None:
    cells = [(cell.worker_class, cell.loading, cell.end) for cell in table()]
    assert sorted(cells) == sorted(itertools.product(CLASSES, LOADINGS, ENDS))
    assert {cell.comes_to for cell in table()} <= set(MEANS)


@contextlib.contextmanager
def fleet_for(journal: Path, worker_class: str, *options: str, more: str = "") -> Iterator[Fleet]:
    """Start a gunicorn with the configuration of the page, which has hooks of its own.

    Args:
        more: more of the configuration.
    """
    own_hooks, patched = (b.text for b in blocks(PAGE) if b.by == f"tests/faults/{THIS}")
    conf = journal / "gunicorn.conf.py"
    both = patched + own_hooks if worker_class == "gevent" and "--preload" in options else own_hooks
    conf.write_text(both + more, encoding="utf-8")
    always = [f"--config={conf}", f"--worker-class={worker_class}", "--graceful-timeout=60"]
    if worker_class == "gthread":
        always.append("--threads=4")
    with fleet_of(journal, *always, *options, app="matrix_app") as fleet:
        try:
            wait_until_ready(fleet)
            yield fleet
        finally:
            if "Handling signal: term" not in fleet.log:
                wait_until_ready(fleet)


def wait_until_ready(fleet: Fleet) -> None:
    """Wait until every worker hears signals; gunicorn loses what it sends before."""

    def ready() -> bool:
        booted, exited, able = (
            set(re.findall(pattern, fleet.log))
            for pattern in (
                r"Booting worker with pid: (\d+)",
                r"exiting \(pid: (\d+)",
                r"worker (\d+) is ready",
            )
        )
        alive = {pid for pid in booted - exited if is_running(int(pid))}
        return len(alive) == wanted and alive <= able

    wanted = 1 if "--workers=1" in fleet.options else 2
    wait_until(ready, what="the workers never came up")


@pytest.mark.parametrize("cell", table(), ids=str)
def test_ten_steps_complete_with_every_effect_once(tmp_path: Path, cell: Cell) -> None:
    attempts, named = MEANS[cell.comes_to]
    options = ["--preload"] * (cell.loading == "preload") + OPTIONS.get(cell.end, [])
    with fleet_for(tmp_path, cell.worker_class, *options) as fleet:
        created = fleet.client.create(AGENT, {"how": way_to_wait(cell)})
        ((_, _, worker),) = wait_until(lambda: fleet.noted("waiting"), what="no worker waits")
        bring_about(cell, fleet, worker)
        if attempts == 1:
            (tmp_path / "go").touch()
            found = fleet.client.wait(created.id, timeout=60)
        else:
            wait_until_gone(worker)
            assert fleet.client.get(created.id).status == "running"
            found = fleet.finish(created)
        check(fleet, created, found)
        assert fleet.attempts(created) == attempts
        # What ran before the end is replayed, what ran after it ran where it should.
        first = range(1, STEPS + 1 if attempts == 1 else WAITS)
        assert [p == worker for p in where(fleet)] == [n in first for n in range(1, STEPS + 1)]
        told = [line for line in fleet.log.splitlines() if f"execution {created.id} (" in line]
        assert any("given up" in line for line in told) == named, fleet.log
        if attempts == 1:
            wait_until_gone(worker)


OPTIONS = {
    "max-requests": ["--max-requests=1"],
    # One worker, so that the request that hangs does so beside the execution.
    "timeout": ["--timeout=3", "--workers=1"],
}


def way_to_wait(cell: Cell) -> str:
    if cell.end != "timeout":
        return "go"
    return {"sync": "go", "gthread": "gil", "gevent": "hub"}[cell.worker_class]


def bring_about(cell: Cell, fleet: Fleet, worker: int) -> None:
    """End the worker, or see to it that gunicorn does."""
    if cell.end == "SIGTERM":
        fleet.master.terminate()
        wait_until(lambda: "Handling signal: term" in fleet.log)
    elif cell.end == "max-requests":
        wait_until(lambda: "Autorestarting worker after current request" in fleet.log)
    elif cell.end == "kill -9":
        os.kill(worker, signal.SIGKILL)
    else:
        if cell.worker_class == "sync":
            get(fleet, "/stuck")
            wait_until((fleet.journal / "stuck").exists)
        wait_until(lambda: f"WORKER TIMEOUT (pid:{worker})" in fleet.log)


def get(fleet: Fleet, path: str) -> None:
    """Send a request and wait for no answer."""
    with socket.create_connection(fleet.listener.getsockname()) as connection:
        connection.sendall(f"GET {path} HTTP/1.1\r\nHost: a\r\n\r\n".encode("ascii"))


def where(fleet: Fleet) -> list[int]:
    """The processes in which the effects happened, step by step."""
    return [fleet.noted(f"effect-{n}")[0][2] for n in range(1, STEPS + 1)]


def check(fleet: Fleet, created: Execution, found: Execution) -> None:
    """All is done, once, and no attempt was told to have failed."""
    assert (found.status, found.output) == ("completed", list(range(1, STEPS + 1))), fleet.log
    effects = sorted(what for what, _, _ in fleet.noted() if what.startswith("effect-"))
    assert effects == sorted(f"effect-{n}" for n in range(1, STEPS + 1))
    steps = list(fleet.client.steps(created.id))
    assert [s.status for s in steps] == ["succeeded"] * STEPS


def is_running(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    return True


def wait_until_gone(worker: int) -> None:
    wait_until(lambda: not is_running(worker), what=f"worker {worker} did not go")
