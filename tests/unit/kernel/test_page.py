"""What the page shows, and what its forms do."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import requests

from rebuno_sync.kernel import EmbeddedKernel, page_data
from tests.unit.kernel.agent_double import Caller, Webhooks
from tests.unit.kernel.conftest import manifest
from tests.unit.kernel.visitor import Form, Visitor, words

SCRIPT = "<script>alert(1)</script>"
ESCAPED = "&lt;script&gt;alert(1)&lt;/script&gt;"
POLICY = """
default_action: deny
rules:
  - id: pay
    when: {targets: [pay, send_*], arguments: {to: {one_of: [ann, bob]}, sum: {regex: '^[0-9]+$'}}}
    then:
      decision: require_approval
      reason: money
      approval_config: {approvers: [ann, bob], timeout: 5m, message: look twice}
  - {id: anyone, when: {target: open}, then: {decision: require_approval}}
  - {id: no, when: {target: never, agent_id: a1}, then: {decision: deny, reason: not on fridays}}
  - id: rest
    when: {step_kind: tool_call}
    then:
      decision: allow
      rate_limit: {max_calls: 500, window: 1m, per_what: agent, max_wait: 10s}
  - id: models
    when: {step_kind: llm_call}
    then: {decision: allow, token_budget: {max_tokens: 200000, per_what: agent, window: 24h}}
"""


class Scene:
    """A kernel with agent ``a1``, which is played here, and a visitor of its page."""

    def __init__(self, kernel: EmbeddedKernel, caller: Caller, webhooks: Webhooks) -> None:
        self.kernel = kernel
        self.caller = caller
        self.webhooks = webhooks
        self.visitor = Visitor(kernel.url)
        assert caller.client("POST", "/v0/policies/a1", {"bundle": POLICY}).ok

    def start(self, input: Any = None, **more: Any) -> dict[str, Any]:
        """Create an execution and take its dispatch."""
        created = self.caller.client(
            "POST",
            "/v0/executions",
            {"agent_id": "a1", **more}
            if input is None
            else {"agent_id": "a1", "input": input, **more},
        )
        assert created.status_code == 201, created.text
        return self.webhooks.next()

    def submit(
        self, lease: dict[str, Any], target: str, args: Any = None, kind: str = "tool_call"
    ) -> dict[str, Any]:
        path = f"/v0/executions/{lease['execution_id']}/steps"
        step = {"kind": kind, "target": target, "args": args}
        return dict(self.caller.agent("POST", path, step, lease=lease).json())

    def run(
        self, lease: dict[str, Any], target: str, args: Any = None, result: Any = None, **more: Any
    ) -> str:
        step_id = self.submit(lease, target, args, **more)["step_id"]
        path = f"/v0/executions/{lease['execution_id']}/steps/{step_id}/complete"
        assert self.caller.agent("POST", path, {"result": result}, lease=lease).ok
        return str(step_id)

    def complete(self, lease: dict[str, Any], output: Any) -> None:
        path = f"/v0/executions/{lease['execution_id']}/complete"
        assert self.caller.agent("POST", path, {"output": output}, lease=lease).ok

    def page(self, path: str) -> str:
        answer = self.visitor.get(path)
        assert answer.status_code == 200, answer.text
        return answer.text

    def timeline(self, lease: dict[str, Any], query: str = "") -> str:
        return self.page(f"/executions/{lease['execution_id']}{query}")


@pytest.fixture
def scene(kernel: EmbeddedKernel, caller: Caller, webhooks: Webhooks) -> Iterator[Scene]:
    scene = Scene(kernel, caller, webhooks)
    yield scene
    scene.visitor.close()


# Executions


def test_an_empty_kernel_says_how_to_begin(
    kernels: Callable[..., EmbeddedKernel],
) -> None:
    visitor = Visitor(kernels().url)
    assert "exec create AGENT" in visitor.get("/").text
    assert "Nothing waits for a decision." in visitor.get("/approvals").text
    assert "agents add ID URL" in visitor.get("/agents").text
    visitor.close()


def test_the_list_tells_what_each_execution_does(scene: Scene) -> None:
    done = scene.start({"city": "Ulm"})
    scene.run(done, "look")
    scene.complete(done, "sun")
    failed = scene.start()
    path = f"/v0/executions/{failed['execution_id']}/fail"
    scene.caller.agent("POST", path, {"error": "agent_error: OSError: no disk"}, lease=failed)
    running = scene.start()
    scene.submit(running, "work")
    waiting = scene.start()
    scene.submit(waiting, "open")
    html = scene.page("/")
    for lease in (done, failed, running, waiting):
        assert f'href="/executions/{lease["execution_id"]}"' in html
    text = words(html)
    assert "all 4 running 1 blocked 1 completed 1 failed 1" in text
    assert "city: Ulm" in text
    assert "agent_error: OSError: no disk" in text
    assert "runs work" in text
    assert "waits for a decision on open" in text
    assert "1 step ·" in text
    order = [html.index(f'id="run-{x["execution_id"]}"') for x in (waiting, running, failed, done)]
    assert order == sorted(order)


def test_filters(scene: Scene) -> None:
    scene.caller.client(
        "POST",
        "/v0/agents",
        {"id": "b 2", "webhook_url": scene.webhooks.url, "secret": "s"},
    )
    one = scene.start(session="s1")
    two = scene.start()
    scene.complete(two, None)
    scene.caller.client("POST", "/v0/executions", {"agent_id": "b 2"})
    ids = {"one": one["execution_id"], "two": two["execution_id"]}

    def found(query: str) -> list[str]:
        html = scene.page(f"/?{query}")
        return [name for name, id in ids.items() if f'href="/executions/{id}"' in html]

    assert found("") == ["one", "two"]
    assert found("status=completed") == ["two"]
    assert found("session=s1") == ["one"]
    assert found("agent_id=a1&status=running") == ["one"]
    assert found("agent_id=b+2") == []
    assert found("agent_id=nobody") == []
    html = scene.page("/?agent_id=b+2&status=failed")
    assert "No execution is like that." in html
    assert "<option selected>b 2</option>" in html
    assert 'href="/?agent_id=b+2&amp;status=running"' in html


def test_the_list_comes_by_the_page(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_data, "EXECUTIONS_A_PAGE", 2)
    ids = [scene.start()["execution_id"] for _ in range(3)]
    first = scene.page("/?agent_id=a1")
    assert ids[0] not in first
    older = first.split('href="/?cursor=')[1].partition('"')[0].replace("&amp;", "&")
    assert older == f"{ids[1]}&agent_id=a1"
    second = scene.page(f"/?cursor={older}")
    assert f'href="/executions/{ids[0]}"' in second
    assert f'href="/executions/{ids[1]}"' not in second
    assert "← newest" in second
    assert scene.visitor.get(f"/?cursor={ids[0].replace('0', '1')}").status_code == 400
    assert scene.visitor.get("/?cursor=nonsense").status_code == 200


def test_an_execution_tells_its_facts(scene: Scene) -> None:
    parent = scene.start()
    scene.complete(parent, {"n": 1e2})
    lease = scene.start(
        {"q": 1}, session="s 1", parent_execution_id=parent["execution_id"], on_behalf_of="ann"
    )
    text = words(scene.timeline(lease))
    assert "Session s 1" in text
    assert f"Parent {parent['execution_id']}" in text
    assert "On behalf of ann" in text
    assert "So far" in text
    assert "No step yet." in text
    ended = words(scene.timeline(parent))
    assert "Took" in ended
    assert "{ &#34;n&#34;: 100.0 }" in ended
    assert "completed" in ended


def test_a_deadline_is_shown_until_the_end(
    kernels: Callable[..., EmbeddedKernel], webhooks: Webhooks
) -> None:
    kernel = kernels(manifest=manifest(webhooks), deadline=3600)
    caller = Caller(kernel.url)
    scene = Scene(kernel, caller, webhooks)
    lease = scene.start()
    assert re.search("Must end in (1 h|59 min)", words(scene.timeline(lease)))
    scene.complete(lease, None)
    assert "Must end" not in scene.timeline(lease)
    scene.visitor.close()
    caller.close()


def test_a_step_is_shown_with_all_there_is(scene: Scene) -> None:
    lease = scene.start()
    step_id = scene.run(lease, "look", {"at": "the sky"}, {"seen": "stars"})
    html = scene.timeline(lease)
    entry = words(html.split(f'id="step-{step_id}"')[1].partition("</li>")[0] + "</main>")
    assert "ran" in entry
    assert "look tool" in entry
    assert "&#34;at&#34;: &#34;the sky&#34;" in entry
    assert "&#34;seen&#34;: &#34;stars&#34;" in entry
    assert "Rule rest" in entry
    assert step_id in entry


def test_a_replay_points_to_where_the_step_ran(scene: Scene) -> None:
    first = scene.start()
    step_id = scene.run(first, "look")
    scene.kernel.advance(121)
    second = scene.webhooks.next()
    assert scene.submit(second, "look")["decision"] == "replay"
    html = scene.timeline(second)
    link = f'href="/executions/{first["execution_id"]}#step-{step_id}"'
    assert link in html.split('id="attempt-2"')[1]
    assert "recorded in attempt 1" in html
    assert "its lease ran out" in html


def test_nothing_that_was_recorded_becomes_markup(scene: Scene) -> None:
    lease = scene.start({"q": SCRIPT, SCRIPT: 1}, session=SCRIPT, on_behalf_of=SCRIPT)
    scene.run(lease, SCRIPT, {SCRIPT: [SCRIPT]}, SCRIPT)
    scene.run(lease, "m", {"model": SCRIPT, "input": SCRIPT}, kind="tool_call")
    failing = scene.submit(lease, "t")["step_id"]
    path = f"/v0/executions/{lease['execution_id']}/steps/{failing}/fail"
    scene.caller.agent("POST", path, {"error": {"message": SCRIPT}}, lease=lease)
    asked = scene.submit(lease, "open", {"q": SCRIPT})
    html = scene.page("/approvals")
    assert "<script>alert" not in html
    assert ESCAPED in html
    path = f"/approvals/{asked['approval_id']}"
    refused = scene.visitor.fill(path, path, decision=SCRIPT, decided_by=SCRIPT, rationale=SCRIPT)
    assert "<script>alert" not in refused.text
    assert refused.text.count(ESCAPED) >= 2
    answer = scene.visitor.fill(
        path, path, decision="deny", decided_by=SCRIPT, rationale=f"\"{SCRIPT}'>"
    )
    assert answer.status_code == 303
    second = scene.webhooks.next()
    path = f"/v0/executions/{lease['execution_id']}/fail"
    scene.caller.agent("POST", path, {"error": SCRIPT}, lease=second)
    scene.caller.agent(
        "PUT",
        "/v0/agents/a1/metadata",
        {"description": SCRIPT, "input_schema": {"title": SCRIPT}, "output_schema": None},
    )
    id = lease["execution_id"]
    for page in (
        "/",
        f"/?agent_id={SCRIPT}&session={SCRIPT}&status={SCRIPT}",
        f"/executions/{id}",
        f"/executions/{id}/events",
        "/approvals",
        f"/approvals/{asked['approval_id']}",
        "/agents",
        "/agents/a1",
        f"/login?next={SCRIPT}",
    ):
        html = scene.visitor.get(page, follow=True).text
        assert "<script>alert" not in html, page
        if not page.startswith("/login"):  # which leads on: there is no token to ask for
            assert ESCAPED in html, page
    for wrong in (f"/agents/{SCRIPT.replace('/', '')}", f"/executions/{id}/steps/{SCRIPT}"):
        html = scene.visitor.get(wrong).text
        assert "<script>" not in html.replace('<script src="', "")


def test_an_approver_sees_what_would_hide(scene: Scene) -> None:
    lease = scene.start()
    scene.submit(lease, "open", {"path": "/tmp/\u202etxt.exe", "to": "a\u200bnn"})
    html = scene.page("/approvals")
    assert "\u202e" not in html
    assert "/tmp/\\u202etxt.exe" in html
    assert "a\\u200bnn" in html
    scene.submit(scene.start(), "look\u202egnp.exe")
    html = scene.page("/")
    assert "\u202e" not in html
    assert "look\\u202egnp.exe" in html


def test_large_values_are_cut_and_can_be_downloaded(scene: Scene) -> None:
    long = {"text": "é" * 100_000, "n": 1}
    lease = scene.start(long)
    step_id = scene.run(lease, "look", long, long)
    scene.complete(lease, long)
    html = scene.timeline(lease)
    assert len(html) < 60_000
    assert html.count("Cut here.") == 4
    assert "The whole has 600 kB" in html  # as it was sent, in escapes
    base = f"/executions/{lease['execution_id']}"
    for path in (
        f"{base}/input.json",
        f"{base}/output.json",
        f"{base}/steps/{step_id}/args.json",
        f"{base}/steps/{step_id}/result.json",
    ):
        assert f'href="{path}"' in html
        answer = scene.visitor.get(path)
        assert answer.json() == long
        assert answer.headers["Content-Type"] == "application/json"
        assert answer.headers["Content-Disposition"].startswith('attachment; filename="')
        assert answer.headers["X-Content-Type-Options"] == "nosniff"


def test_downloads_of_what_is_not_there(scene: Scene) -> None:
    lease, other = scene.start(), scene.start()
    step_id = scene.submit(lease, "look")["step_id"]
    base = f"/executions/{lease['execution_id']}"
    for path in (
        f"{base}/output.json",
        f"{base}/state.json",
        f"{base}/steps/{step_id}/result.json",
        f"{base}/steps/{step_id}/secret.json",
        f"{base}/steps/none/args.json",
        f"/executions/{other['execution_id']}/steps/{step_id}/args.json",
    ):
        assert scene.visitor.get(path).status_code == 404, path
    assert scene.visitor.get(f"{base}/steps/{step_id}/args.json").json() is None


def test_events_come_raw_and_by_the_page(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_data, "EVENTS_A_PAGE", 5)
    monkeypatch.setattr(page_data, "_EVENTS_AT_ONCE", 2)
    lease = scene.start()
    scene.run(lease, "look")
    base = f"/executions/{lease['execution_id']}/events"
    first, second = scene.page(base), scene.page(f"{base}?after=5")
    assert "execution.created" in first
    assert "step.executing" not in first
    assert f'href="{base}?after=5"' in first
    assert "step.executing" in second
    assert "← first" in second
    assert scene.page(f"{base}?after=-9") == first
    answer = scene.visitor.get(f"{base}.jsonl")
    lines = [json.loads(line) for line in answer.text.splitlines()]
    recorded = scene.caller.client("GET", f"/v0{base}").json()
    assert [(x["event_seq"], x["type"], x["payload"]) for x in lines] == [
        (x["event_seq"], x["type"], x["payload"]) for x in recorded
    ]


def test_live_output_is_handed_on(scene: Scene) -> None:
    lease = scene.start()
    step_id = scene.submit(lease, "write")["step_id"]
    base = f"/executions/{lease['execution_id']}"
    html = scene.timeline(lease)
    assert f'data-live-output="{step_id}"' in html
    assert f'data-stream="{base}/live"' in html
    with requests.Session() as session:
        session.trust_env = False
        answer = session.get(f"{scene.kernel.url}{base}/live", stream=True, timeout=30)
        assert answer.headers["Content-Type"] == "text/event-stream"
        frames = answer.iter_lines()
        assert next(frames).startswith(b":")  # from here on nothing is missed
        path = f"/v0{base}/steps/{step_id}/stream"
        delta = {"seq": 0, "data": "once upon"}
        assert scene.caller.agent("POST", path, delta, lease=lease).ok
        frame = next(line for line in frames if line.startswith(b"data:"))
        assert json.loads(frame[5:]) == {"step_id": step_id, **delta}
        answer.close()


def test_a_page_that_did_not_change_is_not_sent_again(scene: Scene) -> None:
    lease = scene.start()
    scene.run(lease, "begin")
    scene.page("/")
    for path in ("/", "/approvals", f"/executions/{lease['execution_id']}"):
        version = scene.visitor.get(path).headers["ETag"]
        again = scene.visitor.get(path, If_None_Match=version)
        assert (again.status_code, again.content) == (304, b"")
    scene.submit(lease, "look")
    for path in ("/", "/approvals", f"/executions/{lease['execution_id']}"):
        assert scene.visitor.get(path, If_None_Match=version).status_code == 200


def test_an_execution_that_is_over_does_not_ask_again(scene: Scene) -> None:
    lease = scene.start()
    assert " data-live=" in scene.timeline(lease)
    scene.complete(lease, None)
    html = scene.timeline(lease)
    assert " data-live=" not in html
    assert " data-stream=" not in html


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("/executions/0192f3a4-1111-7222-8333-444455556666", 404),
        ("/executions/no-id", 404),
        ("/executions/0192f3a4-1111-7222-8333-444455556666/events", 404),
        ("/executions/0192f3a4-1111-7222-8333-444455556666/events.jsonl", 404),
        ("/executions/0192f3a4-1111-7222-8333-444455556666/live", 404),
        ("/approvals/0192f3a4-1111-7222-8333-444455556666", 404),
        ("/agents/nobody", 404),
    ],
)
def test_what_is_not_there(scene: Scene, path: str, status: int) -> None:
    answer = scene.visitor.get(path)
    assert answer.status_code == status
    assert answer.headers["Content-Type"].startswith("text/html")
    assert "Set-Cookie" not in answer.headers


def test_a_fault_is_told_without_its_insides(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*args: Any) -> None:
        raise RuntimeError("the secret of the kernel")

    monkeypatch.setattr(page_data, "execution_list", fail)
    answer = scene.visitor.get("/")
    assert answer.status_code == 500
    assert "RuntimeError" in answer.text
    assert "the secret of the kernel" not in answer.text
    assert "the secret of the kernel" in caplog.text


def test_a_kernel_that_stops_says_so(scene: Scene) -> None:
    client = scene.kernel.app.test_client()
    scene.kernel.stop()
    answer = client.get("/")
    assert (answer.status_code, "The kernel is stopping." in answer.text) == (503, True)


# Approvals


def test_an_approval_is_shown_with_who_may_decide(scene: Scene) -> None:
    lease = scene.start()
    scene.submit(lease, "pay", {"to": "ann", "sum": 100})
    html = scene.page("/approvals")
    text = words(html)
    assert "pay tool pending look twice" in text
    assert "May decide ann, bob" in text
    assert "Rule pay" in text
    assert "Denied in 5 min" in text or "Denied in 4 min 5" in text
    assert "&#34;sum&#34;: 100" in text
    assert "<option>ann</option>" in html
    assert 'Approvals <span class="count">1' in html


def test_who_anyone_is_has_to_be_said(scene: Scene) -> None:
    asked = scene.submit(scene.start(), "open")["approval_id"]
    path = f"/approvals/{asked}"
    html = scene.page(path)
    assert "May decide anyone" in words(html)
    assert "<select" not in html
    answer = scene.visitor.fill(path, path, decision="grant", decided_by=" ", rationale="why not")
    assert answer.status_code == 400
    assert "Say who you are" in answer.text
    assert "why not</textarea>" in answer.text


@pytest.mark.parametrize(("decision", "status"), [("grant", "granted"), ("deny", "denied")])
def test_a_decision_is_recorded_and_shown(scene: Scene, decision: str, status: str) -> None:
    lease = scene.start()
    asked = scene.submit(lease, "pay", {"to": "ann", "sum": 100})["approval_id"]
    path = f"/approvals/{asked}"
    page = f"/executions/{lease['execution_id']}"
    answer = scene.visitor.fill(
        page, path, decision=decision, decided_by="bob", rationale="line one\r\nline two "
    )
    assert (answer.status_code, answer.headers["Location"]) == (303, path)
    approval = scene.caller.client("GET", f"/v0{path}").json()
    assert approval["status"] == status
    assert approval["decided_by"] == "bob"
    assert approval["rationale"] == "line one\nline two"
    text = words(scene.page(path))
    assert f"{status.capitalize()}" in text
    assert "by bob" in text
    assert "line one" in text
    assert "<form" not in scene.page(path)
    assert f'id="decided-{asked}"' in scene.page("/approvals")
    second = scene.webhooks.next()
    again = scene.submit(second, "pay", {"to": "ann", "sum": 100})
    assert again["decision"] == {"grant": "proceed", "deny": "denied"}[decision]


def test_decisions_that_cannot_be(scene: Scene) -> None:
    lease = scene.start()
    asked = scene.submit(lease, "pay", {"to": "ann", "sum": 1})["approval_id"]
    path = f"/approvals/{asked}"
    fields = {**Form(scene.page(path)).forms[path], "decided_by": "ann", "rationale": ""}
    send = scene.visitor.post
    assert send(path, fields).status_code == 400
    assert send(path, {**fields, "decision": "maybe"}).status_code == 400
    assert send(path, {**fields, "decision": "deny", "rationale": "x" * 4001}).status_code == 400
    stranger = send(path, {**fields, "decision": "grant", "decided_by": "eve"})
    assert stranger.status_code == 403
    assert "is not an approver" in stranger.text
    assert scene.caller.client("GET", f"/v0{path}").json()["status"] == "pending"
    gone = "/approvals/0192f3a4-1111-7222-8333-444455556666"
    assert send(gone, {**fields, "decision": "grant"}).status_code == 404
    assert send(path, {**fields, "decision": "grant"}).status_code == 303
    late = send(path, {**fields, "decision": "deny"})
    assert late.status_code == 409
    assert "already been decided" in late.text
    assert scene.caller.client("GET", f"/v0{path}").json()["status"] == "granted"


def test_an_approval_whose_time_is_over_has_no_form(scene: Scene) -> None:
    asked = scene.submit(scene.start(), "pay", {"to": "ann", "sum": 1})["approval_id"]
    scene.kernel.advance(301)
    html = scene.page(f"/approvals/{asked}")
    assert "expired" in html
    assert "<form" not in html


# Agents


def test_agents_are_shown_with_their_policy(scene: Scene) -> None:
    scene.complete(scene.start(), None)
    scene.caller.client(
        "POST", "/v0/agents", {"id": "free", "webhook_url": "http://free.test/", "secret": "s"}
    )
    html = scene.page("/agents")
    assert "Policy: 5 rules, otherwise deny" in html
    assert "No policy: everything is allowed" in html
    assert "1 completed" in html
    assert "orchard-secret" not in html
    text = words(scene.page("/agents/a1"))
    assert "orchard-secret" not in text
    assert "pay targets pay or send_* to one_of ann or bob sum regex ^[0-9]+$" in text
    assert "require approval of ann, bob within 5 min: look twice" in text
    assert "never agent id a1" in text
    assert "deny : not on fridays" in text
    assert "rest step kind tool_call allow At most 500 in 1 min, counted per agent;" in text
    assert "waits up to 10 s for its turn." in text
    assert "At most 200,000 tokens in 1 d, counted per agent." in text
    assert "Otherwise deny , but local steps are allowed." in text
    assert "None: everything is allowed." in scene.page("/agents/free")


def test_rules_are_shown_in_the_order_in_which_they_are_tried(scene: Scene) -> None:
    bundle = """
default_action: allow
rules:
  - {id: later, priority: 2, then: {decision: deny}}
  - {id: sooner, priority: 1, when: {target: x}, then: {decision: allow}}
"""
    scene.caller.client("POST", "/v0/policies/a1", {"bundle": bundle})
    text = words(scene.page("/agents/a1"))
    assert text.index("sooner target x allow") < text.index("later any step deny")
    assert "Otherwise allow ." in text


def test_a_policy_of_another_version_is_shown_as_it_is(scene: Scene) -> None:
    with scene.kernel._running().store.write() as tx:
        tx.run("UPDATE agents SET policy = 'rules: [{id: x}]' WHERE id = 'a1'")
    text = words(scene.page("/agents/a1"))
    assert "cannot be read any more: rule &#39;x&#39;" in text
    assert "rules: [{id: x}]" in text
    assert "Its policy cannot be read" in scene.page("/agents")
