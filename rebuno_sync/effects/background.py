"""One event loop per process, on a daemon thread, for libraries that speak asyncio only.

It starts with its first use, and a forked process starts one of its own.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import contextvars
import logging
import os
import sys
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from ..forks import after_fork

log = logging.getLogger(__name__)

T = TypeVar("T")

#: How long what is still open may take to close when the process ends, in seconds.
CLOSING_SECONDS = 5.0


class BackgroundLoop:
    """An event loop and its thread; see :func:`background_loop`."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self.loop = asyncio.new_event_loop()
        self._kept: set[asyncio.Task[Any]] = set()
        self._thread = threading.Thread(target=self._serve, name="rebuno-asyncio", daemon=True)
        self._thread.start()
        atexit.register(self._at_exit)

    def run(self, make: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Run the coroutine that ``make`` returns and wait for its result.

        It runs in an empty context: what it starts outlives the execution of whoever came first.

        Raises:
            RuntimeError: this is the loop's own thread, which would wait for itself.
        """
        return self.wait_for(self.loop, make)

    @staticmethod
    def wait_for(loop: asyncio.AbstractEventLoop, make: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """The same on a loop that somebody else runs on another thread."""
        try:
            here = asyncio.get_running_loop()
        except RuntimeError:
            here = None
        if here is loop:
            raise RuntimeError(
                "this would wait for its own event loop for ever: call it from a plain thread, "
                "not from a coroutine or callback of the loop that serves the connection"
            )
        if not loop.is_running():
            raise RuntimeError("the event loop of this connection is not running")
        future = contextvars.Context().run(asyncio.run_coroutine_threadsafe, make(), loop)
        try:
            return future.result()
        except BaseException:
            # An interrupt of the waiting thread must not leave the work behind.
            future.cancel()
            raise

    def keep(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Start a task from within the loop that holds something open until it is cancelled.

        When the process ends, these tasks are cancelled first and given time to close.
        """
        task = self.loop.create_task(work)
        self._kept.add(task)
        task.add_done_callback(self._kept.discard)
        return task

    def _serve(self) -> None:
        asyncio.set_event_loop(self.loop)
        self.loop.run_forever()
        self.loop.close()

    def _at_exit(self) -> None:
        if self.pid != os.getpid():
            return
        with contextlib.suppress(Exception):
            asyncio.run_coroutine_threadsafe(self._close(), self.loop).result(CLOSING_SECONDS + 1)
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(1.0)

    async def _close(self) -> None:
        kept = set(self._kept)
        for task in kept:
            task.cancel()
        if kept:
            await asyncio.wait(kept, timeout=CLOSING_SECONDS)
        rest = asyncio.all_tasks() - {asyncio.current_task()}
        for task in rest:
            task.cancel()
        await asyncio.gather(*rest, return_exceptions=True)


_background: BackgroundLoop | None = None
#: Of parent processes. Letting one go would have Python complain of its unfinished tasks.
_left_behind: list[BackgroundLoop] = []
# Made at import and never held across a fork: see _renew.
_starting = threading.Lock()


def background_loop() -> BackgroundLoop:
    """Return this process's loop, started if it is not yet.

    Raises:
        RuntimeError: gevent has taken the place of threads in this process.
    """
    global _background
    _require_real_threads()
    with _starting:
        if _background is None:
            _background = BackgroundLoop()
        return _background


def _require_real_threads() -> None:
    """Say what is wrong where asyncio would take every greenlet for a part of its own loop."""
    monkey = sys.modules.get("gevent.monkey")
    if monkey is not None and monkey.is_module_patched("threading"):
        raise RuntimeError(
            "MCP tools run on asyncio, which needs a thread of its own, and gevent has replaced "
            "the threads of this process: serve this agent with gunicorn's gthread worker"
        )


@after_fork
def _renew() -> None:
    global _background, _starting
    if _background is not None:
        _left_behind.append(_background)
    _background = None
    _starting = threading.Lock()
