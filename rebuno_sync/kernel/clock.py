"""The kernel's clock: wall time that tests can move."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable


class Clock:
    """Wall-clock seconds, moved forward by whatever :meth:`advance` was told.

    Leases, approvals, rate limits, back-offs and time stamps follow it. The time stamps of
    request signatures do not: those are held against the machine's own clock.

    Args:
        source: the time before it was moved, in seconds since the Unix epoch.
    """

    def __init__(self, source: Callable[[], float] = time.time) -> None:
        self._source = source
        self._lock = threading.Lock()
        self._moved = 0.0
        self._listeners: list[Callable[[], None]] = []

    def now(self) -> float:
        """Return the time, in seconds since the Unix epoch."""
        return self._source() + self._moved

    def advance(self, seconds: float) -> None:
        """Move the clock forward; what became due has happened when this returns.

        Raises:
            ValueError: ``seconds`` is negative.
        """
        if seconds < 0:
            raise ValueError(f"the clock only moves forward, got {seconds!r} seconds")
        with self._lock:
            self._moved += seconds
            listeners = list(self._listeners)
        for listener in listeners:
            listener()

    def subscribe(self, listener: Callable[[], None]) -> None:
        """Have ``listener`` called, in the mover's thread, whenever the clock was moved."""
        with self._lock:
            self._listeners.append(listener)

    def unsubscribe(self, listener: Callable[[], None]) -> None:
        """Undo :meth:`subscribe`."""
        with self._lock:
            self._listeners.remove(listener)
