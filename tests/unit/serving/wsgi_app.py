"""An agent in a Flask app, for real servers started by tests.

``REBUNO_URL`` and ``REBUNO_AGENT_SECRET`` say where its kernel is; the input's ``go`` names a
file that the handler waits for between its two steps.
"""

from __future__ import annotations

import os
import time
from typing import Any

from flask import Flask, current_app, request

from rebuno_sync import Agent, step, tool

agent = Agent("a1")


@tool
def begin(pid: int) -> str:
    return current_app.name


@agent.handler
def handler(go: str = "") -> dict[str, Any]:
    app = begin(os.getpid())
    deadline = time.monotonic() + 60
    while go and not os.path.exists(go) and time.monotonic() < deadline:
        time.sleep(0.01)
    return {"app": app, "pid": os.getpid(), "end": step("end", lambda: "done")}


def create_app() -> Flask:
    """An app that reads every request's body before any view does."""
    app = Flask("the app")

    @app.before_request
    def read_everything() -> None:
        request.form.get("a")
        request.stream.read()

    app.register_blueprint(agent.blueprint, url_prefix="/agents/a1")
    return app
