"""Hooks for gunicorn, taken in by one line of ``gunicorn.conf.py``::

    from rebuno_sync.serving.gunicorn_hooks import *

A process drains its agents by itself when it ends. The hooks begin earlier and end sooner, in
this order:

1. The worker is to go, and from that moment takes no dispatch: webhooks that still reach it are
   answered 503, and the kernel delivers them again, to another worker.

   - A stop and a reload of gunicorn send the worker SIGTERM: ``post_worker_init`` has put a
     handler before gunicorn's own. A quick stop sends SIGQUIT (``worker_int``).
   - ``max_requests`` sends nothing. The request that reaches the number is still served, so the
     dispatch that it may bring is taken; gunicorn then marks the worker as done, and
     ``pre_request`` sees that before each request that the worker serves after it.
   - ``timeout`` sends SIGABRT to a worker that gives no sign of life (``worker_abort``).

2. gunicorn finishes the requests under way, which are short.
3. ``worker_exit``: what is queued is given up, but for what has a thread to begin on; handlers get
   ``shutdown_timeout`` seconds, but never so many that gunicorn would kill the worker meanwhile:
   it does when ``graceful_timeout`` has passed since the signal, and when the worker has given
   no sign of life for ``timeout``. After SIGABRT they get none: SIGKILL follows within a second.
4. What is not done then is given up, and the log says which executions: their leases are renewed
   no more, nothing is reported failed, and another worker continues them.

``child_exit``, in the master, has the Prometheus client forget the gauges of a worker that is gone,
when metrics are kept for several processes (``PROMETHEUS_MULTIPROC_DIR``).

A configuration that has hooks of its own under the same names calls these from them.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import time
from types import FrameType
from typing import Any

from ..processes import drain, refuse_dispatches

__all__ = [
    "child_exit",
    "post_worker_init",
    "pre_request",
    "worker_abort",
    "worker_exit",
    "worker_int",
]

log = logging.getLogger(__name__)

#: What gunicorn needs to see a worker off before its ``timeout`` is over, in seconds.
_MARGIN = 3.0
#: What a worker needs to end after its handlers, before ``graceful_timeout`` is over, in seconds.
_LAST_WORDS = 1.0
#: When gunicorn will kill this process, by the monotonic clock; known once it was told to go.
_killed_at = float("inf")


def _told_to_go(patience: float) -> None:
    global _killed_at
    _killed_at = min(_killed_at, time.monotonic() + patience)
    refuse_dispatches()


def post_worker_init(worker: Any) -> None:
    """Take note of SIGTERM before gunicorn's own handler does."""
    before = signal.getsignal(signal.SIGTERM)

    def on_term(number: int, frame: FrameType | None) -> None:
        _told_to_go(worker.cfg.graceful_timeout)
        if callable(before):
            before(number, frame)

    signal.signal(signal.SIGTERM, on_term)


def pre_request(worker: Any, req: Any) -> None:
    """Take no more dispatches once the worker has had its ``max_requests``."""
    if not worker.alive:
        refuse_dispatches()


def worker_int(worker: Any) -> None:
    """Take no more dispatches: the worker has been told to go at once."""
    _told_to_go(worker.cfg.graceful_timeout)


def worker_abort(worker: Any) -> None:
    """Take no more dispatches: gunicorn is about to kill a worker that it takes for hung."""
    _told_to_go(0.0)


def worker_exit(server: Any, worker: Any) -> None:
    """Let the handlers of this worker end, and give up those that do not."""
    # From here on the worker gives gunicorn no sign of life.
    silence = worker.cfg.timeout - _MARGIN if worker.cfg.timeout else float("inf")
    limit = max(0.0, min(silence, _killed_at - _LAST_WORDS - time.monotonic()))
    if not drain(limit):
        log.warning("worker %s ends with handlers that still run", worker.pid)


def child_exit(server: Any, worker: Any) -> None:
    """Take the gauges of a worker that is gone out of the sums, however it went."""
    if os.environ.get("PROMETHEUS_MULTIPROC_DIR"):
        # The directory may belong to an app whose workers alone have the client.
        with contextlib.suppress(ImportError):
            from prometheus_client import multiprocess

            multiprocess.mark_process_dead(worker.pid)  # type: ignore[no-untyped-call]
