"""The identity of a step, computed by the kernel alone (PROTOCOL 6)."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.conformance.driver import (
    ONCE,
    Attempt,
    Kernel,
    args_hash,
    ok,
    refused,
    step_id,
)

VECTORS = json.loads((Path(__file__).parents[1] / "vectors" / "identity.json").read_text("utf-8"))
EMPTY = args_hash(b"{}")


@pytest.fixture(scope="module")
def shared(shared_kernel: Kernel) -> Attempt:
    """One execution for all vectors; each has targets of its own."""
    return shared_kernel.agent().start()


def submit_raw(attempt: Attempt, kind: str, target: str, args: bytes) -> Any:
    head = json.dumps({"kind": kind, "target": target}, ensure_ascii=False).encode()[:-1]
    body = head + (b',"args":' + args if args else b"") + b',"idempotency":"safe_to_retry"}'
    return attempt.send("POST", "/steps", data=body)


@pytest.mark.parametrize(
    ("number", "row"), list(enumerate(VECTORS)), ids=[row["name"] for row in VECTORS]
)
def test_vector(shared: Attempt, number: int, row: dict[str, Any]) -> None:
    """6: args_hash of the exact bytes submitted, and the step id that follows."""
    target = f"{number}:{row['target']}"
    response = submit_raw(shared, row["kind"], target, bytes.fromhex(row["args_hex"]))
    if row.get("invalid"):
        refused(response, 400, "validation_error")
        return
    expected = step_id(shared.execution_id, row["kind"], target, row["args_hash"], 0)
    assert ok(response)["step_id"] == expected
    assert shared.step(expected)["args_hash"] == row["args_hash"]


def test_the_formula_of_these_tests() -> None:
    """6: the vectors hold the tests' own arithmetic, too."""
    rows = [row for row in VECTORS if not row.get("invalid")]
    assert rows
    for row in rows:
        assert args_hash(bytes.fromhex(row["canonical_hex"])) == row["args_hash"]
        fields = (row["execution_id"], row["kind"], row["target"], row["args_hash"])
        assert step_id(*fields, row["occurrence"]) == row["step_id"]


@pytest.mark.parametrize("target", ["a", "日本:tool", "5:x", "a b/c", "🌳", 'quo"te\\', "\x00"])
@pytest.mark.parametrize("kind", ["tool_call", "llm_call", "local"])
def test_every_field_counts_in_bytes_of_utf8(shared: Attempt, kind: str, target: str) -> None:
    """6: '<byte length>:' and the field, for each field."""
    expected = step_id(shared.execution_id, kind, target, EMPTY, 0)
    assert shared.decision(target, {}, kind=kind)["step_id"] == expected


def test_idempotency_is_no_part_of_the_identity(attempt: Attempt) -> None:
    """6: the five fields and no other."""
    first = attempt.proceed("t", {})
    second = attempt.proceed("t", {}, idempotency=ONCE)
    expected = [step_id(attempt.execution_id, "tool_call", "t", EMPTY, n) for n in (0, 1)]
    assert [first, second] == expected


def test_occurrence_counts_equal_submissions(attempt: Attempt) -> None:
    """6: earlier submissions of the same kind, target and args_hash in this attempt."""
    for number in range(3):
        step = attempt.ran("t", {})
        assert step == step_id(attempt.execution_id, "tool_call", "t", EMPTY, number)
        assert attempt.step(step)["occurrence"] == number
    for change in ({"kind": "local"}, {"args": {"a": 1}}, {"target": "u"}):
        call: dict[str, Any] = {"kind": "tool_call", "target": "t", "args": {}, **change}
        assert attempt.step(attempt.proceed(**call))["occurrence"] == 0


def test_occurrence_sees_through_the_writing_of_args(attempt: Attempt) -> None:
    """6: equal canonical JSON is equal args; numbers keep their text."""
    first = ok(submit_raw(attempt, "tool_call", "t", b'{"a":1,"b":2}'))["step_id"]
    second = ok(submit_raw(attempt, "tool_call", "t", b' { "b" : 2 , "a" : 1 } '))["step_id"]
    third = ok(submit_raw(attempt, "tool_call", "t", b'{"a":1.0,"b":2}'))["step_id"]
    assert [attempt.step(step)["occurrence"] for step in (first, second, third)] == [0, 1, 0]


def test_absent_args_are_null(attempt: Attempt) -> None:
    """6: absent args are null."""
    absent = ok(submit_raw(attempt, "tool_call", "t", b""))["step_id"]
    null = ok(submit_raw(attempt, "tool_call", "t", b"null"))["step_id"]
    hashed = args_hash(b"null")
    expected = [step_id(attempt.execution_id, "tool_call", "t", hashed, n) for n in (0, 1)]
    assert [absent, null] == expected


def test_occurrence_starts_again_with_each_attempt(leased: Attempt) -> None:
    """6: it starts at 0 when a dispatch is claimed."""
    steps = [leased.ran("t", {}, n) for n in range(3)]
    following = leased.lapse()
    replayed = [following.decision("t", {}) for _ in steps]
    assert [d["decision"] for d in replayed] == ["replay"] * 3
    assert [d["step_id"] for d in replayed] == steps
    assert [d["result"] for d in replayed] == [0, 1, 2]
    assert following.step(following.proceed("t", {}))["occurrence"] == 3


def test_occurrence_starts_again_with_each_dispatch(attempt: Attempt) -> None:
    """6: also when an approval brought a new dispatch."""
    attempt.agent.policy(
        "default_action: allow\n"
        "rules: [{id: ask, when: {target: ask}, then: {decision: require_approval}}]"
    )
    first, second = attempt.ran("t", {}), attempt.ran("t", {})
    approval = attempt.blocked("ask")["approval_id"]
    attempt.kernel.decide(approval, "grant", decided_by="ann")
    following = attempt.next()
    assert following.decision("t", {})["step_id"] == first
    assert following.decision("t", {})["step_id"] == second


def test_occurrence_advances_when_a_denial_was_recorded(attempt: Attempt) -> None:
    """6: it advances when the submission was recorded."""
    attempt.agent.policy("default_action: deny")
    first, second = attempt.decision("t", {}), attempt.decision("t", {})
    assert (first["decision"], second["decision"]) == ("denied", "denied")
    assert second["step_id"] == step_id(attempt.execution_id, "tool_call", "t", EMPTY, 1)


def test_occurrence_stays_when_rate_limited(attempt: Attempt) -> None:
    """6: not for rate_limited."""
    attempt.agent.policy(
        "rules: [{id: few, then: {decision: allow, rate_limit: {max_calls: 1, window: 1h}}}]"
    )
    attempt.ran("t", {})
    for _ in range(3):
        assert attempt.decision("t", {})["decision"] == "rate_limited"
    attempt.agent.policy("default_action: allow")
    assert attempt.step(attempt.proceed("t", {}))["occurrence"] == 1


def test_a_refused_submission_does_not_count(attempt: Attempt) -> None:
    """6: it advances only when the submission was recorded or replayed."""
    refused(attempt.send("POST", "/steps", data=b'{"kind":"tool_call"'), 400, "validation_error")
    body = {"kind": "tool_call", "target": "t", "args": {}}
    refused(attempt.send("POST", "/steps", body, attempt="2"), 409, "lease_superseded")
    assert attempt.step(attempt.proceed("t", {}))["occurrence"] == 0


def test_occurrence_under_concurrency(attempt: Attempt) -> None:
    """6: it is read and advanced under a lock per execution."""
    with ThreadPoolExecutor(8) as pool:
        steps = set(pool.map(lambda _: attempt.proceed("t", {}), range(24)))
    expected = {step_id(attempt.execution_id, "tool_call", "t", EMPTY, n) for n in range(24)}
    assert steps == expected
    attempt.kernel.events(attempt.execution_id)
