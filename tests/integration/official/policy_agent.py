"""An agent on the official SDK, whose every effect a policy decides.

``policy_agent.py URL JOURNAL AGENT_ID``, run by an interpreter that has the SDK. Each body that
runs adds a line to ``JOURNAL/effects``; bodies that wait do so until ``JOURNAL/go`` is there.
"""

import asyncio
import sys
from pathlib import Path

from rebuno import (
    Agent,
    PolicyError,
    RateLimited,
    execution,
    http_client,
    raise_for_refusal,
    step,
    tool,
)

JOURNAL = Path(sys.argv[2])
agent = Agent(sys.argv[3], secret="orchard-secret", base_url=sys.argv[1])


def note(what):
    with (JOURNAL / "effects").open("a") as file:
        file.write(f"{execution().id} {what}\n")


async def seen(call):
    """Return what a call comes to: its value, or how it was refused.

    A denied tool returns a text; only a denied LLM call raises.
    """
    try:
        return await call
    except PolicyError as exc:
        return [exc.args[0], exc.rule_id]
    except RateLimited as exc:
        return exc.reason


@tool
async def find_order(number: int) -> dict:
    note("find_order")
    return {"number": number}


@tool
async def get_x() -> str:
    return "x"


@tool
async def get_xy() -> str:
    note("get_xy")
    return "xy"


def _paid(to, amount):
    note(f"pay {to} {amount}")
    return f"paid {amount} to {to}"


@tool("pay", idempotency="at_most_once")
async def pay(to: str, amount: int, note: str) -> str:
    return _paid(to, amount)


@tool
async def send_mail(number: int) -> str:
    note("send_mail")
    return f"sent {number}"


@tool
async def sync_feed(name: str) -> str:
    note(f"sync_feed {name}")
    return f"synced {name}"


async def ask_model():
    async with http_client() as client:
        # Nothing listens there: a call that the policy lets through would fail.
        answer = await client.post(
            "http://127.0.0.1:9/v1/chat/completions", json={"model": "gpt-x"}
        )
    if answer.is_error:
        # As the libraries of providers do, whose errors quote the answer.
        raise_for_refusal(RuntimeError(answer.text))
    return f"HTTP {answer.status_code}"


async def survey():
    return {
        "find_order": await seen(find_order(7)),
        "get_x": await seen(get_x()),
        "get_xy": await seen(get_xy()),
        "listed": await seen(pay("mallory", 5, "rent")),
        "gifts": await seen(pay("carol", 5, "a gift for you")),
        "nothing": await seen(pay("carol", 0, "rent")),
        "small": await seen(pay("carol", 42, "rent")),
        "send_mail": [await seen(send_mail(number)) for number in (1, 2, 3)],
        "model": await seen(ask_model()),
        "clock": await step("clock", lambda: 1200),
    }


async def buy(amount):
    note("buy")
    order = await find_order(7)
    return {
        "order": order,
        "paid": await seen(pay("carol", amount, "rent")),
        "after": await get_x(),
    }


async def until(condition):
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.01)


@tool
async def find_slowly(name: str) -> str:
    note(f"begun {name}")
    under_way.add(name)
    await until((JOURNAL / "go").exists)
    note(f"ended {name}")
    return f"found {name}"


under_way = set()


async def errands(names):
    found = {name: asyncio.create_task(find_slowly(name)) for name in names}
    try:
        await until(lambda: all(found[name].done() or name in under_way for name in names))
        paid = await pay("carol", 250, "rent")
    finally:
        await asyncio.gather(*found.values(), return_exceptions=True)
    return {"paid": paid, "found": {name: task.result() for name, task in found.items()}}


async def work(do: str, amount: int = 0, names: list[str] | None = None):
    if do == "learn":
        return {
            "find_order": await seen(find_order(7)),
            "pay": await seen(pay("carol", 0, "rent")),
        }
    if do == "survey":
        return await survey()
    if do == "feed":
        return [await sync_feed("a"), await sync_feed("b")]
    if do == "errands":
        return await errands(names)
    if do == "buy_or_fail":
        return await pay("carol", amount, "rent")
    return await buy(amount)


agent.run(work, host="127.0.0.1", port=0)
