"""An agent for a real gunicorn: what it does goes into a journal that outlives it.

``JOURNAL`` names the directory: each effect adds a line ``<what> <attempt> <pid>`` to
``effects``, and a body that is told to wait does so until the file ``go`` is there.
``SHUTDOWN_TIMEOUT`` is the agent's, in seconds.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from rebuno_sync import Agent, ToolError, execution, tool

JOURNAL = Path(os.environ["JOURNAL"])
agent = Agent("a1", shutdown_timeout=float(os.environ.get("SHUTDOWN_TIMEOUT", "25")))


def note(what: str) -> None:
    """Add a line to the journal, whole or not at all."""
    line = f"{what} {execution().dispatch_attempt} {os.getpid()}\n"
    file = os.open(JOURNAL / "effects", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.write(file, line.encode("ascii"))
    os.close(file)


def pause(at: str, here: str) -> None:
    """In the first attempt, wait at the place that the input names."""
    if at == here and execution().dispatch_attempt == 1:
        note(f"waiting-{here}")
        while not (JOURNAL / "go").exists():
            time.sleep(0.01)


@tool
def reserve(at: str) -> str:
    note("reserve")
    pause(at, "reserve")
    return "reserved"


@tool(idempotency="at_most_once")
def pay(at: str) -> str:
    note("pay")
    pause(at, "pay")
    return "paid"


@tool
def ship() -> str:
    note("ship")
    return "shipped"


@agent.handler
def order(at: str) -> dict[str, Any]:
    told: dict[str, Any] = {}
    try:
        told["reserve"] = reserve(at)
        pause(at, "between")
        try:
            told["pay"] = pay(at)
        except ToolError as exc:
            told["pay"] = exc.reason
        told["ship"] = ship()
    except BaseException as exc:
        note(type(exc).__name__)
        raise
    return told


app = agent.app
