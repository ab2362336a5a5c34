"""An agent on the official SDK in a process of its own."""

from __future__ import annotations

import re
import subprocess
import threading
from pathlib import Path

from tests.scripted import wait_until

OFFICIAL = Path(__file__).parent / "official"


class OfficialAgent:
    """A script of ``official/``, run by a Python that has the official SDK.

    Args:
        python: that Python.
        script: the name of the script, which takes the kernel's URL and ``journal``.
        kernel_url: the kernel that the agent calls.
        journal: a directory for what the script leaves.
        arguments: what else the script takes.

    Attributes:
        webhook: where it takes its deliveries.
        lines: what it has printed.
    """

    def __init__(
        self, python: str, script: str, kernel_url: str, journal: Path, *arguments: str
    ) -> None:
        self.process = subprocess.Popen(
            [python, str(OFFICIAL / script), kernel_url, str(journal), *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.lines: list[str] = []
        self._reader = threading.Thread(target=self._read)
        self._reader.start()
        try:
            url = wait_until(self._url, timeout=60, what="the official agent did not start")
        except BaseException:
            self.kill()
            raise
        self.webhook = f"{url}/webhook"

    def _read(self) -> None:
        assert self.process.stdout is not None
        self.lines.extend(self.process.stdout)

    def _url(self) -> str:
        assert self.process.poll() is None, "".join(self.lines)
        found = re.search(r"running on (http://127\.0\.0\.1:\d+)", "".join(self.lines))
        return found[1] if found else ""

    def kill(self) -> None:
        """End it at once, as a power cut would."""
        self.process.kill()
        self._wait()

    def stop(self) -> None:
        """End it as a deploy would."""
        self.process.terminate()
        try:
            self._wait()
        except subprocess.TimeoutExpired:
            self.kill()

    def _wait(self) -> None:
        self.process.wait(30)
        self._reader.join()
        assert self.process.stdout is not None
        self.process.stdout.close()
