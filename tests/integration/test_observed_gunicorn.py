"""Metrics and logs of several gunicorn workers, set up as the page on observability says."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import requests
from prometheus_client.parser import text_string_to_metric_families

from rebuno_sync import Client
from rebuno_sync.kernel import EmbeddedKernel
from tests.documentation.pages import ROOT, blocks
from tests.documentation.run_page import file_name
from tests.scripted import wait_until

COMMAND = (sys.executable, "-m", "gunicorn", "waiting:app", "--access-logfile", "-")
SECRET = "a-secret-for-the-pages"
#: The app of the page, with a handler that waits for a file when it is told to.
WAITING = """
import os, time
from pathlib import Path
from shop import agent, app, log, reserve

@agent.handler
def sell(item: str) -> str:
    if item == "rare":
        log.info("waiting in %d", os.getpid())
        while not Path("go").exists():
            time.sleep(0.01)
    return reserve(item)
"""


@dataclass
class Shop:
    """A gunicorn of two workers, and what it says of itself."""

    client: Client
    url: str
    folder: Path

    @property
    def log(self) -> str:
        return (self.folder / "log").read_text()

    def metric(self, name: str, **labels: str) -> float:
        """The sum of a metric over the series that have these labels."""
        # A connection of its own: either worker may take it.
        answer = requests.get(f"{self.url}/metrics", headers={"Connection": "close"}, timeout=30)
        assert answer.status_code == 200, answer.text
        return sum(
            sample.value
            for family in text_string_to_metric_families(answer.text)
            for sample in family.samples
            if sample.name == f"rebuno_agent_{name}" and labels.items() <= sample.labels.items()
        )


@contextlib.contextmanager
def shop_in(folder: Path, *options: str) -> Iterator[Shop]:
    for block in blocks(ROOT / "docs" / "observability.md"):
        if block.language == "python" and (name := file_name(block)):
            (folder / name).write_text(block.text)
    (folder / "waiting.py").write_text(WAITING)
    with (
        EmbeddedKernel() as kernel,
        Client(kernel.url) as client,
        socket.create_server(("127.0.0.1", 0)) as listener,
        (folder / "log").open("ab") as log,
    ):
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        client.register_agent("seller", f"{url}/webhook", SECRET, lease_timeout_seconds=60)
        environment = {k: v for k, v in os.environ.items() if k != "PROMETHEUS_MULTIPROC_DIR"}
        master = subprocess.Popen(
            [*COMMAND, "--bind", f"fd://{listener.fileno()}", *options],
            cwd=folder,
            env={
                **environment,
                "PYTHONPATH": str(ROOT),
                "REBUNO_URL": kernel.url,
                "REBUNO_AGENT_SECRET": SECRET,
                "TMPDIR": str(folder),
            },
            stdout=log,
            stderr=log,
            pass_fds=[listener.fileno()],
        )
        try:
            yield Shop(client, url, folder)
        finally:
            (folder / "go").touch()
            master.terminate()
            try:
                master.wait(60)
            except subprocess.TimeoutExpired:
                master.kill()
                master.wait()


@pytest.mark.parametrize("options", [(), ("--preload",)], ids=["plain", "preload"])
def test_the_workers_are_one_in_metrics_and_logs(tmp_path: Path, options: tuple[str, ...]) -> None:
    with shop_in(tmp_path, *options) as shop:
        sold = [shop.client.create("seller", {"item": "lamp"}).id for _ in range(12)]
        for execution_id in sold:
            assert shop.client.wait(execution_id, 60).output == "reserved"
        # Whichever worker answers, it shows what all have done.
        wait_until(lambda: shop.metric("dispatch_seconds_count", outcome="completed") == 12)
        assert shop.metric("deliveries_total", outcome="taken") == 12
        assert shop.metric("steps_total", kind="tool_call", decision="proceed") == 12

        rare = shop.client.create("seller", {"item": "rare"}).id
        worker = int(wait_until(lambda: re.search(r"waiting in (\d+)", shop.log))[1])
        assert shop.metric("handlers_running") == 1
        os.kill(worker, signal.SIGKILL)
        # Its gauges go with it, its counters stay.
        wait_until(lambda: shop.metric("handlers_running") == 0)
        assert shop.metric("deliveries_total", outcome="taken") == 13

        for execution_id in sold:
            (step,) = shop.client.steps(execution_id)
            line = rf"INFO \d+ shop \[{execution_id}/1 {step.step_id}\] reserving lamp"
            assert len(re.findall(line, shop.log)) == 1
        assert re.search(rf"INFO {worker} shop \[{rare}/1 -\] waiting in {worker}", shop.log)
        assert re.search(r"INFO \d+ gunicorn.access \[-/- -\] .*POST /webhook", shop.log)
        assert SECRET not in shop.log
    assert "Traceback" not in shop.log
    assert list(tmp_path.glob("shop-metrics-*")) == []
