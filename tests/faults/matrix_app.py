"""An app for a real gunicorn: ordinary routes, and an agent of ten steps that stands still in one.

The fifth step waits, in the first attempt and before its effect, in the way that the input names:
``"go"`` until the file ``go`` is in ``JOURNAL``; ``"hub"`` in C, which holds up every greenlet of
a gevent worker; ``"gil"`` in C with the interpreter's lock, which holds up every thread.
"""

from __future__ import annotations

import ctypes
import os
import time
from typing import Any

from flask import Flask

from rebuno_sync import Agent, execution, step, tool
from tests.faults.gunicorn_app import JOURNAL, note

STEPS = 10
WAITS = 5
agent = Agent("a1", shutdown_timeout=float(os.environ.get("SHUTDOWN_TIMEOUT", "25")))


def stand_still(how: str) -> None:
    note("waiting")
    while not (JOURNAL / "go").exists():
        if how == "hub":
            ctypes.CDLL(None).sleep(600)
        elif how == "gil":
            ctypes.PyDLL(None).sleep(600)
        else:
            time.sleep(0.01)


def act(number: int, how: str) -> int:
    if number == WAITS and how and execution().dispatch_attempt == 1:
        stand_still(how)
    note(f"effect-{number}")
    return number


@tool
def add(number: int, how: str) -> int:
    return act(number, how)


@tool(idempotency="at_most_once")
def pay(number: int) -> int:
    return act(number, "")


@agent.handler
def ten_steps(how: str = "") -> list[Any]:
    told: list[Any] = []
    try:
        for number in range(1, STEPS + 1):
            if number % 3 == 0:
                told.append(pay(number))
            elif number % 3 == 1:
                told.append(step(f"step-{number}", lambda n=number: act(n, "")))
            else:
                told.append(add(number, how))
    except BaseException as exc:
        note(type(exc).__name__)
        raise
    return told


app = Flask(__name__)
app.register_blueprint(agent.blueprint)


@app.get("/")
def ordinary() -> str:
    return "ordinary"


@app.get("/stuck")
def stuck() -> str:
    """Never answer: what a request does that waits for something without a time-out."""
    (JOURNAL / "stuck").touch()
    time.sleep(600)
    return "at last"
