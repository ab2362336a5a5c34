"""Disks that are full, files that cannot be written or are damaged: told, and nothing lost."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import resource
import shutil
import signal
import sqlite3
import stat
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from rebuno_sync.kernel import (
    EmbeddedKernel,
    StoreError,
    deadlines,
    disk,
    dispatch,
    registry,
    store,
)
from rebuno_sync.kernel.store import Store
from tests.unit.kernel.agent_double import PATIENCE, Caller, Webhooks, eventually
from tests.unit.kernel.conftest import manifest
from tests.unit.kernel.test_dispatch import complete, create, execution, types
from tests.unit.kernel.test_transitions import World

NOBODY = 65534


# At the start


def refusal(path: Path) -> str:
    with pytest.raises(StoreError) as caught:
        EmbeddedKernel(path).start()
    return str(caught.value)


def test_a_directory_that_is_not_there(tmp_path: Path) -> None:
    path = tmp_path / "nowhere" / "k.sqlite3"
    assert refusal(path) == (
        f"cannot open {path}: there is no directory {path.parent}; make it first"
    )
    assert not path.parent.exists()


def test_a_directory_in_place_of_a_file(tmp_path: Path) -> None:
    assert refusal(tmp_path) == f"{tmp_path} is a directory; name a file in it"
    assert not tmp_path.with_name(tmp_path.name + ".lock").exists()


def test_a_file_that_is_none_of_ours(tmp_path: Path) -> None:
    path = tmp_path / "k.sqlite3"
    path.write_bytes(b"this is a text, and no database at all" * 100)
    assert f"cannot open {path} as a database" in refusal(path)
    assert path.read_bytes().startswith(b"this is a text"), "it was written to"


@contextlib.contextmanager
def ordinary_user() -> Iterator[Path]:
    """Yield a directory, and be somebody within whom the permissions of files bind."""
    folder = Path(tempfile.mkdtemp())
    root = os.geteuid() == 0
    folder.chmod(0o755)
    try:
        if root:
            os.chown(folder, NOBODY, NOBODY)
            os.seteuid(NOBODY)
        yield folder
    finally:
        if root:
            os.seteuid(0)
        for path in (folder, *folder.iterdir()):
            path.chmod(path.stat().st_mode | stat.S_IRWXU)
        shutil.rmtree(folder)


@pytest.mark.skipif(sys.platform == "win32", reason="permissions are others there")
def test_a_file_that_may_only_be_read() -> None:
    with ordinary_user() as folder:
        path = folder / "k.sqlite3"
        EmbeddedKernel(path).start().stop()
        path.chmod(0o444)
        before = path.read_bytes()
        assert f"{path} cannot be written; let this user write it" in refusal(path)
        assert path.read_bytes() == before
        path.chmod(0o644)
        EmbeddedKernel(path).start().stop()
        for name in ("k.sqlite3-wal", "k.sqlite3-shm"):
            (folder / name).touch(0o444)
        assert f"{path} cannot be written; let this user write it, what is beside" in refusal(path)


@pytest.mark.skipif(sys.platform == "win32", reason="permissions are others there")
def test_a_directory_in_which_nothing_may_be_made() -> None:
    with ordinary_user() as folder:
        folder.chmod(0o555)
        assert refusal(folder / "k.sqlite3") == (
            f"cannot open {folder / 'k.sqlite3.lock'}: Permission denied"
        )
        assert list(folder.iterdir()) == []


@pytest.fixture
def filled(
    kernels: Callable[..., EmbeddedKernel], webhooks: Webhooks, tmp_path: Path
) -> tuple[Path, str]:
    """A file with some executions in it, and one of them."""
    path = tmp_path / "k.sqlite3"
    kernel = kernels(path, manifest=manifest(webhooks))
    caller = Caller(kernel.url)
    body = {"agent_id": "a1", "input": "x" * 20_000}
    ids = [caller.client("POST", "/v0/executions", body).json()["id"] for _ in range(20)]
    caller.close()
    kernel.stop()
    return path, ids[0]


@pytest.mark.parametrize("damage", ["cut", "overwritten"])
def test_a_damaged_file_is_told_at_the_start_or_when_it_is_read(
    damage: str, filled: tuple[Path, str], webhooks: Webhooks, caplog: pytest.LogCaptureFixture
) -> None:
    path, id = filled
    data = path.read_bytes()
    if damage == "cut":
        path.write_bytes(data[: len(data) // 2])
    else:
        path.write_bytes(data[:4096] + b"\xa5" * (len(data) - 4096))
    kernel, told = EmbeddedKernel(path), ""
    try:
        kernel.start()
    except StoreError as exc:
        told = str(exc)
    if told:
        assert f"{path} is damaged; stop the kernel, and put back a copy" in told
        return
    caller = Caller(kernel.url)
    answers = [
        caller.client("GET", f"/v0/executions/{id}"),
        caller.client("GET", "/v0/executions?limit=200"),
        caller.client("POST", "/v0/executions", {"agent_id": "a1"}),
    ]
    failed = [a for a in answers if a.status_code == 503]
    assert failed
    for answer in failed:
        assert answer.json()["code"] == "internal_error"
        assert f"{path} is damaged" in answer.json()["message"]
    assert caller.client("GET", "/v0/health").status_code == 200
    caller.close()
    kernel.stop()


# A full disk


def test_every_complaint_has_words() -> None:
    told = disk.words(sqlite3.OperationalError("database or disk is full"), Path("k.sqlite3"))
    assert told is not None
    assert told.startswith("there is no space left for k.sqlite3; nothing of this was recorded")
    assert told.endswith("(SQLite: database or disk is full)")
    assert disk.words(sqlite3.OperationalError("no such table: steps"), None) is None


class Space:
    """Lets a running kernel's database grow no further, as SQLite itself then says."""

    def __init__(self, kernel: EmbeddedKernel) -> None:
        self._store: Store = kernel._running().store

    def _limit(self, pages: str) -> None:
        with self._store._write_lock:
            writer = self._store._writer
            if pages == "now":
                writer.execute("PRAGMA wal_checkpoint(TRUNCATE)")
                pages = str(writer.execute("PRAGMA page_count").fetchone()[0])
            writer.execute(f"PRAGMA max_page_count = {pages}")

    def take(self) -> None:
        self._limit("now")

    def give_back(self) -> None:
        self._limit("1073741823")


def until_full(send: Callable[[], Any]) -> tuple[list[Any], Any]:
    """Send until it is refused; return the answers before that, and the refusal."""
    answers = []
    for _ in range(1000):
        answer = send()
        if answer.status_code >= 500:
            return answers, answer
        answers.append(answer)
    raise AssertionError("it never became full")


@pytest.mark.parametrize("on_disk", [True, False], ids=["on disk", "in memory"])
def test_a_full_disk_is_told_and_outlived(
    on_disk: bool,
    kernels: Callable[..., EmbeddedKernel],
    webhooks: Webhooks,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path = tmp_path / "k.sqlite3" if on_disk else None
    kernel = kernels(path, manifest=manifest(webhooks))
    caller = Caller(kernel.url)
    space = Space(kernel)
    first = create(caller)
    lease = webhooks.next()
    eventually(lambda: "dispatch.acked" in types(caller, first))
    space.take()
    body = {"agent_id": "a1", "input": "x" * 3000}
    created, refused = until_full(lambda: caller.client("POST", "/v0/executions", body))
    assert refused.status_code == 503
    assert refused.json()["code"] == "internal_error"
    where = path or "the database in memory"
    assert f"there is no space left for {where}" in refused.json()["message"]
    for _ in range(2):  # it can be asked, it says no, and it is still there
        listed = caller.client("GET", "/v0/executions?limit=200").json()["executions"]
        assert {x["id"] for x in listed} == {first, *(a.json()["id"] for a in created)}
        ready = caller.client("GET", "/v0/ready")
        assert ready.status_code == 503
        assert "there is no space left" in ready.json()["message"]
        assert caller.client("GET", "/v0/health").status_code == 200
    steps = f"/v0/executions/{first}/steps"
    step = {"kind": "tool_call", "target": "t", "args": "y" * 100_000}
    answer = caller.agent("POST", steps, step, lease=lease)
    assert answer.status_code == 503
    assert caller.client("GET", steps).json() == [], "half of a refused step was recorded"

    space.give_back()
    answer = caller.agent("POST", steps, step, lease=lease)
    assert answer.json()["decision"] == "proceed"
    monkeypatch.setattr(store, "_FAILING_SECONDS", 0.0)  # as if they had passed
    assert caller.client("GET", "/v0/ready").status_code == 200
    done = f"{steps}/{answer.json()['step_id']}/complete"
    assert caller.agent("POST", done, {"result": "z"}, lease=lease).status_code == 200
    assert complete(caller, lease) == 204

    # The scheduler has gone on: everything that was acknowledged is delivered.
    waiting = {a.json()["id"] for a in created}
    while waiting:
        webhook = webhooks.next()
        if webhook["execution_id"] in waiting:
            assert complete(caller, webhook) == 204
            waiting.remove(webhook["execution_id"])
    for answer in created:
        assert execution(caller, answer.json()["id"])["status"] == "completed"
        events = caller.client("GET", f"/v0/executions/{answer.json()['id']}/events").json()
        assert [e["event_seq"] for e in events] == list(range(1, len(events) + 1))
    tracebacks = [r for r in caplog.records if r.exc_info]
    assert tracebacks == [], "a full disk is told in words"
    caller.close()


def test_a_limiter_that_may_fail_does_not_go_on_without_its_transaction(tmp_path: Path) -> None:
    world = World()
    world.store.close()
    world.store = Store(tmp_path / "k.sqlite3", world.clock)
    world.do(registry.register, registry.NewAgent("a", "http://agent.test/", "s"))
    world.policy(
        "rules: [{id: r, then: {decision: allow, rate_limit:"
        " {max_calls: 9, window: 1m, on_limiter_error: allow}}}]"
    )
    claim = world.running()
    before = world.events(claim.execution_id)
    # SQLite rolls the whole transaction back by itself then, and would take each statement that
    # follows as one of its own.
    world.store._writer.execute(
        "CREATE TEMP TRIGGER full BEFORE INSERT ON main.buckets"
        " BEGIN SELECT raise(ROLLBACK, 'database or disk is full'); END"
    )
    with pytest.raises(StoreError, match="no space left"):
        world.submit(claim)
    world.store._writer.execute("DROP TRIGGER full")
    assert world.events(claim.execution_id) == before
    assert world.submit(claim)["decision"] == "proceed"
    world.store.close()


KERNEL = """
import json, logging, sys
from rebuno_sync.kernel import EmbeddedKernel
logging.basicConfig(stream=sys.stderr)
with EmbeddedKernel(sys.argv[1], manifest=json.loads(sys.argv[2]), lease_timeout=5) as kernel:
    print(kernel.url, flush=True)
    sys.stdin.read()
"""


@pytest.mark.skipif(not hasattr(resource, "prlimit"), reason="the limit of another process")
def test_a_process_that_may_write_no_larger_files(tmp_path: Path, webhooks: Webhooks) -> None:
    path = tmp_path / "k.sqlite3"
    process = subprocess.Popen(
        [sys.executable, "-c", KERNEL, str(path), json.dumps(manifest(webhooks))],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[3],
    )
    assert process.stdout is not None
    caller = Caller(process.stdout.readline().strip())
    try:
        endless = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
        wal = path.with_name(path.name + "-wal")
        resource.prlimit(
            process.pid, resource.RLIMIT_FSIZE, (wal.stat().st_size + 100_000, endless[1])
        )
        body = {"agent_id": "a1", "input": "x" * 5000}
        created, refused = until_full(lambda: caller.client("POST", "/v0/executions", body))
        assert created
        assert refused.status_code == 503
        assert str(path) in refused.json()["message"]
        assert "Nothing of this was recorded" in refused.json()["message"]
        for answer in created:
            assert execution(caller, answer.json()["id"])["input"] == "x" * 5000
        resource.prlimit(process.pid, resource.RLIMIT_FSIZE, endless)
        again = caller.client("POST", "/v0/executions", body)
        assert again.status_code == 201
        waiting = {a.json()["id"] for a in (*created, again)}
        while waiting:
            webhook = webhooks.next()
            if webhook["execution_id"] in waiting and complete(caller, webhook) == 204:
                waiting.remove(webhook["execution_id"])
        # Killed now, it has all of it.
        process.send_signal(signal.SIGKILL)
        assert process.wait(PATIENCE) == -signal.SIGKILL
    finally:
        caller.close()
        process.kill()
        _, told = process.communicate(timeout=PATIENCE)
    assert "Traceback" not in told, told
    with EmbeddedKernel(path) as kernel:
        caller = Caller(kernel.url)
        for answer in (*created, again):
            assert execution(caller, answer.json()["id"])["status"] == "completed"
        caller.close()
    database = sqlite3.connect(path)
    assert database.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
    database.close()


def test_a_locked_file_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "k.sqlite3"
    EmbeddedKernel(path).start().stop()
    other = sqlite3.connect(path, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    monkeypatch.setattr("rebuno_sync.kernel.store._BUSY_SECONDS", 0.05)
    assert f"another program is writing {path}" in refusal(path)
    other.execute("ROLLBACK")
    other.close()
    EmbeddedKernel(path).start().stop()


def test_a_scheduler_that_cannot_read_says_so_once_and_goes_on(
    kernels: Callable[..., EmbeddedKernel],
    webhooks: Webhooks,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    real, failing, tries = deadlines.next_due, threading.Event(), threading.Semaphore(0)

    def next_due(tx: Any) -> float | None:
        if failing.is_set():
            tries.release()
            raise sqlite3.OperationalError("disk I/O error")
        return real(tx)

    monkeypatch.setattr(deadlines, "next_due", next_due)
    monkeypatch.setattr(dispatch, "_PAUSE_AFTER_ERROR", 0.01)
    kernel = kernels(manifest=manifest(webhooks))
    caller = Caller(kernel.url)
    failing.set()
    with caplog.at_level(logging.ERROR):
        id = create(caller)
        for _ in range(3):
            assert tries.acquire(timeout=PATIENCE)
        failing.clear()
        assert webhooks.next()["execution_id"] == id
    told = [r for r in caplog.records if "the scheduler failed" in r.getMessage()]
    assert len(told) == 1
    assert told[0].exc_info is None
    caller.close()
