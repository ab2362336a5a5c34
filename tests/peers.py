"""Virtual environments with the official SDK, made once and kept in ``.peers/``.

    python -m tests.peers            # make all of them
    python -m tests.peers 0.29.2     # make one

``REBUNO_PEERS`` names another directory to keep them in.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

#: The releases that the tests run against: the newest, and one that signs bodies only.
VERSIONS = ("0.29.2", "0.16.0")
_ROOT = Path(os.environ.get("REBUNO_PEERS") or Path(__file__).resolve().parent.parent / ".peers")
_NEEDS = (3, 11)


class PeerUnavailable(Exception):
    """The official SDK is not cached and could not be installed; the message says why."""


def peer_python(version: str) -> str:
    """Return a Python that has ``rebuno==version``, installing it on first use.

    Raises:
        PeerUnavailable: there is no cached one and none could be made.
    """
    home = _ROOT / version
    python = home / "bin" / "python"
    if not python.exists():
        _make(version, home)
    return str(python)


def _make(version: str, home: Path) -> None:
    _ROOT.mkdir(parents=True, exist_ok=True)
    # Made aside and moved when whole, so that an interrupted install is never taken for one.
    with tempfile.TemporaryDirectory(dir=_ROOT, prefix=f"{version}-") as scratch:
        made = Path(scratch) / "venv"
        _run([_interpreter(), "-m", "venv", str(made)], "no virtual environment")
        pip = [str(made / "bin" / "python"), "-m", "pip", "install", "--quiet"]
        options = ["--disable-pip-version-check", "--retries", "1", "--timeout", "20"]
        _run([*pip, *options, f"rebuno=={version}"], f"rebuno=={version} could not be installed")
        try:
            made.rename(home)
        except OSError:
            if not home.exists():
                raise


def _run(command: list[str], failure: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    if done.returncode != 0:
        raise PeerUnavailable(f"{failure}: {done.stderr.strip()[-500:]}")


def _interpreter() -> str:
    """A Python new enough for the official SDK."""
    if sys.version_info >= _NEEDS:
        return sys.executable
    for name in ("python3.13", "python3.12", "python3.11"):
        found = shutil.which(name)
        # A version manager's shim may stand for a Python that is not there.
        if (
            found
            and subprocess.run([found, "-V"], capture_output=True, check=False).returncode == 0
        ):
            return found
    raise PeerUnavailable("the official SDK needs Python 3.11 or newer, and there is none")


if __name__ == "__main__":
    for wanted in sys.argv[1:] or VERSIONS:
        print(f"rebuno=={wanted}: {peer_python(wanted)}")
