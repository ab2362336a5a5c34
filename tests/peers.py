"""Virtual environments with other releases than ours, made once and kept in ``.peers/``.

    python -m tests.peers            # make all of them
    python -m tests.peers 0.29.2     # make one, with that release of the official SDK
    python -m tests.peers httpx      # make the one with the provider libraries on httpx

``REBUNO_PEERS`` names another directory to keep them in.
"""

from __future__ import annotations

import configparser
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

#: The releases that the tests run against: the newest, and one that signs bodies only.
VERSIONS = ("0.29.2", "0.16.0")
#: The last releases of the provider libraries that are built on httpx, not on httpx2.
PROVIDERS_ON_HTTPX = ("openai==2.54.0", "anthropic==0.125.0")
#: What our tests need beside them, and beside our own package.
_TO_TEST = ("pytest", "hypothesis")
_TREE = Path(__file__).resolve().parent.parent
_ROOT = Path(os.environ.get("REBUNO_PEERS") or _TREE / ".peers")
_NEEDS = (3, 11)


class PeerUnavailable(Exception):
    """The environment is not cached and could not be made; the message says why."""


def peer_python(version: str) -> str:
    """Return a Python that has ``rebuno==version``, installing it on first use.

    Raises:
        PeerUnavailable: there is no cached one and none could be made.
    """
    return _python(version, [f"rebuno=={version}"], _interpreter)


def httpx_python() -> str:
    """Return a Python that has the provider libraries on httpx, and what our tests need.

    Raises:
        PeerUnavailable: there is no cached one and none could be made.
    """
    wanted = [*PROVIDERS_ON_HTTPX, *_our_requirements(), *_TO_TEST]
    # Made anew when one of them changes.
    digest = hashlib.sha256(" ".join(wanted).encode()).hexdigest()[:8]
    return _python(f"httpx-{digest}", wanted, lambda: sys.executable)


def _our_requirements() -> list[str]:
    """What our package with its kernel needs; it runs from the tree, so it is not installed."""
    config = configparser.ConfigParser()
    config.read(_TREE / "setup.cfg", encoding="utf-8")
    lines = config["options"]["install_requires"] + config["options.extras_require"]["kernel"]
    return lines.split("\n")[1:]


def _python(name: str, wanted: list[str], interpreter: Callable[[], str]) -> str:
    home = _ROOT / name
    python = home / "bin" / "python"
    if not python.exists():
        _make(home, wanted, interpreter())
    return str(python)


def _make(home: Path, wanted: list[str], interpreter: str) -> None:
    _ROOT.mkdir(parents=True, exist_ok=True)
    # Made aside and moved when whole, so that an interrupted install is never taken for one.
    with tempfile.TemporaryDirectory(dir=_ROOT, prefix=f"{home.name}-") as scratch:
        made = Path(scratch) / "venv"
        _run([interpreter, "-m", "venv", str(made)], "no virtual environment")
        pip = [str(made / "bin" / "python"), "-m", "pip", "install", "--quiet"]
        options = ["--disable-pip-version-check", "--retries", "1", "--timeout", "20"]
        _run([*pip, *options, *wanted], f"{wanted[0]} could not be installed")
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
    for wanted in sys.argv[1:] or (*VERSIONS, "httpx"):
        made = httpx_python() if wanted == "httpx" else peer_python(wanted)
        print(f"{wanted}: {made}")
