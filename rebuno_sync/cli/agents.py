"""``rebuno-sync agents``: which agents a kernel knows."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

import click

from rebuno_sync.agent_secrets import FILE_VARIABLE, SECRET_VARIABLE, Given, Secrets
from rebuno_sync.cli.session import (
    Misuse,
    Session,
    for_each,
    ids_option,
    kernel_options,
    listed,
    pass_session,
)
from rebuno_sync.cli.times import age_text
from rebuno_sync.cli.values import id_argument, read_text


@click.group()
@kernel_options
def agents() -> None:
    """Agents: list, register, remove."""


@agents.command("ls")
@ids_option
@kernel_options
@pass_session
def list_agents(session: Session, ids: bool) -> None:
    """List the registered agents."""
    found = session.client.agents()
    if listed(session, found, ids=ids):
        return
    session.output.table(
        ("id", "webhook", "lease", "policy", "registered"),
        (
            (
                a.id,
                a.webhook_url,
                "" if a.lease_timeout_seconds is None else f"{a.lease_timeout_seconds:g} s",
                "yes" if a.policy_bundle else "",
                age_text(a.registered_at),
            )
            for a in found
        ),
        empty="No agent is registered.",
    )


@agents.command()
@id_argument("agent_id", "AGENT")
@click.argument("webhook_url", metavar="WEBHOOK_URL")
@click.option(
    "--secret-env",
    metavar="NAME",
    help="The environment variable that holds the secret; by default it comes from where the "
    f"agent has it, {SECRET_VARIABLE} or the file that {FILE_VARIABLE} names.",
)
@click.option(
    "--secret-file",
    metavar="FILE",
    help="The file that holds it, in its first line that is not empty; - for the input.",
)
@click.option("--secret", metavar="TEXT", help="The secret itself; others here can read it.")
@click.option(
    "--lease-timeout",
    type=click.FloatRange(min=0, min_open=True),
    metavar="SECONDS",
    help="How long its leases last; needs a kernel of generation 3.",
)
@kernel_options
@pass_session
def add(
    session: Session,
    agent_id: str,
    webhook_url: str,
    secret_env: str | None,
    secret_file: str | None,
    secret: str | None,
    lease_timeout: float | None,
) -> None:
    """Register AGENT, or change its registration.

    The kernel posts its dispatches to WEBHOOK_URL, signed with the secret.
    """
    agent = session.client.register_agent(
        agent_id,
        webhook_url,
        _secret(secret, secret_file, secret_env),
        lease_timeout_seconds=lease_timeout,
    )
    if session.json:
        session.output.record(agent)
    else:
        session.output.line("registered ", agent.id, "  ", agent.webhook_url or webhook_url)


def _secret(given: str | None, file: str | None, variable: str | None) -> str:
    if given is not None and file is not None:
        raise Misuse("give the secret with --secret or --secret-file, not both")
    if given is None and file is not None:
        given = _first_line() if file == "-" else _first(Path(file))
    elif given is None and variable is not None:
        given = os.environ.get(variable)
    elif given is None and (os.environ.get(SECRET_VARIABLE) or os.environ.get(FILE_VARIABLE)):
        given = _first(None)
    if given is None and sys.stdin.isatty():
        given = click.prompt("Secret", hide_input=True, err=True)
    if not given:
        where = variable or f"{SECRET_VARIABLE} or {FILE_VARIABLE}"
        raise Misuse(f"the secret is missing or empty: set {where}, or pass --secret-file")
    return given


def _first(given: Given) -> str:
    """Return the first of an agent's secrets, which signs: the kernel takes only one."""
    try:
        return Secrets(given).all()[0]
    except ValueError as exc:
        raise Misuse(str(exc)) from None
    except OSError as exc:
        raise Misuse(f"cannot read {exc.filename}: {exc.strerror}") from None


def _first_line() -> str:
    return next((line.strip() for line in read_text("-").splitlines() if line.strip()), "")


@agents.command()
@id_argument("agent_ids", "AGENT...")
@kernel_options
@pass_session
def rm(session: Session, agent_ids: Sequence[str]) -> None:
    """Remove agents."""
    for_each(session, agent_ids, session.client.delete_agent, "removed")
