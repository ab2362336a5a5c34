"""One runner for each delivery among the processes of a machine (PROTOCOL 2, 6).

The kernel counts a step's occurrence within one attempt. Were the same delivery run by two worker
processes, as happens when a proxy between kernel and agent sends a request twice, the second
would submit each step as its second occurrence, and every effect would happen twice. The kernel
cannot tell the two apart; so the processes of a machine agree among themselves. The first one to
enter a delivery in a small file that they share runs it, and each other one leaves it alone, also
after the first has died: the attempt is spent, and the kernel sends the next one.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import stat
import struct
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from .wire import Dispatch

log = logging.getLogger(__name__)

DIRECTORY_VARIABLE = "REBUNO_CLAIMS_DIR"

# The file is a table of fixed size, so nothing ever has to be tidied up. A dispatch belongs to
# one bucket, and the oldest entry of a full bucket makes way: 65536 entries are what a machine
# takes in ten minutes at a hundred dispatches a second, while a repeat comes within seconds.
_BUCKETS = 8192
_SLOTS = 8
#: Of one dispatch: its digest, the newest attempt, when that was entered (Unix seconds).
_ENTRY = struct.Struct("<16sQd")
#: A failure that lasts is logged no more often than this, in seconds.
_QUIET_SECONDS = 60.0
_BUCKET_BYTES = _SLOTS * _ENTRY.size


class Claims:
    """The deliveries of one agent that processes of this machine have begun.

    Args:
        agent_id: the agent's id.
        kernel_url: where its kernel is; dispatches of two kernels are never the same.
        directory: where the file lies; by default what ``REBUNO_CLAIMS_DIR`` names, and else a
            directory of this user among the temporary files.

    Where no file can be shared, since there is no directory that this user alone writes to or the
    disk is full, every claim is granted: an agent that takes nothing would be worse than one that
    a repeated delivery can hurt. The log says so, and each delivery is claimed anew.
    """

    def __init__(self, agent_id: str, kernel_url: str, directory: Path | None = None) -> None:
        self._directory = directory or claims_directory()
        agent = hashlib.sha256(agent_id.encode()).hexdigest()[:32]
        self._file = self._directory / f"claims-{agent}"
        self._kernel_url = kernel_url
        self._no_locks = False
        self._failed_at: float | None = None

    def take(self, dispatch: Dispatch) -> bool:
        """Claim a delivery for this process; tell whether no process has had it before.

        A delivery without an attempt, from a generation 1 kernel, is always granted: a repeat
        looks like the next attempt there.
        """
        attempt = dispatch.dispatch_attempt
        if attempt is None or self._no_locks:
            return True
        name = f"{self._kernel_url}\n{dispatch.dispatch_id}".encode()
        digest = hashlib.sha256(name).digest()
        bucket = int.from_bytes(digest[16:20], "little") % _BUCKETS
        try:
            with self._locked() as file:
                granted = self._enter(file, bucket * _BUCKET_BYTES, digest[:16], attempt)
        except ImportError as exc:  # no POSIX locks: nothing here will change that
            self._no_locks = True
            self._note_failure(exc)
            return True
        except OSError as exc:
            self._note_failure(exc)
            return True
        if self._failed_at is not None:
            self._failed_at = None
            log.warning("deliveries are claimed among the processes of this machine again")
        return granted

    def _note_failure(self, exc: Exception) -> None:
        """Say in the log what is wrong, but not with each delivery."""
        now = time.monotonic()
        if self._failed_at is not None and now - self._failed_at < _QUIET_SECONDS:
            return
        self._failed_at = now
        log.warning(
            "deliveries are not claimed among the processes of this machine, so one that "
            "reaches two of them runs twice: %s. %s",
            exc,
            f"{DIRECTORY_VARIABLE} names the directory"
            if os.environ.get(DIRECTORY_VARIABLE)
            else f"{DIRECTORY_VARIABLE} can name another directory",
        )

    def _enter(self, file: int, offset: int, digest: bytes, attempt: int) -> bool:
        found = os.pread(file, _BUCKET_BYTES, offset).ljust(_BUCKET_BYTES, b"\0")
        entries = list(_ENTRY.iter_unpack(found))
        slot = next((n for n, entry in enumerate(entries) if entry[0] == digest), None)
        if slot is None:
            slot = min(range(_SLOTS), key=lambda n: entries[n][2])
        elif entries[slot][1] >= attempt:
            return False
        entry = _ENTRY.pack(digest, attempt, time.time())
        os.pwrite(file, entry, offset + slot * _ENTRY.size)
        return True

    @contextlib.contextmanager
    def _locked(self) -> Iterator[int]:
        """Open the file alone; a process that dies meanwhile lets go of it."""
        import fcntl

        self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        require_private(self._directory)
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        file = os.open(self._file, flags, 0o600)
        try:
            # Of this opening, not of the process: it holds off other threads too.
            fcntl.flock(file, fcntl.LOCK_EX)
            yield file
        finally:
            os.close(file)


def claims_directory() -> Path:
    """Return where the files lie, unless an agent is told otherwise; it may not be there yet."""
    named = os.environ.get(DIRECTORY_VARIABLE)
    if named:
        # Whoever named it may have put a link there; in the place beneath, nobody may.
        return Path(named).resolve()
    user = os.getuid() if hasattr(os, "getuid") else "user"
    return Path(tempfile.gettempdir()) / f"rebuno-sync-{user}"


def require_private(directory: Path) -> None:
    """Refuse a directory in which somebody else could put another file in the place of ours.

    Raises:
        OSError: it is none, belongs to another user, or others may write to it.
    """
    found = directory.lstat()
    if not stat.S_ISDIR(found.st_mode):
        raise NotADirectoryError(f"{directory} is no directory")
    if found.st_uid != os.getuid():
        raise PermissionError(
            f"{directory} belongs to user {found.st_uid}, and this process runs as {os.getuid()}"
        )
    if found.st_mode & 0o022:
        mode = stat.S_IMODE(found.st_mode)
        raise PermissionError(f"others may write to {directory} (mode {mode:o}); chmod 700 it")
