"""Options and settings of the whole test suite."""

from __future__ import annotations

import signal

import pytest
from hypothesis import settings

# The machines that run this are shared: how long one example takes says nothing.
settings.register_profile("rebuno", deadline=None)
settings.load_profile("rebuno")


def pytest_configure() -> None:
    # A job in the background of a script ignores SIGINT, and what it starts inherits that; the
    # commands under test are to hear it.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("conformance")
    group.addoption(
        "--kernel-url",
        help="hold the running kernel at this base URL against the protocol, "
        "instead of the embedded one",
    )
    group.addoption("--kernel-token", help="the bearer token of the kernel at --kernel-url")
