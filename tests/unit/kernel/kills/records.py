"""Holds what a killed kernel left behind against itself, and against what was acknowledged."""

from __future__ import annotations

import contextlib
import json
import sqlite3
from pathlib import Path
from typing import Any

from tests.unit.kernel.kills.driver import ENDED, Driver

#: The events that may come first for a step, and those that may follow each (PROTOCOL 7).
FOLLOWING = {
    "": {"step.proposed"},
    "step.proposed": {"step.allowed", "step.denied", "step.awaiting_approval"},
    "step.awaiting_approval": {"step.allowed", "step.denied"},
    "step.allowed": {"step.executing"},
    "step.executing": {"step.succeeded", "step.failed", "step.cancelled"},
}
STATUS = {
    "step.allowed": "allowed",
    "step.executing": "executing",
    "step.awaiting_approval": "awaiting_approval",
    "step.succeeded": "succeeded",
    "step.failed": "failed",
    "step.denied": "denied",
    "step.cancelled": "cancelled",
}
#: What may still be told of an execution that has ended.
AFTER_THE_END = {"approval.expired", "step.denied", "step.cancelled", "dispatch.discarded"}


def check(driver: Driver, path: Path) -> None:
    """Check every execution of a kernel that has been stopped, each of them having ended."""
    with contextlib.closing(sqlite3.connect(path)) as database:
        database.row_factory = sqlite3.Row
        assert [r[0] for r in database.execute("PRAGMA integrity_check")] == ["ok"]
        executions = {r["id"]: r for r in database.execute("SELECT * FROM executions")}
        assert executions.keys() == driver.created.keys()
        for id, row in executions.items():
            assert (row["input"], row["status"]) == (f'"{driver.created[id]}"', driver.ended[id])
            events = database.execute(
                "SELECT * FROM events WHERE execution_id = ? ORDER BY event_seq", (id,)
            ).fetchall()
            steps = database.execute("SELECT * FROM steps WHERE execution_id = ?", (id,)).fetchall()
            _check_log(row, events)
            _check_steps(steps, events)
            _check_acknowledged(driver, id, steps)
        _check_nothing_waits(database)
        _check_budgets(database)
        keys = {r["id"] for r in database.execute("SELECT id FROM api_keys")}
        assert driver.keys <= keys, "an acknowledged key was lost"


def check_nothing_is_left(path: Path) -> None:
    """Check that executions were deleted with everything of them."""
    with contextlib.closing(sqlite3.connect(path)) as database:
        assert [r[0] for r in database.execute("PRAGMA integrity_check")] == ["ok"]
        for table in (
            *("executions", "events", "steps", "dispatches", "approvals", "submissions"),
            *("occurrences", "parked", "remains"),
        ):
            assert database.execute(f"SELECT count(*) FROM {table}").fetchone() == (0,), table


def _check_log(row: sqlite3.Row, events: list[sqlite3.Row]) -> None:
    numbers = [event["event_seq"] for event in events]
    assert numbers == list(range(1, row["last_event"] + 1)), "the log has gaps"
    types = [event["type"] for event in events]
    assert types[:3] == ["execution.created", "execution.started", "dispatch.queued"]
    ends = [i for i, type in enumerate(types) if type in {f"execution.{s}" for s in ENDED}]
    assert len(ends) == 1
    assert types[ends[0]] == f"execution.{row['status']}"
    assert set(types[ends[0] + 1 :]) <= AFTER_THE_END
    blocked, resumed = types.count("execution.blocked"), types.count("execution.resumed")
    assert blocked - resumed in (0, 1)
    assert types.count("approval.requested") == blocked
    times = [event["occurred_at"] for event in events]
    assert times == sorted(times)


def _check_steps(steps: list[sqlite3.Row], events: list[sqlite3.Row]) -> None:
    last: dict[str, str] = {}
    for event in events:
        if event["type"].startswith("step."):
            step_id = json.loads(event["payload"])["step_id"]
            before = last.get(step_id, "")
            assert event["type"] in FOLLOWING.get(before, ()), f"{before} → {event['type']}"
            last[step_id] = event["type"]
    assert {s["step_id"]: s["status"] for s in steps} == {i: STATUS[t] for i, t in last.items()}
    for step in steps:
        assert (step["result"] is not None) == (step["status"] == "succeeded")
        assert (step["completed_at"] is not None) == (step["status"] in FINAL)
        # What was allowed and never begun, or ran when its execution was ended by its agent.
        assert step["status"] in {*FINAL, "allowed", "executing"}


FINAL = ("succeeded", "failed", "denied", "cancelled")


def _check_acknowledged(driver: Driver, id: str, steps: list[sqlite3.Row]) -> None:
    rows = {step["step_id"]: step for step in steps}
    for step_id in [s for (x, _), s in driver.numbers.items() if x == id]:
        if step_id not in {*driver.results, *driver.decided, *driver.ran}:
            continue  # it was parked for a rate limit, which records nothing
        step = rows[step_id]
        if step_id in driver.results:
            outcome: dict[str, Any] = {
                name: json.loads(step[name])
                for name in ("result", "error")
                if step[name] is not None
            }
            assert outcome == driver.results[step_id], "an acknowledged result was lost"
        verdict = driver.decided.get(step_id)
        assert verdict != "denied" or step["status"] == "denied", "a denial was lost"
        assert verdict != "granted" or step["status"] != "denied", "a grant was lost"


def _check_nothing_waits(database: sqlite3.Connection) -> None:
    for query in (
        "SELECT id FROM dispatches WHERE state IN ('pending', 'in_flight', 'held')",
        "SELECT id FROM approvals WHERE status = 'pending'",
        "SELECT execution_id FROM occurrences",
        "SELECT execution_id FROM parked",
        "SELECT scope_id FROM buckets WHERE scope = 'execution'",
    ):
        assert database.execute(query).fetchall() == [], query
    doubles = "SELECT step_id FROM approvals GROUP BY step_id HAVING count(*) > 1"
    assert database.execute(doubles).fetchall() == []


def _check_budgets(database: sqlite3.Connection) -> None:
    for row in database.execute(
        "SELECT execution_id, sum(tokens) AS spent FROM token_usage GROUP BY execution_id"
    ):
        assert row["spent"] <= 20, "more ran than the budget lets begin"
    apart = database.execute(
        "SELECT u.step_id FROM token_usage u JOIN steps s ON s.step_id = u.step_id"
        " WHERE (s.status = 'succeeded') != (u.tokens = 10)"
    )
    assert apart.fetchall() == [], "a result and its usage were not recorded together"
