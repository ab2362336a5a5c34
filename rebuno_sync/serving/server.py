"""``agent.run()``: the agent's app under an embedded gunicorn."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from flask import Flask

log = logging.getLogger(__name__)


def serve(
    app: Flask, *, host: str, port: int, workers: int, threads: int, shutdown_timeout: float
) -> None:
    """Serve ``app`` until SIGTERM or SIGINT; see :meth:`rebuno_sync.Agent.run`."""
    from . import gunicorn_hooks

    try:
        from gunicorn.app.base import BaseApplication
    except ImportError:  # gunicorn needs fcntl, which some systems have not
        _serve_with_werkzeug(app, host, port)
        return

    settings: dict[str, Any] = {
        "bind": f"[{host}]:{port}" if ":" in host else f"{host}:{port}",
        "workers": workers,
        "threads": threads,
        "worker_class": "gthread",
        # gunicorn kills a worker that takes longer than this to go; handlers end before.
        "graceful_timeout": int(shutdown_timeout) + 5,
        "timeout": int(shutdown_timeout) + 30,
        # One for every server of a user, below HOME; newer versions have it.
        "control_socket_disable": True,
        **{name: getattr(gunicorn_hooks, name) for name in gunicorn_hooks.__all__},
    }

    class Application(BaseApplication):
        def load_config(self) -> None:
            for name, value in settings.items():
                if name in self.cfg.settings:
                    self.cfg.set(name, value)

        def load(self) -> Any:
            return app

    Application().run()


def _serve_with_werkzeug(app: Flask, host: str, port: int) -> None:
    from werkzeug.serving import run_simple

    log.warning(
        "gunicorn does not work on this system: serving with Werkzeug's development server, "
        "one process, not for production"
    )
    run_simple(host, port, app, threaded=True)
