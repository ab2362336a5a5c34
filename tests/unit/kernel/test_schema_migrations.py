"""A database that the first kernel wrote, opened by today's: nothing is lost, and work goes on."""

from __future__ import annotations

import contextlib
import json
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rebuno_sync.kernel import EmbeddedKernel, identity, schema
from rebuno_sync.kernel.clock import Clock
from rebuno_sync.kernel.ids import new_id
from rebuno_sync.kernel.store import Store
from tests.unit.kernel.agent_double import Caller, Webhooks

THEN = 1_700_000_000.0
RUNNING, BLOCKED, DONE = (new_id(THEN + n) for n in range(3))
APPROVAL = new_id(THEN + 3)
POLICY = """
rules:
  - {id: ask, when: {target: pay}, then: {decision: require_approval}}
  - {id: rest, when: {target: '*'}, then: {decision: allow}}
"""
STEPS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "fetch": (RUNNING, "succeeded", {"result": '{"pages": 3}', "completed_at": THEN + 2}),
    "count": (RUNNING, "executing", {}),
    "pay": (BLOCKED, "awaiting_approval", {"started_at": None, "rule_id": None}),
}


def step_id(target: str) -> str:
    hashed = identity.args_hash(b'{"n":1}')
    return identity.step_id(STEPS[target][0], "tool_call", target, hashed, 0)


def first_rows(webhook_url: str) -> dict[str, list[dict[str, Any]]]:
    """Return rows for every table that the first migration makes."""
    rows: dict[str, list[dict[str, Any]]] = {
        "agents": [
            {
                "id": "a1",
                "webhook_url": webhook_url,
                "secret": "orchard-secret",
                "lease_timeout": 60.0,
                "policy": POLICY,
                "description": "pays",
                "registered_at": THEN,
            }
        ],
        "buckets": [
            {
                "scope": "agent",
                "scope_id": "a1",
                "rule_id": "rest",
                "tokens": 1.5,
                "counted_at": THEN,
            }
        ],
        "parked": [{"execution_id": RUNNING, "step_id": step_id("count")}],
        "approvals": [
            {
                "id": APPROVAL,
                "step_id": step_id("pay"),
                "execution_id": BLOCKED,
                "status": "pending",
                "approvers": '["ann"]',
                "message": "may I?",
                "created_at": THEN,
            }
        ],
    }
    for id, status, dispatch in (
        (RUNNING, "running", "in_flight"),
        (BLOCKED, "blocked", "held"),
        (DONE, "completed", "retired"),
    ):
        rows.setdefault("executions", []).append(
            {
                "id": id,
                "agent_id": "a1",
                "status": status,
                "input": '{"city": "Ulm"}',
                "output": '"done"' if id == DONE else None,
                "session": "s",
                "idempotency_key": f"key-{status}",
                "last_event": 1,
                "created_at": THEN,
                "updated_at": THEN + 2,
            }
        )
        rows.setdefault("events", []).append(
            {
                "execution_id": id,
                "event_seq": 1,
                "type": "execution.created",
                "payload": json.dumps({"execution_id": id, "status": "pending"}),
                "occurred_at": THEN,
            }
        )
        rows.setdefault("dispatches", []).append(
            {
                "id": new_id(THEN),
                "execution_id": id,
                "agent_id": "a1",
                "state": dispatch,
                "attempt": 1,
                "acked": 1,
                "available_at": THEN,
                "lease_timeout": 60.0,
                "lease_deadline": THEN + 60,
            }
        )
    for target, (execution_id, status, more) in STEPS.items():
        call = {
            "execution_id": execution_id,
            "kind": "tool_call",
            "target": target,
            "args_hash": identity.args_hash(b'{"n":1}'),
        }
        rows.setdefault("occurrences", []).append({**call, "next": 1})
        rows.setdefault("steps", []).append(
            {
                **call,
                "step_id": step_id(target),
                "args": '{"n":1}',
                "occurrence": 0,
                "idempotency": "safe_to_retry",
                "status": status,
                "rule_id": "rest",
                "started_at": THEN + 1,
                **more,
            }
        )
    return rows


@pytest.fixture
def old_file(tmp_path: Path, webhooks: Webhooks, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A database as the first kernel left it when it was killed."""
    path = tmp_path / "kernel.db"
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as connection:
        with monkeypatch.context() as patch:
            patch.setattr(schema, "MIGRATIONS", schema.MIGRATIONS[:1])
            schema.migrate(connection)
        for table, rows in first_rows(webhooks.url).items():
            for row in rows:
                marks = ",".join("?" * len(row))
                connection.execute(
                    f"INSERT INTO {table} ({','.join(row)}) VALUES ({marks})", tuple(row.values())
                )
    return path


def columns(path: Path) -> dict[str, list[str]]:
    """Return the columns of every table of the kernel's."""
    with contextlib.closing(sqlite3.connect(path)) as connection:
        names = connection.execute(
            "SELECT name FROM sqlite_master WHERE type = 'table'"
            " AND name NOT LIKE 'sqlite_%' AND name != 'migrations'"
        ).fetchall()
        return {
            name: [row[1] for row in connection.execute(f"PRAGMA table_info({name})")]
            for (name,) in names
        }


def contents(path: Path, of: dict[str, list[str]]) -> dict[str, list[tuple[Any, ...]]]:
    """Return all rows of these tables, with these columns."""
    with contextlib.closing(sqlite3.connect(path)) as connection:
        return {
            table: sorted(
                connection.execute(f"SELECT {','.join(names)} FROM {table}").fetchall(), key=repr
            )
            for table, names in of.items()
        }


def test_every_row_of_the_first_kernel_is_kept(old_file: Path) -> None:
    first = columns(old_file)
    before = contents(old_file, first)
    assert all(before.values()), "every table of the first migration holds rows"

    store = Store(old_file, Clock())
    with store.read() as tx:
        applied = [row["name"] for row in tx.all("SELECT name FROM migrations ORDER BY position")]
    store.close()

    assert applied == [name for name, _ in schema.MIGRATIONS]
    assert contents(old_file, first) == before


def test_executions_of_the_first_kernel_can_be_finished(
    old_file: Path, kernels: Callable[..., EmbeddedKernel], webhooks: Webhooks
) -> None:
    kernel = kernels(old_file)
    with contextlib.closing(Caller(kernel.url)) as caller:

        def submit(lease: dict[str, Any], target: str) -> dict[str, Any]:
            step = {"kind": "tool_call", "target": target, "args": {"n": 1}}
            path = f"/v0/executions/{lease['execution_id']}/steps"
            return dict(caller.agent("POST", path, step, lease=lease).json())

        def finish(lease: dict[str, Any], target: str, output: Any) -> None:
            path = f"/v0/executions/{lease['execution_id']}"
            settle = f"{path}/steps/{step_id(target)}/complete"
            assert caller.agent("POST", settle, {"result": 1}, lease=lease).status_code == 200
            done = caller.agent("POST", f"{path}/complete", {"output": output}, lease=lease)
            assert done.status_code == 204, done.text
            execution = caller.client("GET", path).json()
            assert (execution["status"], execution["output"]) == ("completed", output)
            assert execution["input"] == {"city": "Ulm"}

        # The lease of the first kernel's attempt has run out, so another attempt begins.
        lease = webhooks.next()
        assert (lease["execution_id"], lease["dispatch_attempt"]) == (RUNNING, 2)
        replay = {"decision": "replay", "step_id": step_id("fetch"), "result": {"pages": 3}}
        assert replay.items() <= submit(lease, "fetch").items()
        assert submit(lease, "count") == {"decision": "proceed", "step_id": step_id("count")}
        finish(lease, "count", [1])

        (approval,) = caller.client("GET", "/v0/approvals").json()
        assert (approval["id"], approval["step_id"]) == (APPROVAL, step_id("pay"))
        grant = f"/v0/approvals/{APPROVAL}/grant"
        assert caller.client("POST", grant, {"decided_by": "ann"}).status_code == 204
        lease = webhooks.next()
        assert lease["execution_id"] == BLOCKED
        assert submit(lease, "pay") == {"decision": "proceed", "step_id": step_id("pay")}
        finish(lease, "pay", "paid")

        again = {"agent_id": "a1", "idempotency_key": "key-completed"}
        assert caller.client("POST", "/v0/executions", again).json()["id"] == DONE
