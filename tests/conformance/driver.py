"""Both ends that talk to a kernel, written out by hand: an operator and an agent."""

from __future__ import annotations

import hashlib
import json
import time
import uuid
from collections.abc import Callable
from typing import Any

import pytest
import requests

from rebuno_sync import signing
from tests.conformance.webhooks import WAIT, Delivery, Inbox, WebhookServer
from tests.scripted.serving import wait_until

SECRET = "orchard-secret"
SAFE = "safe_to_retry"
ONCE = "at_most_once"

_PAYLOADS = {
    "execution": {"execution_id", "status"},
    "step": {"step_id", "step_type", "target"},
    "approval": {"approval_id", "step_id", "execution_id", "status"},
    "dispatch": {"dispatch_id", "execution_id", "status", "attempt"},
}


def step_id(execution_id: str, kind: str, target: str, args_hash: str, occurrence: int) -> str:
    """The definition of PROTOCOL 6, once more and on its own."""
    fields = (execution_id, kind, target, args_hash, str(occurrence))
    encoded = (field.encode() for field in fields)
    return hashlib.sha256(b"".join(b"%d:%b" % (len(f), f) for f in encoded)).hexdigest()


def args_hash(canonical: bytes) -> str:
    return hashlib.sha256(canonical).hexdigest()


def ok(response: requests.Response) -> Any:
    """Return the JSON of a 200."""
    assert response.status_code == 200, (response.status_code, response.text)
    assert response.headers["Content-Type"].startswith("application/json")
    return response.json()


def done(response: requests.Response) -> None:
    """Hold that an answer is a 204 without a body."""
    assert response.status_code == 204, (response.status_code, response.text)
    assert response.content == b""


def refused(response: requests.Response, status: int, *codes: str) -> str:
    """Hold that an answer is this error (PROTOCOL 4); returns its message."""
    assert response.status_code == status, (response.status_code, response.text)
    body = response.json()
    assert body["code"] in codes, body
    assert isinstance(body["message"], str)
    assert body["message"]
    assert set(body) <= {"code", "message", "details"}
    return str(body["message"])


class Kernel:
    """A kernel under test, as its operator sees it."""

    def __init__(self, url: str, token: str | None, embedded: Any, webhooks: WebhookServer) -> None:
        self.url = url.rstrip("/")
        self.token = token
        self.embedded = embedded
        self.webhooks = webhooks
        self.http = requests.Session()
        self.http.trust_env = False
        self.executions: list[str] = []
        self.agents: list[str] = []

    # Time

    def span(self, long: float, short: float) -> float:
        """Seconds to configure: ``long`` where the clock can be moved, else ``short``."""
        return long if self.embedded else short

    def pass_time(self, seconds: float) -> None:
        """Move the clock of the embedded kernel; with another, what follows has to wait."""
        if self.embedded:
            self.embedded.advance(seconds)

    def needs_clock(self) -> None:
        if not self.embedded:
            pytest.skip("needs a kernel whose clock can be moved")

    # Requests

    def send(
        self, method: str, path: str, body: Any = None, *, data: bytes | None = None, **more: Any
    ) -> requests.Response:
        """Send a request with the bearer token; ``body`` is sent as JSON."""
        headers = dict(more.pop("headers", {}))
        if self.token is not None:
            headers.setdefault("Authorization", f"Bearer {self.token}")
        return self.send_as(headers, method, path, body, data=data, **more)

    def send_as(
        self,
        headers: dict[str, str],
        method: str,
        path: str,
        body: Any = None,
        *,
        data: bytes | None = None,
        **more: Any,
    ) -> requests.Response:
        """Send a request with these headers and no others."""
        if body is not None:
            data = json.dumps(body).encode()
        if data is not None:
            headers = {"Content-Type": "application/json", **headers}
        return self.http.request(
            method, self.url + path, data=data, headers=headers, timeout=WAIT, **more
        )

    def agent(self, *, lease_timeout: float | None = None, policy: str | None = None) -> Agent:
        """Register an agent of a new name."""
        agent = Agent(self, f"agent-{uuid.uuid4().hex[:12]}")
        agent.register(lease_timeout=lease_timeout)
        if policy is not None:
            agent.policy(policy)
        return agent

    def execution(self, execution_id: str) -> Any:
        return ok(self.send("GET", f"/v0/executions/{execution_id}"))

    def events(self, execution_id: str) -> list[Any]:
        """Return all events of an execution, each held against PROTOCOL 7."""
        events: list[Any] = []
        while True:
            path = f"/v0/executions/{execution_id}/events?limit=1000&after_seq={len(events)}"
            page = ok(self.send("GET", path)) or []
            events.extend(page)
            if not page:
                break
        for number, event in enumerate(events, start=1):
            assert event["event_seq"] == number, "event_seq starts at 1 and has no gaps"
            assert event["execution_id"] == execution_id
            assert event["occurred_at"]
            payload = event["payload"]
            family = event["type"].partition(".")[0]
            assert _PAYLOADS[family] <= set(payload), event
            assert "result" not in payload, "results are never in events"
            assert payload.get("execution_id", execution_id) == execution_id
        return events

    def types(self, execution_id: str) -> list[str]:
        return [event["type"] for event in self.events(execution_id)]

    def event(self, execution_id: str, type: str, number: int = 0) -> Any:
        """Return the payload of the execution's event of this type, waiting for it."""

        def found() -> Any:
            rows = [e for e in self.events(execution_id) if e["type"] == type]
            return rows[number]["payload"] if len(rows) > number else None

        return wait_until(found, WAIT, f"no {type} number {number} of {execution_id}")

    def status(self, execution_id: str, status: str) -> Any:
        """Wait until an execution has a status; returns the execution."""
        return wait_until(
            lambda: (e := self.execution(execution_id))["status"] == status and e,
            WAIT,
            f"{execution_id} never became {status}",
        )

    def approval(self, approval_id: str) -> Any:
        return ok(self.send("GET", f"/v0/approvals/{approval_id}"))

    def decide(self, approval_id: str, verdict: str, **body: Any) -> requests.Response:
        return self.send("POST", f"/v0/approvals/{approval_id}/{verdict}", body)

    def close(self) -> None:
        """Leave nothing behind in a kernel that others use."""
        if not self.embedded:
            for execution_id in self.executions:
                self.send("POST", f"/v0/executions/{execution_id}/cancel")
            for agent_id in self.agents:
                self.send("DELETE", f"/v0/agents/{agent_id}")
        self.http.close()


class Agent:
    """An agent: a name, a secret and an inbox of webhooks."""

    def __init__(self, kernel: Kernel, id: str) -> None:
        self.kernel = kernel
        self.id = id
        self.secret = SECRET
        self.webhook_url, self.inbox = kernel.webhooks.inbox(f"/{id}/webhook")

    def register(self, *, lease_timeout: float | None = None) -> Any:
        body = {"id": self.id, "webhook_url": self.webhook_url, "secret": self.secret}
        more = {} if lease_timeout is None else {"lease_timeout_seconds": lease_timeout}
        response = self.kernel.send("POST", "/v0/agents", {**body, **more})
        assert response.status_code == 201, response.text
        self.kernel.agents.append(self.id)
        return response.json()

    def policy(self, bundle: str) -> None:
        done(self.kernel.send("POST", f"/v0/policies/{self.id}", {"bundle": bundle}))

    def create(self, input: Any = None) -> str:
        """Create an execution; returns its id without waiting for its delivery."""
        body = {"agent_id": self.id, "input": input}
        response = self.kernel.send("POST", "/v0/executions", body)
        assert response.status_code == 201, response.text
        execution_id = str(response.json()["id"])
        self.kernel.executions.append(execution_id)
        return execution_id

    def start(self, input: Any = None) -> Attempt:
        """Create an execution and take its first delivery, once the kernel has its answer."""
        return self.next(self.create(input))

    def next(self, execution_id: str) -> Attempt:
        """Take the next delivery of an execution, once the kernel has its answer."""
        attempt = Attempt(self, self.inbox.take(execution_id))
        attempt.acked()
        return attempt

    def no_delivery(self, execution_id: str) -> None:
        """Hold that nothing more of an execution is queued before another one's delivery."""
        self.start()
        assert self.inbox.untaken(execution_id) == []

    def headers(
        self,
        method: str,
        target: str,
        body: bytes,
        dispatch_id: str = "",
        dispatch_attempt: str = "",
        *,
        timestamp: str | None = None,
    ) -> dict[str, str]:
        """Sign a request with the request signature (PROTOCOL 3)."""
        timestamp = str(int(time.time())) if timestamp is None else timestamp
        headers = {
            "Rebuno-Agent-Id": self.id,
            "Rebuno-Timestamp": timestamp,
            "Rebuno-Signature": signing.sign_request(
                self.secret,
                method,
                target,
                timestamp,
                body,
                dispatch_id=dispatch_id,
                dispatch_attempt=dispatch_attempt,
            ),
        }
        if dispatch_id:
            headers["Rebuno-Dispatch-Id"] = dispatch_id
        if dispatch_attempt:
            headers["Rebuno-Dispatch-Attempt"] = dispatch_attempt
        return headers

    def send(
        self,
        method: str,
        path: str,
        body: Any = None,
        *,
        data: bytes | None = None,
        dispatch_id: str = "",
        dispatch_attempt: str = "",
    ) -> requests.Response:
        """Send a signed request; ``body`` is sent as JSON."""
        if body is not None:
            data = json.dumps(body, ensure_ascii=False).encode()
        target = requests.Request(method, self.kernel.url + path).prepare().path_url
        headers = self.headers(method, target, data or b"", dispatch_id, dispatch_attempt)
        return self.kernel.send_as(headers, method, path, data=data)


class Attempt:
    """One delivery of an execution: the lease, and the calls that are made under it."""

    def __init__(self, agent: Agent, delivery: Delivery) -> None:
        self.agent = agent
        self.kernel = agent.kernel
        self.delivery = delivery
        self.execution_id = str(delivery.json["execution_id"])
        self.dispatch_id = str(delivery.json["dispatch_id"])
        self.attempt = int(delivery.json["dispatch_attempt"])

    def acked(self) -> None:
        """Wait until the kernel knows that the webhook was taken, or was not."""

        def answered() -> bool:
            return any(
                event["type"] in ("dispatch.acked", "dispatch.failed")
                and event["payload"]["dispatch_id"] == self.dispatch_id
                and event["payload"]["attempt"] == self.attempt
                for event in self.kernel.events(self.execution_id)
            )

        wait_until(answered, WAIT, "the delivery was neither acked nor failed")

    def send(
        self,
        method: str,
        path: str,
        body: Any = None,
        *,
        data: bytes | None = None,
        dispatch_id: str | None = None,
        attempt: str | None = None,
    ) -> requests.Response:
        """Send a signed request below the execution, with the lease unless it is overridden."""
        return self.agent.send(
            method,
            f"/v0/executions/{self.execution_id}{path}",
            body,
            data=data,
            dispatch_id=self.dispatch_id if dispatch_id is None else dispatch_id,
            dispatch_attempt=str(self.attempt) if attempt is None else attempt,
        )

    def submit(
        self,
        target: str = "t",
        args: Any = None,
        *,
        kind: str = "tool_call",
        idempotency: str = SAFE,
    ) -> requests.Response:
        body = {"kind": kind, "target": target, "args": args, "idempotency": idempotency}
        return self.send("POST", "/steps", body)

    def decision(self, target: str = "t", args: Any = None, **more: Any) -> Any:
        """Submit a step; returns the decision."""
        return ok(self.submit(target, args, **more))

    def proceed(self, target: str = "t", args: Any = None, **more: Any) -> str:
        """Submit a step that is to run; returns its id."""
        decision = self.decision(target, args, **more)
        assert decision["decision"] == "proceed", decision
        return str(decision["step_id"])

    def ran(self, target: str = "t", args: Any = None, result: Any = None, **more: Any) -> str:
        """Submit a step that is to run and record its result; returns its id."""
        step = self.proceed(target, args, **more)
        assert ok(self.complete_step(step, result)) == {"decision": "recorded"}
        return step

    def blocked(self, target: str, args: Any = None, **more: Any) -> Any:
        """Submit a step that has to wait; returns the decision."""
        decision = self.decision(target, args, **more)
        assert decision["decision"] == "blocked", decision
        return decision

    def complete_step(self, step: str, result: Any = None) -> requests.Response:
        return self.send("POST", f"/steps/{step}/complete", {"result": result})

    def fail_step(self, step: str, error: Any) -> requests.Response:
        return self.send("POST", f"/steps/{step}/fail", {"error": error})

    def stream(self, step: str, seq: Any, data: Any) -> requests.Response:
        return self.send("POST", f"/steps/{step}/stream", {"seq": seq, "data": data})

    def heartbeat(self) -> requests.Response:
        return self.send("POST", "/heartbeat")

    def complete(self, output: Any = None) -> requests.Response:
        return self.send("POST", "/complete", {"output": output})

    def fail(self, error: Any) -> requests.Response:
        return self.send("POST", "/fail", {"error": error})

    def step(self, step: str) -> Any:
        return ok(self.send("GET", f"/steps/{step}"))

    def steps(self, query: str = "") -> list[Any]:
        return ok(self.send("GET", f"/steps{query}")) or []

    def next(self) -> Attempt:
        """Take the next delivery of the same execution."""
        return self.agent.next(self.execution_id)

    def lapse(self) -> Attempt:
        """Let the lease run out; returns the attempt that follows."""
        self.kernel.pass_time(float(self.delivery.json["lease_timeout_seconds"]) + 1)
        return self.next()


Make = Callable[..., Kernel]
__all__ = [
    "ONCE",
    "SAFE",
    "SECRET",
    "WAIT",
    "Agent",
    "Attempt",
    "Delivery",
    "Inbox",
    "Kernel",
    "Make",
    "args_hash",
    "done",
    "ok",
    "refused",
    "step_id",
    "wait_until",
]
