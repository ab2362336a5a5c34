"""The public ``Agent`` and its ways in."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
from flask import Blueprint, Flask

from rebuno_sync import Agent
from rebuno_sync.agent import AgentCore
from rebuno_sync.serving import server as server_module

URL = "http://127.0.0.1:1"


def test_the_ways_in() -> None:
    agent = Agent("a1", secret="s", base_url=URL)
    assert isinstance(agent.blueprint, Blueprint)
    assert isinstance(agent.app, Flask)
    assert agent.app is agent.app
    assert agent.blueprint is agent.blueprint
    assert [r.rule for r in agent.app.url_map.iter_rules()] == ["/webhook"]


def test_its_documentation() -> None:
    doc = inspect.getdoc(Agent) or ""
    for parameter in inspect.signature(Agent).parameters:
        assert f"{parameter}: " in doc
    assert inspect.signature(Agent) == inspect.signature(AgentCore)


def test_run_needs_a_handler() -> None:
    agent = Agent("a1", secret="s", base_url=URL)
    with pytest.raises(RuntimeError, match=r"no handler: pass one to run\(\) or use agent\.bind"):
        agent.run()


def test_what_run_asks_of_gunicorn(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[dict[str, Any]] = []
    monkeypatch.setattr(
        server_module, "serve", lambda app, **settings: told.append({"app": app, **settings})
    )
    agent = Agent("a1", secret="s", base_url=URL, shutdown_timeout=7.0)
    agent.run(lambda: "bound", host="::1", port=1234, workers=3, threads=4)
    assert told == [
        {
            "app": agent.app,
            "host": "::1",
            "port": 1234,
            "workers": 3,
            "threads": 4,
            "shutdown_timeout": 7.0,
        }
    ]
    assert agent._binder is not None
