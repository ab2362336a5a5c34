"""What an agent must know of uWSGI: whether its threads run at all."""

from __future__ import annotations

import sys

#: Any of these has uWSGI let other threads, or greenlets in their place, run between requests.
_GIVE_THREADS = frozenset({"enable-threads", "threads", "gevent"})


def no_threads() -> str:
    """Return what to change when this process is a uWSGI in which no thread ever runs, or ``""``.

    uWSGI keeps the interpreter's lock outside of requests unless it is told that there are
    threads: a dispatch would be taken, and never begin.
    """
    module = sys.modules.get("uwsgi")  # only uWSGI itself brings a module of this name
    options = getattr(module, "opt", None)
    if not isinstance(options, dict) or _GIVE_THREADS & options.keys():
        return ""
    return "this uWSGI runs no threads, so no handler would ever begin: give it --enable-threads"
