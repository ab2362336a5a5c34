"""The official SDK against our kernel: its agent, its restart after a kill, its client."""

from __future__ import annotations

import json
import re
import subprocess
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rebuno_sync import Agent, Client, step, tool
from rebuno_sync.kernel import EmbeddedKernel
from tests.peers import VERSIONS, PeerUnavailable, peer_python
from tests.scripted import served, wait_until

OFFICIAL = Path(__file__).parent / "official"
SECRET = "orchard-secret"
TOKEN = "a-bearer-token"
LEASE = 60.0


@pytest.fixture(scope="module", params=VERSIONS)
def python(request: pytest.FixtureRequest) -> str:
    try:
        return peer_python(request.param)
    except PeerUnavailable as exc:
        pytest.skip(f"NOT TESTED against rebuno=={request.param}: {exc}")


@pytest.fixture
def kernel() -> Iterator[EmbeddedKernel]:
    with EmbeddedKernel(bearer_token=TOKEN) as kernel:
        yield kernel


@pytest.fixture
def client(kernel: EmbeddedKernel) -> Iterator[Client]:
    with Client(kernel.url, TOKEN) as client:
        yield client


class OfficialAgent:
    """The agent of ``official/agent.py`` in a process, registered with the kernel."""

    def __init__(self, python: str, kernel: EmbeddedKernel, client: Client, journal: Path) -> None:
        self.process = subprocess.Popen(
            [python, str(OFFICIAL / "agent.py"), kernel.url, str(journal)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.lines: list[str] = []
        self._reader = threading.Thread(target=self._read)
        self._reader.start()
        url = wait_until(self._url, timeout=60, what="the official agent did not start")
        client.register_agent("official", f"{url}/webhook", SECRET, lease_timeout_seconds=LEASE)

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


def noted(journal: Path) -> Counter[str]:
    file = journal / "effects"
    return Counter(file.read_text().splitlines() if file.exists() else [])


def output(execution_id: str) -> dict[str, Any]:
    return {
        "weather": {"city": "Kyiv", "days": 3, "mean": 11.5},
        "receipt": "sent Kyiv: 12°",
        "id": execution_id,
    }


def test_its_agent_runs_on_our_kernel(
    python: str, kernel: EmbeddedKernel, client: Client, tmp_path: Path
) -> None:
    agent = OfficialAgent(python, kernel, client, tmp_path)
    try:
        created = client.create("official", {"city": "Kyiv"})
        found = client.wait(created.id, timeout=60)
    finally:
        agent.stop()
    assert (found.status, found.output) == ("completed", output(created.id)), agent.lines
    assert noted(tmp_path) == {"fetch": 1, "round_up": 1, "send_report": 1}
    steps = {s.target: (s.kind, s.status, s.idempotency) for s in client.steps(created.id)}
    assert steps == {
        "fetch": ("tool_call", "succeeded", "safe_to_retry"),
        "round_up": ("local", "succeeded", "safe_to_retry"),
        "send_report": ("tool_call", "succeeded", "at_most_once"),
    }


def test_its_agent_goes_on_after_a_kill(
    python: str, kernel: EmbeddedKernel, client: Client, tmp_path: Path
) -> None:
    agent = OfficialAgent(python, kernel, client, tmp_path)
    try:
        created = client.create("official", {"city": "Kyiv", "until": "go"})
        wait_until(lambda: noted(tmp_path)["wait_here"] or client.get(created.id).done, timeout=60)
        assert client.get(created.id).failure_reason == "", agent.lines
    finally:
        agent.kill()
    (tmp_path / "go").touch()
    agent = OfficialAgent(python, kernel, client, tmp_path)
    try:
        kernel.advance(LEASE + 1)
        found = client.wait(created.id, timeout=60)
    finally:
        agent.stop()
    assert (found.status, found.output) == ("completed", output(created.id)), agent.lines
    # What was recorded is not run again; what was under way is.
    assert noted(tmp_path) == {"fetch": 1, "round_up": 1, "wait_here": 2, "send_report": 1}
    assert len(list(client.steps(created.id))) == 4


def test_its_client_drives_our_kernel(python: str, kernel: EmbeddedKernel, client: Client) -> None:
    @tool
    def gated(amount: int) -> int:
        return amount * 2

    def handler(amount: int) -> int:
        return gated(step("half", lambda amount: amount / 2, {"amount": amount}))

    agent = Agent("ours", secret=SECRET, base_url=kernel.url)
    agent.bind(handler)
    with served(agent.app) as url:
        client.register_agent("ours", f"{url}/webhook", SECRET)
        client.set_policy(
            "ours",
            "default_action: allow\n"
            "rules:\n"
            "  - {id: ask, when: {target: gated}, then: {decision: require_approval,"
            " approval_config: {approvers: [ann]}}}\n",
        )
        done = subprocess.run(
            [python, str(OFFICIAL / "client.py"), kernel.url, TOKEN],
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert agent.close(timeout=30)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    granted, denied = told["granted"], told["denied"]
    assert granted["input"] == {"amount": 5}
    assert granted["agent_id"] == "ours"
    assert (granted["status"], granted["output"]) == ("completed", 5.0)
    assert (granted["approval"], granted["again"]) == ("granted", "conflict")
    assert granted["steps"] == [["gated", "succeeded"], ["half", "succeeded"]]
    assert granted["same_step"] is True
    assert [seq for seq, _ in granted["events"]] == list(range(1, len(granted["events"]) + 1))
    assert granted["later"] == [3, 4]
    kinds = [kind for _, kind in granted["events"]]
    for expected in ("approval.requested", "execution.blocked", "execution.resumed"):
        assert kinds.count(expected) == 1
    assert (denied["status"], denied["failure_reason"]) == ("failed", "policy_denied: not today")
    assert (denied["approval"], denied["again"]) == ("denied", "conflict")
    assert denied["steps"] == [["gated", "denied"], ["half", "succeeded"]]
    assert told["cancelled"] == "cancelled"
    assert told["nothing"] == "not found"
