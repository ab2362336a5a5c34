"""API keys: tokens that let a client do some things and not others.

A token is shown once, when it is made. Its digest is what is kept: it is 32 random bytes, which
nobody finds by trying, so a fast digest will do.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
import sqlite3
import uuid
from collections.abc import Collection
from typing import Final

import orjson

from rebuno_sync.kernel import refusals
from rebuno_sync.kernel.ids import new_id
from rebuno_sync.kernel.store import Store, Transaction

SCOPES: Final = (
    "executions:read",
    "executions:write",
    "approvals:read",
    "approvals:write",
    "agents:read",
    "agents:write",
    "policies:write",
    "api_keys:manage",
)
#: What may be done by whoever has the kernel's own token, or where none is asked for.
EVERYTHING: Final = frozenset(SCOPES)
#: What the tokens of keys begin with, so that they are found where they do not belong.
PREFIX: Final = "rbk_"

_LONGEST_NAME: Final = 200
_TOKEN = re.compile(rf"{PREFIX}([0-9a-f]{{32}})_([\w-]{{43}})", re.ASCII)
_NO_DIGEST = bytes(32)


def create(tx: Transaction, name: str, scopes: Collection[str]) -> tuple[sqlite3.Row, str]:
    """Make a key; return its row, and the token, which is never to be had again.

    Raises:
        ValidationError: the name is too long, or a scope is unknown.
    """
    if len(name) > _LONGEST_NAME:
        raise refusals.invalid(f"name must be text of 1 to {_LONGEST_NAME} characters")
    if not scopes:
        raise refusals.invalid(f"scopes is empty; give some of {', '.join(SCOPES)}")
    for scope in scopes:
        if scope not in SCOPES:
            raise refusals.invalid(
                f"{scope!r:.100} is no scope; the scopes are {', '.join(SCOPES)}"
            )
    id = new_id(tx.now)
    token = f"{PREFIX}{id.replace('-', '')}_{secrets.token_urlsafe(32)}"
    tx.insert(
        "api_keys",
        {
            "id": id,
            "name": name,
            "digest": _digest(token),
            "scopes": orjson.dumps([s for s in SCOPES if s in scopes]).decode(),
            "created_at": tx.now,
        },
    )
    return _known(tx, id), token


def listed(tx: Transaction) -> list[sqlite3.Row]:
    """Return all keys, oldest first."""
    return tx.all("SELECT * FROM api_keys ORDER BY id")


def delete(tx: Transaction, key_id: str) -> None:
    """Delete a key; its token is worth nothing from now on.

    Raises:
        NotFoundError: there is no such key.
    """
    _known(tx, key_id)
    tx.run("DELETE FROM api_keys WHERE id = ?", key_id)


class KeyRing:
    """The keys of a kernel, for whoever is shown a token."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def find(self, token: str) -> tuple[str, frozenset[str]] | None:
        """Return the id and the scopes of the key whose token this is; ``None`` for no key's."""
        match = _TOKEN.fullmatch(token)
        if match is None:
            return None
        with self._store.read() as tx:
            row = tx.one("SELECT * FROM api_keys WHERE id = ?", str(uuid.UUID(match[1])))
        good = hmac.compare_digest(_NO_DIGEST if row is None else row["digest"], _digest(token))
        if row is None or not good:
            return None
        return str(row["id"]), frozenset(orjson.loads(row["scopes"]))

    def has(self, key_id: str) -> bool:
        """Tell whether a key is still there."""
        with self._store.read() as tx:
            return tx.one("SELECT 1 FROM api_keys WHERE id = ?", key_id) is not None


def _known(tx: Transaction, key_id: str) -> sqlite3.Row:
    row = tx.one("SELECT * FROM api_keys WHERE id = ?", key_id)
    if row is None:
        raise refusals.not_found("API key", key_id)
    return row


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode("ascii")).digest()
