"""One execution as the page shows it: facts, values, and its timeline by the page."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import sqlite3
from collections.abc import Sequence
from typing import Any, Final

from rebuno_sync.kernel import page_timeline, page_values, refusals, submissions
from rebuno_sync.kernel.page_approvals import ApprovalCard, approval_card
from rebuno_sync.kernel.page_data import EXECUTION_COLUMNS, marks
from rebuno_sync.kernel.page_timeline import Attempt, Record
from rebuno_sync.kernel.page_values import READ, Shown
from rebuno_sync.kernel.store import Transaction
from rebuno_sync.wire import TERMINAL_EXECUTION

#: How many entries of the timeline one page has.
ENTRIES_A_PAGE: Final = 200
_FOLDED_FROM: Final = 4
_VALUES: Final = ("args", "result", "error")


@dataclasses.dataclass(frozen=True)
class Part:
    """One attempt, as far as its entries are on this page of the timeline."""

    attempt: Attempt
    entries: Sequence[page_timeline.Entry]
    is_whole: bool

    @property
    def runs(self) -> list[Run]:
        """The entries, where many replays in a row are one run that can be folded."""
        runs: list[Run] = []
        for replayed, group in itertools.groupby(
            self.entries, lambda entry: entry.outcome == "replayed"
        ):
            entries = list(group)
            runs.append(Run(entries, replayed and len(entries) >= _FOLDED_FROM))
        return runs


@dataclasses.dataclass(frozen=True)
class Run:
    """Entries that follow each other, folded or not."""

    entries: Sequence[page_timeline.Entry]
    is_folded: bool


@dataclasses.dataclass(frozen=True)
class ExecutionPage:
    """One execution. Its values are laid out when they are asked for, outside of the transaction.

    Attributes:
        row: its own row, with the beginnings of input and output.
        parts: the attempts on this page of the timeline.
        attempts: how many there are.
        steps: how many there are.
        page: which page of the timeline this is, from 1.
        pages: how many pages the timeline has.
        told: the rows of the steps that are told in full on this page.
        homes: the page of the timeline that tells a step in full, by step id.
        pending: the approvals that wait.
        queued: the dispatch that waits in the queue, if any.
        ended: when it ended, ``None`` when it goes on.
        now: the kernel's time.
    """

    row: sqlite3.Row
    parts: Sequence[Part]
    attempts: int
    steps: int
    page: int
    pages: int
    told: Sequence[sqlite3.Row]
    homes: dict[str, int]
    pending: Sequence[ApprovalCard]
    queued: sqlite3.Row | None
    ended: float | None
    now: float

    @property
    def input(self) -> Shown:
        """What the execution was asked."""
        return page_values.shown(self.row["input"], self.row["input_size"])

    @property
    def output(self) -> Shown | None:
        """What came of it, ``None`` when nothing did."""
        row = self.row
        return (
            None if row["output"] is None else page_values.shown(row["output"], row["output_size"])
        )

    @functools.cached_property
    def values(self) -> dict[str, dict[str, Shown]]:
        """Arguments, result and error, by their names, of each step that is told, by its id."""
        return {
            row["step_id"]: {
                name: page_values.shown(row[name], row[f"{name}_size"])
                for name in _VALUES
                if row[name] is not None
            }
            for row in self.told
        }


def execution_page(tx: Transaction, execution_id: str, page: int | None) -> ExecutionPage:
    """Return one execution.

    Args:
        page: which page of the timeline, from 1; the last one for ``None``.

    Raises:
        NotFoundError: there is no such execution.
    """
    record, row = _record(tx, execution_id)
    attempts = page_timeline.attempts(record)
    flat = [(a, e) for a in attempts for e in a.entries]
    pages = max(1, -(-len(flat) // ENTRIES_A_PAGE))
    number = pages if page is None else min(max(page, 1), pages)
    first = (number - 1) * ENTRIES_A_PAGE
    on_page = flat[first : first + ENTRIES_A_PAGE]
    homes = {e.step_id: at // ENTRIES_A_PAGE + 1 for at, (_, e) in enumerate(flat) if e.step}
    pending = [r["id"] for r in record.approvals if r["status"] == "pending"]
    ends = [
        e["occurred_at"] for e in record.deliveries if e["type"] == f"execution.{row['status']}"
    ]
    return ExecutionPage(
        row=row,
        parts=_parts(attempts, [e for _, e in on_page], number == pages),
        attempts=len(attempts),
        steps=len(record.steps),
        page=number,
        pages=pages,
        told=_told(tx, [e.step_id for _, e in on_page if e.step]),
        homes=homes,
        pending=[approval_card(tx, id) for id in pending],
        queued=page_timeline.next_delivery(record),
        ended=ends[-1] if ends and row["status"] in TERMINAL_EXECUTION else None,
        now=tx.now,
    )


def _record(tx: Transaction, execution_id: str) -> tuple[Record, sqlite3.Row]:
    row = tx.one(
        f"SELECT {EXECUTION_COLUMNS}, spawned_by, substr(input, 1, {READ}) AS input,"
        " length(CAST(input AS BLOB)) AS input_size, length(CAST(output AS BLOB)) AS output_size,"
        f" substr(output, 1, {READ}) AS output FROM executions WHERE id = ?",
        execution_id,
    )
    if row is None:
        raise refusals.not_found("execution", execution_id)
    record = Record(
        execution=row,
        dispatches=tx.all(
            "SELECT * FROM dispatches WHERE execution_id = ? ORDER BY seq", execution_id
        ),
        # The payload of an execution's event may hold its output.
        deliveries=tx.all(
            "SELECT type, occurred_at, CASE WHEN type LIKE 'dispatch.%' THEN payload END AS payload"
            " FROM events WHERE execution_id = ? AND (type LIKE 'dispatch.%' OR type LIKE"
            " 'execution.%') ORDER BY event_seq",
            execution_id,
        ),
        submissions=submissions.of_execution(tx, execution_id),
        steps=tx.all(
            "SELECT step_id, kind, target, args_hash, occurrence, idempotency, status, reason,"
            f" rule_id, started_at, completed_at,"
            f" substr(error, 1, {READ}) AS error"
            " FROM steps WHERE execution_id = ? ORDER BY seq",
            execution_id,
        ),
        approvals=tx.all(
            "SELECT * FROM approvals WHERE execution_id = ? ORDER BY seq", execution_id
        ),
    )
    return record, row


def _parts(
    attempts: Sequence[Attempt], on_page: Sequence[page_timeline.Entry], is_last: bool
) -> list[Part]:
    kept = {id(entry) for entry in on_page}
    parts = []
    for attempt in attempts:
        entries = [entry for entry in attempt.entries if id(entry) in kept]
        # One without a step has no other place than beside those that have some.
        if entries or (not attempt.entries and is_last):
            parts.append(Part(attempt, entries, len(entries) == len(attempt.entries)))
    return parts


def _told(tx: Transaction, step_ids: Sequence[str]) -> list[sqlite3.Row]:
    columns = ", ".join(
        f"substr({n}, 1, {READ}) AS {n}, length(CAST({n} AS BLOB)) AS {n}_size" for n in _VALUES
    )
    return tx.all(
        f"SELECT step_id, {columns} FROM steps WHERE step_id IN ({marks(step_ids)})", *step_ids
    )


def execution_version(tx: Transaction, execution_id: str) -> tuple[Any, ...]:
    """Return what changes whenever an execution does.

    Raises:
        NotFoundError: there is no such execution.
    """
    row = tx.one(
        "SELECT e.status, e.last_event, count(s.step_id), max(s.submitted_at) FROM executions e"
        " LEFT JOIN submissions s ON s.execution_id = e.id WHERE e.id = ? GROUP BY e.id",
        execution_id,
    )
    if row is None:
        raise refusals.not_found("execution", execution_id)
    waiting = tx.one(
        "SELECT max(seq), max(attempt), max(acked) FROM dispatches WHERE execution_id = ?",
        execution_id,
    )
    return (*row, *(waiting or ()))
