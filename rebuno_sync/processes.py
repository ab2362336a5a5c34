"""What the agents of one process hold there, and their common end."""

from __future__ import annotations

import atexit
import os
import threading
import time
import weakref
from collections.abc import Callable

from .forks import after_fork
from .workers import Workers


class Part:
    """What one agent holds in this process; a fork begins with a fresh one.

    Args:
        workers: its dispatches.
        shutdown_timeout: how long they may take to end with the process, in seconds.
    """

    def __init__(self, workers: Workers, shutdown_timeout: float) -> None:
        self.pid = os.getpid()
        self.workers = workers
        self.shutdown_timeout = shutdown_timeout
        self.metadata_sent = threading.Event()


class Process:
    """What all agents hold in this process; a fork begins with a fresh one."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._parts: weakref.WeakSet[Part] = weakref.WeakSet()
        # A plain attribute: a signal handler may set it while this thread holds any lock.
        self.refusing = False
        self._registered = False
        self._drained = False

    def part(self, held: Callable[[], Part | None], make: Callable[[], Part]) -> Part:
        """Return the part of an agent that it holds already, or make the one of this process.

        Args:
            held: tells the part that the agent holds, whichever process made it.
            make: makes a part and has the agent hold it; called by one thread alone.
        """
        with self._lock:
            part = held()
            if part is None or part.pid != os.getpid():
                part = make()
                self._add(part)
            return part

    def _add(self, part: Part) -> None:
        if not self._registered:
            self._registered = True
            # Worker threads are daemons, so that a hung handler cannot hold up the end of the
            # process; here is where those that do end get their time. It must come before
            # concurrent.futures refuses new work, which handlers may need to get to their end.
            register = getattr(threading, "_register_atexit", atexit.register)
            try:
                register(self.drain)
            except RuntimeError:  # the process is already ending
                part.workers.refuse()
        self._parts.add(part)

    def drain(self, limit: float | None = None) -> bool:
        """Close every agent at the end of the process, all within the same seconds, once."""
        if self is not _process or self._drained:
            return True
        self._drained = True
        begin = time.monotonic()
        self.refusing = True
        parts = list(self._parts)
        for part in parts:
            part.workers.refuse()
        done = True
        for part in parts:
            seconds = min(part.shutdown_timeout, part.shutdown_timeout if limit is None else limit)
            done &= part.workers.close(max(0.0, begin + seconds - time.monotonic()))
        return done


_process = Process()


def this_process() -> Process:
    """Return what is held in the process that asks."""
    return _process


def refuse_dispatches() -> None:
    """Have every agent of this process answer 503 from now on; safe in a signal handler."""
    _process.refusing = True


def drain(limit: float | None = None) -> bool:
    """Close every agent of this process: each gets its ``shutdown_timeout``, all at once.

    Args:
        limit: the longest that this may take, in seconds.

    Returns:
        Whether every handler ended in time.
    """
    return _process.drain(limit)


@after_fork
def _renew() -> None:
    global _process
    _process = Process()
