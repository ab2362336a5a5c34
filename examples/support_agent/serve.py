"""The Flask app around a handler: ``gunicorn examples.support_agent.<loop>:create_app()``."""

from __future__ import annotations

from collections.abc import Callable

from flask import Flask

from rebuno_sync import Agent


def app_for(answer: Callable[[str], str]) -> Flask:
    """Return an app whose agent ``support`` answers questions with ``answer``.

    ``REBUNO_URL`` and ``REBUNO_AGENT_SECRET`` are taken from the environment.
    """
    app = Flask(__name__)
    agent = Agent("support", description="Answers customers of a shop.")

    @agent.handler
    def support(question: str) -> str:
        return answer(question)

    app.register_blueprint(agent.blueprint)
    return app
