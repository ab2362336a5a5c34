"""The lease of a dispatch, and the threads that keep leases alive (PROTOCOL 2, 4)."""

from __future__ import annotations

import contextlib
import heapq
import itertools
import logging
import threading
import time
from collections.abc import Callable

from . import observers
from .errors import APIError, ControlFlow, LeaseSuperseded, RebunoError, Terminated
from .wire import Dispatch

log = logging.getLogger(__name__)

#: What kernels that do not tell their lease time-out use, in seconds.
DEFAULT_TIMEOUT = 120.0
LONGEST_INTERVAL = 30.0
#: How many beats may be on their way at once.
MOST_THREADS = 8


def now() -> float:
    """Return the seconds of a clock that goes on while the machine sleeps, where there is one."""
    clock = getattr(time, "CLOCK_BOOTTIME", None)
    return time.monotonic() if clock is None else time.clock_gettime(clock)


class Lease:
    """The right of one attempt to act for an execution.

    Args:
        dispatch: what the webhook said.
        agent_id: whose lease it is, for whoever watches.

    Attributes:
        agent_id: the agent.
        execution_id: the execution.
        dispatch_id: the dispatch.
        attempt: its attempt; ``None`` for kernels of generation 1.
        timeout: how long the lease lasts after each renewal, in seconds.
        interval: how often it is renewed, in seconds.
        cancelled: set once the lease is lost or given up.
        paused: true while nothing that deserves the lease is running; no beat is sent then.
        reporting: true once the end of the execution is being reported, which is answered by
            itself; a beat that is refused then has come after it, or means no more than it does.
    """

    def __init__(self, dispatch: Dispatch, agent_id: str = "") -> None:
        self.agent_id = agent_id
        self.execution_id = dispatch.execution_id
        self.dispatch_id = dispatch.dispatch_id
        self.attempt = dispatch.dispatch_attempt
        told = dispatch.lease_timeout_seconds
        self.timeout = told or DEFAULT_TIMEOUT
        self.interval = min(told / 3, LONGEST_INTERVAL) if told else LONGEST_INTERVAL
        self.cancelled = threading.Event()
        self.paused = False
        self.reporting = False
        self._signal: ControlFlow | None = None
        self._renewed_at = now()

    def lose(self, signal: ControlFlow, why: str = "superseded") -> None:
        """Give the lease up; the first signal given is the one that stays.

        Args:
            signal: what ends the dispatch here.
            why: for whoever watches: ``superseded`` by a newer attempt that came here,
                ``refused`` by the kernel, ``unreachable`` kernel, ``lapsed`` while the process
                stood still, or ``shutdown``.
        """
        if self._signal is None:
            self._signal = signal
            if observers.installed:
                observers.tell("lease_lost", self.agent_id, why)
        self.cancelled.set()

    @property
    def signal(self) -> ControlFlow | None:
        """Why the lease was lost, or ``None`` while it is not."""
        return self._signal

    def renewed(self, at: float) -> None:
        """Note that the kernel has accepted the lease.

        Args:
            at: when it was asked to, by :func:`now`; its answer may have come much later.
        """
        self._renewed_at = max(self._renewed_at, at)

    def remaining(self) -> float:
        """Return the seconds until the kernel may give the execution to another attempt."""
        return self._renewed_at + self.timeout - now()

    def lapsed(self) -> ControlFlow | None:
        """Return what ends the dispatch when the lease may be another's by now.

        The process may have stood still since the kernel said that a body may run: stopped,
        swapped out, or with a machine that was moved. Meanwhile another attempt may have asked
        what became of the effect, and gone on with the answer that it never happened.
        """
        if self._signal is None and self.remaining() <= 0:
            return LeaseSuperseded("the lease ran out before the body could begin")
        return self._signal

    @property
    def ids(self) -> dict[str, object]:
        """What a log record says of it, where the logging thread is not of its dispatch."""
        return {"execution_id": self.execution_id, "dispatch_attempt": self.attempt}

    def __str__(self) -> str:
        attempt = "" if self.attempt is None else f" attempt {self.attempt}"
        return f"execution {self.execution_id} (dispatch {self.dispatch_id}{attempt})"


class Heartbeats:
    """Daemon threads that renew every lease they were given.

    They run only while there are leases. One thread waits for whatever is due next; before it
    sends a beat it leaves the watch to another, so that a beat that hangs delays no other lease.
    A beat that fails is logged and tried again well before the lease is due; one that the kernel
    refuses loses the lease, and a lost lease is never beaten again.

    Args:
        beat: renews one lease at the kernel within the given seconds, or raises.
        name: the name of the threads.
    """

    def __init__(self, beat: Callable[[Lease, float], None], name: str) -> None:
        self._beat = beat
        self._name = name
        self._changed = threading.Condition()
        self._due: list[tuple[float, int, Lease]] = []
        self._held: set[Lease] = set()
        self._order = itertools.count()
        self._threads = 0
        self._watched = False

    def add(self, lease: Lease) -> None:
        """Keep ``lease`` alive from now on.

        Raises:
            RuntimeError: the system gives no thread for it.
        """
        with self._changed:
            if not self._watched and self._threads < MOST_THREADS:
                self._start_thread()
            self._held.add(lease)
            self._schedule(lease, lease.interval)

    def remove(self, lease: Lease) -> None:
        """Let ``lease`` go."""
        with self._changed:
            self._held.discard(lease)
            self._changed.notify_all()

    def _schedule(self, lease: Lease, delay: float) -> None:
        heapq.heappush(self._due, (time.monotonic() + delay, next(self._order), lease))
        self._changed.notify_all()

    def _start_thread(self) -> None:
        threading.Thread(target=self._loop, name=self._name, daemon=True).start()
        self._threads += 1
        self._watched = True

    def _loop(self) -> None:
        while (lease := self._take()) is not None:
            delay = lease.interval if lease.paused else self._beat_once(lease)
            if not self._put_back(lease, delay):
                return

    def _take(self) -> Lease | None:
        """Wait for the next lease that is due, and leave the watch to another thread."""
        with self._changed:
            lease = self._next()
            self._watched = False
            if lease is None:
                self._threads -= 1
            elif len(self._held) > 1 and self._threads < MOST_THREADS:
                # None to be had, as while the interpreter ends: then this one comes back.
                with contextlib.suppress(RuntimeError):
                    self._start_thread()
            return lease

    def _put_back(self, lease: Lease, delay: float) -> bool:
        """Keep a lease for its next beat; tell whether this thread has the watch again."""
        with self._changed:
            if lease in self._held:
                self._schedule(lease, delay)
            if self._watched:
                self._threads -= 1
                return False
            self._watched = True
            return True

    def _next(self) -> Lease | None:
        """Wait for the next lease that is due; ``None`` once there is none left at all."""
        while self._held:
            while self._due and not self._is_alive(self._due[0][2]):
                heapq.heappop(self._due)
            wait = self._due[0][0] - time.monotonic() if self._due else None
            if wait is not None and wait <= 0:
                return heapq.heappop(self._due)[2]
            if self._held:
                self._changed.wait(wait)
        self._due.clear()
        return None

    def _is_alive(self, lease: Lease) -> bool:
        if lease.cancelled.is_set():
            self._held.discard(lease)
        return lease in self._held

    def _beat_once(self, lease: Lease) -> float:
        """Send one beat and return the seconds until the next."""
        try:
            # Another try must fit in before the lease is due, even when this one hangs.
            patience = min(max(1.0, lease.interval / 3), max(0.1, lease.remaining() / 2))
            self._beat(lease, patience)
        except RebunoError as exc:
            if lease not in self._held:
                return 0.0
            signal = refusal_of(exc)
            if signal is not None and lease.reporting:
                return lease.interval
            if signal is not None:
                log.warning("lease lost: %s: %s", lease, exc, extra=lease.ids)
                lease.lose(signal, "refused")
                return 0.0
            log.warning(
                "heartbeat failed, %.1f s of the lease left: %s: %s",
                lease.remaining(),
                lease,
                exc,
                extra=lease.ids,
            )
        except Exception:
            # One lease must never cost the others their beats.
            log.exception("heartbeat failed: %s", lease, extra=lease.ids)
        else:
            return lease.interval
        if observers.installed:
            observers.tell("heartbeat_failed", lease.agent_id)
        remaining = lease.remaining()
        if remaining <= 0:
            # A kernel that was away cannot have given it to another: asked for as before.
            return lease.interval
        return min(lease.interval, max(remaining / 4, lease.interval / 10))


def refusal_of(exc: RebunoError) -> ControlFlow | None:
    """Return the signal that a kernel's 409 stands for, if ``exc`` is one that ends a dispatch."""
    if isinstance(exc, APIError) and exc.status_code == 409:
        if exc.code == "execution_terminal":
            return Terminated()
        if exc.code == "lease_superseded":
            return LeaseSuperseded()
    return None
