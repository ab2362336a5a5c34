"""What the timeline tells: attempts and how each step went in each of them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from rebuno_sync.kernel import approvals, deliveries, page_execution, page_timeline, transitions
from rebuno_sync.kernel.deliveries import Claim
from rebuno_sync.kernel.page_execution import ENTRIES_A_PAGE, ExecutionPage
from tests.unit.kernel.test_transitions import World, lease_of


@pytest.fixture
def world() -> Iterator[World]:
    world = World()
    world.policy()
    yield world
    world.store.close()


def look(world: World, execution_id: str, page: int | None = None) -> ExecutionPage:
    return world.do(page_execution.execution_page, execution_id, page)


def told(world: World, execution_id: str) -> list[tuple[str, list[str]]]:
    """Return of each attempt how it ended, and of its entries how they went."""
    found = look(world, execution_id)
    return [
        (part.attempt.ending, [f"{e.outcome} {e.target}" for e in part.entries])
        for part in found.parts
    ]


def work(world: World, claim: Claim, target: str, **more: Any) -> str:
    answer = world.submit(claim, target, **more)
    assert answer["decision"] == "proceed", answer
    world.clock.advance(1)
    world.settle(claim, answer["step_id"])
    return str(answer["step_id"])


def crash(world: World) -> Claim:
    """Let the lease run out; return the next attempt."""
    world.clock.advance(121)
    world.do(deliveries.reclaim)
    return world.claimed()


def decide(world: World, claim: Claim, granted: bool, why: str = "") -> None:
    row = world.do(
        lambda tx: tx.one(
            "SELECT id FROM approvals WHERE execution_id = ? AND status = 'pending'",
            claim.execution_id,
        )
    )
    assert row is not None
    world.do(approvals.decide, row["id"], granted, "ann", why)


def test_an_attempt_that_completes(world: World) -> None:
    claim = world.running()
    first = work(world, claim, "t1")
    work(world, claim, "t2", kind="llm_call")
    world.complete(claim, '"done"')
    found = look(world, claim.execution_id)
    (part,) = found.parts
    assert part.attempt.tone == "good"
    assert told(world, claim.execution_id) == [("completed", ["ran t1", "ran t2"])]
    entry = part.entries[0]
    assert (entry.until or 0) - entry.at == 1
    assert part.attempt.share(entry, found.now) == (0.0, 50.0)
    assert part.attempt.share(part.entries[1], found.now) == (50.0, 50.0)
    assert found.values[first]["result"].text == "1"
    assert found.ended is not None
    assert found.queued is None


def test_a_step_is_told_where_it_ran_and_replayed_afterwards(world: World) -> None:
    first = world.running()
    step_id = work(world, first, "t1")
    world.submit(first, "t2")
    second = crash(world)
    world.submit(second, "t1")
    answer = world.submit(second, "t2")
    assert answer["decision"] == "proceed"
    assert told(world, first.execution_id) == [
        ("its lease ran out", ["ran t1", "interrupted t2"]),
        ("running", ["replayed t1", "running t2"]),
    ]
    world.settle(second, answer["step_id"])
    third = crash(world)
    world.submit(third, "t1")
    world.submit(third, "t2")
    world.complete(third)
    assert told(world, first.execution_id) == [
        ("its lease ran out", ["ran t1", "interrupted t2"]),
        ("its lease ran out", ["replayed t1", "ran t2"]),
        ("completed", ["replayed t1", "replayed t2"]),
    ]
    parts = look(world, first.execution_id).parts
    assert [entry.home for part in parts for entry in part.entries] == [None, 2, 1, None, 1, 2]
    homes = [e.step_id for part in parts for e in part.entries if e.step]
    assert homes[0] == step_id
    assert len(homes) == 2


def test_a_failure_is_told_and_replayed(world: World) -> None:
    first = world.running()
    answer = world.submit(first, "t1")
    world.settle(first, answer["step_id"], '{"type":"OSError","message":"no disk"}', False)
    second = crash(world)
    world.submit(second, "t1")
    assert told(world, first.execution_id) == [
        ("its lease ran out", ["failed t1"]),
        ("running", ["replayed t1"]),
    ]
    parts = look(world, first.execution_id).parts
    assert parts[0].entries[0].note == "no disk"
    assert parts[1].entries[0].note == "the failure"


def test_an_effect_whose_outcome_is_lost(world: World) -> None:
    first = world.running()
    world.submit(first, "t1", idempotency="at_most_once")
    second = crash(world)
    world.submit(second, "t1", idempotency="at_most_once")
    third = crash(world)
    world.submit(third, "t1", idempotency="at_most_once")
    assert told(world, first.execution_id) == [
        ("its lease ran out", ["interrupted t1"]),
        ("its lease ran out", ["failed t1"]),
        ("running", ["replayed t1"]),
    ]
    entry = look(world, first.execution_id).parts[1].entries[0]
    assert entry.step is not None
    assert "outcome unknown" in entry.note


def test_a_refusal_is_told_once(world: World) -> None:
    first = world.running()
    world.submit(first, "never")
    second = crash(world)
    world.submit(second, "never")
    assert told(world, first.execution_id) == [
        ("its lease ran out", ["denied never"]),
        ("running", ["replayed never"]),
    ]
    parts = look(world, first.execution_id).parts
    assert [e.note for part in parts for e in part.entries] == ["never on fridays", "the refusal"]


def test_an_approval_that_is_granted(world: World) -> None:
    first = world.running()
    running = world.submit(first, "t1")
    world.submit(first, "open")
    world.submit(first, "t2")
    found = look(world, first.execution_id)
    assert told(world, first.execution_id) == [
        ("waits for an approval", ["running t1", "waiting open", "held t2"])
    ]
    assert [card.row["target"] for card in found.pending] == ["open"]
    assert found.pending[0].rule_id == "anyone"
    world.settle(first, running["step_id"])
    decide(world, first, True, "fine")
    assert look(world, first.execution_id).queued is not None
    second = world.claimed()
    for target in ("t1", "open", "t2"):
        world.submit(second, target)
    assert told(world, first.execution_id) == [
        ("waited for an approval", ["ran t1", "waited open", "held t2"]),
        ("running", ["replayed t1", "running open", "running t2"]),
    ]
    waited = look(world, first.execution_id).parts[0].entries[1]
    assert waited.approval is not None
    assert waited.approval["rationale"] == "fine"
    assert waited.home == 2


def test_an_approval_that_is_denied(world: World) -> None:
    first = world.running()
    world.submit(first, "open")
    decide(world, first, False, "too late")
    second = world.claimed()
    world.submit(second, "open")
    third = crash(world)
    world.submit(third, "open")
    assert told(world, first.execution_id) == [
        ("waited for an approval", ["waited open"]),
        ("its lease ran out", ["denied open"]),
        ("running", ["replayed open"]),
    ]
    assert look(world, first.execution_id).parts[1].entries[0].note == "too late"


def test_an_approval_that_nobody_decided(world: World) -> None:
    first = world.running()
    world.submit(first, "ask1")
    world.clock.advance(4)
    assert not look(world, first.execution_id).pending[0].is_pending
    world.do(approvals.expire)
    second = world.claimed()
    world.submit(second, "ask1")
    assert told(world, first.execution_id) == [
        ("waited for an approval", ["waited ask1"]),
        ("running", ["denied ask1"]),
    ]


def test_rate_limits(world: World) -> None:
    first = world.running()
    for number in range(3):
        world.submit(first, f"lim{number}")
        world.clock.advance(0.001)
    work(world, first, "park1")
    assert world.submit(first, "park2")["decision"] == "blocked"
    assert told(world, first.execution_id) == [
        (
            "waits for a rate limit",
            ["running lim0", "running lim1", "limited lim2", "ran park1", "waiting park2"],
        )
    ]
    assert look(world, first.execution_id).queued is not None
    world.clock.advance(10)
    second = world.claimed()
    world.submit(second, "park1")
    world.submit(second, "park2")
    assert told(world, first.execution_id)[1] == ("running", ["replayed park1", "running park2"])
    assert told(world, first.execution_id)[0][1][-1] == "waited park2"


def test_cancelling(world: World) -> None:
    claim = world.running()
    world.submit(claim, "t1")
    world.submit(claim, "open")
    world.do(transitions.cancel, claim.execution_id)
    assert told(world, claim.execution_id) == [
        ("was cancelled", ["cancelled t1", "waited open"]),
    ]
    assert look(world, claim.execution_id).pending == []


def test_a_failed_execution(world: World) -> None:
    claim = world.running()
    world.submit(claim, "t1")
    world.do(transitions.fail, "a", claim.execution_id, lease_of(claim), "agent_error: x")
    assert told(world, claim.execution_id) == [("failed", ["interrupted t1"])]


def test_deliveries_that_fail(world: World) -> None:
    claim = world.running()
    assert told(world, claim.execution_id) == [("being delivered", [])]
    world.do(deliveries.undelivered, claim, True, "answered HTTP 401")
    found = look(world, claim.execution_id)
    assert found.queued is not None
    assert found.queued["available_at"] > found.now
    world.clock.advance(60)
    again = world.claimed()
    world.do(deliveries.delivered, again)
    assert told(world, claim.execution_id) == [
        ("could not be delivered: answered HTTP 401", []),
        ("running", []),
    ]
    assert look(world, claim.execution_id).parts[0].attempt.tone == "bad"


def test_a_lease_that_ran_out_waits_in_the_queue(world: World) -> None:
    claim = world.running()
    world.submit(claim, "t1")
    world.clock.advance(121)
    world.do(deliveries.reclaim)
    assert told(world, claim.execution_id) == [("its lease ran out", ["interrupted t1"])]
    assert look(world, claim.execution_id).queued is not None


def test_equal_calls_are_told_apart(world: World) -> None:
    claim = world.running()
    ids = [work(world, claim, "t1") for _ in range(3)]
    (part,) = look(world, claim.execution_id).parts
    assert [entry.step_id for entry in part.entries] == ids


def test_many_replays_in_a_row_are_folded(world: World) -> None:
    first = world.running()
    for number in range(5):
        work(world, first, f"t{number}")
    second = crash(world)
    for number in range(5):
        world.submit(second, f"t{number}")
    work(world, second, "t9")
    runs = look(world, first.execution_id).parts[1].runs
    assert [(run.is_folded, len(run.entries)) for run in runs] == [(True, 5), (False, 1)]


def test_a_long_timeline_comes_by_the_page(world: World) -> None:
    claim = world.running()
    for number in range(ENTRIES_A_PAGE + 1):
        world.submit(claim, f"t{number}")
    last = look(world, claim.execution_id)
    assert (last.page, last.pages) == (2, 2)
    assert [e.target for part in last.parts for e in part.entries] == [f"t{ENTRIES_A_PAGE}"]
    assert not last.parts[0].is_whole
    first = look(world, claim.execution_id, 1)
    assert len(first.parts[0].entries) == ENTRIES_A_PAGE
    assert set(first.values) == {entry.step_id for entry in first.parts[0].entries}
    assert first.homes[last.parts[0].entries[0].step_id] == 2
    assert look(world, claim.execution_id, 99).page == 2
    assert look(world, claim.execution_id, -1).page == 1


def test_the_version_changes_with_whatever_is_shown(world: World) -> None:
    seen = []

    def note() -> None:
        seen.append(world.do(page_execution.execution_version, claim.execution_id))

    claim = world.running()
    note()
    step_id = world.submit(claim, "t1")["step_id"]
    note()
    world.settle(claim, step_id)
    note()
    world.clock.advance(121)
    world.do(deliveries.reclaim)
    claim = world.claimed()
    note()
    world.submit(claim, "t1")  # replayed: no event tells of it
    note()
    world.clock.advance(1)
    world.do(transitions.cancel, claim.execution_id)
    note()
    assert len(set(seen)) == len(seen)
    note()
    assert seen[-1] == seen[-2]


def test_bars_stay_inside_and_can_be_seen() -> None:
    attempt = page_timeline.Attempt(1, "d", 1, began=100.0, until=110.0)
    entry = page_timeline.Entry("s", "tool_call", "t", "ran", at=109.999, until=110.0)
    assert attempt.share(entry, 200.0) == (99.0, 1.0)
    waited = page_timeline.Entry("s", "tool_call", "t", "waited", at=105.0, until=999.0)
    assert attempt.share(waited, 1000.0) == (50.0, 50.0)
