"""What is formatted into SQL: pieces of the code's own making, each looked at and listed here."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import rebuno_sync

KERNEL = Path(rebuno_sync.__file__).parent / "kernel"
_SQL = re.compile(r"\b(SELECT|INSERT|UPDATE|DELETE|FROM|WHERE|ORDER BY|VALUES)\b")

#: By module. All are constants of the code, names of columns and tables that the code passes to
#: itself, or question marks, one for each value.
REVIEWED = {
    ("budgets", "column"),
    ("deadlines", "_GOING_ON"),
    ("deliveries", "columns"),
    ("deliveries", "marks"),
    ("metrics", "columns"),
    ("metrics", "table"),
    ("metrics", "where"),
    ("page_approvals", "READ"),
    ("page_data", "' WHERE ' + where if where else ''"),  # names of filters, from a constant
    ("page_data", "EXECUTION_COLUMNS"),
    ("page_data", "READ"),
    ("page_data", "column"),  # from a route that takes no other words
    ("page_data", "key"),
    ("page_data", "marks(ids)"),
    ("page_data", "owner"),
    ("page_data", "table"),
    ("page_execution", "EXECUTION_COLUMNS"),
    ("page_execution", "READ"),
    ("page_execution", "columns"),
    ("page_execution", "marks(step_ids)"),
    ("queries", "' AND '.join(conditions)"),  # names of filters, from a constant
    ("queries", "columns"),
    ("queries", "where"),
    ("retention", "_ENDED"),
    ("retention", "columns"),
    ("retention", "key"),
    ("retention", "most"),
    ("retention", "table"),
    ("steps", "column"),
    ("store", "','.join(row)"),  # names of columns, never of what was sent
    ("store", "marks"),
    ("store", "table"),
}


def pieces(source: str) -> Iterator[str]:
    """What is formatted into text that looks like SQL."""
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.JoinedStr):
            continue
        text = "".join(p.value for p in node.values if isinstance(p, ast.Constant))
        if _SQL.search(text):
            for part in node.values:
                if isinstance(part, ast.FormattedValue):
                    yield ast.unparse(part.value)


def test_every_piece_of_sql_is_known() -> None:
    found = {
        (path.stem, piece)
        for path in sorted(KERNEL.glob("*.py"))
        for piece in pieces(path.read_text("utf-8"))
    }
    assert found == REVIEWED, "values are parameters; list here what is of the code's own making"


def test_no_sql_is_put_together_otherwise() -> None:
    for path in sorted(KERNEL.glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mod):
                assert not _SQL.search(ast.unparse(node.left)), path
            if isinstance(node, ast.Call) and ast.unparse(node.func).endswith(".format"):
                assert not _SQL.search(ast.unparse(node.func)), path
