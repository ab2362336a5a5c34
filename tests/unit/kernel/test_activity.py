"""The feed of events that ``rebuno-sync dev`` prints, whatever was recorded."""

from __future__ import annotations

import math

from rebuno_sync import Agent
from rebuno_sync.kernel import events
from rebuno_sync.testing import TestKernel, run_agent

LONG = 10**400


def test_a_long_number_does_not_end_the_feed() -> None:
    agent = Agent("counts", secret="s", base_url="http://kernel.invalid")
    agent.bind(lambda: LONG)
    with TestKernel() as kernel:
        activity = kernel.activity()
        run = run_agent(agent, kernel=kernel)
        assert run.output == LONG
        told = {event.type: event.payload for _, event in activity.read()}
    assert told["execution.completed"]["output"] == LONG


def test_payloads_that_python_reads_otherwise_or_not_at_all() -> None:
    assert events.read_payload('{"output":1e999}') == {"output": math.inf}
    assert events.read_payload('{"output":' + "[" * 9000 + "]" * 9000 + "}") == {}
