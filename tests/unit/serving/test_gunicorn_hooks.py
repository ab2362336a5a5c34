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
settings = types.SimpleNamespace(timeout=TIMEOUT, graceful_timeout=GRACEFUL)
worker = types.SimpleNamespace(cfg=settings, pid=1, alive=True)

def deliver(number=[0]):
    number[0] += 1
    body = json.dumps({"execution_id": "e", "dispatch_id": str(number[0])}).encode()
    return agent.deliver(body, sign_body("s", body))[0]
"""


def run(
    script: str, timeout: float = 30.0, waits: float = 0.0, graceful_timeout: float = 30.0
) -> str:
    settings = {"TIMEOUT": timeout, "WAITS": waits, "GRACEFUL": graceful_timeout}
    code = PRELUDE
    for name, value in settings.items():
        code = code.replace(name, str(value))
    code += script
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


def test_a_worker_that_has_had_its_requests_takes_no_more_dispatches() -> None:
    told = run(
        """
hooks.pre_request(worker, None)
print(deliver())
worker.alive = False
hooks.pre_request(worker, None)
print(deliver())
"""
    )
    assert told.splitlines() == ["202", "503"]


FOREVER = """
def forever(run):
    started.set()
    threading.Event().wait()

started = threading.Event()
agent._run_dispatch = forever
deliver()
started.wait()
FIRST
hooks.worker_exit(None, worker)
print("gone", flush=True)
os._exit(0)
"""


@pytest.mark.parametrize(
    ("first", "timeout", "graceful_timeout"),
    [
        pytest.param("", 3.0, 1e6, id="timeout"),
        pytest.param("hooks.worker_int(worker)", 0, 1.0, id="graceful-timeout"),
        pytest.param("hooks.worker_abort(worker)", 1e6, 1e6, id="killed-at-once"),
    ],
)
def test_the_exit_of_a_worker_waits_no_longer_than_gunicorn_does(
    first: str, timeout: float, graceful_timeout: float
) -> None:
    """The handler never ends, and the agent would wait for it longer than this test does."""
    told = run(
        FOREVER.replace("FIRST", first),
        timeout=timeout,
        waits=1e6,
        graceful_timeout=graceful_timeout,
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
    hooks = ("post_worker_init", "pre_request", "worker_abort", "worker_exit", "worker_int")
    assert told == f"{['child_exit', *hooks]}\n"
