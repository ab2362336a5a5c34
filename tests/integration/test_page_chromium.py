"""The page in a real browser: what a person does, and what an attacker's page may not."""

from __future__ import annotations

import contextlib
import http.server
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from selenium.common.exceptions import (
    NoSuchElementException,
    StaleElementReferenceException,
)
from selenium.webdriver.chrome.webdriver import WebDriver
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.remote.webelement import WebElement
from selenium.webdriver.support.ui import Select

from rebuno_sync import Client
from rebuno_sync.kernel import EmbeddedKernel
from tests.browser import PATIENCE, NoBrowser, browser, find, prefer, resize
from tests.scripted import wait_until
from tests.unit.kernel.agent_double import Caller, Webhooks

ROOT = Path(__file__).resolve().parents[2]
SECRET = "orchard-secret"
ATTACK = (
    "<script>window.owned=1;document.title='owned'</script>"
    "<img src=x onerror=\"window.owned=1;document.title='owned'\">"
    '"><svg onload="window.owned=1">\'-alert(1)-\''
)
POLICY = """
default_action: deny
rules:
  - {id: read, when: {targets: ['find_*', 'get_*']}, then: {decision: allow}}
  - {id: write, when: {target: 'write*'}, then: {decision: allow}}
  - {id: models, when: {step_kind: llm_call}, then: {decision: allow}}
  - {id: no-delete, when: {target: 'delete_*'}, then: {decision: deny, reason: never}}
  - id: small
    when: {target: refund, arguments: {amount: {regex: '^[0-9]{1,2}$'}}}
    then: {decision: allow}
  - id: of-ann
    when: {target: refund, arguments: {note: {contains: for-ann-alone}}}
    then: {decision: require_approval, approval_config: {approvers: [ann]}}
  - id: refunds
    when: {target: refund}
    then:
      decision: require_approval
      approval_config: {approvers: [ann, bob], timeout: 4h, message: Check the order first.}
  - {id: anyone, when: {target: open}, then: {decision: require_approval}}
  - id: mail
    when: {target: send_mail}
    then: {decision: allow, rate_limit: {max_calls: 5, window: 1m}}
  - {id: tools, when: {step_kind: tool_call, target: 't*'}, then: {decision: allow}}
"""


@pytest.fixture(scope="session")
def chromium(pytestconfig: pytest.Config) -> Callable[..., Any]:
    """Starts browsers; without one, the tests are skipped so that it can be seen."""
    try:
        find()
    except NoBrowser as exc:
        message = f"THE PAGE IS NOT TESTED: {exc}"
        reporter = pytestconfig.pluginmanager.get_plugin("terminalreporter")
        if reporter is not None:
            reporter.write_line(f"\n{message}", red=True, bold=True)
        pytest.skip(message)
    return browser


@pytest.fixture(scope="module")
def started(chromium: Callable[..., Any]) -> Iterator[WebDriver]:
    # A name of the attacker's that leads to this machine, as after DNS rebinding.
    with chromium(1200, 900, "--host-resolver-rules=MAP *.test 127.0.0.1") as driver:
        yield driver


@pytest.fixture
def driver(started: WebDriver) -> Iterator[WebDriver]:
    started.execute_cdp_cmd("Network.clearBrowserCookies", {})
    resize(started, 1200, 900)
    prefer(started, "light")
    yield started
    started.get("about:blank")
    started.get_log("browser")


class Desk:
    """A kernel that knows agent ``a1``, which the test plays, and what a visitor needs."""

    def __init__(self, kernel: EmbeddedKernel, webhooks: Webhooks) -> None:
        self.kernel = kernel
        self.webhooks = webhooks
        self.caller = Caller(kernel.url, secret=SECRET)

    def start(self, input: Any = None) -> dict[str, Any]:
        body = {"agent_id": "a1", "input": input}
        assert self.caller.client("POST", "/v0/executions", body).status_code == 201
        return self.webhooks.next()

    def submit(
        self, lease: dict[str, Any], target: str, args: Any = None, kind: str = "tool_call"
    ) -> dict[str, Any]:
        path = f"/v0/executions/{lease['execution_id']}/steps"
        step = {"kind": kind, "target": target, "args": args}
        return dict(self.caller.agent("POST", path, step, lease=lease).json())

    def settle(self, lease: dict[str, Any], step_id: str, result: Any) -> None:
        path = f"/v0/executions/{lease['execution_id']}/steps/{step_id}/complete"
        assert self.caller.agent("POST", path, {"result": result}, lease=lease).ok

    def say(self, lease: dict[str, Any], step_id: str, seq: int, data: str) -> None:
        path = f"/v0/executions/{lease['execution_id']}/steps/{step_id}/stream"
        delta = {"seq": seq, "data": data}
        assert self.caller.agent("POST", path, delta, lease=lease).status_code == 204

    def complete(self, lease: dict[str, Any], output: Any) -> None:
        path = f"/v0/executions/{lease['execution_id']}/complete"
        assert self.caller.agent("POST", path, {"output": output}, lease=lease).ok

    def approval(self, id: str) -> dict[str, Any]:
        return dict(self.caller.client("GET", f"/v0/approvals/{id}").json())

    def path(self, lease: dict[str, Any]) -> str:
        return f"{self.kernel.url}/executions/{lease['execution_id']}"


@pytest.fixture
def webhooks() -> Iterator[Webhooks]:
    receiver = Webhooks()
    yield receiver
    receiver.close()


@pytest.fixture
def desk(webhooks: Webhooks) -> Iterator[Desk]:
    agent = {"id": "a1", "webhook_url": webhooks.url, "secret": SECRET, "policy": POLICY}
    with EmbeddedKernel(manifest={"agents": [agent]}) as kernel:
        desk = Desk(kernel, webhooks)
        yield desk
        desk.caller.close()


def text_of(driver: WebDriver, selector: str = "main") -> str:
    """Return the text of an element, empty while it is not there or being replaced."""
    try:
        return driver.find_element(By.CSS_SELECTOR, selector).text
    except (NoSuchElementException, StaleElementReferenceException):
        return ""


def wait_for(driver: WebDriver, text: str, selector: str = "main") -> None:
    wait_until(lambda: text in text_of(driver, selector), PATIENCE, f"{text!r} did not appear")


def complaints(driver: WebDriver) -> list[str]:
    """Return what the console says of scripts and policies, but for the browser's own pages."""
    messages = [entry["message"] for entry in driver.get_log("browser")]
    return [message for message in messages if not message.startswith("chrome://")]


# What is recorded stays text


def test_an_argument_that_holds_a_script_does_not_run(driver: WebDriver, desk: Desk) -> None:
    lease = desk.start({"q": ATTACK, ATTACK: [ATTACK]})
    driver.get(desk.path(lease))
    first = desk.submit(lease, f"t{ATTACK}", {"q": ATTACK, ATTACK: ATTACK})
    wait_for(driver, f"t{ATTACK[:20]}")  # patched in by the script of the page
    desk.say(lease, first["step_id"], 0, ATTACK)
    wait_for(driver, ATTACK, "[data-live-output]")
    desk.settle(lease, first["step_id"], {"status": 200, "headers": {}, "body": ATTACK})
    asked = desk.submit(lease, "open", {"q": ATTACK})
    wait_for(driver, "Waits for a decision")
    for path in (
        f"/executions/{lease['execution_id']}",
        f"/executions/{lease['execution_id']}/events",
        "/",
        "/approvals",
        f"/approvals/{asked['approval_id']}",
    ):
        driver.get(desk.kernel.url + path)
        for details in driver.find_elements(By.CSS_SELECTOR, "details"):
            driver.execute_script("arguments[0].open = true", details)
        assert "window.owned=1" in text_of(driver)
        assert "owned" not in driver.title
        assert driver.execute_script("return window.owned") is None
        assert driver.execute_script("return document.images.length") == 0
    assert complaints(driver) == []


def test_even_markup_that_got_in_would_not_run(driver: WebDriver, desk: Desk) -> None:
    driver.get(desk.kernel.url)
    found = driver.execute_script(
        """
        const script = document.createElement("script");
        try { script.textContent = "window.owned = 1"; } catch { }
        document.body.append(script);
        const button = document.createElement("button");
        try { button.setAttribute("onclick", "window.owned = 1"); } catch { }
        document.body.append(button);
        button.click();
        let sink = "open";
        try { document.body.innerHTML = "<p>"; } catch { sink = "closed"; }
        button.setAttribute("style", "width: 7px");
        return [window.owned || null, sink, button.style.width];
        """
    )
    assert found == [None, "closed", ""]
    assert any("Content Security Policy" in text for text in complaints(driver))


# What another page may make the browser do


class Attacker:
    """A web site of somebody else: serves what it is told to, on every address."""

    def __init__(self) -> None:
        self.html = ""
        outer = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                body = outer.html.encode()
                self.send_response(200)
                self.send_header("Content-Type", "text/html; charset=utf-8")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: Any) -> None:
                pass

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,))
        self._thread.start()
        self.port = self._server.server_port

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


@pytest.fixture
def attacker() -> Iterator[Attacker]:
    attacker = Attacker()
    yield attacker
    attacker.close()


#: The site of the kernel with another port, another site, and another name for this machine.
ORIGINS = ("127.0.0.1", "localhost", "evil.test")


@pytest.mark.parametrize("name", ORIGINS)
def test_a_form_of_another_site_decides_nothing(
    driver: WebDriver, desk: Desk, attacker: Attacker, name: str
) -> None:
    asked = desk.submit(desk.start(), "open")["approval_id"]
    target = f"{desk.kernel.url}/approvals/{asked}"
    driver.get(target)  # the browser has the cookie of the page
    # The worst case: the attacker has even learnt the token of the form.
    token = driver.find_element(By.NAME, "csrf").get_attribute("value")
    for encoding in ("application/x-www-form-urlencoded", "multipart/form-data", "text/plain"):
        attacker.html = f"""
          <title>attack</title>
          <form method="post" action="{target}" enctype="{encoding}">
            <input name="csrf" value="{token}"><input name="decision" value="grant">
            <input name="decided_by" value="eve"><input name="rationale" value="">
          </form>
          <script>document.forms[0].submit()</script>"""
        driver.get(f"http://{name}:{attacker.port}/")
        wait_until(lambda: driver.title not in ("", "attack"), PATIENCE, "nothing was answered")
        assert driver.title.startswith("403")
        assert desk.approval(asked)["status"] == "pending"


@pytest.mark.parametrize("name", ORIGINS)
def test_scripts_of_another_site_reach_nothing(
    driver: WebDriver, desk: Desk, attacker: Attacker, name: str
) -> None:
    asked = desk.submit(desk.start(), "open")["approval_id"]
    attacker.html = "<title>attack</title>"
    driver.get(f"http://{name}:{attacker.port}/")
    tried = driver.execute_async_script(
        """
        const [kernel, asked, done] = arguments;
        const form = new URLSearchParams({decision: "grant", decided_by: "eve", rationale: ""});
        const json = '{"decided_by": "eve"}';
        const policy = '{"bundle": "default_action: allow"}';
        const agent = '{"id": "a1", "webhook_url": "http://evil.test/", "secret": "s"}';
        const send = (path, body, mode) =>
          fetch(kernel + path, {method: body ? "POST" : "GET", body, mode, credentials: "include"})
            .then((answer) => answer.type + answer.status, () => "failed");
        Promise.all([
          send(`/approvals/${asked}`, form, "no-cors"),
          send(`/v0/approvals/${asked}/grant`, json, "no-cors"),
          send("/v0/policies/a1", policy, "no-cors"),
          send("/v0/agents", agent, "no-cors"),
          send("/", null, "cors"),
          send("/v0/executions", null, "cors"),
        ]).then(done);
        """,
        desk.kernel.url,
        asked,
    )
    assert tried == ["failed", "opaque0", "opaque0", "opaque0", "failed", "failed"]
    assert desk.approval(asked)["status"] == "pending"
    agent = desk.caller.client("GET", "/v0/agents/a1").json()
    assert agent["policy_bundle"] == POLICY
    assert agent["webhook_url"] == desk.webhooks.url


@pytest.mark.parametrize("name", ORIGINS)
def test_the_page_is_shown_in_no_frame(
    driver: WebDriver, desk: Desk, attacker: Attacker, name: str
) -> None:
    desk.submit(desk.start(), "open")
    attacker.html = f'<title>attack</title><iframe src="{desk.kernel.url}/approvals"></iframe>'
    driver.get(f"http://{name}:{attacker.port}/")
    driver.switch_to.frame(driver.find_element(By.TAG_NAME, "iframe"))
    assert driver.find_elements(By.CSS_SELECTOR, "form, .approval, button[name=decision]") == []


def test_a_foreign_name_for_this_machine_gets_nothing(driver: WebDriver, desk: Desk) -> None:
    """After DNS rebinding, the attacker's page and the kernel are of one origin."""
    asked = desk.submit(desk.start({"secret": "plan"}), "open")["approval_id"]
    port = desk.kernel.url.rpartition(":")[2]
    driver.get(f"http://evil.test:{port}/")
    assert driver.title.startswith("403")
    tried = driver.execute_async_script(
        """
        const [asked, done] = arguments;
        const send = (path, body, headers) =>
          fetch(path, {method: body ? "POST" : "GET", body, headers}).then((a) => a.status);
        Promise.all([
          send("/"),
          send("/approvals"),
          send(`/approvals/${asked}`, new URLSearchParams({decision: "grant"})),
          send("/v0/executions"),
          send("/v0/executions", null, {"Rebuno-Agent-Id": "a1", "Rebuno-Signature": "v1=0"}),
          send("/v0/approvals"),
          send(`/v0/approvals/${asked}/grant`, '{"decided_by": "eve"}'),
          send("/v0/policies/a1", '{"bundle": "default_action: allow"}'),
        ]).then(done);
        """,
        asked,
    )
    assert tried == [403] * 8
    assert desk.approval(asked)["status"] == "pending"


def test_a_link_from_another_site_opens_the_page_with_its_session(
    driver: WebDriver, webhooks: Webhooks, attacker: Attacker
) -> None:
    with EmbeddedKernel(bearer_token="a-token") as kernel:
        log_in(driver, kernel.url, "a-token")
        before = driver.get_cookies()
        attacker.html = f'<a href="{kernel.url}/approvals">look at this</a>'
        driver.get(f"http://evil.test:{attacker.port}/")
        driver.find_element(By.TAG_NAME, "a").click()
        wait_for(driver, "Nothing waits for a decision.")
        assert driver.get_cookies() == before


# Deciding


def log_in(driver: WebDriver, url: str, token: str) -> None:
    driver.get(url)
    assert driver.current_url.startswith(f"{url}/login")
    driver.find_element(By.ID, "token").send_keys(token, Keys.ENTER)
    wait_until(lambda: "/login" not in driver.current_url, PATIENCE, "not logged in")


@contextlib.contextmanager
def gunicorn(kernel: EmbeddedKernel) -> Iterator[None]:
    """Serve the agent ``desk`` by a real gunicorn, known to the kernel."""
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    process = subprocess.Popen(
        [
            *(sys.executable, "-m", "gunicorn", "--threads", "4", "--log-level", "error"),
            *("--bind", f"fd://{listener.fileno()}", "tests.integration.page_agent:app"),
        ],
        cwd=ROOT,
        env={**os.environ, "REBUNO_URL": kernel.url, "REBUNO_AGENT_SECRET": SECRET},
        pass_fds=[listener.fileno()],
    )
    listener.close()
    try:
        with Client(kernel.url) as client:
            client.register_agent("desk", f"http://127.0.0.1:{port}/webhook", SECRET)
            client.set_policy("desk", POLICY)
        yield
    finally:
        process.terminate()
        process.wait(30)


@pytest.mark.parametrize("decision", ["grant", "deny"])
def test_a_decision_on_the_page_lets_a_real_agent_go_on(driver: WebDriver, decision: str) -> None:
    with EmbeddedKernel() as kernel, gunicorn(kernel), Client(kernel.url) as client:
        id = client.create("desk", {"number": "A-17", "note": "lost"}).id
        driver.get(f"{kernel.url}/executions/{id}")
        wait_for(driver, "Check the order first.")  # live, without asking again
        assert "May decide\nann, bob" in text_of(driver)
        card = driver.find_element(By.CSS_SELECTOR, ".approval")
        assert '"amount": 249.0' in card.text
        Select(card.find_element(By.NAME, "decided_by")).select_by_visible_text("bob")
        card.find_element(By.NAME, "rationale").send_keys("the carrier says so")
        card.find_element(By.CSS_SELECTOR, f"button.{decision}").click()
        wait_for(driver, "by bob")
        driver.find_element(By.LINK_TEXT, "See the execution").click()
        wait_for(driver, "completed", ".head .status")
        found = client.wait(id, 60)
        expected = {
            "grant": "refunded 249.0 for A-17",
            "deny": "not refunded: the carrier says so",
        }
        assert found.output == expected[decision]
        assert expected[decision] in text_of(driver)
        told = [line.text.split()[:2] for line in driver.find_elements(By.CSS_SELECTOR, ".entry")]
        assert told == [
            ["ran", "find_order"],
            ["waited", "refund"],
            ["replayed", "find_order"],
            [{"grant": "ran", "deny": "denied"}[decision], "refund"],
        ]
        (approval,) = [
            client.approval(e.payload["approval_id"])
            for e in client.events(id)
            if e.type == "approval.requested"
        ]
        assert (approval.decided_by, approval.rationale) == ("bob", "the carrier says so")
        assert complaints(driver) == []


def focused(driver: WebDriver) -> WebElement:
    return driver.switch_to.active_element


def tab_to(driver: WebDriver, wanted: Callable[[WebElement], bool]) -> WebElement:
    """Press Tab until the focus is where it is wanted; every stop must be visible."""
    for _ in range(60):
        focused(driver).send_keys(Keys.TAB)
        at = focused(driver)
        outlined = driver.execute_script(
            "const s = getComputedStyle(arguments[0]); return s.outlineStyle + s.outlineWidth", at
        )
        assert outlined.startswith("solid"), at.get_attribute("outerHTML")
        if wanted(at):
            return at
    raise AssertionError("the keyboard does not get there")


def test_the_keyboard_alone_can_grant(driver: WebDriver, desk: Desk) -> None:
    asked = desk.submit(desk.start(), "refund", {"amount": 249, "note": ""})["approval_id"]
    driver.get(desk.kernel.url)
    skip = tab_to(driver, lambda at: True)
    assert skip.text == "Skip to the content"
    assert skip.rect["y"] >= 0
    tab_to(driver, lambda at: at.text.startswith("Approvals")).send_keys(Keys.ENTER)
    wait_for(driver, "Check the order first.")
    tab_to(driver, lambda at: at.get_attribute("name") == "decided_by").send_keys("bob")
    tab_to(driver, lambda at: at.get_attribute("name") == "rationale").send_keys("line", Keys.ENTER)
    button = tab_to(driver, lambda at: at.tag_name == "button")
    assert button.text == "Grant"
    assert desk.approval(asked)["status"] == "pending"
    button.send_keys(Keys.ENTER)
    wait_for(driver, "by bob")
    found = desk.approval(asked)
    assert (found["status"], found["decided_by"], found["rationale"]) == ("granted", "bob", "line")


def test_enter_in_a_field_decides_nothing(driver: WebDriver, desk: Desk) -> None:
    asked = desk.submit(desk.start(), "open")["approval_id"]
    driver.get(f"{desk.kernel.url}/approvals/{asked}")
    field = driver.find_element(By.NAME, "decided_by")
    field.send_keys("ann", Keys.ENTER)
    assert field.get_attribute("value") == "ann"  # the same page still
    driver.find_element(By.CSS_SELECTOR, "button.deny").click()
    wait_for(driver, "by ann")
    assert desk.approval(asked)["status"] == "denied"


def test_a_kernel_with_a_token_asks_for_it(driver: WebDriver, webhooks: Webhooks) -> None:
    agent = {"id": "a1", "webhook_url": webhooks.url, "secret": SECRET}
    with EmbeddedKernel(manifest={"agents": [agent]}, bearer_token="the-token") as kernel:
        driver.get(f"{kernel.url}/agents")
        assert "a1" not in text_of(driver, "body")
        driver.find_element(By.ID, "token").send_keys("not-the-token", Keys.ENTER)
        wait_for(driver, "That is neither the token nor a key.")
        driver.find_element(By.ID, "token").send_keys("the-token", Keys.ENTER)
        wait_for(driver, "a1")
        assert driver.current_url == f"{kernel.url}/agents"
        (cookie,) = driver.get_cookies()
        assert cookie["httpOnly"]
        assert cookie["sameSite"] == "Strict"
        assert cookie["value"] != "the-token"
        assert driver.execute_script("return document.cookie") == ""
        driver.find_element(By.CSS_SELECTOR, ".out button").click()
        wait_for(driver, "Log in", "h1")
        driver.get(kernel.url)
        wait_for(driver, "Log in", "h1")


# Without JavaScript


def test_the_page_is_whole_without_javascript(driver: WebDriver, desk: Desk) -> None:
    lease = desk.start({"city": "Ulm"})
    asked = desk.submit(lease, "open", {"door": "front"})["approval_id"]
    driver.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": True})
    try:
        driver.get(desk.kernel.url)
        driver.find_element(By.CSS_SELECTOR, ".what > a").click()
        wait_for(driver, "Waits for a decision")
        assert '"door": "front"' in text_of(driver)
        driver.find_element(By.CSS_SELECTOR, ".fold summary").click()
        assert '"city": "Ulm"' in text_of(driver, ".fold")
        driver.find_element(By.NAME, "decided_by").send_keys("ann")
        driver.find_element(By.CSS_SELECTOR, "button.grant").click()
        wait_for(driver, "Granted")
        assert desk.approval(asked)["status"] == "granted"
    finally:
        driver.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": False})


# Live


def chunk(text: str) -> str:
    return f"data: {json.dumps({'choices': [{'delta': {'content': text}}]})}\n\n"


def test_an_llm_call_is_seen_while_it_runs(driver: WebDriver, desk: Desk) -> None:
    lease = desk.start()
    call = desk.submit(lease, "model-1", {"model": "model-1"}, kind="llm_call")["step_id"]
    driver.get(desk.path(lease))
    listening = driver.find_element(By.CSS_SELECTOR, f"[data-live-output='{call}']")
    assert not listening.is_displayed()
    sent = iter(range(1000))

    def say(data: str) -> None:
        desk.say(lease, call, next(sent), data)

    def first_word_is_seen() -> bool:
        say(chunk("Once "))
        return "Once" in listening.text

    # The stream is live only: what is said before the browser listens is missed.
    wait_until(first_word_is_seen, PATIENCE, "no live output was shown")
    whole = chunk("upon ") + chunk("a time")
    say(whole[:30])
    say(whole[30:])
    wait_until(lambda: "Once upon a time" in listening.text, PATIENCE, "the words were not shown")
    assert "choices" not in listening.text
    body = {"choices": [{"message": {"content": "Once upon a time"}}]}
    recorded = {
        "status": 200,
        "headers": {"content-type": "application/json"},
        "body": json.dumps(body),
    }
    desk.settle(lease, call, recorded)
    wait_for(driver, "ran", f"#step-{call}")
    wait_until(
        lambda: not driver.find_elements(By.CSS_SELECTOR, "[data-live-output]"), PATIENCE, "stays"
    )
    driver.find_element(By.CSS_SELECTOR, f"#step-{call} summary").click()
    assert "Once upon a time" in text_of(driver, f"#step-{call}")
    assert complaints(driver) == []


def test_updates_leave_alone_what_a_person_does(driver: WebDriver, desk: Desk) -> None:
    lease = desk.start({"city": "Ulm"})
    first = desk.submit(lease, "t1", {"n": 1})["step_id"]
    desk.settle(lease, first, "one")
    running = desk.submit(lease, "t2")["step_id"]
    desk.submit(lease, "open")
    driver.get(desk.path(lease))
    driver.find_element(By.CSS_SELECTOR, ".fold summary").click()
    driver.find_element(By.CSS_SELECTOR, f"#step-{first} summary").click()
    field = driver.find_element(By.NAME, "rationale")
    field.send_keys("half a sent")
    desk.settle(lease, running, "two")
    wait_for(driver, "ran", f"#step-{running}")
    field.send_keys("ence")
    assert field.get_attribute("value") == "half a sentence"
    assert '"city": "Ulm"' in text_of(driver)
    assert '"n": 1' in text_of(driver, f"#step-{first}")
    field.send_keys(Keys.TAB)
    assert focused(driver).text == "Grant"


def test_the_list_is_live(driver: WebDriver, desk: Desk) -> None:
    lease = desk.start({"n": 1})
    driver.get(desk.kernel.url)
    row = f"#run-{lease['execution_id']}"
    wait_for(driver, "running", row)
    desk.submit(lease, "open")
    wait_for(driver, "waits for a decision on open", row)
    wait_for(driver, "1", ".top .count")
    other = desk.start({"n": 2})
    wait_for(driver, "n: 2", f"#run-{other['execution_id']}")
    ids = [e.get_attribute("id") for e in driver.find_elements(By.CSS_SELECTOR, ".runs > li")]
    assert ids == [f"run-{x['execution_id']}" for x in (other, lease)]


def test_the_page_waits_for_a_kernel_that_was_restarted(
    driver: WebDriver, tmp_path: Path, webhooks: Webhooks
) -> None:
    agent = {"id": "a1", "webhook_url": webhooks.url, "secret": SECRET, "policy": POLICY}
    settings: dict[str, Any] = {"manifest": {"agents": [agent]}}
    database = tmp_path / "kernel.sqlite3"
    with EmbeddedKernel(database, **settings) as kernel:
        desk = Desk(kernel, webhooks)
        lease = desk.start()
        asked = desk.submit(lease, "open")["approval_id"]
        path, port = desk.path(lease), int(kernel.url.rpartition(":")[2])
        desk.caller.close()
        driver.get(path)
        driver.find_element(By.NAME, "decided_by").send_keys("ann")
    wait_for(driver, "The kernel does not answer.", ".offline")
    with EmbeddedKernel(database, port=port, **settings) as kernel:
        wait_until(lambda: text_of(driver, ".offline") == "", PATIENCE, "it was not found again")
        # The form was given a token of the new kernel's.
        driver.find_element(By.CSS_SELECTOR, "button.grant").click()
        wait_for(driver, "by ann")
        desk = Desk(kernel, webhooks)
        assert desk.approval(asked)["status"] == "granted"
        desk.caller.close()


# Looks


AUDIT = """
const parse = (color) => {
  const [r, g, b, a = 1] = color.match(/[\\d.]+/g).map(Number);
  return {r, g, b, a};
};
const luminance = ({r, g, b}) => {
  const part = (c) => (c /= 255) <= 0.03928 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4;
  return 0.2126 * part(r) + 0.7152 * part(g) + 0.0722 * part(b);
};
const behind = (element) => {
  for (let at = element; at; at = at.parentElement) {
    const found = parse(getComputedStyle(at).backgroundColor);
    if (found.a === 1) return found;
  }
  return {r: 255, g: 255, b: 255, a: 1};
};
const faint = [];
const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
let seen = 0;
while (walker.nextNode()) {
  const element = walker.currentNode.parentElement;
  if (!walker.currentNode.data.trim() || !element.checkVisibility()) continue;
  seen += 1;
  const one = luminance(parse(getComputedStyle(element).color)), other = luminance(behind(element));
  const contrast = (Math.max(one, other) + 0.05) / (Math.min(one, other) + 0.05);
  if (contrast < 4.5) faint.push(`${contrast.toFixed(2)} ${walker.currentNode.data.trim()}`);
}
const unnamed = [...document.querySelectorAll("input:not([type=hidden]), select, textarea")]
  .filter((field) => !field.labels.length).map((field) => field.outerHTML);
const buttons = [...document.querySelectorAll("[onclick], div[role=button], a:not([href])")]
  .map((element) => element.outerHTML);
const ids = [...document.querySelectorAll("[id]")].map((element) => element.id);
return {
  seen, faint, unnamed, buttons,
  twice: ids.filter((id, at) => ids.indexOf(id) !== at),
  over: document.documentElement.scrollWidth - document.documentElement.clientWidth,
  lang: document.documentElement.lang,
  headings: document.querySelectorAll("h1").length,
};
"""


@pytest.fixture(scope="module")
def full(chromium: Callable[..., Any]) -> Iterator[dict[str, str]]:
    """Pages with everything on them, by their names."""
    webhooks = Webhooks()
    agent = {"id": "a1", "webhook_url": webhooks.url, "secret": SECRET, "policy": POLICY}
    with EmbeddedKernel(manifest={"agents": [agent]}) as kernel:
        desk = Desk(kernel, webhooks)
        word = "Donaudampfschifffahrtsgesellschaft" * 8
        long = {"word": word, "lines": ["x " * 300] * 30, "more": "y" * 9000}
        done = desk.start(long)
        for number in range(6):
            desk.settle(done, desk.submit(done, f"t{number}", long)["step_id"], long)
        desk.submit(done, f"t{word}")
        desk.submit(done, f"delete_{word}", long)
        kernel.advance(121)
        second = webhooks.next()
        for number in range(6):
            desk.submit(second, f"t{number}", long)
        failing = desk.submit(second, "t-failing", {"n": 1})["step_id"]
        path = f"/v0/executions/{second['execution_id']}/steps/{failing}/fail"
        desk.caller.agent("POST", path, {"error": {"message": f"no {word}"}}, lease=second)
        desk.submit(second, "t-running")
        asked = desk.submit(second, "refund", {"amount": 100, "note": word})["approval_id"]
        ended = desk.start()
        path = f"/v0/executions/{ended['execution_id']}/fail"
        desk.caller.agent("POST", path, {"error": f"agent_error: E: {word}"}, lease=ended)
        cancelled = desk.start({"n": 1})
        desk.submit(cancelled, "open")
        base = f"/v0/executions/{cancelled['execution_id']}"
        desk.caller.client("POST", f"{base}/cancel")
        base = f"{kernel.url}/executions/{done['execution_id']}"
        yield {
            "executions": kernel.url,
            "filtered": f"{kernel.url}/?status=failed&session={word}",
            "execution": base,
            "failed": f"{kernel.url}/executions/{ended['execution_id']}",
            "events": f"{base}/events",
            "approvals": f"{kernel.url}/approvals",
            "approval": f"{kernel.url}/approvals/{asked}",
            "agents": f"{kernel.url}/agents",
            "agent": f"{kernel.url}/agents/a1",
            "nothing": f"{kernel.url}/agents/nobody",
        }
        desk.caller.close()
    webhooks.close()


PAGES = (
    "executions",
    "filtered",
    "execution",
    "failed",
    "events",
    "approvals",
    "approval",
    "agents",
    "agent",
    "nothing",
)


@pytest.mark.parametrize("page", PAGES)
def test_every_page_can_be_read_anywhere(
    driver: WebDriver, full: dict[str, str], page: str
) -> None:
    driver.get(full[page])
    for details in driver.find_elements(By.CSS_SELECTOR, "details"):
        driver.execute_script("arguments[0].open = true", details)
    for scheme in ("light", "dark"):
        prefer(driver, scheme)
        for width in (320, 390, 768, 1280):
            resize(driver, width, 800)
            found = driver.execute_script(AUDIT)
            where = f"{page}, {scheme}, {width} pixels wide"
            assert found["over"] <= 0, where
            assert found["faint"] == [], where
            assert found["seen"] >= 5, where
            assert found["unnamed"] == found["buttons"] == found["twice"] == [], where
            assert (found["lang"], found["headings"]) == ("en", 1), where


def test_dark_is_dark(driver: WebDriver, full: dict[str, str]) -> None:
    colours = []
    for scheme in ("light", "dark"):
        prefer(driver, scheme)
        driver.get(full["execution"])
        colours.append(
            driver.execute_script("return getComputedStyle(document.body).backgroundColor")
        )
    light, dark = (int(c.partition("(")[2].partition(",")[0]) for c in colours)
    assert light > 200
    assert dark < 60


def test_a_large_value_can_be_downloaded(
    driver: WebDriver, full: dict[str, str], tmp_path: Path
) -> None:
    driver.execute_cdp_cmd(
        "Browser.setDownloadBehavior", {"behavior": "allow", "downloadPath": str(tmp_path)}
    )
    driver.get(full["execution"])
    fold = driver.find_element(By.CSS_SELECTOR, ".folds .fold")
    fold.find_element(By.TAG_NAME, "summary").click()
    assert "Cut here." in fold.text
    fold.find_element(By.LINK_TEXT, "download").click()
    name = f"input-{full['execution'].rpartition('/')[2]}.json"
    wait_until((tmp_path / name).exists, PATIENCE, "nothing was downloaded")
    assert len(json.loads((tmp_path / name).read_text())["more"]) == 9000
