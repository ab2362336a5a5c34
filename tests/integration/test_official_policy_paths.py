"""The official SDK, as client and as agent, through the policy and approval paths of ours."""

from __future__ import annotations

import contextlib
import json
import subprocess
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from rebuno_sync import Client
from rebuno_sync.kernel import EmbeddedKernel
from tests.integration.gunicorn_host import under_gunicorn
from tests.integration.official_agent import OFFICIAL, OfficialAgent
from tests.integration.policy_rules import (
    APPROVAL_TIMEOUT,
    FEED_WINDOW,
    RULES,
    SURVEY,
    SURVEY_RULES,
    rules_of,
)
from tests.peers import PeerUnavailable, peer_python
from tests.scripted import wait_until

VERSION = "0.29.2"
SECRET = "orchard-secret"
TOKEN = "a-bearer-token"


@pytest.fixture(scope="module")
def python() -> str:
    try:
        return peer_python(VERSION)
    except PeerUnavailable as exc:
        pytest.skip(f"NOT TESTED against rebuno=={VERSION}: {exc}")


class Site:
    """A kernel, a client of ours, and the journal of the agents that are started."""

    def __init__(self, kernel: EmbeddedKernel, client: Client, journal: Path) -> None:
        self.kernel = kernel
        self.client = client
        self.journal = journal

    def register(self, agent_id: str, webhook: str) -> None:
        self.client.register_agent(agent_id, webhook, SECRET)
        self.client.set_policy(agent_id, RULES)

    def noted(self, execution_id: str) -> Counter[str]:
        """How often each body ran in an execution."""
        file = self.journal / "effects"
        rows = [row.split(" ", 1) for row in file.read_text().splitlines()]
        return Counter(what for owner, what in rows if owner == execution_id)

    def events(self, execution_id: str) -> list[str]:
        return [event.type for event in self.client.events(execution_id)]


@pytest.fixture(scope="module")
def site(python: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    folder = tmp_path_factory.mktemp("site")
    with (
        EmbeddedKernel(folder / "kernel.sqlite3", bearer_token=TOKEN) as kernel,
        Client(kernel.url, TOKEN) as client,
    ):
        yield Site(kernel, client, folder)


@contextlib.contextmanager
def official(python: str, site: Site, agent_id: str) -> Iterator[OfficialAgent]:
    """Run the official agent under an id, registered and under the policy."""
    agent = OfficialAgent(python, "policy_agent.py", site.kernel.url, site.journal, agent_id)
    try:
        site.register(agent_id, agent.webhook)
        yield agent
    finally:
        (site.journal / "go").touch()
        agent.stop()


@pytest.fixture(scope="module")
def its_agent(python: str, site: Site) -> Iterator[OfficialAgent]:
    with official(python, site, "official") as agent:
        yield agent


@pytest.fixture(scope="module")
def our_agent(site: Site) -> Iterator[None]:
    environment = {
        "REBUNO_URL": site.kernel.url,
        "REBUNO_AGENT_SECRET": SECRET,
        "JOURNAL": str(site.journal),
    }
    app, log = "tests.integration.policy_agent:app", site.journal / "log"
    with under_gunicorn(app, log, "--threads", "4", **environment) as url:
        site.register("clerk", f"{url}/agents/clerk/webhook")
        yield


def operated(python: str, site: Site, agent_id: str) -> dict[str, Any]:
    """Let the official client operate an agent; return what it was told."""
    process = subprocess.Popen(
        [python, str(OFFICIAL / "policy_client.py"), site.kernel.url, TOKEN, agent_id],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )

    assert process.stdout is not None
    try:
        # It gives up by itself when it does not get there.
        left_to_the_clock = process.stdout.readline().strip()
        if left_to_the_clock:
            assert site.client.approval(left_to_the_clock).status == "pending"
            site.kernel.advance(APPROVAL_TIMEOUT)
        printed, complaints = process.communicate(timeout=120)
    finally:
        if process.poll() is None:
            process.kill()
            process.communicate()
    assert process.returncode == 0, complaints
    told: dict[str, Any] = json.loads(printed)
    return told


def ours(tool: str, reason: str, rule: str = "") -> Any:
    """What a handler on our SDK sees of a denial."""
    return [reason, rule]


def theirs(tool: str, reason: str, rule: str = "") -> Any:
    """What a handler on the official SDK sees of a denial: a text in place of the result."""
    return f"{tool} not allowed. reason: [policy_denied] {reason} (HTTP 403)"


def surveyed(denial: Callable[..., Any]) -> dict[str, Any]:
    """What the handler that tries everything sees; a denied LLM call raises in both SDKs."""
    tools = {"get_xy": "get_xy", "listed": "pay", "gifts": "pay"}
    told = {name: denial(tool, *SURVEY[name]) for name, tool in tools.items()}
    return {**SURVEY, **told}


def check(site: Site, told: dict[str, Any], denial: Callable[..., Any]) -> None:
    """Hold what the client was told against what the policy says, whatever SDK the agent is on."""
    assert told["survey"] == {
        "status": "completed",
        "output": surveyed(denial),
        "failure_reason": "",
        "rules": sorted({*SURVEY_RULES, "default", "local"}),
    }

    granted = told["granted"]
    assert (granted["message"], granted["stranger"]) == (
        "Is this payment all right?",
        "ForbiddenError",
    )
    assert (granted["approval"], granted["decided_by"]) == ("granted", "ann")
    assert granted["output"] == {
        "order": {"number": 7},
        "paid": "paid 250 to carol",
        "after": "x",
    }
    assert granted["again"] == "ConflictError"
    assert site.noted(granted["id"]) == {"buy": 2, "find_order": 1, "pay carol 250": 1}

    for how, reason, by in (("denied", "too much", "bob"), ("expired", "approval_timeout", "")):
        refused = told[how]
        assert (refused["approval"], refused["decided_by"] or "") == (how, by)
        assert refused["output"] == {
            "order": {"number": 7},
            "paid": denial("pay", reason),
            "after": "x",
        }
        assert site.noted(refused["id"]) == {"buy": 2, "find_order": 1}
    assert site.noted(told["uncaught"]["id"]) == {}


def test_its_client_operates_its_agent(python: str, site: Site, its_agent: OfficialAgent) -> None:
    told = operated(python, site, "official")
    check(site, told, theirs)
    uncaught = told["uncaught"]
    assert (uncaught["status"], uncaught["output"]) == (
        "completed",
        theirs("pay", "approval_denied"),
    )


def test_its_client_operates_our_agent(python: str, site: Site, our_agent: None) -> None:
    told = operated(python, site, "clerk")
    check(site, told, ours)
    uncaught = told["uncaught"]
    assert (uncaught["status"], uncaught["failure_reason"]) == ("failed", "approval_denied")


def test_its_agent_is_known_by_its_id(python: str, site: Site) -> None:
    with official(python, site, "intern"):
        created = site.client.create("intern", {"do": "learn"})
        found = site.client.wait(created.id, timeout=60)
    assert found.output == {
        "find_order": {"number": 7},
        "pay": theirs("pay", "interns_only_read"),
    }
    assert rules_of(site.client, created.id) == {"reads", "interns"}


def test_its_agent_waits_for_a_limit(site: Site, its_agent: OfficialAgent) -> None:
    created = site.client.create("official", {"do": "feed"})
    wait_until(lambda: site.events(created.id).count("dispatch.queued") == 2)
    assert site.client.get(created.id).status == "running"
    assert site.noted(created.id) == {"sync_feed a": 1}
    site.kernel.advance(FEED_WINDOW)
    found = site.client.wait(created.id, timeout=60)
    assert (found.status, found.output) == ("completed", ["synced a", "synced b"]), its_agent.lines
    assert site.noted(created.id) == {"sync_feed a": 1, "sync_feed b": 1}


def test_its_steps_in_flight_record_while_the_execution_is_blocked(
    site: Site, its_agent: OfficialAgent
) -> None:
    (site.journal / "go").unlink(missing_ok=True)
    names = ["first", "second"]
    created = site.client.create("official", {"do": "errands", "names": names})
    waiting = site.client.wait(created.id, timeout=60, until_blocked=True)
    assert waiting.status == "blocked", its_agent.lines
    (approval,) = (a for a in site.client.approvals() if a.execution_id == created.id)

    def statuses() -> list[str]:
        steps = site.client.steps(created.id)
        return [step.status for step in steps if step.target == "find_slowly"]

    assert statuses() == ["executing"] * 2
    (site.journal / "go").touch()
    wait_until(lambda: statuses() == ["succeeded"] * 2, timeout=60)
    assert site.client.get(created.id).status == "blocked"
    site.client.grant(approval.id, decided_by="ann")
    found = site.client.wait(created.id, timeout=60)
    assert (found.status, found.output) == (
        "completed",
        {"paid": "paid 250 to carol", "found": {name: f"found {name}" for name in names}},
    ), its_agent.lines
    once = [f"{what} {name}" for name in names for what in ("begun", "ended")]
    assert site.noted(created.id) == {**dict.fromkeys(once, 1), "pay carol 250": 1}
