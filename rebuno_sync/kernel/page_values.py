"""How values read on the page: recorded JSON, times, sizes. Pure.

What agents send is not trusted to look like what it is: characters that are invisible, or that
turn the direction of writing, are shown as escapes.
"""

from __future__ import annotations

import dataclasses
import datetime
import json
import re
from collections.abc import Collection
from typing import Any, Final

import orjson

from rebuno_sync.kernel import jsontext
from rebuno_sync.live_text import LiveText

#: Longer JSON is not laid out in lines, in characters.
LAID_OUT: Final = 256 * 1024
#: How much of a value has to be read to show it, in characters.
READ: Final = LAID_OUT + 1
#: How much of a value stands on the page, in characters.
SHOWN: Final = 6_000
#: How much of a value stands in its one line, in characters.
HINT: Final = 160

_DECEPTIVE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\xad\u034f\u061c\u115f\u1160\u17b4\u17b5\u180b-\u180f\u200b\u200c"
    "\u200e\u200f\u2028-\u202e\u2060-\u206f\u3164\ufe00-\ufe0e\ufeff\uffa0\ufff0-\ufffb"
    "\U0001d173-\U0001d17a\U000e0000-\U000e0fff]"
)


_UNREADABLE: Final = object()


@dataclasses.dataclass(frozen=True)
class Shown:
    """A recorded value as the page has it.

    Attributes:
        hint: what it is about, in one line.
        text: what is shown, cut where it is long.
        size: the size of the whole, in bytes of JSON.
        is_cut: whether ``text`` is not the whole.
        note: what was taken apart to get at the text, such as ``HTTP 200``.
    """

    hint: str
    text: str
    size: int
    is_cut: bool
    note: str = ""


def visible(text: str) -> str:
    """Return ``text`` with deceptive characters written as ``\\u`` escapes."""
    return _DECEPTIVE.sub(_escape, text)


def _escape(match: re.Match[str]) -> str:
    code = ord(match.group())
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


def shown(raw: str, size: int, left_out: Collection[str] = ()) -> Shown:
    """Return how recorded JSON is shown.

    Args:
        raw: its text, or the first :data:`READ` characters of it.
        size: the size of the whole, in bytes.
        left_out: the fields that are not worth a hint.
    """
    value = _decoded(raw)
    text, note = _laid_out(raw, value)
    is_cut = len(raw) > LAID_OUT or len(text) > SHOWN
    return Shown(_hint(raw, value, left_out), visible(text[:SHOWN]), size, is_cut, note)


def hint(raw: str) -> str:
    """Return what recorded JSON is about, in one line."""
    return _hint(raw, _decoded(raw))


def _hint(raw: str, value: Any, left_out: Collection[str] = ()) -> str:
    if value is _UNREADABLE:
        line = raw
    elif isinstance(value, dict):
        pairs = (f"{n}: {_line(v)}" for n, v in value.items() if n not in left_out)
        line = _last_said(value) or ", ".join(pairs)
    else:
        line = "" if value is None else _line(value)
    return visible(f"{line[:HINT]}…" if len(line) > HINT else line)


def _last_said(value: dict[str, Any]) -> str:
    """Return the newest text in the request of an LLM call, if it is one."""
    said = value.get("messages", value.get("input"))
    if "model" in value and isinstance(said, list) and said and isinstance(said[-1], dict):
        said = said[-1].get("content")
    if isinstance(said, list):
        texts = [part["text"] for part in said if isinstance(part, dict) and "text" in part]
        said = texts[-1] if texts else ""
    return said if "model" in value and isinstance(said, str) else ""


def _laid_out(raw: str, value: Any) -> tuple[str, str]:
    """Return the text to show, and what it was taken from."""
    if value is _UNREADABLE:
        return raw, ""
    if isinstance(value, str):
        return value, ""
    if _is_response(value):
        kind = value["headers"].get("content-type", "")
        note = f"HTTP {_line(value['status'])}{f', {kind}' if kind else ''}"
        if kind.startswith("text/event-stream"):
            words = LiveText().feed(0, f"{value['body']}\n")
            if words.strip():
                return words, f"{note}: the words of the stream"
        body, _ = _laid_out(value["body"], _decoded(value["body"]))
        return body, note
    try:
        return orjson.dumps(value, option=orjson.OPT_INDENT_2).decode(), ""
    except TypeError:  # nested deeper than orjson goes
        return raw, ""


def _decoded(raw: str) -> Any:
    """Return the value of short JSON that can be shown without hiding anything."""
    if len(raw) > LAID_OUT or jsontext.nested_deeper(raw, jsontext.FRAGMENT_DEPTH):
        return _UNREADABLE
    try:
        return _decode(raw)
    except (ValueError, RecursionError):
        return _UNREADABLE


def _is_response(value: Any) -> bool:
    """Tell whether a value is the recorded response of an LLM call (PROTOCOL 11)."""
    return (
        isinstance(value, dict)
        and set(value) == {"status", "headers", "body"}
        and isinstance(value["headers"], dict)
        and all(isinstance(v, str) for v in value["headers"].values())
        and isinstance(value["body"], str)
    )


def _line(value: Any) -> str:
    if isinstance(value, str):
        return value
    try:
        return orjson.dumps(value).decode()
    except TypeError:  # nested deeper than orjson goes
        return "…"


def _pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) < len(pairs):
        raise ValueError("a name is there twice, and only one would be shown")
    return fields


# Numbers keep their text: 1e2 is shown as 1e2, and 20 digits as 20 digits.
_decode = json.JSONDecoder(
    parse_int=orjson.Fragment, parse_float=orjson.Fragment, object_pairs_hook=_pairs
).decode


def size(octets: int) -> str:
    """Return a size for people."""
    if octets < 1000:
        return f"{octets} bytes"
    if octets < 999_500:
        return f"{octets / 1000:.3g} kB"
    return f"{octets / 1_000_000:.3g} MB"


def duration(seconds: float) -> str:
    """Return a duration in the two units that matter."""
    if seconds < 0.0005:
        return "under 1 ms"
    if seconds < 0.9995:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 59.95:
        return f"{seconds:.0f} s" if seconds == int(seconds) else f"{seconds:.1f} s"
    whole = round(seconds)
    for unit, length, below, part in (
        ("d", 86400, "h", 3600),
        ("h", 3600, "min", 60),
        ("min", 60, "s", 1),
    ):
        if whole >= length:
            few = whole % length // part
            return f"{whole // length} {unit}" + (f" {few} {below}" if few else "")
    raise AssertionError("a minute is the least that gets here")


def clock(seconds: float, now: float, precise: bool = False) -> str:
    """Return a time in the kernel's time zone, with the day unless it is today's.

    Args:
        seconds: the time, since the Unix epoch.
        now: the time now.
        precise: whether milliseconds are wanted.
    """
    moment, today = _moment(seconds), _moment(now).date()
    time = f"{moment:%H:%M:%S}" + (f".{moment.microsecond // 1000:03}" if precise else "")
    if moment.date() == today:
        return time
    year = "" if moment.year == today.year else f" {moment.year}"
    return f"{moment.day} {moment:%b}{year} {time}"


def iso(seconds: float) -> str:
    """Return a time as machines read it, to the millisecond."""
    return _moment(seconds).isoformat(timespec="milliseconds")


def zone(now: float) -> str:
    """Return the name of the kernel's time zone."""
    return _moment(now).tzname() or "local time"


def _moment(seconds: float) -> datetime.datetime:
    return datetime.datetime.fromtimestamp(seconds, datetime.timezone.utc).astimezone()
