"""What a kernel's answer means for an effect: run, replay or raise (PROTOCOL 5). Pure."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterator
from typing import Any

from .errors import (
    APIError,
    Blocked,
    LeaseSuperseded,
    PolicyError,
    RateLimited,
    Terminated,
    ToolError,
    safe_text,
)
from .wire import Decision


@dataclasses.dataclass(frozen=True)
class Run:
    """The body must run and its outcome be reported."""

    step_id: str


@dataclasses.dataclass(frozen=True)
class Replayed:
    """There is an outcome already: ``value``, unless ``error`` is given."""

    step_id: str
    value: Any = None
    error: ToolError | None = None


def resolve(decision: Decision, tool: str) -> Run | Replayed:
    """Turn the answer to a submission into what to do now.

    Args:
        decision: the kernel's answer.
        tool: the name of the tool or step, for errors.

    Raises:
        PolicyError: the effect was denied.
        RateLimited: it was over its limit.
        Blocked: the execution waits.
        Terminated: the execution has ended.
        APIError: the answer is none that this version knows.
    """
    what = decision.decision
    if what == "proceed" and decision.step_id:
        return Run(decision.step_id)
    if what == "replay":
        return replayed(decision, tool)
    if what == "denied":
        raise PolicyError(
            decision.reason or "policy_denied",
            decision.rule_id,
            tool=tool,
            step_id=decision.step_id,
        )
    if what == "rate_limited":
        raise RateLimited(decision.reason or "rate_limit_exceeded", tool=tool)
    if what in ("blocked", "execution_blocked"):
        raise Blocked(approval_id=decision.approval_id, step_id=decision.step_id)
    if what == "execution_terminal":
        raise Terminated
    raise unknown(decision)


def replayed(decision: Decision, tool: str, step_id: str = "") -> Replayed:
    """Return the stored outcome that a ``replay`` answer carries."""
    step_id = decision.step_id or step_id
    if decision.error is None:
        return Replayed(step_id, decision.result)
    return Replayed(step_id, error=tool_error(decision.error, tool, step_id))


def unknown(decision: Decision) -> APIError:
    """Return the error for a decision that this version does not know."""
    return APIError(
        f"the kernel answered with the decision {decision.decision!r} and the step id "
        f"{decision.step_id!r}; this version of the SDK does not know what that means",
        "unknown_decision",
        200,
    )


def tool_error(error: Any, tool: str, step_id: str) -> ToolError:
    """Build the error that a handler sees from the JSON that was recorded for it.

    Both the first run and a replay come through here, so they cannot differ. Other SDKs and
    the kernel record less: an object with ``message``, or any JSON at all.
    """
    fields = error if isinstance(error, dict) else {"message": error}
    message, reason = fields.get("message"), _text(fields.get("reason"))
    if message is None:
        message = reason or json.dumps(error, ensure_ascii=False)
    elif not isinstance(message, str):
        message = json.dumps(message, ensure_ascii=False)
    return ToolError(
        message,
        tool,
        type=_text(fields.get("type")),
        reason=reason,
        step_id=step_id,
        error=error,
    )


def _text(value: Any) -> str:
    return value if isinstance(value, str) else ""


# Refusals that travel through a provider's library as an HTTP answer (PROTOCOL 11)

REFUSAL_MARKER = "rebuno_refusal"
_REFUSAL = re.compile(
    REFUSAL_MARKER + r": (?P<decision>[a-z_]+)(?: reason=(?P<reason>[^\"'\\\n}]*))?"
)


def refusal_text(decision: str, reason: str = "") -> str:
    """Return the message by which :func:`raise_for_refusal` knows a refusal again."""
    return f"{REFUSAL_MARKER}: {decision}" + (f" reason={reason}" if reason else "")


def raise_for_refusal(exc: BaseException) -> None:
    """Raise the control-flow signal or error that ``exc`` carries from a refused LLM call.

    The marker is looked for in the exception, in its causes and contexts and in the members of
    exception groups, so it is found behind whatever a framework wrapped around it. Returns when
    there is none.

    Raises:
        Blocked, Terminated, LeaseSuperseded, PolicyError, RateLimited: as PROTOCOL 11 says.
    """
    for found in _chain(exc):
        match = _REFUSAL.search(_all_text(found))
        if match is None:
            continue
        decision, reason = match["decision"], (match["reason"] or "").strip()
        if decision == "lease_superseded":
            raise LeaseSuperseded from exc
        try:
            resolve(Decision(decision, reason=reason), "llm")
        except APIError:
            continue
        except BaseException as signal:
            raise signal from exc


def _chain(exc: BaseException) -> Iterator[BaseException]:
    """Yield an exception and everything it came from, each once."""
    seen: set[int] = set()
    waiting: list[BaseException | None] = [exc]
    while waiting:
        current = waiting.pop(0)
        if current is None or id(current) in seen:
            continue
        seen.add(id(current))
        yield current
        waiting += [current.__cause__, current.__context__]
        members = getattr(current, "exceptions", ())
        if isinstance(members, (tuple, list)):
            waiting += [member for member in members if isinstance(member, BaseException)]


def _all_text(exc: BaseException) -> str:
    body = getattr(exc, "body", None)
    return safe_text(exc) if body is None else f"{safe_text(exc)}\n{safe_text(body)}"
