"""The machine that a process believes to be on, as far as a test moves it: its clock, its disk.

The process calls :func:`live_on` before it imports anything that keeps ``time.time``; the test
holds a :class:`Machine` on the same file, and several processes may live on one machine.
"""

from __future__ import annotations

import functools
import mmap
import os
import sqlite3
import struct
import time
from pathlib import Path
from typing import Any

# Each on its own, since more than one process writes.
_OFFSET, _FULL, _TIMES = (struct.Struct("d"), 0), (struct.Struct("?"), 8), (struct.Struct("i"), 12)
_SIZE = 16


class Machine:
    """A clock that can be set, and a disk that can be full.

    Args:
        path: the file that those who live on it share; made when it is not there.
    """

    def __init__(self, path: Path) -> None:
        file = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        os.ftruncate(file, _SIZE)
        self._memory = mmap.mmap(file, _SIZE)
        os.close(file)

    def _read(self, field: tuple[struct.Struct, int]) -> Any:
        layout, at = field
        return layout.unpack_from(self._memory, at)[0]

    def _write(self, field: tuple[struct.Struct, int], value: Any) -> None:
        layout, at = field
        layout.pack_into(self._memory, at, value)

    @property
    def offset(self) -> float:
        """How far its clock is off, in seconds."""
        return float(self._read(_OFFSET))

    def set_clock(self, offset: float) -> None:
        """Set its clock, to so many seconds off."""
        self._write(_OFFSET, offset)

    @property
    def is_full(self) -> bool:
        """Whether its disk is full."""
        return bool(self._read(_FULL))

    def fill(self, full: bool) -> None:
        """Fill its disk, or make space again."""
        self._write(_FULL, full)

    @property
    def times_full(self) -> int:
        """How often SQLite has said that the disk is full."""
        return int(self._read(_TIMES))

    def note_full(self) -> None:
        """Count that SQLite has said so."""
        self._write(_TIMES, self.times_full + 1)


def live_on(path: Path) -> None:
    """Make this process, and what it forks, live on a machine: its clock and SQLite's space."""
    machine = Machine(path)
    real = time.time
    time.time = lambda: real() + machine.offset
    connection = functools.partial(_Connection, machine)
    sqlite3.connect = functools.partial(sqlite3.connect, factory=connection)  # type: ignore[assignment]


class _Connection(sqlite3.Connection):
    """Has no page more than it has while the disk is full; the refusal is SQLite's own."""

    def __init__(self, machine: Machine, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._machine = machine

    def execute(self, sql: str, *args: Any) -> sqlite3.Cursor:
        if sql == "BEGIN IMMEDIATE":
            # One page is less than there are, which stands for as many as there are.
            most = 1 if self._machine.is_full else 2**31 - 2
            super().execute(f"PRAGMA max_page_count = {most}")
        try:
            return super().execute(sql, *args)
        except sqlite3.OperationalError as exc:
            self._note(exc)
            raise

    def executemany(self, sql: str, *args: Any) -> sqlite3.Cursor:
        try:
            return super().executemany(sql, *args)
        except sqlite3.OperationalError as exc:
            self._note(exc)
            raise

    def _note(self, exc: sqlite3.OperationalError) -> None:
        if "disk is full" in str(exc):
            self._machine.note_full()
