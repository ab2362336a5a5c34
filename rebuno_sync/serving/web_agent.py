"""The public ``Agent``: the agent with its ways in."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ..agent import AgentCore

if TYPE_CHECKING:
    from flask import Blueprint, Flask


class Agent(AgentCore):
    __doc__ = AgentCore.__doc__

    @functools.cached_property
    def blueprint(self) -> Blueprint:
        """A Flask blueprint with the webhook.

        ``app.register_blueprint(agent.blueprint, url_prefix="/agents/a")`` puts it at
        ``/agents/a/webhook``. Handlers run inside the app context of the app that took the
        delivery. It may be registered on several apps, as an app factory does.
        """
        from .flask_blueprint import make_blueprint

        return make_blueprint(self)

    @functools.cached_property
    def app(self) -> Flask:
        """A Flask app with the webhook alone, for any WSGI server or to mount in another app."""
        from .flask_blueprint import make_app

        return make_app(self)

    def run(
        self,
        fn: Callable[..., Any] | None = None,
        *,
        host: str = "127.0.0.1",
        port: int = 5000,
        workers: int = 1,
        threads: int = 8,
    ) -> None:
        """Serve the webhook with gunicorn until SIGTERM or SIGINT.

        Args:
            fn: the handler, if none was bound before.
            host: the address to listen on.
            port: the port to listen on.
            workers: worker processes.
            threads: threads of each worker that take webhooks; handlers run on threads of
                their own, at most ``max_concurrency`` in each process.

        Raises:
            RuntimeError: there is no handler.
        """
        from .server import serve

        if fn is not None:
            self.bind(fn)
        if self._binder is None:
            raise RuntimeError("the agent has no handler: pass one to run() or use agent.bind(fn)")
        serve(
            self.app,
            host=host,
            port=port,
            workers=workers,
            threads=threads,
            shutdown_timeout=self.shutdown_timeout,
        )
