"""What the doctor finds."""

from __future__ import annotations

import dataclasses
from typing import Literal, TypeAlias

Severity: TypeAlias = Literal["error", "warning", "info", "ok"]


@dataclasses.dataclass(frozen=True)
class Finding:
    """One thing that was looked at.

    Attributes:
        severity: ``error`` for what loses or repeats work or cannot work at all, ``warning`` for
            what hurts under some circumstances, ``info`` for what is good to know, ``ok``.
        check: the stable name of what was looked at.
        what: what was found.
        why: what comes of it; ``""`` when it is fine.
        mend: what to do about it; ``""`` when nothing is.
    """

    severity: Severity
    check: str
    what: str
    why: str = ""
    mend: str = ""
