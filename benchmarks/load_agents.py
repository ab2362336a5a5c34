"""A Flask app with twenty agents, each of whose handlers takes ten steps."""

from __future__ import annotations

import os

from flask import Flask

from rebuno_sync import Agent, tool

AGENTS = 20
STEPS = 10


@tool
def work(number: int, text: str = "some text, as arguments have it") -> dict[str, int]:
    return {"number": number, "length": len(text)}


def handle(start: int) -> int:
    return sum(work(start + n)["number"] for n in range(STEPS))


def create_app() -> Flask:
    app = Flask(__name__)
    for number in range(AGENTS):
        agent = Agent(f"agent-{number}", max_concurrency=8, signature="v1")
        agent.bind(handle)
        app.register_blueprint(agent.blueprint, url_prefix=f"/{number}")
    return app


if "REBUNO_AGENT_SECRET" in os.environ:
    app = create_app()
