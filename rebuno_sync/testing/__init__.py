"""For the tests of those who write agents: a kernel in the test's own process.

Loaded by pytest through its entry point; see :mod:`rebuno_sync.testing.plugin`. Needs the extra
``kernel``.
"""

from .crashes import CrashRun, Diverged, crash_everywhere
from .history import History, ReplayMismatch, check_replay
from .in_process import TestKernel
from .runs import AgentRun, run_agent

__all__ = [
    "AgentRun",
    "CrashRun",
    "Diverged",
    "History",
    "ReplayMismatch",
    "TestKernel",
    "check_replay",
    "crash_everywhere",
    "run_agent",
]
