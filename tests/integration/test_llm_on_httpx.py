"""The last releases of the provider libraries on httpx: the same tests, in their environment."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.peers import PeerUnavailable, httpx_python

ROOT = Path(__file__).resolve().parents[2]
WHICH = """
import sys, anthropic, openai
from rebuno_sync import http_client
assert "httpx2" not in sys.modules
print(openai.__version__, anthropic.__version__, type(http_client()).__module__)
"""


@pytest.fixture(scope="module")
def python() -> str:
    try:
        return httpx_python()
    except PeerUnavailable as exc:
        pytest.skip(f"NOT TESTED: the provider libraries on httpx cannot be had: {exc}")


def in_peer(python: str, *arguments: str) -> str:
    env = {k: v for k, v in os.environ.items() if not k.startswith(("PYTEST", "PYTHON"))}
    done = subprocess.run(
        [python, *arguments],
        cwd=ROOT,
        env=env,
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout[-8000:]}\n{done.stderr[-2000:]}"
    return done.stdout


def test_it_is_those_releases(python: str) -> None:
    assert in_peer(python, "-c", WHICH).split() == ["2.54.0", "0.125.0", "httpx"]


def test_everything_holds_for_them(python: str) -> None:
    report = in_peer(
        python,
        *("-m", "pytest", "-q", "-p", "no:cacheprovider"),
        "tests/integration/test_llm_providers.py",
    )
    summary = report.strip().splitlines()[-1]
    assert " passed" in summary
    assert "skipped" not in summary
