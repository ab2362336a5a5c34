"""Signatures, held against the vectors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rebuno_sync import signing

VECTORS = Path(__file__).resolve().parents[1] / "vectors" / "request_signatures.json"
ROWS: list[dict[str, Any]] = json.loads(VECTORS.read_text("utf-8"))


@pytest.mark.parametrize("row", ROWS, ids=[row["name"] for row in ROWS])
def test_vectors(row: dict[str, str]) -> None:
    body = row["body"].encode("utf-8")
    assert signing.sign_body(row["secret"], body) == row["body_signature"]
    signed = signing.sign_request(
        row["secret"],
        row["method"],
        row["target"],
        row["timestamp"],
        body,
        dispatch_id=row["dispatch_id"],
        dispatch_attempt=row["dispatch_attempt"],
    )
    assert signed == row["signature"]


def test_each_field_is_covered() -> None:
    base: dict[str, Any] = {
        "method": "POST",
        "target": "/a",
        "timestamp": "1",
        "body": b"x",
        "dispatch_id": "d",
        "dispatch_attempt": "1",
    }

    def signed(**changed: Any) -> str:
        fields = {**base, **changed}
        return signing.sign_request(
            "s",
            fields["method"],
            fields["target"],
            fields["timestamp"],
            fields["body"],
            dispatch_id=fields["dispatch_id"],
            dispatch_attempt=fields["dispatch_attempt"],
        )

    changes: list[dict[str, Any]] = [
        {"method": "PUT"},
        {"target": "/b"},
        {"timestamp": "2"},
        {"body": b"y"},
        {"dispatch_id": "e"},
        {"dispatch_attempt": "2"},
        {"dispatch_id": "", "dispatch_attempt": "d"},
    ]
    assert len({signed(), *(signed(**c) for c in changes)}) == 1 + len(changes)


@pytest.mark.parametrize(
    "given",
    ["", "sha256=", "sha256=00", "v1=00", "é", "\udcff", "\x00", "SHA256=" + "0" * 64, "x" * 9999],
    ids=ascii,
)
def test_wrong_signatures(given: str) -> None:
    assert not signing.verify_body("secret", b"body", given)


def test_the_right_signature_and_its_neighbours() -> None:
    right = signing.sign_body("secret", b"body")
    assert signing.verify_body("secret", b"body", right)
    assert not signing.verify_body("secret", b"body ", right)
    assert not signing.verify_body("Secret", b"body", right)
    assert not signing.verify_body("secret", b"body", right.upper())
    assert not signing.verify_body("secret", b"body", right + "\n")


def test_secrets_are_any_text() -> None:
    assert signing.verify_body(
        "gehe\u00efm", b"\xff\x00", signing.sign_body("gehe\u00efm", b"\xff\x00")
    )
