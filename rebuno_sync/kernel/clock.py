"""The kernel's clock: wall time that never goes back, and that tests can move."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable

#: How much slower the time goes while it is ahead of the machine's.
_SLOWER = 0.1
#: The machine's clock was set forward when it gained more than this many seconds at once.
_LEAP = 1.0


class Clock:
    """Wall-clock seconds, moved forward by whatever :meth:`advance` was told.

    When the machine's clock is set back, this one goes on from where it was, a little slower
    until the two agree: a lease or a pause that had two seconds left has two seconds left. When
    the machine's is set forward, this one follows, and what was due by then is due.

    Leases, approvals, rate limits, back-offs and time stamps follow it. The time stamps of
    request signatures do not: those are held against the machine's own clock.

    Args:
        source: the time before it was moved, in seconds since the Unix epoch.
    """

    def __init__(self, source: Callable[[], float] = time.time) -> None:
        self._source = source
        self._lock = threading.Lock()
        self._moved = 0.0
        self._ahead = 0.0
        self._last = (-math.inf, time.monotonic())
        self._listeners: list[Callable[[], None]] = []

    def now(self) -> float:
        """Return the time, in seconds since the Unix epoch."""
        with self._lock:
            return self._now()

    def not_before(self, seconds: float) -> None:
        """Go on from ``seconds`` since the Unix epoch if it is earlier by this clock."""
        with self._lock:
            self._ahead += max(0.0, seconds - self._now())

    def _now(self) -> float:
        wall, elapsed = self._source(), time.monotonic()
        last_wall, last_elapsed = self._last
        self._last = wall, elapsed
        if wall < last_wall:
            self._ahead += last_wall - wall
        elif self._ahead > 0:
            passed = wall - last_wall
            gained = passed - (elapsed - last_elapsed)
            self._ahead -= gained if gained > _LEAP else passed * _SLOWER
            self._ahead = max(0.0, self._ahead)
        return wall + self._ahead + self._moved

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
