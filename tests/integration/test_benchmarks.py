"""The benchmarks run to their end, with the official SDK and without it."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from benchmarks import crowd, service, soak
from tests.peers import VERSIONS, PeerUnavailable, peer_python

ROOT = Path(__file__).resolve().parents[2]
#: What is measured of each SDK; the raw round trips have no SDK.
MEASURED = {"step", "replayed_step", "webhook", "import", "ready", "peak_import", "peak_agent"}


@pytest.mark.parametrize("official", [True, False], ids=["beside the official one", "alone"])
def test_benchmarks(official: bool, tmp_path: Path) -> None:
    environment = dict(os.environ)
    if official:
        try:
            peer_python(VERSIONS[0])
        except PeerUnavailable as exc:
            pytest.skip(f"NOT TESTED beside rebuno=={VERSIONS[0]}: {exc}")
    else:
        # No cached environment, and an index that nobody answers at.
        environment |= {
            "REBUNO_PEERS": str(tmp_path / "peers"),
            "PIP_INDEX_URL": "http://127.0.0.1:1/simple",
            "PIP_NO_INDEX": "1",
        }
    results = tmp_path / "results.json"
    command = [sys.executable, "-m", "benchmarks", "--rounds", "1", "--steps", "5"]
    command += ["--executions", "20", "--calls", "5", "--crowd", "0"]
    done = subprocess.run(
        [*command, "--json", str(results)],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    told = json.loads(results.read_text())
    who = {"ours", "official"} if official else {"ours"}
    for what in MEASURED:
        assert set(told["medians"][what]) == who, what
        if what not in ("import", "ready"):  # differences, which one noisy round can turn over
            assert all(value > 0 for value in told["medians"][what].values()), what
    assert told["medians"]["raw_pair"]["raw"] > 0
    assert len(told["stages"]) == 4
    assert told["load"]["faults"] == []
    assert {"openai", "requests"} <= set(told["llm"]["libraries"])
    assert ("runs alone" in done.stdout) is not official


# Many at once


def test_a_crowd() -> None:
    """More than run at once, so that some wait; no lease of those is lost."""
    everything = crowd.run(70, 1, Console(quiet=True))
    assert everything.faults == []
    (found,) = everything.rounds
    assert len(found.mib) == crowd.WORKERS
    assert all(mib > 10 for mib in found.mib)
    # Those that run handlers were seen, and not more than there may be.
    assert 8 < found.threads <= crowd.MOST_THREADS


def of_crowd(monkeypatch: pytest.MonkeyPatch, *rounds: crowd.Round) -> list[str]:
    """What a crowd finds wrong whose rounds went like this."""
    left = list(rounds)
    monkeypatch.setattr(crowd.service, "kernel", lambda path: contextlib.nullcontext(("u", 1)))
    monkeypatch.setattr(crowd.service, "agents", lambda *a, **k: contextlib.nullcontext(2))
    monkeypatch.setattr(crowd, "Client", lambda url: contextlib.nullcontext())
    monkeypatch.setattr(crowd, "_round", lambda *args: (left.pop(0), []))
    return crowd.run(500, len(rounds), Console(quiet=True)).faults


def test_a_crowd_that_leaves_something_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    first, same = crowd.Round(9.0, 70, [40.0, 41.0]), crowd.Round(9.0, 70, [42.0, 42.0])
    assert of_crowd(monkeypatch, first, same) == []
    (fault,) = of_crowd(monkeypatch, first, crowd.Round(9.0, 70, [40.0, 49.0]))
    assert "memory grew from 41 to 49" in fault
    (fault,) = of_crowd(monkeypatch, first, crowd.Round(9.0, 90, [40.0, 41.0]))
    assert "90 threads" in fault
    (fault,) = of_crowd(monkeypatch, first, crowd.Round(9.0, 70, [40.0]))
    assert "1 workers" in fault


# A long time


def test_a_soak() -> None:
    """Too short to tell what grows: that everything is looked at, and nothing fails."""
    found = soak.run(12.0, Console(quiet=True))
    failed = [fault for fault in found.faults if " grew from " not in fault]
    assert failed == []
    assert found.executions > 20
    figures = {row.name: row.first for row in found.rows}
    assert len(figures) == 9
    assert all(value > 0 for value in figures.values()), figures


def looks(**growing: float) -> list[soak.Look]:
    """Ten minutes of looks at steady processes, of which some figure gains so much in a second."""
    steady = {"mib": 50.0, "threads": 20, "files": 20, "sockets": 20}
    steady |= {"step_ms": 4.0, "bare_ms": 0.2}
    found = []
    for at in range(600):
        now: dict[str, Any] = {n: v + growing.get(n, 0.0) * at for n, v in steady.items()}
        times = now.pop("step_ms"), now.pop("bare_ms")
        found.append(soak.Look(at, service.Held(**now), service.Held(**now), *times))
    return found


@pytest.mark.parametrize(
    ("growing", "told"),
    [
        ({}, []),
        ({"mib": 0.02}, ["memory of the kernel, MiB", "memory of the workers, MiB"]),
        ({"threads": 0.05}, ["threads of the kernel", "threads of the workers"]),
        ({"files": 0.05}, ["files of the kernel", "files of the workers"]),
        ({"sockets": 0.05}, ["sockets of the kernel", "sockets of the workers"]),
        ({"step_ms": 0.01}, ["a step beside its body, ms"]),
        # The machine has slowed everything down, and steps no more than that.
        ({"step_ms": 0.01, "bare_ms": 0.0005}, []),
    ],
    ids=["nothing", "memory", "threads", "files", "sockets", "latency", "a busy machine"],
)
def test_a_soak_sees_what_grows(growing: dict[str, float], told: list[str]) -> None:
    rows, faults = soak.compare(looks(**growing), 600.0)
    assert len(rows) == 9
    assert [fault.partition(" grew ")[0] for fault in faults] == told


def test_a_soak_needs_looks_to_compare() -> None:
    rows, faults = soak.compare([], 600.0)
    assert rows == []
    assert "too few" in faults[0]
