"""The webhook in a Flask app: raw bodies whatever the app does with them, factories, prefixes."""

from __future__ import annotations

import http.client
import io
import json
import socket
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any
from urllib.parse import urlsplit

import pytest
from flask import Blueprint, Flask, current_app, request
from werkzeug.middleware.dispatcher import DispatcherMiddleware
from werkzeug.middleware.proxy_fix import ProxyFix
from werkzeug.test import run_wsgi_app

from rebuno_sync import Agent, signing, step
from rebuno_sync.agent import MAX_WEBHOOK_BYTES
from tests.scripted import GENERATION_2, GENERATION_3, ScriptedKernel, served
from tests.scripted.state import Execution

SECRET = "orchard-secret"


@pytest.fixture
def kernel() -> Iterator[ScriptedKernel]:
    with ScriptedKernel(GENERATION_3) as kernel:
        yield kernel


def agent_for(kernel: ScriptedKernel, **options: Any) -> Agent:
    agent = Agent(kernel.agent_id, secret=kernel.secret, base_url=kernel.url, **options)
    agent.bind(lambda: current_app.name)
    return agent


def deliver(kernel: ScriptedKernel, app: Any, agent: Agent, path: str = "/webhook") -> Execution:
    """Serve ``app``, deliver one execution through it, and wait until it has been run."""
    with served(app) as url:
        kernel.agent_url = url + path
        run = kernel.create()
        answer = kernel.deliver(run)
        assert (answer.status, answer.body) == (202, b"taken")
        assert agent.join(30)
    return run


def post(
    url: str, body: bytes | Iterable[bytes], signature: str | None = "", **headers: str
) -> tuple[int, bytes, http.client.HTTPMessage]:
    """POST to a webhook; ``""`` signs the body, an iterable body is sent in chunks."""
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=30)
    given = {"Content-Type": "application/json"}
    given |= {name.replace("_", "-"): value for name, value in headers.items()}
    if signature == "":
        raw = body if isinstance(body, bytes) else b"".join(body := list(body))
        signature = signing.sign_body(SECRET, raw)
    if signature is not None:
        given["Rebuno-Signature"] = signature
    try:
        connection.request(
            "POST", parts.path, body, given, encode_chunked=not isinstance(body, bytes)
        )
        response = connection.getresponse()
        return response.status, response.read(), response.headers
    finally:
        connection.close()


# Before the webhook is called


def reads_form() -> None:
    request.form.get("a")


def reads_data() -> None:
    request.get_data(cache=False)


def reads_json() -> None:
    request.get_json(force=True, cache=False)


def reads_stream() -> None:
    request.stream.read()


def reads_some_of_the_stream() -> None:
    request.stream.read(5)


def reads_environment() -> None:
    request.environ["wsgi.input"].read(int(request.environ["CONTENT_LENGTH"]))


def reads_values_and_files() -> None:
    request.values.get("a")
    request.files.get("b")


READERS = [
    reads_form,
    reads_data,
    reads_json,
    reads_stream,
    reads_some_of_the_stream,
    reads_environment,
    reads_values_and_files,
]


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize(
    "kind", ["application/json", "application/x-www-form-urlencoded", "text/plain", ""]
)
def test_whatever_was_read_before(
    kernel: ScriptedKernel, reader: Callable[[], None], kind: str
) -> None:
    agent = agent_for(kernel)
    app = Flask("the app")
    app.before_request(reader)
    app.register_blueprint(agent.blueprint)
    run = kernel.create()
    kernel.take(run)
    with served(app) as url:
        body = kernel.webhook_body(run)
        assert post(f"{url}/webhook", body, Content_Type=kind)[:2] == (202, b"taken")
        forged = post(f"{url}/webhook", body, signing.sign_body("other", body))
        assert forged[:2] == (401, b"")
        assert agent.join(30)
    assert (run.status, run.output.text) == ("completed", '"the app"')  # type: ignore[union-attr]


def test_other_routes_see_what_was_sent(kernel: ScriptedKernel) -> None:
    """Also those whose requests happen to carry a signature, short and long."""
    agent = agent_for(kernel)
    app = Flask("the app")
    app.register_blueprint(agent.blueprint)

    @app.post("/echo")
    def echo() -> bytes:
        assert request.environ["wsgi.input"].readable()
        return request.get_data()

    @app.post("/lines")
    def lines() -> list[str]:
        return [line.decode() for line in request.stream]

    with served(app) as url:
        for size in (0, 1, MAX_WEBHOOK_BYTES, MAX_WEBHOOK_BYTES + 1, 3 * MAX_WEBHOOK_BYTES + 7):
            body = bytes(n % 251 for n in range(size))
            assert post(f"{url}/echo", body)[1] == body
            assert post(f"{url}/echo", body, None)[1] == body
            chunks = [body[n : n + 10_000] for n in range(0, size, 10_000)]
            assert post(f"{url}/echo", chunks)[1] == body
        rows = [f"line {n}\n" for n in range(12_000)]
        assert json.loads(post(f"{url}/lines", "".join(rows).encode())[1]) == rows


def test_a_chunked_body(kernel: ScriptedKernel) -> None:
    agent = agent_for(kernel)
    run = kernel.create()
    kernel.take(run)
    body = kernel.webhook_body(run)
    with served(agent.app) as url:
        pieces = [body[n : n + 3] for n in range(0, len(body), 3)]
        assert post(f"{url}/webhook", pieces)[:2] == (202, b"taken")
        assert post(f"{url}/webhook", [b"x", *pieces], signing.sign_body(SECRET, body))[0] == 401
        assert agent.join(30)
    assert run.status == "completed"


def test_bodies_over_the_limit(kernel: ScriptedKernel) -> None:
    agent = agent_for(kernel)
    fits, over = b"x" * MAX_WEBHOOK_BYTES, b"x" * (MAX_WEBHOOK_BYTES + 1)
    with served(agent.app) as url:
        for body, status in ((fits, 400), (over, 413)):
            assert post(f"{url}/webhook", body)[0] == status
            assert post(f"{url}/webhook", [body])[0] == status
        assert post(f"{url}/webhook", over, None)[0] == 413
        status, text, _ = post(f"{url}/webhook", [over[:50_000], over[50_000:]])
        assert (status, text) == (413, b"a dispatch has at most 65536 bytes")


def test_the_limit_of_the_app_does_not_matter(kernel: ScriptedKernel) -> None:
    agent = agent_for(kernel)
    app = Flask("the app")
    app.config["MAX_CONTENT_LENGTH"] = 10
    app.register_blueprint(agent.blueprint)
    assert deliver(kernel, app, agent).status == "completed"


def test_the_statuses(kernel: ScriptedKernel) -> None:
    agent = agent_for(kernel)
    with served(agent.app) as url:
        hook = f"{url}/webhook"
        for signature in (None, "sha256=nonsense", "é"):
            status, body, headers = post(hook, b"{}", signature)
            assert (status, body) == (401, b"")
            assert headers["Content-Length"] == "0"
        status, body, headers = post(hook, b"{}")
        assert status == 400
        assert body.startswith(b"this is not a dispatch: ")
        assert headers["Content-Type"] == "text/plain; charset=utf-8"
        assert post(hook, b"")[0] == 400
        assert agent.close(0)
        run = kernel.create()
        kernel.take(run)
        status, body, headers = post(hook, kernel.webhook_body(run))
        assert (status, body) == (503, b"this process is shutting down")
        assert headers["Retry-After"] == "1"


def test_only_post(kernel: ScriptedKernel) -> None:
    client = agent_for(kernel).app.test_client()
    assert client.get("/webhook").status_code == 405
    assert client.put("/webhook").status_code == 405
    assert client.post("/").status_code == 404
    assert client.post("/webhook").status_code == 401


def test_a_client_that_goes_away(
    kernel: ScriptedKernel, capsys: pytest.CaptureFixture[str]
) -> None:
    """Half a body is no body: nothing is taken, and the server serves on."""
    agent = agent_for(kernel)
    run = kernel.create()
    kernel.take(run)
    body = kernel.webhook_body(run)
    with served(agent.app) as url:
        parts = urlsplit(url)
        with socket.create_connection((parts.hostname or "", parts.port or 0)) as sock:
            head = (
                f"POST /webhook HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n"
                f"Rebuno-Signature: {signing.sign_body(SECRET, body)}\r\n\r\n"
            )
            sock.sendall(head.encode() + body[:10])
            sock.shutdown(socket.SHUT_WR)
            status = sock.makefile("rb").readline()
        assert b" 401 " in status
        assert "Traceback" not in capsys.readouterr().err
        assert agent.join(0)
        assert post(f"{url}/webhook", body)[0] == 202
        assert agent.join(30)
    assert kernel.calls("complete") == ["complete"]


def test_the_test_client(kernel: ScriptedKernel) -> None:
    agent = agent_for(kernel)
    run = kernel.create()
    kernel.take(run)
    body = kernel.webhook_body(run)
    answer = agent.app.test_client().post(
        "/webhook", data=body, headers={"Rebuno-Signature": signing.sign_body(SECRET, body)}
    )
    assert (answer.status_code, answer.text) == (202, "taken")
    assert agent.join(30)
    assert run.status == "completed"


def test_a_server_that_does_not_end_the_stream(kernel: ScriptedKernel) -> None:
    """Without ``wsgi.input_terminated``, reading past the length would wait for ever."""

    class Endless(io.RawIOBase):
        def __init__(self, data: bytes) -> None:
            self.data = io.BytesIO(data)

        def readable(self) -> bool:
            return True

        def readinto(self, buffer: Any) -> int:
            piece = self.data.read(len(buffer))
            assert piece, "read past the end of the body"
            buffer[: len(piece)] = piece
            return len(piece)

    agent = agent_for(kernel)
    run = kernel.create()
    kernel.take(run)
    body = kernel.webhook_body(run)
    for length, expected in ((str(len(body)), 202), (None, 401), ("", 401)):
        environ: dict[str, Any] = {
            "REQUEST_METHOD": "POST",
            "PATH_INFO": "/webhook",
            "SERVER_NAME": "x",
            "SERVER_PORT": "80",
            "SERVER_PROTOCOL": "HTTP/1.1",
            "wsgi.url_scheme": "http",
            "wsgi.version": (1, 0),
            "wsgi.input": Endless(body),
            "wsgi.errors": io.StringIO(),
            "HTTP_REBUNO_SIGNATURE": signing.sign_body(SECRET, body),
        }
        if length is not None:
            environ["CONTENT_LENGTH"] = length
        assert run_wsgi_app(agent.app, environ)[1].startswith(str(expected))
    assert agent.join(30)


# How it is put into apps


@pytest.mark.parametrize(
    ("prefix", "path"),
    [
        (None, "/webhook"),
        ("/agents/a", "/agents/a/webhook"),
        ("/tenants/<tenant>/agents", "/tenants/t7/agents/webhook"),
    ],
)
def test_prefixes(kernel: ScriptedKernel, prefix: str | None, path: str) -> None:
    agent = agent_for(kernel)
    app = Flask("the app")
    app.before_request(reads_stream)
    app.register_blueprint(agent.blueprint, url_prefix=prefix)
    assert deliver(kernel, app, agent, path).status == "completed"


def test_another_path(kernel: ScriptedKernel) -> None:
    agent = agent_for(kernel, webhook_path="/hooks/rebuno")
    assert deliver(kernel, agent.app, agent, "/hooks/rebuno").status == "completed"


def test_within_another_blueprint(kernel: ScriptedKernel) -> None:
    agent = agent_for(kernel)
    app, parent = Flask("the app"), Blueprint("api", __name__)
    parent.register_blueprint(agent.blueprint, url_prefix="/agents")
    app.before_request(reads_stream)
    app.register_blueprint(parent, url_prefix="/api")
    assert deliver(kernel, app, agent, "/api/agents/webhook").status == "completed"


def test_mounted_and_behind_middleware(kernel: ScriptedKernel) -> None:
    agent = agent_for(kernel)
    app = Flask("inner")
    app.register_blueprint(agent.blueprint)
    app.before_request(reads_stream)
    app.wsgi_app = ProxyFix(app.wsgi_app)  # type: ignore[method-assign]
    outer = DispatcherMiddleware(Flask("outer"), {"/inner": app})
    run = deliver(kernel, outer, agent, "/inner/webhook")
    assert run.output.text == '"inner"'  # type: ignore[union-attr]


def test_the_app_of_the_agent_mounted_in_another(kernel: ScriptedKernel) -> None:
    agent = agent_for(kernel)
    outer = DispatcherMiddleware(Flask("outer"), {"/agent": agent.app})
    run = deliver(kernel, outer, agent, "/agent/webhook")
    assert run.output.text == '"rebuno_sync.agent"'  # type: ignore[union-attr]


def test_an_app_factory_called_twice(kernel: ScriptedKernel) -> None:
    """Handlers run in the context of the app that took the delivery."""
    agent = agent_for(kernel)

    def create_app(name: str) -> Flask:
        app = Flask(name)
        app.register_blueprint(agent.blueprint, url_prefix="/a")
        app.before_request(reads_stream)
        return app

    first, second = create_app("first"), create_app("second")
    for app in (first, second, first):
        run = deliver(kernel, app, agent, "/a/webhook")
        assert run.output.text == json.dumps(app.name)  # type: ignore[union-attr]


def test_one_agent_twice_in_one_app(kernel: ScriptedKernel) -> None:
    agent = agent_for(kernel)
    app = Flask("the app")
    app.register_blueprint(agent.blueprint, url_prefix="/one")
    app.register_blueprint(agent.blueprint, url_prefix="/two", name="again")
    app.before_request(reads_stream)
    for path in ("/one/webhook", "/two/webhook"):
        assert deliver(kernel, app, agent, path).status == "completed"


def test_agents_whose_ids_look_alike(kernel: ScriptedKernel) -> None:
    app = Flask("the app")
    ids = ["a", "a.b", "a-b", "a_b", "a%2Eb", "a/b", "a b", "A"]
    for n, agent_id in enumerate(ids):
        agent = Agent(agent_id, secret="s", base_url=kernel.url)
        app.register_blueprint(agent.blueprint, url_prefix=f"/{n}")
    rules = {rule.rule for rule in app.url_map.iter_rules()}
    assert {f"/{n}/webhook" for n in range(len(ids))} <= rules


def test_several_agents_in_one_app() -> None:
    """Each has its own kernel, secret and threads; none takes what is meant for another."""
    app = Flask("the app")
    ran: list[tuple[str, str]] = []
    with (
        ScriptedKernel(GENERATION_2, agent_id="a1", secret="secret-1") as one,
        ScriptedKernel(GENERATION_3, agent_id="a2", secret="secret-2") as two,
    ):
        agents = []
        for kernel in (one, two):
            agent = Agent(kernel.agent_id, secret=kernel.secret, base_url=kernel.url)

            def handler(name: str = kernel.agent_id) -> str:
                ran.append((name, threading.current_thread().name))
                return step("who", lambda: name)

            agent.bind(handler)
            app.register_blueprint(agent.blueprint, url_prefix=f"/agents/{kernel.agent_id}")
            agents.append(agent)
        with served(app) as url:
            one.agent_url, two.agent_url = f"{url}/agents/a1/webhook", f"{url}/agents/a2/webhook"
            runs = [one.create(), two.create()]
            assert [k.deliver(r).status for k, r in zip((one, two), runs, strict=True)] == [202] * 2
            one.agent_url = two.agent_url
            assert one.deliver(one.create()).status == 401
            for agent in agents:
                assert agent.join(30)
    assert [run.output.text for run in runs] == ['"a1"', '"a2"']  # type: ignore[union-attr]
    assert sorted(ran) == [("a1", "rebuno-a1-1"), ("a2", "rebuno-a2-1")]
