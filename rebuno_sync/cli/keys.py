"""``rebuno-sync keys``: tokens that let a client do some things and not others."""

from __future__ import annotations

from collections.abc import Sequence

import click

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


@click.group()
@kernel_options
def keys() -> None:
    """API keys: list, make, remove."""


@keys.command("ls")
@ids_option
@kernel_options
@pass_session
def list_keys(session: Session, ids: bool) -> None:
    """List the keys; their tokens are not kept, and not shown."""
    found = session.client.api_keys()
    if listed(session, found, ids=ids):
        return
    session.output.table(
        ("id", "name", "scopes", "made"),
        ((k.id, k.name, ", ".join(k.scopes), age_text(k.created_at)) for k in found),
        empty="There is no API key.",
    )


@keys.command()
@click.argument("name")
@click.option(
    "--scope",
    "scopes",
    multiple=True,
    required=True,
    metavar="SCOPE",
    help="What it may do, such as executions:read; more than one may be given.",
)
@click.option("-q", "--quiet", is_flag=True, help="Print the token alone.")
@kernel_options
@pass_session
def add(session: Session, name: str, scopes: Sequence[str], quiet: bool) -> None:
    """Make a key called NAME, and show its token, once.

    The scopes are executions:read, executions:write, approvals:read, approvals:write,
    agents:read, agents:write, policies:write and api_keys:manage; none holds another.
    """
    made = session.client.create_api_key(name, scopes)
    if session.json:
        session.output.record(made)
    elif quiet:
        session.output.line(made.token)
    else:
        session.output.line("made ", made.id, "  ", made.name)
        session.output.line(("token ", "bold"), made.token)
        session.output.note("the token is shown this once; REBUNO_API_KEY takes it")


@keys.command()
@id_argument("key_ids", "KEY...")
@kernel_options
@pass_session
def rm(session: Session, key_ids: Sequence[str]) -> None:
    """Remove keys, whose tokens are worth nothing from then on."""
    for_each(session, key_ids, session.client.delete_api_key, "removed")
