"""Rows as the JSON objects of PROTOCOL 4 and 9. What is absent is left out."""

from __future__ import annotations

import datetime
import sqlite3
from typing import Any

import orjson


def timestamp(seconds: float) -> str:
    """Return a time as RFC 3339 text in UTC."""
    moment = datetime.datetime.fromtimestamp(seconds, datetime.timezone.utc)
    return moment.strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def execution(row: sqlite3.Row) -> dict[str, Any]:
    """Return an execution."""
    return _present(
        id=row["id"],
        agent_id=row["agent_id"],
        input=_raw(row["input"]),
        status=row["status"],
        output=_raw(row["output"]),
        failure_reason=row["failure_reason"],
        session=row["session"],
        parent_execution_id=row["parent_execution_id"],
        idempotency_key=row["idempotency_key"],
        spawned_by=_raw(row["spawned_by"]),
        on_behalf_of=row["on_behalf_of"],
        created_at=timestamp(row["created_at"]),
        updated_at=timestamp(row["updated_at"]),
        deadline_at=_time(row["deadline_at"]),
    )


def step(row: sqlite3.Row) -> dict[str, Any]:
    """Return a step."""
    return _present(
        step_id=row["step_id"],
        execution_id=row["execution_id"],
        kind=row["kind"],
        target=row["target"],
        args_hash=row["args_hash"],
        occurrence=row["occurrence"],
        status=row["status"],
        idempotency=row["idempotency"],
        args=_raw(row["args"]),
        result=_raw(row["result"]),
        error=_raw(row["error"]),
        started_at=_time(row["started_at"]),
        completed_at=_time(row["completed_at"]),
    )


def event(row: sqlite3.Row) -> dict[str, Any]:
    """Return an event."""
    return {
        "execution_id": row["execution_id"],
        "event_seq": row["event_seq"],
        "type": row["type"],
        "payload": _raw(row["payload"]),
        "occurred_at": timestamp(row["occurred_at"]),
    }


def approval(row: sqlite3.Row) -> dict[str, Any]:
    """Return an approval."""
    return _present(
        id=row["id"],
        step_id=row["step_id"],
        execution_id=row["execution_id"],
        status=row["status"],
        approvers=_raw(row["approvers"]),
        message=row["message"] or None,
        timeout_at=_time(row["timeout_at"]),
        decided_by=row["decided_by"],
        decided_at=_time(row["decided_at"]),
        rationale=row["rationale"],
        created_at=timestamp(row["created_at"]),
    )


def agent(row: sqlite3.Row) -> dict[str, Any]:
    """Return an agent, without its secret."""
    return _present(
        id=row["id"],
        webhook_url=row["webhook_url"],
        lease_timeout_seconds=row["lease_timeout"],
        policy_bundle=row["policy"] or "",
        description=row["description"],
        input_schema=_raw(row["input_schema"]),
        output_schema=_raw(row["output_schema"]),
        registered_at=timestamp(row["registered_at"]),
    )


def api_key(row: sqlite3.Row) -> dict[str, Any]:
    """Return an API key, without its token, which nobody knows."""
    return {
        "id": row["id"],
        "name": row["name"],
        "scopes": _raw(row["scopes"]),
        "created_at": timestamp(row["created_at"]),
    }


def _present(**fields: Any) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value is not None}


def _raw(text: str | None) -> orjson.Fragment | None:
    return None if text is None else orjson.Fragment(text)


def _time(seconds: float | None) -> str | None:
    return None if seconds is None else timestamp(seconds)
