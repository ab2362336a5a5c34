"""What each attempt of an execution did with each step. Pure: rows in, a timeline out.

The event log tells when attempts began and what became of steps; the noted submissions tell which
attempt asked for which step and was answered what. A step has one place where it is told in full,
its home: where its body ran last, else where it was refused or had to wait first.
"""

from __future__ import annotations

import dataclasses
import itertools
import sqlite3
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final, Literal, TypeAlias

import orjson

from rebuno_sync.kernel import events
from rebuno_sync.wire import TERMINAL_EXECUTION

#: The shortest bar that can still be seen, in percent.
_NARROWEST: Final = 1.0

Outcome: TypeAlias = Literal[
    "ran",
    "failed",
    "denied",
    "waiting",
    "waited",
    "running",
    "interrupted",
    "cancelled",
    "replayed",
    "limited",
    "held",
    "stopped",
]


@dataclasses.dataclass
class Entry:
    """One step in one attempt.

    Attributes:
        step_id: the step.
        kind: its kind.
        target: the name of the tool, model or local step.
        outcome: how it went in this attempt.
        at: when it was submitted, in seconds since the Unix epoch.
        until: when its body ended, or the decision on it fell.
        note: what there is to say about it in a line.
        step: the row of the step, where this is its home.
        approval: the approval that it waits or waited for here.
        home: the number of the attempt that tells the step in full, ``None`` when this one does.
    """

    step_id: str
    kind: str
    target: str
    outcome: Outcome
    at: float
    until: float | None = None
    note: str = ""
    step: sqlite3.Row | None = None
    approval: sqlite3.Row | None = None
    home: int | None = None


@dataclasses.dataclass
class Attempt:
    """One time that the handler was to run from the top.

    Attributes:
        number: counted over the whole execution, from 1.
        dispatch_id: the dispatch.
        attempt: counted within the dispatch, from 1.
        began: when the agent took it, in seconds since the Unix epoch.
        until: when it ended, where that is known.
        ending: how it ended, or that it goes on.
        tone: ``good``, ``bad``, ``waiting``, ``running`` or ``plain``.
        entries: what it submitted, in order.
    """

    number: int
    dispatch_id: str
    attempt: int
    began: float
    until: float | None = None
    ending: str = ""
    tone: str = "plain"
    entries: list[Entry] = dataclasses.field(default_factory=list)

    def share(self, entry: Entry, now: float) -> tuple[float, float]:
        """Return where in this attempt an entry began, and how long it took, in percent."""
        ends = [until for e in self.entries for until in (e.at, e.until) if until is not None]
        end = self.until or (now if self.tone == "running" else max(ends))
        span = max(end - self.began, 0.001)
        until = now if entry.outcome == "running" else entry.until
        first = min(max((entry.at - self.began) / span, 0.0), 1.0)
        last = min(((until or entry.at) - self.began) / span, 1.0)
        width = max(100 * (last - first), _NARROWEST)
        return round(min(100 * first, 100 - width), 2), round(width, 2)


@dataclasses.dataclass(frozen=True)
class Record:
    """The rows that tell of one execution.

    Attributes:
        execution: its own row.
        dispatches: in the order in which they were queued.
        deliveries: events ``dispatch.*`` and ``execution.*`` in order; of the latter only the
            types are read.
        submissions: see :func:`rebuno_sync.kernel.submissions.of_execution`.
        steps: in the order in which they were recorded.
        approvals: in the order in which they were asked for.
    """

    execution: sqlite3.Row
    dispatches: Sequence[sqlite3.Row]
    deliveries: Sequence[sqlite3.Row]
    submissions: Sequence[sqlite3.Row]
    steps: Sequence[sqlite3.Row]
    approvals: Sequence[sqlite3.Row]


def attempts(record: Record) -> list[Attempt]:
    """Return the attempts of an execution, in order, with what they submitted."""
    found = _begun(record)
    steps = {row["step_id"]: row for row in record.steps}
    approvals = {row["step_id"]: row for row in record.approvals}
    by_step: dict[str, list[tuple[Attempt, sqlite3.Row]]] = {}
    for row in record.submissions:
        attempt = found[row["dispatch_seq"], row["attempt"]]
        by_step.setdefault(row["step_id"], []).append((attempt, row))
    at_work = _at_work(record)
    for step_id, times in by_step.items():
        _tell(times, steps.get(step_id), approvals.get(step_id), at_work)
    ordered = list(found.values())
    recorded = {step_id: number for number, step_id in enumerate(steps)}
    for attempt in ordered:
        attempt.entries.sort(key=lambda e: (e.at, recorded.get(e.step_id, len(recorded))))
    _end(record, ordered)
    return ordered


def next_delivery(record: Record) -> sqlite3.Row | None:
    """Return the dispatch that waits in the queue, if there is one."""
    if record.execution["status"] in TERMINAL_EXECUTION:
        return None
    return next((row for row in record.dispatches if row["state"] == "pending"), None)


def _begun(record: Record) -> dict[tuple[int, int], Attempt]:
    """Return the attempts of which there is any trace, by dispatch and attempt, in order."""
    seqs = {row["id"]: row["seq"] for row in record.dispatches}
    ids = {row["seq"]: row["id"] for row in record.dispatches}
    began: dict[tuple[int, int], float] = {}

    def trace(seq: int, attempt: int, at: float) -> None:
        began[seq, attempt] = min(at, began.get((seq, attempt), at))

    for event in record.deliveries:
        if event["type"] in ("dispatch.acked", "dispatch.failed"):
            payload = events.read_payload(event["payload"])
            trace(seqs[payload["dispatch_id"]], payload["attempt"], event["occurred_at"])
    for row in record.submissions:
        trace(row["dispatch_seq"], row["attempt"], row["submitted_at"])
    for row in record.dispatches:
        if row["state"] == "in_flight" and (row["seq"], row["attempt"]) not in began:
            # Claimed, and on its way: the lease began with the claim.
            trace(row["seq"], row["attempt"], row["lease_deadline"] - row["lease_timeout"])
    return {
        key: Attempt(number, ids[key[0]], key[1], began[key])
        for number, key in enumerate(sorted(began), start=1)
    }


def _at_work(record: Record) -> tuple[str, int] | None:
    """Return the dispatch and attempt under which bodies may run now."""
    if record.execution["status"] in TERMINAL_EXECUTION:
        return None
    running = (r for r in record.dispatches if r["state"] in ("in_flight", "held"))
    return next(((row["id"], row["attempt"]) for row in running), None)


def _tell(
    times: Sequence[tuple[Attempt, sqlite3.Row]],
    step: sqlite3.Row | None,
    approval: sqlite3.Row | None,
    at_work: tuple[str, int] | None,
) -> None:
    """Add one step to the attempts that submitted it."""
    decisions = [row["decision"] for _, row in times]
    home = _home(decisions, step)
    settled = False
    for index, (attempt, row) in enumerate(times):
        entry = Entry(row["step_id"], row["kind"], row["target"], "held", row["submitted_at"])
        decision = row["decision"]
        if decision == "proceed":
            runs = (attempt.dispatch_id, attempt.attempt) == at_work
            _tell_body(entry, step if index == home else None, runs)
            settled = settled or entry.outcome in ("ran", "failed", "cancelled")
        elif decision in ("replay", "denied"):
            entry.outcome = "replayed" if settled else _first_told(step, decision)
            entry.note = _why(step) if entry.outcome != "replayed" else _replayed(step)
            settled = True
        elif decision == "blocked":
            goes_on = index == len(times) - 1 and at_work is not None
            _tell_waiting(entry, approval, goes_on)
        elif decision == "rate_limited":
            entry.outcome, entry.note = "limited", "over its rate limit"
        elif decision == "execution_terminal":
            entry.outcome, entry.note = "stopped", "the execution had ended"
        else:
            entry.note = "not begun: the execution waits"
        if index == home:
            entry.step = step
        elif step is not None:
            entry.home = times[home][0].number
        attempt.entries.append(entry)


def _home(decisions: Sequence[str], step: sqlite3.Row | None) -> int:
    """Return which of the answers to a step's submissions is told in full."""
    if step is not None and step["reason"] == "indeterminate" and "replay" in decisions:
        return decisions.index("replay")
    if "proceed" in decisions:
        return len(decisions) - 1 - decisions[::-1].index("proceed")
    return next((decisions.index(d) for d in ("denied", "blocked") if d in decisions), 0)


def _tell_body(entry: Entry, step: sqlite3.Row | None, runs: bool) -> None:
    """Say how a body went.

    Args:
        entry: where to say it.
        step: the row of the step, ``None`` when a later attempt ran it again.
        runs: whether it may still be running.
    """
    if step is None or (step["status"] == "executing" and not runs):
        entry.outcome, entry.note = "interrupted", "the attempt ended before the outcome was known"
    elif step["status"] == "executing":
        entry.outcome = "running"
    else:
        told: dict[str, Outcome] = {"succeeded": "ran", "cancelled": "cancelled"}
        entry.outcome = told.get(step["status"], "failed")
        entry.until = step["completed_at"]
        entry.note = _why(step) if entry.outcome == "failed" else ""


def _first_told(step: sqlite3.Row | None, decision: str) -> Outcome:
    """Return the outcome where an answer was no repetition: a refusal, or an orphan given up."""
    if decision == "denied":
        return "denied"
    return "failed" if step is not None and step["reason"] == "indeterminate" else "replayed"


def _tell_waiting(entry: Entry, approval: sqlite3.Row | None, goes_on: bool) -> None:
    if approval is None:
        entry.outcome = "waiting" if goes_on else "waited"
        entry.note = "for its rate limit to refill"
        return
    entry.approval = approval
    if approval["status"] == "pending":
        entry.outcome = "waiting"
    else:
        entry.outcome, entry.until = "waited", approval["decided_at"]


def _why(step: sqlite3.Row | None) -> str:
    """Return what an error or a refusal says."""
    if step is None:
        return ""
    error: Any = None if step["error"] is None else _decoded(step["error"])
    if isinstance(error, dict):
        error = next((error[n] for n in ("message", "reason") if isinstance(error.get(n), str)), "")
    return error if isinstance(error, str) and error else step["reason"] or ""


def _decoded(raw: str) -> Any:
    try:
        return orjson.loads(raw)
    except orjson.JSONDecodeError:  # cut, since it is long
        return raw


def _replayed(step: sqlite3.Row | None) -> str:
    told = {"failed": "the failure", "denied": "the refusal"}
    return "" if step is None else told.get(step["status"], "")


def _end(record: Record, ordered: Sequence[Attempt]) -> None:
    """Say of each attempt how it ended, or that it goes on."""
    failed = {
        (payload["dispatch_id"], payload["attempt"]): (event["occurred_at"], payload.get("reason"))
        for event, payload in _failures(record.deliveries)
    }
    states = {row["id"]: row for row in record.dispatches}
    for attempt, follower in itertools.zip_longest(ordered, ordered[1:]):
        failure = failed.get((attempt.dispatch_id, attempt.attempt))
        if failure is not None:
            attempt.until, why = failure
            attempt.ending = "could not be delivered" + (f": {why}" if why else "")
            attempt.tone = "bad"
        elif follower is not None and follower.dispatch_id == attempt.dispatch_id:
            attempt.ending, attempt.tone = "its lease ran out", "bad"
        elif follower is not None or states[attempt.dispatch_id]["state"] == "held":
            _end_waiting(attempt, is_last=follower is None)
        else:
            _end_last(record, attempt, states[attempt.dispatch_id])


def _failures(deliveries: Iterable[sqlite3.Row]) -> Iterator[tuple[sqlite3.Row, Any]]:
    for event in deliveries:
        if event["type"] == "dispatch.failed":
            yield event, events.read_payload(event["payload"])


def _end_waiting(attempt: Attempt, is_last: bool) -> None:
    waits = [e for e in attempt.entries if e.outcome in ("waiting", "waited")]
    attempt.tone = "waiting" if is_last else "plain"
    if waits:
        attempt.until = waits[0].at
    for_what = "an approval" if any(e.approval for e in waits) else "a rate limit"
    attempt.ending = f"{'waits' if is_last else 'waited'} for {for_what}"


def _end_last(record: Record, attempt: Attempt, dispatch: sqlite3.Row) -> None:
    status = record.execution["status"]
    if status in TERMINAL_EXECUTION:
        ends = [e for e in record.deliveries if e["type"] == f"execution.{status}"]
        attempt.until = ends[-1]["occurred_at"] if ends else None
        attempt.ending = f"{'was ' if status == 'cancelled' else ''}{status}"
        attempt.tone = {"completed": "good", "failed": "bad"}.get(status, "plain")
    elif dispatch["state"] == "pending":
        attempt.ending, attempt.tone = "its lease ran out", "bad"
    elif dispatch["acked"] != dispatch["attempt"]:
        attempt.ending, attempt.tone = "being delivered", "running"
    else:
        attempt.ending, attempt.tone = "running", "running"
