"""API keys: made, shown once, held to their scopes, deleted."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from rebuno_sync import Client, ForbiddenError, NotFoundError, UnauthorizedError, ValidationError
from rebuno_sync.kernel import EmbeddedKernel, keys
from tests.unit.kernel.agent_double import Caller, Webhooks
from tests.unit.kernel.conftest import manifest

TOKEN = "the-token-of-the-kernel"
NOBODY = "00000000-0000-7000-8000-000000000000"

#: Every route of a client, the scope it asks for, and the status that a key with it gets.
ROUTES: list[tuple[str, str, Any, str, int]] = [
    ("POST", "/v0/executions", {"agent_id": "a1"}, "executions:write", 201),
    ("POST", f"/v0/executions/{NOBODY}/cancel", None, "executions:write", 404),
    ("GET", "/v0/executions", None, "executions:read", 200),
    ("GET", f"/v0/executions/{NOBODY}", None, "executions:read", 404),
    ("GET", f"/v0/executions/{NOBODY}/events", None, "executions:read", 404),
    ("GET", f"/v0/executions/{NOBODY}/stream", None, "executions:read", 404),
    ("GET", f"/v0/executions/{NOBODY}/steps", None, "executions:read", 404),
    ("GET", f"/v0/executions/{NOBODY}/steps/s", None, "executions:read", 404),
    ("GET", "/v0/approvals", None, "approvals:read", 200),
    ("GET", f"/v0/approvals/{NOBODY}", None, "approvals:read", 404),
    ("POST", f"/v0/approvals/{NOBODY}/grant", {}, "approvals:write", 404),
    ("POST", f"/v0/approvals/{NOBODY}/deny", {}, "approvals:write", 404),
    ("GET", "/v0/agents", None, "agents:read", 200),
    ("GET", "/v0/agents/a1", None, "agents:read", 200),
    (
        "POST",
        "/v0/agents",
        {"id": "a2", "webhook_url": "http://127.0.0.1:1/", "secret": "s"},
        "agents:write",
        201,
    ),
    ("DELETE", "/v0/agents/nobody", None, "agents:write", 404),
    ("POST", "/v0/policies/a1", {"bundle": "default_action: allow"}, "policies:write", 204),
    ("POST", "/v0/policies/a1/test", {"cases": [{"target": "t"}]}, "policies:write", 200),
    ("GET", "/v0/api-keys", None, "api_keys:manage", 200),
    ("POST", "/v0/api-keys", {"name": "n", "scopes": ["api_keys:manage"]}, "api_keys:manage", 201),
    ("DELETE", f"/v0/api-keys/{NOBODY}", None, "api_keys:manage", 404),
]


@pytest.fixture
def kernel(
    kernels: Callable[..., EmbeddedKernel], webhooks: Webhooks, tmp_path: Path
) -> EmbeddedKernel:
    return kernels(tmp_path / "k.sqlite3", manifest=manifest(webhooks), bearer_token=TOKEN)


@pytest.fixture
def caller(kernel: EmbeddedKernel) -> Iterator[Caller]:
    caller = Caller(kernel.url)
    yield caller
    caller.close()


@pytest.fixture
def owner(kernel: EmbeddedKernel) -> Iterator[Client]:
    with Client(kernel.url, TOKEN) as client:
        yield client


def ask(caller: Caller, token: str, method: str, path: str, body: Any = None) -> Any:
    return caller.client(method, path, body, Authorization=f"Bearer {token}")


@pytest.mark.parametrize(
    ("method", "path", "body", "scope", "status"), ROUTES, ids=[f"{m} {p}" for m, p, *_ in ROUTES]
)
def test_every_route_asks_for_its_scope_and_no_other(
    method: str, path: str, body: Any, scope: str, status: int, owner: Client, caller: Caller
) -> None:
    with_it = owner.create_api_key("with", [scope])
    without = owner.create_api_key("without", [s for s in keys.SCOPES if s != scope])
    refused = ask(caller, without.token, method, path, body)
    assert refused.status_code == 403
    assert refused.json() == {
        "code": "forbidden",
        "message": f"the API key lacks the scope {scope}",
    }
    assert ask(caller, with_it.token, method, path, body).status_code == status
    assert ask(caller, TOKEN, method, path, body).status_code == status
    assert caller.client(method, path, body).status_code == 401


def test_every_route_for_clients_is_in_the_list_above(kernel: EmbeddedKernel) -> None:
    known = {(m, p.replace(NOBODY, "*")) for m, p, *_ in ROUTES}
    agents_own = ("complete", "fail", "heartbeat", "previous", "metadata")
    for rule in kernel.app.url_map.iter_rules():
        if not rule.rule.startswith("/v0/") or rule.rule in ("/v0/health", "/v0/ready"):
            continue
        if rule.rule.endswith(agents_own) or rule.rule.endswith("<step_id>/stream"):
            continue
        path = rule.rule.replace("<execution_id>", "*").replace("<approval_id>", "*")
        path = path.replace("<key_id>", "*").replace("<step_id>", "s")
        for method in rule.methods - {"HEAD", "OPTIONS"}:
            if (method, path) == ("POST", "/v0/executions/*/steps"):
                continue
            names = {path.replace("<agent_id>", id) for id in ("a1", "nobody")}
            assert any((method, name) in known for name in names), f"{method} {rule.rule}"


def test_a_token_is_shown_once_and_kept_as_a_digest(
    owner: Client, kernel: EmbeddedKernel, tmp_path: Path
) -> None:
    made = owner.create_api_key("reader", ["executions:read", "agents:read", "executions:read"])
    assert made.token.startswith("rbk_")
    assert made.token not in repr(made)
    (listed,) = owner.api_keys()
    assert (listed.id, listed.name, listed.token) == (made.id, "reader", "")
    assert listed.scopes == ["executions:read", "agents:read"]
    assert listed.extra == {}
    kernel.stop()
    secret = made.token.rpartition("_")[2].encode()
    for file in tmp_path.iterdir():
        assert secret not in file.read_bytes(), file
    with sqlite3.connect(tmp_path / "k.sqlite3") as database:
        (digest,) = database.execute("SELECT digest FROM api_keys").fetchone()
    database.close()
    assert len(digest) == 32


def test_keys_outlive_a_restart_and_end_with_their_deletion(
    owner: Client, caller: Caller, kernel: EmbeddedKernel
) -> None:
    made = owner.create_api_key("reader", ["executions:read"])
    kernel.stop()
    kernel.start()
    caller.url = kernel.url
    assert ask(caller, made.token, "GET", "/v0/executions").status_code == 200
    with Client(kernel.url, TOKEN) as again:
        again.delete_api_key(made.id)
        assert list(again.api_keys()) == []
        with pytest.raises(NotFoundError):
            again.delete_api_key(made.id)
    refused = ask(caller, made.token, "GET", "/v0/executions")
    assert (refused.status_code, refused.json()["code"]) == (401, "unauthorized")


@pytest.mark.parametrize(
    "spoil",
    [
        lambda token: token[:-1] + ("A" if token[-1] != "A" else "B"),
        lambda token: token + "x",
        lambda token: token[:-1],
        lambda token: token.upper(),
        lambda token: "rbk_",
        lambda token: "rbk_" + "0" * 32 + token[36:],
        lambda token: token.replace("_", "-"),
        lambda token: token + "é",
    ],
)
def test_a_token_that_is_not_quite_right(
    spoil: Callable[[str], str], owner: Client, caller: Caller
) -> None:
    made = owner.create_api_key("reader", list(keys.SCOPES))
    wrong = spoil(made.token)
    assert wrong != made.token
    answer = caller.client(
        "GET", "/v0/executions", None, Authorization=f"Bearer {wrong}".encode("latin-1")
    )
    assert answer.status_code == 401


def test_a_key_gives_no_scope_that_it_lacks(owner: Client, kernel: EmbeddedKernel) -> None:
    made = owner.create_api_key("manager", ["api_keys:manage", "executions:read"])
    with Client(kernel.url, made.token) as manager:
        assert manager.create_api_key("less", ["executions:read"]).scopes == ["executions:read"]
        with pytest.raises(ForbiddenError, match="lacks the scope approvals:write"):
            manager.create_api_key("more", ["executions:read", "approvals:write"])
        assert len(list(manager.api_keys())) == 2


@pytest.mark.parametrize(
    ("body", "word"),
    [
        ({"scopes": ["executions:read"]}, "name is missing"),
        ({"name": "", "scopes": ["executions:read"]}, "name is missing"),
        ({"name": "n" * 201, "scopes": ["executions:read"]}, "name must be text of 1 to 200"),
        ({"name": "n"}, "scopes must be a list"),
        ({"name": "n", "scopes": "executions:read"}, "scopes must be a list"),
        ({"name": "n", "scopes": [1]}, "scopes must be a list of text"),
        ({"name": "n", "scopes": []}, "scopes is empty; give some of executions:read"),
        ({"name": "n", "scopes": ["executions"]}, "'executions' is no scope; the scopes are"),
        ({"name": "n", "scopes": ["executions:read"], "ttl": 1}, "unknown field 'ttl'"),
    ],
)
def test_keys_that_will_not_do(body: Any, word: str, caller: Caller, owner: Client) -> None:
    answer = ask(caller, TOKEN, "POST", "/v0/api-keys", body)
    assert (answer.status_code, answer.json()["code"]) == (400, "validation_error")
    assert word in answer.json()["message"]
    assert list(owner.api_keys()) == []


def test_an_open_kernel_holds_a_key_to_its_scopes_all_the_same(
    kernels: Callable[..., EmbeddedKernel],
) -> None:
    kernel = kernels()
    with Client(kernel.url) as anybody:
        made = anybody.create_api_key("reader", ["executions:read"])
        with Client(kernel.url, made.token) as reader:
            assert list(reader.list()) == []
            with pytest.raises(ForbiddenError, match="agents:read"):
                list(reader.agents())
        anybody.delete_api_key(made.id)
        with Client(kernel.url, made.token) as reader, pytest.raises(UnauthorizedError):
            list(reader.list())


def test_the_client_says_what_the_kernel_refused(owner: Client) -> None:
    with pytest.raises(ValidationError, match="is no scope"):
        owner.create_api_key("n", ["everything"])
