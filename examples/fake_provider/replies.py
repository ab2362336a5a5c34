"""What the provider says to one request, whichever API it came by."""

from __future__ import annotations

import dataclasses
import json
import re
import threading
from collections.abc import Mapping, Sequence
from typing import Any, Literal


@dataclasses.dataclass(frozen=True)
class ToolCall:
    """A call of a tool that the model asks for."""

    name: str
    arguments: Mapping[str, Any]

    @property
    def json(self) -> str:
        return json.dumps(self.arguments, ensure_ascii=False, separators=(",", ":"))


@dataclasses.dataclass(frozen=True)
class Reply:
    """One answer; made by :func:`text`, :func:`calls`, :func:`data`, :func:`error`, :func:`raw`.

    The methods return a changed copy, so they can be chained.

    Attributes:
        pieces: the text of the answer, in the pieces that a stream sends it in.
        tool_calls: the tools that the model wants called.
        stop: ``"length"`` when the model was cut short by its token limit.
        status: the HTTP status; from 400 up, ``message`` is sent as the API's error.
        message: the text of an error.
        headers: further headers, such as ``retry-after``.
        body: bytes to send as they are, in these chunks, instead of an API's answer.
        gap: seconds between two events of a stream.
        delay: seconds before the answer begins.
        cut_after: the connection is closed after so many events (of a stream) or bytes (else).
        error_after: an error event with ``message`` ends a stream after so many events.
        hold_after: with ``hold``: after so many events (0: before the head of the answer)
            ``hold`` is waited for.
        chunk_bytes: a stream is sent in chunks of so many bytes, wherever they fall.
        gzip: the body is compressed.
    """

    pieces: tuple[str, ...] = ()
    tool_calls: tuple[ToolCall, ...] = ()
    stop: Literal["end", "length"] = "end"
    status: int = 200
    message: str = ""
    headers: tuple[tuple[str, str], ...] = ()
    body: tuple[bytes, ...] | None = None
    gap: float = 0.0
    delay: float = 0.0
    cut_after: int | None = None
    error_after: int | None = None
    hold_after: int = 0
    hold: threading.Event | None = None
    chunk_bytes: int | None = None
    gzip: bool = False

    @property
    def text(self) -> str:
        return "".join(self.pieces)

    def and_calls(self, name: str, /, **arguments: Any) -> Reply:
        """The same, with one more tool call."""
        return dataclasses.replace(self, tool_calls=(*self.tool_calls, ToolCall(name, arguments)))

    def with_headers(self, **headers: str) -> Reply:
        """The same with further headers; ``_`` in a name stands for ``-``."""
        more = tuple((name.replace("_", "-"), value) for name, value in headers.items())
        return dataclasses.replace(self, headers=(*self.headers, *more))

    def slow(self, gap: float = 0.0, delay: float = 0.0) -> Reply:
        """The same after ``delay`` seconds, with ``gap`` seconds between the events of a stream."""
        return dataclasses.replace(self, gap=gap, delay=delay)

    def held(self, until: threading.Event, after: int = 0) -> Reply:
        """The same, but ``until`` is waited for after ``after`` events (0: before anything)."""
        return dataclasses.replace(self, hold=until, hold_after=after)

    def cut(self, after: int) -> Reply:
        """The same, but the connection breaks after ``after`` events, or bytes of a plain body."""
        return dataclasses.replace(self, cut_after=after)

    def failing(self, after: int, message: str = "the model is overloaded") -> Reply:
        """The same, but a stream ends with an error event after ``after`` events."""
        return dataclasses.replace(self, error_after=after, message=message)

    def in_chunks_of(self, size: int) -> Reply:
        """The same with a stream's bytes sent ``size`` at a time, wherever that splits them."""
        return dataclasses.replace(self, chunk_bytes=size)

    def gzipped(self) -> Reply:
        """The same with a compressed body."""
        return dataclasses.replace(self, gzip=True)

    def cut_short(self) -> Reply:
        """The same, ended by the token limit."""
        return dataclasses.replace(self, stop="length")


def text(*pieces: str) -> Reply:
    """An answer in words; a single piece is streamed word by word."""
    if len(pieces) == 1:
        return Reply(pieces=tuple(re.findall(r"\S+\s*|\s+", pieces[0])))
    return Reply(pieces=pieces)


def calls(name: str, /, **arguments: Any) -> Reply:
    """A request to call one tool; more are added with :meth:`Reply.and_calls`."""
    return Reply(tool_calls=(ToolCall(name, arguments),))


def data(value: Any) -> Reply:
    """An answer in JSON, as structured output gives it."""
    encoded = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    return Reply(pieces=tuple(encoded[at : at + 8] for at in range(0, len(encoded), 8)))


def error(status: int, message: str = "", *, retry_after: float | None = None) -> Reply:
    """An error of the API: 400, 401, 403, 404, 408, 409, 413, 422, 429, 500, 503, 529."""
    headers = () if retry_after is None else (("retry-after", f"{retry_after:g}"),)
    return Reply(status=status, message=message or f"scripted error {status}", headers=headers)


def raw(
    body: bytes | Sequence[bytes],
    status: int = 200,
    content_type: str = "application/json",
    headers: Mapping[str, str] | None = None,
) -> Reply:
    """An answer byte for byte; given several chunks, it is sent chunked."""
    chunks = (body,) if isinstance(body, bytes) else tuple(body)
    more = tuple((headers or {}).items())
    return Reply(status=status, body=chunks, headers=(("content-type", content_type), *more))


def dropped() -> Reply:
    """No answer: the connection is closed."""
    return Reply(status=0)
