"""The official SDK against our kernel: its agent, its restart after a kill, its client."""

from __future__ import annotations

import json
import subprocess
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rebuno_sync import Agent, Client, step, tool
from rebuno_sync.kernel import EmbeddedKernel
from tests.integration.official_agent import OFFICIAL, OfficialAgent
from tests.peers import VERSIONS, PeerUnavailable, peer_python
from tests.scripted import served, wait_until

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


def official_agent(
    python: str, kernel: EmbeddedKernel, client: Client, journal: Path
) -> OfficialAgent:
    """Start the agent of ``official/agent.py`` and register it with the kernel."""
    agent = OfficialAgent(python, "agent.py", kernel.url, journal)
    client.register_agent("official", agent.webhook, SECRET, lease_timeout_seconds=LEASE)
    return agent


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
    agent = official_agent(python, kernel, client, tmp_path)
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
    agent = official_agent(python, kernel, client, tmp_path)
    try:
        created = client.create("official", {"city": "Kyiv", "until": "go"})
        wait_until(lambda: noted(tmp_path)["wait_here"] or client.get(created.id).done, timeout=60)
        assert client.get(created.id).failure_reason == "", agent.lines
    finally:
        agent.kill()
    (tmp_path / "go").touch()
    agent = official_agent(python, kernel, client, tmp_path)
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
