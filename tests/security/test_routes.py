"""Every route of the kernel, and what each asks for: none is open by having been forgotten."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from rebuno_sync import Client
from rebuno_sync.kernel import EmbeddedKernel, keys, live, page_guard
from tests.unit.kernel.agent_double import PATIENCE, Caller, Webhooks
from tests.unit.kernel.conftest import manifest
from tests.unit.kernel.visitor import Visitor

TOKEN = "the-token-of-the-kernel"
ID = "01a22858-90c6-7f9f-87bd-f638f4b4a5dd"

OPEN = {"GET /v0/health", "GET /v0/ready", "GET /metrics"}
#: For agents alone: a signature, and nothing else.
SIGNED = {
    "POST /v0/executions/<execution_id>/steps",
    "POST /v0/executions/<execution_id>/steps/<step_id>/complete",
    "POST /v0/executions/<execution_id>/steps/<step_id>/fail",
    "POST /v0/executions/<execution_id>/steps/<step_id>/stream",
    "POST /v0/executions/<execution_id>/heartbeat",
    "POST /v0/executions/<execution_id>/complete",
    "POST /v0/executions/<execution_id>/fail",
    "GET /v0/executions/<execution_id>/previous",
    "PUT /v0/agents/<agent_id>/metadata",
}
#: For agents and for clients with executions:read.
EITHER = {
    "GET /v0/executions/<execution_id>",
    "GET /v0/executions/<execution_id>/steps",
    "GET /v0/executions/<execution_id>/steps/<step_id>",
}
#: Of the page, for everybody: what one needs to log in.
BEFORE_LOGGING_IN = {"GET /login", "POST /login", "POST /logout", "GET /static/<path:filename>"}


@pytest.fixture
def kernel(kernels: Any, webhooks: Webhooks) -> EmbeddedKernel:
    started: EmbeddedKernel = kernels(manifest=manifest(webhooks), bearer_token=TOKEN)
    return started


def routes(kernel: EmbeddedKernel) -> Iterator[tuple[str, str, str]]:
    """The name of each route, its method, and a path that leads to it."""
    for rule in kernel.app.url_map.iter_rules():
        path = rule.rule.replace("<path:filename>", "page.css")
        for converter in ("<any(input,output):part>", "<any(args,result,error):part>"):
            path = path.replace(converter, "input" if "input" in converter else "args")
        path = "/".join(ID if part.startswith("<") else part for part in path.split("/"))
        for method in sorted((rule.methods or set()) - {"HEAD", "OPTIONS"}):
            yield f"{method} {rule.rule}", method, path


def test_nobody_gets_in_without_showing_something(kernel: EmbeddedKernel, caller: Caller) -> None:
    seen: set[str] = set()
    for name, method, path in routes(kernel):
        seen.add(name)
        answer = caller.client(method, path, b"{}")
        if name in OPEN:
            assert answer.status_code == 200, name
        elif name in BEFORE_LOGGING_IN:
            # A form needs its token, even this one.
            assert answer.status_code == (200 if method == "GET" else 403), name
        elif path.startswith("/v0/"):
            assert answer.status_code == 401, name
            assert answer.json().keys() == {"code", "message"}
        elif method == "GET":
            assert (answer.status_code, answer.headers["Location"][:6]) == (303, "/login"), name
        else:
            assert answer.status_code == 403, name
    assert seen >= OPEN | SIGNED | EITHER | BEFORE_LOGGING_IN, "a list above is out of date"


def test_an_agent_s_routes_take_no_token_and_a_client_s_no_signature(
    kernel: EmbeddedKernel, caller: Caller
) -> None:
    for name, method, path in routes(kernel):
        if not path.startswith("/v0/") or name in OPEN:
            continue
        shown = caller.client(method, path, b"{}", Authorization=f"Bearer {TOKEN}").status_code
        signed = caller.agent(method, path, b"" if method == "GET" else b"{}").status_code
        if name in SIGNED:
            assert (shown, signed != 401) == (401, True), name
        elif name in EITHER:
            assert 401 not in (shown, signed), name
        else:
            assert (shown != 401, signed) == (True, 401), name


def test_a_key_without_scopes_for_it_opens_no_page(kernel: EmbeddedKernel) -> None:
    """Each page asks for the scope that the API asks for what is on it."""
    with Client(kernel.url, TOKEN) as owner, contextlib.closing(Visitor(kernel.url)) as visitor:
        other = owner.create_api_key("other", ["api_keys:manage"])
        assert visitor.log_in(str(other.token)).status_code == 303
        for name, method, path in routes(kernel):
            if path.startswith(("/v0/", "/metrics")) or name in BEFORE_LOGGING_IN:
                continue
            if method == "GET":
                assert visitor.get(path).status_code == 403, name
            else:
                assert visitor.post(path, {}).status_code == 403, name


def test_every_scope_is_asked_for_somewhere(kernel: EmbeddedKernel, caller: Caller) -> None:
    with Client(kernel.url, TOKEN) as owner:
        token = owner.create_api_key("none", ["api_keys:manage"]).token
        named = set()
        for name, method, path in routes(kernel):
            if path.startswith("/v0/") and name not in OPEN | SIGNED:
                answer = caller.client(method, path, b"{}", Authorization=f"Bearer {token}")
                if answer.status_code == 403:
                    named.add(answer.json()["message"].rpartition(" ")[2])
    assert named == set(keys.SCOPES) - {"api_keys:manage"}


def test_live_output_asks_for_a_token_as_everything_does(
    kernel: EmbeddedKernel, caller: Caller, webhooks: Webhooks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live, "KEEP_ALIVE", 0.01)
    with Client(kernel.url, TOKEN) as owner:
        id = owner.create("a1").id
        path = f"/v0/executions/{id}/stream"
        reader = owner.create_api_key("reader", ["executions:read"])
        writer = owner.create_api_key("writer", ["executions:write"])
        for token, status in ((None, 401), (writer.token, 403), (reader.token, 200), (TOKEN, 200)):
            headers = {} if token is None else {"Authorization": f"Bearer {token}"}
            with caller.session.get(
                kernel.url + path, headers=headers, stream=True, timeout=PATIENCE
            ) as answer:
                assert answer.status_code == status
        # No token in a URL: what is in one ends up in logs.
        assert caller.client("GET", f"{path}?token={TOKEN}&access_token={TOKEN}").status_code == 401


@pytest.mark.parametrize("by", ["API", "page"])
def test_live_output_ends_with_the_key_that_opened_it(
    by: str, kernel: EmbeddedKernel, caller: Caller, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live, "KEEP_ALIVE", 0.01)
    with Client(kernel.url, TOKEN) as owner, contextlib.closing(Visitor(kernel.url)) as visitor:
        id = owner.create("a1").id
        key = owner.create_api_key("reader", ["executions:read"])
        if by == "page":
            visitor.log_in(str(key.token))
            session, url, headers = visitor.session, f"/executions/{id}/live", {}
        else:
            session, url = caller.session, f"/v0/executions/{id}/stream"
            headers = {"Authorization": f"Bearer {key.token}"}
        with session.get(
            kernel.url + url, headers=headers, stream=True, timeout=PATIENCE
        ) as answer:
            lines = answer.iter_lines()
            assert next(lines) == b": connected"
            owner.delete_api_key(key.id)
            ended = threading.Event()

            def read() -> None:
                for _ in lines:
                    pass
                ended.set()

            reading = threading.Thread(target=read, daemon=True)
            reading.start()
            assert ended.wait(PATIENCE), "it goes on without a key"


# The page: what each answer says to a browser


def test_every_page_tells_the_browser_what_it_may_do(
    kernel: EmbeddedKernel, caller: Caller
) -> None:
    with contextlib.closing(Visitor(kernel.url)) as visitor:
        visitor.log_in(TOKEN)
        for _, method, path in routes(kernel):
            if path.startswith(("/v0/", "/metrics")):
                continue
            answer = visitor.get(path) if method == "GET" else visitor.post(path, {})
            for header, value in page_guard.HEADERS.items():
                if header == "Cache-Control" and path.startswith("/static/"):
                    value = "no-cache"
                assert answer.headers[header] == value, (path, header)
    policy = dict(
        part.strip().split(" ", 1)
        for part in page_guard.HEADERS["Content-Security-Policy"].split(";")
    )
    assert policy["default-src"] == "'none'"
    assert policy["frame-ancestors"] == policy["base-uri"] == "'none'"
    assert not any(
        "unsafe" in value or "*" in value or "data:" in value for value in policy.values()
    )


def test_the_api_answers_nothing_that_a_browser_would_run(
    kernel: EmbeddedKernel, caller: Caller
) -> None:
    for _, method, path in routes(kernel):
        if path.startswith(("/v0/", "/metrics")):
            answer = caller.client(method, path, b"{}", Authorization=f"Bearer {TOKEN}")
            kind = answer.headers.get("Content-Type", "application/json")
            assert kind.startswith(("application/json", "text/plain")), path
            assert answer.headers["X-Content-Type-Options"] == "nosniff", path
            assert "Access-Control-Allow-Origin" not in answer.headers
