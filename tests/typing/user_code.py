"""What a user writes, for mypy to check; never imported by a test, only read.

A comment with ``reveals`` is the type that mypy must tell of the line's ``reveal_type``, and one
with ``error`` the kind of error that it must find there.
"""

# ruff: noqa: F821

from __future__ import annotations

import threading
from concurrent.futures import Future
from typing import Any

from rebuno_sync import (
    Agent,
    Client,
    ContextThreadPoolExecutor,
    PolicyError,
    Result,
    ToolError,
    bind_context,
    execution,
    failure_reason,
    previous,
    step,
    tool,
    wrap_tool,
)

agent = Agent("a1", secret="s", base_url="http://127.0.0.1:1", signature="v1")
Agent("a1", signature="sha256")  # error: arg-type
Agent("a1", secret=5)  # error: arg-type


# Tools keep their types in all four spellings.


@tool
def bare(a: int, *, b: str = "x") -> list[str]:
    return [b] * a


@tool()
def called(a: int) -> float:
    return a / 2


@tool("files.read")
def named(path: str) -> bytes | None:
    return None


@tool("pay", idempotency="at_most_once", timeout=5, reconcile=lambda step_id, args: args)
def optioned(cents: int) -> dict[str, int]:
    return {"cents": cents}


reveal_type(bare)  # reveals: def (a: int, *, b: str =) -> list[str]
reveal_type(bare(1, b="y"))  # reveals: list[str]
reveal_type(called(1))  # reveals: float
reveal_type(named("x"))  # reveals: bytes | None
reveal_type(optioned(cents=1))  # reveals: dict[str, int]
bare("x")  # error: arg-type
bare(1, c=2)  # error: call-arg
optioned()  # error: call-arg


@tool("pay", idempotency="exactly_once")  # error: call-overload
def misspelt() -> None: ...


@tool(on_denied="ignore")  # error: call-overload
def misdenied() -> None: ...


class Shop:
    price = 5

    @tool
    def total(self, count: int) -> int:
        return self.price * count

    @staticmethod
    @tool
    def tax(amount: int) -> float:
        return amount / 5


reveal_type(Shop().total(2))  # reveals: int
reveal_type(Shop.tax(2))  # reveals: float
Shop().total("x")  # error: arg-type

search = wrap_tool("search", lambda args: args["query"], args_schema={"type": "object"})
reveal_type(search)  # reveals: def (*Any, **Any) -> Any


# Steps have the type of their function.


def now(zone: str = "UTC") -> float:
    return 0.0


reveal_type(step("now", now))  # reveals: float
reveal_type(step("now", now, {"zone": "UTC"}, retries=2))  # reveals: float
reveal_type(step("tools", list[bytes]))  # reveals: list[bytes]
step("now", 5)  # error: arg-type
step("now", now, idempotency="never")  # error: arg-type


# Handlers keep theirs.


@agent.handler
def handler(topic: str, depth: int = 2) -> Result:
    reveal_type(execution().cancelled)  # reveals: threading.Event
    reveal_type(execution().dispatch_attempt)  # reveals: int | None
    reveal_type(execution().is_replaying)  # reveals: bool
    reveal_type(previous())  # reveals: Any
    return Result(topic, state={"depth": depth})


reveal_type(handler)  # reveals: def (topic: str, depth: int =) -> rebuno_sync.attempt.Result
reveal_type(agent.bind(lambda payload: payload))  # reveals: None
reveal_type(agent.join(5))  # reveals: bool
reveal_type(agent.close())  # reveals: bool
reveal_type(agent.blueprint)  # reveals: flask.blueprints.Blueprint
reveal_type(agent.app)  # reveals: flask.app.Flask


# Threads.

reveal_type(bind_context(now))  # reveals: def (zone: str =) -> float
with ContextThreadPoolExecutor(2) as pool:
    future: Future[float] = pool.submit(now, "UTC")
    reveal_type(pool.submit(bare, 1, b="x").result())  # reveals: list[str]
    pool.submit(now, 5)  # error: arg-type


# The client's models are known.

with Client("http://127.0.0.1:1", timeout=5) as client:
    reveal_type(client.create("a1", {"topic": "x"}).id)  # reveals: str
    reveal_type(client.wait("x", 5).output)  # reveals: Any
    reveal_type([e.event_seq for e in client.events("x")])  # reveals: list[int]
    reveal_type([s.status for s in client.steps("x")])  # reveals: list[str]
    reveal_type(next(client.approvals()).approvers)  # reveals: list[str]
    reveal_type(next(client.stream("x")).data)  # reveals: str
    client.get("x").status = "completed"  # error: misc
    client.create()  # error: call-arg


# Errors carry what they say.

try:
    bare(1)
except ToolError as exc:
    reveal_type(exc.message)  # reveals: str
    reveal_type(exc.error)  # reveals: Any
    reveal_type(failure_reason(exc))  # reveals: str
except PolicyError as exc:
    reveal_type(exc.rule_id)  # reveals: str

cancelled: threading.Event = execution().cancelled
anything: Any = execution().input
