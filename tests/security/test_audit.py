"""What ``make lint`` makes of pip-audit's answers, with a stand-in for it."""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest

from tests import audit

CLEAN = {"name": "flask", "version": "3.1.0", "vulns": []}
OWN = {"name": "rebuno-sync", "skip_reason": "distribution marked as editable"}
UNKNOWN = {"name": "zstandard", "skip_reason": "Dependency not found on PyPI"}
BAD = {
    "name": "requests",
    "version": "2.0",
    "vulns": [{"id": "PYSEC-1", "fix_versions": ["2.1", "3.0"]}, {"id": "X-2", "fix_versions": []}],
}


def stand_in(*rows: dict[str, Any], status: int = 0, words: str = "", out: str = "") -> list[str]:
    printed = out or (json.dumps({"dependencies": rows, "fixes": []}) if rows else "")
    code = f"import sys; print({printed!r}); sys.stderr.write({words!r}); sys.exit({status})"
    return [sys.executable, "-c", code]


def test_a_clean_audit(capsys: pytest.CaptureFixture[str]) -> None:
    assert audit.main(stand_in(CLEAN, OWN)) == 0
    told = capsys.readouterr()
    assert told.out == "1 packages audited, 0 vulnerabilities\n"
    assert told.err == ""


def test_findings_fail(capsys: pytest.CaptureFixture[str]) -> None:
    assert audit.main(stand_in(CLEAN, BAD, OWN, status=1, words="Found 2")) == 1
    assert capsys.readouterr().out.splitlines() == [
        "requests 2.0: PYSEC-1, mended in 2.1, 3.0",
        "requests 2.0: X-2, mended in no release yet",
        "2 packages audited, 2 vulnerabilities",
    ]


def test_what_was_not_audited_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert audit.main(stand_in(CLEAN, UNKNOWN)) == 0
    assert "NOT AUDITED, unknown to the service: zstandard" in capsys.readouterr().err


def test_a_mirror_that_knows_nothing_is_no_clean_audit(capsys: pytest.CaptureFixture[str]) -> None:
    """pip-audit exits with 0 and finds nothing when each package is unknown."""
    assert audit.main(stand_in(UNKNOWN, OWN)) == 0
    told = capsys.readouterr()
    assert "NOT AUDITED" in told.err
    assert "audited" not in told.out


@pytest.mark.parametrize(
    "words",
    [
        "requests.exceptions.ConnectionError: HTTPSConnectionPool(host='api.osv.dev', port=443)",
        "pip_audit._service.interface.ServiceError: ...",
        "requests.exceptions.ReadTimeout",
        "requests.exceptions.SSLError: HTTPSConnectionPool(host='api.osv.dev', port=443)",
    ],
)
def test_a_service_that_cannot_be_reached_is_told(
    words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert audit.main(stand_in(status=1, words=words)) == 0
    assert "NOT AUDITED: the vulnerability service cannot be reached" in capsys.readouterr().err


def test_a_service_that_does_not_come_back_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    command = [sys.executable, "-c", "import threading; threading.Event().wait(60)"]
    assert audit.main(command, timeout=0.2) == 0
    assert "NOT AUDITED" in capsys.readouterr().err


@pytest.mark.parametrize("out", ["", "nonsense", "[]", "{}"])
def test_an_audit_that_is_broken_fails(out: str, capsys: pytest.CaptureFixture[str]) -> None:
    command = stand_in(status=1, words="No module named pip_audit", out=out)
    assert audit.main(command) == 2
    assert "No module named pip_audit" in capsys.readouterr().err
