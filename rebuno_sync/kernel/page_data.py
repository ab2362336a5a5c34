"""What the page reads of executions in general: the list, events, values by the piece.

Recorded values may be megabytes. Lists read the beginning of each; only a download reads a whole.
"""

from __future__ import annotations

import dataclasses
import sqlite3
from collections.abc import Collection, Iterator, Sequence
from typing import Any, Final

import orjson

from rebuno_sync.kernel import page_values, queries, refusals
from rebuno_sync.kernel.page_values import READ, Shown
from rebuno_sync.kernel.store import Store, Transaction
from rebuno_sync.wire import TERMINAL_EXECUTION

EXECUTIONS_A_PAGE: Final = 50
EVENTS_A_PAGE: Final = 200
_EVENTS_AT_ONCE: Final = 1000

_STATUSES: Final = ("pending", "running", "blocked", "completed", "failed", "cancelled")
_HINT: Final = page_values.HINT + 1
#: The fields of events that say little to a person who goes through the log.
_NOT_HINTED: Final = ("execution_id", "dispatch_id", "step_id", "approval_id", "step_type")
#: What is read of an execution besides its values.
EXECUTION_COLUMNS: Final = (
    "id, agent_id, status, failure_reason, session, parent_execution_id, on_behalf_of,"
    " deadline_at, last_event, created_at, updated_at"
)


@dataclasses.dataclass(frozen=True)
class ExecutionLine:
    """One execution in the list: its row, what it was asked in a line, and what it does now."""

    row: sqlite3.Row
    hint: str
    steps: int
    now: Sequence[sqlite3.Row]

    @property
    def is_over(self) -> bool:
        """Whether the execution has ended."""
        return self.row["status"] in TERMINAL_EXECUTION


@dataclasses.dataclass(frozen=True)
class ExecutionList:
    """A page of executions, newest first."""

    lines: Sequence[ExecutionLine]
    next_cursor: str | None
    counts: dict[str, int]
    agents: Sequence[str]
    now: float


def execution_list(tx: Transaction, filters: dict[str, str], cursor: str | None) -> ExecutionList:
    """Return a page of executions.

    Raises:
        ValidationError: the cursor is of no execution.
    """
    rows, following = queries.executions(
        tx,
        filters,
        cursor,
        EXECUTIONS_A_PAGE,
        f"{EXECUTION_COLUMNS}, substr(input, 1, {_HINT}) AS input",
    )
    ids = [row["id"] for row in rows]
    counts = tx.all(
        "SELECT execution_id, count(*) AS steps FROM steps"
        f" WHERE execution_id IN ({marks(ids)}) GROUP BY execution_id",
        *ids,
    )
    steps = {row["execution_id"]: row["steps"] for row in counts}
    active = tx.all(
        "SELECT execution_id, kind, target, status FROM steps"
        f" WHERE execution_id IN ({marks(ids)}) AND status IN ('executing', 'awaiting_approval')"
        " ORDER BY seq",
        *ids,
    )
    others = {name: value for name, value in filters.items() if name != "status"}
    agents = tx.all("SELECT id FROM agents UNION SELECT DISTINCT agent_id FROM executions")
    return ExecutionList(
        lines=[
            ExecutionLine(
                row,
                page_values.hint(row["input"]),
                steps.get(row["id"], 0),
                [a for a in active if a["execution_id"] == row["id"]],
            )
            for row in rows
        ],
        next_cursor=following,
        counts=by_status(tx, others),
        agents=[row["id"] for row in agents],
        now=tx.now,
    )


def list_version(tx: Transaction) -> tuple[Any, ...]:
    """Return what changes whenever any execution does."""
    row = tx.one(
        "SELECT (SELECT max(rowid) FROM events), (SELECT count(*) FROM executions),"
        " (SELECT count(*) FROM agents)"
    )
    return tuple(row or ())


def events_page(
    tx: Transaction, execution_id: str, after: int
) -> tuple[sqlite3.Row, list[sqlite3.Row], int | None]:
    """Return an execution, its events after one, and after which the next page begins.

    Raises:
        NotFoundError: there is no such execution.
    """
    row = tx.one(f"SELECT {EXECUTION_COLUMNS} FROM executions WHERE id = ?", execution_id)
    if row is None:
        raise refusals.not_found("execution", execution_id)
    rows = tx.all(
        f"SELECT event_seq, type, occurred_at, substr(payload, 1, {READ}) AS payload,"
        " length(CAST(payload AS BLOB)) AS size FROM events"
        " WHERE execution_id = ? AND event_seq > ? ORDER BY event_seq LIMIT ?",
        execution_id,
        after,
        EVENTS_A_PAGE,
    )
    more = bool(rows) and rows[-1]["event_seq"] < row["last_event"]
    return row, rows, rows[-1]["event_seq"] if more else None


def shown_event(row: sqlite3.Row) -> Shown:
    """Return how the payload of an event is shown."""
    return page_values.shown(row["payload"], row["size"], _NOT_HINTED)


def event_lines(store: Store, execution_id: str) -> Iterator[bytes]:
    """Yield the whole log of an execution, one JSON object a line, some events at a time."""
    after = 0
    while True:
        with store.read() as tx:
            rows = queries.events(tx, execution_id, after, _EVENTS_AT_ONCE)
        for row in rows:
            event = {
                "event_seq": row["event_seq"],
                "type": row["type"],
                "occurred_at": page_values.iso(row["occurred_at"]),
                "payload": orjson.Fragment(row["payload"]),
            }
            yield orjson.dumps(event) + b"\n"
        if len(rows) < _EVENTS_AT_ONCE:
            return
        after = rows[-1]["event_seq"]


def whole_value(tx: Transaction, table: str, id: str, execution_id: str, column: str) -> str:
    """Return one recorded value, whole.

    Args:
        table: ``executions`` or ``steps``.
        id: of the row.
        execution_id: the execution that it must belong to.
        column: which value.

    Raises:
        NotFoundError: there is no such value.
    """
    key, owner = ("id", "id") if table == "executions" else ("step_id", "execution_id")
    row = tx.one(f"SELECT {column} FROM {table} WHERE {key} = ? AND {owner} = ?", id, execution_id)
    if row is None or row[column] is None:
        raise refusals.not_found(column, id)
    return str(row[column])


def by_status(tx: Transaction, filters: dict[str, str]) -> dict[str, int]:
    """Return how many executions there are in each status, those with any."""
    where = " AND ".join(f"{column} = ?" for column in filters)
    rows = tx.all(
        f"SELECT status, count(*) AS n FROM executions{' WHERE ' + where if where else ''}"
        " GROUP BY status",
        *filters.values(),
    )
    found = {row["status"]: row["n"] for row in rows}
    return {status: found[status] for status in _STATUSES if status in found}


def marks(values: Collection[Any]) -> str:
    """Return the place holders for values in SQL."""
    return ",".join("?" * len(values))
