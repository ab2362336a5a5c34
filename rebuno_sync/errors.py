"""Every exception of the package.

::

    Exception
    └── RebunoError
        ├── NetworkError          no usable answer came back
        ├── APIError              the kernel answered with an error status
        │   ├── ValidationError   400
        │   ├── UnauthorizedError 401
        │   ├── ForbiddenError    403
        │   ├── NotFoundError     404
        │   └── ConflictError     409
        ├── PolicyError           an effect was denied
        ├── ToolError             the body of an effect failed
        └── RateLimited           an effect was over its rate limit
    BaseException
    └── ControlFlow               ends the dispatch; never caught by ``except Exception``
        ├── Blocked               a person or a limit must be waited for
        ├── Terminated            the execution has already ended
        └── LeaseSuperseded       this attempt no longer owns the execution
"""

from __future__ import annotations

import re
from typing import Any

_TOKEN = re.compile(r"[a-z0-9_]+")


class RebunoError(Exception):
    """Base of the errors that a handler or a client may catch."""


class NetworkError(RebunoError):
    """No usable answer came back from the kernel.

    Attributes:
        never_arrived: true when the request certainly did not reach the kernel (the
            connection was refused), so that sending it again cannot repeat anything.
    """

    def __init__(self, message: str, *, never_arrived: bool = False) -> None:
        super().__init__(message)
        self.never_arrived = never_arrived


class APIError(RebunoError):
    """The kernel answered with an error status (PROTOCOL 4).

    Attributes:
        message: the kernel's words.
        code: the kernel's code, such as ``validation_error``; ``http_<status>`` when the
            answer carried none.
        status_code: the HTTP status.
        details: whatever else the kernel sent along, usually ``None``.
    """

    def __init__(
        self, message: str, code: str = "", status_code: int = 0, details: Any = None
    ) -> None:
        super().__init__(message)
        self.message = message
        self.code = code
        self.status_code = status_code
        self.details = details

    def __str__(self) -> str:
        return f"{self.message} ({self.code}, HTTP {self.status_code})"


class ValidationError(APIError):
    """The kernel refused a malformed request (400)."""


class UnauthorizedError(APIError):
    """The kernel refused the signature or the token (401)."""


class ForbiddenError(APIError):
    """The caller may not do this (403)."""


class NotFoundError(APIError):
    """There is no such thing (404)."""


class ConflictError(APIError):
    """The thing is not in a state that allows this (409)."""


_API_ERRORS: dict[int, type[APIError]] = {
    400: ValidationError,
    401: UnauthorizedError,
    403: ForbiddenError,
    404: NotFoundError,
    409: ConflictError,
}


def api_error(status: int, code: str, message: str, details: Any = None) -> APIError:
    """Return the :class:`APIError` subclass that stands for an HTTP status."""
    return _API_ERRORS.get(status, APIError)(message, code, status, details)


class PolicyError(RebunoError):
    """An effect was denied: by a policy rule, by a person, or because an approval ran out.

    Attributes:
        reason: why, in the kernel's words.
        rule_id: the policy rule that decided, ``""`` when the kernel did not say.
        tool: the name of the tool or step.
        step_id: the denied step, ``""`` when the kernel did not say.
    """

    def __init__(
        self, reason: str, rule_id: str = "", *, tool: str = "", step_id: str = ""
    ) -> None:
        super().__init__(reason)
        self.reason = reason
        self.rule_id = rule_id
        self.tool = tool
        self.step_id = step_id


class ToolError(RebunoError):
    """The body of a tool or step failed, now or in an earlier attempt.

    The first run and every replay raise an equal error: all attributes come from what was
    recorded, and the original exception is logged, not chained.

    Attributes:
        message: the text of the original exception.
        tool: the name of the tool or step.
        type: the class name of the original exception, such as ``"ValueError"``;
            ``""`` when another SDK recorded none.
        reason: a stable token for failures that the SDK or the kernel names itself
            (``"indeterminate"``, ``"timeout"``), else ``""``.
        step_id: the failed step.
        error: the recorded JSON value, whole.
    """

    def __init__(
        self,
        message: str,
        tool: str = "",
        *,
        type: str = "",
        reason: str = "",
        step_id: str = "",
        error: Any = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.tool = tool
        self.type = type
        self.reason = reason
        self.step_id = step_id
        self.error = error

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, ToolError):
            return NotImplemented
        return (type(self), self.__dict__) == (type(other), other.__dict__)

    def __hash__(self) -> int:
        return hash((self.message, self.tool, self.step_id))


class RateLimited(RebunoError):
    """An effect was over its rate limit, or the limiter could not be asked.

    Attributes:
        reason: ``rate_limit_exceeded`` or ``rate_limiter_unavailable``.
        tool: the name of the tool or step.
    """

    def __init__(self, reason: str = "rate_limit_exceeded", *, tool: str = "") -> None:
        super().__init__(reason)
        self.reason = reason
        self.tool = tool


class ControlFlow(BaseException):
    """Base of the signals that end a dispatch. Let them pass."""


class Blocked(ControlFlow):
    """The execution waits, usually for an approval; the kernel dispatches again later.

    Attributes:
        approval_id: the approval that a person must decide, or ``""``.
        step_id: the step that waits, or ``""``.
    """

    def __init__(
        self,
        message: str = "the execution waits for a decision",
        *,
        approval_id: str = "",
        step_id: str = "",
    ) -> None:
        super().__init__(message)
        self.approval_id = approval_id
        self.step_id = step_id


class Terminated(ControlFlow):
    """The execution has already ended: completed, failed or cancelled."""

    def __init__(self, message: str = "the execution has already ended") -> None:
        super().__init__(message)


class LeaseSuperseded(ControlFlow):
    """This attempt no longer owns the execution, or has been given up.

    Another attempt owns it or soon will: the kernel delivers again when the lease runs out.
    """

    def __init__(self, message: str = "another attempt holds the lease") -> None:
        super().__init__(message)


def is_interruption(exc: BaseException) -> bool:
    """Tell whether ``exc`` ends a thread or the process, rather than the work that it does.

    gevent ends a greenlet by ``GreenletExit``, which is known by its name here.
    """
    if isinstance(exc, (KeyboardInterrupt, SystemExit, GeneratorExit)):
        return True
    return any(kind.__name__ == "GreenletExit" for kind in type(exc).__mro__)


def safe_text(value: object, longest: int = 65_536) -> str:
    """Return ``str(value)`` as valid Unicode, whatever ``value`` does when asked for it.

    Args:
        longest: a longer text is cut, in characters; it says how much is missing.
    """
    try:
        text = str(value)
    except Exception:
        text = f"<{type(value).__name__} that cannot be shown as text>"
    if len(text) > longest:
        text = f"{text[:longest]}… ({len(text) - longest} more characters)"
    return text.encode("utf-8", "replace").decode("utf-8")


def failure_reason(exc: BaseException) -> str:
    """Return the text that an execution's ``failure_reason`` records for ``exc`` (PROTOCOL 5).

    The text before the first colon is a stable token to group by: the kernel's own reason when
    it is one, or ``policy_denied``, ``tool_error``, ``agent_error``.
    """
    if isinstance(exc, PolicyError):
        reason = safe_text(exc.reason)
        if _TOKEN.fullmatch(reason):
            return reason
        return f"policy_denied: {reason}" if reason else "policy_denied"
    if isinstance(exc, RateLimited):
        return safe_text(exc.reason)
    if isinstance(exc, ToolError):
        return f"tool_error: {safe_text(exc.tool)}: {safe_text(exc.message)}"
    return f"agent_error: {type(exc).__name__}: {safe_text(exc)}"
