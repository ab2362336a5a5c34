"""The state changes, on a database in memory and a clock that is moved; no HTTP, no threads."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import orjson
import pytest

from rebuno_sync.errors import APIError, ConflictError, ForbiddenError, NotFoundError
from rebuno_sync.kernel import (
    approvals,
    deliveries,
    identity,
    leases,
    queries,
    registry,
    steps,
    transitions,
)
from rebuno_sync.kernel.clock import Clock
from rebuno_sync.kernel.deliveries import Claim
from rebuno_sync.kernel.leases import Lease
from rebuno_sync.kernel.store import Store, Transaction

T = TypeVar("T")

POLICY = """
default_action: deny
rules:
  - {id: silent-no, when: {target: no}, then: {decision: deny}}
  - {id: no, when: {target: never}, then: {decision: deny, reason: never on fridays}}
  - id: ask
    when: {target: 'ask*'}
    then: {decision: require_approval, reason: r, approval_config: {approvers: [ann], timeout: 3s}}
  - {id: anyone, when: {target: open}, then: {decision: require_approval, reason: please}}
  - id: limited
    when: {target: 'lim*'}
    then: {decision: allow, rate_limit: {max_calls: 2, window: 10s}}
  - id: patient
    when: {target: 'park*'}
    then:
      decision: allow
      rate_limit: {max_calls: 1, window: 10s, per_what: agent, max_wait: 10s}
  - {id: rest, when: {target: 't*'}, then: {decision: allow}}
"""


class World:
    """One kernel's data, and the calls of an agent ``a`` on it."""

    def __init__(self) -> None:
        self.clock = Clock(source=lambda: 1_790_000_000.25)  # it stands still until it is moved
        self.store = Store(None, self.clock)
        with self.store.write() as tx:
            for id in ("a", "b"):
                registry.register(tx, registry.NewAgent(id, "http://agent.test/", "s"))

    def do(self, change: Callable[..., T], *args: Any, **more: Any) -> T:
        with self.store.write() as tx:
            return change(tx, *args, **more)

    def policy(self, bundle: str = POLICY) -> None:
        self.do(registry.set_policy, "a", bundle)

    def create(self, agent_id: str = "a", **more: Any) -> str:
        return str(self.do(transitions.create, transitions.NewExecution(agent_id, **more))["id"])

    def claim(self) -> Claim | None:
        return self.do(deliveries.claim, (), 120.0)

    def claimed(self) -> Claim:
        claim = self.claim()
        assert claim is not None, "nothing is due"
        return claim

    def running(self, **more: Any) -> Claim:
        execution_id = self.create(**more)
        claim = self.claimed()
        assert claim.execution_id == execution_id
        return claim

    def submit(
        self,
        claim: Claim,
        target: str = "t",
        args: str = "{}",
        kind: str = "tool_call",
        idempotency: str = "safe_to_retry",
    ) -> dict[str, Any]:
        submission = steps.Submission(
            kind, target, args, identity.args_hash(args.encode()), idempotency
        )
        answer = self.do(steps.submit, "a", claim.execution_id, lease_of(claim), submission)
        return plain(answer)

    def settle(
        self, claim: Claim, step_id: str, outcome: str = "1", succeeded: bool = True
    ) -> dict[str, Any]:
        return plain(
            self.do(
                steps.settle_step,
                "a",
                claim.execution_id,
                lease_of(claim),
                step_id,
                succeeded,
                outcome,
            )
        )

    def heartbeat(self, claim: Claim) -> None:
        self.do(transitions.heartbeat, "a", claim.execution_id, lease_of(claim))

    def complete(self, claim: Claim, output: str = "null") -> None:
        self.do(transitions.complete, "a", claim.execution_id, lease_of(claim), output)

    def execution(self, execution_id: str) -> dict[str, Any]:
        return dict(self.do(queries.execution, execution_id))

    def step(self, step_id: str) -> dict[str, Any]:
        return dict(self.do(lambda tx: tx.one("SELECT * FROM steps WHERE step_id = ?", step_id)))

    def events(self, execution_id: str) -> list[tuple[str, dict[str, Any]]]:
        rows = self.do(queries.events, execution_id, 0, 1000)
        assert [row["event_seq"] for row in rows] == list(range(1, len(rows) + 1))
        return [(row["type"], json.loads(row["payload"])) for row in rows]

    def types(self, execution_id: str, after: int = 3) -> list[str]:
        """Return the event types after those of the creation."""
        return [type for type, _ in self.events(execution_id)][after:]

    def refusal(self, change: Callable[[], Any]) -> str:
        with pytest.raises(APIError) as caught:
            change()
        return caught.value.code


def lease_of(claim: Claim) -> Lease:
    return Lease(claim.dispatch_id, claim.attempt)


def plain(answer: dict[str, Any]) -> dict[str, Any]:
    return dict(json.loads(orjson.dumps(answer)))


@pytest.fixture
def world() -> Iterator[World]:
    world = World()
    yield world
    world.store.close()


# Creation


def test_creation_starts_and_queues(world: World) -> None:
    execution_id = world.create(input='{"n":1.0}')
    row = world.execution(execution_id)
    assert (row["status"], row["input"]) == ("running", '{"n":1.0}')
    assert [type for type, _ in world.events(execution_id)] == [
        "execution.created",
        "execution.started",
        "dispatch.queued",
    ]
    assert world.claimed().execution_id == execution_id
    assert world.claim() is None


def test_creation_for_nobody_is_refused_and_leaves_nothing(world: World) -> None:
    with pytest.raises(NotFoundError, match="agent 'nobody'"):
        world.create("nobody")
    with pytest.raises(NotFoundError, match="execution"):
        world.create(parent_execution_id="0192f3a4-1111-7222-8333-444455556666")
    assert world.do(queries.executions, {}, None, 10)[0] == []


def test_an_idempotency_key_gives_the_same_execution_back(world: World) -> None:
    first = world.create(idempotency_key="k", input="1")
    assert world.create(idempotency_key="k", input="2") == first
    assert world.create("b", idempotency_key="k") != first
    assert world.create(idempotency_key="other") != first
    assert world.execution(first)["input"] == "1"


# Steps


def test_an_allowed_step_proceeds_and_is_replayed_in_the_next_attempt(world: World) -> None:
    first = world.running()
    answer = world.submit(first, args='{"n":1.0}')
    assert answer["decision"] == "proceed"
    step_id = answer["step_id"]
    assert world.settle(first, step_id, '{"v":1.50}') == {"decision": "recorded"}
    assert world.step(step_id)["result"] == '{"v":1.50}'
    world.clock.advance(121)
    world.do(deliveries.reclaim)
    second = world.claimed()
    assert (second.dispatch_id, second.attempt) == (first.dispatch_id, 2)
    assert world.submit(second, args='{"n":1.0}') == {
        "decision": "replay",
        "step_id": step_id,
        "result": {"v": 1.5},
    }
    assert world.types(first.execution_id) == [
        "dispatch.acked",
        "step.proposed",
        "step.allowed",
        "step.executing",
        "step.succeeded",
        "dispatch.acked",
    ]


def test_a_failed_step_is_replayed_with_its_error(world: World) -> None:
    claim = world.running()
    step_id = world.submit(claim)["step_id"]
    world.settle(claim, step_id, '{"message":"boom"}', succeeded=False)
    again = expire_lease(world)
    assert world.submit(again) == {
        "decision": "replay",
        "step_id": step_id,
        "error": {"message": "boom"},
    }
    assert ("step.failed", {"message": "boom"}) in [
        (type, payload.get("error")) for type, payload in world.events(claim.execution_id)
    ]


def expire_lease(world: World) -> Claim:
    world.clock.advance(121)
    world.do(deliveries.reclaim)
    return world.claimed()


def test_occurrences_count_within_an_attempt(world: World) -> None:
    first = world.running()
    steps = [world.submit(first)["step_id"] for _ in range(3)]
    assert len(set(steps)) == 3
    assert [world.step(step)["occurrence"] for step in steps] == [0, 1, 2]
    other = world.submit(first, args="[]")["step_id"]
    assert world.step(other)["occurrence"] == 0
    for step in steps:
        world.settle(first, step)
    second = expire_lease(world)
    assert [world.submit(second)["step_id"] for _ in range(3)] == steps


def test_args_are_the_same_when_their_canonical_form_is(world: World) -> None:
    claim = world.running()
    a = world.submit(claim, args='{"b": 1, "a": 2}')["step_id"]
    b = world.submit(claim, args='{"a":2,"b":1}')["step_id"]
    assert world.step(a)["args_hash"] == world.step(b)["args_hash"]
    assert (world.step(a)["occurrence"], world.step(b)["occurrence"]) == (0, 1)
    assert world.step(a)["args"] == '{"b": 1, "a": 2}'


def test_an_orphan_that_is_safe_runs_again(world: World) -> None:
    step_id = world.submit(world.running())["step_id"]
    second = expire_lease(world)
    assert world.submit(second) == {"decision": "proceed", "step_id": step_id}
    assert world.settle(second, step_id) == {"decision": "recorded"}


def test_an_orphan_that_is_not_safe_is_indeterminate_and_not_retried(world: World) -> None:
    first = world.running()
    step_id = world.submit(first, idempotency="at_most_once")["step_id"]
    second = expire_lease(world)
    orphan = world.submit(second, idempotency="at_most_once")
    assert orphan["decision"] == "replay"
    assert orphan["step_id"] == step_id
    assert orphan["error"]["reason"] == "indeterminate"
    retry = world.submit(second, idempotency="at_most_once")
    assert retry["decision"] == "denied"
    assert retry["rule_id"] == "__indeterminate_retry"
    # Equal in all but the promise, or unequal: another matter.
    assert world.submit(second, args="[1]", idempotency="at_most_once")["decision"] == "proceed"
    assert world.submit(second)["decision"] == "proceed"
    # The late outcome finds it settled.
    assert world.settle(second, step_id)["error"]["reason"] == "indeterminate"


def test_an_effect_that_is_known_to_have_failed_may_be_tried_again(world: World) -> None:
    claim = world.running()
    step_id = world.submit(claim, idempotency="at_most_once")["step_id"]
    world.settle(claim, step_id, '{"reason":"indeterminate"}', succeeded=False)
    assert world.submit(claim, idempotency="at_most_once")["decision"] == "proceed"


def test_a_settled_step_keeps_its_first_outcome(world: World) -> None:
    claim = world.running()
    step_id = world.submit(claim)["step_id"]
    world.settle(claim, step_id, "1")
    assert world.settle(claim, step_id, "2") == {"decision": "replay", "result": 1}
    assert world.settle(claim, step_id, '"x"', succeeded=False) == {
        "decision": "replay",
        "result": 1,
    }


def test_only_an_executing_step_is_settled(world: World) -> None:
    world.policy()
    claim = world.running()
    step_id = world.submit(claim, "open")["step_id"]
    assert world.refusal(lambda: world.settle(claim, step_id)) == "conflict"
    with pytest.raises(NotFoundError):
        world.settle(claim, "0" * 64)


# Leases


def test_every_call_with_a_good_lease_renews_it(world: World) -> None:
    claim = world.running()
    step_id = ""

    def submit() -> None:
        nonlocal step_id
        step_id = world.submit(claim)["step_id"]

    calls: list[Callable[[], Any]] = [
        lambda: world.heartbeat(claim),
        submit,
        lambda: world.do(steps.streaming, "a", claim.execution_id, lease_of(claim), step_id),
        lambda: world.settle(claim, step_id),
        lambda: world.settle(claim, step_id),
        lambda: world.heartbeat(claim),
    ]
    for call in calls:
        world.clock.advance(100)
        world.do(deliveries.reclaim)
        call()
    world.clock.advance(119)
    world.do(deliveries.reclaim)
    world.complete(claim)


def test_a_lease_that_ran_out_is_refused(world: World) -> None:
    first = world.running()
    step_id = world.submit(first)["step_id"]
    world.clock.advance(121)
    world.do(deliveries.reclaim)
    # In the queue, no attempt begun: nothing new, but what ran may still be recorded.
    assert world.refusal(lambda: world.heartbeat(first)) == "lease_superseded"
    assert world.refusal(lambda: world.submit(first)) == "lease_superseded"
    assert world.refusal(lambda: world.complete(first)) == "lease_superseded"
    assert world.settle(first, step_id) == {"decision": "recorded"}
    second = world.claimed()
    for refused in (
        lambda: world.heartbeat(first),
        lambda: world.submit(first),
        lambda: world.settle(first, step_id),
        lambda: world.complete(first),
    ):
        assert world.refusal(refused) == "lease_superseded"
    world.complete(second)


def test_a_lease_of_another_execution_is_refused(world: World) -> None:
    mine, other = world.running(), world.running()
    mixed = dataclasses.replace(mine, dispatch_id=other.dispatch_id)
    assert world.refusal(lambda: world.heartbeat(mixed)) == "lease_superseded"
    early = dataclasses.replace(mine, attempt=2)
    assert world.refusal(lambda: world.heartbeat(early)) == "lease_superseded"


def test_another_agent_is_refused(world: World) -> None:
    claim = world.running()
    with pytest.raises(ForbiddenError):
        world.do(transitions.heartbeat, "b", claim.execution_id, lease_of(claim))
    with pytest.raises(ForbiddenError):
        world.do(transitions.fail, "b", claim.execution_id, lease_of(claim), "x")


def test_a_refused_call_changes_nothing(world: World) -> None:
    claim = world.running()
    before = world.events(claim.execution_id)
    stale = dataclasses.replace(claim, attempt=9)
    world.refusal(lambda: world.submit(stale))
    assert world.events(claim.execution_id) == before


# The end


def test_completion(world: World) -> None:
    claim = world.running()
    world.do(
        transitions.complete,
        "a",
        claim.execution_id,
        lease_of(claim),
        '{"done":true}',
        '{"turn":1}',
    )
    row = world.execution(claim.execution_id)
    assert (row["status"], row["output"], row["state"]) == (
        "completed",
        '{"done":true}',
        '{"turn":1}',
    )
    assert world.events(claim.execution_id)[-1] == (
        "execution.completed",
        {"execution_id": claim.execution_id, "status": "completed", "output": {"done": True}},
    )
    child = world.create(parent_execution_id=claim.execution_id)
    assert world.do(lambda tx: queries.previous(tx, queries.execution(tx, child))) == '{"turn":1}'


def test_failure(world: World) -> None:
    claim = world.running()
    world.do(transitions.fail, "a", claim.execution_id, lease_of(claim), "agent_error: E: x")
    assert world.execution(claim.execution_id)["failure_reason"] == "agent_error: E: x"
    assert world.events(claim.execution_id)[-1][1]["reason"] == "agent_error: E: x"


def test_after_the_end(world: World) -> None:
    claim = world.running()
    step_id = world.submit(claim)["step_id"]
    world.complete(claim)
    assert world.submit(claim) == {"decision": "execution_terminal"}
    assert world.settle(claim, step_id) == {"decision": "execution_terminal"}
    assert world.refusal(lambda: world.complete(claim)) == "execution_terminal"
    assert world.refusal(lambda: world.heartbeat(claim)) == "lease_superseded"
    with pytest.raises(ConflictError) as caught:
        world.do(transitions.cancel, claim.execution_id)
    assert caught.value.code == "execution_terminal"
    world.clock.advance(1000)
    world.do(deliveries.reclaim)
    assert world.claim() is None


def test_the_end_sweeps_up(world: World) -> None:
    world.policy()
    claim = world.running()
    world.submit(claim, "lim")
    world.complete(claim)
    for table in ("occurrences", "buckets", "parked"):
        assert world.do(lambda tx, table=table: tx.all(f"SELECT * FROM {table}")) == []


def test_cancelling_ends_what_waits_and_what_runs(world: World) -> None:
    world.policy()
    claim = world.running()
    running = world.submit(claim, "t1")["step_id"]
    waiting = world.submit(claim, "ask1")
    world.do(transitions.cancel, claim.execution_id)
    assert world.step(running)["status"] == "cancelled"
    assert world.step(waiting["step_id"])["status"] == "denied"
    approval = world.do(queries.approval, waiting["approval_id"])
    assert (approval["status"], approval["rationale"]) == ("expired", "execution_cancelled")
    assert world.types(claim.execution_id)[-4:] == [
        "execution.cancelled",
        "approval.expired",
        "step.denied",
        "step.cancelled",
    ]
    assert world.execution(claim.execution_id)["failure_reason"] == "client_cancelled"
    assert world.claim() is None


# Policy and approvals


def test_denials_tell_reason_and_rule_now_and_later(world: World) -> None:
    world.policy()
    first = world.running()
    expected = {"no": ("policy_denied", "silent-no"), "never": ("never on fridays", "no")}
    answers = {target: world.submit(first, target) for target in expected}
    for target, (reason, rule) in expected.items():
        answer = answers[target]
        assert (answer["decision"], answer["reason"], answer["rule_id"]) == ("denied", reason, rule)
    second = expire_lease(world)
    for target in expected:
        assert world.submit(second, target) == answers[target]


def test_a_granted_step_runs_in_a_new_dispatch(world: World) -> None:
    world.policy()
    first = world.running()
    parallel = world.submit(first, "t-parallel")["step_id"]
    asked = world.submit(first, "ask1")
    assert asked["decision"] == "blocked"
    assert world.execution(first.execution_id)["status"] == "blocked"
    # What still runs may end; nothing new may begin; what is known is told.
    assert world.settle(first, parallel, '"late"') == {"decision": "recorded"}
    assert world.submit(first, "t-new") == {"decision": "execution_blocked"}
    assert world.refusal(lambda: world.heartbeat(first)) == "lease_superseded"
    assert world.refusal(lambda: world.complete(first)) == "lease_superseded"
    assert world.claim() is None

    world.do(approvals.decide, asked["approval_id"], True, "ann", "fine")
    assert world.refusal(lambda: world.submit(first, "t-new")) == "lease_superseded"
    second = world.claimed()
    assert second.dispatch_id != first.dispatch_id
    assert second.attempt == 1
    assert world.submit(second, "t-parallel")["result"] == "late"
    assert world.submit(second, "ask1") == {"decision": "proceed", "step_id": asked["step_id"]}
    assert world.settle(second, asked["step_id"]) == {"decision": "recorded"}
    assert world.types(first.execution_id)[-8:] == [
        "step.succeeded",
        "approval.granted",
        "step.allowed",
        "execution.resumed",
        "dispatch.queued",
        "dispatch.acked",
        "step.executing",
        "step.succeeded",
    ]


@pytest.mark.parametrize(
    ("rationale", "reason"), [("not today", "not today"), ("", "approval_denied")]
)
def test_a_denied_step_is_seen_by_the_resumed_handler(
    world: World, rationale: str, reason: str
) -> None:
    world.policy()
    asked = world.submit(world.running(), "ask1")
    world.do(approvals.decide, asked["approval_id"], False, "ann", rationale)
    assert world.submit(world.claimed(), "ask1") == {
        "decision": "denied",
        "step_id": asked["step_id"],
        "reason": reason,
    }


def test_an_approval_expires_with_the_clock(world: World) -> None:
    world.policy()
    claim = world.running()
    asked = world.submit(claim, "ask1")
    world.clock.advance(2.9)
    world.do(approvals.expire)
    assert world.claim() is None
    world.clock.advance(0.2)
    assert (
        world.refusal(lambda: world.do(approvals.decide, asked["approval_id"], True, "ann", ""))
        == "conflict"
    )
    world.do(approvals.expire)
    assert world.submit(world.claimed(), "ask1")["reason"] == "approval_timeout"
    assert world.types(claim.execution_id)[-5:] == [
        "approval.expired",
        "step.denied",
        "execution.resumed",
        "dispatch.queued",
        "dispatch.acked",
    ]


def test_an_approval_without_a_time_out_waits(world: World) -> None:
    world.policy()
    asked = world.submit(world.running(), "open")
    world.clock.advance(10 * 365 * 86400)
    world.do(approvals.expire)
    approval = world.do(queries.approval, asked["approval_id"])
    assert (approval["status"], approval["message"]) == ("pending", "please")
    world.do(approvals.decide, asked["approval_id"], True, "", "")


def test_who_may_decide_and_how_often(world: World) -> None:
    world.policy()
    asked = world.submit(world.running(), "ask1")
    with pytest.raises(ForbiddenError, match="ann"):
        world.do(approvals.decide, asked["approval_id"], True, "bob", "")
    world.do(approvals.decide, asked["approval_id"], True, "ann", "")
    for granted in (True, False):
        assert (
            world.refusal(
                lambda granted=granted: world.do(
                    approvals.decide, asked["approval_id"], granted, "ann", ""
                )
            )
            == "conflict"
        )
    with pytest.raises(NotFoundError):
        world.do(approvals.decide, "none", True, "ann", "")


def test_a_held_attempt_learns_what_is_known_and_starts_nothing(world: World) -> None:
    world.policy()
    first = world.running()
    settled = world.submit(first, "t1")["step_id"]
    world.settle(first, settled)
    orphan = world.submit(first, "t2", idempotency="at_most_once")["step_id"]
    second = expire_lease(world)
    asked = world.submit(second, "ask1")
    assert world.submit(second, "t1")["decision"] == "replay"
    assert world.submit(second, "t2") == {"decision": "execution_blocked"}
    assert world.step(orphan)["status"] == "executing"
    # The step that waits, asked for again under the very same id.
    world.do(lambda tx: tx.run("DELETE FROM occurrences"))
    assert world.submit(second, "ask1") == asked


# Rate limits


def test_a_bucket_empties_and_refills_with_the_clock(world: World) -> None:
    world.policy()
    claim = world.running()
    assert world.submit(claim, "lim")["decision"] == "proceed"
    assert world.submit(claim, "lim2")["decision"] == "proceed"
    limited = {"decision": "rate_limited", "reason": "rate_limit_exceeded"}
    assert world.submit(claim, "lim") == limited
    # It was not counted: the same step comes through once there is a token.
    world.clock.advance(4.9)
    assert world.submit(claim, "lim") == limited
    world.clock.advance(0.1)
    answer = world.submit(claim, "lim")
    assert answer["decision"] == "proceed"
    assert world.step(answer["step_id"])["occurrence"] == 1
    assert world.submit(claim, "lim") == limited
    # It never holds more than max_calls.
    world.clock.advance(100)
    decisions = [world.submit(claim, "lim")["decision"] for _ in range(3)]
    assert decisions == ["proceed", "proceed", "rate_limited"]


def test_a_bucket_is_of_its_scope(world: World) -> None:
    world.policy()
    first, second = world.running(), world.running()
    for claim in (first, second):
        decisions = [world.submit(claim, "lim")["decision"] for _ in range(3)]
        assert decisions == ["proceed", "proceed", "rate_limited"]
    assert world.submit(first, "park")["decision"] == "proceed"
    assert world.submit(second, "park")["decision"] == "blocked"


def test_a_replay_takes_no_token(world: World) -> None:
    world.policy()
    first = world.running()
    steps = [world.submit(first, "lim")["step_id"] for _ in range(2)]
    for step in steps:
        world.settle(first, step)
    second = expire_lease(world)
    world.submit(second, "lim3")
    world.submit(second, "lim4")
    assert [world.submit(second, "lim")["step_id"] for _ in range(2)] == steps


def test_a_patient_step_parks_once(world: World) -> None:
    world.policy()
    other, claim = world.running(), world.running()
    assert world.submit(other, "park")["decision"] == "proceed"
    parked = world.submit(claim, "park")
    assert parked.keys() == {"decision", "step_id"}
    assert parked["decision"] == "blocked"
    assert world.execution(claim.execution_id)["status"] == "running"
    assert world.submit(claim, "t") == {"decision": "execution_blocked"}
    assert world.refusal(lambda: world.heartbeat(claim)) == "lease_superseded"
    world.clock.advance(9.9)
    assert world.claim() is None
    world.clock.advance(0.1)
    again = world.claimed()
    assert again.dispatch_id != claim.dispatch_id
    assert world.refusal(lambda: world.submit(claim, "t")) == "lease_superseded"
    # Somebody else was faster, and this time it does not wait.
    assert world.submit(other, "park2")["decision"] == "proceed"
    assert world.submit(again, "park") == {
        "decision": "rate_limited",
        "reason": "rate_limit_exceeded",
    }
    world.clock.advance(10)
    proceeded = world.submit(again, "park")
    assert proceeded == {"decision": "proceed", "step_id": parked["step_id"]}


@pytest.mark.parametrize(("answer", "decision"), [("allow", "proceed"), ("deny", "rate_limited")])
def test_a_limiter_that_cannot_be_asked(world: World, answer: str, decision: str) -> None:
    world.policy(
        "rules: [{id: r, then: {decision: allow, rate_limit:"
        f" {{max_calls: 1, window: 1s, on_limiter_error: {answer}}}}}}}]"
    )
    claim = world.running()
    world.do(lambda tx: tx.run("DROP TABLE buckets"))
    got = world.submit(claim)
    assert got["decision"] == decision
    if decision == "rate_limited":
        assert got["reason"] == "rate_limiter_unavailable"


# Deliveries


def test_a_delivery_is_acknowledged_once(world: World) -> None:
    claim = world.running()
    world.do(deliveries.delivered, claim)
    world.heartbeat(claim)
    world.do(deliveries.delivered, claim)
    assert world.types(claim.execution_id) == ["dispatch.acked"]
    assert world.events(claim.execution_id)[-1][1] == {
        "dispatch_id": claim.dispatch_id,
        "execution_id": claim.execution_id,
        "status": "acked",
        "attempt": 1,
    }


def test_each_attempt_is_acknowledged_once(world: World) -> None:
    world.do(deliveries.delivered, world.running())
    for _ in range(2):
        claim = expire_lease(world)
        for _ in range(3):
            world.heartbeat(claim)
            world.do(deliveries.delivered, claim)
    acked = [p["attempt"] for t, p in world.events(claim.execution_id) if t == "dispatch.acked"]
    assert acked == [1, 2, 3]


def test_an_acknowledgement_that_comes_late_says_nothing(world: World) -> None:
    completed = world.running()
    world.complete(completed)
    world.do(deliveries.delivered, completed)
    assert world.types(completed.execution_id) == ["dispatch.acked", "execution.completed"]
    world.policy()
    blocked = world.running()
    world.submit(blocked, "ask1")
    world.do(deliveries.delivered, blocked)
    assert world.types(blocked.execution_id)[-1] == "execution.blocked"
    superseded = world.running()
    world.clock.advance(121)
    world.do(deliveries.reclaim)
    world.claimed()
    world.do(deliveries.delivered, superseded)
    world.do(deliveries.undelivered, superseded, True, "answered HTTP 503")
    assert world.types(superseded.execution_id) == []


def test_failed_deliveries_back_off_and_exhaust(world: World) -> None:
    claim = world.running()
    for delay in (1, 2, 4, 8):
        world.do(deliveries.undelivered, claim, True, "answered HTTP 503")
        world.clock.advance(delay * 0.99)
        assert world.claim() is None
        world.clock.advance(delay * 0.26)
        claim = world.claimed()
    assert claim.attempt == 5
    world.do(deliveries.undelivered, claim, False, "Connection refused")
    row = world.execution(claim.execution_id)
    assert (row["status"], row["failure_reason"]) == ("failed", "dispatch_exhausted")
    assert world.types(claim.execution_id) == ["dispatch.failed"] * 5 + ["execution.failed"]
    world.clock.advance(100)
    assert world.claim() is None


def test_the_back_off_has_a_ceiling_and_some_jitter() -> None:
    for attempt, least in ((1, 1), (2, 2), (5, 16), (6, 30), (50, 30), (5000, 30)):
        delays = {deliveries.backoff(attempt) for _ in range(200)}
        assert all(least <= delay <= least * 1.25 for delay in delays)
        assert len(delays) > 1


def test_a_success_makes_failures_count_anew(world: World) -> None:
    claim = world.running()
    for _ in range(3):
        for _ in range(4):
            world.do(deliveries.undelivered, claim, True, "answered HTTP 503")
            world.clock.advance(40)
            claim = world.claimed()
        world.do(deliveries.delivered, claim)
        claim = expire_lease(world)
    assert world.execution(claim.execution_id)["status"] == "running"


def test_an_agent_at_work_is_not_disturbed_by_silence(world: World) -> None:
    claim = world.running()
    step_id = world.submit(claim)["step_id"]
    world.do(deliveries.undelivered, claim, False, "Connection refused")
    assert world.settle(claim, step_id) == {"decision": "recorded"}
    # But it may say that it gave up.
    world.do(deliveries.undelivered, claim, True, "answered HTTP 503")
    assert world.refusal(lambda: world.heartbeat(claim)) == "lease_superseded"
    assert world.types(claim.execution_id)[-1] == "dispatch.failed"


def test_a_queued_dispatch_of_an_ended_execution_is_discarded(world: World) -> None:
    execution_id = world.create()

    def end_but_for_the_queue(tx: Transaction) -> None:
        transitions.end(tx, execution_id, "failed", reason="x")
        tx.run("UPDATE dispatches SET state = 'pending'")

    world.do(end_but_for_the_queue)
    other = world.create()
    assert world.claimed().execution_id == other
    type, payload = world.events(execution_id)[-1]
    assert (type, payload["status"], payload["attempt"]) == ("dispatch.discarded", "discarded", 1)
    assert world.claim() is None


def test_busy_agents_are_passed_over(world: World) -> None:
    mine, theirs = world.create(), world.create("b")
    claim = world.do(deliveries.claim, ["a"], 120.0)
    assert claim is not None
    assert claim.execution_id == theirs
    assert world.do(deliveries.claim, ["a", "b"], 120.0) is None
    assert world.claimed().execution_id == mine


def test_what_is_due_next(world: World) -> None:
    def due() -> float | None:
        at = world.do(deliveries.next_due, ())
        return None if at is None else round(at - world.clock.now(), 1)

    assert due() is None
    world.policy()
    execution_id = world.create()
    assert due() == 0
    assert world.do(deliveries.next_due, None) is None
    assert world.do(deliveries.next_due, ["a"]) is None
    claim = world.claimed()
    assert due() == 120
    world.submit(claim, "ask1")
    assert due() == 3
    world.do(transitions.cancel, execution_id)
    assert due() is None


def test_an_agent_of_its_own_lease_time_out(world: World) -> None:
    world.do(registry.register, registry.NewAgent("a", "http://agent.test/", "s", 7.5))
    claim = world.running()
    assert claim.lease_timeout == 7.5
    world.clock.advance(7.4)
    world.do(deliveries.reclaim)
    world.heartbeat(claim)
    world.clock.advance(7.6)
    world.do(deliveries.reclaim)
    assert world.claimed().attempt == 2


# Agents of generation 1


def test_a_lease_nobody_names_is_that_of_the_newest_dispatch(world: World) -> None:
    world.policy()
    unnamed = Lease(None, None)
    claim = world.running()
    step_id = world.submit(claim, "t")["step_id"]
    asked = world.submit(claim, "ask1")

    def settle() -> dict[str, Any]:
        return plain(
            world.do(steps.settle_step, "a", claim.execution_id, unnamed, step_id, True, "1")
        )

    assert settle() == {"decision": "recorded"}
    with pytest.raises(ConflictError):
        world.do(transitions.complete, "a", claim.execution_id, unnamed, "1")
    world.do(approvals.decide, asked["approval_id"], True, "ann", "")
    world.claimed()
    world.do(transitions.heartbeat, "a", claim.execution_id, unnamed)
    world.do(transitions.complete, "a", claim.execution_id, unnamed, "1")
    world.do(transitions.heartbeat, "a", claim.execution_id, unnamed)


# Agents


def test_registering_again_keeps_policy_and_description(world: World) -> None:
    world.policy()
    world.do(registry.describe, "a", "what it does", '{"type":"object"}', None)
    world.do(registry.register, registry.NewAgent("a", "https://elsewhere.test/", "new", 5))
    row = world.do(registry.known, "a")
    assert (row["webhook_url"], row["secret"], row["lease_timeout"]) == (
        "https://elsewhere.test/",
        "new",
        5,
    )
    assert (row["policy"], row["description"]) == (POLICY, "what it does")


def test_a_bad_bundle_leaves_the_old_one(world: World) -> None:
    world.policy()
    with pytest.raises(APIError, match="invalid policy bundle"):
        world.policy("rules: [{then: {decision: allow}}]")
    assert world.do(registry.known, "a")["policy"] == POLICY


def test_what_is_queued_for_a_deleted_agent_is_not_delivered(world: World) -> None:
    execution_id = world.create()
    world.do(registry.delete, "a")
    claim = world.claimed()
    assert claim.webhook_url is None
    world.do(deliveries.undelivered, claim, False, "Connection refused")
    assert world.types(execution_id) == ["dispatch.failed"]
    with pytest.raises(NotFoundError):
        world.do(registry.delete, "a")


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"id": ""}, "id"),
        ({"id": "a/b"}, "id"),
        ({"id": ".."}, "id must not be '..'"),
        ({"id": "é"}, "id"),
        ({"id": "x" * 201}, "id"),
        ({"webhook_url": "x"}, "webhook_url"),
        ({"webhook_url": "ftp://x/"}, "webhook_url"),
        ({"webhook_url": "http://:80/"}, "webhook_url"),
        ({"webhook_url": "http://x:99999/"}, "webhook_url"),
        ({"secret": ""}, "secret"),
        ({"lease_timeout": 0}, "lease_timeout_seconds"),
        ({"lease_timeout": -1}, "lease_timeout_seconds"),
        ({"lease_timeout": float("inf")}, "lease_timeout_seconds"),
        ({"lease_timeout": float("nan")}, "lease_timeout_seconds"),
    ],
)
def test_an_agent_that_will_not_do(change: dict[str, Any], word: str) -> None:
    fields = {"id": "a", "webhook_url": "http://x/", "secret": "s", **change}
    with pytest.raises(ValueError, match=f"^{word}"):
        registry.NewAgent(**fields)


def test_a_secret_is_not_shown() -> None:
    agent = registry.NewAgent("a", "http://x/", "orchard-secret")
    claim = Claim("d", "e", "a", 1, 1.0, 2.0, "http://x/", "orchard-secret")
    assert "orchard" not in repr(agent) + repr(claim)


def test_leases_of_an_unknown_dispatch_are_named(world: World) -> None:
    claim = world.running()
    with pytest.raises(ConflictError, match="has no dispatch nothing"):
        world.do(leases.good, claim.execution_id, Lease("nothing", 1))
