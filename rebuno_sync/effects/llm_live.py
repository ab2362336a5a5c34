"""Live output: what a streamed call publishes while it goes on (PROTOCOL 11). Best effort.

One daemon thread per stream sends; the thread that reads the stream only puts text in front of
it, and at the end waits at most for one flush.
"""

from __future__ import annotations

import codecs
import logging
import threading
import time
from collections.abc import Callable

from ..errors import ControlFlow

log = logging.getLogger(__name__)

MAX_DELTA = 1750
FLUSH_AT = 2000
FLUSH_AFTER = 0.05
#: Text beyond this many characters that still waits to be sent is dropped.
MAX_WAITING = 64 * 1024
#: How long the end of a stream waits for what was not yet sent, in seconds.
LAST_FLUSH = 1.0
_FAILURES_IN_A_ROW = 3


class LiveChannel:
    """Publishes the text of one stream.

    Args:
        send: sends one delta: its number and its text.
        name: what the thread is called.
    """

    def __init__(self, send: Callable[[int, str], None], name: str) -> None:
        self._send = send
        self._name = name
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._changed = threading.Condition()
        self._waiting: list[str] = []
        self._size = 0
        self._since = 0.0
        self._closing = False
        self._thread: threading.Thread | None = None
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
            if self._thread is None:
                self._thread = threading.Thread(target=self._loop, name=self._name, daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def close(self, wait: bool = True) -> None:
        """Send what waits, for so long as the last flush may take, and stop."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
            if wait and self._thread is not None:
                self._changed.wait_for(lambda: self._stopped, LAST_FLUSH)
            self._stopped = True

    def _loop(self) -> None:
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
