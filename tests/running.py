"""An agent in this process under an embedded kernel, for tests of what handlers do."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from rebuno_sync import Agent, Client, execution
from rebuno_sync.kernel import EmbeddedKernel
from rebuno_sync.wire import Execution, Step
from tests.scripted import served, wait_until

_LEASE_SECONDS = 120.0
_SECRET = "orchard-secret"


class Running:
    """An agent, its kernel and a client.

    Attributes:
        kernel: the embedded kernel.
        client: an operator's client.
        agent: the agent.
    """

    def __init__(self, kernel: EmbeddedKernel, client: Client, agent: Agent) -> None:
        self.kernel = kernel
        self.client = client
        self.agent = agent

    def start(self, input: Any = None) -> str:
        """Create an execution and return its id."""
        return self.client.create(self.agent.agent_id, input).id

    def wait(self, execution_id: str) -> Execution:
        """Wait until the execution has ended or waits for an approval."""
        return self.client.wait(execution_id, 30.0, until_blocked=True)

    def run(self, input: Any = None) -> Execution:
        """Create an execution and wait for its end."""
        return self.wait(self.start(input))

    def output(self, input: Any = None) -> Any:
        """Run an execution that completes, and return its output."""
        found = self.run(input)
        assert found.status == "completed", found
        return found.output

    def decide(self, found: Execution, *, grant: bool, why: str = "") -> Execution:
        """Settle the one approval that an execution waits for, and wait for what comes of it."""
        assert found.status == "blocked", found
        (approval,) = (a for a in self.client.approvals() if a.execution_id == found.id)
        if grant:
            self.client.grant(approval.id, decided_by="ann", rationale=why)
        else:
            self.client.deny(approval.id, decided_by="ann", rationale=why)
        return self.wait(found.id)

    def steps(self, found: Execution | str) -> list[Step]:
        """The steps, in the order in which they were submitted."""
        execution_id = found if isinstance(found, str) else found.id
        order = [
            event.payload["step_id"]
            for event in self.client.events(execution_id)
            if event.type == "step.proposed"
        ]
        return sorted(self.client.steps(execution_id), key=lambda s: order.index(s.step_id))

    def run_twice(self, input: Any = None) -> Execution:
        """Run an execution whose handler calls :func:`given_up_once` when it has its result."""
        execution_id = self.start(input)
        self.next_attempt(execution_id)
        return self.wait(execution_id)

    def next_attempt(self, execution_id: str, *, after: int | None = None) -> None:
        """Wait until the newest attempt, or the ``after``-th, has gone, and let another begin."""
        queued = after or self._events(execution_id).count("dispatch.queued")
        wait_until(lambda: self._events(execution_id).count("dispatch.acked") >= queued)
        assert self.agent.join(60.0)
        self.lose_leases()

    def lose_leases(self) -> None:
        """Let every lease run out; what is in flight is delivered again."""
        self.kernel.advance(_LEASE_SECONDS + 1)

    def _events(self, execution_id: str) -> list[str]:
        return [event.type for event in self.client.events(execution_id)]


_given_up: set[str] = set()


def given_up_once() -> None:
    """End the first attempt to get here as a killed process would: nothing is reported."""
    here = execution().id
    if here not in _given_up:
        _given_up.add(here)
        raise SystemExit


@contextlib.contextmanager
def running(
    handler: Callable[..., Any], *, policy: str | None = None, agent_id: str = "a1"
) -> Iterator[Running]:
    """Serve ``handler`` as an agent under a kernel of its own, with a policy bundle if given."""
    with EmbeddedKernel(lease_timeout=_LEASE_SECONDS) as kernel:
        agent = Agent(agent_id, secret=_SECRET, base_url=kernel.url)
        agent.bind(handler)
        with served(agent.app) as url, Client(kernel.url) as client:
            client.register_agent(agent_id, f"{url}/webhook", _SECRET)
            if policy is not None:
                client.set_policy(agent_id, policy)
            try:
                yield Running(kernel, client, agent)
            finally:
                assert agent.close(60.0)
