"""The dispatches that one agent holds in one process: queue, worker threads, orderly end.

Threads: one webhook request accepts a dispatch and returns at once; up to ``limit`` daemon
threads, started as they are needed and ended when idle, run them in the order of arrival; the
heartbeat thread renews the lease of each from its acceptance to its end.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import enum
import logging
import threading
import time
from collections.abc import Callable, Mapping

from . import observers
from .claims import Claims
from .errors import LeaseSuperseded
from .lease import Heartbeats, Lease
from .wire import Dispatch

log = logging.getLogger(__name__)

Scope = Callable[[], contextlib.AbstractContextManager[object]]
#: How long a worker thread waits for something to do before it ends, in seconds.
IDLE_SECONDS = 10.0
#: How many ended dispatches are remembered, to know a late repeat of one.
REMEMBERED = 4096
_NO_CARRIER: Mapping[str, str] = {}


class Acceptance(enum.Enum):
    """What became of a delivery."""

    TAKEN = enum.auto()
    REPEATED = enum.auto()
    #: Another process of this machine has it, or had it.
    CLAIMED = enum.auto()
    #: As many wait as may wait.
    FULL = enum.auto()
    CLOSING = enum.auto()


@dataclasses.dataclass(eq=False)
class Run:
    """One accepted dispatch.

    Attributes:
        dispatch: the body of the webhook.
        lease: its lease.
        scope: entered around the handler.
        carrier: what observers kept of the webhook's headers.
        accepted_at: when it was accepted, by ``time.monotonic``.
    """

    dispatch: Dispatch
    lease: Lease
    scope: Scope
    carrier: Mapping[str, str] = dataclasses.field(default_factory=dict)
    accepted_at: float = dataclasses.field(default_factory=time.monotonic)


class Workers:
    """Takes dispatches and runs each on a thread.

    Args:
        run: runs one dispatch from beginning to end; never raises an ``Exception``.
        heartbeats: keeps the leases of what is held here.
        name: what the threads are called.
        limit: how many dispatches run at once.
        queue_limit: how many may wait beyond those.
        claims: what other processes of this machine run; ``None`` when there are none.
        agent_id: whose dispatches they are, for whoever watches.
    """

    def __init__(
        self,
        run: Callable[[Run], None],
        heartbeats: Heartbeats,
        name: str,
        *,
        limit: int,
        queue_limit: int,
        claims: Claims | None = None,
        agent_id: str = "",
    ) -> None:
        self._run = run
        self._heartbeats = heartbeats
        self._name = name
        self._limit = limit
        self._queue_limit = queue_limit
        self._claims = claims
        self._agent_id = agent_id
        self._changed = threading.Condition()
        self._waiting: collections.deque[Run] = collections.deque()
        self._running: set[Run] = set()
        # By dispatch: what is held of it, and the newest attempt of one that has ended. The latter
        # are many, so nothing of their runs is kept.
        self._held: dict[str, Run] = {}
        self._ended: collections.OrderedDict[str, int | None] = collections.OrderedDict()
        self._threads = 0
        self._idle = 0
        self._started = 0
        self._closing = False

    def accept(
        self, dispatch: Dispatch, scope: Scope, carrier: Mapping[str, str] = _NO_CARRIER
    ) -> Acceptance:
        """Take a delivery, unless it repeats one that is or was held on this machine (PROTOCOL 2).

        Args:
            dispatch: the body of the webhook.
            scope: entered around the handler.
            carrier: what observers kept of the webhook's headers.

        Raises:
            RuntimeError: the system gives no thread for it; it is not held then.
        """
        with self._changed:
            if self._closing:
                return Acceptance.CLOSING
            if not self._is_newer(dispatch):
                return Acceptance.REPEATED
            before = self._held.get(dispatch.dispatch_id)
            if before is not None:
                self._end(before, f"attempt {dispatch.dispatch_attempt} has been dispatched")
            if len(self._waiting) + len(self._running) >= self._limit + self._queue_limit:
                return Acceptance.FULL
            # Last, since a delivery that is claimed and then refused would be spent.
            if self._claims is not None and not self._claims.take(dispatch):
                return Acceptance.CLAIMED
            run = Run(dispatch, Lease(dispatch, self._agent_id), scope, carrier)
            # The first beat is due within the interval, also while the dispatch waits.
            self._heartbeats.add(run.lease)
            self._waiting.append(run)
            # A thread that has been woken for an earlier one still counts as idle.
            if len(self._waiting) > self._idle and self._threads < self._limit:
                try:
                    self._start_thread()
                except RuntimeError:
                    if self._threads == 0:
                        self._waiting.remove(run)
                        self._heartbeats.remove(run.lease)
                        raise
            self._held[dispatch.dispatch_id] = run
            self._changed.notify()
            self._tell_load()
        return Acceptance.TAKEN

    def _is_newer(self, dispatch: Dispatch) -> bool:
        held = self._held.get(dispatch.dispatch_id)
        if held is None and dispatch.dispatch_id not in self._ended:
            return True
        then = self._ended[dispatch.dispatch_id] if held is None else held.dispatch.dispatch_attempt
        now = dispatch.dispatch_attempt
        if then is None or now is None:
            # Generation 1 counts no attempts: a dispatch that has ended here comes again
            # because its lease ran out.
            return held is None
        return now > then

    def _end(self, run: Run, why: str) -> None:
        """Give up a dispatch that the kernel has given to a newer attempt."""
        run.lease.lose(LeaseSuperseded(why))
        self._heartbeats.remove(run.lease)
        if run in self._waiting:
            self._waiting.remove(run)
            self._remember(run)
            self._tell_load()

    def _remember(self, run: Run) -> None:
        """Note that a dispatch has ended here, unless a newer attempt of it is held or has."""
        name, attempt = run.dispatch.dispatch_id, run.dispatch.dispatch_attempt
        if self._held.get(name) is not run:
            return
        del self._held[name]
        self._ended[name] = attempt
        self._ended.move_to_end(name)
        if len(self._ended) > REMEMBERED:
            self._ended.popitem(last=False)

    @property
    def closing(self) -> bool:
        """Whether :meth:`close` has been called."""
        return self._closing

    def join(self, timeout: float | None = None) -> bool:
        """Wait until nothing is held here; tell whether that came about in ``timeout`` seconds."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._running and not self._waiting, timeout)

    def close(self, timeout: float) -> bool:
        """Take nothing more, let what runs end, and give up what has not ended in time.

        The order: new deliveries are refused; dispatches that no thread is free for are given
        up, so that another process gets them when their lease runs out; the others get
        ``timeout`` seconds; what is not done then loses its lease, so that it writes nothing
        more and another process continues it.

        Returns:
            Whether every handler that had a thread ended in time.
        """
        self.refuse()
        with self._changed:
            done = self._changed.wait_for(lambda: not self._running and not self._waiting, timeout)
            for run in self._running:
                self._give_up(run, f"still ran after {timeout:.3g} s")
            self._abandon_waiting(0)
        return done

    def refuse(self) -> None:
        """Take nothing more, and give up what no thread is free for: how :meth:`close` begins.

        A dispatch taken a moment ago has a thread that is about to begin it. Given up it would
        cost a whole lease, each time where a worker ends with the request that brought it.
        """
        with self._changed:
            self._closing = True
            self._abandon_waiting(self._threads - len(self._running))
            self._changed.notify_all()
            self._tell_load()

    def _abandon_waiting(self, begin: int) -> None:
        """Give up what waits, but for the first ``begin`` that may begin at once."""
        may_begin = [run for run in self._waiting if not self._must_wait(run)][:begin]
        for run in [run for run in self._waiting if run not in may_begin]:
            self._waiting.remove(run)
            self._give_up(run, "had not begun")

    def _give_up(self, run: Run, why: str) -> None:
        log.warning("shutting down: %s %s and is given up", run.lease, why, extra=run.lease.ids)
        self._heartbeats.remove(run.lease)
        run.lease.lose(LeaseSuperseded("this process is shutting down"), "shutdown")

    def _tell_load(self) -> None:
        """Tell whoever watches how much is held; call with the lock held, so that none is late."""
        if observers.installed:
            observers.tell(
                "load",
                self._agent_id,
                waiting=len(self._waiting),
                running=len(self._running),
                max_queue=self._queue_limit,
                max_concurrency=self._limit,
            )

    # Threads

    def _start_thread(self) -> None:
        # Daemons: a hung handler must not keep a worker process from ending.
        name = f"{self._name}-{self._started + 1}"
        threading.Thread(target=self._loop, name=name, daemon=True).start()
        self._threads += 1
        self._started += 1

    def _loop(self) -> None:
        while True:
            with self._changed:
                run = self._next()
                if run is None:
                    self._threads -= 1
                    return
                self._running.add(run)
                self._tell_load()
            try:
                self._run(run)
            except BaseException:
                log.exception("abandoned: %s", run.lease, extra=run.lease.ids)
            finally:
                self._heartbeats.remove(run.lease)
                with self._changed:
                    self._running.discard(run)
                    self._remember(run)
                    self._changed.notify_all()
                    self._tell_load()
                del run

    def _next(self) -> Run | None:
        """Wait for something to run; ``None`` when this thread should end."""
        deadline = time.monotonic() + IDLE_SECONDS
        while True:
            run = self._take()
            if run is not None:
                return run
            left = deadline - time.monotonic()
            if self._closing or (left <= 0 and not self._waiting):
                return None
            self._idle += 1
            try:
                self._changed.wait(max(left, 0.05))
            finally:
                self._idle -= 1

    def _take(self) -> Run | None:
        """Take the oldest dispatch that may begin."""
        for run in list(self._waiting):
            if run.lease.signal is not None:
                self._waiting.remove(run)
                self._remember(run)
                self._heartbeats.remove(run.lease)
                self._changed.notify_all()
                self._tell_load()
            elif not self._must_wait(run):
                self._waiting.remove(run)
                return run
        return None

    def _must_wait(self, run: Run) -> bool:
        """Tell whether an earlier dispatch of the same execution is still winding down here.

        After an approval the kernel may dispatch while bodies that ran beside the blocked step
        are still at work; run again at once they would be taken for lost.
        """
        return any(
            other.dispatch.execution_id == run.dispatch.execution_id
            and other.dispatch.dispatch_id != run.dispatch.dispatch_id
            for other in self._running
        )
