"""Policies tried by request: decisions without an execution, as the command line gives them."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from rebuno_sync import Client, NotFoundError, ValidationError
from rebuno_sync.kernel import EmbeddedKernel
from tests.unit.kernel.agent_double import Caller, Webhooks
from tests.unit.kernel.test_dispatch import create

BUNDLE = """
default_action: deny
rules:
  - id: search
    when: {target: web_*, agent_id: a1}
    then: {decision: allow, rate_limit: {max_calls: 1, window: 1h}}
  - id: sums
    when: {target: pay, arguments: {amount: {regex: '^[0-9]{1,2}$'}}}
    then: {decision: allow}
  - id: large
    when: {target: pay}
    then: {decision: require_approval, reason: a lot}
  - id: models
    when: {step_kind: llm_call}
    then: {decision: allow, token_budget: {max_tokens: 1}}
  - id: never-reached
    when: {target: nothing}
    then: {decision: deny}
"""
CASES: list[dict[str, Any]] = [
    {"target": "web_search", "expect": "allow"},
    {"name": "twice", "target": "web_search", "expect": {"decision": "allow", "rule": "search"}},
    {"target": "web_search", "agent_id": "other", "expect": "deny"},
    {"target": "pay", "args": {"amount": 12}, "expect": "allow"},
    {"target": "pay", "args": {"amount": 1200}, "expect": "allow"},
    {"kind": "llm_call", "target": "gpt", "expect": {"decision": "allow", "reason": "none"}},
    {"kind": "local", "target": "anything", "expect": "allow"},
]


@pytest.fixture
def client(kernel: EmbeddedKernel) -> Iterator[Client]:
    with Client(kernel.url) as client:
        yield client


def test_decisions_mismatches_and_unreached_rules(client: Client) -> None:
    client.set_policy("a1", BUNDLE)
    tested = client.test_policy("a1", CASES)
    decided = [(row["decision"], row["rule"]) for row in tested.results]
    assert decided == [
        ("allow", "search"),
        ("allow", "search"),
        ("deny", "default"),
        ("allow", "sums"),
        ("require_approval", "large"),
        ("allow", "models"),
        ("allow", "local"),
    ]
    assert [row["mismatch"] for row in tested.results] == [
        None,
        None,
        None,
        None,
        "expected the decision 'allow', got 'require_approval'",
        "expected the reason 'none', got ''",
        None,
    ]
    assert tested.mismatches == 2
    assert tested.unreached_rules == ["never-reached"]
    assert tested.results[1] == {
        "name": "twice",
        "agent_id": "a1",
        "kind": "tool_call",
        "target": "web_search",
        "expected": "allow",
        "decision": "allow",
        "rule": "search",
        "reason": "",
        "mismatch": None,
    }


def test_the_command_line_says_the_same(client: Client, tmp_path: Path) -> None:
    (tmp_path / "bundle.yaml").write_text(BUNDLE)
    rows = [{"arguments" if k == "args" else k: v for k, v in case.items()} for case in CASES]
    (tmp_path / "cases.yaml").write_text(yaml.safe_dump({"agent_id": "a1", "cases": rows}))
    command = [sys.executable, "-m", "rebuno_sync.cli", "policy", "test", "--json"]
    done = subprocess.run(
        [*command, "bundle.yaml", "--cases", "cases.yaml"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1, done.stderr
    printed = [json.loads(line) for line in done.stdout.splitlines()]
    tested = client.test_policy("a1", CASES, bundle=BUNDLE)
    assert [row["case"] for row in printed[:-1]] == tested.results
    assert printed[-1]["summary"] == {
        "cases": len(CASES),
        "mismatches": tested.mismatches,
        "unreached_rules": tested.unreached_rules,
    }


def test_nothing_is_recorded_and_nothing_counted(
    client: Client, caller: Caller, webhooks: Webhooks
) -> None:
    client.set_policy("a1", BUNDLE)
    id = create(caller)
    lease = webhooks.next()
    before = list(client.events(id))
    for _ in range(3):
        client.test_policy("a1", [{"target": "web_search"}])
    assert list(client.steps(id)) == []
    assert len(list(client.events(id))) <= len(before) + 1, "at most the acknowledgement came"
    step = {"kind": "tool_call", "target": "web_search"}
    answer = caller.agent("POST", f"/v0/executions/{id}/steps", step, lease=lease).json()
    assert answer["decision"] == "proceed", "the one call of the rate limit was still there"


def test_a_given_bundle_decides_in_place_of_the_stored_one(client: Client) -> None:
    client.set_policy("a1", "default_action: deny")
    case = [{"target": "t"}]
    assert client.test_policy("a1", case).results[0]["decision"] == "deny"
    given = client.test_policy("a1", case, bundle="default_action: allow")
    assert given.results[0]["decision"] == "allow"
    assert client.agent("a1").policy_bundle == "default_action: deny"
    unborn = client.test_policy("not-registered-yet", case, bundle="default_action: allow")
    assert unborn.results[0]["agent_id"] == "not-registered-yet"


def test_without_a_bundle_everything_is_allowed(client: Client) -> None:
    assert client.test_policy("a1", [{"target": "t"}]).results[0]["rule"] == "permissive"
    with pytest.raises(NotFoundError, match="agent 'nobody'"):
        client.test_policy("nobody", [{"target": "t"}])


@pytest.mark.parametrize(
    ("cases", "word"),
    [
        ([], "cases must be a list with at least one case"),
        ([{}], "case 1 has no target"),
        ([{"target": "t"}, {"target": 5}], "case 2: target must be text"),
        ([{"target": "t", "arguments": {}}], "case 1: unknown key 'arguments'; known are name"),
        ([{"target": "t", "kind": "shell"}], "case 1: kind 'shell' is not tool_call"),
        ([{"name": "n", "target": "t", "expect": "maybe"}], "case 1 (n): 'maybe' is not one of"),
        ([{"target": "t", "expect": {"decision": "deny", "why": "x"}}], "expect: unknown key"),
    ],
)
def test_cases_that_will_not_do(cases: Any, word: str, client: Client) -> None:
    with pytest.raises(ValidationError) as caught:
        client.test_policy("a1", cases)
    assert word in caught.value.message


def test_bundles_and_bodies_that_will_not_do(client: Client, caller: Caller) -> None:
    with pytest.raises(ValidationError, match="invalid policy bundle: rule number 1: it has no id"):
        client.test_policy("a1", [{"target": "t"}], bundle="rules: [{then: {decision: deny}}]")
    for body in ({}, {"cases": {}}, {"cases": None}, {"cases": [], "dry": True}, [1]):
        answer = caller.client("POST", "/v0/policies/a1/test", body)
        assert (answer.status_code, answer.json()["code"]) == (400, "validation_error")


def test_a_default_action_that_is_a_slip_is_warned_about(
    client: Client, caplog: pytest.LogCaptureFixture
) -> None:
    for action in ("allow", "deny"):
        client.set_policy("a1", f"default_action: {action}")
    assert caplog.messages == []
    client.set_policy("a1", "default_action: alow")
    assert caplog.messages == [
        "the policy of agent a1: default_action 'alow' means deny, as all but allow does;"
        " write allow or deny"
    ]
    assert client.test_policy("a1", [{"target": "t"}]).results[0]["decision"] == "deny"
