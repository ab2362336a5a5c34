"""Agents and their policies."""

from __future__ import annotations

import dataclasses
import logging
import re
import sqlite3
from urllib.parse import urlsplit

from rebuno_sync.kernel import refusals
from rebuno_sync.kernel.policy import PERMISSIVE, Bundle, BundleError
from rebuno_sync.kernel.policy_match import valid_text
from rebuno_sync.kernel.store import Transaction

_log = logging.getLogger(__name__)

_LONGEST_ID = 200
_NOT_IN_A_URL = re.compile(r"[\x00-\x20\x7f\ud800-\udfff]")


@dataclasses.dataclass(frozen=True)
class NewAgent:
    """An agent to register. ``lease_timeout`` in seconds, ``None`` for the kernel's own."""

    id: str
    webhook_url: str
    secret: str = dataclasses.field(repr=False)
    lease_timeout: float | None = None

    def __post_init__(self) -> None:
        """Check the fields.

        Raises:
            ValueError: one of them will not do; the message names it.
        """
        if not self.id or len(self.id) > _LONGEST_ID:
            raise ValueError(f"id must be text of 1 to {_LONGEST_ID} characters")
        if self.id in (".", ".."):
            raise ValueError(f"id must not be {self.id!r}: it goes into paths")
        if not (self.id.isascii() and self.id.isprintable()) or "/" in self.id:
            raise ValueError(
                "id must be printable ASCII without '/': it goes into headers and paths"
            )
        if not self.secret:
            raise ValueError("secret must not be empty: it is what agent and kernel sign with")
        if valid_text(self.secret) != self.secret:
            raise ValueError("secret must be text: it has half of a surrogate pair in it")
        try:
            url = urlsplit(self.webhook_url)
            good = url.scheme in ("http", "https") and bool(url.hostname) and url.port != 0
        except ValueError:
            good = False
        # urlsplit drops line ends and tabs without a word.
        if not good or _NOT_IN_A_URL.search(self.webhook_url):
            raise ValueError(
                f"webhook_url must be an http or https URL, got {self.webhook_url!r:.100}"
            )
        if "@" in url.netloc:
            raise ValueError(
                "webhook_url has a user name in it, which everybody who may see agents would read;"
                " webhooks are signed, and agents need none"
            )
        if self.lease_timeout is not None and not 0 < self.lease_timeout < 1e9:
            raise ValueError(
                f"lease_timeout_seconds must be a number above 0, got {self.lease_timeout!r}"
            )


def register(tx: Transaction, agent: NewAgent) -> sqlite3.Row:
    """Register an agent, or give one that is there a new URL, secret and lease time-out."""
    tx.run(
        "INSERT INTO agents (id, webhook_url, secret, lease_timeout, registered_at)"
        " VALUES (?, ?, ?, ?, ?) ON CONFLICT (id) DO UPDATE SET webhook_url = excluded.webhook_url,"
        " secret = excluded.secret, lease_timeout = excluded.lease_timeout",
        agent.id,
        agent.webhook_url,
        agent.secret,
        agent.lease_timeout,
        tx.now,
    )
    return known(tx, agent.id)


def known(tx: Transaction, agent_id: str) -> sqlite3.Row:
    """Return the row of an agent.

    Raises:
        NotFoundError: there is no such agent.
    """
    row = tx.one("SELECT * FROM agents WHERE id = ?", agent_id)
    if row is None:
        raise refusals.not_found("agent", agent_id)
    return row


def delete(tx: Transaction, agent_id: str) -> None:
    """Delete an agent. Its executions stay; what is queued for it can no longer be delivered.

    Raises:
        NotFoundError: there is no such agent.
    """
    known(tx, agent_id)
    tx.run("DELETE FROM agents WHERE id = ?", agent_id)


def set_policy(tx: Transaction, agent_id: str, bundle: str) -> None:
    """Give an agent the policy bundle ``bundle``, YAML text; the old one stays when it is bad.

    Raises:
        NotFoundError: there is no such agent.
        ValidationError: the bundle is malformed.
    """
    known(tx, agent_id)
    for warning in checked_bundle(bundle).warnings:
        _log.warning("the policy of agent %s: %s", agent_id, warning)
    tx.run("UPDATE agents SET policy = ? WHERE id = ?", bundle, agent_id)


def policy_of(tx: Transaction, agent_id: str) -> Bundle:
    """Return the policy of an agent.

    Raises:
        NotFoundError: there is no such agent.
    """
    policy = known(tx, agent_id)["policy"]
    return PERMISSIVE if policy is None else Bundle.parse(policy)


def checked_bundle(bundle: str) -> Bundle:
    """Read a policy bundle.

    Raises:
        ValidationError: it is malformed.
    """
    try:
        return Bundle.parse(bundle)
    except BundleError as exc:
        raise refusals.invalid(f"invalid policy bundle: {exc}") from exc


def clear_policy(tx: Transaction, agent_id: str) -> None:
    """Let an agent do everything again."""
    tx.run("UPDATE agents SET policy = NULL WHERE id = ?", agent_id)


def describe(
    tx: Transaction,
    agent_id: str,
    description: str | None,
    input_schema: str | None,
    output_schema: str | None,
) -> None:
    """Store what an agent tells about itself; the schemas are raw JSON."""
    tx.run(
        "UPDATE agents SET description = ?, input_schema = ?, output_schema = ? WHERE id = ?",
        description,
        input_schema,
        output_schema,
        agent_id,
    )
