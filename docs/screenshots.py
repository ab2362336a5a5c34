"""Makes the screenshots of docs/page.md: ``python -m docs.screenshots``.

A kernel, three agents, executions in every state; then Chromium looks at them. What the agents log
of their crashes and refusals belongs to it.
"""

from __future__ import annotations

import base64
import contextlib
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from selenium.webdriver.chrome.webdriver import WebDriver

from examples.fake_provider import FakeProvider, Reply, text
from rebuno_sync import Agent, Client, PolicyError, execution, requests_session, step, tool
from rebuno_sync.kernel import EmbeddedKernel
from tests.browser import browser, prefer, resize
from tests.scripted import served, wait_until

IMAGES = Path(__file__).parent / "images"
_SECRET = "orchard-secret"
_LEASE = 1.5
_POLICY = """\
default_action: deny
rules:
  - id: read-freely
    when:
      targets: [find_*, read_*]
    then: {decision: allow}
  - id: models
    when: {step_kind: llm_call}
    then:
      decision: allow
      rate_limit: {max_calls: 60, window: 1m, per_what: agent, max_wait: 10s}
  - id: small-refunds
    when:
      target: refund
      arguments:
        amount: {regex: '^[0-9]{1,2}(\\.[0-9]+)?$'}
    then: {decision: allow}
  - id: large-refunds
    when: {target: refund}
    then:
      decision: require_approval
      approval_config:
        approvers: [alice, bob]
        timeout: 4h
        message: A refund of three digits or more. Check the order before you grant it.
  - id: no-deletion
    when: {target: delete_*}
    then: {decision: deny, reason: deletion_is_for_people}
"""


@tool
def find_order(number: str) -> dict[str, Any]:
    """Look an order up."""
    time.sleep(0.12)
    return {"number": number, "total": 249.0, "items": ["pear tree", "stakes"], "paid": True}


@tool
def read_parcel(number: str) -> dict[str, Any]:
    """Ask the carrier."""
    time.sleep(0.3)
    return {"number": number, "state": "lost", "last_seen": "Hub Mitte"}


@tool(idempotency="at_most_once")
def refund(order: str, amount: float, reason: str) -> str:
    """Give the money back."""
    time.sleep(0.08)
    return f"refunded {amount} for {order}"


@tool
def delete_account(customer: str) -> str:
    """Not allowed."""
    return customer


class Desk:
    """The handlers; the model is a script, and waits when it is told to."""

    def __init__(self) -> None:
        self.go_on = threading.Event()
        self.provider = FakeProvider(self._answer, models=["orchard-large"])
        self.session = requests_session()

    def _answer(self, asked: Any) -> Reply:
        return text(
            "The carrier lost the parcel at Hub Mitte. The customer paid 249.00, so I suggest to"
            " refund all of it, and to tell them that a new pear tree can leave on Monday."
        )

    def ask(self, question: str) -> str:
        answer = self.session.post(
            f"{self.provider.openai_url}/chat/completions",
            json={"model": "orchard-large", "messages": [{"role": "user", "content": question}]},
            headers={"Authorization": "Bearer any"},
            timeout=30,
        )
        return str(answer.json()["choices"][0]["message"]["content"])

    def support(self, order: str, parcel: str, amount: float) -> dict[str, Any]:
        opened = step("opened", lambda: "09:12")
        found = find_order(order)
        state = read_parcel(parcel)
        if execution().dispatch_attempt == 1 and not execution().is_replaying and amount > 200:
            raise SystemExit  # as a worker that was killed
        advice = self.ask(f"Order {found}, parcel {state}: what should we do?")
        try:
            delete_account("c-118")
        except PolicyError as exc:
            refused = str(exc)
        return {
            "refund": refund(order, amount, state["state"]),
            "advice": advice,
            "refused": refused,
            "opened": opened,
        }

    def stocktaking(self, shelf: str) -> int:
        if shelf == "C":
            raise ValueError("shelf C does not exist")
        return sum(step(f"count {row}", lambda row=row: 12 + row) for row in range(8))

    def newsletter(self, month: str) -> str:
        def write(month: str) -> str:
            self.go_on.wait(60)
            return f"the letter of {month}"

        return step("write", write, {"month": month})


@contextlib.contextmanager
def scene() -> Iterator[tuple[EmbeddedKernel, dict[str, str]]]:
    """Run executions until there is one in every state."""
    desk = Desk()
    with contextlib.ExitStack() as stack:
        kernel = stack.enter_context(EmbeddedKernel(lease_timeout=_LEASE))
        client = stack.enter_context(Client(kernel.url))
        stack.enter_context(desk.provider)
        stack.callback(desk.go_on.set)
        for agent_id, handler in (
            ("support", desk.support),
            ("stocktaking", desk.stocktaking),
            ("newsletter", desk.newsletter),
        ):
            agent = Agent(agent_id, secret=_SECRET, base_url=kernel.url)
            agent.bind(handler)
            url = stack.enter_context(served(agent.app))
            stack.callback(agent.close, 10.0)
            client.register_agent(agent_id, f"{url}/webhook", _SECRET)
        client.set_policy("support", _POLICY)
        ids: dict[str, str] = {}
        for shelf in ("A", "B", "C"):
            id = client.create("stocktaking", {"shelf": shelf}).id
            client.wait(id, 30)
        small = client.create("support", {"order": "A-1701", "parcel": "P-9", "amount": 18.5})
        client.wait(small.id, 30)
        ids["granted"] = _support(client, "A-1705", "grant")
        ids["denied"] = _support(client, "A-1709", "deny")
        ids["blocked"] = _support(client, "A-1712", None)
        ids["running"] = client.create("newsletter", {"month": "May"}).id
        cancelled = client.create("newsletter", {"month": "June"}).id
        for id in (ids["running"], cancelled):
            wait_until(lambda: list(client.steps(id)), what="the step to begin")  # noqa: B023
        client.cancel(cancelled)
        yield kernel, ids


def _support(client: Client, order: str, decision: str | None) -> str:
    id = client.create("support", {"order": order, "parcel": "P-22", "amount": 249.0}).id
    client.wait(id, 30, until_blocked=True)
    approval = next((a for a in client.approvals() if a.execution_id == id), None)
    if decision == "grant" and approval is not None:
        client.grant(approval.id, decided_by="alice", rationale="the carrier confirmed the loss")
        client.wait(id, 30)
    if decision == "deny" and approval is not None:
        client.deny(approval.id, decided_by="bob", rationale="the parcel turned up this morning")
        client.wait(id, 30)
    return id


def shoot(driver: WebDriver, name: str, width: int, scheme: str = "light") -> None:
    """Write the whole page as a PNG."""
    prefer(driver, scheme)
    resize(driver, width, 800)
    height = driver.execute_script("return document.documentElement.scrollHeight")
    resize(driver, width, min(height, 1600))
    driver.execute_async_script(
        "const [done] = arguments; requestAnimationFrame(() => requestAnimationFrame(done));"
    )
    taken = driver.execute_cdp_cmd("Page.captureScreenshot", {"format": "png"})
    (IMAGES / f"{name}.png").write_bytes(base64.b64decode(taken["data"]))


def main() -> None:
    IMAGES.mkdir(exist_ok=True)
    with scene() as (kernel, ids), browser() as driver:
        driver.get(kernel.url)
        shoot(driver, "executions", 1100)
        driver.get(f"{kernel.url}/executions/{ids['granted']}")
        shoot(driver, "execution", 1100)
        shoot(driver, "execution-phone", 390, "dark")
        driver.get(f"{kernel.url}/approvals")
        shoot(driver, "approvals", 1100)
        driver.get(f"{kernel.url}/agents/support")
        shoot(driver, "agent", 1100)


if __name__ == "__main__":
    main()
