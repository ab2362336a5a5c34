"""Recorded histories: kept as files, and held against the handler of today."""

from __future__ import annotations

from pathlib import Path

import pytest

from rebuno_sync import Agent, ToolError, step, tool
from rebuno_sync.testing import History, ReplayMismatch, check_replay
from rebuno_sync.testing.plugin import RunAgent

ran: list[str] = []


@tool
def find(name: str) -> dict[str, object]:
    ran.append(name)
    return {"name": name, "ratio": 1.0}


@tool
def refuse() -> None:
    raise ValueError("no")


def version_1(name: str) -> object:
    when = step("when", lambda: "monday")
    found = find(name)
    try:
        refuse()
    except ToolError as exc:
        return [when, found["name"], exc.message]


@pytest.fixture
def history(run_agent: RunAgent) -> History:
    agent = Agent("versioned")
    agent.bind(version_1)
    run = run_agent(agent, {"name": "ada"})
    assert run.output == ["monday", "ada", "no"]
    with run.kernel.client() as client:
        found = History.of(client, run.execution.id)
    ran.clear()
    return found


def bound(handler: object) -> Agent:
    agent = Agent("versioned")
    agent.bind(handler)  # type: ignore[arg-type]
    return agent


def test_the_same_handler_replays_and_nothing_runs(history: History, tmp_path: Path) -> None:
    history.save(tmp_path / "history.json")
    check_replay(bound(version_1), History.load(tmp_path / "history.json"))
    check_replay(bound(version_1), history)
    assert ran == []


def test_a_changed_argument_is_found(history: History) -> None:
    def version_2(name: str) -> object:
        step("when", lambda: "monday")
        return find(name.title())

    with pytest.raises(ReplayMismatch, match=r"find with \{'name': 'Ada'\} was not recorded") as e:
        check_replay(bound(version_2), history)
    assert "recorded is that call with {'name': 'ada'}" in str(e.value)


def test_a_step_left_out_is_found(history: History) -> None:
    def version_2(name: str) -> object:
        return [step("when", lambda: "monday"), name, "no"]

    with pytest.raises(ReplayMismatch, match="not submitted: tool_call find, tool_call refuse"):
        check_replay(bound(version_2), history)


def test_a_new_step_is_found(history: History) -> None:
    def version_2(name: str) -> object:
        step("seed", lambda: 1)
        return version_1(name)

    with pytest.raises(ReplayMismatch, match=r"local seed with \{\} was not recorded"):
        check_replay(bound(version_2), history)


def test_another_output_is_found(history: History) -> None:
    def version_2(name: str) -> object:
        version_1(name)
        return "something else"

    with pytest.raises(ReplayMismatch, match="ends with output 'something else'"):
        check_replay(bound(version_2), history)


def test_a_handler_that_fails_now_is_found(history: History) -> None:
    def version_2(name: str) -> object:
        version_1(name)
        raise RuntimeError("broken")

    with pytest.raises(ReplayMismatch, match="agent_error: RuntimeError: broken"):
        check_replay(bound(version_2), history)


def test_an_execution_that_has_not_ended_is_followed_as_far_as_it_goes(history: History) -> None:
    begun = History({**history.execution, "status": "running"}, history.steps[:2])
    check_replay(bound(version_1), begun)

    def version_2(name: str) -> object:
        return find(name)

    with pytest.raises(ReplayMismatch, match="not submitted: local when"):
        check_replay(bound(version_2), begun)


def test_a_file_that_is_no_history(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text("{}")
    with pytest.raises(ValueError, match="is not a history"):
        History.load(tmp_path / "x.json")
