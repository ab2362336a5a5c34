"""A kernel that is away: short outages are waited out, long ones give the attempt up."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from rebuno_sync import Agent, tool
from tests.faults.proxy import Fault, FaultProxy
from tests.faults.sides import AGENT, SECRET, ScriptedSide
from tests.scripted import GENERATION_3, Answer, Recorded, ScriptedKernel, served

AWAY = Answer(503, b"<html>maintenance</html>", "text/html")


def two_steps(effects: Counter[str]) -> Callable[[], Any]:
    @tool
    def first() -> str:
        effects["first"] += 1
        return "first"

    @tool(idempotency="at_most_once")
    def second() -> str:
        effects["second"] += 1
        return "second"

    return lambda: [first(), second()]


@pytest.mark.parametrize("call", ["read", "step_complete", "complete"])
def test_a_short_outage_is_waited_out(call: str) -> None:
    effects: Counter[str] = Counter()
    with ScriptedKernel(GENERATION_3, agent_id=AGENT, secret=SECRET) as kernel:
        with FaultProxy(kernel.url) as proxy:
            proxy.spoil(call, 0, Fault.GATEWAY_BEFORE, times=4)
            agent = Agent(AGENT, secret=SECRET, base_url=proxy.url, signature="v1")
            agent.bind(two_steps(effects))
            with served(agent.app) as url:
                side = ScriptedSide(kernel)
                outcome = side.settle(side.start(f"{url}/webhook", {}), agent)
                assert agent.close(timeout=30)
        assert len(proxy.spoiled()) == 4
    assert (outcome.status, outcome.output) == ("completed", ["first", "second"])
    assert outcome.attempts == 1
    assert effects == {"first": 1, "second": 1}


@pytest.mark.parametrize("call", ["step_complete", "complete", "heartbeat"])
def test_a_long_outage_gives_the_attempt_up_and_fails_nothing(call: str) -> None:
    effects: Counter[str] = Counter()

    def away(request: Recorded) -> Answer | None:
        """From the first such call on, attempt 1 reaches nothing."""
        if request.headers["Rebuno-Dispatch-Attempt"] != "1":
            return None
        return AWAY if request.call == call or call in kernel.calls() else None

    with ScriptedKernel(GENERATION_3, agent_id=AGENT, secret=SECRET, lease_timeout=0.9) as kernel:
        kernel.intercept(away)
        agent = Agent(AGENT, secret=SECRET, base_url=kernel.url, signature="v1")
        steps = two_steps(effects)

        def handler() -> Any:
            if call == "heartbeat":
                kernel.wait_for(lambda: "heartbeat" in kernel.calls())
            return steps()

        agent.bind(handler)
        with served(agent.app) as url:
            side = ScriptedSide(kernel)
            outcome = side.settle(side.start(f"{url}/webhook", {}), agent)
            assert agent.close(timeout=30)
        assert kernel.calls("fail", "step_fail") == []
    assert (outcome.status, outcome.output) == ("completed", ["first", "second"])
    assert outcome.attempts == 2
    # The first attempt's completion was lost in the first case: there the body ran in each.
    assert effects == {"first": 2 if call == "step_complete" else 1, "second": 1}
    assert all(len(rows) == 1 for rows in outcome.steps.values())
    taken = [json.loads(r.body) for r in kernel.sent("complete") if r.answer.status == 204]
    assert taken == [{"output": ["first", "second"]}]
