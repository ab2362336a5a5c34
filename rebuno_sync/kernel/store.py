"""The kernel's database: one door for writing, others for reading, one kernel per file."""

from __future__ import annotations

import contextlib
import os
import sqlite3
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any

from rebuno_sync.errors import RebunoError
from rebuno_sync.kernel import disk, schema
from rebuno_sync.kernel.clock import Clock

_BUSY_SECONDS = 10.0
#: For how long a change that failed says that the next one would, in seconds.
_FAILING_SECONDS = 15.0


class StoreError(RebunoError):
    """The database cannot be opened, read or written, or is closed; the message says why."""


class Transaction:
    """An open transaction, or a reader.

    Attributes:
        now: the clock when it began, in seconds since the Unix epoch.
    """

    def __init__(self, connection: sqlite3.Connection, now: float) -> None:
        self._connection = connection
        self.now = now
        self.queue_changed = False

    @property
    def is_lost(self) -> bool:
        """Whether SQLite has rolled the transaction back by itself, as it does on a full disk."""
        return not self._connection.in_transaction

    def run(self, sql: str, *parameters: Any) -> int:
        """Execute a statement; return how many rows it changed."""
        return self._connection.execute(sql, parameters).rowcount

    def one(self, sql: str, *parameters: Any) -> sqlite3.Row | None:
        """Return the first row, or ``None``."""
        row: sqlite3.Row | None = self._connection.execute(sql, parameters).fetchone()
        return row

    def all(self, sql: str, *parameters: Any) -> list[sqlite3.Row]:
        """Return all rows."""
        return self._connection.execute(sql, parameters).fetchall()

    def insert(self, table: str, row: dict[str, Any]) -> None:
        """Insert ``row``, a value for each column."""
        marks = ",".join("?" * len(row))
        self._connection.execute(
            f"INSERT INTO {table} ({','.join(row)}) VALUES ({marks})", tuple(row.values())
        )

    def insert_many(self, sql: str, rows: Sequence[tuple[Any, ...]]) -> None:
        """Execute one statement for each row."""
        self._connection.executemany(sql, rows)


class Store:
    """A kernel's database in a file, or in memory.

    Writes go through one connection, one transaction at a time. WAL lets readers go on
    meanwhile, and what was committed survives the death of the process. A file belongs to one
    kernel: the lock beside it goes with the process that held it, however that ends.

    Args:
        path: the SQLite file, made when it is not there; ``None`` for memory.
        clock: tells each transaction the time.

    Attributes:
        on_queue: called after a commit that left something due sooner than before.

    Raises:
        StoreError: the file is in use by another kernel or cannot be opened.
        SchemaError: the file was written by a newer kernel.
    """

    def __init__(self, path: str | os.PathLike[str] | None, clock: Clock) -> None:
        self.on_queue: Callable[[], None] = lambda: None
        # As it really is: a link to the same file is the same file to another kernel.
        self._path = None if path is None else Path(path).resolve()
        self._clock = clock
        self._write_lock = threading.Lock()
        self._readers: list[sqlite3.Connection] = []
        self._readers_lock = threading.Lock()
        self._closed = False
        # When a change last failed, and how.
        self._failure: tuple[float, StoreError] | None = None
        self._lock_file = None if self._path is None else _lock(self._path)
        try:
            with self._in_words():
                self._writer = self._connect()
                schema.migrate(self._writer)
                self._check_writable()
        except BaseException as exc:
            self.close()
            if isinstance(exc, sqlite3.Error):
                raise StoreError(f"cannot open {self._path} as a database: {exc}") from exc
            raise

    def _connect(self) -> sqlite3.Connection:
        connection = sqlite3.connect(
            ":memory:" if self._path is None else self._path,
            timeout=_BUSY_SECONDS,
            isolation_level=None,
            check_same_thread=False,
            cached_statements=256,
        )
        connection.row_factory = sqlite3.Row
        if self._path is not None:
            try:
                connection.execute("PRAGMA journal_mode = WAL")
                connection.execute("PRAGMA synchronous = NORMAL")
            except BaseException:
                connection.close()
                raise
        return connection

    def _check_writable(self) -> None:
        # SQLite opens what may only be read, and says so at the first change.
        self._writer.execute("BEGIN IMMEDIATE")
        self._writer.execute("UPDATE migrations SET name = name WHERE position = 0")
        self._writer.execute("ROLLBACK")

    @contextlib.contextmanager
    def write(self) -> Iterator[Transaction]:
        """Open the one write transaction; commit at the end, roll back on any exception.

        Raises:
            StoreError: it cannot be written, and nothing of it was.
        """
        try:
            with self._write_lock, self._in_words():
                self._check_open()
                self._writer.execute("BEGIN IMMEDIATE")
                transaction = Transaction(self._writer, self._clock.now())
                try:
                    yield transaction
                    self._writer.execute("COMMIT")
                except BaseException:
                    if self._writer.in_transaction:
                        self._writer.execute("ROLLBACK")
                    raise
        except StoreError as exc:
            # Kept though the next one may go well: on a full disk a small change finds a place.
            self._failure = (time.monotonic(), exc)
            raise
        if transaction.queue_changed:
            self.on_queue()

    def check(self) -> None:
        """See whether changes can be made: whether each could that was tried lately.

        Raises:
            StoreError: they cannot.
        """
        self._check_open()
        failure = self._failure
        if failure is not None and time.monotonic() - failure[0] < _FAILING_SECONDS:
            raise StoreError(str(failure[1]))

    @contextlib.contextmanager
    def read(self) -> Iterator[Transaction]:
        """Open a reader that sees one state of the database throughout.

        Raises:
            StoreError: it cannot be read.
        """
        if self._path is None:  # a database in memory lives in one connection
            with self._write_lock, self._in_words():
                self._check_open()
                yield Transaction(self._writer, self._clock.now())
            return
        with self._in_words():
            connection = self._borrow()
            try:
                connection.execute("BEGIN")
                yield Transaction(connection, self._clock.now())
            finally:
                if connection.in_transaction:
                    connection.execute("ROLLBACK")
                self._give_back(connection)

    @contextlib.contextmanager
    def _in_words(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as exc:
            meaning = disk.words(exc, self._path)
            if meaning is None:
                raise
            raise StoreError(meaning) from exc

    def _borrow(self) -> sqlite3.Connection:
        with self._readers_lock:
            self._check_open()
            if self._readers:
                return self._readers.pop()
        return self._connect()

    def _give_back(self, connection: sqlite3.Connection) -> None:
        with self._readers_lock:
            if not self._closed:
                self._readers.append(connection)
                return
        connection.close()

    def _check_open(self) -> None:
        if self._closed:
            raise StoreError("the kernel has been stopped")

    def close(self) -> None:
        """Close the database once the transaction in progress has ended; safe to repeat."""
        with self._write_lock, self._readers_lock:
            if self._closed:
                return
            self._closed = True
            for reader in self._readers:
                reader.close()
            writer = getattr(self, "_writer", None)
            if writer is not None:
                writer.close()
            if self._lock_file is not None:
                self._lock_file.close()


def _private(path: str | os.PathLike[str], flags: int) -> int:
    return os.open(path, flags, 0o600)


def _lock(path: Path) -> IO[bytes]:
    lock_path = path.with_name(path.name + ".lock")
    if not path.parent.is_dir():
        raise StoreError(f"cannot open {path}: there is no directory {path.parent}; make it first")
    if path.is_dir():
        raise StoreError(f"{path} is a directory; name a file in it")
    if path.exists() and not disk.may_write(path):
        raise StoreError(
            f"{path} cannot be written; let this user write it and the directory, or start on"
            " another file"
        )
    try:
        file = open(lock_path, "ab", opener=_private)  # noqa: SIM115  open as long as the store
    except OSError as exc:
        raise StoreError(f"cannot open {lock_path}: {exc.strerror}") from exc
    try:
        if sys.platform == "win32":
            import msvcrt

            file.seek(0)
            msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)
        else:
            import fcntl

            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as exc:
        file.close()
        raise StoreError(
            f"{path} is in use by another kernel; stop that one, or start this one on another file"
        ) from exc
    if not path.exists():
        # SQLite would make it for everybody to read, and the secrets of agents will be in it.
        try:
            os.close(_private(path, os.O_CREAT | os.O_EXCL | os.O_RDWR))
        except OSError as exc:
            file.close()
            raise StoreError(f"cannot make {path}: {exc.strerror}") from exc
    return file
