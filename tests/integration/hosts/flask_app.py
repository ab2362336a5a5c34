"""A Flask app factory with two agents next to an ordinary route; called twice, as tests do."""

from __future__ import annotations

from flask import Flask, current_app

from tests.integration.hosts.agents import make_agent


def whereabouts() -> str:
    return str(current_app.config["NAME"])


one = make_agent("one", whereabouts)
two = make_agent("two", whereabouts)


def create_app(name: str) -> Flask:
    app = Flask(__name__)
    app.config["NAME"] = name
    app.register_blueprint(one.blueprint, url_prefix="/agents/one")
    app.register_blueprint(two.blueprint, url_prefix="/agents/two")

    @app.get("/")
    def ordinary() -> str:
        return "ordinary"

    return app


first = create_app("first")
app = create_app("second")
