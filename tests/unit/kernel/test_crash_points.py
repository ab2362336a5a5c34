"""Kernels that are killed at every statement of every kind of transaction.

The kernel runs in a process of its own and kills itself with SIGKILL at the n-th statement that
it sends to SQLite, n being drawn anew for every start: before it, or after it, which for the end
of a transaction is right after the commit and before anybody was answered. A driver takes
executions through steps, approvals, cancels, failures, rate limits, token budgets, deletions of
the old, and notes what was acknowledged.

``REBUNO_KILLS`` says how many kills there are, ``REBUNO_SEED`` which; by default there are as many
as fit in half a minute, and no more than thirty.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import random
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import requests

from tests.unit.kernel.agent_double import PATIENCE, Caller, Webhooks

KILLS = int(os.environ.get("REBUNO_KILLS", "30"))
LONGEST_SECONDS = 30.0 if "REBUNO_KILLS" not in os.environ else math.inf
#: Statements that a start may live for at most; a start itself takes some dozens.
LONGEST_LIFE = 900

KERNEL = """
import json, os, signal, sqlite3, sys, threading
from rebuno_sync.kernel import EmbeddedKernel, store

path, manifest = sys.argv[1], json.loads(sys.argv[2])
left, after = int(sys.argv[3]), sys.argv[4] == "after"
lock = threading.Lock()

class Connection(sqlite3.Connection):
    def _counted(self, run, *args):
        global left
        with lock:
            left -= 1
            mine = left == 0
        if mine and not after:
            os.kill(os.getpid(), signal.SIGKILL)
        answer = run(*args)
        if mine:
            os.kill(os.getpid(), signal.SIGKILL)
        return answer

    def execute(self, *args):
        return self._counted(super().execute, *args)

    def executemany(self, *args):
        return self._counted(super().executemany, *args)

if left:
    connect = sqlite3.connect
    store.sqlite3.connect = lambda *args, **more: connect(*args, factory=Connection, **more)
with EmbeddedKernel(path, manifest=manifest, lease_timeout=0.4, retain=600) as kernel:
    print(kernel.url, flush=True)
    sys.stdin.read()
"""
POLICY = {
    "default_action": "allow",
    "rules": [
        {"id": "ask", "when": {"target": "ask"}, "then": {"decision": "require_approval"}},
        {"id": "no", "when": {"target": "no"}, "then": {"decision": "deny"}},
        {
            "id": "model",
            "when": {"step_kind": "llm_call"},
            "then": {"decision": "allow", "token_budget": {"max_tokens": 15}},
        },
    ],
}
USED = {"status": 200, "body": json.dumps({"usage": {"total_tokens": 10}})}
#: The steps of every execution: kind and target, equal ones told apart by their count.
STEPS = [
    ("tool_call", "t"),
    ("tool_call", "t"),
    ("tool_call", "no"),
    ("llm_call", "gpt"),
    ("llm_call", "gpt"),
    ("llm_call", "gpt"),
    ("tool_call", "ask"),
    ("local", "l"),
]


class Gone(Exception):
    """The kernel is dead."""


class Process:
    """A kernel that lives for so many statements."""

    def __init__(self, path: Path, webhooks: Webhooks, life: int, after: bool) -> None:
        agent = {"id": "a1", "webhook_url": webhooks.url, "secret": "orchard-secret"}
        manifest = json.dumps({"agents": [{**agent, "policy": POLICY}]})
        self.process = subprocess.Popen(
            [
                sys.executable,
                "-c",
                KERNEL,
                str(path),
                manifest,
                str(life),
                "after" if after else "before",
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=Path(__file__).parents[3],
        )
        assert self.process.stdout is not None
        self.url = self.process.stdout.readline().strip()

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate(timeout=PATIENCE)
        assert self.process.returncode == -signal.SIGKILL


class Driver:
    """Drives executions as an agent and its operators would, and holds the kernel to its word."""

    def __init__(self, webhooks: Webhooks) -> None:
        self.webhooks = webhooks
        self.caller = Caller("")
        self.leases: dict[str, dict[str, Any]] = {}
        self.created: list[str] = []
        self.ended: dict[str, str] = {}
        self.results: dict[str, Any] = {}
        self.decided: dict[str, str] = {}
        self.numbers: dict[tuple[str, int], str] = {}

    def connect(self, url: str) -> None:
        self.caller.close()
        self.caller = Caller(url)

    def client(self, method: str, path: str, body: Any = None) -> requests.Response:
        return self._alive(lambda: self.caller.client(method, path, body))

    def agent(self, path: str, body: Any, lease: dict[str, Any]) -> requests.Response:
        return self._alive(lambda: self.caller.agent("POST", path, body, lease=lease))

    def _alive(self, send: Any) -> requests.Response:
        try:
            answer: requests.Response = send()
        except requests.RequestException as exc:
            raise Gone from exc
        assert answer.status_code < 500, answer.text
        return answer

    def create(self) -> None:
        answer = self.client("POST", "/v0/executions", {"agent_id": "a1", "input": 1})
        assert answer.status_code == 201
        self.created.append(answer.json()["id"])

    def turn(self) -> bool:
        """Do the next thing that there is to do; tell whether any execution still goes on."""
        deadline = time.monotonic() + PATIENCE
        while True:
            for approval in self.client("GET", "/v0/approvals").json():
                self.decide(approval["id"], approval["step_id"])
            self.drain()
            if self.leases:
                self.handle(self.leases.popitem()[1])
                return True
            going_on = self.client("GET", "/v0/executions?status=running&limit=1").json()
            if not going_on["executions"]:
                return False
            assert time.monotonic() < deadline, "an execution is stuck"
            time.sleep(0.01)

    def drain(self) -> None:
        """Take what was delivered; of several attempts at an execution the last may still be good.

        The newest goes first: where there are many, the leases of the others run out meanwhile.
        """
        while not self.webhooks.received.empty():
            _, body = self.webhooks.received.get()
            with contextlib.suppress(json.JSONDecodeError):  # its sender died on the way
                lease = json.loads(body)
                self.leases.pop(lease["execution_id"], None)
                self.leases[lease["execution_id"]] = lease

    def handle(self, lease: dict[str, Any]) -> None:
        """Run the handler for one dispatch, as far as the kernel lets it."""
        id = lease["execution_id"]
        path = f"/v0/executions/{id}"
        for number, (kind, target) in enumerate(STEPS):
            answer = self.agent(f"{path}/steps", {"kind": kind, "target": target}, lease)
            if answer.status_code in (404, 409):
                return
            decision = answer.json()
            if decision["decision"] in ("execution_terminal", "execution_blocked"):
                return
            step_id = decision["step_id"]
            assert self.numbers.setdefault((id, number), step_id) == step_id, "another step"
            if decision["decision"] == "blocked":
                return
            if decision["decision"] == "proceed":
                assert step_id not in self.results, "an acknowledged result was lost"
                assert self.decided.get(step_id) != "denied", "a denial was lost"
                result = USED if kind == "llm_call" else {"attempt": lease["dispatch_attempt"]}
                done = self.agent(f"{path}/steps/{step_id}/complete", {"result": result}, lease)
                if done.status_code == 409:
                    return
                if done.json()["decision"] == "recorded":
                    self.results[step_id] = result
            elif decision["decision"] == "replay":
                known = self.results.setdefault(step_id, decision["result"])
                assert decision["result"] == known, "another result"
            else:
                assert decision["decision"] == "denied", decision
                before = self.decided.setdefault(step_id, "denied")
                assert before == "denied", "a grant was lost"
        how = "fail" if len(self.created) % 3 == 0 else "complete"
        body: dict[str, Any] = {"error": "enough"} if how == "fail" else {"output": id}
        ended = self.agent(f"{path}/{how}", body, lease)
        if ended.status_code == 204:
            self.ended[id] = "failed" if how == "fail" else "completed"

    def decide(self, approval_id: str, step_id: str) -> None:
        how = "grant" if len(self.created) % 2 else "deny"
        body = {"decided_by": "ann"}
        answer = self.client("POST", f"/v0/approvals/{approval_id}/{how}", body)
        if answer.status_code == 204:
            self.decided[step_id] = "granted" if how == "grant" else "denied"

    def cancel(self, id: str) -> None:
        answer = self.client("POST", f"/v0/executions/{id}/cancel")
        if answer.status_code == 204:
            self.ended[id] = "cancelled"


@pytest.fixture
def driver(webhooks: Webhooks) -> Iterator[Driver]:
    driver = Driver(webhooks)
    yield driver
    driver.caller.close()


def check(driver: Driver, path: Path) -> None:
    """Hold what is on the disk against what was acknowledged."""
    for id in driver.created:
        execution = driver.client("GET", f"/v0/executions/{id}").json()
        assert execution["status"] == driver.ended.get(id, execution["status"])
        assert execution["status"] in ("completed", "failed", "cancelled"), "it is stuck"
        events = driver.client("GET", f"/v0/executions/{id}/events?limit=1000").json()
        assert [e["event_seq"] for e in events] == list(range(1, len(events) + 1))
        types = [e["type"] for e in events]
        assert types.count(f"execution.{execution['status']}") == 1
        steps = {s["step_id"]: s for s in driver.client("GET", f"/v0/executions/{id}/steps").json()}
        budget = [s for s in steps.values() if s["kind"] == "llm_call"]
        spent = sum(10 for s in budget if s["status"] == "succeeded")
        assert spent <= 20, "more ran than the budget lets begin"
        for step_id in [s for (x, _), s in driver.numbers.items() if x == id]:
            step = steps[step_id]
            if step_id in driver.results:
                assert (step["status"], step["result"]) == ("succeeded", driver.results[step_id])
            if driver.decided.get(step_id) == "denied":
                assert step["status"] == "denied"
    database = sqlite3.connect(path)
    assert database.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
    usage = database.execute(
        "SELECT u.step_id FROM token_usage u JOIN steps s ON s.step_id = u.step_id"
        " WHERE (s.status = 'succeeded') != (u.tokens = 10)"
    )
    assert usage.fetchall() == [], "a result and its usage were not recorded together"
    queued = database.execute(
        "SELECT count(*) FROM dispatches d JOIN executions e ON e.id = d.execution_id"
        " WHERE d.state IN ('pending', 'in_flight', 'held')"
        " AND e.status NOT IN ('running', 'blocked')"
    )
    assert queued.fetchone() == (0,)
    database.close()


def test_killed_at_any_statement(driver: Driver, webhooks: Webhooks, tmp_path: Path) -> None:
    seed = int(os.environ.get("REBUNO_SEED", "7"))
    chance = random.Random(seed)
    path = tmp_path / "k.sqlite3"
    started = time.monotonic()
    for _ in range(KILLS):
        if driver.created and time.monotonic() - started > LONGEST_SECONDS:
            break
        # Many short lives: what happens around a start is worth the most, and each is drawn apart.
        life = chance.choice([chance.randrange(1, 120), chance.randrange(120, LONGEST_LIFE)])
        kernel = Process(path, webhooks, life, after=chance.random() < 0.5)
        try:
            if not kernel.url:
                continue  # it died before it listened
            driver.connect(kernel.url)
            while True:
                driver.create()
                if chance.random() < 0.15:
                    driver.cancel(driver.created[-1])
                for _ in range(chance.randrange(1, 4)):
                    driver.turn()
        except Gone:
            pass
        finally:
            kernel.kill()
    assert driver.created

    kernel = Process(path, webhooks, 0, after=False)
    try:
        driver.connect(kernel.url)
        # Those that are created and not ended take a few attempts each.
        for _ in range(10 * len(driver.created)):
            if not driver.turn():
                break
        else:
            pytest.fail("executions are stuck")
        check(driver, path)
    finally:
        kernel.kill()
