"""``flask run --debug``: one set of threads, and a file that changes while an execution runs."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import requests

from rebuno_sync import Client
from rebuno_sync.kernel import EmbeddedKernel
from tests.documentation.pages import ROOT
from tests.scripted import wait_until

SECRET = "orchard-secret"
TASKS = Path("/proc/self/task")
LOST = "the reloader's own process has threads beside its first"


def effects(journal: Path) -> list[list[str]]:
    file = journal / "effects"
    return [row.split() for row in file.read_text().splitlines()] if file.exists() else []


def address(log: Path) -> str:
    """Where the server listens, once it does."""
    found = re.search(r"Running on (http://[\d.:]+)", log.read_text())
    return found[1] if found else ""


@pytest.mark.skipif(not TASKS.exists(), reason="reads /proc to count the threads of a process")
def test_one_set_of_threads_and_one_run_of_an_execution(tmp_path: Path) -> None:
    app = tmp_path / "reloading.py"
    shutil.copy(ROOT / "tests" / "integration" / "hosts" / "reloading.py", app)
    environment = {
        "REBUNO_AGENT_SECRET": SECRET,
        "JOURNAL": str(tmp_path),
        "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path]),
    }
    with (
        EmbeddedKernel() as kernel,
        Client(kernel.url) as client,
        (tmp_path / "log").open("wb") as log,
        requests.Session() as session,
    ):
        process = subprocess.Popen(
            [
                *(sys.executable, "-m", "flask", "--app", "reloading:create_app", "run"),
                *("--debug", "--port", "0"),
            ],
            cwd=tmp_path,
            env={**os.environ, **environment, "REBUNO_URL": kernel.url},
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
        try:
            url = wait_until(lambda: address(tmp_path / "log"))
            for agent_id in ("one", "two"):
                client.register_agent(agent_id, f"{url}/agents/{agent_id}/webhook", SECRET)

            def threads() -> dict[str, Any]:
                answer: dict[str, Any] = session.get(f"{url}/threads", timeout=60).json()
                return answer

            before = threads()
            assert before["threads"] == [], "an agent starts nothing before its first dispatch"
            ids = [client.create(agent_id, {}).id for agent_id in ("one", "two")]
            for execution_id in ids:
                found = client.wait(execution_id, timeout=60)
                assert (found.status, found.output) == ("completed", ["first", "second"])
            now = threads()
            assert now["pid"] == before["pid"]
            assert (
                {"rebuno-one-1", "rebuno-two-1"}
                <= set(now["threads"])
                <= {
                    *("rebuno-one-1", "rebuno-two-1"),
                    *("rebuno-heartbeat-one", "rebuno-heartbeat-two"),
                }
            )
            assert now["parent"] == process.pid
            assert len(os.listdir(f"/proc/{process.pid}/task")) == 1, LOST

            running = client.create("one", {"waits": True}).id
            wait_until(lambda: ["first", running, str(now["pid"])] in effects(tmp_path))
            app.write_text(app.read_text() + "\n# changed\n")
            wait_until(lambda: "Detected change" in (tmp_path / "log").read_text())
            (tmp_path / "go").touch()
            assert client.wait(running, timeout=60).output == ["first", "second"]
            wait_until(lambda: threads()["pid"] != now["pid"], what="it was not started again")

            last = client.create("two", {}).id
            assert client.wait(last, timeout=60).status == "completed"
            told = effects(tmp_path)
            for execution_id in (*ids, running, last):
                assert [w for w, e, _ in told if e == execution_id] == ["first", "second"]
            where = {process for _, execution_id, process in told if execution_id == running}
            assert where == {str(now["pid"])}, "the process that is to end lets it end"
        finally:
            # The reloader leaves the process that serves behind when it is told to go.
            os.killpg(process.pid, signal.SIGTERM)
            process.wait(60)
