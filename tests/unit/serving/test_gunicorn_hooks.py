"""The gunicorn hooks, in a process of their own: they change what belongs to the process."""

from __future__ import annotations

import subprocess
import sys

import pytest

PRELUDE = """
import json, os, signal, threading, types
from rebuno_sync import Agent
from rebuno_sync.serving import gunicorn_hooks as hooks
from rebuno_sync.signing import sign_body

agent = Agent("a", secret="s", base_url="http://127.0.0.1:9", shutdown_timeout=WAITS)
agent.bind(lambda: None)
worker = types.SimpleNamespace(cfg=types.SimpleNamespace(timeout=TIMEOUT), pid=1)

def deliver(number=[0]):
    number[0] += 1
    body = json.dumps({"execution_id": "e", "dispatch_id": str(number[0])}).encode()
    return agent.deliver(body, sign_body("s", body))[0]
"""


def run(script: str, timeout: float = 30.0, waits: float = 0.0) -> str:
    code = PRELUDE.replace("TIMEOUT", str(timeout)).replace("WAITS", str(waits)) + script
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_sigterm_ends_the_taking_of_dispatches_and_reaches_gunicorn_too() -> None:
    told = run(
        """
signal.signal(signal.SIGTERM, lambda *_: print("gunicorn's handler"))
hooks.post_worker_init(worker)
print(deliver())
os.kill(os.getpid(), signal.SIGTERM)
print(deliver())
"""
    )
    assert told.splitlines() == ["202", "gunicorn's handler", "503"]


@pytest.mark.parametrize("hook", ["worker_int", "worker_abort"])
def test_the_other_signals_end_it_as_well(hook: str) -> None:
    assert run(f"hooks.{hook}(worker)\nprint(deliver())") == "503\n"


def test_the_exit_of_a_worker_waits_no_longer_than_gunicorn_does() -> None:
    """The handler never ends, the agent would wait 30 seconds, gunicorn kills after 3."""
    told = run(
        """
def forever(run):
    started.set()
    threading.Event().wait()

started = threading.Event()
agent._run_dispatch = forever
deliver()
started.wait()
hooks.worker_exit(None, worker)
print("gone", flush=True)
os._exit(0)
""",
        timeout=3.0,
        waits=30.0,
    )
    assert told == "gone\n"


def test_a_star_import_brings_the_hooks_and_nothing_else() -> None:
    told = run(
        """
before = set(globals()) | {"before"}
from rebuno_sync.serving.gunicorn_hooks import *
print(sorted(set(globals()) - before))
"""
    )
    assert told == (
        "['child_exit', 'post_worker_init', 'worker_abort', 'worker_exit', 'worker_int']\n"
    )
