"""What a kernel does, across all executions, for whoever looks on."""

from __future__ import annotations

from rebuno_sync.kernel import events
from rebuno_sync.kernel.store import Store, Transaction
from rebuno_sync.kernel.views import timestamp
from rebuno_sync.wire import Event

_PAGE = 1000


class Activity:
    """The events of every execution from now on, in the order in which they were recorded.

    It holds nothing open: whoever does not read it costs nothing.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        with store.read() as tx:
            self._position = _last(tx)

    def read(self) -> list[tuple[str, Event]]:
        """Return what was recorded since the last call: agents and events, at most 1000.

        Raises:
            StoreError: the kernel has been stopped.
        """
        with self._store.read() as tx:
            # Where the newest were deleted, their positions are given out again.
            self._position = min(self._position, _last(tx))
            rows = tx.all(
                "SELECT events.rowid AS position, events.*, executions.agent_id FROM events"
                " JOIN executions ON executions.id = events.execution_id"
                " WHERE events.rowid > ? ORDER BY events.rowid LIMIT ?",
                self._position,
                _PAGE,
            )
        if rows:
            self._position = rows[-1]["position"]
        return [
            (
                row["agent_id"],
                Event(
                    event_seq=row["event_seq"],
                    type=row["type"],
                    execution_id=row["execution_id"],
                    payload=events.read_payload(row["payload"]),
                    occurred_at=timestamp(row["occurred_at"]),
                ),
            )
            for row in rows
        ]


def _last(tx: Transaction) -> int:
    row = tx.one("SELECT max(rowid) AS position FROM events")
    return 0 if row is None or row["position"] is None else int(row["position"])
