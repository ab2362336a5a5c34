"""A WSGI app under a real gunicorn for the length of a test."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
_PATIENCE = 30.0


@contextlib.contextmanager
def under_gunicorn(app: str, log: Path, *options: str, **environment: str) -> Iterator[str]:
    """Serve ``app``, such as ``package.module:app``; yields its base URL.

    Args:
        log: the file that takes what gunicorn and the app print.
        options: more of gunicorn's command line.
        environment: more of the processes' environment.
    """
    with socket.create_server(("127.0.0.1", 0)) as listener, log.open("wb") as output:
        # The port is taken here and handed over: nobody can come between, and connections wait.
        bound = ["--bind", f"fd://{listener.fileno()}"]
        process = subprocess.Popen(
            [sys.executable, "-m", "gunicorn", app, *bound, *options],
            cwd=ROOT,
            env={**os.environ, **environment},
            stdout=output,
            stderr=output,
            pass_fds=[listener.fileno()],
        )
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            process.terminate()
            try:
                process.wait(_PATIENCE)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
