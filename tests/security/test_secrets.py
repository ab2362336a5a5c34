"""Secrets stay where they belong: in no text that a person, a log or another program gets."""

from __future__ import annotations

import ast
import io
import logging
import pickle
import re
import sqlite3
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import rebuno_sync
from rebuno_sync import Agent, Client, NetworkError, signing
from rebuno_sync.cli.main import main as rebuno_sync_command
from rebuno_sync.kernel import EmbeddedKernel, manifest
from rebuno_sync.kernel.deliveries import Claim
from rebuno_sync.kernel.registry import NewAgent
from tests.unit.kernel.agent_double import Caller, Webhooks
from tests.unit.kernel.visitor import Visitor

SECRET = "s3cret-of-the-agent-0123456789"
OLD = "0ld-s3cret-of-the-agent-987654"
TOKEN = "t0ken-of-the-kernel-0123456789"
PACKAGE = Path(rebuno_sync.__file__).parent


@pytest.fixture
def kernel(
    kernels: Callable[..., EmbeddedKernel], webhooks: Webhooks, tmp_path: Path
) -> EmbeddedKernel:
    agent = {"id": "a1", "webhook_url": webhooks.url, "secret": SECRET}
    return kernels(tmp_path / "k.sqlite3", manifest={"agents": [agent]}, bearer_token=TOKEN)


def assert_untold(text: str, *secrets: str) -> None:
    for secret in secrets or (SECRET, OLD, TOKEN):
        assert secret not in text


def test_no_object_tells_a_secret(kernel: EmbeddedKernel, tmp_path: Path) -> None:
    agent = Agent("a1", secret=[SECRET, OLD], base_url="http://127.0.0.1:9")
    file = tmp_path / "secret"
    file.write_text(SECRET)
    entry = manifest.load({"agents": [{"id": "a1", "webhook_url": "http://h/", "secret": SECRET}]})
    parts = kernel._running()
    things: list[Any] = [
        agent,
        agent.__dict__,
        agent._kernel,
        agent._kernel.__dict__,
        Agent("a1", secret=file, base_url="http://127.0.0.1:9").__dict__,
        Client("http://127.0.0.1:9", TOKEN),
        kernel,
        parts,
        entry,
        NewAgent("a1", "http://h/", SECRET),
        Claim("d", "e", "a1", 1, 60.0, 0.0, "http://h/", SECRET),
    ]
    with Client(kernel.url, TOKEN) as owner:
        made = owner.create_api_key("k", ["executions:read"])
        assert made.token
        assert_untold(repr(made) + str(made), made.token)
    for thing in things:
        assert_untold(repr(thing) + str(thing))


def test_no_answer_page_or_figure_tells_a_secret(
    kernel: EmbeddedKernel, caller: Caller, webhooks: Webhooks
) -> None:
    visitor = Visitor(kernel.url)
    visitor.log_in(TOKEN)
    with Client(kernel.url, TOKEN) as owner:
        key = str(owner.create_api_key("k", ["executions:read"]).token)
        id = owner.create("a1", {"x": 1}).id
    webhooks.next()
    for path in (
        "/v0/agents",
        "/v0/agents/a1",
        "/v0/api-keys",
        f"/v0/executions/{id}",
        f"/v0/executions/{id}/events",
        "/metrics",
        "/v0/health",
    ):
        answer = caller.client("GET", path, Authorization=f"Bearer {TOKEN}")
        assert answer.status_code == 200
        assert_untold(answer.text + str(answer.headers), SECRET, TOKEN, key)
    for path in ("/", "/agents", "/agents/a1", f"/executions/{id}", f"/executions/{id}/events"):
        page = visitor.get(path)
        assert page.status_code == 200
        assert_untold(page.text + str(page.headers), SECRET, TOKEN, key)
    visitor.close()


def test_what_was_shown_in_vain_is_not_told_back(kernel: EmbeddedKernel, caller: Caller) -> None:
    wrong = "Wr0ng" + TOKEN
    for headers in ({"Authorization": f"Bearer {wrong}"}, {"Authorization": f"Basic {wrong}"}):
        assert_untold(caller.client("GET", "/v0/agents", **headers).text, wrong, TOKEN)
    visitor = Visitor(kernel.url)
    assert_untold(visitor.log_in(wrong).text, wrong, TOKEN)
    visitor.close()
    answer = caller.client(
        "POST",
        "/v0/agents",
        {"id": "", "webhook_url": "nonsense", "secret": SECRET, "x": 1},
        Authorization=f"Bearer {TOKEN}",
    )
    assert_untold(answer.text)


def test_no_log_and_no_traceback_tells_a_secret(
    kernel: EmbeddedKernel, caller: Caller, webhooks: Webhooks, caplog: pytest.LogCaptureFixture
) -> None:
    told = io.StringIO()
    with caplog.at_level(logging.DEBUG):
        agent = Agent("a1", secret=[SECRET, OLD], base_url="http://127.0.0.1:9", kernel_timeout=0.5)
        agent.bind(lambda: None)
        agent.deliver(b"{}", "sha256=x")
        with Client("http://127.0.0.1:9", TOKEN) as client:
            try:
                client._transport.request("GET", "/", b"", lambda target: client._headers)
            except NetworkError:
                traceback.print_exc(file=told)
        with Client(kernel.url, TOKEN) as owner:
            owner.create("a1")
            body = webhooks.received.get(timeout=30)[1]
            agent.deliver(body, signing.sign_body(SECRET, body))
            agent.close(0)  # its kernel is not there, so what it was given is given up
            kernel.app.view_functions["list_agents"] = lambda: 1 / 0
            failed = caller.client("GET", "/v0/agents", Authorization=f"Bearer {TOKEN}")
            assert failed.status_code == 500
    formatter = logging.Formatter("%(message)s")
    told.write("".join(formatter.format(record) for record in caplog.records))
    assert "ZeroDivisionError" in told.getvalue()
    assert_untold(told.getvalue())
    assert "sha256=" not in told.getvalue()


def test_what_goes_wrong_is_one_line_of_a_log(
    kernel: EmbeddedKernel, caller: Caller, caplog: pytest.LogCaptureFixture
) -> None:
    """A path with a line end in it would write lines of its own."""
    kernel.app.view_functions["get_agent"] = lambda agent_id: 1 / 0
    path = "/v0/agents/x%0aERROR%20forged"
    assert caller.client("GET", path, Authorization=f"Bearer {TOKEN}").status_code == 500
    messages = [record.getMessage() for record in caplog.records]
    assert any("forged" in message for message in messages)
    assert not any("\n" in message for message in messages)


def test_the_command_line_tells_no_secret(
    kernel: EmbeddedKernel,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    file = tmp_path / "secret"
    file.write_text(SECRET)
    monkeypatch.setenv("REBUNO_URL", kernel.url)
    monkeypatch.setenv("REBUNO_API_KEY", TOKEN)
    statuses = []
    for command in (
        ["agents", "add", "a2", "http://127.0.0.1:9/", "--secret-file", str(file)],
        ["agents", "ls"],
        ["agents", "ls", "--json"],
        ["exec", "create", "a1"],
        ["exec", "ls"],
        ["agents", "add", "a/3", "nonsense", "--secret-file", str(file)],
    ):
        monkeypatch.setattr("sys.argv", ["rebuno-sync", *command])
        with pytest.raises(SystemExit) as ended:
            rebuno_sync_command()
        statuses.append(ended.value.code)
        told = capfd.readouterr()
        assert told.out + told.err
        assert_untold(told.out + told.err)
    assert statuses[:5] == [0] * 5
    assert statuses[5]


def test_the_file_of_a_kernel_holds_digests_of_keys(kernel: EmbeddedKernel, tmp_path: Path) -> None:
    with Client(kernel.url, TOKEN) as owner:
        key = str(owner.create_api_key("k", ["executions:read"]).token)
    kernel.stop()
    kept = b"".join(path.read_bytes() for path in tmp_path.iterdir())
    assert key.encode() not in kept
    assert key.rpartition("_")[2].encode() not in kept
    assert TOKEN.encode() not in kept
    with sqlite3.connect(tmp_path / "k.sqlite3") as connection:
        ((digest,),) = connection.execute("SELECT digest FROM api_keys").fetchall()
    connection.close()
    assert len(digest) == 32


def test_an_error_can_be_passed_on_without_what_was_sent() -> None:
    with Client("http://127.0.0.1:9", TOKEN) as client:
        try:
            client._transport.request("GET", "/", b"", lambda target: client._headers)
        except NetworkError as exc:
            assert_untold(repr(exc) + str(exc) + repr(exc.__cause__))
            assert_untold(str(pickle.dumps(str(exc))))


def test_what_must_not_be_guessed_is_not_from_random() -> None:
    makers = {"kernel/keys.py", "kernel/page_guard.py", "kernel/auth.py", "kernel/ids.py"}
    for name in makers:
        source = (PACKAGE / name).read_text("utf-8")
        imported = {
            alias.name
            for node in ast.walk(ast.parse(source))
            if isinstance(node, (ast.Import, ast.ImportFrom))
            for alias in node.names
        }
        assert "random" not in imported, name
    for path in PACKAGE.rglob("*.py"):
        for line in path.read_text("utf-8").splitlines():
            if re.search(r"\brandom\.\w+\(", line):
                assert re.search(r"random\.(uniform|random)\(", line), line


def test_nothing_turns_the_verification_of_certificates_off() -> None:
    off = re.compile(r"verify\s*=\s*False|CERT_NONE|_create_unverified|check_hostname\s*=\s*False")
    for path in PACKAGE.rglob("*.py"):
        assert not off.search(path.read_text("utf-8")), path


# Markup: what an agent, an operator or an approver can set, on every page


MARKUP = "<img src=x onerror=alert(1)>"


def test_nothing_that_was_registered_becomes_markup(
    kernels: Callable[..., EmbeddedKernel], webhooks: Webhooks
) -> None:
    agent_id = MARKUP.replace("/", "")
    policy = {
        "rules": [
            {
                "id": MARKUP,
                "when": {"targets": [MARKUP, "ask"], "arguments": {MARKUP: {"equals": MARKUP}}},
                "then": {"decision": "deny", "reason": MARKUP},
            },
            {
                "id": "ask",
                "then": {
                    "decision": "require_approval",
                    "approval_config": {"approvers": [MARKUP], "message": MARKUP},
                },
            },
        ]
    }
    agent = {"id": agent_id, "webhook_url": f"{webhooks.url}?{MARKUP.replace(' ', '+')}"}
    kernel = kernels(manifest={"agents": [{**agent, "secret": SECRET, "policy": policy}]})
    caller, visitor = Caller(kernel.url, agent_id, SECRET), Visitor(kernel.url)
    created = caller.client(
        "POST",
        "/v0/executions",
        {"agent_id": agent_id, "idempotency_key": MARKUP, "on_behalf_of": MARKUP},
    ).json()
    lease = webhooks.next()
    path = f"/v0/executions/{created['id']}"
    for args in ({MARKUP: MARKUP}, {}):
        step = {"kind": "tool_call", "target": MARKUP, "args": args}
        answer = caller.agent("POST", f"{path}/steps", step, lease=lease).json()
    approval = answer["approval_id"]
    shown = 0
    for page in (
        "/",
        "/agents",
        f"/agents/{agent_id.replace(' ', '%20')}",
        "/approvals",
        f"/approvals/{approval}",
        f"/executions/{created['id']}",
        f"/executions/{created['id']}/events",
        f"/?agent_id={MARKUP}",
        f"/agents/{MARKUP}",
    ):
        html = visitor.get(page).text
        assert "<img" not in html, page
        assert "javascript:" not in html
        shown += html.count("&lt;img")
    assert shown > 15
    caller.close()
    visitor.close()


def test_the_script_of_the_page_makes_no_markup_of_text() -> None:
    """Live updates too: what comes from the kernel is put in as text, or parsed inert."""
    risky = re.compile(
        r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function"
    )
    scripts = list((PACKAGE / "kernel" / "static").glob("*.js"))
    assert scripts
    for script in scripts:
        assert not risky.search(script.read_text("utf-8")), script
    for template in (PACKAGE / "kernel" / "templates").glob("*.html"):
        assert not re.search(r"\|\s*safe\b|autoescape|Markup", template.read_text("utf-8"))
