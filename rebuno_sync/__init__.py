"""Durable agents for plain synchronous Python, on the Rebuno protocol."""

from .attempt import Result
from .client import Client
from .context import execution, previous
from .decisions import raise_for_refusal
from .effects.llm_clients import http_client, requests_session
from .effects.step import step
from .effects.tool import tool, wrap_tool
from .errors import (
    APIError,
    Blocked,
    ConflictError,
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
    failure_reason,
)
from .serving.web_agent import Agent
from .threads import ContextThreadPoolExecutor, bind_context
from .version import __version__

__all__ = [
    "APIError",
    "Agent",
    "Blocked",
    "Client",
    "ConflictError",
    "ContextThreadPoolExecutor",
    "ForbiddenError",
    "LeaseSuperseded",
    "NetworkError",
    "NotFoundError",
    "PolicyError",
    "RateLimited",
    "RebunoError",
    "Result",
    "Terminated",
    "ToolError",
    "UnauthorizedError",
    "ValidationError",
    "__version__",
    "bind_context",
    "execution",
    "failure_reason",
    "http_client",
    "previous",
    "raise_for_refusal",
    "requests_session",
    "step",
    "tool",
    "wrap_tool",
]
