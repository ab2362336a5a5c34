"""Workers that are told to go while handlers run, with and without our hooks in gunicorn."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.faults.fleet import OUTPUT, Fleet, fleet_of
from tests.scripted import wait_until

HOOKS = "from rebuno_sync.serving.gunicorn_hooks import *\n"
EFFECTS = ("reserve", "pay", "ship")


@pytest.fixture
def hooks(tmp_path: Path) -> str:
    path = tmp_path / "gunicorn.conf.py"
    path.write_text(HOOKS, encoding="utf-8")
    return f"--config={path}"


@pytest.mark.parametrize("worker_class", ["sync", "gthread", "gevent"])
@pytest.mark.parametrize("with_hooks", [True, False], ids=["hooks", "no hooks"])
def test_a_handler_gets_its_time_when_gunicorn_is_told_to_go(
    tmp_path: Path, hooks: str, worker_class: str, with_hooks: bool
) -> None:
    # One worker, which is up: gunicorn loses the signal to one that is still starting.
    options = ["--graceful-timeout=60", f"--worker-class={worker_class}", "--workers=1"]
    with fleet_of(tmp_path, *options, *([hooks] if with_hooks else [])) as fleet:
        created, _ = fleet.start("between")
        fleet.master.send_signal(signal.SIGTERM)
        wait_until(lambda: "Handling signal: term" in fleet.log)
        (tmp_path / "go").touch()
        found = fleet.client.wait(created.id, timeout=60)
        assert (found.status, found.output) == ("completed", OUTPUT)
        assert fleet.attempts(created) == 1
        assert fleet.master.wait(60) == 0
        assert [fleet.count(w) for w in EFFECTS] == [1, 1, 1]


def test_what_is_not_done_in_time_goes_on_elsewhere(
    tmp_path: Path, hooks: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHUTDOWN_TIMEOUT", "0.2")
    with fleet_of(tmp_path, hooks) as fleet:
        created, _ = fleet.start("between")
        fleet.master.terminate()
        fleet.restart()
        assert f"execution {created.id}" in fleet.log
        assert "is given up" in fleet.log
        assert fleet.client.get(created.id).status == "running"
        found = fleet.finish(created)
        assert (found.status, found.output) == ("completed", OUTPUT)
        assert fleet.attempts(created) == 2
        assert [fleet.count(w) for w in EFFECTS] == [1, 1, 1]


def test_a_worker_that_gunicorn_takes_for_hung_fails_nothing(tmp_path: Path, hooks: str) -> None:
    """SIGABRT is what gunicorn's ``--timeout`` sends before it kills."""
    with fleet_of(tmp_path, hooks) as fleet:
        created, worker = fleet.start("between")
        os.kill(worker, signal.SIGABRT)
        _gone(fleet, worker)
        found = fleet.finish(created)
        assert (found.status, found.output) == ("completed", OUTPUT)
        assert [fleet.count(w) for w in EFFECTS] == [1, 1, 1]


def _gone(fleet: Fleet, worker: int) -> None:
    (fleet.journal / "go").touch()

    def gone() -> bool:
        try:
            os.kill(worker, 0)
        except ProcessLookupError:
            return True
        return False

    wait_until(gone, what=f"worker {worker} did not go")
