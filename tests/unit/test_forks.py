"""What is renewed in a child, and what happens where there is no fork."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap

import pytest

from rebuno_sync.forks import after_fork


def run(script: str) -> None:
    subprocess.run([sys.executable, "-c", textwrap.dedent(script)], check=True, timeout=60)


def test_it_is_called_in_the_child_only() -> None:
    run("""
        import os
        from rebuno_sync.forks import after_fork
        called = []

        @after_fork
        def renew():
            called.append(os.getpid())

        child = os.fork()
        if child == 0:
            os._exit(0 if called == [os.getpid()] else 1)
        assert os.waitpid(child, 0)[1] == 0
        assert called == []
    """)


def test_a_system_without_fork(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "register_at_fork")

    def renew() -> None: ...

    assert after_fork(renew) is renew


def test_everything_imports_without_fork() -> None:
    """As on Windows, where the Werkzeug server of ``agent.run`` is for."""
    run("""
        import os
        del os.register_at_fork, os.fork
        import rebuno_sync
        import rebuno_sync.effects.llm, rebuno_sync.effects.llm_live
        agent = rebuno_sync.Agent("a", secret="s", base_url="http://127.0.0.1:1")
        assert agent.app.test_client().post("/webhook").status_code == 401
        assert agent.close(0)
    """)
