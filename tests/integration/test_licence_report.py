"""The main job: an agent that is killed in the middle finishes, and does nothing twice."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_the_demo_kills_a_worker_and_every_effect_happens_once() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "examples.licence_report.demo"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    shown = done.stdout
    assert done.returncode == 0, shown + done.stderr
    killed = re.search(r"SIGKILL +worker (\d+), between two tools", shown)
    workers = dict(re.findall(r"^attempt (\d), worker (\d+)$", shown, re.MULTILINE))
    assert killed
    assert workers["1"] == killed[1] != workers["2"]
    assert re.search(r"^  replayed +read_metadata +step [0-9a-f]{12}$", shown, re.MULTILINE)
    counts = re.search(r"^attempt 2: (\d+) steps ran, (\d+) replayed$", shown, re.MULTILINE)
    assert counts
    assert int(counts[1]) > 0
    assert int(counts[2]) > 0
    assert "requests" in shown  # a distribution that is installed wherever this runs
    assert re.search(r"^\d+ effects, each exactly once$", shown, re.MULTILINE)
