"""Every example on every page runs, and every example in examples/ has a test that runs it."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.documentation.pages import ROOT, blocks, pages

RUN = ("python", "console")


@pytest.mark.parametrize("page", pages(), ids=lambda p: str(p.relative_to(ROOT)))
def test_the_examples_of_a_page_run(page: Path) -> None:
    if not any(b.run and b.language in RUN for b in blocks(page)):
        pytest.skip("this page has nothing to run")
    done = subprocess.run(
        [sys.executable, "-W", "error", "-m", "tests.documentation.run_page", str(page)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_link_between_pages_leads_somewhere() -> None:
    broken = []
    for page in pages():
        prose = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
        for target in re.findall(r"\]\(([^)#:\s]+)(?:#[^)]*)?\)", prose):
            if not (page.parent / target).exists():
                broken.append(f"{page.relative_to(ROOT)}: {target}")
    assert not broken


def test_every_test_that_a_page_names_runs_its_blocks() -> None:
    named = {(page.name, b.by) for page in pages() for b in blocks(page) if b.by}
    assert named
    for page, test in named:
        assert page in (ROOT / test).read_text(encoding="utf-8"), f"{test} does not read {page}"


def test_every_example_is_run_by_a_test() -> None:
    tests = "\n".join(
        path.read_text(encoding="utf-8")
        for path in (ROOT / "tests").rglob("*.py")
        if path != Path(__file__)
    )
    folders = [p.name for p in (ROOT / "examples").iterdir() if p.is_dir() and p.name[0] != "_"]
    assert folders
    for folder in folders:
        assert f"examples.{folder}" in tests or f"examples/{folder}" in tests, (
            f"examples/{folder} is run by no test"
        )
