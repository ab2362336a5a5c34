"""The agents and operators of kernels that are killed, who hold each to the last one's word."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import random
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from rebuno_sync import signing, wire
from tests.unit.kernel.agent_double import PATIENCE
from tests.unit.kernel.kills.lives import DEADLINE_SECONDS, LEASE_SECONDS

ROOT = Path(__file__).parents[4]
AGENT = {"id": "a1", "webhook_url": "http://127.0.0.1:9/webhook", "secret": "orchard-secret"}
POLICY = """
default_action: allow
rules:
  - id: ask
    when: {target: ask}
    then: {decision: require_approval, approval_config: {timeout: 1h}}
  - {id: 'no', when: {target: 'no'}, then: {decision: deny}}
  - id: slow
    when: {target: slow}
    then: {decision: allow, rate_limit: {max_calls: 1, window: 10s, max_wait: 1m}}
  - id: model
    when: {step_kind: llm_call}
    then: {decision: allow, token_budget: {max_tokens: 15}}
"""
USED = {"status": 200, "body": json.dumps({"usage": {"total_tokens": 10}})}
#: What handlers do: kind, target, idempotency. Equal ones are told apart by their count.
STEPS = [
    ("tool_call", "t", "safe_to_retry"),
    ("tool_call", "t", "safe_to_retry"),
    ("tool_call", "once", "at_most_once"),
    ("tool_call", "no", "safe_to_retry"),
    ("llm_call", "gpt", "safe_to_retry"),
    ("llm_call", "gpt", "safe_to_retry"),
    ("llm_call", "gpt", "safe_to_retry"),
    ("tool_call", "slow", "safe_to_retry"),
    ("tool_call", "slow", "safe_to_retry"),
    ("tool_call", "ask", "safe_to_retry"),
    ("local", "l", "safe_to_retry"),
]
ENDED = ("completed", "failed", "cancelled")


class Gone(Exception):
    """The kernel is dead."""


class Nursery:
    """The process that lives are forked from."""

    def __init__(self, directory: Path) -> None:
        path = str(directory / "lives.socket")
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(path)
        self._listener.listen(1)
        self._listener.settimeout(PATIENCE)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.unit.kernel.kills.lives", path],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
            cwd=ROOT,
        )

    def begin(self, **life: Any) -> Life:
        """Fork a kernel.

        Args:
            life: ``path``, ``now``, ``seed``, and which end it takes; see ``lives``.
        """
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({**_NO_END, **life}) + "\n")
        connection, _ = self._listener.accept()
        connection.settimeout(PATIENCE)
        return Life(connection)

    def ended(self) -> int:
        """Wait until the life is over; return its exit status."""
        assert self._process.stdout is not None
        return int(self._process.stdout.readline())

    def close(self) -> None:
        self._listener.close()
        try:
            self._process.communicate(timeout=PATIENCE)
        finally:
            self._process.kill()


_NO_END = {
    "points": 0,
    "seconds": 0.0,
    "threads": False,
    "checkpoint_pages": 1000,
    "sabotaged": False,
}


class Life:
    """The test's end of the connection to one kernel."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._lines = connection.makefile("rb")
        self.webhooks: list[dict[str, Any]] = []

    def ready(self) -> None:
        """Wait until the kernel has started.

        Raises:
            Gone: it died before.
        """
        self._read()

    def ask(self, message: dict[str, Any]) -> tuple[int, Any]:
        """Send a message; return the status and the body of the answer.

        Raises:
            Gone: it died before it answered.
        """
        with contextlib.suppress(OSError):  # what it said before its death is read all the same
            self._connection.sendall(json.dumps(message).encode() + b"\n")
        answer = self._read()
        return answer["status"], json.loads(answer["body"]) if answer["body"] else None

    def _read(self) -> dict[str, Any]:
        while True:
            try:
                line = self._lines.readline()
            except ConnectionResetError:
                line = b""
            if not line.endswith(b"\n"):
                raise Gone
            message: dict[str, Any] = json.loads(line)
            if "webhook" not in message:
                return message
            self.webhooks.append(message)

    def close(self) -> None:
        self._lines.close()
        self._connection.close()


@dataclasses.dataclass
class Attempt:
    """A handler at work."""

    lease: dict[str, Any]
    position: int = 0
    #: A step whose body ran, and its outcome, until the kernel has it.
    unreported: tuple[str, str, Any] | None = None
    #: When the kernel last took the lease; ``None`` as long as it never did.
    good_at: float | None = None


class Driver:
    """Plays agents and operators, at random but by a seed, over as many lives as it is given.

    Args:
        seed: of all choices.

    Attributes:
        trace: what was sent and answered.
        created, ended, results, decided, ran: what was acknowledged.
    """

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.now = 1_800_000_000.0
        self.trace: list[str] = []
        self.created: dict[str, str] = {}
        self.ended: dict[str, str] = {}
        self.results: dict[str, Any] = {}
        self.decided: dict[str, str] = {}
        self.ran: dict[str, int] = {}
        self.numbers: dict[tuple[str, int], str] = {}
        self.keys: set[str] = set()
        self._attempts: dict[str, Attempt] = {}
        self._approvals: dict[str, str] = {}
        self._unsure: set[str] = set()
        self._overdue: set[str] = set()
        self._unanswered: str | None = None
        self._registered = False
        self._governed = False
        self._life: Life | None = None

    # Messages

    def connect(self, life: Life) -> None:
        """Go on with another kernel; some agents died with the last one."""
        self._life = life
        self._attempts = {id: a for id, a in self._attempts.items() if self.chance.random() < 0.5}
        life.ready()

    def client(self, method: str, path: str, body: Any = None) -> tuple[int, Any]:
        return self._ask(method, path, body, lambda *_: {})

    def agent(self, path: str, body: Any, lease: dict[str, Any]) -> tuple[int, Any]:
        def signed(method: str, data: str) -> dict[str, str]:
            timestamp = str(int(time.time()))
            dispatch, attempt = lease["dispatch_id"], str(lease["dispatch_attempt"])
            return {
                wire.AGENT_ID_HEADER: AGENT["id"],
                wire.DISPATCH_ID_HEADER: dispatch,
                wire.DISPATCH_ATTEMPT_HEADER: attempt,
                wire.TIMESTAMP_HEADER: timestamp,
                wire.SIGNATURE_HEADER: signing.sign_request(
                    AGENT["secret"],
                    method,
                    path,
                    timestamp,
                    data.encode(),
                    dispatch_id=dispatch,
                    dispatch_attempt=attempt,
                ),
            }

        return self._ask("POST", path, body, signed)

    def pass_time(self, seconds: float) -> None:
        """Move the clock, and let what became due happen."""
        self.now += seconds
        self._message({}, f"{seconds:g} s pass")

    def pass_deadlines(self) -> None:
        """Move the clock to where every execution is over its deadline."""
        # A kernel that is killed meanwhile leaves it to the next, whose scheduler may take a
        # moment: what arrives before it is still recorded, and what comes after it is not.
        self._overdue.update(self.created)
        self.pass_time(DEADLINE_SECONDS)

    def _ask(self, method: str, path: str, body: Any, headers: Any) -> tuple[int, Any]:
        data = "" if body is None else json.dumps(body)
        message = {"method": method, "path": path, "body": data, "headers": headers(method, data)}
        status, answer = self._message(message, f"{method} {path} {data}")
        assert status < 500, (method, path, answer)
        return status, answer

    def _message(self, message: dict[str, Any], words: str) -> tuple[int, Any]:
        assert self._life is not None
        self.now += 0.001
        self.trace.append(words)
        try:
            status, answer = self._life.ask({**message, "now": self.now})
        finally:
            webhooks, self._life.webhooks = self._life.webhooks, []
            for webhook in webhooks:
                self._take(webhook["webhook"], webhook["status"])
        self.trace.append(f"{status} {json.dumps(answer)}")
        return status, answer

    def _take(self, lease: dict[str, Any], status: int | None) -> None:
        self.trace.append(f"webhook {json.dumps(lease)} {status}")
        id = lease["execution_id"]
        assert id in self.created or self._unanswered is not None, "nobody asked for this execution"
        self._attempts.pop(id, None)
        if status != 503:
            self._attempts[id] = Attempt(lease)

    # What is done

    def act(self) -> None:
        """Do one thing, drawn at random."""
        if not self._prepare():
            return
        going_on = [id for id in self.created if id not in self.ended]
        choices: list[tuple[Any, float]] = [
            (self.create, 3.0 if len(going_on) < 5 else 0.1),
            (self.decide, 2.0 if self._approvals else 0.0),
            (self.look, 0.3),
            (self.cancel, 0.15 if going_on else 0.0),
            (self.make_key, 0.1),
            (lambda: self.pass_time(self.chance.choice([0.0, 5.0, 11.0])), 0.5),
            (self.pass_deadlines, 0.02),
            (self.lose_leases, 0.2 if self._attempts else 2.0),
            (self.work, 10.0 if self._attempts else 0.0),
        ]
        do = self.chance.choices([c[0] for c in choices], [c[1] for c in choices])[0]
        do()

    def finish(self) -> None:
        """Bring every execution to its end; begin nothing new."""
        assert any(self._prepare() for _ in range(3))
        # By far too few for the deadline to end what nothing else does.
        for _ in range(100):
            if self._unanswered is not None:
                self.create()
            self.look()
            while self._approvals:
                self.decide()
            while self._attempts:
                self.work()
            going_on = [id for id in self.created if self.status(id) not in ENDED]
            if not going_on:
                return
            self.lose_leases()
        raise AssertionError(f"executions are stuck: {going_on}")

    def _prepare(self) -> bool:
        """Register the agent and its policy, once each; tell whether both were there before."""
        if not self._registered:
            status, answer = self.client("POST", "/v0/agents", AGENT)
            assert status == 201, answer
            self._registered = True
        elif not self._governed:
            status, answer = self.client("POST", "/v0/policies/a1", {"bundle": POLICY})
            assert status == 204, f"the acknowledged agent was lost: {answer}"
            self._governed = True
        else:
            return True
        return False

    def create(self) -> None:
        """Create an execution, or create that one again whose answer was lost."""
        if self._unanswered is None:
            self._unanswered = f"key-{len(self.created)}"
        key = self._unanswered
        status, answer = self.client(
            "POST", "/v0/executions", {"agent_id": "a1", "input": key, "idempotency_key": key}
        )
        assert status == 201, f"the acknowledged agent was lost: {answer}"
        assert answer["id"] not in self.created, "one execution for two keys"
        self.created[answer["id"]] = key
        self._unanswered = None

    def work(self) -> None:
        """Take one handler one call further."""
        id = self.chance.choice(list(self._attempts))
        attempt = self._attempts[id]
        if attempt.unreported is not None:
            self._report(id, attempt)
        elif self.chance.random() < 0.03:
            self._heartbeat(id, attempt)
        elif attempt.position < self._length(id):
            # An attempt whose submission gets no answer is given up: it may have been counted.
            del self._attempts[id]
            self._submit(id, attempt)
        else:
            self._end(id, attempt)

    def _length(self, id: str) -> int:
        return 3 + int(self.created[id][4:]) % (len(STEPS) - 2) if id in self.created else 3

    def _submit(self, id: str, attempt: Attempt) -> None:
        kind, target, idempotency = STEPS[attempt.position]
        step = {"kind": kind, "target": target, "idempotency": idempotency}
        status, answer = self._under_lease(id, attempt, "/steps", step)
        if status != 200 or answer["decision"] == "execution_terminal":
            return
        decision = answer["decision"]
        if decision == "rate_limited":  # it has parked before
            attempt.position += 1
            self._attempts[id] = attempt
            return
        step_id = answer["step_id"]
        known = self.numbers.setdefault((id, attempt.position), step_id)
        assert known == step_id, "another step"
        if decision == "blocked":
            assert step_id not in self.results, "an acknowledged result was lost"
            if "approval_id" in answer:
                assert step_id not in self.decided, "an acknowledged decision was lost"
                self._approvals[answer["approval_id"]] = step_id
            return
        if decision == "proceed":
            assert step_id not in self.results, "an acknowledged result was lost"
            assert self.decided.get(step_id) != "denied", "an acknowledged denial was lost"
            self.ran[step_id] = self.ran.get(step_id, 0) + 1
            assert self.ran[step_id] == 1 or idempotency != "at_most_once", "it ran twice"
            how = "fail" if self.chance.random() < 0.1 else "complete"
            outcome = (
                {"error": {"message": f"{self.ran[step_id]}"}}
                if how == "fail"
                else {"result": USED if kind == "llm_call" else {"ran": self.ran[step_id]}}
            )
            attempt.unreported = (step_id, how, outcome)
        elif decision == "replay":
            outcome = {k: answer[k] for k in ("result", "error") if k in answer}
            self._holds(step_id, outcome)
            attempt.position += 1
        else:
            assert decision == "denied", answer
            assert self.decided.setdefault(step_id, "denied") == "denied", "a grant was lost"
            attempt.position += 1
        self._attempts[id] = attempt

    def _holds(self, step_id: str, outcome: Any) -> None:
        assert self.results.setdefault(step_id, outcome) == outcome, "another result"

    def _report(self, id: str, attempt: Attempt) -> None:
        assert attempt.unreported is not None
        step_id, how, outcome = attempt.unreported
        status, answer = self._under_lease(id, attempt, f"/steps/{step_id}/{how}", outcome)
        if status != 200 or answer["decision"] == "execution_terminal":
            self._attempts.pop(id, None)
            return
        if answer["decision"] == "replay":  # the first report arrived, its answer did not
            outcome = {k: answer[k] for k in ("result", "error") if k in answer}
        self._holds(step_id, outcome)
        attempt.unreported = None
        attempt.position += 1

    def _heartbeat(self, id: str, attempt: Attempt) -> None:
        status, _ = self._under_lease(id, attempt, "/heartbeat", None)
        if status != 204:
            self._attempts.pop(id, None)

    def _end(self, id: str, attempt: Attempt) -> None:
        how = self.chance.choice(["complete", "complete", "fail"])
        body: dict[str, Any] = {"error": "enough"} if how == "fail" else {"output": id}
        self._unsure.add(id)
        status, _ = self._under_lease(id, attempt, f"/{how}", body)
        self._attempts.pop(id, None)
        if status == 204:
            self._is_ended(id, "failed" if how == "fail" else "completed")

    def _under_lease(self, id: str, attempt: Attempt, route: str, body: Any) -> tuple[int, Any]:
        status, answer = self.agent(f"/v0/executions/{id}{route}", body, attempt.lease)
        assert status != 404, "an acknowledged execution was lost"
        if status < 300:
            attempt.good_at = self.now
        elif answer["code"] == "lease_superseded" and attempt.good_at is not None:
            # Nobody but time, an end and a newer attempt takes a lease that was taken once.
            assert (
                self.now - attempt.good_at >= LEASE_SECONDS
                or id in self._unsure | self._overdue
                or self._attempts.get(id, attempt) is not attempt
            ), "an acknowledged lease was lost"
        return status, answer

    def decide(self) -> None:
        """Decide an approval."""
        approval_id, step_id = next(iter(self._approvals.items()))
        how = self.chance.choice(["grant", "deny"])
        status, answer = self.client(
            "POST", f"/v0/approvals/{approval_id}/{how}", {"decided_by": "ann"}
        )
        del self._approvals[approval_id]
        assert status in (204, 409), answer
        if status == 204:
            verdict = "granted" if how == "grant" else "denied"
            assert self.decided.setdefault(step_id, verdict) == verdict, "decided twice"

    def look(self) -> None:
        """See which approvals wait: the answers that named them may be lost."""
        status, answer = self.client("GET", "/v0/approvals")
        assert status == 200
        waiting = {row["id"]: row["step_id"] for row in answer}
        assert not set(waiting.values()) & self.decided.keys(), "an acknowledged decision was lost"
        self._approvals = waiting

    def cancel(self) -> None:
        """Cancel an execution."""
        id = self.chance.choice([id for id in self.created if id not in self.ended])
        self._unsure.add(id)
        status, _ = self.client("POST", f"/v0/executions/{id}/cancel")
        assert status in (204, 409), "an acknowledged execution was lost"
        if status == 204:
            self._attempts.pop(id, None)
            self._is_ended(id, "cancelled")
        else:
            self._is_ended(id, self.status(id))

    def make_key(self) -> None:
        """Make an API key."""
        status, answer = self.client(
            "POST", "/v0/api-keys", {"name": "k", "scopes": ["executions:read"]}
        )
        assert status == 201, answer
        self.keys.add(answer["id"])

    def lose_leases(self) -> None:
        """Give up every attempt, and let its lease run out."""
        self._attempts.clear()
        self.pass_time(LEASE_SECONDS + 1)

    def status(self, id: str) -> str:
        """Return the status of an execution, which no end can be taken from."""
        status, execution = self.client("GET", f"/v0/executions/{id}")
        assert status == 200, "an acknowledged execution was lost"
        found = str(execution["status"])
        assert self.ended.get(id, found) == found, "an acknowledged end was lost"
        if found in ENDED and id not in self.ended:
            kernels_own = ("dispatch_exhausted", "deadline_exceeded")
            assert id in self._unsure or execution["failure_reason"] in kernels_own
            self._is_ended(id, found)
        return found

    def _is_ended(self, id: str, status: str) -> None:
        assert self.ended.setdefault(id, status) == status, "it ended twice"
