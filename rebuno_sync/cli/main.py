"""The entry point of ``rebuno-sync``."""

from __future__ import annotations

import sys
from typing import NoReturn


def main() -> NoReturn:
    """Run the command line with ``sys.argv`` and exit with one of the codes of :mod:`.session`."""
    try:
        from rebuno_sync.cli.root import root
    except ModuleNotFoundError as exc:
        if exc.name is None or exc.name.partition(".")[0] == "rebuno_sync":
            raise
        sys.stderr.write(
            f"Error: the command line needs {exc.name}, which is not installed; "
            "run: pip install 'rebuno-sync[kernel]'\n"
        )
        sys.exit(2)
    root(prog_name="rebuno-sync")
    raise AssertionError("click exits by itself")
