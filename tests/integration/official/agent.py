"""An agent on the official SDK, run by an interpreter that has it: ``agent.py URL JOURNAL``."""

import asyncio
import sys
from pathlib import Path

from rebuno import Agent, execution, step, tool

JOURNAL = Path(sys.argv[2])
agent = Agent("official", secret="orchard-secret", base_url=sys.argv[1])


def note(what):
    with (JOURNAL / "effects").open("a") as file:
        file.write(what + "\n")


@tool
async def fetch(city: str, days: int) -> dict:
    note("fetch")
    return {"city": city, "days": days, "mean": 11.5}


def round_up(value):
    note("round_up")
    return int(value) + 1


@tool("send_report", idempotency="at_most_once")
async def send(text: str) -> str:
    note("send_report")
    return f"sent {text}"


@tool
async def wait_here(until: str) -> str:
    note("wait_here")
    while not (JOURNAL / until).exists():
        await asyncio.sleep(0.01)
    return "went on"


async def process(city: str, until: str = "") -> dict:
    weather = await fetch(city, 3)
    degrees = await step("round_up", round_up, {"value": weather["mean"]})
    if until:
        await wait_here(until)
    receipt = await send(f"{city}: {degrees}°")
    return {"weather": weather, "receipt": receipt, "id": execution().id}


agent.run(process, host="127.0.0.1", port=0)
