"""The event loop of MCP tools in a process whose threads gevent has replaced."""

from __future__ import annotations

import subprocess
import sys

SCRIPT = """
from gevent import monkey
PATCH
from rebuno_sync.effects.background import background_loop

async def answer():
    return 42

try:
    print(background_loop().run(answer))
except RuntimeError as exc:
    print(exc)
"""


def told(patch: str) -> str:
    script = SCRIPT.replace("PATCH", patch)
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True
    )
    return done.stdout


def test_it_is_refused_with_what_to_do() -> None:
    assert "serve this agent with gunicorn's gthread worker" in told("monkey.patch_all()")


def test_gevent_alone_is_no_hindrance() -> None:
    assert told("") == "42\n"
