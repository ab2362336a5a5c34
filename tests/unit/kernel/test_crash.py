"""Kernels that are killed while they are driven, and started again on what is left."""

from __future__ import annotations

import json
import random
import signal
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import requests

from tests.unit.kernel.agent_double import PATIENCE, Caller, Webhooks, eventually
from tests.unit.kernel.conftest import manifest

EXECUTIONS = 6
STEPS = 8
KILLS = 6

KERNEL = """
import json, sys
from rebuno_sync.kernel import EmbeddedKernel
path, manifest = sys.argv[1], json.loads(sys.argv[2])
with EmbeddedKernel(path, manifest=manifest, lease_timeout=0.5) as kernel:
    print(kernel.url, flush=True)
    sys.stdin.read()
"""


class Process:
    """A kernel in a process of its own, on one file, killed and started again."""

    def __init__(self, path: Path, webhooks: Webhooks) -> None:
        self._arguments = [str(path), json.dumps(manifest(webhooks))]
        self._process: subprocess.Popen[str] | None = None
        self.url = ""
        self.start()

    def start(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", KERNEL, *self._arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=Path(__file__).parents[3],
        )
        assert self._process.stdout is not None
        self.url = self._process.stdout.readline().strip()
        assert self.url, "the kernel did not start"

    def kill(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGKILL)
        self._process.communicate(timeout=PATIENCE)
        assert self._process.returncode == -signal.SIGKILL

    def stop(self) -> None:
        assert self._process is not None
        self._process.communicate("", timeout=PATIENCE)
        assert self._process.returncode == 0


class Handlers:
    """Runs the handler for each webhook on a thread, and remembers what was acknowledged."""

    def __init__(self, kernel: Process, webhooks: Webhooks) -> None:
        self.kernel = kernel
        self.recorded: dict[str, Any] = {}
        self.step_ids: dict[tuple[str, int], str] = {}
        self.completed: set[str] = set()
        self.wrong: list[str] = []
        self.acknowledged = 0
        self._lock = threading.Lock()
        self._threads: list[threading.Thread] = []
        webhooks.answer = self._receive

    def _receive(self, body: bytes) -> int:
        thread = threading.Thread(target=self._run, args=(json.loads(body),))
        with self._lock:
            self._threads.append(thread)
        thread.start()
        return 200

    def join(self) -> None:
        with self._lock:
            threads = list(self._threads)
        for thread in threads:
            thread.join(PATIENCE)

    def _run(self, webhook: dict[str, Any]) -> None:
        caller = Caller(self.kernel.url)
        try:
            self._handle(caller, webhook)
        except requests.RequestException:
            pass  # the kernel is gone: the attempt is given up
        except AssertionError as exc:
            self.wrong.append(str(exc))
        finally:
            caller.close()

    def _handle(self, caller: Caller, webhook: dict[str, Any]) -> None:
        execution_id = webhook["execution_id"]
        path = f"/v0/executions/{execution_id}"
        for i in range(STEPS):
            # Some are equal, so that only the count tells them apart.
            step = {"kind": "tool_call", "target": f"t{i % 2}", "args": {"half": i * 2 // STEPS}}
            answer = caller.agent("POST", f"{path}/steps", step, lease=webhook)
            if answer.status_code == 409:
                return
            decision = answer.json()
            if decision["decision"] == "execution_terminal":
                return
            step_id = decision["step_id"]
            with self._lock:
                first = self.step_ids.setdefault((execution_id, i), step_id)
                assert first == step_id, f"call {i} became another step"
                known = self.recorded.get(step_id)
            if decision["decision"] == "replay":
                assert known is None or decision["result"] == known, "another result"
                continue
            assert decision["decision"] == "proceed", decision
            assert known is None, "an acknowledged result was lost"
            result = {"attempt": webhook["dispatch_attempt"], "i": i, "pad": "x" * 500}
            done = caller.agent(
                "POST", f"{path}/steps/{step_id}/complete", {"result": result}, lease=webhook
            )
            if done.status_code == 409:
                return
            with self._lock:
                self.acknowledged += 1
                if done.json()["decision"] == "recorded":
                    self.recorded[step_id] = result
        done = caller.agent("POST", f"{path}/complete", {"output": execution_id}, lease=webhook)
        if done.status_code == 204:
            with self._lock:
                self.completed.add(execution_id)


@pytest.fixture
def kernel(tmp_path: Path, webhooks: Webhooks) -> Iterator[Process]:
    process = Process(tmp_path / "k.sqlite3", webhooks)
    yield process
    process.stop()


@pytest.mark.parametrize("seed", [1, 2])
def test_killed_again_and_again(
    seed: int, kernel: Process, webhooks: Webhooks, tmp_path: Path
) -> None:
    chance = random.Random(seed)
    handlers = Handlers(kernel, webhooks)
    caller = Caller(kernel.url)
    ids: list[str] = []

    def create() -> None:
        answer = caller.client("POST", "/v0/executions", {"agent_id": "a1", "input": len(ids)})
        assert answer.status_code == 201
        ids.append(answer.json()["id"])

    for kill in range(KILLS):
        for _ in range(EXECUTIONS // KILLS or 1):
            create()
        if chance.random() < 0.7:
            target = handlers.acknowledged + chance.randrange(1, STEPS)
            eventually(
                lambda target=target: (
                    handlers.acknowledged >= target or len(handlers.completed) == len(ids)
                )
            )
        kernel.kill()
        kernel.start()
        caller.close()
        caller = Caller(kernel.url)
        assert kill < KILLS

    def statuses() -> list[str]:
        return [caller.client("GET", f"/v0/executions/{id}").json()["status"] for id in ids]

    eventually(lambda: statuses() == ["completed"] * len(ids))
    handlers.join()
    assert handlers.wrong == []
    assert handlers.completed <= set(ids)
    for number, id in enumerate(ids):
        execution = caller.client("GET", f"/v0/executions/{id}").json()
        assert (execution["input"], execution["output"]) == (number, id)
        events = caller.client("GET", f"/v0/executions/{id}/events?limit=1000").json()
        assert [event["event_seq"] for event in events] == list(range(1, len(events) + 1))
        assert events[-1]["type"] == "execution.completed"
        types = [event["type"] for event in events]
        steps = caller.client("GET", f"/v0/executions/{id}/steps").json()
        assert [step["step_id"] for step in steps] == [
            handlers.step_ids[(id, i)] for i in range(STEPS)
        ]
        for step in steps:
            assert step["status"] == "succeeded"
            assert step["result"] == handlers.recorded.get(step["step_id"], step["result"])
        for type in ("step.proposed", "step.executing", "step.succeeded"):
            assert types.count(type) == STEPS
    caller.close()
    with sqlite3.connect(tmp_path / "k.sqlite3") as database:
        assert database.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
    database.close()


def test_an_approval_outlives_the_kernel(kernel: Process, webhooks: Webhooks) -> None:
    caller = Caller(kernel.url)
    bundle = "rules: [{id: ask, when: {target: ask}, then: {decision: require_approval}}]"
    assert caller.client("POST", "/v0/policies/a1", {"bundle": bundle}).status_code == 204
    id = caller.client("POST", "/v0/executions", {"agent_id": "a1"}).json()["id"]
    step = {"kind": "tool_call", "target": "ask"}
    path = f"/v0/executions/{id}/steps"
    asked = caller.agent("POST", path, step, lease=webhooks.next()).json()
    assert asked["decision"] == "blocked"
    kernel.kill()
    kernel.start()
    caller.url = kernel.url
    grant = f"/v0/approvals/{asked['approval_id']}/grant"
    # The manifest, which has no policy, was applied again; the decision stands all the same.
    assert caller.client("POST", grant, {"decided_by": "ann"}).status_code == 204
    kernel.kill()
    kernel.start()
    caller.url = kernel.url

    def proceeded() -> bool:
        answer = caller.agent("POST", path, step, lease=webhooks.next())
        return answer.status_code == 200 and answer.json() == {
            "decision": "proceed",
            "step_id": asked["step_id"],
        }

    eventually(proceeded)
    caller.close()
