"""A Flask app for ``flask run --debug``: two agents, and a route that tells of the threads."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import Any

from flask import Flask

from rebuno_sync import Agent, execution, step, tool

JOURNAL = Path(os.environ["JOURNAL"])


def note(what: str) -> None:
    with (JOURNAL / "effects").open("a", encoding="ascii") as file:
        file.write(f"{what} {execution().id} {os.getpid()}\n")


@tool
def first(waits: bool) -> str:
    note("first")
    while waits and not (JOURNAL / "go").exists():
        time.sleep(0.01)
    return "first"


def second() -> str:
    note("second")
    return "second"


def create_app() -> Flask:
    """Make everything anew, as the reloader's two processes do."""
    app = Flask(__name__)
    for agent_id in ("one", "two"):
        agent = Agent(agent_id)

        @agent.handler
        def handler(waits: bool = False) -> list[str]:
            return [first(waits), step("second", second)]

        app.register_blueprint(agent.blueprint, url_prefix=f"/agents/{agent_id}")

    @app.get("/threads")
    def threads() -> dict[str, Any]:
        names = [t.name for t in threading.enumerate() if t.name.startswith("rebuno-")]
        return {"pid": os.getpid(), "parent": os.getppid(), "threads": sorted(names)}

    return app
