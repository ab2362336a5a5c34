"""A kernel to hold against the protocol."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest

from tests.conformance.driver import Agent, Attempt, Kernel, Make
from tests.conformance.webhooks import WebhookServer

TOKEN = "conformance-token"


@contextmanager
def started(config: pytest.Config, **settings: Any) -> Iterator[Kernel]:
    webhooks = WebhookServer()
    try:
        url = config.getoption("--kernel-url")
        if url:
            if settings:
                pytest.skip("needs a setting of the embedded kernel")
            kernel = Kernel(url, config.getoption("--kernel-token"), None, webhooks)
            try:
                yield kernel
            finally:
                kernel.close()
            return
        from rebuno_sync.kernel import EmbeddedKernel

        settings = {"bearer_token": TOKEN, **settings}
        with EmbeddedKernel(**settings) as embedded:
            kernel = Kernel(embedded.url, settings["bearer_token"], embedded, webhooks)
            try:
                yield kernel
            finally:
                kernel.close()
    finally:
        webhooks.close()


@pytest.fixture
def kernel(pytestconfig: pytest.Config) -> Iterator[Kernel]:
    """A kernel of the test's own, where that can be."""
    with started(pytestconfig) as kernel:
        yield kernel


@pytest.fixture(scope="module")
def shared_kernel(pytestconfig: pytest.Config) -> Iterator[Kernel]:
    """A kernel for all tests of a module that move no clock."""
    with started(pytestconfig) as kernel:
        yield kernel


@pytest.fixture
def make_kernel(pytestconfig: pytest.Config) -> Iterator[Make]:
    """Start an embedded kernel with settings; the test is skipped for another kernel."""
    with ExitStack() as stack:
        yield lambda **settings: stack.enter_context(started(pytestconfig, **settings))


@pytest.fixture
def agent(kernel: Kernel) -> Agent:
    return kernel.agent()


@pytest.fixture
def attempt(agent: Agent) -> Attempt:
    """The first delivery of an execution of an agent without a policy."""
    return agent.start({"n": 1})


@pytest.fixture
def leased(kernel: Kernel) -> Attempt:
    """The same, of an agent whose lease is soon over where the clock cannot be moved."""
    return kernel.agent(lease_timeout=kernel.span(60, 4)).start({"n": 1})
