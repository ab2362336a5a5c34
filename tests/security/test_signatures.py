"""Signatures and tokens: how they are compared, what they cover, where they are never sent."""

from __future__ import annotations

import ast
import contextlib
import http.server
import re
import ssl
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import trustme

import rebuno_sync
from rebuno_sync import Agent, signing, wire
from rebuno_sync.kernel.deliveries import Claim
from rebuno_sync.kernel.dispatch import Unanswered, post_webhook
from tests.unit.kernel.agent_double import PATIENCE, Caller, Webhooks
from tests.unit.kernel.conftest import manifest

PACKAGE = Path(rebuno_sync.__file__).parent
SECRET_WORDS = re.compile(r"(^|_)(signature|token|csrf|secret|digest|api_key|expected|mac)s?($|_)")


def _names(node: ast.AST) -> Iterator[str]:
    for part in ast.walk(node):
        if isinstance(part, ast.Name):
            yield part.id
        elif isinstance(part, ast.Attribute):
            yield part.attr


def comparisons(source: str) -> list[str]:
    """Every comparison by an operator that a secret, or what is made of one, is a side of."""
    return [
        ast.unparse(node)
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Compare)
        and any(isinstance(op, (ast.Eq, ast.NotEq, ast.In, ast.NotIn)) for op in node.ops)
        and any(SECRET_WORDS.search(name.lower()) for name in _names(node))
    ]


#: The modules that are shown signatures, tokens or form tokens.
JUDGES = [
    "signing.py",
    "agent_secrets.py",
    "agent.py",
    "kernel/auth.py",
    "kernel/keys.py",
    "kernel/page_guard.py",
    "serving/flask_blueprint.py",
]
REVIEWED = {
    # A header is there, or a secret has been given at all.
    "wire.SIGNATURE_HEADER in request.headers or wire.AGENT_ID_HEADER in request.headers",
    "wire.SIGNATURE_HEADER in request.headers",
    "_SIGNATURE in environ",
    "signature not in ('auto', 'body', 'v1')",
}


@pytest.mark.parametrize("module", JUDGES)
def test_no_secret_is_compared_by_an_operator(module: str) -> None:
    found = comparisons((PACKAGE / module).read_text("utf-8"))
    assert set(found) <= REVIEWED, "compare with hmac.compare_digest"


def test_a_comparison_by_an_operator_would_be_seen() -> None:
    assert comparisons("if given == self._token: pass")
    assert comparisons("good = token in tokens")
    assert comparisons("assert row['x'] != _digest(token)")
    assert not comparisons("x == y")


def test_every_module_that_is_shown_a_secret_is_watched() -> None:
    shown = re.compile(r"compare_digest|same_signature|verify_body|\.verify\(|Guard\(|log_in\(")
    modules = {
        str(path.relative_to(PACKAGE))
        for path in PACKAGE.rglob("*.py")
        if shown.search(path.read_text("utf-8"))
    }
    allowed = {"kernel/page.py"}  # which hands them on to page_guard
    assert modules - allowed <= set(JUDGES)


@pytest.mark.parametrize("judge", [signing.same_signature, signing.verify_body])
def test_the_comparison_is_the_constant_time_one(
    judge: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[bytes, bytes]] = []
    monkeypatch.setattr(
        "hmac.compare_digest", lambda a, b: bool(asked.append((bytes(a), bytes(b)))) or True
    )
    arguments = ("s", b"body", "x") if judge is signing.verify_body else ("a", "x")
    assert judge(*arguments)
    assert asked[0][1] == b"x"


# What a signature covers


def create(caller: Caller) -> str:
    created = caller.client("POST", "/v0/executions", {"agent_id": "a1"}).json()
    return f"/v0/executions/{created['id']}"


def test_a_body_signature_is_of_no_use_where_requests_are_signed(
    kernels: Any, webhooks: Webhooks
) -> None:
    strict = kernels(manifest=manifest(webhooks), accept_body_signatures=False)
    with contextlib.closing(Caller(strict.url)) as caller:
        path = create(caller)
        lease = webhooks.next()
        for method, route in (("GET", ""), ("POST", "/heartbeat"), ("POST", "/steps")):
            answer = caller.agent(method, path + route, lease=lease, body_signature=True)
            assert answer.status_code == 401, route
        assert caller.agent("POST", f"{path}/heartbeat", lease=lease).status_code == 204


def test_a_request_signature_is_of_one_route(caller: Caller, webhooks: Webhooks) -> None:
    path = create(caller)
    lease = webhooks.next()
    done = caller.agent("POST", f"{path}/steps/x/complete", {"result": 1}, lease=lease)
    assert done.status_code == 404
    headers = {k: v for k, v in done.request.headers.items() if k.startswith("Rebuno-")}
    body = done.request.body
    assert isinstance(body, bytes)
    for route in ("/complete", "/steps/y/complete", "/heartbeat", "/steps/x/fail"):
        assert caller.client("POST", path + route, body, **headers).status_code == 401
    # The same request again says nothing new.
    assert caller.client("POST", f"{path}/steps/x/complete", body, **headers).status_code == 404


@pytest.mark.parametrize(("method", "route"), [("GET", ""), ("POST", "/heartbeat")])
def test_a_webhook_sent_back_is_no_request_of_its_agent(
    method: str, route: str, caller: Caller, webhooks: Webhooks
) -> None:
    """Webhooks and bodies are signed alike: who sees a webhook has a signed body."""
    path = create(caller)
    headers, body = webhooks.received.get(timeout=PATIENCE)
    lease = wire.decode(body)
    answer = caller.client(
        method,
        path + route,
        body,
        **{
            wire.AGENT_ID_HEADER: "a1",
            wire.SIGNATURE_HEADER: headers[wire.SIGNATURE_HEADER],
            wire.DISPATCH_ID_HEADER: lease["dispatch_id"],
            wire.DISPATCH_ATTEMPT_HEADER: str(lease["dispatch_attempt"]),
        },
    )
    assert (answer.status_code, answer.json()["code"]) == (400, "validation_error")


def test_what_an_agent_sends_is_no_webhook() -> None:
    agent = Agent("a1", secret="s", base_url="http://127.0.0.1:9")
    sent = b'{"kind":"tool_call","target":"t","args":{"execution_id":"e","dispatch_id":"d"}}'
    assert agent.deliver(sent, signing.sign_body("s", sent))[0] == 400


# Where signatures go


class Elsewhere:
    """A server that answers as told, and keeps what it got."""

    def __init__(self, location: str | None = None, tls: ssl.SSLContext | None = None) -> None:
        self.got: list[dict[str, str]] = []
        outer = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                outer.got.append(dict(self.headers.items()))
                self.send_response(307 if location else 200)
                if location:
                    self.send_header("Location", location)
                self.send_header("Content-Length", "0")
                self.end_headers()

            do_GET = do_PUT = do_POST

            def log_message(self, format: str, *args: Any) -> None:
                pass

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.handle_error = lambda *args: None  # type: ignore[method-assign]
        if tls is not None:
            self.server.socket = tls.wrap_socket(self.server.socket, server_side=True)
        self.port = self.server.server_port
        threading.Thread(target=self.server.serve_forever, args=(0.02,), daemon=True).start()

    def __enter__(self) -> Elsewhere:
        return self

    def __exit__(self, *args: object) -> None:
        self.server.shutdown()
        self.server.server_close()


def claim(url: str) -> Claim:
    return Claim("d", "e", "a1", 1, 60.0, time.time(), url, "orchard-secret")


def test_a_webhook_follows_no_redirect() -> None:
    with Elsewhere() as target, Elsewhere(f"http://127.0.0.1:{target.port}/") as first:
        assert post_webhook(claim(f"http://127.0.0.1:{first.port}/webhook")) == 307
        assert len(first.got) == 1
        assert target.got == []


def test_a_webhook_goes_to_no_server_that_cannot_prove_who_it_is() -> None:
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    trustme.CA().issue_cert("127.0.0.1").configure_cert(tls)
    with Elsewhere(tls=tls) as target:
        with pytest.raises(Unanswered, match="certificate verify failed"):
            post_webhook(claim(f"https://127.0.0.1:{target.port}/webhook"))
        assert target.got == []
