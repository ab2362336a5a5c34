"""The pytest plugin, loaded by its entry point: fixtures for tests of agents.

An agent that is made at import reads ``REBUNO_URL`` and ``REBUNO_AGENT_SECRET``; where they are not
set, tests get values that let it be made.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Protocol

import pytest

if TYPE_CHECKING:
    from ..agent import AgentCore
    from ..client import Client
    from .in_process import TestKernel
    from .runs import AgentRun, Policy


class RunAgent(Protocol):
    """The type of the fixture ``run_agent``."""

    def __call__(
        self, agent: AgentCore, input: Any = None, *, policy: Policy | None = None
    ) -> AgentRun:
        """Run an agent on one input on the test's kernel; see :func:`.runs.run_agent`."""


def pytest_configure() -> None:
    os.environ.setdefault("REBUNO_URL", "http://kernel.invalid")
    os.environ.setdefault("REBUNO_AGENT_SECRET", "a-secret-for-tests")


@pytest.fixture
def rebuno_kernel() -> Iterator[TestKernel]:
    """A kernel of the test's own, in memory; ``advance(seconds)`` moves its clock."""
    from .in_process import TestKernel

    with TestKernel() as kernel:
        yield kernel


@pytest.fixture
def rebuno_client(rebuno_kernel: TestKernel) -> Iterator[Client]:
    """A client of :func:`rebuno_kernel`."""
    with rebuno_kernel.client() as client:
        yield client


@pytest.fixture
def run_agent(rebuno_kernel: TestKernel) -> RunAgent:
    """Run an agent to its end on :func:`rebuno_kernel`, without any socket."""
    from .runs import run_agent

    def run(agent: AgentCore, input: Any = None, *, policy: Policy | None = None) -> AgentRun:
        return run_agent(agent, input, policy=policy, kernel=rebuno_kernel)

    return run
