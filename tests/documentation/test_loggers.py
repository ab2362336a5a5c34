"""The table of loggers names each that warns."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from tests.documentation.pages import ROOT

PACKAGE = ROOT / "rebuno_sync"
#: ``log(level, …)`` may be any of them.
_WARNS = {"warning", "error", "exception", "critical", "log"}
_LOGGERS = {"log", "_log", "logging"}


def levels(path: Path) -> Iterator[str]:
    """Yield the names of the methods by which a module logs."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            on = node.func.value
            if isinstance(on, ast.Name) and on.id in _LOGGERS:
                yield node.func.attr


def test_every_logger_that_warns_is_in_the_table() -> None:
    modules = {
        ".".join(path.relative_to(ROOT).with_suffix("").parts): path
        for path in PACKAGE.rglob("*.py")
    }
    warning = {name for name, path in modules.items() if _WARNS & set(levels(path))}
    assert {"rebuno_sync.agent", "rebuno_sync.kernel.dispatch"} <= warning
    page = (ROOT / "docs" / "observability.md").read_text(encoding="utf-8")
    table = page.split("| logger | |\n")[1].split("\n\n")[0]
    named = [
        name
        for line in table.splitlines()
        for name in re.findall(r"`(rebuno_sync\.[\w.]+)`", line.split("|")[1])
    ]
    assert len(named) == len(set(named))
    assert set(named) == warning
