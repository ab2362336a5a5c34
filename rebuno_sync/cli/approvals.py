"""``rebuno-sync approvals``: what waits for a person, and the decision."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import click

from rebuno_sync.cli.asking import login_name
from rebuno_sync.cli.output import compact, pretty
from rebuno_sync.cli.session import (
    Session,
    for_each,
    ids_option,
    kernel_options,
    listed,
    pass_session,
)
from rebuno_sync.cli.times import age_text
from rebuno_sync.cli.values import id_argument
from rebuno_sync.errors import APIError
from rebuno_sync.wire import Approval


@click.group()
@kernel_options
def approvals() -> None:
    """Approvals: list what waits for a decision, grant it, deny it."""


@approvals.command("ls")
@ids_option
@kernel_options
@pass_session
def list_approvals(session: Session, ids: bool) -> None:
    """List the approvals that wait for a decision, with the step that each is about."""
    found = session.client.approvals()
    if listed(session, found, ids=ids):
        return
    session.output.table(
        ("id", "execution", "waiting", "runs out", "may decide", "step", "message"),
        (
            (
                a.id,
                a.execution_id,
                age_text(a.created_at).removesuffix(" ago"),
                age_text(a.timeout_at),
                ", ".join(a.approvers) or "anyone",
                _step_text(session, a),
                a.message,
            )
            for a in found
        ),
        empty="No approval is pending.",
    )


def _step_text(session: Session, approval: Approval) -> str:
    try:
        step = session.client.step(approval.execution_id, approval.step_id)
    except APIError:  # the token may not read executions
        return approval.step_id[:12]
    return f"{step.target} {compact(step.args, 60)}"


@approvals.command()
@id_argument("approval_id", "APPROVAL")
@kernel_options
@pass_session
def show(session: Session, approval_id: str) -> None:
    """Show one approval, whatever its status, with the arguments of its step."""
    approval = session.client.approval(approval_id)
    if session.json:
        session.output.record(approval)
        return
    step = session.client.step(approval.execution_id, approval.step_id)
    pairs = (
        ("id", approval.id),
        ("status", approval.status),
        ("execution", approval.execution_id),
        ("step", f"{step.kind} {step.target}"),
        ("message", approval.message),
        ("may decide", ", ".join(approval.approvers) or "anyone"),
        ("created", age_text(approval.created_at)),
        ("runs out", age_text(approval.timeout_at) if approval.status == "pending" else ""),
        ("decided by", approval.decided_by),
        ("rationale", approval.rationale),
        ("arguments", pretty(step.args)),
    )
    session.output.fields((name, value) for name, value in pairs if value)


def _decision(command: Callable[..., None]) -> Callable[..., None]:
    for option in (
        kernel_options,
        click.option(
            "--as",
            "decided_by",
            metavar="NAME",
            help="Who decides; your login name by default.",
        ),
        click.option(
            "--because", "rationale", default="", metavar="TEXT", help="Why; the agent is told."
        ),
        id_argument("approval_ids", "APPROVAL..."),
    ):
        command = option(command)
    return command


@approvals.command()
@_decision
@pass_session
def grant(
    session: Session, approval_ids: Sequence[str], decided_by: str | None, rationale: str
) -> None:
    """Let the steps run."""
    _decide(session, "granted", session.client.grant, approval_ids, decided_by, rationale)


@approvals.command()
@_decision
@pass_session
def deny(
    session: Session, approval_ids: Sequence[str], decided_by: str | None, rationale: str
) -> None:
    """Refuse the steps; their handlers see the reason."""
    _decide(session, "denied", session.client.deny, approval_ids, decided_by, rationale)


def _decide(
    session: Session,
    status: str,
    decide: Callable[..., None],
    approval_ids: Sequence[str],
    decided_by: str | None,
    rationale: str,
) -> None:
    who = login_name() if decided_by is None else decided_by
    for_each(
        session,
        approval_ids,
        lambda approval_id: decide(approval_id, decided_by=who, rationale=rationale),
        status,
    )
