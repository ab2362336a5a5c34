"""The benchmarks run to their end, with the official SDK and without it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

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
    command += ["--executions", "20", "--calls", "5"]
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
