"""Starting and stopping a kernel; what it is started with."""

from __future__ import annotations

import socket
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import requests
import yaml

from rebuno_sync import Client
from rebuno_sync.kernel import (
    Clock,
    EmbeddedKernel,
    ManifestError,
    SchemaError,
    StoreError,
    schema,
)
from rebuno_sync.kernel.store import Store
from tests.unit.kernel.agent_double import PATIENCE, Caller, Webhooks
from tests.unit.kernel.conftest import manifest


def test_starting_and_stopping_twice_is_safe() -> None:
    kernel = EmbeddedKernel()
    kernel.stop()
    assert kernel.start() is kernel
    url = kernel.url
    assert kernel.start().url == url
    assert requests.get(f"{url}/v0/ready", timeout=PATIENCE).json() == {"status": "ready"}
    kernel.stop()
    kernel.stop()
    with pytest.raises(RuntimeError, match=r"start\(\)"):
        _ = kernel.url
    with kernel as same:
        assert same is kernel
        assert requests.get(f"{kernel.url}/v0/health", timeout=PATIENCE).ok


def test_it_listens_where_it_is_told() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with EmbeddedKernel(host="localhost", port=port) as kernel:
        assert kernel.url == f"http://localhost:{port}"
        with pytest.raises(OSError, match=f"cannot listen on localhost:{port}"):
            EmbeddedKernel(host="localhost", port=port).start()
    with EmbeddedKernel(host="localhost", port=port) as kernel:
        assert requests.get(f"{kernel.url}/v0/health", timeout=PATIENCE).ok


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        ({"lease_timeout": 0}, "lease_timeout"),
        ({"lease_timeout": float("nan")}, "lease_timeout"),
        ({"lease_timeout": float("inf")}, "lease_timeout"),
        ({"bearer_token": ""}, "bearer_token"),
    ],
)
def test_arguments_that_will_not_do(arguments: dict[str, Any], word: str) -> None:
    with pytest.raises(ValueError, match=word):
        EmbeddedKernel(**arguments)


def test_nothing_secret_is_shown(webhooks: Webhooks) -> None:
    kernel = EmbeddedKernel(manifest=manifest(webhooks), bearer_token="the-token")
    with kernel:
        assert "memory" in repr(kernel)
        assert "the-token" not in repr(kernel)
        assert "orchard" not in repr(kernel)


def test_the_default_lease_time_out_is_told(
    kernels: Callable[..., EmbeddedKernel], webhooks: Webhooks
) -> None:
    kernel = kernels(manifest=manifest(webhooks), lease_timeout=7.5)
    caller = Caller(kernel.url)
    caller.client("POST", "/v0/executions", {"agent_id": "a1"})
    assert webhooks.next()["lease_timeout_seconds"] == 7.5
    caller.close()


# The file


def test_a_file_belongs_to_one_kernel(tmp_path: Path) -> None:
    path = tmp_path / "k.sqlite3"
    with EmbeddedKernel(path):
        link = tmp_path / "link.sqlite3"
        link.symlink_to(path)
        for name in (path, link):
            with pytest.raises(StoreError, match="in use by another kernel"):
                EmbeddedKernel(name).start()
        script = (
            "import sys; from rebuno_sync.kernel import EmbeddedKernel, StoreError\n"
            "try: EmbeddedKernel(sys.argv[1]).start()\n"
            "except StoreError as exc: print(exc)"
        )
        other = subprocess.run(
            [sys.executable, "-c", script, str(path)],
            capture_output=True,
            text=True,
            timeout=120,
            check=True,
            cwd=Path(__file__).parents[3],
        )
        assert "in use by another kernel" in other.stdout
    with EmbeddedKernel(path):
        pass


def test_a_file_of_a_newer_kernel_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "k.sqlite3"
    with EmbeddedKernel(path):
        pass
    with sqlite3.connect(path) as connection:
        connection.execute("INSERT INTO migrations VALUES (99, '0100_from_the_future', 0)")
    connection.close()
    with pytest.raises(SchemaError, match=r"0100_from_the_future.*upgrade"):
        EmbeddedKernel(path).start()
    # The refusal let go of the file.
    with sqlite3.connect(path) as connection:
        connection.execute("DELETE FROM migrations WHERE position = 99")
    connection.close()
    with EmbeddedKernel(path):
        pass


def test_a_file_of_something_else_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "other.sqlite3"
    with sqlite3.connect(path) as connection:
        connection.execute("CREATE TABLE accounts (id)")
    connection.close()
    with pytest.raises(SchemaError, match="something else"):
        EmbeddedKernel(path).start()
    text = tmp_path / "text"
    text.write_text("no database, but long enough to look like one " * 100)
    with pytest.raises(StoreError, match="as a database"):
        EmbeddedKernel(text).start()
    with pytest.raises(StoreError, match="cannot open"):
        EmbeddedKernel(tmp_path / "missing" / "k.sqlite3").start()


def test_a_migration_is_whole_or_not_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "k.sqlite3"
    Store(path, Clock()).close()
    broken = ("0900_broken", ("CREATE TABLE extra (id)", "CREATE NONSENSE"))
    monkeypatch.setattr(schema, "MIGRATIONS", (*schema.MIGRATIONS, broken))
    with pytest.raises(StoreError, match="NONSENSE"):
        Store(path, Clock())
    whole = ("0900_broken", ("CREATE TABLE extra (id)",))
    monkeypatch.setattr(schema, "MIGRATIONS", (*schema.MIGRATIONS[:-1], whole))
    store = Store(path, Clock())
    with store.read() as tx:
        assert tx.all("SELECT * FROM extra") == []
    store.close()
    store.close()
    with pytest.raises(StoreError, match="stopped"), store.write():
        pass


@pytest.mark.parametrize("in_memory", [True, False])
def test_a_transaction_is_whole_or_not_at_all(in_memory: bool, tmp_path: Path) -> None:
    store = Store(None if in_memory else tmp_path / "k.sqlite3", Clock())
    insert = "INSERT INTO parked VALUES ('e', 's')"
    with pytest.raises(sqlite3.OperationalError), store.write() as tx:
        assert tx.run(insert) == tx.run("INSERT INTO nowhere VALUES (1)")
    with store.read() as tx:
        assert tx.all("SELECT * FROM parked") == []
    with store.write() as tx:
        tx.run(insert)
    with store.read() as tx:
        assert len(tx.all("SELECT * FROM parked")) == 1
    with pytest.raises(sqlite3.IntegrityError), store.write() as tx:
        tx.run(insert)
    with store.write() as tx:
        assert tx.run("DELETE FROM parked") == 1
    store.close()


def test_readers_see_one_state_and_wait_for_nobody(tmp_path: Path) -> None:
    store = Store(tmp_path / "k.sqlite3", Clock())
    with store.read() as before:
        assert before.all("SELECT * FROM parked") == []
        with store.write() as tx:
            tx.run("INSERT INTO parked VALUES ('e', 's')")
            with store.read() as during:
                assert during.all("SELECT * FROM parked") == []
        assert before.all("SELECT * FROM parked") == []
    with store.read() as after:
        assert len(after.all("SELECT * FROM parked")) == 1
    store.close()


# The manifest

GOOD = """
agents:
  - id: a1
    webhook_url: http://127.0.0.1:1/webhook
    secret: s1
  - id: a2
    webhook_url: http://127.0.0.1:1/webhook
    secret: s2
    lease_timeout_seconds: 60
    policy: {default_action: allow}
  - id: a3
    webhook_url: http://127.0.0.1:1/webhook
    secret: s3
    policy_file: policies/a3.yaml
"""


def test_a_manifest_is_applied_at_each_start(tmp_path: Path) -> None:
    (tmp_path / "policies").mkdir()
    policy = tmp_path / "policies" / "a3.yaml"
    policy.write_text("rules: [{id: one, then: {decision: deny}}]\n")
    file = tmp_path / "kernel.yaml"
    file.write_text(GOOD)
    kernel = EmbeddedKernel(tmp_path / "k.sqlite3", manifest=file)

    def agents() -> dict[str, dict[str, Any]]:
        answer = requests.get(f"{kernel.url}/v0/agents", timeout=PATIENCE)
        return {agent["id"]: agent for agent in answer.json()}

    with kernel:
        first = agents()
        assert list(first) == ["a1", "a2", "a3"]
        assert first["a1"]["policy_bundle"] == ""
        assert first["a2"]["lease_timeout_seconds"] == 60
        assert first["a2"]["policy_bundle"] == "default_action: allow\n"
        assert first["a3"]["policy_bundle"] == policy.read_text()
    policy.write_text("rules: [{id: two, then: {decision: deny}}]\n")
    file.write_text(GOOD.replace("    policy: {default_action: allow}\n", ""))
    with kernel:
        second = agents()
        assert second["a2"]["policy_bundle"] == ""
        assert second["a3"]["policy_bundle"] == policy.read_text()
        assert second["a1"]["registered_at"] == first["a1"]["registered_at"]


def agent(**change: Any) -> dict[str, Any]:
    fields = {"id": "a1", "webhook_url": "http://x/", "secret": "hush", **change}
    return {"agents": [{k: v for k, v in fields.items() if v is not None}]}


@pytest.mark.parametrize(
    ("content", "word"),
    [
        ([], "the manifest must be a mapping with agents"),
        ({"agent": []}, "unknown key 'agent'"),
        ({"agents": {}}, "agents must be a list"),
        ({"agents": "a1"}, "agents must be a list"),
        ({"agents": ["a1"]}, r"agents\[0\] must be a mapping"),
        (agent(url="x"), r"agents\[0\] has the unknown key 'url'"),
        (agent(id=None), r"agents\[0\].id must be text"),
        (agent(id=7), r"agents\[0\].id must be text; quote it"),
        (agent(secret=None), r"agents\[0\].secret must be text"),
        (agent(webhook_url="x"), r"agents\[0\].webhook_url must be an http"),
        (agent(lease_timeout_seconds="5"), r"agents\[0\].lease_timeout_seconds must be a number"),
        (agent(lease_timeout_seconds=True), r"agents\[0\].lease_timeout_seconds must be a number"),
        (agent(lease_timeout_seconds=-1), r"agents\[0\].lease_timeout_seconds must be a number"),
        (agent(policy="rules: [{}]"), r"agents\[0\].policy: "),
        (agent(policy={"rules": [{}]}), r"agents\[0\].policy: "),
        (agent(policy=7), r"agents\[0\].policy must be a bundle"),
        (agent(policy="", policy_file="x"), "both policy and policy_file"),
        (agent(policy_file="nowhere.yaml"), r"agents\[0\].policy_file: cannot read"),
        (agent(policy_file=7), r"agents\[0\].policy_file must be a path"),
        ({"agents": agent()["agents"] * 2}, r"agents\[1\].id: 'a1' is there twice"),
    ],
)
def test_manifests_that_will_not_do(content: Any, word: str, tmp_path: Path) -> None:
    file = tmp_path / "kernel.yaml"
    file.write_text(yaml.safe_dump(content))
    with pytest.raises(ManifestError, match=word) as caught:
        EmbeddedKernel(manifest=file).start()
    assert str(caught.value).startswith(str(file))
    assert "hush" not in str(caught.value)
    if isinstance(content, dict):
        with pytest.raises(ManifestError, match=word):
            EmbeddedKernel(manifest=content).start()


def test_a_manifest_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ManifestError, match=r"cannot read the manifest .*nowhere.yaml"):
        EmbeddedKernel(manifest=tmp_path / "nowhere.yaml").start()
    (tmp_path / "bad.yaml").write_text("agents: [")
    with pytest.raises(ManifestError, match="is not YAML"):
        EmbeddedKernel(manifest=tmp_path / "bad.yaml").start()


def test_an_empty_manifest_registers_nobody() -> None:
    with EmbeddedKernel(manifest={"agents": None}) as kernel:
        assert requests.get(f"{kernel.url}/v0/agents", timeout=PATIENCE).json() == []


# The clock


def test_time_does_not_go_back_from_one_start_to_the_next(tmp_path: Path) -> None:
    stamps = []
    for now in (1_790_000_600.0, 1_790_000_000.0):
        machine = Clock(source=lambda now=now: now)
        with (
            EmbeddedKernel(tmp_path / "k.sqlite3", clock=machine) as kernel,
            Client(kernel.url) as client,
        ):
            client.register_agent("a1", "http://127.0.0.1:1/", "orchard-secret")
            stamps.append(client.create("a1", None).created_at)
    assert stamps[1] >= stamps[0]


def test_a_clock_moves_forward_alone() -> None:
    clock = Clock()
    before = clock.now()
    clock.advance(100)
    assert clock.now() - before >= 100
    with pytest.raises(ValueError, match="forward"):
        clock.advance(-1)
