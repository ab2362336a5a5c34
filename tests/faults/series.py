"""A series of runs, a few at a time, each in a process of its own, and what came of all."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import multiprocessing
import shutil
import tempfile
import traceback
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console
from rich.table import Table

from tests.faults.plan import KINDS, make_plan
from tests.faults.run import Report, run

#: So many runs are a full series, in which every kind of fault must happen.
FULL = 200


@dataclasses.dataclass(frozen=True)
class Done:
    """A run that has ended, the how manieth it was, and its report."""

    number: int
    report: Report


class Series:
    """Runs with seeds in a row.

    Args:
        seed: of the first.
        runs: how many.
        keep: the folder that gets the journal and the logs of those that fail.
    """

    def __init__(self, seed: int, runs: int, keep: Path) -> None:
        self._seeds = range(seed, seed + runs)
        self._keep = keep
        self.reports: list[Report] = []

    def go(self, jobs: int) -> Iterator[Done]:
        """Do the runs, so many at a time, and give each as it ends."""
        # Fresh interpreters: a fork of this process would have its threads' locks.
        context = multiprocessing.get_context("spawn")
        with concurrent.futures.ProcessPoolExecutor(jobs, mp_context=context) as pool:
            futures = [pool.submit(_one, seed, self._keep) for seed in self._seeds]
            for number, future in enumerate(concurrent.futures.as_completed(futures), 1):
                report = future.result()
                self.reports.append(report)
                yield Done(number, report)

    def failures(self) -> list[str]:
        """Return what was wrong, each with the command that does it again."""
        found = [
            f"{fault}\n  again: REBUNO_SEED={report.plan.seed} REBUNO_RUNS=1 make faults"
            for report in self.reports
            for fault in report.faults
        ]
        return found + [f"never happened: {kind}" for kind in self._missing()]

    def _missing(self) -> list[str]:
        if len(self._seeds) < FULL:
            return []
        happened = sum((r.happened for r in self.reports), Counter())
        return [str(kind) for kind in KINDS if not happened[str(kind)]]

    def show(self, console: Console) -> None:
        """Print what happened and what came of it."""
        table = Table(title=f"{len(self.reports)} runs")
        for column in ("fault", "times", "runs", "clean", "failed"):
            left = column == "fault"
            table.add_column(column, justify="left" if left else "right", no_wrap=left)
        for kind in map(str, KINDS):
            mine = [r for r in self.reports if r.happened[kind]]
            if not mine and len(self._seeds) < FULL:
                continue
            failed = sum(bool(r.faults) for r in mine)
            happened = sum(r.happened[kind] for r in mine)
            table.add_row(kind, *map(str, (happened, len(mine), len(mine) - failed, failed)))
        failed = sum(bool(r.faults) for r in self.reports)
        everything = sum(sum(r.happened.values()) for r in self.reports)
        all_runs = len(self.reports)
        table.add_section()
        table.add_row("all", *map(str, (everything, all_runs, all_runs - failed, failed)))
        console.print(table)
        attempts = sum(r.attempts for r in self.reports)
        unknown = sum(r.unknown for r in self.reports)
        console.print(
            f"{attempts} attempts for {2 * all_runs} executions; {unknown} at-most-once effects"
            " ended with an unknown outcome"
        )
        for failure in self.failures():
            console.print(f"[red]{failure}[/]", highlight=False, soft_wrap=True)


def _one(seed: int, keep: Path) -> Report:
    plan = make_plan(seed)
    folder = Path(tempfile.mkdtemp(prefix="rebuno-faults-"))
    try:
        try:
            report = run(plan, folder)
        except Exception:
            report = Report(plan, Counter(), 0, 0, 0.0, [traceback.format_exc()])
        if report.faults:
            kept = keep / str(seed)
            shutil.rmtree(kept, ignore_errors=True)
            shutil.copytree(folder, kept)
            (kept / "report").write_text("\n".join([str(plan), *report.faults, ""]))
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return report
