"""Options and settings of the whole test suite."""

from __future__ import annotations

import itertools
import signal
from collections.abc import Generator
from pathlib import Path

import pytest
from hypothesis import settings

# The machines that run this are shared: how long one example takes says nothing.
settings.register_profile("rebuno", deadline=None)
settings.load_profile("rebuno")

_numbers = itertools.count()


def pytest_configure() -> None:
    # A job in the background of a script ignores SIGINT, and what it starts inherits that; the
    # commands under test are to hear it.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    # What is printed may have lone surrogates, which do not get from one process to the other.
    report.sections = [
        (name, text.encode("utf-8", "backslashreplace").decode()) for name, text in report.sections
    ]
    return report


@pytest.fixture(scope="session")
def _claims(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("claims")


@pytest.fixture(autouse=True)
def _claims_of_its_own(_claims: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Tests use the same dispatch ids again and again, which no kernel does.
    monkeypatch.setenv("REBUNO_CLAIMS_DIR", str(_claims / str(next(_numbers))))


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("conformance")
    group.addoption(
        "--kernel-url",
        help="hold the running kernel at this base URL against the protocol, "
        "instead of the embedded one",
    )
    group.addoption("--kernel-token", help="the bearer token of the kernel at --kernel-url")
