"""What must be true after a run, whatever went wrong in it."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from rebuno_sync.wire import Event, Execution, Step
from tests.faults.plan import STEPS

UNKNOWN = "unknown"
#: The steps in the order of the output: what they do and their number.
ORDER = [
    (target, number)
    for first in range(0, 25, 5)
    for target, number in (
        ("look", first),
        ("pay", first + 1),
        ("note", first + 2),
        ("send", first + 3),
        ("pay", first + 4),
        ("turn", first // 5),
    )
]
_AT_MOST_ONCE = ("pay", "send")
_NEXT = {
    "": "step.proposed",
    "step.proposed": "step.allowed",
    "step.allowed": "step.executing",
    "step.executing": "an outcome",
}
_OUTCOMES = ("step.succeeded", "step.failed")

Effects = Mapping[tuple[str, str], Sequence[str]]


def faults_of(
    found: Execution, events: list[Event], steps: list[Step], effects: Effects
) -> list[str]:
    """Return what is wrong with an execution; nothing should be.

    Args:
        found: the execution.
        events: its log.
        steps: its steps.
        effects: the values of what happened, by execution and effect.
    """
    return [
        f"{found.id}: {fault}"
        for fault in (
            *_of_the_end(found),
            *_of_the_log(events),
            *_of_the_effects(found, effects),
            *_of_the_steps(found, events, steps, effects),
        )
    ]


def _of_the_end(found: Execution) -> list[str]:
    if not found.done:
        return [f"it is stuck: {found.status}"]
    if found.status != "completed":
        return [f"it is {found.status}: {found.failure_reason}"]
    if not isinstance(found.output, list) or len(found.output) != STEPS:
        return [f"its output is not that of {STEPS} steps: {found.output}"]
    return []


def _of_the_log(events: list[Event]) -> list[str]:
    wrong = []
    if [e.event_seq for e in events] != list(range(1, len(events) + 1)):
        wrong.append(f"its log has gaps: {[e.event_seq for e in events]}")
    wrong += [
        f"the time goes back at event {later.event_seq}"
        for earlier, later in itertools.pairwise(events)
        if later.occurred_at < earlier.occurred_at
    ]
    kinds = [e.type for e in events]
    if kinds[:3] != ["execution.created", "execution.started", "dispatch.queued"]:
        wrong.append(f"its log begins with {kinds[:3]}")
    if kinds[-1] != "execution.completed":
        wrong.append(f"its log ends with {kinds[-1]}")
    once = Counter(k for k in kinds if k.startswith("execution.") or k == "dispatch.queued")
    wrong += [f"its log has {n} {kind}" for kind, n in once.items() if n > 1]
    stands: dict[str, str] = {}
    acked, failed = 0, 0
    for event in events:
        if event.type.startswith("step."):
            step_id = event.payload["step_id"]
            expected = _NEXT.get(stands.get(step_id, ""), "nothing")
            if event.type != expected and not (
                expected == "an outcome" and event.type in _OUTCOMES
            ):
                wrong.append(f"event {event.event_seq} is {event.type}, {expected} was due")
            stands[step_id] = event.type
        elif event.type == "dispatch.acked":
            attempt = event.payload["attempt"]
            if attempt <= max(acked, failed):
                wrong.append(f"event {event.event_seq} takes attempt {attempt} too late")
            acked = attempt
        elif event.type == "dispatch.failed":
            attempt = event.payload["attempt"]
            if attempt <= failed or attempt < acked:
                wrong.append(f"event {event.event_seq} fails attempt {attempt} too late")
            failed = attempt
        elif not event.type.startswith("execution.") and event.type != "dispatch.queued":
            wrong.append(f"event {event.event_seq} is {event.type}, which has no place here")
    left = [k for k in stands.values() if k not in _OUTCOMES]
    if left:
        wrong.append(f"{len(left)} steps have no outcome in its log")
    return wrong


def _of_the_effects(found: Execution, effects: Effects) -> list[str]:
    return [
        f"{effect} happened {len(values)} times"
        for (execution_id, effect), values in effects.items()
        if execution_id == found.id and effect.startswith(_AT_MOST_ONCE) and len(values) > 1
    ]


def _of_the_steps(
    found: Execution, events: list[Event], steps: list[Step], effects: Effects
) -> list[str]:
    if found.status != "completed" or len(found.output) != STEPS:
        return []
    by_call: dict[tuple[str, int], list[Step]] = {}
    asked: dict[str, list[Step]] = {}
    for step in steps:
        if step.target == "send.reconcile":
            asked.setdefault(step.args["step_id"], []).append(step)
        else:
            number = step.occurrence if step.target == "turn" else step.args["number"]
            by_call.setdefault((step.target, number), []).append(step)
    wrong = []
    if set(by_call) != set(ORDER):
        wrong.append(f"its steps are not the thirty: {sorted(set(by_call) ^ set(ORDER))}")
    for (target, number), value in zip(ORDER, found.output, strict=True):
        name = "turn" if target == "turn" else f"{target}-{number}"
        rows = by_call.get((target, number), [])
        if len(rows) != 1:
            wrong.append(f"{name} has {len(rows)} steps")
            continue
        fault = _of_one(rows[0], value, effects.get((found.id, name), ()), events)
        if fault == UNKNOWN and target == "send":
            rows = asked.pop(rows[0].step_id, [])
            answers = effects.get((found.id, f"ask-{number}"), ())
            fault = _of_one(rows[0], value, answers, events) if len(rows) == 1 else "not asked once"
        elif fault == UNKNOWN and target == "pay":
            fault = "" if value == UNKNOWN else f"unknown, and the handler made {value} of it"
        if fault:
            wrong.append(f"{name}: {fault}")
    if asked:
        wrong.append(f"asked about what is known: {asked}")
    return wrong


def _of_one(step: Step, value: Any, happened: Sequence[str], events: list[Event]) -> str:
    """Tell what is wrong with one step; ``UNKNOWN`` when nobody can know its outcome."""
    if step.status == "succeeded":
        if step.result != value:
            return f"recorded is {step.result}, the output has {value}"
        return "" if value in happened else f"{value} never happened, only {happened}"
    reason = step.error.get("reason") if isinstance(step.error, dict) else None
    if step.status != "failed" or reason != "indeterminate":
        return f"it is {step.status}: {step.error}"
    if step.idempotency != "at_most_once":
        return "it may run again, and was given up"
    return UNKNOWN if _was_orphaned(step, events) else "given up by the attempt that began it"


def _was_orphaned(step: Step, events: list[Event]) -> bool:
    """Tell whether another attempt came between the step's beginning and its end."""
    begun = False
    for event in events:
        if event.payload.get("step_id") == step.step_id:
            if event.type == "step.failed":
                return False
            begun = event.type == "step.executing"
        elif begun and event.type == "dispatch.acked":
            return True
    return False
