"""Starts the probe and reads what it found."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence

from rebuno_sync.cli.doctor.probe import Report
from rebuno_sync.cli.output import one_line

#: An app that takes longer to import than this many seconds is not looked at.
PATIENCE = 60.0
_SHOWN_CHARACTERS = 300


def read(arguments: Sequence[str], url: str | None) -> Report:
    """Load a gunicorn configuration and its app in a process of their own.

    Args:
        arguments: what would stand after ``gunicorn`` on its command line.
        url: what ``REBUNO_URL`` is to be there; what it is here by default.
    """
    environment = {**os.environ, **({"REBUNO_URL": url} if url else {})}
    with tempfile.TemporaryFile() as report, tempfile.TemporaryFile() as said:
        os.set_inheritable(report.fileno(), True)
        command = [sys.executable, "-m", "rebuno_sync.cli.doctor.probe", str(report.fileno())]
        process = subprocess.Popen(
            [*command, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=said,
            stderr=said,
            env=environment,
            pass_fds=(report.fileno(),),
        )
        try:
            code = process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            return Report("app", f"importing it did not end within {PATIENCE:g} s")
        finally:
            process.kill()
            process.wait()
        report.seek(0)
        text = report.read().decode("utf-8")
        said.seek(0)
        lines = said.read().decode("utf-8", "replace").strip().splitlines()
    if not text:
        return Report("app", _last(lines) or f"the process that imported it ended with {code}")
    found = Report.from_json(text)
    if found.failure == "configuration":
        return Report("configuration", _last(lines))
    return found


def _last(lines: Sequence[str]) -> str:
    """Return what the last lines say: the error, where it is a trace."""
    told = [line for line in lines if line.strip()]
    return one_line(told[-1])[-_SHOWN_CHARACTERS:] if told else ""
