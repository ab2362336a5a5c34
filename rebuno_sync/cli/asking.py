"""Asking the person at the terminal for a pending approval."""

from __future__ import annotations

import getpass

import click

from rebuno_sync.cli.output import pretty
from rebuno_sync.cli.session import Session
from rebuno_sync.cli.times import age_text
from rebuno_sync.cli.values import is_interactive
from rebuno_sync.errors import ConflictError, ForbiddenError
from rebuno_sync.wire import Approval


def login_name() -> str:
    """Return who is logged in, or ``""`` where nobody can be named."""
    try:
        return getpass.getuser()
    except (OSError, KeyError):
        return ""


class Asker:
    """Shows what an approval is about and takes the decision.

    Args:
        session: the kernel and the terminal.
        decided_by: who decides.
    """

    def __init__(self, session: Session, decided_by: str) -> None:
        self._session = session
        self._decided_by = decided_by

    @classmethod
    def wanted(cls, session: Session, decided_by: str | None, ask: bool | None) -> Asker | None:
        """Return an asker, or ``None`` where nobody is to be asked."""
        if not (is_interactive() if ask is None else ask):
            return None
        return cls(session, login_name() if decided_by is None else decided_by)

    def ask(self, approval_id: str) -> None:
        """Ask for the decision, unless it has been taken by now."""
        approval = self._session.client.approval(approval_id)
        if approval.status != "pending":
            return
        self._show(approval)
        if approval.approvers and self._decided_by not in approval.approvers:
            self._session.output.note(
                f"{', '.join(approval.approvers)} may decide this, {self._decided_by!r} may not; "
                "to decide as somebody else, pass --as NAME"
            )
            return
        answer = click.prompt(
            "Let it run?", type=click.Choice(["grant", "deny", "later"]), default="later", err=True
        )
        if answer == "later":
            return
        rationale = click.prompt("Why?", default="", show_default=False, err=True)
        decide = self._session.client.grant if answer == "grant" else self._session.client.deny
        try:
            decide(approval_id, decided_by=self._decided_by, rationale=rationale)
        except (ConflictError, ForbiddenError) as exc:
            self._session.output.note(str(exc))

    def _show(self, approval: Approval) -> None:
        step = self._session.client.step(approval.execution_id, approval.step_id)
        pairs = [
            ("approval", approval.id),
            ("step", f"{step.kind} {step.target}"),
            ("message", approval.message),
            ("may decide", ", ".join(approval.approvers)),
            ("runs out", age_text(approval.timeout_at)),
            ("arguments", pretty(step.args)),
        ]
        self._session.output.fields((name, value) for name, value in pairs if value)
