"""Running an agent to its end within a test."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping
from typing import Any

import yaml

from ..agent import AgentCore
from ..client import Client
from ..transport import Transport
from ..wire import Approval, Event, Execution, Step
from .in_process import TestKernel

#: How long a run may take before the test fails, in seconds.
LIMIT = 30.0

Policy = str | Mapping[str, Any]


@dataclasses.dataclass
class AgentRun:
    """An execution that has ended, or waits for a person or for a rate limit.

    Attributes:
        kernel: the kernel that it ran on.
        execution: its state, as the kernel tells it.
        steps: its steps, in the order in which they began.
        events: its log.
        approvals: the approvals of it that wait for a decision.
    """

    kernel: TestKernel
    execution: Execution
    steps: list[Step] = dataclasses.field(default_factory=list)
    events: list[Event] = dataclasses.field(default_factory=list)
    approvals: list[Approval] = dataclasses.field(default_factory=list)

    @property
    def status(self) -> str:
        """``completed``, ``failed``, ``cancelled``; ``blocked`` while it waits for a person.

        ``running`` while it waits for a rate limit with ``max_wait``; :meth:`advance` the clock.
        """
        return self.execution.status

    @property
    def output(self) -> Any:
        """What the handler returned, as it reads back from JSON."""
        return self.execution.output

    @property
    def failure_reason(self) -> str:
        """Why it failed, or ``""``."""
        return self.execution.failure_reason

    def grant(self, decided_by: str = "", rationale: str = "") -> AgentRun:
        """Grant the oldest waiting approval, and return the run as it stands after that.

        Raises:
            LookupError: none is waiting.
            ForbiddenError: ``decided_by`` is not among the approvers.
        """
        with self.kernel.client() as client:
            client.grant(self._waiting().id, decided_by=decided_by, rationale=rationale)
        return self.settled()

    def deny(self, decided_by: str = "", rationale: str = "") -> AgentRun:
        """Deny the oldest waiting approval; see :meth:`grant`."""
        with self.kernel.client() as client:
            client.deny(self._waiting().id, decided_by=decided_by, rationale=rationale)
        return self.settled()

    def advance(self, seconds: float) -> AgentRun:
        """Move the kernel's clock, and return the run as it stands after that."""
        self.kernel.advance(seconds)
        return self.settled()

    def settled(self, limit: float = LIMIT) -> AgentRun:
        """Wait until the execution has ended or waits for something; return the run as it is.

        Raises:
            TimeoutError: neither came about within ``limit`` seconds.
        """
        with self.kernel.client() as client:
            execution = _wait(self.kernel, client, self.execution.id, limit)
            events = list(client.events(execution.id))
            began = {
                e.payload["step_id"]: n for n, e in enumerate(events) if "step_id" in e.payload
            }
            steps = sorted(client.steps(execution.id), key=lambda s: began[s.step_id])
            approvals = [a for a in client.approvals() if a.execution_id == execution.id]
        return AgentRun(self.kernel, execution, steps, events, approvals)

    def _waiting(self) -> Approval:
        if not self.approvals:
            raise LookupError(f"no approval of execution {self.execution.id} is waiting")
        return self.approvals[0]


def run_agent(
    agent: AgentCore,
    input: Any = None,
    *,
    policy: Policy | None = None,
    kernel: TestKernel | None = None,
    limit: float = LIMIT,
) -> AgentRun:
    """Run an agent of this process on one input, without any socket.

    Args:
        agent: the agent, with its handler bound.
        input: the input; anything with a JSON form.
        policy: the policy to run under: YAML text, or what it would hold.
        kernel: the kernel to run on; one of its own by default.
        limit: how long to wait for the end, in seconds.

    Returns:
        The execution that has ended, or that waits for a person or for a rate limit.

    Raises:
        TimeoutError: it has neither ended nor waits after ``limit`` seconds.
        ValidationError: the policy is refused.
    """
    if kernel is None:
        kernel = TestKernel()
        kernel.start()
    return begin(kernel, agent, input, policy).settled(limit)


def begin(
    kernel: TestKernel,
    agent: AgentCore,
    input: Any,
    policy: Policy | None,
    transport: Transport | None = None,
) -> AgentRun:
    """Attach an agent and create an execution, without waiting for anything."""
    kernel.attach(agent, transport)
    with kernel.client() as client:
        if policy is not None:
            text = policy if isinstance(policy, str) else yaml.safe_dump(dict(policy))
            client.set_policy(agent.agent_id, text)
        return AgentRun(kernel, client.create(agent.agent_id, input))


def _wait(kernel: TestKernel, client: Client, execution_id: str, limit: float) -> Execution:
    deadline = time.monotonic() + limit
    while True:
        found = client.get(execution_id)
        if found.done or found.status == "blocked" or kernel.is_parked(execution_id):
            return found
        if time.monotonic() > deadline:
            raise TimeoutError(
                f"execution {execution_id} is still {found.status} after {limit:g} s; if it waits "
                "for a lease, move the clock with kernel.advance(seconds)"
            )
        time.sleep(0.002)
