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
    ControlFlow,
    LeaseSuperseded,
    PolicyError,
    RateLimited,
    RebunoError,
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
    REFUSAL_MARKER + r": (?P<decision>[a-z_]+)(?: reason=(?P<reason>.*))?", re.DOTALL
)
#: Where a refusal ends that is quoted in the text of an exception.
_END_OF_QUOTE = re.compile(r"[\"'\\\n}]")
_DEEPEST = 8


def refusal_text(decision: str, reason: str = "") -> str:
    """Return the message by which :func:`raise_for_refusal` knows a refusal again."""
    return f"{REFUSAL_MARKER}: {decision}" + (f" reason={reason}" if reason else "")


def refused(text: str) -> ControlFlow | RebunoError | None:
    """Return the signal or error that a refusal in ``text`` stands for; ``None`` without one."""
    match = _REFUSAL.search(text)
    if match is None:
        return None
    reason = match["reason"] or ""
    if match.start() > 0:
        reason = _END_OF_QUOTE.split(reason, maxsplit=1)[0]
    if match["decision"] == "lease_superseded":
        return LeaseSuperseded()
    try:
        resolve(Decision(match["decision"], reason=reason.strip()), "llm")
    except APIError:
        return None
    except (ControlFlow, RebunoError) as refusal:
        return refusal.with_traceback(None)
    return None


def raise_for_refusal(exc: BaseException) -> None:
    """Raise the control-flow signal or error that ``exc`` carries from a refused LLM call.

    The marker is looked for in the exception, in the answer that it came with, in its causes and
    contexts and in the members of exception groups, so it is found behind whatever a framework
    wrapped around it. Returns when there is none.

    Raises:
        Blocked, Terminated, LeaseSuperseded, PolicyError, RateLimited: as PROTOCOL 11 says.
    """
    for found in _chain(exc):
        for text in _texts(found):
            refusal = refused(text)
            if refusal is not None:
                raise refusal from exc


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


def _texts(exc: BaseException) -> Iterator[str]:
    """Yield what an exception says, whole texts before those that quote them."""
    yield from _strings(getattr(exc, "body", None))
    # What has been read of the answer already; asking for it in public could read the network.
    content = getattr(getattr(exc, "response", None), "_content", None)
    if isinstance(content, bytes) and REFUSAL_MARKER.encode() in content:
        try:
            yield from _strings(json.loads(content))
        except ValueError:
            yield content.decode("utf-8", "replace")
    yield safe_text(exc)


def _strings(value: Any, depth: int = 0) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, (dict, list)) and depth < _DEEPEST:
        for part in value.values() if isinstance(value, dict) else value:
            yield from _strings(part, depth + 1)
