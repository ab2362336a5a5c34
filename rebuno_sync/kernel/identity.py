"""Step identity: canonical JSON and the hashes over it (PROTOCOL 6). Pure."""

from __future__ import annotations

import hashlib

from rebuno_sync.kernel import jsontext


def canonical_json(args: bytes) -> bytes:
    """Return the canonical form of ``args`` (PROTOCOL 6); absent (empty) args are ``null``.

    Keys are sorted, white space is gone, and numbers keep the text they were sent in.

    Raises:
        ValueError: ``args`` is not JSON.
    """
    return jsontext.canonical(jsontext.decode_text(args)) if args else b"null"


def args_hash(args: bytes) -> str:
    """Return the lower-case hex SHA-256 of the canonical form of ``args``.

    Raises:
        ValueError: ``args`` is not JSON.
    """
    return hashlib.sha256(canonical_json(args)).hexdigest()


def step_id(execution_id: str, kind: str, target: str, args_hash: str, occurrence: int) -> str:
    """Return the id of a step: the lower-case hex SHA-256 of its five fields.

    Args:
        execution_id: the execution that the step belongs to.
        kind: ``tool_call``, ``llm_call`` or ``local``.
        target: what is called.
        args_hash: from :func:`args_hash`.
        occurrence: how many equal submissions came before, in this attempt.
    """
    digest = hashlib.sha256()
    for field in (execution_id, kind, target, args_hash, str(occurrence)):
        data = field.encode("utf-8")
        digest.update(b"%d:%b" % (len(data), data))
    return digest.hexdigest()
