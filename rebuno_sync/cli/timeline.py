"""From the events of an execution to the lines of its story. Pure: events in, entries out.

A step that is replayed leaves no event, since the kernel answers it from the record. So an
attempt after the first begins with what is on record by then, which is what it gets replayed.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any, Final, Literal, TypeAlias

from rebuno_sync.cli.output import compact
from rebuno_sync.cli.times import between
from rebuno_sync.wire import Event

Mark: TypeAlias = Literal[
    "attempt", "recorded", "running", "ran", "failed", "denied", "waiting", "decided", "note", "end"
]
#: Outcomes on record that are listed one by one; more of them are counted.
_LISTED: Final = 12
_WIDTH: Final = 160


@dataclasses.dataclass(frozen=True)
class Entry:
    """One line of the story.

    Attributes:
        mark: what kind of line it is.
        at: when, as the kernel wrote it.
        text: what it is about.
        detail: what happened to it, and why.
        seconds: how long it took, where that is known.
        good: whether it is an end that one hopes for.
    """

    mark: Mark
    at: str
    text: str
    detail: str = ""
    seconds: float | None = None
    good: bool = True


@dataclasses.dataclass
class StepState:
    """A step, as far as the events have told."""

    step_id: str
    kind: str
    target: str
    status: str = "proposed"
    attempt: str = ""
    started_at: str = ""
    rule_id: str = ""

    @property
    def name(self) -> str:
        """How people call it."""
        return f"{self.kind} {self.target}"


class Timeline:
    """Reads events in order and tells the story of one execution.

    Attributes:
        attempt: what the attempt that runs now is called.
        running: the steps that run now, in the order in which they began.
        steps: every step by its id.
    """

    def __init__(self) -> None:
        self.attempt = ""
        self.running: dict[str, StepState] = {}
        self.steps: dict[str, StepState] = {}
        self._created_at = ""
        self._dispatches: list[str] = []

    def feed(self, event: Event) -> Iterator[Entry]:
        """Read the next event; yields what there is to tell of it."""
        group, _, what = event.type.partition(".")
        payload = event.payload
        if group == "execution":
            yield from self._execution(what, payload, event.occurred_at)
        elif group == "dispatch":
            yield from self._dispatch(what, payload, event.occurred_at)
        elif group == "approval":
            yield from self._approval(what, payload, event.occurred_at)
        elif group == "step":
            yield from self._step(what, payload, event.occurred_at)
        else:
            yield Entry("note", event.occurred_at, event.type, compact(dict(payload), _WIDTH))

    def _execution(self, what: str, payload: Mapping[str, Any], at: str) -> Iterator[Entry]:
        if what == "created":
            self._created_at = at
        elif what == "started":
            pass
        elif what in ("blocked", "resumed"):
            if what == "resumed":
                yield Entry("note", at, "goes on")
        elif what in ("completed", "failed", "cancelled"):
            for step in self.running.values():
                yield Entry("note", at, f"{step.name} has no outcome", f"it was {step.status}")
            self.running.clear()
            detail = "" if what == "completed" else str(payload.get("reason") or "")
            if what == "completed" and "output" in payload:
                detail = compact(payload["output"], _WIDTH)
            seconds = between(self._created_at, at)
            yield Entry("end", at, what, detail, seconds, good=what == "completed")
        else:
            yield Entry("note", at, f"execution {what}", compact(dict(payload), _WIDTH))

    def _dispatch(self, what: str, payload: Mapping[str, Any], at: str) -> Iterator[Entry]:
        name = self._attempt_name(payload)
        if what == "acked":
            self.attempt = name
            yield from self._begin_attempt(at)
        elif what == "failed":
            why = str(payload.get("error") or payload.get("reason") or "")
            yield Entry("failed", at, f"{name} could not be delivered", why, good=False)
        elif what != "queued":
            yield Entry("note", at, f"dispatch {what}")

    def _attempt_name(self, payload: Mapping[str, Any]) -> str:
        """Return what to call an attempt: attempts are counted anew in each dispatch."""
        dispatch_id = str(payload.get("dispatch_id"))
        if dispatch_id not in self._dispatches:
            self._dispatches.append(dispatch_id)
        number = self._dispatches.index(dispatch_id) + 1
        attempt = f"attempt {payload.get('attempt')}"
        return attempt if number == 1 else f"dispatch {number}, {attempt}"

    def _begin_attempt(self, at: str) -> Iterator[Entry]:
        recorded = [s for s in self.steps.values() if s.status in ("succeeded", "failed", "denied")]
        detail = ""
        if recorded:
            plural = "step" if len(recorded) == 1 else "steps"
            detail = f"{len(recorded)} {plural} on record, replayed when the handler gets there"
        yield Entry("attempt", at, self.attempt, detail)
        counted = collections.Counter((s.name, s.status, s.attempt) for s in recorded)
        for number, ((name, status, attempt), times) in enumerate(counted.items()):
            if number == _LISTED and len(counted) > _LISTED + 1:
                yield Entry("recorded", at, f"and {len(counted) - number} more")
                break
            often = f" ×{times}" if times > 1 else ""
            yield Entry("recorded", at, f"{name}{often}", f"{status} in {attempt}")
        for step in self.running.values():
            yield Entry("note", at, f"{step.name} began in {step.attempt}", "no outcome yet")

    def _step(self, what: str, payload: Mapping[str, Any], at: str) -> Iterator[Entry]:
        step_id = str(payload.get("step_id") or "")
        step = self.steps.get(step_id)
        if step is None:
            kind, target = str(payload.get("step_type") or ""), str(payload.get("target") or "")
            step = self.steps[step_id] = StepState(step_id, kind, target)
        step.rule_id = str(payload.get("rule_id") or step.rule_id)
        waited = step.status == "awaiting_approval"
        step.status = what
        if what == "executing":
            again = bool(step.started_at)
            step.attempt, step.started_at = self.attempt, at
            self.running[step_id] = step
            yield Entry("running", at, step.name, "runs again" if again else "runs")
        elif what == "awaiting_approval":
            yield Entry("waiting", at, step.name, f"needs an approval, says rule {step.rule_id}")
        elif what in ("succeeded", "failed", "denied", "cancelled"):
            self.running.pop(step_id, None)
            yield self._outcome(step, what, payload, at, waited)

    def _outcome(
        self, step: StepState, what: str, payload: Mapping[str, Any], at: str, waited: bool
    ) -> Entry:
        seconds = between(step.started_at, at)
        # Where the kernel says nothing of a body that runs again, its outcome still tells.
        begun = f"begun in {step.attempt}" if step.attempt not in ("", self.attempt) else ""
        step.attempt = self.attempt
        rule = f"rule {step.rule_id}" if what == "denied" and step.rule_id and not waited else ""
        why = "; ".join(filter(None, (error_text(payload.get("error")), rule, begun)))
        if what == "succeeded":
            return Entry("ran", at, step.name, f"ran, {why}" if why else "ran", seconds)
        mark: Mark = "denied" if what == "denied" else "failed"
        return Entry(mark, at, step.name, f"{what}: {why}" if why else what, seconds, good=False)

    def _approval(self, what: str, payload: Mapping[str, Any], at: str) -> Iterator[Entry]:
        approval_id = str(payload.get("approval_id") or "")
        if what == "requested":
            yield Entry("waiting", at, f"approval {approval_id} is pending")
            return
        by = f" by {payload['decided_by']}" if payload.get("decided_by") else ""
        why = str(payload.get("rationale") or "")
        yield Entry("decided", at, f"approval {what}{by}", why, good=what == "granted")


def error_text(error: Any) -> str:
    """Return what a recorded error says, whichever SDK recorded it."""
    if isinstance(error, Mapping):
        for name in ("message", "reason"):
            text = error.get(name)
            if isinstance(text, str) and text:
                kind = error.get("type")
                return f"{kind}: {text}" if isinstance(kind, str) and kind else text
    return "" if error is None else error if isinstance(error, str) else compact(error, _WIDTH)
