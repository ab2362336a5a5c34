"""The container file and the composition of docs/deploying.md, as far as no container engine goes.

What the file copies and runs is copied and run, in a directory instead of an image.
"""

from __future__ import annotations

import json
import os
import re
import runpy
import shutil
import signal
import socket
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import requests
import yaml
from packaging.requirements import Requirement

from rebuno_sync import Client
from rebuno_sync.kernel import EmbeddedKernel
from tests.documentation.pages import ROOT
from tests.integration.deployed import FILES, SECRET, Payments
from tests.scripted import served

PAGE = ROOT / "docs" / "deploying.md"
#: The settings that the Rebuno project documents for ``rebuno server`` on its deployment page.
DOCUMENTED = {
    *("REBUNO_LISTEN_ADDR", "REBUNO_DB_URL", "REBUNO_BEARER_TOKEN"),
    *("REBUNO_DB_MAX_CONNS", "REBUNO_DB_MIN_CONNS", "REBUNO_LOG_LEVEL", "REBUNO_LOG_FORMAT"),
    *("REBUNO_OTEL_ENDPOINT", "REBUNO_OTEL_SAMPLE_RATE", "REBUNO_OTEL_INSECURE"),
    *("REBUNO_DISPATCH_MAX_ATTEMPTS", "REBUNO_DISPATCH_TIMEOUT", "REBUNO_DISPATCH_CONCURRENCY"),
    *("REBUNO_DISPATCH_LEASE_TIMEOUT", "REBUNO_DEADLINE_TIMEOUT"),
    *("REBUNO_DEADLINE_CHECK_INTERVAL", "REBUNO_APPROVAL_TIMEOUT", "REBUNO_CLEANUP_INTERVAL"),
    *("REBUNO_RETENTION", "REBUNO_LEADER_LOCK_KEY"),
}
#: Those of an agent, an operator, and the composition itself.
OURS = {
    *("REBUNO_URL", "REBUNO_API_KEY", "REBUNO_AGENT_SECRET", "REBUNO_AGENT_SECRET_FILE"),
    *("REBUNO_CLAIMS_DIR", "REBUNO_VERSION"),
}


def test_the_page_invents_no_settings() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert set(re.findall(r"\bREBUNO_[A-Z_]+\b", text)) <= DOCUMENTED | OURS
    assert set(composition()["services"]["kernel"]["environment"]) <= DOCUMENTED


def test_each_time_to_end_is_longer_than_those_within_it() -> None:
    settings = runpy.run_path(str(FILES / "gunicorn.conf.py"))
    agent = re.search(r"shutdown_timeout=(\d+)", (FILES / "fulfilment.py").read_text())
    unit = re.search(r"^TimeoutStopSec=(\d+)$", (FILES / "shop.service").read_text(), re.MULTILINE)
    assert agent
    assert unit
    grace = int(composition()["services"]["shop"]["stop_grace_period"].removesuffix("s"))
    assert int(agent[1]) < settings["graceful_timeout"] < min(int(unit[1]), grace)
    assert int(agent[1]) + 3 < settings["timeout"]  # what the hooks keep for gunicorn
    assert "worker_exit" in settings
    assert "post_worker_init" in settings
    assert not settings.get("preload_app")  # or a reload would bring no new code


def composition() -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((FILES / "compose.yaml").read_text(encoding="utf-8"))
    return found


def test_the_composition_gives_each_service_what_it_needs() -> None:
    found = composition()
    services = found["services"]
    named = set(re.findall(r"^(\w+)=", (FILES / "shop.env").read_text(), re.MULTILINE))
    assert set(services["shop"]["environment"]) == named
    (secret,) = services["shop"]["secrets"]
    assert secret in found["secrets"]
    assert services["shop"]["environment"]["REBUNO_AGENT_SECRET_FILE"] == f"/run/secrets/{secret}"
    volumes = {
        volume.partition(":")[0]
        for service in services.values()
        for volume in service.get("volumes", [])
    }
    assert volumes == set(found["volumes"])
    for service in services.values():
        for needed in service.get("depends_on", {}):
            assert "healthcheck" in services[needed]
        assert service["restart"] == "unless-stopped"


def container() -> list[tuple[str, str]]:
    """The instructions of the container file."""
    text = (FILES / "Containerfile").read_text(encoding="utf-8").replace("\\\n", " ")
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    return [(line.partition(" ")[0], line.partition(" ")[2].strip()) for line in lines]


def test_what_the_container_file_puts_in_is_there() -> None:
    instructions = container()
    done = dict(instructions)
    base = re.search(r"python:(3\.\d+)-slim$", done["FROM"])
    assert base
    supported = (ROOT / "setup.cfg").read_text(encoding="utf-8")
    assert f"Programming Language :: Python :: {base[1]}\n" in supported
    for line in (FILES / "requirements.txt").read_text(encoding="utf-8").splitlines()[1:]:
        needed = Requirement(line)
        assert needed.specifier.contains(metadata.version(needed.name), prereleases=True)
    names = [name for name, _ in instructions]
    assert names.index("USER") < names.index("CMD")
    assert int(done["USER"]) > 0
    assert f"--uid {done['USER']} " in next(text for name, text in instructions if name == "RUN")
    assert done["STOPSIGNAL"] == "SIGTERM"
    for name, text in instructions:
        if name == "RUN":
            subprocess.run(["sh", "-n", "-c", text], check=True, timeout=30)


def test_what_the_container_runs_serves_is_healthy_and_stops(tmp_path: Path) -> None:
    done = dict(container())
    copied = [word for name, text in container() if name == "COPY" for word in text.split()[:-1]]
    for file in copied:
        shutil.copy(FILES / file, tmp_path)
    (tmp_path / "agent-secret").write_text(SECRET, encoding="utf-8")
    payments = Payments()
    with (
        EmbeddedKernel() as kernel,
        Client(kernel.url) as client,
        served(payments.app) as payments_url,
        socket.create_server(("127.0.0.1", 0)) as listener,
    ):
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        command = json.loads(done["CMD"])
        assert command[-2:] == ["--bind", "0.0.0.0:8000"]
        check = json.loads(done["HEALTHCHECK"].partition("CMD ")[2])
        check = [sys.executable, *(word.replace("127.0.0.1:8000", address) for word in check[1:])]
        environment = {
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT),
            "TMPDIR": str(tmp_path),
            "REBUNO_URL": kernel.url,
            "REBUNO_API_KEY": "",
            "REBUNO_AGENT_SECRET_FILE": str(tmp_path / "agent-secret"),
            "SHOP_DATABASE": str(tmp_path / "orders"),
            "PAYMENTS_URL": payments_url,
        }
        assert set(composition()["services"]["shop"]["environment"]) < set(environment)
        with (tmp_path / "log").open("wb") as log:
            process = subprocess.Popen(
                [*command[:-1], f"fd://{listener.fileno()}"],
                cwd=tmp_path,
                env=environment,
                stdout=log,
                stderr=log,
                pass_fds=[listener.fileno()],
            )
        try:
            subprocess.run(check, check=True, timeout=60)
            client.register_agent("shop", f"http://{address}/agents/shop/webhook", SECRET)
            answer = requests.post(f"http://{address}/orders", json={"tea": 1}, timeout=60)
            assert answer.status_code == 202, (tmp_path / "log").read_text()
            (made,) = client.list(agent_id="shop")
            assert client.wait(made.id, timeout=60).status == "completed"
            process.send_signal(signal.Signals[done["STOPSIGNAL"]])
            assert process.wait(60) == 0
            listener.close()
            assert subprocess.run(check, stderr=subprocess.DEVNULL, timeout=60).returncode == 1
        finally:
            process.kill()
            process.wait()
