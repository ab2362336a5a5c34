"""Ctrl-C that is heard, whatever the process is doing when it comes."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType

#: After how many seconds an interrupt that was lost is raised again.
_AGAIN = 0.5


@contextlib.contextmanager
def insistent() -> Iterator[None]:
    """Raise ``KeyboardInterrupt`` again and again until the block ends by it.

    Python drops an exception that is raised while an object is collected, and one Ctrl-C in some
    thousands comes just then: the command would go on as if nothing had been pressed.
    """
    before = signal.getsignal(signal.SIGINT)
    may_set = threading.current_thread() is threading.main_thread() and hasattr(signal, "SIGALRM")
    if before is not signal.default_int_handler or not may_set:
        yield  # somebody else sees to it, or ignores it on purpose
        return
    alarm_before = signal.getsignal(signal.SIGALRM)

    def interrupt(number: int, frame: FrameType | None) -> None:
        signal.setitimer(signal.ITIMER_REAL, _AGAIN, _AGAIN)
        raise KeyboardInterrupt

    signal.signal(signal.SIGINT, interrupt)
    signal.signal(signal.SIGALRM, interrupt)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGINT, before)
        signal.signal(signal.SIGALRM, alarm_before)
