"""Token budgets: as rules state them, and as they are kept."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rebuno_sync.kernel import approvals, registry, retention
from rebuno_sync.kernel import budgets as tokens
from rebuno_sync.kernel.deliveries import Claim
from rebuno_sync.kernel.policy import Bundle, BundleError
from rebuno_sync.kernel.policy_budget import TokenBudget
from rebuno_sync.kernel.store import Store
from tests.unit.kernel.test_transitions import World, expire_lease


def rule(budget: str, **more: str) -> str:
    parts = {"when": "{step_kind: llm_call}", "decision": "allow", **more}
    return (
        f"rules: [{{id: r, when: {parts['when']},"
        f" then: {{decision: {parts['decision']}, token_budget: {budget}}}}}]"
    )


def budgets(budget: str, **more: str) -> tuple[TokenBudget, ...]:
    return Bundle.parse(rule(budget, **more)).rules[0].verdict.token_budgets


def test_what_a_rule_may_state() -> None:
    assert budgets("{max_tokens: 10}") == (TokenBudget(10, "execution", None),)
    assert budgets("{max_tokens: 10, per_what: agent, window: 24h}") == (
        TokenBudget(10, "agent", 86400.0),
    )
    both = "[{max_tokens: 10}, {max_tokens: 99, per_what: global, window: 1m}]"
    assert budgets(both) == (TokenBudget(10), TokenBudget(99, "global", 60.0))
    assert budgets("{max_tokens: 1}", when="{target: 'gpt-*'}") == (TokenBudget(1),)
    assert budgets("{max_tokens: 1}", decision="require_approval") == (TokenBudget(1),)


@pytest.mark.parametrize(
    ("budget", "more", "word"),
    [
        ("{}", {}, "token_budget: it has no max_tokens; give it one, such as"),
        ("{max_tokens: 0}", {}, "token_budget.max_tokens: 0 is too small"),
        ("{max_tokens: '5'}", {}, "max_tokens: expected an integer"),
        ("{max_tokens: 9999999999999999}", {}, "max_tokens: 9999999999999999 is too large"),
        ("{max_tokens: 5, per_what: team}", {}, "per_what: 'team' is not one of execution"),
        ("{max_tokens: 5, window: 0s}", {}, "window: '0s' must be longer than 0"),
        ("{max_tokens: 5, window: day}", {}, "window: 'day' is not a duration"),
        ("{max_tokens: 5, cost: 3}", {}, "unknown key 'cost'; known are max_tokens"),
        ("7", {}, "expected keys and values, got '7'"),
        ("[]", {}, "the list is empty; give it a budget"),
        ("[{max_tokens: 1}, {max_tokens: 2}]", {}, "two budgets per execution; keep one"),
        ("{max_tokens: 5}", {"decision": "deny"}, "the rule denies"),
        ("{max_tokens: 5}", {"when": "{step_kind: local}"}, "local steps use no tokens"),
    ],
)
def test_what_it_may_not(budget: str, more: dict[str, str], word: str) -> None:
    with pytest.raises(BundleError) as caught:
        budgets(budget, **more)
    assert word in str(caught.value)
    assert str(caught.value).startswith("rule 'r': then.token_budget")
    assert "(line 1)" in str(caught.value)


def result(tokens: int) -> str:
    return json.dumps({"status": 200, "body": json.dumps({"usage": {"total_tokens": tokens}})})


@pytest.fixture
def world() -> Iterator[World]:
    world = World()
    yield world
    world.store.close()


def call(world: World, claim: Claim, tokens: int | None, number: int = 0) -> dict[str, Any]:
    """Submit an LLM call, and record what it used if it may run."""
    args = json.dumps({"number": number})
    answer = world.submit(claim, target="gpt-x", kind="llm_call", args=args)
    if answer["decision"] == "proceed" and tokens is not None:
        world.settle(claim, answer["step_id"], result(tokens))
    return answer


def test_an_execution_that_used_its_tokens_is_denied_more(world: World) -> None:
    world.policy(rule("{max_tokens: 100}"))
    claim = world.running()
    assert call(world, claim, 60, 1)["decision"] == "proceed"
    assert call(world, claim, 39, 2)["decision"] == "proceed"
    assert call(world, claim, 500, 3)["decision"] == "proceed", "it began below the limit"
    denied = call(world, claim, None, 4)
    assert denied == {
        "decision": "denied",
        "step_id": denied["step_id"],
        "reason": "execution_token_budget_exceeded",
        "rule_id": "r",
    }
    events = world.events(claim.execution_id)
    assert [type for type, _ in events][-2:] == ["step.proposed", "step.denied"]
    assert events[-1][1]["error"] == {
        "reason": "execution_token_budget_exceeded",
        "rule_id": "r",
    }
    other = world.running()
    assert call(world, other, 1)["decision"] == "proceed", "it has a budget of its own"


def test_a_denial_and_what_ran_stay_as_recorded_when_the_handler_runs_again(world: World) -> None:
    world.policy(rule("{max_tokens: 100}"))
    claim = world.running()
    first = call(world, claim, 100, 1)
    denied = call(world, claim, None, 2)
    again = expire_lease(world)
    replayed = call(world, again, 100, 1)
    assert (replayed["decision"], replayed["step_id"]) == ("replay", first["step_id"])
    assert call(world, again, None, 2) == denied
    assert used(world) == 100, "a replay uses nothing"


def used(world: World) -> int:
    with world.store.read() as tx:
        row = tx.one("SELECT sum(tokens) AS n FROM token_usage")
    assert row is not None
    return int(row["n"])


def test_an_agent_has_a_budget_over_all_its_executions_within_a_window(world: World) -> None:
    world.policy(rule("{max_tokens: 100, per_what: agent, window: 1h}"))
    assert call(world, world.running(), 60)["decision"] == "proceed"
    world.clock.advance(1800)
    assert call(world, world.running(), 40)["decision"] == "proceed"
    denied = call(world, world.running(), None)
    assert (denied["decision"], denied["reason"]) == ("denied", "agent_token_budget_exceeded")
    world.clock.advance(1801)
    assert call(world, world.running(), 60)["decision"] == "proceed", (
        "the first is over an hour old"
    )
    assert call(world, world.running(), 1)["decision"] == "denied"


def test_the_narrower_of_two_budgets_is_named(world: World) -> None:
    world.policy(rule("[{max_tokens: 50}, {max_tokens: 80, per_what: agent}]"))
    first = world.running()
    call(world, first, 50, 1)
    assert call(world, first, None, 2)["reason"] == "execution_token_budget_exceeded"
    second = world.running()
    call(world, second, 30, 1)
    assert call(world, second, None, 2)["reason"] == "agent_token_budget_exceeded"


def test_a_global_budget_is_shared_by_agents(world: World) -> None:
    bundle = rule("{max_tokens: 10, per_what: global}")
    for agent in ("a", "b"):
        world.do(registry.set_policy, agent, bundle)
    call(world, world.running(), 10)
    with world.store.write() as tx:
        verdict = Bundle.parse(bundle).decide("b", "llm_call", "gpt-x", b"{}")
        assert tokens.check(tx, verdict, "tool_call", "e", "b") is verdict
        refused = tokens.check(tx, verdict, "llm_call", "e", "b")
    assert (refused.action, refused.reason) == ("deny", "global_token_budget_exceeded")


def test_each_rule_counts_for_itself(world: World) -> None:
    world.policy(
        "rules:\n"
        "- id: dear\n"
        "  when: {target: gpt-x}\n"
        "  then: {decision: allow, token_budget: {max_tokens: 5}}\n"
        "- {id: cheap, then: {decision: allow, token_budget: {max_tokens: 5}}}\n"
    )
    claim = world.running()
    call(world, claim, 5, 1)
    assert call(world, claim, None, 2)["rule_id"] == "dear"
    assert world.submit(claim, target="gpt-mini", kind="llm_call")["decision"] == "proceed"
    assert world.submit(claim, target="tool")["decision"] == "proceed", "tools use no tokens"


def test_a_call_that_a_person_let_run_counts_for_the_rule_that_asked(world: World) -> None:
    world.policy(rule("{max_tokens: 10}", decision="require_approval"))
    claim = world.running()
    blocked = call(world, claim, None, 1)
    assert blocked["decision"] == "blocked"
    world.do(approvals.decide, blocked["approval_id"], True, "ann", "")
    again = world.claimed()
    assert call(world, again, 10, 1)["decision"] == "proceed"
    denied = call(world, again, None, 2)
    assert (denied["decision"], denied["reason"]) == ("denied", "execution_token_budget_exceeded")


def test_a_failed_call_counts_what_it_tells(world: World) -> None:
    world.policy(rule("{max_tokens: 10}"))
    claim = world.running()
    answer = call(world, claim, None, 1)
    partial = json.loads(result(10))
    error = json.dumps({"message": "broke off", "response": partial})
    world.settle(claim, answer["step_id"], error, succeeded=False)
    assert call(world, claim, None, 2)["decision"] == "denied"


def test_a_limited_call_that_tells_nothing_is_warned_of(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    world.policy(rule("{max_tokens: 10}"))
    claim = world.running()
    answer = call(world, claim, None, 1)
    with caplog.at_level(logging.WARNING):
        world.settle(claim, answer["step_id"], '{"status": 200, "body": "data: {}"}')
    assert "stream_options" in caplog.text
    caplog.clear()
    answer = call(world, claim, None, 3)
    world.settle(claim, answer["step_id"], '{"message": "refused"}', succeeded=False)
    assert caplog.text == "", "a call that failed was never going to tell"
    world.policy("default_action: allow")
    answer = call(world, claim, None, 2)
    world.settle(claim, answer["step_id"], '{"status": 200, "body": "data: {}"}')
    assert caplog.text == ""


def test_a_refused_step_takes_nothing_from_its_rate_limit(world: World) -> None:
    bundle = rule("{max_tokens: 1}").replace(
        "token_budget", "rate_limit: {max_calls: 2, window: 1h}, token_budget"
    )
    world.policy(bundle)
    claim = world.running()
    call(world, claim, 1, 1)
    for number in (2, 3, 4):
        assert call(world, claim, None, number)["decision"] == "denied"


def test_use_outlives_a_restart(tmp_path: Path) -> None:
    kept = World()
    kept.store.close()
    kept.store = Store(tmp_path / "k.sqlite3", kept.clock)
    kept.do(registry.register, registry.NewAgent("a", "http://agent.test/", "s"))
    kept.policy(rule("{max_tokens: 10}"))
    claim = kept.running()
    call(kept, claim, 10, 1)
    kept.store.close()
    kept.store = Store(tmp_path / "k.sqlite3", kept.clock)
    assert call(kept, claim, None, 2)["reason"] == "execution_token_budget_exceeded"
    kept.store.close()


def test_deleting_executions_gives_no_budget_back(world: World) -> None:
    world.policy(rule("{max_tokens: 100, per_what: agent, window: 10h}"))
    for _ in range(5):
        claim = world.running()
        call(world, claim, 20)
        world.complete(claim)
        world.clock.advance(600)
    retention.Retention(world.store, world.clock, 1).sweep()
    with world.store.read() as tx:
        assert tx.all("SELECT id FROM executions") == []
        rows = tx.all("SELECT * FROM token_usage")
    assert 1 <= len(rows) <= 2, "one for each hour"
    assert sum(row["tokens"] for row in rows) == 100
    assert call(world, world.running(), None)["reason"] == "agent_token_budget_exceeded"
    world.clock.advance(36000)
    assert call(world, world.running(), None)["decision"] == "proceed"


def test_reasons_are_stable_tokens() -> None:
    assert [TokenBudget(1, s).exceeded for s in ("execution", "agent", "global")] == [
        "execution_token_budget_exceeded",
        "agent_token_budget_exceeded",
        "global_token_budget_exceeded",
    ]
