"""Finds the code blocks of a Markdown page.

A block is run unless the line before it is ``<!-- not run: why -->``, or names the test that runs
it, as in ``<!-- run by tests/integration/test_x.py -->``. A ``text`` block right after a ``python``
block is what that one must print; after a ``console`` block, what its last command must, ids, times
and durations aside. The last command of a ``console`` block after the line
``<!-- serves at HOST:PORT -->`` serves until the page has ended.
"""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
_FENCE = re.compile(r"^(\s*)```(\w*)\s*$")
_NOT_RUN = re.compile(r"^\s*<!-- not run: \S.* -->\s*$")
_RUN_BY = re.compile(r"^\s*<!-- run by (\S+) -->\s*$")
_SERVES = re.compile(r"^\s*<!-- serves at (127\.0\.0\.1:\d+) -->\s*$")


@dataclasses.dataclass(frozen=True)
class Block:
    """One fenced block.

    Attributes:
        language: the word after its fence.
        text: what is in it.
        line: the line it begins on.
        run: whether to run it as a part of its page.
        by: the test that runs it otherwise, if one does.
        serves: the address at which its last command serves, if it does.
    """

    language: str
    text: str
    line: int
    run: bool
    by: str = ""
    serves: str = ""


def pages() -> list[Path]:
    """Return every page that may have examples."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def blocks(page: Path) -> list[Block]:
    """Return the fenced blocks of a page, in order."""
    found: list[Block] = []
    lines = page.read_text(encoding="utf-8").splitlines()
    at = 0
    while at < len(lines):
        opening = _FENCE.match(lines[at])
        if opening is None:
            at += 1
            continue
        indent, language = opening.groups()
        end = next(i for i in range(at + 1, len(lines)) if lines[i].strip() == "```")
        body = "\n".join(line.removeprefix(indent) for line in lines[at + 1 : end]) + "\n"
        before = next((line for line in reversed(lines[:at]) if line.strip()), "")
        by = match[1] if (match := _RUN_BY.match(before)) else ""
        serves = match[1] if (match := _SERVES.match(before)) else ""
        run = not (by or _NOT_RUN.match(before))
        found.append(Block(language, body, at + 2, run, by, serves))
        at = end + 1
    return found
