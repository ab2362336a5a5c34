"""The webhook as a Flask blueprint, and as a Flask app of its own."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from ..agent import MAX_WEBHOOK_BYTES, AgentCore
from ..wire import SIGNATURE_HEADER

if TYPE_CHECKING:
    from flask import Blueprint, Flask, Response

#: In the WSGI environment: the raw body, kept before anything else may read it.
_RAW_BODY = "rebuno_sync.raw_body"


def make_blueprint(agent: AgentCore) -> Blueprint:
    """Return a blueprint with the agent's webhook; it can be registered on several apps."""
    from flask import Blueprint, current_app, request

    name = "rebuno_" + re.sub(r"[^A-Za-z0-9_]", "_", agent.agent_id)
    blueprint = Blueprint(name, __name__)

    @blueprint.post(agent.webhook_path)
    def webhook() -> Response:
        from flask import make_response

        request.max_content_length = MAX_WEBHOOK_BYTES
        body = request.get_data(cache=True)
        app: Flask = current_app._get_current_object()  # type: ignore[attr-defined]
        status, text = agent.deliver(body, request.headers.get(SIGNATURE_HEADER), app.app_context)
        response = make_response(text, status)
        response.mimetype = "text/plain"
        if status == 503:
            response.headers["Retry-After"] = "1"
        return response

    return blueprint


def make_app(agent: AgentCore) -> Flask:
    """Return a Flask app that has the agent's webhook and nothing else."""
    from flask import Flask

    app = Flask("rebuno_sync.agent")
    app.register_blueprint(make_blueprint(agent))
    return app
