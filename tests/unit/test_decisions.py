"""What a kernel's answer means; refusals of LLM calls are in effects/test_llm_refusals."""

from __future__ import annotations

from typing import Any

import pytest

from rebuno_sync.decisions import (
    Replayed,
    Run,
    raise_for_refusal,
    refusal_text,
    replayed,
    resolve,
    tool_error,
)
from rebuno_sync.errors import (
    APIError,
    Blocked,
    LeaseSuperseded,
    PolicyError,
    RateLimited,
    Terminated,
    ToolError,
)
from rebuno_sync.wire import Decision


def test_proceed() -> None:
    assert resolve(Decision("proceed", "s1"), "t") == Run("s1")


@pytest.mark.parametrize("value", [None, False, 0, "", [], {}, {"error": {"message": "m"}}])
def test_replayed_values(value: Any) -> None:
    assert resolve(Decision("replay", "s1", result=value), "t") == Replayed("s1", value)


def test_replayed_errors() -> None:
    found = resolve(Decision("replay", "s1", result="x", error={"message": "m"}), "t")
    assert isinstance(found, Replayed)
    assert found.error == ToolError("m", "t", step_id="s1", error={"message": "m"})
    assert replayed(Decision("replay"), "t", "s2").step_id == "s2"
    assert replayed(Decision("replay", "s1"), "t", "s2").step_id == "s1"


@pytest.mark.parametrize(
    ("decision", "kind", "attributes"),
    [
        (
            Decision("denied", "s", reason="no", rule_id="r"),
            PolicyError,
            {"reason": "no", "rule_id": "r", "tool": "t", "step_id": "s"},
        ),
        (
            Decision("denied"),
            PolicyError,
            {"reason": "policy_denied", "rule_id": "", "tool": "t", "step_id": ""},
        ),
        (Decision("rate_limited"), RateLimited, {"reason": "rate_limit_exceeded", "tool": "t"}),
        (
            Decision("rate_limited", reason="rate_limiter_unavailable"),
            RateLimited,
            {"reason": "rate_limiter_unavailable", "tool": "t"},
        ),
        (
            Decision("blocked", "s", approval_id="a"),
            Blocked,
            {"approval_id": "a", "step_id": "s"},
        ),
        (Decision("blocked", "s"), Blocked, {"approval_id": "", "step_id": "s"}),
        (Decision("execution_blocked"), Blocked, {"approval_id": "", "step_id": ""}),
        (Decision("execution_terminal"), Terminated, {}),
    ],
    ids=lambda v: v.decision if isinstance(v, Decision) else "",
)
def test_what_is_raised(
    decision: Decision, kind: type[BaseException], attributes: dict[str, str]
) -> None:
    with pytest.raises(kind) as caught:
        resolve(decision, "t")
    assert vars(caught.value) == attributes


@pytest.mark.parametrize(
    "decision", [Decision("proceed"), Decision("recorded"), Decision("Proceed", "s"), Decision("")]
)
def test_what_nobody_knows(decision: Decision) -> None:
    with pytest.raises(APIError, match="does not know what that means") as caught:
        resolve(decision, "t")
    assert (caught.value.code, caught.value.status_code) == ("unknown_decision", 200)
    assert repr(decision.decision) in str(caught.value)


@pytest.mark.parametrize(
    ("error", "message", "kind", "reason"),
    [
        ({"message": "m", "type": "T"}, "m", "T", ""),
        ({"message": "m", "reason": "indeterminate"}, "m", "", "indeterminate"),
        ({"reason": "execution_cancelled"}, "execution_cancelled", "", "execution_cancelled"),
        ({"message": "", "type": "T"}, "", "T", ""),
        ({"message": {"é": [1]}}, '{"é": [1]}', "", ""),
        ({"message": 5, "type": 6, "reason": 7}, "5", "", ""),
        ({"message": None, "code": 5}, '{"message": null, "code": 5}', "", ""),
        ({}, "{}", "", ""),
        ("text", "text", "", ""),
        (["a", 1], '["a", 1]', "", ""),
        (False, "false", "", ""),
    ],
    ids=repr,
)
def test_errors_of_any_recorder(error: Any, message: str, kind: str, reason: str) -> None:
    found = tool_error(error, "t", "s")
    assert (found.message, found.type, found.reason) == (message, kind, reason)
    assert (found.tool, found.step_id, found.error) == ("t", "s", error)
    assert str(found) == message
    assert found == tool_error(error, "t", "s")


@pytest.mark.parametrize(
    ("text", "signal"),
    [
        (refusal_text("blocked"), Blocked),
        (refusal_text("execution_blocked"), Blocked),
        (refusal_text("execution_terminal"), Terminated),
        (refusal_text("lease_superseded"), LeaseSuperseded),
        (refusal_text("denied", "over budget"), PolicyError),
        (refusal_text("rate_limited", "rate_limit_exceeded"), RateLimited),
    ],
)
def test_refusals_are_found_again(text: str, signal: type[BaseException]) -> None:
    error = ValueError(f"Error code: 403 - {{'message': '{text}'}}")
    with pytest.raises(signal) as caught:
        raise_for_refusal(error)
    if isinstance(caught.value, PolicyError | RateLimited):
        assert caught.value.reason in ("over budget", "rate_limit_exceeded")


def test_an_error_that_refuses_nothing_passes() -> None:
    loop = ValueError("plain")
    loop.__cause__ = loop
    for error in (ValueError("plain"), loop, ValueError(refusal_text("nonsense"))):
        assert raise_for_refusal(error) is None  # type: ignore[func-returns-value]
