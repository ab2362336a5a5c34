"""A real uWSGI with the configuration of docs/serving.md, stopped while an execution runs."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import pytest

from rebuno_sync import Client
from rebuno_sync.kernel import EmbeddedKernel
from tests.documentation.pages import ROOT, blocks
from tests.faults.sides import AGENT, SECRET
from tests.scripted import wait_until

UWSGI = Path(sysconfig.get_path("scripts")) / "uwsgi"
pytestmark = pytest.mark.skipif(
    not UWSGI.exists(),
    reason="uWSGI IS NOT TESTED, since it is not here: pip install pyuwsgi",
)


@contextlib.contextmanager
def under_uwsgi(
    kernel: EmbeddedKernel, journal: Path, ini: str
) -> Iterator[subprocess.Popen[bytes]]:
    """Serve the agent of ten steps, and register it."""
    file = journal / "uwsgi.ini"
    file.write_text(ini, encoding="utf-8")
    environment = {"REBUNO_URL": kernel.url, "REBUNO_AGENT_SECRET": SECRET, "JOURNAL": str(journal)}
    with socket.create_server(("127.0.0.1", 0)) as listener, (journal / "log").open("wb") as log:
        webhook = f"http://127.0.0.1:{listener.getsockname()[1]}/webhook"
        with Client(kernel.url) as client:
            client.register_agent(AGENT, webhook, SECRET)
        process = subprocess.Popen(
            [
                *(str(UWSGI), "--ini", str(file), "--module", "tests.faults.matrix_app:app"),
                *("--http-socket", f"fd://{listener.fileno()}"),
            ],
            cwd=ROOT,
            env={**os.environ, **environment},
            stdout=log,
            stderr=log,
            pass_fds=[listener.fileno()],
        )
        try:
            yield process
        finally:
            (journal / "go").touch()
            process.terminate()
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def page() -> str:
    (block,) = (b for b in blocks(ROOT / "docs" / "serving.md") if b.language == "ini")
    return block.text


def test_an_execution_ends_in_the_worker_that_is_told_to_go(tmp_path: Path) -> None:
    journal = tmp_path / "effects"
    with (
        EmbeddedKernel() as kernel,
        Client(kernel.url) as client,
        under_uwsgi(kernel, tmp_path, page()) as process,
    ):
        created = client.create(AGENT, {"how": "go"})
        wait_until(lambda: journal.exists() and "waiting" in journal.read_text())
        process.terminate()
        wait_until(lambda: "killing workers" in (tmp_path / "log").read_text())
        (tmp_path / "go").touch()
        found = client.wait(created.id, timeout=60)
        assert (found.status, found.output) == ("completed", list(range(1, 11)))
        assert process.wait(60) == 0
        rows = [row.split() for row in journal.read_text().splitlines()]
    effects = [what for what, _, _ in rows if what != "waiting"]
    assert effects == [f"effect-{n}" for n in range(1, 11)]
    assert len({(attempt, process) for _, attempt, process in rows}) == 1


def test_without_threads_the_kernel_is_told_why_nothing_begins(tmp_path: Path) -> None:
    ini = "".join(line for line in page().splitlines(keepends=True) if "threads" not in line)
    ini = ini.replace("mercy = 30", "mercy = 1")  # uWSGI itself ends slowly then
    with (
        EmbeddedKernel() as kernel,
        Client(kernel.url) as client,
        under_uwsgi(kernel, tmp_path, ini),
    ):
        created = client.create(AGENT, {})
        wait_until(lambda: "runs no threads" in (tmp_path / "log").read_text())
        wait_until(lambda: any(e.type == "dispatch.failed" for e in client.events(created.id)))
        client.cancel(created.id)
