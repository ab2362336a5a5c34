"""``import rebuno_sync`` loads little, and constructing things loads no more than they need."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest

#: What takes long to import, or belongs to an extra.
HEAVY = (
    "flask",
    "werkzeug",
    "gunicorn",
    "pydantic",
    "httpx",
    "httpx2",
    "requests",
    "urllib3",
    "click",
    "rich",
    "yaml",
    "re2",
    "orjson",
    "openai",
    "anthropic",
    "mcp",
    "fastmcp",
    "asyncio",
    "sqlite3",
    "opentelemetry",
    "prometheus_client",
    "structlog",
    "rebuno_sync.kernel",
    "rebuno_sync.cli",
    "rebuno_sync.testing",
    "rebuno_sync.telemetry",
    "rebuno_sync.connections",
)


def loaded(script: str) -> set[str]:
    """The modules that are there once a script has run."""
    script = textwrap.dedent(script) + "\nimport sys\nprint(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    return set(done.stdout.split())


def heavy(modules: set[str]) -> set[str]:
    return {m for m in modules if any(m == h or m.startswith(f"{h}.") for h in HEAVY)}


def test_the_package() -> None:
    command = [sys.executable, "-X", "importtime", "-c", "import rebuno_sync"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    rows = [line for line in done.stderr.splitlines() if line.startswith("import time:")]
    modules = {row.rpartition("|")[2].strip() for row in rows}
    assert {"rebuno_sync", "rebuno_sync.agent", "rebuno_sync.context"} <= modules
    assert heavy(modules | loaded("import rebuno_sync")) == set()


def test_it_loads_no_more_than_the_standard_library_and_itself() -> None:
    bare = loaded("pass")
    added = {m.partition(".")[0] for m in loaded("import rebuno_sync") - bare}
    assert added <= sys.stdlib_module_names | {"rebuno_sync"}


@pytest.mark.parametrize(
    "script",
    [
        "Agent('a', secret='s', base_url='http://127.0.0.1:1').bind(lambda n: n)",
        "Client('http://127.0.0.1:1')",
        "tool(lambda: 1)",
        "wrap_tool('t', lambda args: 1, args_schema={'properties': {'a': {'type': 'string'}}})",
    ],
)
def test_constructing_loads_nothing_more(script: str) -> None:
    assert heavy(loaded(f"from rebuno_sync import *\n{script}")) == set()


def test_a_blueprint_loads_flask_and_not_the_rest() -> None:
    script = """
        from rebuno_sync import Agent
        Agent("a", secret="s", base_url="http://127.0.0.1:1").blueprint
    """
    found = {m.partition(".")[0] for m in heavy(loaded(script))}
    assert "flask" in found
    assert not found & {"gunicorn", "pydantic", "httpx", "httpx2", "requests", "urllib3"}
