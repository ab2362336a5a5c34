"""The tables of the embedded kernel, as named migrations in order."""

from __future__ import annotations

import sqlite3
import time
from typing import Final

from rebuno_sync.errors import RebunoError


class SchemaError(RebunoError):
    """The database does not belong to this version of the kernel."""


#: Never edit an entry that was released; add one.
MIGRATIONS: Final[tuple[tuple[str, tuple[str, ...]], ...]] = (
    (
        "0001_core",
        (
            """
            CREATE TABLE agents (
                id TEXT PRIMARY KEY,
                webhook_url TEXT NOT NULL,
                secret TEXT NOT NULL,
                lease_timeout REAL,
                policy TEXT,
                description TEXT,
                input_schema TEXT,
                output_schema TEXT,
                registered_at REAL NOT NULL
            ) WITHOUT ROWID
            """,
            """
            CREATE TABLE executions (
                seq INTEGER PRIMARY KEY AUTOINCREMENT,
                id TEXT NOT NULL UNIQUE,
                agent_id TEXT NOT NULL,
                status TEXT NOT NULL,
                input TEXT NOT NULL,
                output TEXT,
                state TEXT,
                failure_reason TEXT,
                session TEXT,
                parent_execution_id TEXT,
                idempotency_key TEXT,
                spawned_by TEXT,
                on_behalf_of TEXT,
                last_event INTEGER NOT NULL,
                created_at REAL NOT NULL,
                updated_at REAL NOT NULL
            )
            """,
            "CREATE INDEX executions_by_agent ON executions (agent_id, seq)",
            """
            CREATE INDEX executions_by_session ON executions (session, seq)
            WHERE session IS NOT NULL
            """,
            """
            CREATE UNIQUE INDEX executions_by_key ON executions (agent_id, idempotency_key)
            WHERE idempotency_key IS NOT NULL
            """,
            """
            CREATE TABLE events (
                execution_id TEXT NOT NULL,
                event_seq INTEGER NOT NULL,
                type TEXT NOT NULL,
                payload TEXT NOT NULL,
                occurred_at REAL NOT NULL,
                PRIMARY KEY (execution_id, event_seq)
            )
            """,
            """
            CREATE TABLE steps (
                seq INTEGER PRIMARY KEY AUTOINCREMENT,
                step_id TEXT NOT NULL UNIQUE,
                execution_id TEXT NOT NULL,
                kind TEXT NOT NULL,
                target TEXT NOT NULL,
                args TEXT NOT NULL,
                args_hash TEXT NOT NULL,
                occurrence INTEGER NOT NULL,
                idempotency TEXT NOT NULL,
                status TEXT NOT NULL,
                result TEXT,
                error TEXT,
                reason TEXT,
                rule_id TEXT,
                started_at REAL,
                completed_at REAL
            )
            """,
            "CREATE INDEX steps_by_execution ON steps (execution_id, seq)",
            """
            CREATE INDEX steps_indeterminate ON steps (execution_id, args_hash)
            WHERE reason = 'indeterminate'
            """,
            """
            CREATE TABLE occurrences (
                execution_id TEXT NOT NULL,
                kind TEXT NOT NULL,
                target TEXT NOT NULL,
                args_hash TEXT NOT NULL,
                next INTEGER NOT NULL,
                PRIMARY KEY (execution_id, args_hash, target, kind)
            ) WITHOUT ROWID
            """,
            """
            CREATE TABLE dispatches (
                seq INTEGER PRIMARY KEY AUTOINCREMENT,
                id TEXT NOT NULL UNIQUE,
                execution_id TEXT NOT NULL,
                agent_id TEXT NOT NULL,
                state TEXT NOT NULL,
                attempt INTEGER NOT NULL DEFAULT 0,
                acked INTEGER NOT NULL DEFAULT 0,
                failures INTEGER NOT NULL DEFAULT 0,
                available_at REAL NOT NULL,
                lease_timeout REAL,
                lease_deadline REAL
            )
            """,
            "CREATE INDEX dispatches_by_execution ON dispatches (execution_id, seq)",
            """
            CREATE INDEX dispatches_pending ON dispatches (available_at, seq)
            WHERE state = 'pending'
            """,
            """
            CREATE INDEX dispatches_in_flight ON dispatches (lease_deadline)
            WHERE state = 'in_flight'
            """,
            """
            CREATE TABLE approvals (
                seq INTEGER PRIMARY KEY AUTOINCREMENT,
                id TEXT NOT NULL UNIQUE,
                step_id TEXT NOT NULL,
                execution_id TEXT NOT NULL,
                status TEXT NOT NULL,
                approvers TEXT NOT NULL,
                message TEXT NOT NULL,
                timeout_at REAL,
                decided_by TEXT,
                decided_at REAL,
                rationale TEXT,
                created_at REAL NOT NULL
            )
            """,
            "CREATE INDEX approvals_by_step ON approvals (step_id)",
            """
            CREATE INDEX approvals_pending ON approvals (timeout_at)
            WHERE status = 'pending'
            """,
            """
            CREATE TABLE buckets (
                scope TEXT NOT NULL,
                scope_id TEXT NOT NULL,
                rule_id TEXT NOT NULL,
                tokens REAL NOT NULL,
                counted_at REAL NOT NULL,
                PRIMARY KEY (scope, scope_id, rule_id)
            ) WITHOUT ROWID
            """,
            """
            CREATE TABLE parked (
                execution_id TEXT NOT NULL,
                step_id TEXT NOT NULL,
                PRIMARY KEY (execution_id, step_id)
            ) WITHOUT ROWID
            """,
        ),
    ),
    (
        "0002_submissions",
        (
            """
            CREATE TABLE submissions (
                execution_id TEXT NOT NULL,
                dispatch_seq INTEGER NOT NULL,
                attempt INTEGER NOT NULL,
                step_id TEXT NOT NULL,
                kind TEXT NOT NULL,
                target TEXT NOT NULL,
                decision TEXT NOT NULL,
                submitted_at REAL NOT NULL,
                PRIMARY KEY (execution_id, dispatch_seq, attempt, step_id)
            ) WITHOUT ROWID
            """,
            "CREATE INDEX executions_by_status ON executions (status, seq)",
        ),
    ),
    (
        "0003_token_usage",
        (
            """
            CREATE TABLE token_usage (
                step_id TEXT PRIMARY KEY,
                execution_id TEXT NOT NULL,
                agent_id TEXT NOT NULL,
                rule_id TEXT NOT NULL,
                limited INTEGER NOT NULL,
                tokens INTEGER NOT NULL,
                used_at REAL NOT NULL
            ) WITHOUT ROWID
            """,
            """
            CREATE INDEX token_usage_by_execution
            ON token_usage (execution_id, rule_id, used_at, tokens)
            """,
            """
            CREATE INDEX token_usage_by_agent
            ON token_usage (rule_id, agent_id, used_at, tokens)
            """,
            "CREATE INDEX token_usage_by_rule ON token_usage (rule_id, used_at, tokens)",
        ),
    ),
    (
        "0004_deadlines",
        (
            "ALTER TABLE executions ADD COLUMN deadline_at REAL",
            """
            CREATE INDEX executions_by_deadline ON executions (deadline_at)
            WHERE deadline_at IS NOT NULL AND status IN ('pending', 'running', 'blocked')
            """,
        ),
    ),
    (
        "0005_retention",
        (
            "CREATE TABLE remains (execution_id TEXT PRIMARY KEY) WITHOUT ROWID",
            """
            CREATE INDEX executions_ended ON executions (updated_at)
            WHERE status IN ('completed', 'failed', 'cancelled')
            """,
        ),
    ),
    (
        "0006_api_keys",
        (
            """
            CREATE TABLE api_keys (
                id TEXT PRIMARY KEY,
                name TEXT NOT NULL,
                digest BLOB NOT NULL,
                scopes TEXT NOT NULL,
                created_at REAL NOT NULL
            ) WITHOUT ROWID
            """,
        ),
    ),
)


def migrate(connection: sqlite3.Connection) -> None:
    """Bring the database up to this version; each migration is one transaction.

    Args:
        connection: in autocommit mode (``isolation_level=None``).

    Raises:
        SchemaError: the database was written by a newer kernel, or is not a kernel's at all.
    """
    if _foreign(connection):
        raise SchemaError("this SQLite file holds tables of something else, not of a Rebuno kernel")
    connection.execute(
        "CREATE TABLE IF NOT EXISTS migrations"
        " (position INTEGER PRIMARY KEY, name TEXT NOT NULL, applied_at REAL NOT NULL)"
    )
    applied = [r[0] for r in connection.execute("SELECT name FROM migrations ORDER BY position")]
    known = [name for name, _ in MIGRATIONS]
    if applied != known[: len(applied)]:
        strange = next(n for i, n in enumerate(applied) if known[i : i + 1] != [n])
        raise SchemaError(
            f"the database was written by another version of rebuno-sync: it has the migration"
            f" {strange!r}, and this version knows {known[-1]!r} as its last; upgrade rebuno-sync,"
            f" or start on another file"
        )
    for position in range(len(applied), len(MIGRATIONS)):
        name, statements = MIGRATIONS[position]
        connection.execute("BEGIN IMMEDIATE")
        try:
            for statement in statements:
                connection.execute(statement)
            connection.execute(
                "INSERT INTO migrations VALUES (?, ?, ?)", (position, name, time.time())
            )
        except BaseException:
            connection.execute("ROLLBACK")
            raise
        connection.execute("COMMIT")


def _foreign(connection: sqlite3.Connection) -> bool:
    rows = connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")
    tables = {row[0] for row in rows}
    return bool(tables) and "migrations" not in tables
