"""An agent of thirty steps for a real gunicorn; what it does stands in a journal beside it.

``JOURNAL`` names the directory. An effect happens when its line ``<execution> <effect> <value>``
is added to ``effects``, whoever records what of it; no two values are alike. The agent lives on
the machine ``agents.machine`` there (see :mod:`tests.faults.machine`).
"""

from __future__ import annotations

import os
import random
import time
import uuid
from pathlib import Path
from typing import Any

from tests.faults.machine import live_on

JOURNAL = Path(os.environ["JOURNAL"])
live_on(JOURNAL / "agents.machine")

from rebuno_sync import (  # noqa: E402  after the clock has become the machine's
    Agent,
    ContextThreadPoolExecutor,
    ToolError,
    execution,
    step,
    tool,
)

agent = Agent(
    "thirty",
    kernel_timeout=0.7,
    shutdown_timeout=2.0,
    signature="body" if os.environ.get("SIGNATURE") == "body" else "v1",
)
#: How long a body takes, in seconds: most have other work going on beside them.
_SHORTEST, _LONGEST = 0.005, 0.04
#: What the handler makes of an effect of which nobody knows whether it has happened.
UNKNOWN = "unknown"


def happen(effect: str) -> str:
    """Let an effect happen, somewhere within its body."""
    time.sleep(random.uniform(_SHORTEST, _LONGEST) / 2)
    value = uuid.uuid4().hex
    line = f"{execution().id} {effect} {value}\n"
    file = os.open(JOURNAL / "effects", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.write(file, line.encode("ascii"))
    os.close(file)
    time.sleep(random.uniform(_SHORTEST, _LONGEST) / 2)
    return value


@tool
def look(number: int) -> str:
    return happen(f"look-{number}")


@tool(idempotency="at_most_once")
def pay(number: int) -> str:
    return happen(f"pay-{number}")


def ask(step_id: str, args: Any) -> str:
    return happen(f"ask-{args['number']}")


@tool(idempotency="at_most_once", reconcile=ask)
def send(number: int) -> str:
    return happen(f"send-{number}")


@tool
def turn() -> str:
    """The same arguments each time, so that only their order tells the calls apart."""
    return happen("turn")


def note(number: int) -> str:
    return step("note", lambda number: happen(f"note-{number}"), {"number": number})


def carefully(number: int) -> str:
    try:
        return pay(number)
    except ToolError as exc:
        return UNKNOWN if exc.reason == "indeterminate" else f"{exc.type}: {exc}"


@agent.handler
def handle(threads: int) -> list[str]:
    """Take thirty steps: five rounds of five that may go side by side, and of one that may not.

    Args:
        threads: how many go side by side.
    """
    values: list[str] = []
    with ContextThreadPoolExecutor(threads) as pool:
        for first in range(0, 25, 5):
            calls = [look, carefully, note, send, carefully]
            numbers = range(first, first + 5)
            if threads > 1:
                values += pool.map(lambda call, number: call(number), calls, numbers)
            else:
                values += [call(number) for call, number in zip(calls, numbers, strict=True)]
            values.append(turn())
    return values


app = agent.app
