"""The crash harness: every point, both sides of each call; handlers that do not repeat."""

from __future__ import annotations

import uuid

import pytest

from rebuno_sync import Agent, PolicyError, ToolError, step, tool
from rebuno_sync.testing import Diverged, crash_everywhere

ran: list[str] = []


@tool
def read(name: str) -> str:
    ran.append(f"read {name}")
    return name.upper()


@tool(idempotency="at_most_once")
def write(text: str) -> int:
    ran.append(f"write {text}")
    return len(text)


def test_every_call_is_crashed_at_and_nothing_at_most_once_runs_twice() -> None:
    agent = Agent("steady")

    @agent.handler
    def handle() -> int:
        return write(step("id", lambda: "x") + read("a"))

    writes: list[int] = []

    def reset() -> None:
        writes.append(sum(line.startswith("write") for line in ran))
        ran.clear()

    runs = crash_everywhere(agent, reset=reset)
    reset()
    calls = [run.call for run in runs[::2]]
    assert calls == [
        "GET /v0/executions/…",
        *["POST /v0/executions/…/steps", "POST /v0/executions/…/steps/…/complete"] * 3,
        "POST /v0/executions/…/complete",
    ]
    assert [run.arrived for run in runs] == [False, True] * len(calls)
    assert max(writes) == 1
    # Between `proceed` and the report of an at-most-once tool nobody can know what happened.
    assert [(r.point, r.arrived) for r in runs if r.indeterminate] == [(5, True), (6, False)]
    assert {r.run.status for r in runs if not r.indeterminate} == {"completed"}
    assert {r.run.output for r in runs if not r.indeterminate} == {2}


@pytest.mark.parametrize(
    ("second", "ends"),
    [
        ("one", ["ToolError indeterminate", "PolicyError __indeterminate_retry"]),
        ("two", ["ToolError indeterminate", "3"]),
    ],
    ids=["equal", "unequal"],
)
def test_after_an_unknown_outcome_an_equal_at_most_once_call_is_refused(
    second: str, ends: list[str]
) -> None:
    """As docs/recording-effects.md says under "At most once"."""
    agent = Agent("twice")

    def tried(text: str) -> str:
        try:
            return str(write(text))
        except ToolError as exc:
            return f"ToolError {exc.reason}"
        except PolicyError as exc:
            return f"PolicyError {exc.rule_id}"

    @agent.handler
    def handle() -> list[str]:
        return [tried("one"), tried(second)]

    first_lost = [run for run in crash_everywhere(agent) if (run.point, run.arrived) == (1, True)]
    assert [run.run.output for run in first_lost] == [ends]


def test_a_handler_that_is_not_deterministic_is_told_which_step() -> None:
    agent = Agent("random")

    @agent.handler
    def handle() -> str:
        return read("a") + read(str(uuid.uuid4()))

    with pytest.raises(Diverged, match=r"did not submit tool_call read .* a tool or a step"):
        crash_everywhere(agent)


def test_an_execution_that_waits_is_left_waiting_by_a_crash() -> None:
    agent = Agent("asks")

    @agent.handler
    def handle() -> int:
        read("a")
        return write("b")

    rule = {"id": "ask", "when": {"target": "write"}, "then": {"decision": "require_approval"}}
    runs = crash_everywhere(agent, policy={"default_action": "allow", "rules": [rule]})
    assert {run.run.status for run in runs} == {"blocked"}
