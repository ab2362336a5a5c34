# fulfilment.py
"""The agent: pays each item of an order to whoever sells it, exactly once."""

import logging
import os
from typing import Any

import orders
import requests

from rebuno_sync import Agent, execution, tool

log = logging.getLogger(__name__)
agent = Agent("shop", max_concurrency=16, shutdown_timeout=20)


def charges() -> str:
    return os.environ["PAYMENTS_URL"] + "/charges"


def find_charge(step_id: str, args: dict[str, Any]) -> str:
    """Ask the payment service what became of a charge that was cut off."""
    answer = requests.get(f"{charges()}/{reference(args['item'])}", timeout=10)
    answer.raise_for_status()
    return answer.json()["receipt"]


def reference(item: str) -> str:
    return f"{execution().id}-{item}"


@tool(idempotency="at_most_once", reconcile=find_charge)
def charge(item: str, cents: int) -> str:
    """Charge one item and return the receipt."""
    order = {"reference": reference(item), "cents": cents}
    answer = requests.post(charges(), json=order, timeout=60)
    answer.raise_for_status()
    log.info("charged %s", item)
    return answer.json()["receipt"]


items_of = tool("items_of")(orders.items)
mark_paid = tool("mark_paid")(orders.mark_paid)


@agent.handler
def fulfil(order: int) -> dict[str, Any]:
    receipts = [charge(item, cents) for item, cents in items_of(order)]
    mark_paid(order)
    return {"order": order, "receipts": receipts}
