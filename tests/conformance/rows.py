"""The rows of the protocol and what holds each, as the page ``docs/conformance.md``.

    python -m tests.conformance.rows > docs/conformance.md

A row is what the docstring of a test begins with: the section, a colon, what the protocol says.
"""

from __future__ import annotations

import ast
import collections
import re
from pathlib import Path

HERE = Path(__file__).resolve().parent
PAGE = HERE.parents[1] / "docs" / "conformance.md"
_ROW = re.compile(r"(?P<where>\d[\d.]*(?:(?:,| and) (?:\d[\d.]*|generation \d))*): (?P<what>.+)")
_SECTIONS = {
    2: "Generations",
    3: "Authentication",
    4: "Agent routes",
    5: "Decisions",
    6: "Step identity",
    7: "What the kernel does",
    8: "Policy bundles",
    9: "Client and admin routes",
}
_HEAD = """# Conformance

What the wire protocol says, section by section, and the test that holds a kernel to it. All of them
run against the embedded kernel:

    pytest tests/conformance

and against any other that can reach this machine's loop-back interface:

    pytest tests/conformance --kernel-url URL --kernel-token TOKEN -ra

Those marked *in process* move the kernel's clock, start it with a setting, or break something of
it; they are skipped for another kernel, some in part, each with the reason. The page is written by
`python -m tests.conformance.rows`, and a test holds it against the suite.

No row here: what an agent does with a decision and how it reports a handler's end (section 5, held
by `tests/unit/test_agent.py` and `tests/integration/test_generations.py`); resources and suspending
(the last rows of section 4), which belong to the subagents, forks and resources of section 10, and
which the embedded kernel does not serve; sections 10 and 11.
"""
#: What a test that cannot leave the process, or not with every case, calls or asks for.
_IN_PROCESS = ("needs_clock", "needs_faults", "make_kernel", "pytest.skip(")


def tests() -> dict[str, list[tuple[str, str, bool]]]:
    """Return for each module its tests: name, row, and whether it runs in process only.

    Raises:
        ValueError: a test does not begin with a row.
    """
    found: dict[str, list[tuple[str, str, bool]]] = {}
    for path in sorted(HERE.glob("test_*.py")):
        source = path.read_text("utf-8")
        for node in ast.parse(source).body:
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                row = (ast.get_docstring(node) or "").split("\n\n")[0].replace("\n", " ")
                if not _ROW.fullmatch(row):
                    raise ValueError(f"{path.name}: {node.name} does not begin with a row: {row!r}")
                text = ast.get_source_segment(source, node) or ""
                inside = any(sign in text for sign in _IN_PROCESS)
                found.setdefault(path.stem, []).append((node.name, row, inside))
    return found


def page() -> str:
    """Return the page."""
    sections: dict[int, list[str]] = collections.defaultdict(list)
    for module, rows in tests().items():
        for name, row, inside in rows:
            match = _ROW.fullmatch(row)
            assert match is not None
            what = match["what"].replace("|", "\\|")
            where = f"`{module}.{name}`" + (" *in process*" if inside else "")
            number = int(match["where"].partition(".")[0].partition(",")[0].split()[0])
            sections[number].append(f"| {match['where']} | {what} | {where} |")
    parts = [_HEAD]
    for number, title in _SECTIONS.items():
        rows = "\n".join(sections.pop(number))
        parts.append(f"## {number} {title}\n\n| | | test |\n| --- | --- | --- |\n{rows}\n")
    assert sections.keys() <= {1}
    parts.insert(1, "\n".join(["## 1 The parts", "", "| | | test |", "| --- | --- | --- |"]))
    parts[1] += "\n" + "\n".join(sections[1]) + "\n"
    return "\n".join(parts)


if __name__ == "__main__":
    print(page(), end="")
