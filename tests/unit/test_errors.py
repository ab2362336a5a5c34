"""The exceptions and the reasons that are recorded for them."""

from __future__ import annotations

import pickle
from typing import Any

import pytest

from rebuno_sync import errors
from rebuno_sync.errors import (
    APIError,
    Blocked,
    ConflictError,
    ControlFlow,
    ForbiddenError,
    LeaseSuperseded,
    NetworkError,
    NotFoundError,
    PolicyError,
    RateLimited,
    RebunoError,
    Terminated,
    ToolError,
    UnauthorizedError,
    ValidationError,
    api_error,
    failure_reason,
    safe_text,
)


@pytest.mark.parametrize("signal", [Blocked, Terminated, LeaseSuperseded])
def test_control_flow_is_no_exception(signal: type[ControlFlow]) -> None:
    assert issubclass(signal, ControlFlow)
    assert not issubclass(signal, Exception)
    assert str(signal())


@pytest.mark.parametrize(
    "error", [NetworkError, APIError, PolicyError, ToolError, RateLimited, ValidationError]
)
def test_everything_else_is_a_rebuno_error(error: type[Exception]) -> None:
    assert issubclass(error, RebunoError)
    assert issubclass(error, Exception)


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, ValidationError),
        (401, UnauthorizedError),
        (403, ForbiddenError),
        (404, NotFoundError),
        (409, ConflictError),
        (418, APIError),
        (500, APIError),
    ],
)
def test_a_status_has_its_class(status: int, kind: type[APIError]) -> None:
    error = api_error(status, "code", "words", {"a": 1})
    assert type(error) is kind
    assert (error.message, error.code, error.status_code) == ("words", "code", status)
    assert error.details == {"a": 1}
    assert str(error) == f"words (code, HTTP {status})"


SAMPLES: list[BaseException] = [
    NetworkError("x", never_arrived=True),
    ValidationError("m", "validation_error", 400, {"field": "a"}),
    PolicyError("why", "rule", tool="t", step_id="s"),
    ToolError("m", "t", type="ValueError", reason="timeout", step_id="s", error={"message": "m"}),
    RateLimited("rate_limiter_unavailable", tool="t"),
    Blocked(approval_id="a", step_id="s"),
    Terminated(),
    LeaseSuperseded("gone"),
]


@pytest.mark.parametrize("error", SAMPLES, ids=lambda e: type(e).__name__)
def test_errors_travel_between_processes(error: BaseException) -> None:
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is type(error)
    assert (copy.args, vars(copy)) == (error.args, vars(error))


def test_tool_errors_are_equal_by_what_they_carry() -> None:
    def make(**changed: Any) -> ToolError:
        fields: dict[str, Any] = {
            "type": "V",
            "reason": "r",
            "step_id": "s",
            "error": {"a": 1},
            **changed,
        }
        return ToolError("m", "t", **fields)

    assert make() == make()
    assert hash(make()) == hash(make())
    for change in ({"type": "W"}, {"reason": ""}, {"step_id": "z"}, {"error": {"a": 2}}):
        assert make() != make(**change)
    assert make() != ValueError("m")


class Stubborn(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text for you")


class Surrogate(Exception):
    def __str__(self) -> str:
        return "a\ud800b"


class OddReason(PolicyError):
    def __init__(self) -> None:
        super().__init__("x")
        self.reason = 7  # type: ignore[assignment]


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (PolicyError("too_dear"), "too_dear"),
        (PolicyError("over 9000"), "policy_denied: over 9000"),
        (PolicyError("Denied"), "policy_denied: Denied"),
        (PolicyError("two\nlines"), "policy_denied: two\nlines"),
        (PolicyError("token\n"), "policy_denied: token\n"),
        (PolicyError(""), "policy_denied"),
        (OddReason(), "7"),
        (RateLimited(), "rate_limit_exceeded"),
        (RateLimited("rate_limiter_unavailable"), "rate_limiter_unavailable"),
        (ToolError("no such page", "fetch"), "tool_error: fetch: no such page"),
        (ToolError("a\ud800", "t\udfff"), "tool_error: t?: a?"),
        (ValueError("bad"), "agent_error: ValueError: bad"),
        (KeyError("k"), "agent_error: KeyError: 'k'"),
        (ValueError(), "agent_error: ValueError: "),
        (Surrogate(), "agent_error: Surrogate: a?b"),
        (
            Stubborn(),
            "agent_error: Stubborn: <Stubborn that cannot be shown as text>",
        ),
        (
            ValidationError("m", "validation_error", 400),
            "agent_error: ValidationError: m (validation_error, HTTP 400)",
        ),
    ],
    ids=lambda v: type(v).__name__ if isinstance(v, BaseException) else "",
)
def test_failure_reasons(error: BaseException, reason: str) -> None:
    assert failure_reason(error) == reason


def test_long_texts_are_cut() -> None:
    text = safe_text("x" * 70_000)
    assert text == "x" * 65_536 + "… (4464 more characters)"
    assert safe_text("x" * 11, longest=10) == "x" * 10 + "… (1 more characters)"
    assert safe_text("x" * 10, longest=10) == "x" * 10
    assert len(failure_reason(ValueError("é" * 20_000_000))) < 70_000


def test_the_tree_in_the_docstring_is_complete() -> None:
    doc = errors.__doc__ or ""
    names = [
        n for n, v in vars(errors).items() if isinstance(v, type) and issubclass(v, BaseException)
    ]
    assert len(names) == 15
    assert [name for name in names if name not in doc] == []
