"""What SQLite's complaints about a file mean, and what can be done about them."""

from __future__ import annotations

import os
import sqlite3
from pathlib import Path
from typing import Final

#: Parts of SQLite's messages, which are what Python 3.10 tells the errors apart by.
_WORDS: Final = (
    (
        "database or disk is full",
        "there is no space left for {path}; nothing of this was recorded, and the kernel goes on"
        " as soon as there is space",
    ),
    (
        "disk I/O error",
        "{path} could not be read or written; is the disk full or gone, or a limit on the size of"
        " files reached? Nothing of this was recorded, and the kernel goes on once it can",
    ),
    (
        "readonly database",
        "{path} cannot be written; let this user write it, what is beside it (-wal, -shm) and"
        " the directory, or start on another file",
    ),
    (
        "unable to open database file",
        "{path} cannot be opened; it must be a file that this user may read and write, in a"
        " directory where this user may make files",
    ),
    (
        "file is not a database",
        "cannot open {path} as a database: the file is something else, or damaged; start on"
        " another file",
    ),
    (
        "malformed",
        "{path} is damaged; stop the kernel, and put back a copy of the file or start on another"
        " one (the sqlite3 shell's .recover reads what is left)",
    ),
    (
        "database is locked",
        "another program is writing {path} and does not come to an end",
    ),
)


def may_write(path: Path) -> bool:
    """Tell whether a file may be written, without opening it.

    SQLite would open one that may only be read, and leave files beside it that may only be read
    as well, even when the file itself has been mended. Opening and closing it here would end the
    locks that this process has on it.
    """
    return os.access(path, os.W_OK, effective_ids=os.access in os.supports_effective_ids)


def words(error: sqlite3.Error, path: Path | None) -> str | None:
    """Return what an error means; ``None`` where it is not about the file but about us."""
    text = str(error)
    for part, meaning in _WORDS:
        if part in text:
            return f"{meaning.format(path=path or 'the database in memory')} (SQLite: {text})"
    return None
