"""A Flask app with one agent: ten steps, each of which takes as long as it is told."""

from __future__ import annotations

import os
import time
from typing import Any

from benchmarks.load_agents import STEPS
from rebuno_sync import Agent, tool

AGENT = "steady"


@tool
def work(number: int, pause: float) -> int:
    time.sleep(pause)
    return number


def handle(start: int, pause: float) -> dict[str, Any]:
    """Take the steps; return their sum, and the seconds that each took beside its body."""
    total, seconds = 0, []
    for n in range(STEPS):
        begin = time.perf_counter()
        total += work(start + n, pause)
        seconds.append(time.perf_counter() - begin - pause)
    return {"total": total, "seconds": seconds}


if "REBUNO_AGENT_SECRET" in os.environ:
    agent = Agent(AGENT, signature="v1")
    agent.bind(handle)
    app = agent.app
