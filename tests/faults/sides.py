"""The kernels that the fault tests put behind the proxy, driven in one way."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Protocol

from rebuno_sync import Agent, Client
from rebuno_sync.kernel import EmbeddedKernel
from tests.scripted import ScriptedKernel, wait_until
from tests.scripted.state import TERMINAL, Execution

AGENT = "a1"
SECRET = "orchard-secret"
#: A handler that is spoiled once ends in two attempts; more than this many is a loop.
MOST_ATTEMPTS = 4


@dataclass(frozen=True)
class Outcome:
    """What an execution came to: its steps by target, and the attempts it took."""

    status: str
    output: Any
    failure_reason: str
    steps: dict[str, list[dict[str, Any]]]
    attempts: int


class Side(Protocol):
    """A kernel behind the proxy."""

    url: str

    def start(self, webhook_url: str, input: Any) -> str:
        """Create an execution for the agent at ``webhook_url``; its first delivery follows."""

    def settle(self, execution_id: str, agent: Agent) -> Outcome:
        """Deliver, and deliver again each time an attempt was given up, until it has ended."""


class ScriptedSide:
    """The scripted kernel: a dispatch comes again as soon as the agent is done with it."""

    def __init__(self, kernel: ScriptedKernel) -> None:
        self.kernel = kernel
        self.url = kernel.url

    def start(self, webhook_url: str, input: Any) -> str:
        self.kernel.agent_url = webhook_url
        return self.kernel.create(input).id

    def settle(self, execution_id: str, agent: Agent) -> Outcome:
        run = self.kernel.executions[execution_id]
        while run.status not in TERMINAL:
            assert run.attempt < MOST_ATTEMPTS, f"no end in sight; calls: {self.kernel.calls()}"
            assert self.kernel.deliver(run).status < 300
            assert agent.join(timeout=60)
        return Outcome(
            status=run.status,
            output=None if run.output is None else json.loads(run.output.text),
            failure_reason=run.failure_reason,
            steps=_scripted_steps(run),
            attempts=run.attempt,
        )


def _scripted_steps(run: Execution) -> dict[str, list[dict[str, Any]]]:
    found: dict[str, list[dict[str, Any]]] = {}
    for row in run.steps.values():
        found.setdefault(row.target, []).append({"step_id": row.step_id, "status": row.status})
    return found


class EmbeddedSide:
    """The embedded kernel: a dispatch comes again when its clock is moved past the lease."""

    LEASE = 120.0

    def __init__(self, kernel: EmbeddedKernel, client: Client) -> None:
        self._kernel = kernel
        self._client = client
        self.url = kernel.url

    def start(self, webhook_url: str, input: Any) -> str:
        self._client.register_agent(AGENT, webhook_url, SECRET, lease_timeout_seconds=self.LEASE)
        return self._client.create(AGENT, input).id

    def settle(self, execution_id: str, agent: Agent) -> Outcome:
        attempts = 0
        while True:
            attempts = self._delivered(execution_id, attempts)
            assert agent.join(timeout=60)
            found = self._client.get(execution_id)
            if found.done:
                break
            assert attempts < MOST_ATTEMPTS, "no end in sight"
            self._kernel.advance(self.LEASE + 1)
        steps: dict[str, list[dict[str, Any]]] = {}
        for row in self._client.steps(execution_id):
            steps.setdefault(row.target, []).append({"step_id": row.step_id, "status": row.status})
        return Outcome(found.status, found.output, found.failure_reason, steps, attempts)

    def _delivered(self, execution_id: str, before: int) -> int:
        """Wait until a later attempt than ``before`` has been taken by the agent."""

        def latest() -> int:
            taken = [
                event.payload["attempt"]
                for event in self._client.events(execution_id)
                if event.type == "dispatch.acked"
            ]
            return taken[-1] if taken and taken[-1] > before else 0

        return int(wait_until(latest, what=f"attempt {before + 1} was not delivered"))
