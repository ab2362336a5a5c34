"""Server-Sent Events, out of bytes that come in pieces. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final

#: Longer lines are refused: a kernel's have a few kilobytes.
LONGEST_LINE: Final = 1 << 20


def data_lines(pieces: Iterable[bytes]) -> Iterator[bytes]:
    """Yield what stands behind each ``data:``, as soon as its line is whole.

    Args:
        pieces: the stream, cut anywhere.

    Raises:
        ValueError: a line is longer than :data:`LONGEST_LINE`.
    """
    held: list[bytes] = []
    size = 0
    for piece in pieces:
        first, *others = piece.split(b"\n")
        for begun in others:
            line = b"".join([*held, first])
            if line.startswith(b"data:"):
                yield line[5:].rstrip(b"\r")
            held, size, first = [], 0, begun
        held.append(first)
        size += len(first)
        if size > LONGEST_LINE:
            raise ValueError(f"a line is longer than {LONGEST_LINE} bytes")
