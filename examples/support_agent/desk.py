"""What the agent can do: three tools of a shop's support desk, and how models are told of them."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rebuno_sync import ToolError, tool

MODEL = os.environ.get("SUPPORT_MODEL", "test-model")
INSTRUCTIONS = "You answer customers of a shop. Look the order and the rules up before you refund."

ORDERS = {
    "A-17": {"order_id": "A-17", "item": "kettle", "cents": 4900, "country": "NO", "days": 12},
    "B-02": {"order_id": "B-02", "item": "lamp", "cents": 2500, "country": "DE", "days": 90},
}
RULES = {"NO": "Refunds within 30 days of delivery.", "DE": "Refunds within 14 days of delivery."}


@tool
def find_order(order_id: str) -> dict[str, Any]:
    """Find an order: what was bought, what it cost, and how many days ago it was delivered."""
    if order_id not in ORDERS:
        raise ValueError(f"there is no order {order_id}")
    return ORDERS[order_id]


@tool
def refund_rules(country: str) -> str:
    """Tell the refund rules of a country, by its two-letter code."""
    return RULES.get(country, "No refunds.")


def pay_once(order_id: str, cents: int) -> str:
    """Enter a refund in the ledger, unless it is there: what a payment service would do."""
    ledger = Path(os.environ.get("SUPPORT_LEDGER", "refunds.jsonl"))
    entry = {"order_id": order_id, "cents": cents}
    if entry not in refunds(ledger):
        with ledger.open("a", encoding="utf-8") as file:
            file.write(json.dumps(entry) + "\n")
    return f"refunded {cents / 100:.2f} EUR for order {order_id}"


def refunds(ledger: Path) -> list[dict[str, Any]]:
    """Return the entries of the ledger."""
    text = ledger.read_text(encoding="utf-8") if ledger.exists() else ""
    return [json.loads(line) for line in text.splitlines()]


@tool(
    idempotency="at_most_once",
    on_denied="return",
    # An attempt that died inside leaves it open whether money went out: look, then go on.
    reconcile=lambda step_id, args: pay_once(**args),
)
def issue_refund(order_id: str, cents: int) -> str:
    """Pay money back to the customer. A person of the shop has to approve it."""
    return pay_once(order_id, cents)


TOOLS = {fn.__name__: fn for fn in (find_order, refund_rules, issue_refund)}

#: The arguments of the tools as JSON schemas, for the loops that are written out.
SCHEMAS: Mapping[str, dict[str, Any]] = {
    name: {
        "type": "object",
        "properties": {argument: {"type": kind} for argument, kind in arguments.items()},
        "required": list(arguments),
        "additionalProperties": False,
    }
    for name, arguments in {
        "find_order": {"order_id": "string"},
        "refund_rules": {"country": "string"},
        "issue_refund": {"order_id": "string", "cents": "integer"},
    }.items()
}


def call_tool(name: str, arguments: Mapping[str, Any]) -> str:
    """Call a tool for a model and return what to tell it."""
    try:
        result = TOOLS[name](**arguments)
    except ToolError as exc:
        return f"error: {exc.message}"
    return result if isinstance(result, str) else json.dumps(result, ensure_ascii=False)
