"""The conformance suite: its page names every row, and it runs against a kernel elsewhere."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from pathlib import Path

from tests.conformance import rows
from tests.integration.terminal import COMMAND, environment

ROOT = Path(__file__).resolve().parents[2]
#: Modules whose tests wait for no lease, and those of other modules that cannot run elsewhere.
QUICK = ["test_decisions.py", "test_creation.py", "test_operator_routes.py", "test_cancelling.py"]
TOKEN = "conformance-token"


def test_the_page_of_rows_is_that_of_the_suite() -> None:
    assert rows.PAGE.read_text("utf-8") == rows.page(), (
        "write it again: python -m tests.conformance.rows > docs/conformance.md"
    )


def test_rows_that_need_the_embedded_kernel_are_told_apart() -> None:
    inside = {name: only for found in rows.tests().values() for name, _, only in found}
    assert inside["test_a_dispatch_of_a_terminal_execution_is_discarded"]
    assert inside["test_body_signature_is_refused_when_so_started"]
    assert not inside["test_a_webhook_has_30_seconds"]


def test_against_a_kernel_of_another_process(tmp_path: Path) -> None:
    kernel = subprocess.Popen(
        [*COMMAND, "dev", "--listen", "127.0.0.1:0", "--bearer-token-env", "TOKEN", "--quiet"],
        env=environment(TOKEN=TOKEN),
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert kernel.stdout is not None
        url = re.search(r"http://[\d.]+:\d+", kernel.stdout.readline())
        assert url is not None
        suite = [f"tests/conformance/{name}" for name in QUICK]
        one_inside = "tests/conformance/test_faults.py::test_2_awaiting_approval"
        done = subprocess.run(
            [
                *(sys.executable, "-m", "pytest", "-q", "-ra", "-p", "no:cacheprovider"),
                *("--kernel-url", url[0], "--kernel-token", TOKEN, *suite, one_inside),
            ],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        passed = re.search(r"(\d+) passed", done.stdout)
        assert passed is not None
        assert int(passed[1]) > 60
        assert "needs a kernel whose database can be reached" in done.stdout
    finally:
        kernel.send_signal(signal.SIGINT)
        try:
            kernel.communicate(timeout=60)
        finally:
            kernel.kill()
    # It was that kernel which was asked, and it is left as it was found.
    assert kernel.returncode == 0
