"""Old executions are deleted, wholly, in pieces, and without holding anybody up."""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from rebuno_sync.kernel import Clock, EmbeddedKernel, registry, retention, transitions
from rebuno_sync.kernel.retention import Retention
from rebuno_sync.kernel.store import Store
from tests.unit.kernel.agent_double import Caller, Webhooks, eventually
from tests.unit.kernel.conftest import manifest
from tests.unit.kernel.test_deadlines import submit
from tests.unit.kernel.test_dispatch import complete, create
from tests.unit.kernel.test_transitions import World

Start = Callable[..., EmbeddedKernel]
#: What belongs to an execution, and what it is found by.
OWNED = {
    "executions": "id",
    "events": "execution_id",
    "steps": "execution_id",
    "occurrences": "execution_id",
    "dispatches": "execution_id",
    "approvals": "execution_id",
    "parked": "execution_id",
    "submissions": "execution_id",
    "token_usage": "execution_id",
    "buckets": "scope_id",
    "remains": "execution_id",
}


@pytest.fixture
def world() -> Iterator[World]:
    world = World()
    yield world
    world.store.close()


def rows(store: Store, execution_id: str) -> dict[str, int]:
    """Return how many rows of each table are of an execution."""
    found = {}
    with store.read() as tx:
        for table, column in OWNED.items():
            row = tx.one(f"SELECT count(*) AS n FROM {table} WHERE {column} = ?", execution_id)
            assert row is not None
            if row["n"]:
                found[table] = row["n"]
    return found


def test_every_table_with_something_of_an_execution_is_known_here(world: World) -> None:
    with world.store.read() as tx:
        tables = tx.all("SELECT name FROM sqlite_master WHERE type = 'table'")
        for (table,) in map(tuple, tables):
            columns = {row["name"] for row in tx.all(f"PRAGMA table_info({table})")}
            assert "execution_id" not in columns or table in OWNED


def lived(world: World, steps: int = 3) -> str:
    """Return an execution that has something in every table, and has ended."""
    world.policy(
        "rules:\n"
        "- {id: ask, when: {target: ask}, then: {decision: require_approval}}\n"
        "- {id: rest, then: {decision: allow, rate_limit: {max_calls: 999, window: 1h}}}\n"
    )
    claim = world.running()
    for _ in range(steps):
        step_id = world.submit(claim)["step_id"]
        world.settle(claim, step_id)
    world.submit(claim, target="gpt", kind="llm_call")
    world.submit(claim, target="ask")
    world.do(transitions.cancel, claim.execution_id)
    return claim.execution_id


def test_an_old_execution_leaves_nothing(world: World) -> None:
    old = lived(world)
    assert rows(world.store, old).keys() >= {
        "executions",
        "events",
        "steps",
        "dispatches",
        "approvals",
        "submissions",
        "token_usage",
    }
    world.clock.advance(50)
    young = lived(world)
    before = rows(world.store, young)
    going_on = world.running().execution_id
    running = rows(world.store, going_on)
    sweeper = Retention(world.store, world.clock, 100)
    sweeper.sweep()
    assert rows(world.store, old)["executions"] == 1, "it is not old enough"
    world.clock.advance(60)
    sweeper.sweep()
    assert rows(world.store, old) == {}
    assert rows(world.store, young) == before
    world.clock.advance(1e6)
    sweeper.sweep()
    assert rows(world.store, young) == {}
    assert rows(world.store, going_on) == running, "what goes on is never too old"


def test_it_goes_in_small_transactions_and_is_out_of_sight_at_once(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = lived(world, steps=100)
    world.clock.advance(101)
    write = world.store.write
    changes: list[int] = []

    class Counted:
        def __enter__(self) -> Any:
            self._context = write()
            tx = self._context.__enter__()
            self._before = tx.one("SELECT total_changes() AS n")["n"]
            self._tx = tx
            return tx

        def __exit__(self, *exc: Any) -> Any:
            changes.append(self._tx.one("SELECT total_changes() AS n")["n"] - self._before)
            return self._context.__exit__(*exc)

    monkeypatch.setattr(world.store, "write", Counted)
    sweeper = Retention(world.store, world.clock, 100)
    assert sweeper._step()
    left = rows(world.store, old)
    assert "executions" not in left
    assert "approvals" not in left
    assert left["events"] > 400
    assert left["remains"] == 1
    sweeper.sweep()
    assert rows(world.store, old) == {}
    assert max(changes) <= 200
    assert len(changes) > 10


def test_what_was_begun_is_taken_up_after_a_restart(tmp_path: Path) -> None:
    world = World()
    world.store.close()
    world.store = Store(tmp_path / "k.sqlite3", world.clock)
    world.do(registry.register, registry.NewAgent("a", "http://agent.test/", "s"))
    old = lived(world)
    world.clock.advance(101)
    assert Retention(world.store, world.clock, 100)._step()
    world.store.close()
    world.store = Store(tmp_path / "k.sqlite3", world.clock)
    assert rows(world.store, old).keys() == {
        "events",
        "steps",
        "dispatches",
        "submissions",
        "remains",
    }
    # Even where nothing else is old any more.
    Retention(world.store, world.clock, 1e9).sweep()
    assert rows(world.store, old) == {}
    world.store.close()


def ended(caller: Caller, webhooks: Webhooks) -> str:
    id = create(caller)
    lease = webhooks.next()
    submit(caller, lease, "t")
    assert complete(caller, lease) == 204
    return id


def status(caller: Caller, path: str) -> int:
    return caller.client("GET", f"/v0/executions/{path}").status_code


@pytest.mark.parametrize("on_disk", [True, False], ids=["on disk", "in memory"])
def test_a_kernel_deletes_when_its_clock_is_moved(
    on_disk: bool, kernels: Start, webhooks: Webhooks, tmp_path: Path
) -> None:
    path = tmp_path / "k.sqlite3" if on_disk else None
    kernel = kernels(path, manifest=manifest(webhooks), retain=3600)
    caller = Caller(kernel.url)
    old = ended(caller, webhooks)
    kernel.advance(3599)
    young = ended(caller, webhooks)
    assert status(caller, old) == 200
    kernel.advance(2)
    for part in ("", "/events", "/steps", "/stream"):
        assert status(caller, old + part) == 404
        if part != "/stream":
            assert status(caller, young + part) == 200
    listed = caller.client("GET", "/v0/executions").json()["executions"]
    assert [x["id"] for x in listed] == [young]
    caller.close()


def test_an_idempotency_key_is_free_again(kernels: Start, webhooks: Webhooks) -> None:
    kernel = kernels(manifest=manifest(webhooks), retain=10)
    caller = Caller(kernel.url)
    body = {"agent_id": "a1", "idempotency_key": "k"}
    first = caller.client("POST", "/v0/executions", body).json()["id"]
    assert complete(caller, webhooks.next()) == 204
    assert caller.client("POST", "/v0/executions", body).json()["id"] == first
    kernel.advance(11)
    assert caller.client("POST", "/v0/executions", body).json()["id"] != first
    caller.close()


def test_it_happens_while_nobody_looks(kernels: Start, webhooks: Webhooks) -> None:
    kernel = kernels(manifest=manifest(webhooks), retain=0.1)
    caller = Caller(kernel.url)
    old = ended(caller, webhooks)
    eventually(lambda: status(caller, old) == 404)
    caller.close()


def test_a_failing_database_is_told_once_and_tried_again(
    world: World, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    old = lived(world)
    world.clock.advance(101)
    monkeypatch.setattr(retention, "_LONGEST_SLEEP", 0.01)
    real, tries = Retention._step, threading.Semaphore(0)

    def failing(self: Retention) -> bool:
        tries.release()
        raise sqlite3.OperationalError("no")

    monkeypatch.setattr(Retention, "_step", failing)
    sweeper = Retention(world.store, world.clock, 100)
    sweeper.start()
    for _ in range(3):
        assert tries.acquire(timeout=30)
    monkeypatch.setattr(Retention, "_step", real)
    eventually(lambda: rows(world.store, old) == {})
    sweeper.stop()
    assert caplog.text.count("old executions cannot be deleted") == 1
    world.clock.advance(1)


def test_deliveries_go_on_meanwhile(kernels: Start, webhooks: Webhooks, tmp_path: Path) -> None:
    clock = Clock()
    kernel = kernels(tmp_path / "k", manifest=manifest(webhooks), retain=100, clock=clock)
    caller = Caller(kernel.url)
    for _ in range(20):
        ended(caller, webhooks)
    mover = threading.Thread(target=clock.advance, args=(200,))
    mover.start()
    for _ in range(5):
        ended(caller, webhooks)
    mover.join(30)
    assert not mover.is_alive()
    assert len(caller.client("GET", "/v0/executions").json()["executions"]) in range(6)
    caller.close()
