"""The command line against the embedded kernel, with agents that do real work."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import requests
from click.testing import CliRunner, Result

from rebuno_sync import Client, execution, signing, step, tool
from rebuno_sync.agent_secrets import Secrets
from rebuno_sync.cli.root import root
from rebuno_sync.kernel import EmbeddedKernel
from rebuno_sync.kernel_client import KernelClient
from rebuno_sync.lease import Lease
from rebuno_sync.transport import Transport
from rebuno_sync.wire import Dispatch
from tests.integration.terminal import COMMAND, environment, on_a_terminal, running_command
from tests.running import Running, running
from tests.scripted import (
    GENERATION_1,
    GENERATION_2,
    GENERATION_3,
    Generation,
    ScriptedKernel,
    wait_until,
)

NOBODY = "00000000-0000-7000-8000-000000000000"
POLICY = """
default_action: allow
rules:
  - id: mail
    when: {target: send}
    then: {decision: require_approval, approval_config: {message: "A mail to a person"}}
  - id: pay
    when: {target: pay}
    then: {decision: require_approval, approval_config: {approvers: [alice], timeout: 1h}}
  - id: never
    when: {target: forbidden}
    then: {decision: deny, reason: never}
"""
held = threading.Event()


@tool
def look(name: str) -> str:
    return f"saw {name}"


@tool
def send(to: str) -> str:
    return f"sent to {to}"


@tool
def pay(amount: int) -> int:
    return amount


@tool
def forbidden() -> None:
    raise AssertionError("the policy denies this")


@tool
def hold() -> str:
    assert held.wait(60)
    return "held"


def handle(do: str = "look", name: str = "x") -> Any:
    if do == "look":
        return look(name)
    if do == "now":
        return {"at": step("now", lambda: 7)}
    return {"send": send, "pay": pay, "forbidden": forbidden, "hold": hold}[do](
        *{"send": ["ann@example.com"], "pay": [5]}.get(do, [])
    )


@pytest.fixture(scope="module")
def served() -> Iterator[Running]:
    with running(handle, policy=POLICY) as found:
        yield found


@pytest.fixture
def holding() -> Iterator[threading.Event]:
    held.clear()
    yield held
    held.set()


def run(url: str, *arguments: str, input: str | None = None, **env: str) -> Result:
    """Run a command in this process, as the shell would see it."""
    unset = ("REBUNO_API_KEY", "REBUNO_AGENT_SECRET", "REBUNO_AGENT_SECRET_FILE")
    settings: dict[str, str | None] = {**dict.fromkeys(unset), **env}
    settings["REBUNO_URL"] = url or None
    result = CliRunner().invoke(root, arguments, input=input, env=settings, prog_name="rebuno-sync")
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def lines(result: Result) -> list[Any]:
    return [json.loads(line) for line in result.stdout.splitlines()]


def create(found: Running, **input: str) -> str:
    result = run(found.kernel.url, "exec", "create", "a1", "--input", json.dumps(input))
    assert result.exit_code == 0, result.stderr
    return result.stdout.strip()


def blocked(found: Running, **input: str) -> tuple[str, str]:
    """An execution that waits for an approval, and the approval."""
    execution_id = create(found, **input)
    assert found.wait(execution_id).status == "blocked"
    (approval,) = (a for a in found.client.approvals() if a.execution_id == execution_id)
    return execution_id, approval.id


# exec


def test_create_prints_the_id_alone(served: Running) -> None:
    result = run(served.kernel.url, "exec", "create", "a1")
    assert served.client.get(result.stdout.strip()).agent_id == "a1"
    assert result.stdout.count("\n") == 1
    assert result.stderr == ""


def test_create_in_json_prints_the_execution(served: Running) -> None:
    (data,) = lines(run(served.kernel.url, "exec", "create", "a1", "--json"))
    assert data["agent_id"] == "a1"
    assert data["input"] is None


def test_the_input_comes_from_the_line_a_file_or_the_standard_input(
    served: Running, tmp_path: Path
) -> None:
    url, file = served.kernel.url, tmp_path / "input.json"
    file.write_text('{"name": "file ✔"}', encoding="utf-8")
    for given, stdin, expected in (
        ('{"name": "line"}', None, "line"),
        (f"@{file}", None, "file ✔"),
        ("-", '{"name": "pipe"}', "pipe"),
    ):
        result = run(url, "exec", "create", "a1", "--input", given, "--json", input=stdin)
        assert lines(result)[0]["input"] == {"name": expected}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("hello", "--input is not JSON"),
        ('{"a": }', "--input is not JSON"),
        ("@nowhere.json", "cannot read nowhere.json: No such file or directory"),
        ('"\\ud800"', "input has a lone surrogate"),
    ],
)
def test_an_input_that_makes_no_sense_is_a_usage_error(
    served: Running, given: str, message: str
) -> None:
    result = run(served.kernel.url, "exec", "create", "a1", "--input", given)
    assert result.exit_code == 2
    assert message in result.stderr
    assert result.stderr.count("\n") == 1
    assert result.stdout == ""


def test_an_idempotency_key_creates_once(served: Running) -> None:
    command = ("exec", "create", "a1", "--idempotency-key", "monday")
    first, second = (run(served.kernel.url, *command).stdout for _ in range(2))
    assert first == second


def test_watch_tells_the_story_and_how_it_ended(served: Running) -> None:
    result = run(
        served.kernel.url,
        "exec",
        "create",
        "a1",
        "--input",
        '{"do": "now"}',
        "--watch",
        "--no-live",
    )
    assert result.exit_code == 0
    told = [line.split("  ", 1)[1].strip() for line in result.stdout.splitlines()[1:]]
    assert told[:2] == ["● attempt 1", "▸ local now  runs"]
    assert told[2].startswith("✔ local now  ran  (")
    assert told[3].startswith('■ completed  {"at":7}  (')


def test_watch_of_a_failure_exits_with_1(served: Running) -> None:
    execution_id = create(served, do="forbidden")
    result = run(served.kernel.url, "exec", "watch", execution_id)
    assert result.exit_code == 1
    assert "⊘ tool_call forbidden  denied: never; rule never" in result.stdout
    assert "■ failed  policy_denied: never" in result.stdout or "■ failed  never" in result.stdout


def test_watch_of_a_cancelled_execution_exits_with_4(
    served: Running, holding: threading.Event
) -> None:
    execution_id = create(served, do="hold")
    wait_until(lambda: any(s.status == "executing" for s in served.client.steps(execution_id)))
    assert run(served.kernel.url, "exec", "cancel", execution_id).exit_code == 0
    result = run(served.kernel.url, "exec", "watch", execution_id, "--no-live")
    assert result.exit_code == 4
    assert "■ cancelled" in result.stdout


def test_watch_gives_up_when_told_to(served: Running, holding: threading.Event) -> None:
    execution_id = create(served, do="hold")
    result = run(
        served.kernel.url, "exec", "watch", execution_id, "--give-up-after", "0.2", "--no-live"
    )
    assert result.exit_code == 1
    assert result.stderr == f"Error: execution {execution_id} has not ended after 0.2 s\n"


def test_watch_in_json_has_every_event_once_and_then_the_execution(served: Running) -> None:
    execution_id = create(served)
    *events, last = lines(run(served.kernel.url, "exec", "watch", execution_id, "--json"))
    assert [row["event"]["event_seq"] for row in events] == list(range(1, len(events) + 1))
    assert events[-1]["event"]["type"] == "execution.completed"
    assert last["execution"]["output"] == "saw x"


def test_interrupting_a_watch_ends_it_alone(
    served: Running, holding: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    execution_id = create(served, do="hold")
    with running_command(
        "exec", "watch", execution_id, env=environment(REBUNO_URL=served.kernel.url)
    ) as watch:
        watch.read_until("hold  runs")
        watch.process.send_signal(signal.SIGINT)
        assert watch.wait() == 130
    assert "Traceback" not in watch.text
    assert served.client.get(execution_id).status == "running"


def test_live_output_is_shown_while_a_step_runs() -> None:
    seen = threading.Event()

    @tool
    def talk() -> str:
        now = execution()
        lease = Lease(Dispatch(now.id, now.dispatch_id, now.dispatch_attempt))
        kernel = KernelClient(
            "a1", Secrets("orchard-secret"), Transport(served.kernel.url, timeout=30.0)
        )
        (step,) = served.client.steps(now.id)
        for seq in range(6000):
            said = f'data: {{"choices": [{{"delta": {{"content": "word {seq}\\n"}}}}]}}\n\n'
            kernel.stream(now.id, lease, step.step_id, seq, said)
            if seen.wait(0.01):
                return "talked"
        raise AssertionError("nobody listened")

    with running(talk) as served:
        execution_id = served.start()
        env = environment(REBUNO_URL=served.kernel.url)
        with running_command("exec", "watch", execution_id, env=env) as watch:
            watch.read_until("talk │ word ")
            seen.set()
            assert watch.wait() == 0
        assert "data:" not in watch.text


def test_executions_are_listed_and_filtered(served: Running, holding: threading.Event) -> None:
    url = served.kernel.url
    one, two = create(served), create(served, do="hold")
    served.client.wait(one, 60)
    table = run(url, "exec", "ls", "--limit", "2").stdout.splitlines()
    assert table[0].split() == ["id", "agent", "status", "created", "took", "what"]
    assert [row.split()[0] for row in table[1:]] == [two, one]
    running_now = lines(run(url, "exec", "ls", "--status", "running", "--json"))
    assert two in [row["id"] for row in running_now]
    assert one not in [row["id"] for row in running_now]
    everything = lines(run(url, "exec", "ls", "--limit", "0", "--json"))
    assert {one, two} <= {row["id"] for row in everything}
    assert run(url, "exec", "ls", "-q", "--limit", "2").stdout == f"{two}\n{one}\n"
    nothing = run(url, "exec", "ls", "--agent", "nobody")
    assert (nothing.stdout, nothing.stderr) == ("", "There are no executions.\n")


def test_one_execution_is_shown_with_its_events_and_steps(served: Running) -> None:
    url, execution_id = served.kernel.url, create(served, name="a\x1b[2Jb")
    served.client.wait(execution_id, 60)
    shown = run(url, "exec", "get", execution_id).stdout
    assert "status: completed\n" in shown
    assert '"saw a\\u001b[2Jb"' in shown
    events = run(url, "exec", "events", execution_id).stdout.splitlines()
    assert [line.split()[0] for line in events[1:]] == [str(n) for n in range(1, len(events))]
    (last,) = lines(
        run(url, "exec", "events", execution_id, "--after-seq", str(len(events) - 2), "--json")
    )
    assert last["type"] == "execution.completed"
    (step,) = lines(run(url, "exec", "steps", execution_id, "--json"))
    assert step["result"] == "saw a\x1b[2Jb"
    table = run(url, "exec", "steps", execution_id).stdout
    assert "tool_call  look    succeeded" in table
    whole = run(url, "exec", "steps", execution_id, "--step", step["step_id"]).stdout
    assert f"step id: {step['step_id']}\n" in whole
    assert "idempotency: safe_to_retry\n" in whole


def test_what_cannot_be_cancelled_is_told_and_the_rest_is_cancelled(
    served: Running, holding: threading.Event
) -> None:
    ended, going = create(served), create(served, do="hold")
    served.client.wait(ended, 60)
    result = run(served.kernel.url, "exec", "cancel", ended, going)
    assert result.exit_code == 1
    assert result.stdout == f"cancelled {going}\n"
    assert result.stderr.splitlines()[0].startswith(f"{ended}: ")
    assert result.stderr.splitlines()[1] == "Error: 1 of 2 could not be cancelled"


# approvals


def test_an_approval_is_listed_shown_and_granted(served: Running) -> None:
    url = served.kernel.url
    execution_id, approval_id = blocked(served, do="send")
    table = run(url, "approvals", "ls").stdout
    assert approval_id in table
    assert 'send {"to":"ann@example.com"}' in table
    assert "A mail to a person" in table
    assert f"approval: {approval_id}\n" in run(url, "exec", "get", execution_id).stdout
    shown = run(url, "approvals", "show", approval_id).stdout
    assert "may decide: anyone\n" in shown
    assert '"to": "ann@example.com"' in shown
    result = run(url, "approvals", "grant", approval_id, "--as", "bob", "--because", "fine")
    assert (result.exit_code, result.stdout) == (0, f"granted {approval_id}\n")
    assert served.wait(execution_id).output == "sent to ann@example.com"
    decided = served.client.approval(approval_id)
    assert (decided.decided_by, decided.rationale) == ("bob", "fine")
    again = run(url, "approvals", "grant", approval_id)
    assert again.exit_code == 1
    assert "already been decided" in again.stderr


def test_a_denied_approval_fails_with_the_reason(served: Running) -> None:
    execution_id, approval_id = blocked(served, do="send")
    result = run(served.kernel.url, "approvals", "deny", approval_id, "--because", "no", "--json")
    assert lines(result) == [{"id": approval_id, "done": "denied"}]
    assert served.wait(execution_id).failure_reason == "no"


def test_only_an_approver_decides(served: Running) -> None:
    execution_id, approval_id = blocked(served, do="pay")
    refused = run(served.kernel.url, "approvals", "grant", approval_id, "--as", "mallory")
    assert refused.exit_code == 1
    assert "not an approver" in refused.stderr
    (row,) = (
        row
        for row in lines(run(served.kernel.url, "approvals", "ls", "--json"))
        if row["id"] == approval_id
    )
    assert row["approvers"] == ["alice"]
    assert run(served.kernel.url, "approvals", "grant", approval_id, "--as", "alice").exit_code == 0
    assert served.wait(execution_id).output == 5


def test_a_person_at_a_terminal_is_asked(served: Running) -> None:
    execution_id = create(served, do="send")
    env = environment(REBUNO_URL=served.kernel.url)
    with on_a_terminal("exec", "watch", execution_id, "--as", "carol", env=env) as watch:
        asked = watch.read_until("Let it run?")
        assert "A mail to a person" in asked
        assert "ann@example.com" in asked
        watch.write("grant\n")
        watch.read_until("Why?")
        watch.write("known address\n")
        assert watch.wait() == 0
    assert "approval granted by carol" in watch.text
    assert "known address" in watch.text
    assert "completed" in watch.text


def test_a_person_who_may_not_decide_is_told_and_not_asked(served: Running) -> None:
    execution_id, approval_id = blocked(served, do="pay")
    env = environment(REBUNO_URL=served.kernel.url)
    with on_a_terminal("exec", "watch", execution_id, "--as", "mallory", env=env) as watch:
        assert "Let it run?" not in watch.read_until("pass --as NAME")
        served.client.deny(approval_id, decided_by="alice", rationale="not_today")
        assert watch.wait() == 1
    assert "not_today" in watch.text


def test_leaving_the_question_leaves_the_approval(served: Running) -> None:
    execution_id, approval_id = blocked(served, do="send")
    env = environment(REBUNO_URL=served.kernel.url)
    with on_a_terminal("exec", "watch", execution_id, env=env, columns=40) as watch:
        watch.read_until("Let it run?")
        watch.write("\x04")
        assert watch.wait() == 130
    assert "Traceback" not in watch.text
    assert served.client.approval(approval_id).status == "pending"
    served.client.deny(approval_id)


@pytest.mark.parametrize("option", ["--no-ask", "--json"])
def test_nobody_is_asked_who_does_not_want_to_be(served: Running, option: str) -> None:
    execution_id, approval_id = blocked(served, do="send")
    env = environment(REBUNO_URL=served.kernel.url)
    with on_a_terminal("exec", "watch", execution_id, option, env=env) as watch:
        watch.read_until(approval_id)
        served.client.grant(approval_id)
        assert watch.wait() == 0
    assert "Let it run?" not in watch.text


def test_a_terminal_without_colours_gets_none(served: Running) -> None:
    execution_id = create(served)
    env = environment(REBUNO_URL=served.kernel.url, NO_COLOR="1")
    with on_a_terminal("exec", "watch", execution_id, env=env) as watch:
        assert watch.wait() == 0
    assert "\x1b[32m" not in watch.text
    assert "completed" in watch.text


def test_a_dumb_terminal_gets_plain_lines(served: Running) -> None:
    execution_id = create(served)
    env = environment(REBUNO_URL=served.kernel.url, TERM="dumb")
    with on_a_terminal("exec", "watch", execution_id, env=env) as watch:
        assert watch.wait() == 0
    assert "\x1b" not in watch.text


def test_an_output_that_knows_only_ascii_gets_only_that(served: Running) -> None:
    execution_id = create(served, name="naïve ✔")
    env = environment(REBUNO_URL=served.kernel.url, PYTHONIOENCODING="ascii")
    with running_command("exec", "watch", execution_id, env=env) as watch:
        assert watch.wait() == 0
    assert "+ tool_call look  ran" in watch.text
    assert watch.text.isascii()


# agents and policies


def test_agents_are_added_listed_and_removed(served: Running, tmp_path: Path) -> None:
    url, file = served.kernel.url, tmp_path / "secret"
    file.write_text("from-a-file\n")
    hook = "http://127.0.0.1:9/hook"
    for number, (arguments, env) in enumerate(
        [
            (["--secret", "on-the-line"], {}),
            (["--secret-file", str(file), "--lease-timeout", "7.5"], {}),
            ([], {"REBUNO_AGENT_SECRET": "from-the-environment"}),
            (["--secret-env", "OTHER"], {"OTHER": "from-another"}),
        ]
    ):
        result = run(url, "agents", "add", f"new{number}", hook, *arguments, **env)
        assert result.exit_code == 0, result.stderr
        assert result.stdout == f"registered new{number}  {hook}\n"
    rows = {row["id"]: row for row in lines(run(url, "agents", "ls", "--json"))}
    assert rows["new1"]["lease_timeout_seconds"] == 7.5
    assert not any("secret" in row for row in rows.values())
    assert "new2" in run(url, "agents", "ls").stdout
    removed = run(url, "agents", "rm", "new0", "new1", "new2", "new3", "new0")
    assert removed.exit_code == 1
    assert removed.stdout.splitlines() == [f"removed new{n}" for n in range(4)]


@pytest.mark.parametrize("named_by", ["--secret-file", "-", "REBUNO_AGENT_SECRET_FILE"])
def test_of_an_agents_own_file_of_secrets_the_kernel_gets_the_first(
    served: Running, tmp_path: Path, named_by: str
) -> None:
    held = "\n the-new-one \nthe-old-one\n"
    (file := tmp_path / "secrets").write_text(held)
    command = ["agents", "add", "x", "http://x"]
    if named_by == "-":
        added = run(served.kernel.url, *command, "--secret-file", "-", input=held)
    elif named_by == "--secret-file":
        added = run(served.kernel.url, *command, "--secret-file", str(file))
    else:
        added = run(served.kernel.url, *command, REBUNO_AGENT_SECRET_FILE=str(file))
    assert added.exit_code == 0, added.stderr
    url = f"{served.kernel.url}/v0/executions/{served.client.create('x').id}"
    answered = [
        requests.get(
            url,
            headers={"Rebuno-Agent-Id": "x", "Rebuno-Signature": signing.sign_body(secret, b"")},
            timeout=30,
        ).status_code
        for secret in ("the-new-one", "the-old-one", "the-new-one \nthe-old-one")
    ]
    assert answered == [200, 401, 401]


@pytest.mark.parametrize("arguments", [[], ["--secret", ""], ["--secret-file", "-"]])
def test_an_agent_needs_a_secret(served: Running, arguments: list[str]) -> None:
    result = run(served.kernel.url, "agents", "add", "x", "http://x", *arguments, input="")
    assert result.exit_code == 2
    assert "the secret is missing or empty" in result.stderr


def test_the_secret_of_an_agent_is_refused_where_the_agent_would_refuse_it(
    served: Running, tmp_path: Path
) -> None:
    def added(*arguments: str, **env: str) -> Result:
        return run(served.kernel.url, "agents", "add", "x", "http://x", *arguments, **env)

    (file := tmp_path / "secrets").write_text("s\n")
    both = {"REBUNO_AGENT_SECRET": "s", "REBUNO_AGENT_SECRET_FILE": str(file)}
    assert added(**both).exit_code == 2
    assert "are both set in the environment" in added(**both).stderr
    assert added("--secret-env", "REBUNO_AGENT_SECRET", **both).exit_code == 0
    assert added("--secret-file", str(file), **both).exit_code == 0
    for text, words in ((None, "No such file"), ("\n", "has no secret in it")):
        if text is None:
            file.unlink()
        else:
            file.write_text(text)
        for result in (
            added("--secret-file", str(file)),
            added(REBUNO_AGENT_SECRET_FILE=str(file)),
        ):
            assert result.exit_code == 2
            assert words in result.stderr


def test_a_policy_is_tried_on_an_execution_and_set(tmp_path: Path) -> None:
    bundle = tmp_path / "bundle.yaml"
    with running(handle, policy=POLICY) as served:
        url, execution_id = served.kernel.url, create(served, do="forbidden")
        served.client.wait(execution_id, 60)
        bundle.write_text(POLICY)
        same = run(url, "policy", "test", str(bundle), "--execution", execution_id)
        assert same.exit_code == 0, same.stdout
        assert "rules that decided nothing: mail, pay" in same.stdout
        bundle.write_text("default_action: allow\n")
        other = run(url, "policy", "test", str(bundle), "--execution", execution_id, "--json")
        assert other.exit_code == 1
        case, summary = lines(other)
        assert case["case"]["mismatch"] == "expected the decision 'deny', got 'allow'"
        assert summary == {"summary": {"cases": 1, "mismatches": 1, "unreached_rules": []}}
        assert run(url, "policy", "set", "a1", str(bundle)).stdout == "set the policy of a1\n"
        assert served.client.agent("a1").policy_bundle == "default_action: allow\n"
        bundle.write_text("default_action: alow\n")
        warned = run(url, "policy", "set", "a1", str(bundle))
        assert warned.exit_code == 0
        assert "default_action 'alow' means deny" in warned.stderr
        bundle.write_text("rules: [{id: r}]\n")
        refused = run(url, "policy", "set", "a1", str(bundle))
        assert refused.exit_code == 1
        assert "rule 'r'" in refused.stderr
        assert served.client.agent("a1").policy_bundle == "default_action: alow\n"


def test_policies_are_tested_without_a_kernel(tmp_path: Path) -> None:
    bundle, cases = tmp_path / "bundle.yaml", tmp_path / "cases.yaml"
    bundle.write_text(POLICY)
    cases.write_text("cases: [{target: pay, expect: require_approval}]")
    result = run("", "policy", "test", str(bundle), "--cases", str(cases))
    assert result.exit_code == 0
    assert "1 case, 0 wrong" in result.stdout
    listed = run("", "policy", "test", str(bundle))
    assert "pay      require_approval  by alice; within 1 h" in listed.stdout
    cases.write_text("cases: [{target: pay, expect: allow}]")
    assert run("", "policy", "test", str(bundle), "--cases", str(cases)).exit_code == 1
    cases.write_text("cases: 7")
    assert run("", "policy", "test", str(bundle), "--cases", str(cases)).exit_code == 2
    bundle.write_text("default_action: alow")
    warned = run("", "policy", "test", str(bundle))
    assert warned.exit_code == 0
    assert "default_action 'alow' means deny" in warned.stderr
    bundle.write_text("rules: [{id: r, then: {decision: permit}}]")
    malformed = run("", "policy", "test", str(bundle))
    assert malformed.exit_code == 1
    assert malformed.stderr.startswith("Error: rule 'r': then.decision: 'permit' is not one of")


# Kernels of other generations


@pytest.mark.parametrize("generation", [GENERATION_1, GENERATION_2, GENERATION_3], ids=str)
def test_kernels_of_every_generation_are_spoken_to(generation: Generation) -> None:
    with ScriptedKernel(generation) as kernel:
        added = run(kernel.url, "agents", "add", "a1", "http://127.0.0.1:9/", "--secret", "s")
        assert added.stdout == "registered a1  http://127.0.0.1:9/\n"
        (agent,) = lines(run(kernel.url, "agents", "ls", "--json"))
        assert (agent["id"], agent["webhook_url"]) == ("a1", "http://127.0.0.1:9/")
        assert not any("secret" in name.lower() for name in agent)
        created = run(kernel.url, "exec", "create", "a1", "--input", "[1.0, 2]")
        assert created.exit_code == 0, created.stderr
        execution_id = created.stdout.strip()
        assert (
            "input: \n  [\n    1.0,\n    2\n  ]"
            in run(kernel.url, "exec", "get", execution_id).stdout
        )
        assert run(kernel.url, "exec", "ls", "-q").stdout.strip() == execution_id
        assert "dispatch.queued" in run(kernel.url, "exec", "events", execution_id).stdout
        assert run(kernel.url, "exec", "steps", execution_id).stderr == "There are no steps.\n"
        assert run(kernel.url, "approvals", "ls").stderr == "No approval is pending.\n"
        assert run(kernel.url, "exec", "cancel", execution_id).exit_code == 0
        assert run(kernel.url, "exec", "cancel", execution_id).exit_code == 1
        assert run(kernel.url, "agents", "rm", "a1").exit_code == 0


# Errors


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["exec", "get", NOBODY], 1, "(not_found, HTTP 404)"),
        (["exec", "get", "nonsense"], 1, "(validation_error, HTTP 400)"),
        (["exec", "get", ""], 2, "'' is not an id"),
        (["exec", "get", ".."], 2, "'..' is not an id"),
        (["exec", "create", "nobody"], 1, "(not_found, HTTP 404)"),
        (["exec", "watch", NOBODY], 1, "(not_found, HTTP 404)"),
        (["exec", "ls", "--status", "odd"], 2, "'odd' is not one of"),
        (["exec", "paint"], 2, "No such command 'paint'"),
        (["exec", "cancel"], 2, "Missing argument"),
        (["approvals", "show", NOBODY], 1, "(not_found, HTTP 404)"),
        (["policy", "set", "a1", "nowhere.yaml"], 2, "cannot read nowhere.yaml"),
        (["--url", "ftp://x", "exec", "ls"], 2, "is not a kernel URL"),
        (["--timeout", "0", "exec", "ls"], 2, "0.0 is not in the range"),
        (["exec", "get", "half\udc80"], 2, "is not UTF-8"),
    ],
)
def test_expected_errors_are_a_line_and_a_code(
    served: Running, arguments: list[str], code: int, message: str
) -> None:
    result = run(served.kernel.url, *arguments)
    assert result.exit_code == code
    assert message in result.stderr
    assert "Traceback" not in result.stderr
    assert result.stdout == ""
    if code == 1:
        assert result.stderr.startswith("Error: ")
        assert result.stderr.count("\n") == 1


def test_without_a_kernel_to_speak_to() -> None:
    nowhere = run("", "exec", "ls")
    assert nowhere.exit_code == 2
    assert nowhere.stderr == "Error: which kernel? Pass --url, or set REBUNO_URL.\n"


def test_an_unreachable_kernel_is_code_3(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Client, "_call", functools.partialmethod(Client._call, patience=0.0))
    result = run(f"http://127.0.0.1:{free_port()}", "exec", "ls")
    assert result.exit_code == 3
    assert "could not be reached" in result.stderr
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("status", "body", "code"),
    [
        ("502 Bad Gateway", b"<html>no</html>", 3),
        ("500 Oops", b"", 1),
        ("200 OK", b"<html>a portal</html>", 3),
        ("200 OK", b'["no", "executions"]', 3),
        ("302 Found", b"", 1),
    ],
)
def test_what_is_no_kernel_is_no_trace(
    status: str, body: bytes, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tests.scripted import served as serving

    monkeypatch.setattr(Client, "_call", functools.partialmethod(Client._call, patience=0.0))

    def app(environ: Any, start_response: Any) -> list[bytes]:
        start_response(status, [("Content-Type", "text/html"), ("Location", "/login")])
        return [body]

    with serving(app) as url:
        result = run(url, "exec", "get", NOBODY)
    assert result.exit_code == code, result.stderr
    assert result.stderr.startswith("Error: ")
    assert result.stderr.count("\n") == 1


def test_options_may_stand_before_or_after_the_command(served: Running) -> None:
    url, execution_id = served.kernel.url, create(served)
    for arguments in (
        ["--url", url, "--json", "exec", "get", execution_id],
        ["exec", "--url", url, "--json", "get", execution_id],
        ["exec", "get", execution_id, "--url", url, "--json"],
    ):
        (data,) = lines(run("http://127.0.0.1:9", *arguments))
        assert data["id"] == execution_id


def test_a_token_is_sent_and_its_absence_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    with EmbeddedKernel(bearer_token="sesame") as kernel:
        refused = run(kernel.url, "agents", "ls")
        assert refused.exit_code == 1
        assert "HTTP 401" in refused.stderr
        for arguments, env in (
            (["--api-key", "sesame", "agents", "ls"], {}),
            (["agents", "ls"], {"REBUNO_API_KEY": "sesame"}),
        ):
            found = run(kernel.url, *arguments, **env)
            assert (found.exit_code, found.stderr) == (0, "No agent is registered.\n")


def test_a_reader_that_goes_away_gets_no_trace(served: Running) -> None:
    execution_id = create(served)
    served.client.wait(execution_id, 60)
    env = environment(REBUNO_URL=served.kernel.url)
    for option in ("", " --json"):
        command = " ".join(COMMAND) + f" exec events {execution_id}{option} | head -n 1"
        done = subprocess.run(
            ["bash", "-c", command], env=env, capture_output=True, text=True, timeout=60, check=True
        )
        assert done.stdout.count("\n") == 1
        assert done.stderr == ""


def test_without_the_extra_it_says_what_to_install() -> None:
    code = "import sys; sys.modules['click'] = None\nfrom rebuno_sync.cli.main import main\nmain()"
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment(), capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 2
    assert done.stderr == (
        "Error: the command line needs click, which is not installed; "
        "run: pip install 'rebuno-sync[kernel]'\n"
    )


def test_the_shell_completes_commands_and_options() -> None:
    env = environment(
        _REBUNO_SYNC_COMPLETE="bash_complete", COMP_WORDS="rebuno-sync exec w", COMP_CWORD="2"
    )
    code = "from rebuno_sync.cli.main import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=60
    )
    assert done.stdout == "plain,watch\n"


# dev


@contextlib.contextmanager
def dev(*arguments: str, **env: str) -> Iterator[Any]:
    """A development kernel in a process of its own; yields the process and its URL."""
    command = ("dev", "--listen", "127.0.0.1:0", *arguments)
    with running_command(*command, env=environment(**env)) as process:
        process.read_until("\n")
        first = process.text.splitlines()[0]
        url = json.loads(first)["kernel"]["url"] if first[0] == "{" else first.split()[1]
        yield process, url


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_dev_serves_until_it_is_told_to_stop(number: int, tmp_path: Path) -> None:
    file = tmp_path / "kernel.db"
    with dev("--db", str(file)) as (process, url):
        assert run(url, "agents", "add", "a", "http://127.0.0.1:9/", "--secret", "s").exit_code == 0
        os.kill(process.process.pid, number)
        assert process.wait() == 0
        assert process.text.splitlines()[0].endswith(f"keeps everything in {file}")
        assert process.text.splitlines()[-1] == "stopped"
    with dev("--db", str(file)) as (_, url):
        assert run(url, "agents", "ls", "--json").stdout.count("\n") == 1


def test_dev_tells_what_happens(served: Running) -> None:
    with dev() as (process, url):
        assert run(url, "agents", "add", "a", "http://127.0.0.1:9/", "--secret", "s").exit_code == 0
        execution_id = run(url, "exec", "create", "a").stdout.strip()
        process.read_until("attempt 1 could not be delivered")
        assert run(url, "exec", "cancel", execution_id).exit_code == 0
        process.read_until("cancelled")
        process.process.terminate()
        assert process.wait() == 0
    told = [line for line in process.text.splitlines() if execution_id in line]
    assert f"{execution_id}  a  created" in told[0]


def test_dev_in_json_gives_every_event() -> None:
    with dev("--json") as (process, url):
        assert run(url, "agents", "add", "a", "http://127.0.0.1:9/", "--secret", "s").exit_code == 0
        run(url, "exec", "create", "a")
        process.read_until("dispatch.failed")
        process.process.terminate()
        assert process.wait() == 0
    rows = [json.loads(line) for line in process.text.splitlines() if line.startswith("{")]
    assert list(rows[0]) == ["kernel"]
    types = [row["event"]["type"] for row in rows[1:]]
    assert types[:3] == ["execution.created", "execution.started", "dispatch.queued"]
    assert rows[1]["event"]["agent_id"] == "a"


def test_dev_that_nobody_reads_still_stops(tmp_path: Path) -> None:
    with dev("--json", "--db", str(tmp_path / "kernel.db")) as (process, url):
        with contextlib.closing(Client(url)) as client:
            client.register_agent("a", "http://127.0.0.1:9/", "s")
            for _ in range(400):
                client.create("a", "x")
        process.process.terminate()
        assert process.process.wait(60) == 0


def test_dev_takes_agents_and_policies_from_a_manifest(tmp_path: Path) -> None:
    manifest = tmp_path / "agents.yaml"
    manifest.write_text(
        "agents:\n  - {id: a, webhook_url: 'http://127.0.0.1:9/', secret: s,"
        " policy: {default_action: deny}}\n"
    )
    with dev("--config", str(manifest), "--quiet") as (_, url):
        (row,) = lines(run(url, "agents", "ls", "--json"))
        assert row["policy_bundle"] == "default_action: deny\n"


def test_dev_asks_for_the_token_it_was_given() -> None:
    with dev("--bearer-token-env", "TOKEN", TOKEN="sesame") as (_, url):
        assert run(url, "agents", "ls").exit_code == 1
        assert run(url, "agents", "ls", REBUNO_API_KEY="sesame").exit_code == 0


def test_dev_answers_under_its_own_names_alone() -> None:
    import requests

    with dev("--allow-host", "kernel.internal") as (_, url):
        for name, allowed in (("kernel.internal", True), ("127.0.0.1", True), ("evil.test", False)):
            answer = requests.get(f"{url}/v0/agents", headers={"Host": name}, timeout=30)
            assert (answer.status_code == 200) is allowed, name


def test_dev_says_what_keeps_it_from_starting(tmp_path: Path) -> None:
    file, manifest = tmp_path / "kernel.db", tmp_path / "agents.yaml"
    manifest.write_text("agents: [{id: a, webhook_url: 'http://x', secret: s, policy: {rule: 1}}]")
    other = tmp_path / "other.db"
    other.write_bytes(b"this is no database, by any means" * 100)
    with dev("--db", str(file)) as (_, url):
        taken = url.removeprefix("http://")
        for arguments, code, message in (
            (["--db", str(file)], 1, "is in use by another kernel"),
            (["--db", str(other)], 1, "cannot open"),
            (["--listen", taken], 1, "Address already in use"),
            (["--config", str(manifest)], 1, "unknown key 'rule'"),
            (["--config", str(tmp_path / "nowhere")], 2, "does not exist"),
            (["--listen", "8080"], 2, "is not HOST:PORT"),
            (["--listen", "127.0.0.1:99999"], 2, "is not HOST:PORT"),
            (["--lease-timeout", "0"], 2, "0.0 is not in the range"),
            (["--bearer-token-env", "NOT_THERE"], 2, "the variable NOT_THERE is not set"),
            (["--bearer-token", "a", "--bearer-token-env", "B"], 2, "not both"),
            (["--bearer-token", ""], 1, "bearer_token is empty"),
            (["--allow-host", "http://x/"], 1, "http://x/"),
        ):
            given = (
                arguments if "--listen" in arguments else [*arguments, "--listen", "127.0.0.1:0"]
            )
            result = run("", "dev", *given)
            assert (result.exit_code, result.stdout) == (code, ""), arguments
            assert message in result.stderr
            assert "Traceback" not in result.stderr
