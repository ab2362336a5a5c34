"""LLM calls: what is recorded of one, and the answer that is made of the record (PROTOCOL 11).

Pure, and without any HTTP library. A first run hands out the answer made of what it has just
recorded, and a replay the one made of what it was told, so the two cannot be told apart.
"""

from __future__ import annotations

import base64
import dataclasses
import email.utils
import math
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

from .. import wire
from ..decisions import REFUSAL_MARKER, Replayed, refusal_text, refused
from ..errors import (
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

CONTENT_TYPE = "content-type"
IDEMPOTENCY_KEY = "Idempotency-Key"
#: What else is kept of an answer that is no success: libraries go by it.
_STEERING = ("location", "www-authenticate", "retry-after", "retry-after-ms", "x-should-retry")
#: A library that honours ``Retry-After`` only up to a limit gives up beyond this many seconds.
LONGEST_RETRY_AFTER = 120.0
#: The kernel's limit for a whole request, less what the report puts around a result.
MAX_RECORD_BYTES = wire.MAX_VALUE_BYTES

CLOSED_EARLY = (
    "this stream was closed at this point when it was recorded, and now it is read further; "
    "a handler must do the same on every run"
)
_TOO_LARGE = "too_large"


@dataclasses.dataclass(frozen=True)
class Call:
    """A request that is recorded.

    Attributes:
        target: the target of the step.
        request: the decoded body.
        waits_long: whether the library that sent it waits for as long as any ``Retry-After`` says.
    """

    target: str
    request: dict[str, Any]
    waits_long: bool

    @property
    def streams(self) -> bool:
        """Whether a streamed answer is asked for."""
        return self.request.get("stream") is True


def call_of(body: bytes | str | None, path: str, headers: Mapping[str, str]) -> Call | None:
    """Return what is recorded of a request; ``None`` when its body is no JSON object.

    Args:
        body: the raw body.
        path: the path of the URL; it is the target when the body names no model.
        headers: the headers, looked up in lower case.
    """
    if not body:
        return None
    try:
        request = wire.decode(body.encode() if isinstance(body, str) else body)
    except ValueError:
        return None
    if not isinstance(request, dict):
        return None
    model = request.get("model")
    target = model if isinstance(model, str) and model else path.strip("/") or "/"
    return Call(target, request, waits_long="anthropic-version" in headers)


@dataclasses.dataclass(frozen=True)
class Failure:
    """An error of an HTTP library: the name that the library gives its class, and its text."""

    type: str
    message: str


class Failed(Exception):
    """Carries a :class:`Failure` to the module that knows the HTTP library."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.message)
        self.failure = failure


class Body(Protocol):
    """The body of an answer: chunks of bytes, once."""

    def __iter__(self) -> Iterator[bytes]: ...

    def __next__(self) -> bytes:
        """Return the next chunk, which is never empty.

        Raises:
            Failed: the answer breaks off here.
        """

    def close(self) -> None:
        """Stop reading; safe to repeat, and never raises."""


class RecordedBody:
    """A body that is there, and perhaps breaks off at its end."""

    def __init__(self, content: bytes, failure: Failure | None = None) -> None:
        self._content = content
        self._failure = failure

    def __iter__(self) -> Iterator[bytes]:
        return self

    def __next__(self) -> bytes:
        content, self._content = self._content, b""
        if content:
            return content
        if self._failure is not None:
            raise Failed(self._failure)
        raise StopIteration

    def close(self) -> None:
        """Nothing is held open."""


@dataclasses.dataclass(frozen=True)
class Answer:
    """What the caller of the HTTP library gets."""

    status: int
    headers: Mapping[str, str]
    body: Body


@dataclasses.dataclass(frozen=True)
class Incoming:
    """What the provider answers, its body not read yet.

    Attributes:
        headers: looked up in lower case.
        chunks: the decoded body as it comes.
        close: lets go of the connection.
    """

    status: int
    headers: Mapping[str, str]
    chunks: Iterator[bytes]
    close: Callable[[], None]


class Exchange(Protocol):
    """One request as its HTTP library sends it, and what the library's errors mean."""

    def send(self, step_id: str) -> Incoming:
        """Send the request, with the step's id as its ``Idempotency-Key`` unless it has one."""

    def failure(self, exc: Exception) -> Failure:
        """Return what is recorded of an error."""

    def is_transient(self, exc: Exception) -> bool:
        """Tell whether another try may go better."""


# What is kept


def kept_headers(status: int, headers: Mapping[str, str]) -> dict[str, str]:
    """Return the headers of an answer that are recorded, and that its caller sees.

    Args:
        headers: all of them, looked up in lower case.
    """
    names = (CONTENT_TYPE, *_STEERING) if status >= 300 else (CONTENT_TYPE,)
    return {name: safe_text(headers[name]) for name in names if name in headers}


def kept(status: int, headers: Mapping[str, str], body: bytes) -> dict[str, Any]:
    """Return the result that is recorded for an answer.

    Text is kept as text. Anything else is kept as base64 in ``body_base64`` beside an empty
    ``body``; so is text with a NUL in it, which PostgreSQL does not store.
    """
    record = {"status": status, "headers": dict(headers)}
    try:
        text = body.decode("utf-8")
    except UnicodeDecodeError:
        text = "\0"
    if "\0" in text:
        return {**record, "body": "", "body_base64": base64.b64encode(body).decode("ascii")}
    return {**record, "body": text}


def kept_failure(failure: Failure, partial: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return the error that is recorded when the HTTP library raised.

    Args:
        partial: what was kept of the answer that broke off, if one had begun.
    """
    record: dict[str, Any] = {"message": failure.message, "type": failure.type}
    return record if partial is None else {**record, "response": dict(partial)}


def too_large(size: int) -> dict[str, Any]:
    """Return the error that is recorded for an answer that the kernel would not take."""
    return {
        "message": f"the provider's answer has {size} bytes of JSON as it would be recorded, and "
        f"the kernel takes {wire.MAX_BODY_BYTES}; ask for less at once, or make this call inside "
        "a tool that stores the answer elsewhere and returns a reference",
        "type": "ResponseTooLarge",
        "reason": _TOO_LARGE,
    }


# What comes back


def answer_of(found: Replayed, call: Call, *, replayed: bool) -> Answer:
    """Return the answer that a recorded outcome stands for.

    Args:
        replayed: whether it was recorded earlier, so that nothing needs to be waited for.

    Raises:
        Failed: the HTTP library raised.
        RebunoError: the record is none of an LLM call.
    """
    if found.error is not None:
        return _answer_of_failure(found.error)
    try:
        told = found.value.get("headers") or {}
        headers = {str(name): str(value) for name, value in told.items()}
        status, content = int(found.value["status"]), _content(found.value)
    except (AttributeError, KeyError, TypeError, ValueError):
        raise RebunoError(
            f"step {found.step_id} holds what is no answer of a provider: {found.value!r:.200}"
        ) from None
    failure = Failure("", CLOSED_EARLY) if found.value.get("closed_early") else None
    if replayed and may_be_retried(status, headers):
        headers.update(_no_wait(headers, call))
    return Answer(status, headers, RecordedBody(content, failure))


def _answer_of_failure(error: ToolError) -> Answer:
    if error.reason == _TOO_LARGE:
        return _refusing(413, "rebuno_error", error.message)
    failure = Failure(error.type, error.message)
    begun = error.error.get("response") if isinstance(error.error, dict) else None
    if begun is None:
        raise Failed(failure)
    return Answer(begun["status"], begun["headers"], RecordedBody(_content(begun), failure))


def _content(record: Mapping[str, Any]) -> bytes:
    packed = record.get("body_base64")
    if packed is not None:
        return base64.b64decode(packed, validate=True)
    text: str = record["body"]
    return text.encode("utf-8")


def may_be_retried(status: int, headers: Mapping[str, str]) -> bool:
    """Tell whether an answer is one that libraries retry."""
    told = headers.get("x-should-retry")
    if told in ("true", "false"):
        return told == "true"
    return status in (408, 409, 429) or status >= 500


def _no_wait(headers: Mapping[str, str], call: Call) -> dict[str, str]:
    """Return the header that lets a library retry at once what it retried when it was new.

    Where a library gave up because of a long ``Retry-After``, it must do so again.
    """
    asked = retry_after(headers)
    if asked is not None and asked > LONGEST_RETRY_AFTER and not call.waits_long:
        return {}
    return {"retry-after-ms": "1"}  # 0 is taken for no answer at all


def retry_after(headers: Mapping[str, str]) -> float | None:
    """Return the seconds that an answer asks its client to wait; ``None`` when it does not."""
    for name, unit in (("retry-after-ms", 1e-3), ("retry-after", 1.0)):
        try:
            seconds = float(headers[name]) * unit
        except (KeyError, ValueError):
            continue
        if math.isfinite(seconds):
            return max(seconds, 0.0)
    try:
        until = email.utils.parsedate_to_datetime(headers["retry-after"])
        return max(until.timestamp() - time.time(), 0.0)
    except (KeyError, ValueError, OverflowError):
        return None


# Refusals


def refusal(exc: BaseException) -> Answer:
    """Return the answer by which a provider's library learns that a call is refused.

    An exception would be retried or wrapped by it. What is no decision of the kernel's becomes
    an error of the type ``rebuno_error``, which is not retried either.
    """
    if isinstance(exc, PolicyError):
        status, message = 403, refusal_text("denied", safe_text(exc.reason))
    elif isinstance(exc, RateLimited):
        status, message = 429, refusal_text("rate_limited", safe_text(exc.reason))
    elif isinstance(exc, Blocked):
        status, message = 403, refusal_text("blocked")
    elif isinstance(exc, Terminated):
        status, message = 403, refusal_text("execution_terminal")
    elif isinstance(exc, LeaseSuperseded):
        status, message = 409, refusal_text("lease_superseded")
    else:
        return _refusing(400, "rebuno_error", f"rebuno_sync: {safe_text(exc)}")
    return _refusing(status, REFUSAL_MARKER, message)


def _refusing(status: int, kind: str, message: str) -> Answer:
    body = wire.encode({"error": {"type": kind, "message": message}}, "refusal")
    headers = {CONTENT_TYPE: "application/json", "x-should-retry": "false"}
    return Answer(status, headers, RecordedBody(body))


def refusal_by_gateway(status: int, body: bytes) -> ControlFlow | RebunoError | None:
    """Return what an answer stands for by which a gateway refuses a call, as the kernel may."""
    if status not in (403, 409, 429) or REFUSAL_MARKER.encode() not in body:
        return None
    try:
        message = wire.decode(body)["error"]["message"]
    except (ValueError, TypeError, KeyError):
        return None
    if not isinstance(message, str) or not message.startswith(REFUSAL_MARKER):
        return None
    return refused(message)
