"""Three agents in one app for gunicorn, whose every effect a policy decides.

``JOURNAL`` names the directory where each body that runs adds a line to ``effects``; bodies that
wait do so until the file ``go`` is there.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from flask import Flask

from rebuno_sync import (
    Agent,
    Blocked,
    ContextThreadPoolExecutor,
    PolicyError,
    RateLimited,
    execution,
    raise_for_refusal,
    requests_session,
    step,
    tool,
)

JOURNAL = Path(os.environ["JOURNAL"])
clerk = Agent("clerk")
intern = Agent("intern")
porter = Agent("porter")


def note(what: str) -> None:
    """Add a line to the journal, whole or not at all."""
    file = os.open(JOURNAL / "effects", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.write(file, f"{execution().id} {what}\n".encode())
    os.close(file)


def seen(call: Callable[..., Any], *args: Any) -> Any:
    """Return what a call comes to: its value, or how it was refused."""
    try:
        return call(*args)
    except PolicyError as exc:
        return [exc.reason, exc.rule_id]
    except RateLimited as exc:
        return exc.reason


@tool
def find_order(number: int) -> dict[str, int]:
    note("find_order")
    return {"number": number}


@tool
def get_x() -> str:
    return "x"


@tool
def get_xy() -> str:
    note("get_xy")
    return "xy"


def transfer(to: str, amount: int, note: str) -> str:
    return _transfer(to, amount)


def _transfer(to: str, amount: int) -> str:
    note(f"pay {to} {amount}")
    return f"paid {amount} to {to}"


pay = tool("pay", idempotency="at_most_once")(transfer)
pay_or_say = tool("pay", idempotency="at_most_once", on_denied="return")(transfer)


@tool
def send_mail(number: int) -> str:
    note("send_mail")
    return f"sent {number}"


@tool
def sync_feed(name: str) -> str:
    note(f"sync_feed {name}")
    return f"synced {name}"


def ask_model() -> str:
    with requests_session() as session:
        # Nothing listens there: a call that the policy lets through would fail.
        answer = session.post(
            "http://127.0.0.1:9/v1/chat/completions", json={"model": "gpt-x"}, timeout=10
        )
    try:
        answer.raise_for_status()
    except OSError as exc:
        raise_for_refusal(exc)
        raise
    return answer.text


def survey() -> dict[str, Any]:
    return {
        "find_order": seen(find_order, 7),
        "get_x": seen(get_x),
        "get_xy": seen(get_xy),
        "listed": seen(pay, "mallory", 5, "rent"),
        "gifts": seen(pay, "carol", 5, "a gift for you"),
        "nothing": seen(pay, "carol", 0, "rent"),
        "small": seen(pay, "carol", 42, "rent"),
        "send_mail": [seen(send_mail, number) for number in (1, 2, 3)],
        "model": seen(ask_model),
        "clock": step("clock", lambda: 1200),
    }


def feed() -> list[str]:
    return [sync_feed("a"), sync_feed("b")]


def buy(amount: int) -> dict[str, Any]:
    note("buy")
    return {"order": find_order(7), "paid": seen(pay, "carol", amount, "rent"), "after": get_x()}


def buy_or_say(amount: int) -> str:
    return pay_or_say("carol", amount, "rent")


def buy_or_fail(amount: int) -> str:
    return pay("carol", amount, "rent")


@clerk.handler
def work(do: str, amount: int = 0) -> Any:
    if do in ("survey", "feed"):
        return {"survey": survey, "feed": feed}[do]()
    return {"buy": buy, "buy_or_say": buy_or_say, "buy_or_fail": buy_or_fail}[do](amount)


@intern.handler
def learn() -> dict[str, Any]:
    return {"find_order": seen(find_order, 7), "pay": seen(pay, "carol", 0, "rent")}


def until(condition: Callable[[], Any]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@tool
def find_slowly(name: str) -> str:
    note(f"begun {name}")
    under_way.add((execution().id, name))
    if name == "kept":
        # Until a heartbeat has been told that the dispatch is over.
        until(execution().cancelled.is_set)
        note("lost the lease")
    until((JOURNAL / "go").exists)
    note(f"ended {name}")
    return f"found {name}"


under_way: set[tuple[str, str]] = set()


@porter.handler
def errands(names: list[str]) -> dict[str, Any]:
    here = execution().id
    with ContextThreadPoolExecutor(max_workers=len(names) + 1) as pool:
        found = {name: pool.submit(find_slowly, name) for name in names}
        until(lambda: all(found[name].done() or (here, name) in under_way for name in names))
        try:
            paid = pay("carol", 250, "rent")
        except Blocked:
            late = pool.submit(find_order, 8)
            note(f"then {type(late.exception()).__name__}")
            raise
        return {"paid": paid, "found": {name: each.result() for name, each in found.items()}}


app = Flask(__name__)
for each in (clerk, intern, porter):
    app.register_blueprint(each.blueprint, url_prefix=f"/agents/{each.agent_id}")
