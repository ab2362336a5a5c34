"""Values that are given on the command line."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, TypeVar

import click

from rebuno_sync import wire
from rebuno_sync.cli.session import Misuse

F = TypeVar("F", bound=Callable[..., Any])


def id_argument(name: str, metavar: str) -> Callable[[F], F]:
    """Return an argument that takes one id, or several where ``metavar`` ends in dots."""
    several = metavar.endswith("...")
    return click.argument(
        name, metavar=metavar, callback=_checked_ids, nargs=-1 if several else 1, required=True
    )


def _checked_ids(context: click.Context, parameter: click.Parameter, value: Any) -> Any:
    for id in value if isinstance(value, tuple) else (value,):
        try:
            wire.segment(id)
        except ValueError as exc:
            raise click.BadParameter(str(exc)) from None
    return value


def read_text(source: str) -> str:
    """Return the text of a file, or of the standard input for ``-``.

    Raises:
        Misuse: it cannot be read, or is not UTF-8.
    """
    name = "the standard input" if source == "-" else source
    try:
        if source == "-":
            data = sys.stdin.buffer.read()
        else:
            with open(source, "rb") as file:
                data = file.read()
        return data.decode("utf-8-sig")
    except OSError as exc:
        raise Misuse(f"cannot read {name}: {exc.strerror}") from None
    except UnicodeDecodeError as exc:
        raise Misuse(f"{name} is not UTF-8: {exc}") from None


def read_json(given: str) -> Any:
    """Return what ``--input`` means: JSON itself, ``@file``, or ``-`` for the standard input.

    Raises:
        Misuse: it is not JSON, or cannot be read.
    """
    if given == "-":
        name, text = "the standard input", read_text("-")
    elif given.startswith("@"):
        name, text = given[1:], read_text(given[1:])
    else:
        name, text = "--input", given
    try:
        return wire.decode(text.encode("utf-8", "surrogateescape"))
    except ValueError as exc:
        hint = "" if name != "--input" else "; text needs its quotes: --input '\"hello\"'"
        raise Misuse(f"{name} is not JSON: {exc}{hint}") from None


def is_interactive() -> bool:
    """Tell whether a person can be asked: both ends are terminals."""
    return sys.stdin.isatty() and sys.stdout.isatty()
