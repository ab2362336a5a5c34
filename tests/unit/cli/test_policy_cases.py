"""Cases for policies: read, judged, and taken from an execution."""

from __future__ import annotations

from typing import Any

import pytest

from rebuno_sync.cli.policy_cases import parse_cases, recorded_cases
from rebuno_sync.kernel.policy import Bundle
from rebuno_sync.kernel.policy_cases import CasesError, judge, unreached
from rebuno_sync.wire import Event, Step

BUNDLE = Bundle.parse(
    """
    default_action: deny
    rules:
      - id: search
        when: {target: web_*, agent_id: researcher}
        then: {decision: allow}
      - id: yes-only
        when: {target: answer, arguments: {text: {equals: "no"}}}
        then: {decision: deny, reason: no is no answer}
      - id: answer
        when: {target: answer}
        then: {decision: require_approval}
      - id: unused
        when: {target: never}
        then: {decision: allow}
    """
)


def test_decisions_are_held_against_expectations() -> None:
    cases = parse_cases(
        """
        agent_id: researcher
        cases:
          - {target: web_search, expect: allow}
          - {name: as a janitor, agent_id: janitor, target: web_search, expect: allow}
          - {target: answer, arguments: {text: no}, expect: {decision: deny, rule: yes-only}}
          - {target: answer, arguments: {text: yes}, expect: {decision: deny}}
          - {target: answer, expect: {decision: require_approval, rule: yes-only}}
          - {target: answer, arguments: {text: no}, expect: {decision: deny, reason: because}}
          - {kind: local, target: now, expect: {decision: allow, rule: local}}
        """
    )
    outcomes = judge(BUNDLE, cases)
    assert [outcome.mismatch for outcome in outcomes] == [
        "",
        "expected the decision 'allow', got 'deny'",
        "",
        "expected the decision 'deny', got 'require_approval'",
        "expected the rule 'yes-only', got 'answer'",
        "expected the reason 'because', got 'no is no answer'",
        "",
    ]
    assert [case.name for case in cases[:2]] == ["tool_call web_search", "as a janitor"]
    assert unreached(BUNDLE, outcomes) == ["unused"]


def test_unquoted_values_are_those_of_json() -> None:
    (case,) = parse_cases(
        """
        cases:
          - target: t
            expect: allow
            arguments:
              words: [no, on, 2026-01-01, 12:30, 0x1F, 010, 1_000, .5, "true", <<]
              numbers: [1, -2, 1.50, 1e3, -0.5E-2]
              others: [true, false, null, ~]
        """
    )
    assert case.args == (
        b'{"words":["no","on","2026-01-01","12:30","0x1F","010","1_000",".5","true","<<"],'
        b'"numbers":[1,-2,1.5,1000.0,-0.005],"others":[true,false,null,null]}'
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "the file must have keys and values"),
        ("cases: []", "at least one case"),
        ("cases: {}", "at least one case"),
        ("cases: [", "not YAML"),
        ("case: []", "unknown key 'case'; known are agent_id, cases"),
        ("cases: [1]", "case 1 must have keys and values"),
        ("cases: [{expect: allow}]", "case 1 has no target"),
        ("cases: [{target: t}]", "case 1 has no expect"),
        ("cases: [{name: n, target: t}]", "case 1 (n) has no expect"),
        ("cases: [{target: t, expect: permit}]", "'permit' is not one of allow, deny, require"),
        ("cases: [{target: t, expect: {rule: r}}]", "case 1: expect has no decision"),
        ("cases: [{target: t, expect: {decision: allow, rul: r}}]", "unknown key 'rul'"),
        ("cases: [{target: t, kind: tool, expect: allow}]", "kind 'tool' is not tool_call"),
        ("cases: [{target: 7, expect: allow}]", "target must be text; quote it"),
        ("cases: [{target: t, expect: allow, arguments: {a: 1e999}}]", "arguments.a is inf"),
        ("cases: [{target: t, expect: allow, arguments: {1: a}}]", "JSON keys are text"),
        ("cases: [{target: t, expect: allow, arguments: !!binary aGk=}]", "bytes"),
        ("cases: &c [{target: t, expect: allow, arguments: *c}]", "nested deeper"),
        ("cases: [{target: t, expect: allow, arguments: !!python/name:os.system }]", "not YAML"),
    ],
)
def test_a_malformed_file_is_refused_with_the_place(text: str, message: str) -> None:
    with pytest.raises(CasesError) as caught:
        parse_cases(text)
    assert message in str(caught.value)


def event(seq: int, type: str, step_id: str, **payload: Any) -> Event:
    return Event(seq, type, "e", {"step_id": step_id, **payload})


def test_the_steps_of_an_execution_expect_what_was_decided_then() -> None:
    steps = [
        Step(step_id, "tool_call", target, "succeeded", args={"n": 1})
        for step_id, target in (
            ("s1", "ran"),
            ("s2", "asked"),
            ("s3", "refused"),
            ("s4", "by_the_kernel"),
            ("s5", "unknown"),
        )
    ]
    events = [
        event(1, "step.proposed", "s1"),
        event(2, "step.allowed", "s1", rule_id="r"),
        event(3, "step.awaiting_approval", "s2", rule_id="r"),
        event(4, "step.allowed", "s2"),
        event(5, "step.denied", "s3", rule_id="r"),
        event(6, "step.denied", "s4", rule_id="__indeterminate_retry"),
        event(7, "execution.completed", "s5"),
    ]
    cases = recorded_cases("a", steps, events)
    assert [(case.target, case.decision, case.args) for case in cases] == [
        ("ran", "allow", b'{"n":1}'),
        ("asked", "require_approval", b'{"n":1}'),
        ("refused", "deny", b'{"n":1}'),
    ]


def test_what_a_budget_refused_is_no_case() -> None:
    step = Step("s1", "llm_call", "gpt", "denied")
    error = {"reason": "agent_token_budget_exceeded", "rule_id": "models"}
    payload = {"step_id": "s1", "rule_id": "models", "error": error}
    assert recorded_cases("a", [step], [Event(1, "step.denied", payload=payload)]) == []
    payload = {**payload, "error": {**error, "reason": "policy_denied"}}
    (case,) = recorded_cases("a", [step], [Event(1, "step.denied", payload=payload)])
    assert case.decision == "deny"
