"""The kernel's refusals, one function for each code of PROTOCOL 4; all return what to raise."""

from __future__ import annotations

from rebuno_sync.errors import APIError, api_error


def invalid(message: str) -> APIError:
    """The request is malformed."""
    return api_error(400, "validation_error", message)


def unauthorized(message: str) -> APIError:
    """The signature or the token is not good."""
    return api_error(401, "unauthorized", message)


def forbidden(message: str) -> APIError:
    """The caller is known and may not do this."""
    return api_error(403, "forbidden", message)


def not_found(what: str, id: str) -> APIError:
    """There is no such thing."""
    return api_error(404, "not_found", f"there is no {what} {id!r:.100}")


def conflict(message: str) -> APIError:
    """The thing is not in a state that allows this."""
    return api_error(409, "conflict", message)


def execution_terminal(status: str) -> APIError:
    """The execution has ended."""
    return api_error(409, "execution_terminal", f"the execution has already ended: {status}")


def lease_superseded(message: str) -> APIError:
    """The caller's dispatch attempt does not own the execution."""
    return api_error(409, "lease_superseded", message)
