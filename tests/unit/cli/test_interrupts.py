"""Ctrl-C is heard even when the first one is lost."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

SCRIPT = """
import os, signal, time
from rebuno_sync.cli.interrupts import insistent

class Loses:
    def __del__(self):  # what is raised here is dropped by Python
        os.kill(os.getpid(), signal.SIGINT)

lost = Loses()
try:
    with insistent():
        del lost
        print("lost", flush=True)
        time.sleep(60)
except KeyboardInterrupt:
    print("heard", flush=True)
print(signal.getsignal(signal.SIGINT) is signal.default_int_handler)
print(signal.getitimer(signal.ITIMER_REAL))
"""


@pytest.mark.skipif(not hasattr(signal, "SIGALRM"), reason="there are no alarms here")
def test_an_interrupt_that_was_dropped_comes_again() -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.stdout.splitlines() == ["lost", "heard", "True", "(0.0, 0.0)"]
    assert "Exception ignored" in done.stderr


def test_a_process_that_ignores_interrupts_is_left_alone() -> None:
    script = (
        "import signal\n"
        "from rebuno_sync.cli.interrupts import insistent\n"
        "signal.signal(signal.SIGINT, signal.SIG_IGN)\n"
        "with insistent():\n"
        "    print(signal.getsignal(signal.SIGINT) is signal.SIG_IGN)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.stdout == "True\n", done.stderr
