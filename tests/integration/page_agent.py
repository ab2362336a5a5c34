"""An agent for gunicorn whose one dangerous effect a person has to allow on the page."""

from __future__ import annotations

from typing import Any

from rebuno_sync import Agent, PolicyError, tool

agent = Agent("desk")  # REBUNO_AGENT_SECRET and REBUNO_URL are in the environment


@tool
def find_order(number: str) -> dict[str, Any]:
    return {"number": number, "total": 249.0}


@tool(idempotency="at_most_once")
def refund(number: str, amount: float, note: str) -> str:
    return f"refunded {amount} for {number}"


@agent.handler
def support(number: str, note: str) -> str:
    found = find_order(number)
    try:
        return str(refund(number, found["total"], note))
    except PolicyError as exc:
        return f"not refunded: {exc}"


app = agent.app
