"""Hooks for gunicorn, taken in by one line of ``gunicorn.conf.py``::

    from rebuno_sync.serving.gunicorn_hooks import *

A process drains its agents by itself when it ends. The hooks begin earlier and end sooner:

1. SIGTERM, SIGINT, SIGQUIT or SIGABRT reaches the worker: from that moment no dispatch is taken.
   Webhooks that still arrive are answered 503, and the kernel delivers them again, to another
   worker.
2. gunicorn finishes the requests under way, which are short.
3. ``worker_exit``: running handlers get ``shutdown_timeout`` seconds, but never so many that
   gunicorn's ``timeout`` would have the worker killed meanwhile.
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
from types import FrameType
from typing import Any

from ..processes import drain, refuse_dispatches

__all__ = ["child_exit", "post_worker_init", "worker_abort", "worker_exit", "worker_int"]

log = logging.getLogger(__name__)

#: What gunicorn needs to see a worker off before its ``timeout`` is over, in seconds.
_MARGIN = 3.0


def post_worker_init(worker: Any) -> None:
    """Take note of SIGTERM before gunicorn's own handler does."""
    before = signal.getsignal(signal.SIGTERM)

    def on_term(number: int, frame: FrameType | None) -> None:
        refuse_dispatches()
        if callable(before):
            before(number, frame)

    signal.signal(signal.SIGTERM, on_term)


def worker_int(worker: Any) -> None:
    """Take no more dispatches: the worker has been told to go at once."""
    refuse_dispatches()


def worker_abort(worker: Any) -> None:
    """Take no more dispatches: gunicorn is about to kill a worker that it takes for hung."""
    refuse_dispatches()


def worker_exit(server: Any, worker: Any) -> None:
    """Let the handlers of this worker end, and give up those that do not."""
    # From here on the worker gives gunicorn no sign of life.
    limit = max(worker.cfg.timeout - _MARGIN, 0.0) if worker.cfg.timeout else None
    if not drain(limit):
        log.warning("worker %s ends with handlers that still run", worker.pid)


def child_exit(server: Any, worker: Any) -> None:
    """Take the gauges of a worker that is gone out of the sums, however it went."""
    if os.environ.get("PROMETHEUS_MULTIPROC_DIR"):
        # The directory may belong to an app whose workers alone have the client.
        with contextlib.suppress(ImportError):
            from prometheus_client import multiprocess

            multiprocess.mark_process_dead(worker.pid)  # type: ignore[no-untyped-call]
