"""Many runs, each with faults of its own, and a table of what happened and what came of it.

    REBUNO_SEED=N REBUNO_RUNS=N python -m tests.faults

Run ``n`` of a series has the seed ``REBUNO_SEED + n``, so a single one is done again by its own
seed and ``REBUNO_RUNS=1``. What failed leaves its journal and logs in ``.faults/<seed>``.
"""

from __future__ import annotations

import os
import random
import sys
import time
from pathlib import Path

from rich.console import Console

from tests.faults.series import FULL, Series

JOBS = 4


def main() -> int:
    """Do the runs; 1 when one of them failed, or a full series left a fault out."""
    seed = int(os.environ.get("REBUNO_SEED") or random.randrange(10**6))
    runs = int(os.environ.get("REBUNO_RUNS") or FULL)
    console = Console()
    console.print(f"{runs} runs from REBUNO_SEED={seed} on")
    begin = time.monotonic()
    series = Series(seed, runs, keep=Path(".faults"))
    for done in series.go(min(JOBS, runs)):
        report = done.report
        outcome = "[red]FAILED[/]" if report.faults else "clean"
        console.print(
            f"{done.number:4}/{runs}  seed {report.plan.seed}  {outcome}  {report.seconds:5.1f} s"
            f"  {report.attempts} attempts  {report.unknown} unknown  {report.plan}",
            highlight=False,
            soft_wrap=True,
        )
        for fault in report.faults:
            console.print(f"      [red]{fault}[/]", highlight=False, soft_wrap=True)
    series.show(console)
    console.print(f"{time.monotonic() - begin:.0f} s")
    return 1 if series.failures() else 0


if __name__ == "__main__":
    sys.exit(main())
