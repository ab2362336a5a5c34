"""Known vulnerabilities in what is installed here, by pip-audit; fails on findings alone.

    python -m tests.audit

The vulnerability service is on the network, which not every machine reaches, and a mirror of the
package index may answer for it without knowing any vulnerability: either is told loudly, and fails
nothing.
"""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

COMMAND = (sys.executable, "-m", "pip_audit", "--local", "--format=json", "--progress-spinner=off")
#: What is audited nowhere, because it is not from an index.
_OWN = frozenset({"rebuno-sync"})
_LONGEST_SECONDS = 300.0
#: What pip-audit's last words hold when the service did not answer.
_UNREACHABLE = ("requests.exceptions.", "ConnectionError", "ServiceError", "HTTPError")


class AuditFailed(Exception):
    """pip-audit did neither find anything nor miss the service; the message says what it said."""


@dataclasses.dataclass(frozen=True)
class Report:
    """What pip-audit said.

    Attributes:
        audited: how many packages it asked about with success.
        findings: a line for each vulnerability.
        skipped: the packages that the service knows nothing of.
    """

    audited: int
    findings: tuple[str, ...]
    skipped: tuple[str, ...]


def read(output: str) -> Report:
    """Read pip-audit's JSON.

    Raises:
        ValueError: it is none.
    """
    rows: list[dict[str, Any]] = json.loads(output)["dependencies"]
    findings, skipped, audited = [], [], 0
    for row in rows:
        if "skip_reason" in row:
            skipped.append(row["name"])
            continue
        audited += 1
        for vulnerability in row["vulns"]:
            fixed = ", ".join(vulnerability.get("fix_versions") or ()) or "no release yet"
            findings.append(
                f"{row['name']} {row['version']}: {vulnerability['id']}, mended in {fixed}"
            )
    return Report(audited, tuple(findings), tuple(n for n in skipped if n not in _OWN))


def audit(command: Sequence[str] = COMMAND, timeout: float = _LONGEST_SECONDS) -> Report | None:
    """Run pip-audit; ``None`` when its service cannot be reached.

    Raises:
        AuditFailed: it failed for another reason.
    """
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False)
    except subprocess.TimeoutExpired:
        return None
    try:
        return read(done.stdout)
    except (ValueError, KeyError, TypeError):
        words = done.stderr.strip()
        if any(name in words for name in _UNREACHABLE):
            return None
        raise AuditFailed(words[-2000:] or f"pip-audit ended with {done.returncode}") from None


def main(command: Sequence[str] = COMMAND, timeout: float = _LONGEST_SECONDS) -> int:
    """Audit, tell, and return the status to exit with: 1 for findings, 2 for a broken audit."""
    try:
        report = audit(command, timeout)
    except AuditFailed as exc:
        print(f"the audit failed: {exc}", file=sys.stderr)
        return 2
    if report is None or report.audited == 0:
        why = (
            "cannot be reached from here"
            if report is None
            else "is not what answered: it knows none of the packages"
        )
        _shout(f"NOT AUDITED: the vulnerability service {why}.")
        return 0
    if report.skipped:
        _shout(f"NOT AUDITED, unknown to the service: {', '.join(report.skipped)}")
    for finding in report.findings:
        print(finding)
    print(f"{report.audited} packages audited, {len(report.findings)} vulnerabilities")
    return 1 if report.findings else 0


def _shout(words: str) -> None:
    line = "*" * 72
    print(f"{line}\n{words}\n{line}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
