"""Fixtures of the kernel's own tests."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from rebuno_sync.kernel import EmbeddedKernel
from tests.unit.kernel.agent_double import Caller, Webhooks


@pytest.fixture
def webhooks() -> Iterator[Webhooks]:
    receiver = Webhooks()
    yield receiver
    receiver.close()


@pytest.fixture
def kernels() -> Iterator[Callable[..., EmbeddedKernel]]:
    """Start kernels, and stop them in the end."""
    with contextlib.ExitStack() as stack:

        def start(*args: Any, **kwargs: Any) -> EmbeddedKernel:
            return stack.enter_context(EmbeddedKernel(*args, **kwargs))

        yield start


@pytest.fixture
def kernel(kernels: Callable[..., EmbeddedKernel], webhooks: Webhooks) -> EmbeddedKernel:
    """A kernel in memory that knows agent ``a1``, whose webhooks go to ``webhooks``."""
    return kernels(manifest=manifest(webhooks))


@pytest.fixture
def caller(kernel: EmbeddedKernel) -> Iterator[Caller]:
    caller = Caller(kernel.url)
    yield caller
    caller.close()


def manifest(webhooks: Webhooks, **more: Any) -> dict[str, Any]:
    agent = {"id": "a1", "webhook_url": webhooks.url, "secret": "orchard-secret", **more}
    return {"agents": [agent]}
