"""Runs in which everything goes wrong, and whether their verdict sees what is wrong."""

from __future__ import annotations

import dataclasses
import io
import random
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from rebuno_sync.wire import Event, Execution, Step
from tests.faults.plan import DELIVERY, KINDS, Trouble, make_plan
from tests.faults.run import Report
from tests.faults.series import FULL, Series
from tests.faults.verdict import ORDER, faults_of

#: These have found faults, or begin with what is rarest.
FIXED = 1_000
EACH = 6


@pytest.mark.skipif(sys.platform != "linux", reason="it looks at /proc and limits other processes")
def test_a_dozen_runs(tmp_path: Path) -> None:
    drawn = random.randrange(10**6)
    print(f"REBUNO_SEED={FIXED} and REBUNO_SEED={drawn}, {EACH} runs each")
    for seed in (FIXED, drawn):
        series = Series(seed, EACH, keep=Path(".faults"))
        reports = [done.report for done in series.go(jobs=2)]
        assert series.failures() == []
        assert sum(sum(r.happened.values()) for r in reports) >= EACH, "nothing went wrong"
        assert all(r.attempts >= 2 for r in reports)


def test_a_seed_makes_the_same_plan_again() -> None:
    assert [make_plan(n) for n in range(200)] == [make_plan(n) for n in range(200)]


def test_a_full_series_plans_every_kind() -> None:
    for first in random.sample(range(10**6), 5):
        planned = {i.kind for n in range(first, first + FULL) for i in make_plan(n).incidents}
        assert planned == set(KINDS), first


def test_no_plan_loses_deliveries_enough_to_end_an_execution() -> None:
    for seed in range(2_000):
        incidents = make_plan(seed).incidents
        lost = [
            i for i in incidents if DELIVERY in i.kind.where or i.kind.what is Trouble.AGENT_REFUSES
        ]
        assert len(lost) <= 2, seed
        spoiled = Counter((i.kind.where, i.call, i.at) for i in incidents)
        assert all(n == 1 for (where, _, _), n in spoiled.items() if where != "process"), seed


def test_a_series_counts_and_tells_how_to_do_it_again() -> None:
    series = Series(7, 2, keep=Path("nowhere"))
    clean, failed = make_plan(7), make_plan(8)
    series.reports = [
        Report(clean, Counter({str(KINDS[0]): 2}), 3, 1, 4.0, []),
        Report(failed, Counter({str(KINDS[0]): 1, str(KINDS[1]): 1}), 2, 0, 4.0, ["it is stuck"]),
    ]
    assert series.failures() == ["it is stuck\n  again: REBUNO_SEED=8 REBUNO_RUNS=1 make faults"]
    told = io.StringIO()
    series.show(Console(file=told, width=120))
    rows = [row.strip("│ \n").split("│") for row in told.getvalue().splitlines() if "│" in row]
    figures = {row[0].strip(): [int(cell) for cell in row[1:]] for row in rows}
    assert figures[str(KINDS[0])] == [3, 2, 1, 1]
    assert figures[str(KINDS[1])] == [1, 1, 0, 1]
    assert figures["all"] == [4, 2, 1, 1]


def test_a_full_series_without_some_fault_has_failed() -> None:
    series = Series(0, FULL, keep=Path("nowhere"))
    everything = Counter(map(str, KINDS))
    series.reports = [Report(make_plan(0), everything, 2, 0, 4.0, [])]
    assert series.failures() == []
    del everything[str(KINDS[3])]
    assert series.failures() == [f"never happened: {KINDS[3]}"]


# The verdict


@dataclasses.dataclass
class Case:
    """What a run left behind: at first a good execution with one unknown and one asked effect."""

    execution: Execution
    events: list[Event]
    steps: list[Step]
    effects: dict[tuple[str, str], list[str]]

    def faults(self) -> list[str]:
        return faults_of(self.execution, self.events, self.steps, self.effects)

    def step(self, target: str, number: int) -> int:
        return next(
            i
            for i, s in enumerate(self.steps)
            if s.target == target
            and (s.occurrence if target == "turn" else s.args.get("number")) == number
        )

    def change(self, at: int, **fields: Any) -> None:
        self.steps[at] = dataclasses.replace(self.steps[at], **fields)

    def renumber(self) -> None:
        self.events = [dataclasses.replace(e, event_seq=n) for n, e in enumerate(self.events, 1)]


NOW = "2026-01-01T00:00:00Z"
UNKNOWN_ERROR = {"reason": "indeterminate", "message": "nobody knows"}


@pytest.fixture
def case() -> Case:
    events: list[Event] = []
    steps: list[Step] = []
    effects: dict[tuple[str, str], list[str]] = {}
    output: list[str] = []

    def add(type: str, **payload: Any) -> None:
        events.append(Event(len(events) + 1, type, "e1", payload, NOW))

    def take(target: str, args: Any, occurrence: int, name: str, lost: bool) -> str:
        step_id, value = f"{target} {args} {occurrence}", f"value of {name}"
        at_most_once = target in ("pay", "send")
        for event in ("proposed", "allowed", "executing"):
            add(f"step.{event}", step_id=step_id)
        if lost:
            add("dispatch.acked", attempt=2)
        add("step.failed" if lost else "step.succeeded", step_id=step_id)
        steps.append(
            Step(
                step_id,
                "tool_call",
                target,
                "failed" if lost else "succeeded",
                occurrence=occurrence,
                idempotency="at_most_once" if at_most_once else "safe_to_retry",
                args=args,
                result=None if lost else value,
                error=UNKNOWN_ERROR if lost else None,
            )
        )
        effects["e1", name] = [value]
        return value

    for event in ("execution.created", "execution.started", "dispatch.queued"):
        add(event)
    add("dispatch.acked", attempt=1)
    for target, number in ORDER:
        if target == "turn":
            output.append(take("turn", {}, number, "turn", lost=False))
            effects["e1", "turn"] = [f"value of turn {n}" for n in range(5)] + [output[-1]]
            continue
        lost = (target, number) == ("pay", 4)
        value = take(target, {"number": number}, 0, f"{target}-{number}", lost)
        output.append("unknown" if lost else value)
    add("execution.completed")
    return Case(Execution("e1", "thirty", "completed", output=output), events, steps, effects)


def asked(case: Case) -> None:
    """Make the first ``send`` one whose outcome was unknown, and that was asked for."""
    at = case.step("send", 3)
    sent = case.steps[at]
    case.change(at, status="failed", result=None, error=UNKNOWN_ERROR)
    place = next(
        i
        for i, e in enumerate(case.events)
        if e.type == "step.succeeded" and e.payload["step_id"] == sent.step_id
    )
    case.events[place] = dataclasses.replace(case.events[place], type="step.failed")
    case.events.insert(place, Event(0, "dispatch.acked", "e1", {"attempt": 2}, NOW))
    # One more attempt comes before the one that the other unknown effect tells of.
    for i in range(place + 1, len(case.events)):
        if case.events[i].type == "dispatch.acked":
            case.events[i] = dataclasses.replace(case.events[i], payload={"attempt": 3})
    question = Step(
        "q", "local", "send.reconcile", "succeeded", args={"step_id": sent.step_id}, result="yes"
    )
    case.steps.append(question)
    last = case.events.pop()
    for event in ("proposed", "allowed", "executing", "succeeded"):
        case.events.append(Event(0, f"step.{event}", "e1", {"step_id": "q"}, NOW))
    case.events.append(last)
    case.effects["e1", "ask-3"] = ["yes"]
    case.execution.output[3] = "yes"
    case.renumber()


def test_a_good_run_is_good(case: Case) -> None:
    assert case.faults() == []
    asked(case)
    assert case.faults() == []


def stuck(case: Case) -> None:
    case.execution = dataclasses.replace(case.execution, status="running", output=None)


def failed(case: Case) -> None:
    case.execution = dataclasses.replace(
        case.execution, status="failed", output=None, failure_reason="dispatch_exhausted"
    )


def gap(case: Case) -> None:
    del case.events[20]


def out_of_order(case: Case) -> None:
    case.events[4], case.events[5] = case.events[5], case.events[4]
    case.renumber()


def back_in_time(case: Case) -> None:
    case.events[9] = dataclasses.replace(case.events[9], occurred_at="2025-12-31T23:50:00Z")


def recorded_twice(case: Case) -> None:
    at = next(i for i, e in enumerate(case.events) if e.type == "step.succeeded")
    case.events.insert(at, case.events[at])
    case.renumber()


def after_the_end(case: Case) -> None:
    case.events.append(case.events[3])
    case.renumber()


def old_attempt(case: Case) -> None:
    case.events.insert(-1, Event(0, "dispatch.acked", "e1", {"attempt": 1}, NOW))
    case.renumber()


def unfinished(case: Case) -> None:
    at = next(i for i, e in enumerate(case.events) if e.type == "step.succeeded")
    del case.events[at]
    case.renumber()


def paid_twice(case: Case) -> None:
    case.effects["e1", "pay-1"].append("again")


def unknown_paid_twice(case: Case) -> None:
    case.effects["e1", "pay-4"].append("again")


def wrong_output(case: Case) -> None:
    case.execution.output[0] = "another"


def not_the_recorded_effect(case: Case) -> None:
    case.effects["e1", "look-0"] = ["another"]


def known_taken_for_unknown(case: Case) -> None:
    case.execution.output[1] = "unknown"


def unknown_taken_for_known(case: Case) -> None:
    case.execution.output[4] = "value of pay-4"


def given_up_by_itself(case: Case) -> None:
    case.events = [e for e in case.events if e.payload.get("attempt") != 2]
    case.renumber()


def safe_given_up(case: Case) -> None:
    case.change(case.step("look", 0), status="failed", result=None, error=UNKNOWN_ERROR)


def step_missing(case: Case) -> None:
    del case.steps[case.step("note", 2)]


def step_twice(case: Case) -> None:
    again = dataclasses.replace(case.steps[case.step("look", 0)], step_id="x", occurrence=1)
    case.steps.append(again)


def turn_too_many(case: Case) -> None:
    again = dataclasses.replace(case.steps[case.step("turn", 4)], step_id="x", occurrence=5)
    case.steps.append(again)


def asked_in_vain(case: Case) -> None:
    asked(case)
    del case.steps[-1]


def asked_without_need(case: Case) -> None:
    case.steps.append(
        Step("q", "local", "send.reconcile", "succeeded", args={"step_id": "x"}, result="yes")
    )


@pytest.mark.parametrize(
    ("spoil", "word"),
    [
        (stuck, "stuck"),
        (failed, "dispatch_exhausted"),
        (gap, "gaps"),
        (out_of_order, "was due"),
        (back_in_time, "goes back"),
        (recorded_twice, "nothing was due"),
        (after_the_end, "ends with"),
        (old_attempt, "too late"),
        (unfinished, "no outcome"),
        (paid_twice, "happened 2 times"),
        (unknown_paid_twice, "happened 2 times"),
        (wrong_output, "the output has another"),
        (not_the_recorded_effect, "never happened"),
        (known_taken_for_unknown, "the output has unknown"),
        (unknown_taken_for_known, "the handler made value of pay-4 of it"),
        (given_up_by_itself, "given up by the attempt that began it"),
        (safe_given_up, "it may run again, and was given up"),
        (step_missing, "not the thirty"),
        (step_twice, "has 2 steps"),
        (turn_too_many, "not the thirty"),
        (asked_in_vain, "not asked once"),
        (asked_without_need, "asked about what is known"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_the_verdict_sees(case: Case, spoil: Callable[[Case], None], word: str) -> None:
    spoil(case)
    assert any(word in fault for fault in case.faults()), case.faults()
