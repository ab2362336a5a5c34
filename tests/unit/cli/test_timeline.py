"""From events to the story of an execution."""

from __future__ import annotations

from typing import Any

import pytest

from rebuno_sync.cli.timeline import Entry, Timeline, error_text
from rebuno_sync.wire import Event


class Log:
    """Writes events a tenth of a second apart and keeps what the timeline tells of each."""

    def __init__(self) -> None:
        self.timeline = Timeline()
        self.entries: list[Entry] = []
        self._seq = 0

    def add(self, type: str, **payload: Any) -> list[Entry]:
        self._seq += 1
        at = f"2026-11-29T10:00:{self._seq // 10:02}.{self._seq % 10}00Z"
        told = list(self.timeline.feed(Event(self._seq, type, "e", payload, at)))
        self.entries += told
        return told

    def begin(self, dispatch: str = "d1", attempt: int = 1) -> list[Entry]:
        if self._seq == 0:
            self.add("execution.created", status="pending")
            self.add("execution.started", status="running")
        self.add("dispatch.queued", dispatch_id=dispatch, attempt=0)
        return self.add("dispatch.acked", dispatch_id=dispatch, attempt=attempt)

    def step(self, what: str, step_id: str, target: str = "look", **more: Any) -> list[Entry]:
        return self.add(
            f"step.{what}", step_id=step_id, step_type="tool_call", target=target, **more
        )

    def run(self, step_id: str, target: str = "look") -> list[Entry]:
        told = []
        for what in ("proposed", "allowed", "executing", "succeeded"):
            told += self.step(what, step_id, target)
        return told


def short(entries: list[Entry]) -> list[tuple[str, str, str]]:
    return [(entry.mark, entry.text, entry.detail) for entry in entries]


def test_a_plain_run() -> None:
    log = Log()
    log.begin()
    log.run("s1")
    log.add("execution.completed", status="completed", output={"n": 1})
    assert short(log.entries) == [
        ("attempt", "attempt 1", ""),
        ("running", "tool_call look", "runs"),
        ("ran", "tool_call look", "ran"),
        ("end", "completed", '{"n":1}'),
    ]
    assert log.entries[2].seconds == pytest.approx(0.1)
    assert log.entries[3].seconds == pytest.approx(0.8)
    assert log.entries[3].good


def test_a_later_attempt_begins_with_what_is_on_record() -> None:
    log = Log()
    log.begin()
    log.run("s1")
    log.run("s2")
    log.run("s3", "send")
    log.step("executing", "s4", "slow")
    assert list(log.timeline.running) == ["s4"]
    assert short(log.begin(attempt=2)) == [
        ("attempt", "attempt 2", "3 steps on record, replayed when the handler gets there"),
        ("recorded", "tool_call look ×2", "succeeded in attempt 1"),
        ("recorded", "tool_call send", "succeeded in attempt 1"),
        ("note", "tool_call slow began in attempt 1", "no outcome yet"),
    ]


def test_an_orphan_that_ran_again_says_where_it_began() -> None:
    log = Log()
    log.begin()
    log.step("executing", "s1")
    log.begin(attempt=2)
    (entry,) = log.step("succeeded", "s1")
    assert (entry.mark, entry.detail) == ("ran", "ran, begun in attempt 1")
    log.begin(attempt=3)
    assert log.entries[-1].detail == "succeeded in attempt 2"


def test_a_kernel_that_tells_of_the_second_run_is_understood_too() -> None:
    log = Log()
    log.begin()
    log.step("executing", "s1")
    log.begin(attempt=2)
    (entry,) = log.step("executing", "s1")
    assert entry.detail == "runs again"
    (entry,) = log.step("succeeded", "s1")
    assert entry.detail == "ran"
    assert entry.seconds == pytest.approx(0.1)


def test_many_records_are_counted() -> None:
    log = Log()
    log.begin()
    for number in range(40):
        log.run(f"s{number}", f"tool{number}")
    told = log.begin(attempt=2)
    assert told[0].detail.startswith("40 steps")
    assert len(told) == 1 + 12 + 1
    assert told[-1].text == "and 28 more"


def test_an_approval_and_the_dispatch_after_it() -> None:
    log = Log()
    log.begin()
    log.step("proposed", "s1", "send")
    log.step("awaiting_approval", "s1", "send", rule_id="mail")
    log.add("approval.requested", approval_id="a1", step_id="s1", status="pending")
    log.add("execution.blocked", status="blocked")
    log.add("approval.granted", approval_id="a1", decided_by="ann", rationale="fine")
    log.step("allowed", "s1", "send")
    log.add("execution.resumed", status="running")
    log.begin("d2")
    assert short(log.entries[1:]) == [
        ("waiting", "tool_call send", "needs an approval, says rule mail"),
        ("waiting", "approval a1 is pending", ""),
        ("decided", "approval granted by ann", "fine"),
        ("note", "goes on", ""),
        ("attempt", "dispatch 2, attempt 1", ""),
    ]


@pytest.mark.parametrize("what", ["denied", "expired"])
def test_an_approval_that_was_not_granted(what: str) -> None:
    log = Log()
    log.begin()
    log.step("awaiting_approval", "s1", "send", rule_id="mail")
    (decided,) = log.add(f"approval.{what}", approval_id="a1", status=what)
    (denied,) = log.step("denied", "s1", "send", error={"reason": "approval_timeout"})
    assert (decided.text, decided.good) == (f"approval {what}", False)
    # The rule did not deny it: a person, or the time, did.
    assert short([denied]) == [("denied", "tool_call send", "denied: approval_timeout")]


def test_what_a_rule_denies_names_the_rule() -> None:
    log = Log()
    log.begin()
    (entry,) = log.step("denied", "s1", error={"reason": "never"}, rule_id="no-deletes")
    assert short([entry]) == [("denied", "tool_call look", "denied: never; rule no-deletes")]


def test_failures_of_steps_deliveries_and_executions() -> None:
    log = Log()
    log.begin()
    log.step("executing", "s1")
    (step,) = log.step("failed", "s1", error={"message": "boom", "type": "ValueError"})
    (delivery,) = log.add(
        "dispatch.failed", dispatch_id="d1", attempt=2, reason="answered HTTP 401"
    )
    (end,) = log.add("execution.failed", status="failed", reason="dispatch_exhausted")
    assert short([step, delivery, end]) == [
        ("failed", "tool_call look", "failed: ValueError: boom"),
        ("failed", "attempt 2 could not be delivered", "answered HTTP 401"),
        ("end", "failed", "dispatch_exhausted"),
    ]
    assert not any(entry.good for entry in (step, delivery, end))


def test_what_still_runs_when_an_execution_ends_is_told() -> None:
    log = Log()
    log.begin()
    log.step("executing", "s1")
    told = log.add("execution.cancelled", status="cancelled", reason="client_cancelled")
    assert short(told) == [
        ("note", "tool_call look has no outcome", "it was executing"),
        ("end", "cancelled", "client_cancelled"),
    ]
    assert not log.timeline.running


@pytest.mark.parametrize(
    ("type", "text"),
    [
        ("dispatch.discarded", "dispatch discarded"),
        ("execution.forked", "execution forked"),
        ("resource.bound", "resource.bound"),
    ],
)
def test_events_of_later_kernels_are_told_as_they_are(type: str, text: str) -> None:
    (entry,) = Log().add(type, key="k")
    assert entry.text == text


def test_a_bare_payload_tells_what_it_can() -> None:
    log = Log()
    for type in ("dispatch.acked", "step.executing", "step.failed", "approval.granted"):
        log.add(type)
    assert [entry.mark for entry in log.entries] == ["attempt", "running", "failed", "decided"]


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (None, ""),
        ("text", "text"),
        ({"message": "no", "type": "KeyError"}, "KeyError: no"),
        ({"message": "", "reason": "timeout"}, "timeout"),
        ({"code": 7}, '{"code":7}'),
        ([1], "[1]"),
    ],
)
def test_errors_of_any_sdk_are_readable(error: Any, expected: str) -> None:
    assert error_text(error) == expected
