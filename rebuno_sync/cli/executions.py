"""``rebuno-sync exec``: start executions, look at them, watch and cancel them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NoReturn

import click

from rebuno_sync.cli.output import compact, pretty
from rebuno_sync.cli.session import (
    Misuse,
    Session,
    exit_code_of,
    for_each,
    ids_option,
    kernel_options,
    listed,
    pass_session,
)
from rebuno_sync.cli.timeline import error_text
from rebuno_sync.cli.times import age_text, between, clock_text, duration_text
from rebuno_sync.cli.values import id_argument, read_json
from rebuno_sync.errors import APIError
from rebuno_sync.wire import Event, Execution, Step

_STATUSES = ("pending", "running", "blocked", "completed", "failed", "cancelled")


@click.group("exec")
@kernel_options
def executions() -> None:
    """Executions: start, list, show, watch, cancel."""


def _watch_options(command: Any) -> Any:
    for option in (
        click.option(
            "--as",
            "decided_by",
            metavar="NAME",
            help="Who decides approvals; your login name by default.",
        ),
        click.option(
            "--ask/--no-ask",
            default=None,
            help="Ask for approvals as they come up; by default on a terminal.",
        ),
        click.option("--live/--no-live", default=True, help="Show the live output of steps."),
        click.option(
            "--give-up-after",
            type=click.FloatRange(min=0),
            metavar="SECONDS",
            help="Stop watching, with exit code 1, when it has not ended by then.",
        ),
    ):
        command = option(command)
    return command


@executions.command()
@id_argument("agent_id", "AGENT")
@click.option(
    "--input",
    "given",
    default="null",
    metavar="JSON|@FILE|-",
    help="The input: JSON, a file with it, or the standard input. null by default.",
)
@click.option("--idempotency-key", default="", metavar="KEY", help="Create at most one under it.")
@click.option("--session-id", "session_id", default="", metavar="ID", help="The session it is of.")
@click.option("--on-behalf-of", default="", metavar="WHO", help="For whom it is.")
@click.option("--watch", is_flag=True, help="Watch it until it has ended.")
@_watch_options
@kernel_options
@pass_session
def create(
    session: Session,
    /,
    agent_id: str,
    given: str,
    idempotency_key: str,
    session_id: str,
    on_behalf_of: str,
    watch: bool,
    **watching: Any,
) -> None:
    """Start an execution of AGENT and print its id.

    With --watch, the exit code says how it ended: 0 completed, 1 failed, 4 cancelled.
    """
    value = read_json(given)
    try:
        execution = session.client.create(
            agent_id,
            value,
            idempotency_key=idempotency_key,
            session=session_id,
            on_behalf_of=on_behalf_of,
        )
    except TypeError as exc:
        raise Misuse(str(exc)) from None
    if watch:
        _watch(session, execution, **watching)
    if session.json:
        session.output.record(execution)
        return
    session.output.line(execution.id)
    if session.output.console.is_terminal:
        session.output.note(f"{execution.status}; watch it: rebuno-sync exec watch {execution.id}")


@executions.command("ls")
@click.option("--agent", "agent_id", default="", metavar="ID", help="Only of this agent.")
@click.option("--status", type=click.Choice(_STATUSES), default=None, help="Only of this status.")
@click.option("--session-id", "session_id", default="", metavar="ID", help="Only of this session.")
@click.option(
    "--limit",
    type=click.IntRange(min=0),
    default=50,
    show_default=True,
    help="At most so many; 0 for all.",
)
@ids_option
@kernel_options
@pass_session
def list_executions(
    session: Session, agent_id: str, status: str | None, session_id: str, limit: int, ids: bool
) -> None:
    """List executions, the newest first."""
    found = session.client.list(
        agent_id=agent_id, status=status or "", session=session_id, limit=limit or None
    )
    if listed(session, found, ids=ids):
        return
    session.output.table(
        ("id", "agent", "status", "created", "took", "what"),
        (
            (
                e.id,
                e.agent_id,
                e.status,
                age_text(e.created_at),
                duration_text(between(e.created_at, e.updated_at)) if e.done else "",
                e.failure_reason or compact(e.input, 60),
            )
            for e in found
        ),
        empty="There are no executions.",
    )


@executions.command()
@id_argument("execution_id", "EXECUTION")
@kernel_options
@pass_session
def get(session: Session, execution_id: str) -> None:
    """Show an execution with its input and output."""
    execution = session.client.get(execution_id)
    if session.json:
        session.output.record(execution)
        return
    session.output.fields(_fields(execution, _pending(session, execution)))


def _pending(session: Session, execution: Execution) -> list[str]:
    """Return the ids of the approvals that an execution waits for, where one may see them."""
    if execution.status != "blocked":
        return []
    try:
        return [a.id for a in session.client.approvals() if a.execution_id == execution.id]
    except APIError:
        return []


def _fields(execution: Execution, pending: Sequence[str]) -> Iterator[tuple[str, str]]:
    yield "id", execution.id
    yield "agent", execution.agent_id
    yield "status", execution.status
    if pending:
        yield "approval", ", ".join(pending)
    if execution.failure_reason:
        yield "reason", execution.failure_reason
    for name in ("session", "parent_execution_id", "deadline_at"):
        if value := getattr(execution, name):
            yield name.replace("_", " "), value
    if execution.created_at:
        yield "created", f"{execution.created_at} ({age_text(execution.created_at)})"
    if execution.done:
        took = between(execution.created_at, execution.updated_at)
        yield "took", duration_text(took)
    for name, value in execution.extra.items():
        if value is not None:
            yield name.replace("_", " "), value if isinstance(value, str) else compact(value)
    yield "input", pretty(execution.input)
    if execution.status == "completed":
        yield "output", pretty(execution.output)


@executions.command()
@id_argument("execution_id", "EXECUTION")
@click.option(
    "--after-seq", type=click.IntRange(min=0), default=0, help="Only events after this one."
)
@kernel_options
@pass_session
def events(session: Session, execution_id: str, after_seq: int) -> None:
    """Show the recorded events of an execution, in order."""
    found = session.client.events(execution_id, after_seq=after_seq)
    if listed(session, found):
        return
    session.output.table(
        ("seq", "time", "event", "payload"),
        ((str(e.event_seq), clock_text(e.occurred_at), e.type, _payload(e)) for e in found),
        empty="There are no events.",
    )


def _payload(event: Event) -> str:
    # The id of the execution is the same on every line.
    return compact({k: v for k, v in event.payload.items() if k != "execution_id"})


@executions.command()
@id_argument("execution_id", "EXECUTION")
@click.option("--step", "step_id", default="", metavar="ID", help="One step with all it holds.")
@kernel_options
@pass_session
def steps(session: Session, execution_id: str, step_id: str) -> None:
    """Show the steps of an execution, with arguments and outcomes."""
    if step_id:
        step = session.client.step(execution_id, step_id)
        if session.json:
            session.output.record(step)
        else:
            session.output.fields(_step_fields(step))
        return
    found = session.client.steps(execution_id)
    if listed(session, found):
        return
    session.output.table(
        ("step", "kind", "target", "status", "took", "arguments", "outcome"),
        (
            (
                s.step_id[:12],
                s.kind,
                s.target,
                s.status,
                duration_text(between(s.started_at, s.completed_at)),
                compact(s.args, 40),
                _outcome(s),
            )
            for s in found
        ),
        empty="There are no steps.",
    )


def _outcome(step: Step) -> str:
    if step.status == "succeeded":
        return compact(step.result, 60)
    return error_text(step.error)


def _step_fields(step: Step) -> Iterator[tuple[str, str]]:
    for name in ("step_id", "kind", "target", "status", "idempotency", "args_hash"):
        yield name.replace("_", " "), getattr(step, name)
    yield "occurrence", str(step.occurrence)
    for name in ("started_at", "completed_at"):
        yield name.removesuffix("_at"), getattr(step, name) or ""
    yield "arguments", pretty(step.args)
    if step.status == "succeeded":
        yield "result", pretty(step.result)
    elif step.error is not None:
        yield "error", pretty(step.error)


@executions.command()
@id_argument("execution_id", "EXECUTION")
@_watch_options
@kernel_options
@pass_session
def watch(session: Session, /, execution_id: str, **watching: Any) -> None:
    """Watch an execution until it has ended: attempts, steps, approvals, live output.

    The exit code says how it ended: 0 completed, 1 failed, 4 cancelled.
    """
    _watch(session, session.client.get(execution_id), **watching)


def _watch(session: Session, execution: Execution, **options: Any) -> NoReturn:
    from rebuno_sync.cli.watching import watch_execution

    ended = watch_execution(session, execution, **options)
    click.get_current_context().exit(exit_code_of(ended))


@executions.command()
@id_argument("execution_ids", "EXECUTION...")
@kernel_options
@pass_session
def cancel(session: Session, execution_ids: Sequence[str]) -> None:
    """Cancel executions."""
    for_each(session, execution_ids, session.client.cancel, "cancelled")
