"""HMAC signatures over bytes (PROTOCOL 3). No HTTP in here."""

from __future__ import annotations

import hmac

BODY_PREFIX = "sha256="
REQUEST_PREFIX = "v1="
#: How far an agent's clock and the kernel's may differ, in seconds.
MAX_CLOCK_SKEW = 300


def _digest(secret: str, message: bytes) -> str:
    return hmac.digest(secret.encode("utf-8"), message, "sha256").hex()


def sign_body(secret: str, body: bytes) -> str:
    """Return the body signature: ``sha256=`` and the lower-case hex HMAC-SHA256 of ``body``."""
    return BODY_PREFIX + _digest(secret, body)


def sign_request(
    secret: str,
    method: str,
    target: str,
    timestamp: str,
    body: bytes,
    *,
    dispatch_id: str = "",
    dispatch_attempt: str = "",
) -> str:
    """Return the request signature: ``v1=`` and a digest that covers more than the body.

    Args:
        secret: the agent's secret.
        method: the HTTP method, upper case.
        target: the escaped path and raw query, exactly as sent.
        timestamp: decimal Unix seconds, exactly as sent.
        body: the raw body.
        dispatch_id: the ``Rebuno-Dispatch-Id`` header, or empty.
        dispatch_attempt: the ``Rebuno-Dispatch-Attempt`` header, or empty.
    """
    fields = ("rebuno-request-v1", method, target, timestamp, dispatch_id, dispatch_attempt)
    head = "".join(field + "\n" for field in fields)
    return REQUEST_PREFIX + _digest(secret, head.encode("utf-8") + body)


def same_signature(expected: str, given: str) -> bool:
    """Compare two signatures in constant time; ``given`` may be any text at all."""
    return hmac.compare_digest(expected.encode("utf-8"), given.encode("utf-8", "surrogatepass"))


def verify_body(secret: str, body: bytes, given: str) -> bool:
    """Tell whether ``given`` is the body signature of ``body``."""
    return same_signature(sign_body(secret, body), given)
