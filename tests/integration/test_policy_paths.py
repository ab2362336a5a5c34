"""A policy of ten rules under gunicorn; approvals from the page, the command line, the clock."""

from __future__ import annotations

import contextlib
import json
import subprocess
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rebuno_sync import Client
from rebuno_sync.kernel import EmbeddedKernel
from rebuno_sync.wire import Approval, Execution
from tests.integration.gunicorn_host import under_gunicorn
from tests.integration.page_visitor import Form, PageVisitor
from tests.integration.policy_rules import (
    APPROVAL_TIMEOUT,
    FEED_WINDOW,
    RULES,
    SURVEY,
    SURVEY_RULES,
    rules_of,
)
from tests.integration.terminal import COMMAND, environment
from tests.scripted import wait_until

SECRET = "orchard-secret"
TOKEN = "a-bearer-token"
LEASE = 120.0
#: A third of it is how long it takes a heartbeat to learn that the dispatch is over.
PORTER_LEASE = 15.0


class Office:
    """The agents under gunicorn, their kernel on a file, and what their bodies noted."""

    def __init__(self, kernel: EmbeddedKernel, client: Client, journal: Path) -> None:
        self.kernel = kernel
        self.client = client
        self.journal = journal

    def start(self, agent_id: str, **input: Any) -> Execution:
        return self.client.create(agent_id, input)

    def ended(self, execution_id: str) -> Execution:
        return self.client.wait(execution_id, timeout=60)

    def asked(self, execution_id: str) -> Approval:
        """Wait until the execution waits for a person; return for what."""
        found = self.client.wait(execution_id, timeout=60, until_blocked=True)
        assert found.status == "blocked", found
        (approval,) = (a for a in self.client.approvals() if a.execution_id == execution_id)
        return approval

    def noted(self, execution_id: str) -> Counter[str]:
        """How often each body ran in an execution."""
        file = self.journal / "effects"
        rows = [row.split(" ", 1) for row in file.read_text().splitlines()]
        return Counter(what for owner, what in rows if owner == execution_id)

    def events(self, execution_id: str) -> list[str]:
        return [event.type for event in self.client.events(execution_id)]

    def command(self, *arguments: str, code: int = 0) -> str:
        """Run ``rebuno-sync``, hold its exit code against ``code``, and return what it printed."""
        done = subprocess.run(
            [*COMMAND, *arguments],
            env=environment(REBUNO_URL=self.kernel.url, REBUNO_API_KEY=TOKEN),
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == code, (done.stdout, done.stderr)
        return done.stdout + done.stderr


@pytest.fixture(scope="module")
def office(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Office]:
    folder = tmp_path_factory.mktemp("office")
    with contextlib.ExitStack() as stack:
        enter = stack.enter_context
        kernel = enter(
            EmbeddedKernel(folder / "kernel.sqlite3", bearer_token=TOKEN, lease_timeout=LEASE)
        )
        client = enter(Client(kernel.url, TOKEN))
        url = enter(
            under_gunicorn(
                "tests.integration.policy_agent:app",
                folder / "log",
                *("--workers", "2", "--threads", "4", "--graceful-timeout", "5"),
                REBUNO_URL=kernel.url,
                REBUNO_AGENT_SECRET=SECRET,
                JOURNAL=str(folder),
            )
        )
        # Before gunicorn is told to end: nothing may wait for it then.
        stack.callback((folder / "go").touch)
        for agent_id, lease in (("clerk", LEASE), ("intern", LEASE), ("porter", PORTER_LEASE)):
            webhook = f"{url}/agents/{agent_id}/webhook"
            client.register_agent(agent_id, webhook, SECRET, lease_timeout_seconds=lease)
            client.set_policy(agent_id, RULES)
        yield Office(kernel, client, folder)


@pytest.fixture
def visitor(office: Office) -> Iterator[PageVisitor]:
    """Somebody who has logged in to the page."""
    with PageVisitor(office.kernel.url) as visitor:
        asked = visitor.open("/approvals")
        entered = visitor.send(visitor.form(asked, "/login"), "Log in", token=TOKEN)
        assert entered.url == f"{office.kernel.url}/approvals"
        yield visitor


def decision_form(visitor: PageVisitor, approval: Approval) -> Form:
    return visitor.form(visitor.open("/approvals"), f"/approvals/{approval.id}")


# Rules


def test_each_rule_has_its_effect_on_the_handler(office: Office) -> None:
    tried = office.ended(office.start("clerk", do="survey").id)
    assert (tried.status, tried.output) == ("completed", SURVEY)
    assert office.noted(tried.id) == {
        "find_order": 1,
        "pay carol 0": 1,
        "pay carol 42": 1,
        "send_mail": 2,
    }
    learned = office.ended(office.start("intern").id)
    assert learned.output == {
        "find_order": {"number": 7},
        "pay": ["interns_only_read", "interns"],
    }
    asking = office.start("clerk", do="buy", amount=250)
    office.asked(asking.id)
    office.client.cancel(asking.id)
    assert rules_of(office.client, tried.id) == {*SURVEY_RULES, "default", "local"}
    assert rules_of(office.client, learned.id) == {"reads", "interns"}
    assert rules_of(office.client, asking.id) == {"reads", "payments"}
    assert office.noted(asking.id) == {"buy": 1, "find_order": 1}


def test_a_limit_with_a_wait_delays_the_step_and_nothing_else(office: Office) -> None:
    created = office.start("clerk", do="feed")
    wait_until(lambda: office.events(created.id).count("dispatch.queued") == 2)
    waiting = office.client.get(created.id)
    assert waiting.status == "running"
    assert office.noted(created.id) == {"sync_feed a": 1}
    office.kernel.advance(FEED_WINDOW)
    found = office.ended(created.id)
    assert (found.status, found.output) == ("completed", ["synced a", "synced b"])
    assert office.noted(created.id) == {"sync_feed a": 1, "sync_feed b": 1}
    assert rules_of(office.client, created.id) == {"feed"}
    assert "execution.blocked" not in office.events(created.id)


# Approvals


def test_granted_from_the_page(office: Office, visitor: PageVisitor) -> None:
    created = office.start("clerk", do="buy", amount=250)
    approval = office.asked(created.id)
    assert (approval.approvers, approval.message) == (
        ["ann", "bob"],
        "Is this payment all right?",
    )
    form = decision_form(visitor, approval)
    assert form.choices == {"decided_by": ["", "ann", "bob"]}

    unsigned = Form(form.action, {**form.fields, "csrf": ""}, buttons=form.buttons)
    assert visitor.send(unsigned, "Grant", decided_by="ann").status_code == 403
    assert visitor.send(form, "Grant").status_code == 400
    stranger = Form(form.action, dict(form.fields), buttons=form.buttons)
    assert visitor.send(stranger, "Grant", decided_by="mallory").status_code == 403
    assert office.client.approval(approval.id).status == "pending"

    shown = visitor.send(form, "Grant", decided_by="ann", rationale="as agreed")
    assert (shown.status_code, shown.url) == (200, office.kernel.url + form.action)
    found = office.ended(created.id)
    assert (found.status, found.output) == (
        "completed",
        {"order": {"number": 7}, "paid": "paid 250 to carol", "after": "x"},
    )
    # The handler ran twice; what was on record did not.
    assert office.noted(created.id) == {"buy": 2, "find_order": 1, "pay carol 250": 1}
    decided = office.client.approval(approval.id)
    assert (decided.status, decided.decided_by, decided.rationale) == (
        "granted",
        "ann",
        "as agreed",
    )
    events = office.events(created.id)
    at = events.index("approval.requested")
    assert events[at - 2 : at + 2] == [
        "step.proposed",
        "step.awaiting_approval",
        "approval.requested",
        "execution.blocked",
    ]
    at = events.index("approval.granted")
    assert events[at : at + 4] == [
        "approval.granted",
        "step.allowed",
        "execution.resumed",
        "dispatch.queued",
    ]


def test_denied_from_the_command_line(office: Office) -> None:
    created = office.start("clerk", do="buy", amount=300)
    approval = office.asked(created.id)
    listed = office.command("approvals", "ls", "-q").split()
    assert approval.id in listed
    refused = office.command("approvals", "deny", approval.id, "--as", "mallory", code=1)
    assert "mallory" in refused
    assert office.client.approval(approval.id).status == "pending"

    told = office.command(
        "approvals", "deny", approval.id, "--as", "bob", "--because", "too much", "--json"
    )
    assert json.loads(told) == {"id": approval.id, "done": "denied"}
    found = office.ended(created.id)
    assert (found.status, found.output) == (
        "completed",
        {"order": {"number": 7}, "paid": ["too much", ""], "after": "x"},
    )
    assert office.noted(created.id) == {"buy": 2, "find_order": 1}
    again = office.command("approvals", "deny", approval.id, "--as", "bob", code=1)
    assert "conflict" in again
    assert office.client.approval(approval.id).decided_by == "bob"


def test_expired_by_the_clock(office: Office, visitor: PageVisitor) -> None:
    created = office.start("clerk", do="buy", amount=350)
    approval = office.asked(created.id)
    form = decision_form(visitor, approval)
    office.kernel.advance(APPROVAL_TIMEOUT - 600)
    assert office.client.approval(approval.id).status == "pending"
    assert office.client.get(created.id).status == "blocked"
    office.kernel.advance(601)
    found = office.ended(created.id)
    assert (found.status, found.output) == (
        "completed",
        {"order": {"number": 7}, "paid": ["approval_timeout", ""], "after": "x"},
    )
    assert office.noted(created.id) == {"buy": 2, "find_order": 1}
    assert office.client.approval(approval.id).status == "expired"
    assert visitor.send(form, "Grant", decided_by="ann").status_code == 409


def test_a_denial_that_nobody_catches_is_why_the_execution_failed(office: Office) -> None:
    created = office.start("clerk", do="buy_or_fail", amount=400)
    approval = office.asked(created.id)
    office.client.deny(approval.id, decided_by="ann")
    found = office.ended(created.id)
    assert (found.status, found.failure_reason) == ("failed", "approval_denied")


def test_a_denial_can_be_the_result(office: Office) -> None:
    created = office.start("clerk", do="buy_or_say", amount=450)
    approval = office.asked(created.id)
    office.client.deny(approval.id, decided_by="ann", rationale="ask me in May")
    found = office.ended(created.id)
    assert (found.status, found.output) == (
        "completed",
        "pay not allowed. reason: ask me in May",
    )
    assert office.noted(created.id) == {}


def test_parallel_steps_in_flight_record_while_the_execution_is_blocked(office: Office) -> None:
    names = ["first", "second", "kept"]
    created = office.start("porter", names=names)
    approval = office.asked(created.id)
    # The lease of the dispatch is gone, as a heartbeat has found out, and all three still run.
    wait_until(lambda: office.noted(created.id)["lost the lease"], what="no heartbeat was refused")
    running = [s.status for s in office.client.steps(created.id) if s.target == "find_slowly"]
    assert running == ["executing"] * 3
    (office.journal / "go").touch()

    def settled() -> bool:
        steps = [s for s in office.client.steps(created.id) if s.target == "find_slowly"]
        return [s.status for s in steps] == ["succeeded"] * 3

    wait_until(settled, timeout=60, what="the steps in flight were not recorded")
    assert office.client.get(created.id).status == "blocked"
    office.client.grant(approval.id, decided_by="bob")
    found = office.ended(created.id)
    assert (found.status, found.output) == (
        "completed",
        {"paid": "paid 250 to carol", "found": {name: f"found {name}" for name in names}},
    )
    once = [f"{what} {name}" for name in names for what in ("begun", "ended")]
    assert office.noted(created.id) == {
        **dict.fromkeys(once, 1),
        "lost the lease": 1,
        "then Blocked": 1,
        "pay carol 250": 1,
    }
