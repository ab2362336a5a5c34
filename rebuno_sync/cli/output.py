"""Results on the standard output: JSON lines for programs, text and tables for people.

What comes from a kernel is never taken for markup, and control characters in it are shown, not
sent: a tool's argument must not be able to redraw the terminal of whoever approves it.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import re
import sys
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import click

from rebuno_sync import wire
from rebuno_sync.wire import Model

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.text import Text

#: C0 and C1 controls but newline and tab, what sets the direction of text, and lone surrogates.
_UNSAFE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]"
)
_WHITE = re.compile(r"\s*[\r\n\t]\s*")
#: A table that is not for a screen is never cut.
_UNBOUNDED = 100_000
#: The last column of a table on a screen is folded, but not to fewer characters than this.
_LEAST_FOLDED = 24

STYLES = {
    "pending": "yellow",
    "running": "cyan",
    "executing": "cyan",
    "proposed": "cyan",
    "allowed": "cyan",
    "blocked": "yellow",
    "awaiting_approval": "yellow",
    "completed": "green",
    "succeeded": "green",
    "granted": "green",
    "failed": "red",
    "denied": "red",
    "expired": "red",
    "cancelled": "magenta",
}


def visible(text: str) -> str:
    """Return ``text`` with what could steer a terminal replaced by visible characters."""
    return _UNSAFE.sub(_picture, text)


def _picture(found: re.Match[str]) -> str:
    code = ord(found.group())
    if code < 0x20:
        return chr(0x2400 + code)
    return "\u2421" if code == 0x7F else "\ufffd"


def one_line(text: str) -> str:
    """Return ``text`` on one line, safe to show."""
    return visible(_WHITE.sub(" ", text.strip()))


def compact(value: Any, width: int = 0) -> str:
    """Return a JSON value on one line, cut to ``width`` characters unless that is 0."""
    text = one_line(json_text(value))
    return text if not width or len(text) <= width else text[: width - 1] + "…"


def json_text(value: Any) -> str:
    """Return the JSON of whatever a kernel sent, on one line."""
    try:
        return wire.encode(value, "value").decode("utf-8")
    except TypeError:
        # Half a surrogate pair, or a very deep value: not for us to refuse.
        return json.dumps(value, separators=(",", ":"))


def pretty(value: Any) -> str:
    """Return the JSON of a value as people like to read it."""
    try:
        return json.dumps(value, ensure_ascii=False, indent=2)
    except ValueError:  # an integer longer than sys.get_int_max_str_digits()
        return json_text(value)


def plain(value: Any) -> Any:
    """Return a model as an object: every known field, then those that the kernel added."""
    if isinstance(value, Model):
        fields = dataclasses.fields(value)
        known = {f.name: getattr(value, f.name) for f in fields if f.name != "extra"}
        return {**known, **{k: v for k, v in value.extra.items() if k not in known}}
    return value


class Output:
    """Prints results.

    Args:
        json: whether as JSON.
    """

    def __init__(self, *, json: bool) -> None:
        self.json = json

    @functools.cached_property
    def console(self) -> Console:
        """The standard output, for people."""
        from rich.console import Console

        reconfigure = getattr(sys.stdout, "reconfigure", None)
        if reconfigure is not None:
            reconfigure(errors="replace")
        console = Console(highlight=False, markup=False, emoji=False)
        if not console.is_terminal:
            console.width = _UNBOUNDED
        return console

    @property
    def unicode(self) -> bool:
        """Whether more than ASCII can be drawn."""
        return self.console.encoding.startswith("utf")

    def record(self, value: Any) -> None:
        """Print one JSON line."""
        click.echo(json_text(plain(value)).encode("utf-8"))

    def line(self, *parts: str | tuple[str, str]) -> None:
        """Print a line of text; a part may be a pair of text and style."""
        self.console.print(self.text(*parts), soft_wrap=True)

    @staticmethod
    def text(*parts: str | tuple[str, str]) -> Text:
        """Return text made of parts, safe to show."""
        from rich.text import Text

        made = Text()
        for part in parts:
            words, style = part if isinstance(part, tuple) else (part, "")
            made.append(visible(words), style)
        return made

    def note(self, message: str) -> None:
        """Say something that is no result, on the standard error stream."""
        click.echo(visible(message), err=True)

    def table(self, columns: Sequence[str], rows: Iterable[Sequence[str]], *, empty: str) -> None:
        """Print a table, or a block for each row where the terminal is too narrow for one.

        Args:
            columns: the headings; one that is called ``status`` is coloured.
            rows: the cells.
            empty: what to say, on the standard error stream, when there are no rows.
        """
        cells = [[one_line(cell) for cell in row] for row in rows]
        if not cells:
            self.note(empty)
            return
        table = self._table(columns, cells)
        if not self.console.is_terminal:
            with self.console.capture() as captured:
                self.console.print(table)
            for line in captured.get().splitlines():
                click.echo(line.rstrip())
        elif _least_width(columns, cells) <= self.console.width:
            self.console.print(table)
        else:
            self._blocks(columns, cells)

    def _table(self, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> RenderableType:
        from rich.table import Table

        table = Table(box=None, pad_edge=False)
        for name in columns:
            table.add_column(name, no_wrap=name != columns[-1], overflow="fold")
        for row in rows:
            table.add_row(*(self._cell(n, c) for n, c in zip(columns, row, strict=True)))
        return table

    def _cell(self, column: str, cell: str) -> Text:
        return self.text((cell, STYLES.get(cell, "") if column == "status" else ""))

    def _blocks(self, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        for number, row in enumerate(rows):
            if number:
                self.console.print()
            self.fields([(n, c) for n, c in zip(columns, row, strict=True) if c])

    def fields(self, pairs: Iterable[tuple[str, str]]) -> None:
        """Print names and values, a line for each; a value may have several lines."""
        for name, value in pairs:
            style = STYLES.get(value, "") if name == "status" else ""
            shown = value if "\n" not in value else "\n  " + value.replace("\n", "\n  ")
            self.line((f"{name}: ", "bold"), (shown, style))


def _least_width(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> int:
    """Return how wide a terminal must be for a table: only the last column may be folded."""
    from rich.cells import cell_len

    widths = [max(map(cell_len, cells)) for cells in zip(columns, *rows, strict=True)]
    return sum(widths[:-1]) + min(widths[-1], _LEAST_FOLDED) + 2 * (len(columns) - 1)
