"""Live output of steps, handed on to whoever watches; never stored (PROTOCOL 9)."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from typing import Final

import orjson

#: How often a silent stream sends a comment, in seconds, so that nobody in between closes it.
KEEP_ALIVE: Final = 15.0
_BACKLOG: Final = 1000
_END: Final = b""


class Hub:
    """Hands each delta to every subscriber of its execution.

    A subscriber that does not keep up loses deltas; it never holds up the agent.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._subscriptions: dict[str, set[Subscription]] = {}
        self._closed = False

    def publish(self, execution_id: str, step_id: str, seq: int, data: str) -> None:
        """Hand a delta to whoever watches the execution now."""
        with self._lock:
            subscriptions = list(self._subscriptions.get(execution_id, ()))
        if subscriptions:
            frame = b"data: %b\n\n" % orjson.dumps({"step_id": step_id, "seq": seq, "data": data})
            for subscription in subscriptions:
                subscription.offer(frame)

    def subscribe(self, execution_id: str, may_watch: Callable[[], bool]) -> Subscription:
        """Watch an execution: what is published after this returns is not missed.

        Args:
            execution_id: what to watch.
            may_watch: asked every :data:`KEEP_ALIVE` seconds; the stream ends when it says no.
        """
        subscription = Subscription(self, execution_id, may_watch)
        with self._lock:
            if self._closed:
                subscription.end()
            else:
                self._subscriptions.setdefault(execution_id, set()).add(subscription)
        return subscription

    def unsubscribe(self, subscription: Subscription) -> None:
        """Stop handing deltas to a subscription; safe to repeat."""
        with self._lock:
            group = self._subscriptions.get(subscription.execution_id, set())
            group.discard(subscription)
            if not group:
                self._subscriptions.pop(subscription.execution_id, None)

    def close(self) -> None:
        """End every stream, and those to come."""
        with self._lock:
            self._closed = True
            subscriptions = [s for group in self._subscriptions.values() for s in group]
        for subscription in subscriptions:
            subscription.end()


class Subscription:
    """The Server-Sent Events of one execution, an iterator of frames; close it in the end."""

    def __init__(self, hub: Hub, execution_id: str, may_watch: Callable[[], bool]) -> None:
        self.execution_id = execution_id
        self._may_watch = may_watch
        self._ask_at = time.monotonic() + KEEP_ALIVE
        self._hub = hub
        self._frames: queue.Queue[bytes] = queue.Queue(_BACKLOG)
        self._frames.put(b": connected\n\n")

    def offer(self, frame: bytes) -> bool:
        """Add a frame, unless too many wait to be sent; return whether it was added."""
        try:
            self._frames.put_nowait(frame)
        except queue.Full:
            return False
        return True

    def end(self) -> None:
        """Let the iteration end, even when that costs a frame."""
        while not self.offer(_END):
            self._frames.get()

    def __iter__(self) -> Subscription:
        return self

    def __next__(self) -> bytes:
        if time.monotonic() >= self._ask_at:
            if not self._may_watch():
                raise StopIteration
            self._ask_at = time.monotonic() + KEEP_ALIVE
        try:
            frame = self._frames.get(timeout=KEEP_ALIVE)
        except queue.Empty:
            return b": keep-alive\n\n"
        if frame == _END:
            raise StopIteration
        return frame

    def close(self) -> None:
        """Stop receiving."""
        self._hub.unsubscribe(self)
