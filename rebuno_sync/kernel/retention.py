"""Deletes executions that ended long enough ago, on a thread of its own.

An execution is gone for every reader in one transaction, which leaves a note of what is still to
be removed. That goes piece by piece, in transactions so small that nobody waits for them, and is
taken up again after a restart.
"""

from __future__ import annotations

import logging
import threading
from typing import Final

from rebuno_sync.kernel import budgets
from rebuno_sync.kernel.clock import Clock
from rebuno_sync.kernel.store import Store, StoreError, Transaction

_log = logging.getLogger(__name__)

#: Bounds the sleep, since the wall clock may be set while it sleeps.
_LONGEST_SLEEP = 5.0

#: The condition is that of the index, which holds these and nothing else.
_ENDED: Final = (
    "executions INDEXED BY executions_ended WHERE status IN ('completed', 'failed', 'cancelled')"
)
#: What is removed piece by piece: the key of each table, and how many rows one transaction takes.
#: Steps are few at a time, since each may hold megabytes.
_TABLES: Final = (
    ("events", "rowid", 200),
    ("steps", "rowid", 10),
    ("dispatches", "rowid", 200),
    ("submissions", "(execution_id, dispatch_seq, attempt, step_id)", 200),
)


class Retention:
    """Deletes what is old, from :meth:`start` to :meth:`stop`.

    Args:
        store: the database.
        clock: the time; when it is moved, what became old is gone before the move returns.
        retain: how long executions are kept after their end, in seconds.
    """

    def __init__(self, store: Store, clock: Clock, retain: float) -> None:
        self._store = store
        self._clock = clock
        self._retain = retain
        self._stopping = threading.Event()
        self._sweeping = threading.Lock()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Start the thread."""
        self._clock.subscribe(self.sweep)
        self._thread = threading.Thread(
            target=self._run, name="rebuno-kernel-retention", daemon=True
        )
        self._thread.start()

    def stop(self) -> None:
        """Stop after the piece in progress."""
        self._clock.unsubscribe(self.sweep)
        self._stopping.set()
        if self._thread is not None:
            self._thread.join()

    def sweep(self) -> None:
        """Delete everything that is old by now."""
        with self._sweeping:
            while not self._stopping.is_set() and self._step():
                pass

    def _run(self) -> None:
        failing = False
        pause = 0.0
        while not self._stopping.wait(pause):
            pause = _LONGEST_SLEEP
            try:
                self.sweep()
                with self._store.read() as tx:
                    due = _next_due(tx)
                    if due is not None:
                        pause = min(max(0.0, due + self._retain - tx.now), _LONGEST_SLEEP)
                failing = False
            except Exception as exc:
                if not failing and not self._stopping.is_set():
                    known = isinstance(exc, StoreError)
                    _log.error(
                        "old executions cannot be deleted; trying again: %s",
                        exc,
                        exc_info=None if known else exc,
                    )
                failing = True

    def _step(self) -> bool:
        """Remove one piece; tell whether there may be more."""
        with self._store.read() as tx:
            begun = _begun(tx)
            oldest = _next_due(tx)
            if begun is None and (oldest is None or oldest > tx.now - self._retain):
                return False
        with self._store.write() as tx:
            if begun is None:
                _begin(tx, tx.now - self._retain)
            else:
                _remove_piece(tx, begun)
        return True


def _next_due(tx: Transaction) -> float | None:
    row = tx.one(f"SELECT updated_at AS ended FROM {_ENDED} ORDER BY updated_at LIMIT 1")
    return None if row is None else float(row["ended"])


def _begun(tx: Transaction) -> str | None:
    row = tx.one("SELECT execution_id FROM remains LIMIT 1")
    return None if row is None else str(row["execution_id"])


def _begin(tx: Transaction, before: float) -> None:
    """Take one execution from every reader's view."""
    row = tx.one(
        f"SELECT id FROM {_ENDED} AND updated_at <= ? ORDER BY updated_at LIMIT 1",
        before,
    )
    if row is None:
        return
    tx.insert("remains", {"execution_id": row["id"]})
    budgets.fold(tx, row["id"])
    tx.run("DELETE FROM approvals WHERE execution_id = ?", row["id"])
    tx.run("DELETE FROM executions WHERE id = ?", row["id"])


def _remove_piece(tx: Transaction, execution_id: str) -> None:
    for table, key, most in _TABLES:
        columns = key.strip("()")
        removed = tx.run(
            f"DELETE FROM {table} WHERE {key} IN"
            f" (SELECT {columns} FROM {table} WHERE execution_id = ? LIMIT {most})",
            execution_id,
        )
        if removed:
            return
    tx.run("DELETE FROM remains WHERE execution_id = ?", execution_id)
