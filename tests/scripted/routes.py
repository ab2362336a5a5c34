"""The kernel's routes by the names that tests use for them (PROTOCOL 4, 9)."""

from __future__ import annotations

import re

_EXECUTION = r"/v0/executions/(?P<id>[^/]+)"
ROUTES: tuple[tuple[str, str, str], ...] = (
    ("read", "GET", _EXECUTION),
    ("submit", "POST", rf"{_EXECUTION}/steps"),
    ("step_complete", "POST", rf"{_EXECUTION}/steps/(?P<step>[^/]+)/complete"),
    ("step_fail", "POST", rf"{_EXECUTION}/steps/(?P<step>[^/]+)/fail"),
    ("stream", "POST", rf"{_EXECUTION}/steps/(?P<step>[^/]+)/stream"),
    ("heartbeat", "POST", rf"{_EXECUTION}/heartbeat"),
    ("complete", "POST", rf"{_EXECUTION}/complete"),
    ("fail", "POST", rf"{_EXECUTION}/fail"),
    ("steps", "GET", rf"{_EXECUTION}/steps"),
    ("step", "GET", rf"{_EXECUTION}/steps/(?P<step>[^/]+)"),
    ("events", "GET", rf"{_EXECUTION}/events"),
    ("cancel", "POST", rf"{_EXECUTION}/cancel"),
    ("create", "POST", "/v0/executions"),
    ("executions", "GET", "/v0/executions"),
    ("register", "POST", "/v0/agents"),
    ("agents", "GET", "/v0/agents"),
    ("agent", "GET", "/v0/agents/(?P<agent>[^/]+)"),
    ("remove", "DELETE", "/v0/agents/(?P<agent>[^/]+)"),
    ("approvals", "GET", "/v0/approvals"),
    ("approval", "GET", "/v0/approvals/(?P<approval>[^/]+)"),
    ("grant", "POST", "/v0/approvals/(?P<approval>[^/]+)/grant"),
    ("deny", "POST", "/v0/approvals/(?P<approval>[^/]+)/deny"),
    ("health", "GET", "/v0/health"),
    ("ready", "GET", "/v0/ready"),
)
METADATA = ("metadata", "PUT", "/v0/agents/(?P<agent>[^/]+)/metadata")
_PATTERNS = [(call, method, re.compile(path)) for call, method, path in (*ROUTES, METADATA)]


def call_of(method: str, target: str) -> str:
    """The name of the call that a request makes; ``unknown`` for none of the kernel's."""
    path = target.partition("?")[0]
    for call, wanted, pattern in _PATTERNS:
        if method == wanted and pattern.fullmatch(path):
            return call
    return "unknown"
