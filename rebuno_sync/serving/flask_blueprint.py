"""The webhook as a Flask blueprint, and as a Flask app of its own."""

from __future__ import annotations

import contextlib
import io
from typing import IO, TYPE_CHECKING, Any

from ..agent import MAX_WEBHOOK_BYTES, AgentCore
from ..wire import SIGNATURE_HEADER

if TYPE_CHECKING:
    from _typeshed.wsgi import WSGIApplication, WSGIEnvironment
    from flask import Blueprint, Flask, Response
    from flask.blueprints import BlueprintSetupState

#: In the WSGI environment: the raw body, kept before anything else may read it.
_RAW_BODY = "rebuno_sync.raw_body"
_SIGNATURE = "HTTP_" + SIGNATURE_HEADER.upper().replace("-", "_")


def make_blueprint(agent: AgentCore) -> Blueprint:
    """Return a blueprint with the agent's webhook; it can be registered on several apps."""
    from flask import Blueprint, current_app, make_response, request

    blueprint = Blueprint(_blueprint_name(agent.agent_id), __name__)

    @blueprint.record_once
    def keep_raw_bodies(state: BlueprintSetupState) -> None:
        app: Any = state.app
        app.wsgi_app = _keeping_raw_bodies(app.wsgi_app)

    @blueprint.post(agent.webhook_path)
    def webhook(**variables: Any) -> Response:
        # The variables are those of a prefix like /tenants/<tenant>; they mean nothing here.
        body = _raw_body(request.environ)
        app: Flask = current_app._get_current_object()  # type: ignore[attr-defined]
        signature = request.headers.get(SIGNATURE_HEADER)
        headers: Any = request.headers  # a mapping in all but name
        status, text = agent.deliver(body, signature, app.app_context, headers)
        response = make_response(text, status)
        response.mimetype = "text/plain"
        if status == 503:
            response.headers["Retry-After"] = "1"
        return response

    return blueprint


def make_app(agent: AgentCore) -> Flask:
    """Return a Flask app that has the agent's webhook and nothing else."""
    from flask import Flask

    app = Flask("rebuno_sync.agent", static_folder=None)
    app.register_blueprint(make_blueprint(agent))
    return app


def _blueprint_name(agent_id: str) -> str:
    # Flask takes every name without a dot; two agents must never get the same one.
    return "rebuno_" + agent_id.replace("%", "%25").replace(".", "%2E")


def _keeping_raw_bodies(wsgi_app: WSGIApplication) -> WSGIApplication:
    """Keep the raw body of each signed request.

    The signature covers the raw bytes, and whatever the app does before the webhook is called
    may read them, parse them or throw them away.
    """

    def keep(environ: WSGIEnvironment, start_response: Any) -> Any:
        if _SIGNATURE in environ and environ["REQUEST_METHOD"] == "POST":
            _raw_body(environ)
        return wsgi_app(environ, start_response)

    return keep


def _raw_body(environ: WSGIEnvironment) -> bytes:
    """Return the raw body, or its beginning when it is too long for a dispatch.

    Whoever reads the request after this finds all of the body still there.
    """
    from werkzeug.exceptions import ClientDisconnected
    from werkzeug.wsgi import get_input_stream

    if _RAW_BODY not in environ:
        stream = get_input_stream(environ)
        body = b""
        with contextlib.suppress(ClientDisconnected):  # half a body does not verify
            while (wanted := MAX_WEBHOOK_BYTES + 1 - len(body)) and (piece := stream.read(wanted)):
                body += piece
        environ[_RAW_BODY] = body
        if body:
            whole = len(body) <= MAX_WEBHOOK_BYTES
            environ["wsgi.input"] = (
                io.BytesIO(body) if whole else io.BufferedReader(_Replayed(body, stream))
            )
    kept: bytes = environ[_RAW_BODY]
    return kept


class _Replayed(io.RawIOBase):
    """A body from its beginning, though the beginning was read already."""

    def __init__(self, head: bytes, tail: IO[bytes]) -> None:
        self._head = io.BytesIO(head)
        self._tail = tail

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        piece = self._head.read(len(buffer)) or self._tail.read(len(buffer))
        buffer[: len(piece)] = piece
        return len(piece)
