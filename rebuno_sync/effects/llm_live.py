"""Live output: what a streamed call publishes while it goes on (PROTOCOL 11). Best effort.

One daemon thread per stream sends; the thread that reads the stream only puts text in front of
it, and at the end waits at most for one flush. Threads are kept for the next stream, since
starting one would take longer than all the rest that happens before the first byte.
"""

from __future__ import annotations

import codecs
import contextvars
import functools
import logging
import queue
import threading
import time
from collections.abc import Callable

from ..errors import ControlFlow
from ..forks import after_fork

log = logging.getLogger(__name__)

MAX_DELTA = 1750
FLUSH_AT = 2000
FLUSH_AFTER = 0.05
#: Text beyond this many characters that still waits to be sent is dropped.
MAX_WAITING = 64 * 1024
#: How long the end of a stream waits for what was not yet sent, in seconds.
LAST_FLUSH = 1.0
_FAILURES_IN_A_ROW = 3
_IDLE_SECONDS = 10.0


class Publishers:
    """Daemon threads that each publish one stream after the other."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._idle: list[queue.SimpleQueue[Callable[[], None]]] = []

    def run(self, publish: Callable[[], None]) -> None:
        """Run ``publish`` on a thread that has nothing to do, or on a new one."""
        with self._lock:
            inbox = self._idle.pop() if self._idle else None
        if inbox is None:
            inbox = queue.SimpleQueue()
            threading.Thread(
                target=self._loop, args=(inbox,), name="rebuno-live", daemon=True
            ).start()
        inbox.put(publish)

    def _loop(self, inbox: queue.SimpleQueue[Callable[[], None]]) -> None:
        while True:
            try:
                publish = inbox.get(timeout=_IDLE_SECONDS)
            except queue.Empty:
                with self._lock:
                    if inbox in self._idle:
                        self._idle.remove(inbox)
                        return
                continue  # something was given to it just now
            publish()
            del publish
            with self._lock:
                self._idle.append(inbox)


_publishers = Publishers()


@after_fork
def _renew() -> None:
    # The parent's threads are not here, and one may have held the lock.
    global _publishers
    _publishers = Publishers()


class LiveChannel:
    """Publishes the text of one stream.

    Args:
        send: sends one delta: its number and its text.
    """

    def __init__(self, send: Callable[[int, str], None]) -> None:
        self._send = send
        self._context = contextvars.copy_context()
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._changed = threading.Condition()
        self._waiting: list[str] = []
        self._size = 0
        self._since = 0.0
        self._closing = False
        self._started = False
        self._stopped = False

    def feed(self, chunk: bytes) -> None:
        """Take the next bytes of the stream; never waits for the kernel."""
        text = self._decoder.decode(chunk)
        with self._changed:
            if not text or self._stopped or self._size + len(text) > MAX_WAITING:
                return
            if not self._waiting:
                self._since = time.monotonic()
            self._waiting.append(text)
            self._size += len(text)
            if not self._started:
                self._started = True
                _publishers.run(functools.partial(self._context.run, self._publish))
            self._changed.notify_all()

    def close(self, wait: bool = True) -> None:
        """Send what waits, for so long as the last flush may take, and stop."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
            if wait and self._started:
                self._changed.wait_for(lambda: self._stopped, LAST_FLUSH)
            self._stopped = True

    def _publish(self) -> None:
        seq = failures = 0
        while failures < _FAILURES_IN_A_ROW and (text := self._next()):
            for at in range(0, len(text), MAX_DELTA):
                if self._stopped or failures >= _FAILURES_IN_A_ROW:
                    break
                try:
                    self._send(seq, text[at : at + MAX_DELTA])
                except Exception as exc:
                    log.debug("a live delta was not taken: %s", exc)
                    failures += 1
                except ControlFlow:
                    failures = _FAILURES_IN_A_ROW
                else:
                    failures = 0
                seq += 1
        with self._changed:
            self._stopped = True
            self._changed.notify_all()

    def _next(self) -> str:
        """Wait until a flush is due and return its text; empty at the end."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._closing)
            due = self._since + FLUSH_AFTER - time.monotonic()
            self._changed.wait_for(lambda: self._size >= FLUSH_AT or self._closing, max(due, 0))
            text = "".join(self._waiting)
            self._waiting.clear()
            self._size = 0
            return text
