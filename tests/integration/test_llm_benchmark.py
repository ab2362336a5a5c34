"""The benchmark of the first streamed byte runs to its end."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from benchmarks.llm import first_byte

ROOT = Path(__file__).resolve().parents[2]


def test_it_measures_each_library_bare_and_recorded() -> None:
    results = first_byte(5)
    assert results["round_trip"] > 0
    assert set(results["libraries"]) == {"requests", "openai"}
    for found in results["libraries"].values():
        assert found["bare"] > 0
        assert found["recorded"] > 0


def test_it_prints_what_it_found() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.llm", "--calls", "3"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    for library in ("requests", "openai"):
        assert re.search(rf"{library} .*\d", done.stdout), done.stdout
