"""Commands in processes of their own, with pipes or with a terminal."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import select
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
COMMAND = (sys.executable, "-m", "rebuno_sync.cli")
_PATIENCE = 60.0


def environment(**more: str) -> dict[str, str]:
    """What a command finds in its environment: nothing of this process's own settings."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("REBUNO_", "GUNICORN_"))
        and name not in ("NO_COLOR", "COLUMNS", "LINES", "TERM", "FORCE_COLOR")
    }
    return {**kept, "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "error", **more}


class Process:
    """A command that runs; what it writes is collected by :meth:`read_until`."""

    def __init__(self, process: subprocess.Popen[bytes], output: int) -> None:
        self.process = process
        self.text = ""
        self._output = output

    def read_until(self, wanted: str) -> str:
        """Read until ``wanted`` has been written, and return all that has been.

        Raises:
            AssertionError: it ended, or a minute passed, without that.
        """
        deadline = time.monotonic() + _PATIENCE
        while wanted not in self.text:
            left = deadline - time.monotonic()
            assert left > 0, f"{wanted!r} did not come; so far: {self.text}"
            if not self._read(left):
                assert wanted in self.text, f"it ended without {wanted!r}: {self.text}"
        return self.text

    def write(self, text: str) -> None:
        """Type something on its terminal."""
        os.write(self._output, text.encode("utf-8"))

    def wait(self) -> int:
        """Read to the end and return the exit code."""
        deadline = time.monotonic() + _PATIENCE
        while self._read(max(deadline - time.monotonic(), 0.0)):
            assert time.monotonic() < deadline, f"it does not end; so far: {self.text}"
        return self.process.wait(_PATIENCE)

    def _read(self, timeout: float) -> bool:
        ready, _, _ = select.select([self._output], [], [], timeout)
        if not ready:
            return True
        try:
            data = os.read(self._output, 65536)
        except OSError:  # how a terminal tells its end
            return False
        self.text += data.decode("utf-8", "replace")
        return bool(data)


@contextlib.contextmanager
def running_command(
    *arguments: str, env: Mapping[str, str], **settings: object
) -> Iterator[Process]:
    """Run the command line with a pipe for what it writes; it is killed at the end if need be."""
    process = subprocess.Popen(
        [*COMMAND, *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=dict(env),
    )
    assert process.stdout is not None
    with process.stdout:
        try:
            yield Process(process, process.stdout.fileno())
        finally:
            process.kill()
            process.wait()


@contextlib.contextmanager
def on_a_terminal(*arguments: str, env: Mapping[str, str], columns: int = 100) -> Iterator[Process]:
    """Run the command line on a terminal of its own."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
    try:
        process = subprocess.Popen(
            [*COMMAND, *arguments],
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            env={"TERM": "xterm-256color", **env},
            start_new_session=True,
        )
    finally:
        os.close(theirs)
    try:
        yield Process(process, ours)
    finally:
        process.kill()
        process.wait()
        os.close(ours)
