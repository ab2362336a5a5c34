"""Finding a refusal again in whatever exception it has become."""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rebuno_sync import (
    Blocked,
    LeaseSuperseded,
    PolicyError,
    RateLimited,
    Terminated,
    raise_for_refusal,
)
from rebuno_sync.decisions import refusal_text, refused
from rebuno_sync.effects import llm

SIGNALS = [
    (Blocked(), Blocked),
    (Terminated(), Terminated),
    (LeaseSuperseded(), LeaseSuperseded),
    (PolicyError("too dear"), PolicyError),
    (RateLimited("rate_limit_exceeded"), RateLimited),
]


class ProviderError(Exception):
    """As the provider libraries raise it: the text quotes the body, the body is an attribute."""

    def __init__(self, answer: llm.Answer, inner: bool = True) -> None:
        body = json.loads(b"".join(answer.body))
        super().__init__(f"Error code: {answer.status} - {body}")
        self.body = body["error"] if inner else body


class Group(Exception):
    """An exception group, for Pythons that have none."""

    def __init__(self, message: str, exceptions: list[BaseException]) -> None:
        super().__init__(message)
        self.exceptions = tuple(exceptions)


def raised(exc: BaseException) -> BaseException | None:
    try:
        raise_for_refusal(exc)
    except BaseException as found:
        return found
    return None


def caused(exc: BaseException) -> BaseException:
    try:
        raise RuntimeError("the chain failed") from exc
    except RuntimeError as outer:
        return outer


def in_context(exc: Exception) -> BaseException:
    try:
        try:
            raise exc
        except Exception:
            raise RuntimeError("and then this")  # noqa: B904
    except RuntimeError as outer:
        return outer


def suppressed(exc: Exception) -> BaseException:
    try:
        try:
            raise exc
        except Exception:
            raise RuntimeError("instead of that") from None
    except RuntimeError as outer:
        return outer


def as_text(exc: BaseException) -> BaseException:
    return RuntimeError(f"node 'model' failed: {exc!r}")


def grouped(exc: BaseException) -> BaseException:
    return Group("2 tasks failed", [ValueError("another"), Group("1 task", [exc])])


def deep(exc: Exception) -> BaseException:
    return caused(grouped(in_context(caused(exc))))  # type: ignore[arg-type]


WRAPPERS = [lambda exc: exc, caused, in_context, suppressed, as_text, grouped, deep]


@pytest.mark.parametrize("wrap", WRAPPERS)
@pytest.mark.parametrize("inner", [True, False])
@pytest.mark.parametrize(("signal", "kind"), SIGNALS)
def test_it_is_found_behind_any_wrapper(
    signal: BaseException, kind: type[BaseException], inner: bool, wrap: Any
) -> None:
    exc = ProviderError(llm.refusal(signal), inner)
    found = raised(wrap(exc))
    assert type(found) is kind
    if isinstance(found, (PolicyError, RateLimited)):
        assert found.reason == signal.reason  # type: ignore[attr-defined]


@pytest.mark.skipif(sys.version_info < (3, 11), reason="no exception groups before Python 3.11")
def test_it_is_found_in_a_real_exception_group() -> None:
    exc = ProviderError(llm.refusal(Blocked()))
    group = ExceptionGroup("two", [ValueError(), ExceptionGroup("one", [exc])])  # noqa: F821
    assert type(raised(group)) is Blocked


def test_the_error_that_carried_it_is_its_cause() -> None:
    exc = ProviderError(llm.refusal(Blocked()))
    found = raised(exc)
    assert found is not None
    assert found.__cause__ is exc


def test_it_is_found_in_the_answer_that_an_error_came_with() -> None:
    """As ``raise_for_status`` of requests and httpx raises it: nothing of the body in the text."""

    class Response:
        _content = b"".join(llm.refusal(PolicyError("too dear")).body)

    class HTTPError(Exception):
        response = Response()

    found = raised(HTTPError("403 Client Error: Forbidden for url: http://x"))
    assert isinstance(found, PolicyError)
    assert found.reason == "too dear"


def test_an_answer_that_was_not_read_is_left_alone() -> None:
    class Response:
        _content = False

        @property
        def content(self) -> bytes:
            raise AssertionError("this would read the network")

        text = content

    class HTTPError(Exception):
        response = Response()

    assert raised(HTTPError("403")) is None


@given(st.text(min_size=1).map(str.strip).filter(bool))
def test_a_reason_comes_through_whatever_is_in_it(reason: str) -> None:
    found = raised(ProviderError(llm.refusal(PolicyError(reason))))
    assert isinstance(found, PolicyError)
    assert found.reason == reason


@pytest.mark.parametrize(
    "exc",
    [
        ValueError("rebuno_refusal"),
        ValueError("rebuno_refusal: postponed"),
        ValueError("rebuno_refusal: proceed"),
        ValueError("rebuno_refusal: replay"),
        ValueError(""),
        ProviderError(llm.refusal(ValueError("cannot be recorded"))),
    ],
)
def test_what_is_no_refusal_raises_nothing(exc: BaseException) -> None:
    raise_for_refusal(exc)


def test_an_exception_that_is_its_own_cause_ends() -> None:
    first, second = ValueError("a"), ValueError("b")
    first.__cause__, second.__cause__ = second, first
    raise_for_refusal(first)


def test_an_exception_that_cannot_be_shown_ends() -> None:
    class Unshowable(Exception):
        def __str__(self) -> str:
            raise RuntimeError("no")

    raise_for_refusal(Unshowable())


def test_a_body_that_holds_itself_ends() -> None:
    body: dict[str, Any] = {}
    body["body"] = body
    exc = ValueError("x")
    exc.body = body  # type: ignore[attr-defined]
    raise_for_refusal(exc)


@pytest.mark.parametrize("decision", ["blocked", "execution_terminal", "lease_superseded"])
def test_a_text_with_more_around_it(decision: str) -> None:
    text = f"Error: {refusal_text(decision)}\nTraceback …"
    found = refused(text)
    assert found is not None
    assert type(found) in (Blocked, Terminated, LeaseSuperseded)
