"""What uWSGI tells of its threads, and what an agent makes of it."""

from __future__ import annotations

import json
import sys
import types
from typing import Any

import pytest

from rebuno_sync import Agent, signing
from rebuno_sync.uwsgi import no_threads


def under_uwsgi(monkeypatch: pytest.MonkeyPatch, **options: Any) -> None:
    """Pretend to run in a uWSGI that was started with these options."""
    opt = {name.replace("_", "-"): value for name, value in options.items()}
    monkeypatch.setitem(sys.modules, "uwsgi", types.SimpleNamespace(opt=opt))


def test_every_other_server_has_threads() -> None:
    assert no_threads() == ""


@pytest.mark.parametrize("option", [{"enable_threads": True}, {"threads": b"2"}, {"gevent": b"9"}])
def test_options_that_give_threads(
    monkeypatch: pytest.MonkeyPatch, option: dict[str, object]
) -> None:
    under_uwsgi(monkeypatch, master=True, **option)
    assert no_threads() == ""


def test_without_threads_dispatches_are_refused_and_the_log_says_why(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    under_uwsgi(monkeypatch, master=True, processes=b"2")
    agent = Agent("a", secret="s", base_url="http://127.0.0.1:9")
    agent.bind(lambda: None)
    body = json.dumps({"execution_id": "e", "dispatch_id": "d"}).encode()
    status, text = agent.deliver(body, signing.sign_body("s", body))
    assert status == 503
    assert "give it --enable-threads" in text
    assert any("agent a was refused: this uWSGI" in r.getMessage() for r in caplog.records)
    assert agent.deliver(body, "sha256=wrong") == (401, ""), "strangers are told nothing"
