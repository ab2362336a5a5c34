"""The names that users type, and the signatures they rely on."""

from __future__ import annotations

import inspect
import subprocess
import sys
from typing import Any

import pytest

import rebuno_sync
from rebuno_sync import Agent, Client, errors
from rebuno_sync.kernel import EmbeddedKernel, identity

NAMES = [
    "Agent",
    "Client",
    "tool",
    "wrap_tool",
    "step",
    "execution",
    "previous",
    "Result",
    "requests_session",
    "http_client",
    "raise_for_refusal",
    "failure_reason",
    "bind_context",
    "ContextThreadPoolExecutor",
    "RebunoError",
    "NetworkError",
    "APIError",
    "ValidationError",
    "UnauthorizedError",
    "ForbiddenError",
    "NotFoundError",
    "ConflictError",
    "PolicyError",
    "ToolError",
    "RateLimited",
    "Blocked",
    "Terminated",
    "LeaseSuperseded",
]
#: Names that come with sessions' companions (PROTOCOL 10); allowed before they are demanded.
LATER = ["subagent", "resource", "CheckpointPolicy"]

EFFECT = "idempotency='safe_to_retry', retries=0, timeout=None, on_denied='raise', reconcile=None"
SIGNATURES: list[tuple[Any, str]] = [
    (
        Agent,
        "agent_id, *, secret=None, base_url=None, webhook_path='/webhook', kernel_timeout=35.0, "
        "max_concurrency=32, shutdown_timeout=25.0, signature='auto', description=None, "
        "output_schema=None, max_queue=1000",
    ),
    (Agent.bind, "self, fn"),
    (Agent.handler, "self, fn"),
    (Agent.run, "self, fn=None, *, host='127.0.0.1', port=5000, workers=1, threads=8"),
    (Agent.join, "self, timeout=None"),
    (Agent.close, "self, timeout=None"),
    (rebuno_sync.tool, f"tool_id=None, *, {EFFECT}, resources=None"),
    (
        rebuno_sync.wrap_tool,
        "name, invoke, *, description='', args_schema=None, to_result=None, transform_args=None, "
        f"{EFFECT}, resources=None",
    ),
    (rebuno_sync.step, f"name, fn, args=None, *, {EFFECT}, resources=None"),
    (rebuno_sync.execution, ""),
    (rebuno_sync.previous, ""),
    (rebuno_sync.Result, "output=None, state=None"),
    (rebuno_sync.bind_context, "fn"),
    (rebuno_sync.failure_reason, "exc"),
    (rebuno_sync.raise_for_refusal, "exc"),
    (Client, "base_url=None, api_key=None, *, timeout=35.0"),
    (
        Client.create,
        "self, agent_id, input=None, *, session='', parent_execution_id='', idempotency_key='', "
        "spawned_by=None, on_behalf_of=''",
    ),
    (Client.get, "self, execution_id"),
    (Client.list, "self, *, agent_id='', status='', session='', limit=None"),
    (Client.wait, "self, execution_id, timeout=None, *, until_blocked=False"),
    (Client.cancel, "self, execution_id"),
    (Client.events, "self, execution_id, *, after_seq=0"),
    (Client.watch, "self, execution_id, *, after_seq=0, timeout=None"),
    (Client.steps, "self, execution_id, *, status=''"),
    (Client.step, "self, execution_id, step_id"),
    (Client.stream, "self, execution_id, *, timeout=60.0"),
    (Client.approvals, "self"),
    (Client.approval, "self, approval_id"),
    (Client.grant, "self, approval_id, *, decided_by='', rationale=''"),
    (Client.deny, "self, approval_id, *, decided_by='', rationale=''"),
    (Client.agents, "self"),
    (Client.agent, "self, agent_id"),
    (Client.register_agent, "self, agent_id, webhook_url, secret, *, lease_timeout_seconds=None"),
    (Client.delete_agent, "self, agent_id"),
    (Client.set_policy, "self, agent_id, bundle"),
    (Client.health, "self"),
    (Client.close, "self"),
    (identity.canonical_json, "args"),
    (identity.args_hash, "args"),
    (identity.step_id, "execution_id, kind, target, args_hash, occurrence"),
]


def bare(fn: Any) -> str:
    """A signature without its annotations."""
    found = inspect.signature(fn)
    parameters = [p.replace(annotation=p.empty) for p in found.parameters.values()]
    return str(inspect.Signature(parameters)).removeprefix("(").removesuffix(")")


def test_the_names() -> None:
    assert set(NAMES) <= set(rebuno_sync.__all__)
    assert set(rebuno_sync.__all__) <= {*NAMES, *LATER, "__version__"}
    assert len(set(rebuno_sync.__all__)) == len(rebuno_sync.__all__)
    for name in rebuno_sync.__all__:
        assert getattr(rebuno_sync, name) is not None


def test_a_star_import_brings_them_and_nothing_else() -> None:
    script = """
        before = set(dir())
        from rebuno_sync import *
        import rebuno_sync
        assert set(dir()) - before - {"before", "rebuno_sync"} == set(rebuno_sync.__all__)
    """
    done = subprocess.run([sys.executable, "-c", inspect.cleandoc(script)], capture_output=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("fn", "expected"), SIGNATURES, ids=[fn.__qualname__ for fn, _ in SIGNATURES]
)
def test_signatures(fn: Any, expected: str) -> None:
    assert bare(fn) == expected


@pytest.mark.parametrize("name", [n for n in NAMES if n not in ("RebunoError",)])
def test_everything_is_documented_and_annotated(name: str) -> None:
    thing = getattr(rebuno_sync, name)
    assert inspect.getdoc(thing)
    if inspect.isfunction(thing):
        assert set(thing.__annotations__) == {*inspect.signature(thing).parameters, "return"}


def test_the_kernel_that_comes_along() -> None:
    assert bare(EmbeddedKernel).startswith(
        "path=None, *, manifest=None, lease_timeout=120.0, bearer_token=None"
    )
    for name in ("start", "stop", "url", "__enter__", "__exit__"):
        assert hasattr(EmbeddedKernel, name)


def test_what_a_context_offers() -> None:
    from rebuno_sync.context import ExecutionContext
    from tests.unit.support import MemoryKernel, in_execution

    with in_execution(MemoryKernel()) as context:
        for name in (
            "id",
            "agent_id",
            "input",
            "status",
            "dispatch_id",
            "dispatch_attempt",
            "is_replaying",
            "cancelled",
        ):
            assert hasattr(context, name)
    assert bare(ExecutionContext.check) == "self"


def test_exceptions_are_where_they_are_looked_for() -> None:
    for name in NAMES:
        thing = getattr(rebuno_sync, name)
        if isinstance(thing, type) and issubclass(thing, BaseException):
            assert thing is getattr(errors, name)
