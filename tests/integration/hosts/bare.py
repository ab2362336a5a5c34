"""A WSGI callable without any framework, with an agent below a path."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from werkzeug.middleware.dispatcher import DispatcherMiddleware

from tests.integration.hosts.agents import make_agent


def rest(environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
    start_response("200 OK", [("Content-Type", "text/plain")])
    return [b"ordinary"]


agent = make_agent("one", lambda: "bare")
app = DispatcherMiddleware(rest, {"/agents/one": agent.app})
