"""Strict JSON over raw text: what a kernel stores, splits and orders without changing it.

Accepts what Go's ``encoding/json`` accepts: RFC 8259, nothing more, at most 10000 levels deep;
undecodable bytes and lone surrogates are read as U+FFFD. Values keep the very text they were
sent in, numbers above all.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable
from typing import Any, Final, NoReturn, Union

import orjson

#: Deeper values are refused, as Go's decoder refuses them.
MAX_DEPTH: Final = 10_000
#: How deep a tree that holds an ``orjson.Fragment`` may be for ``orjson.dumps``: it keeps 64 bytes
#: for what closes after a fragment and writes on past its buffer when there is more (3.13.0).
FRAGMENT_DEPTH: Final = 60

_SPACE = re.compile(r"[ \t\n\r]*")
_UNDECODABLE = re.compile("[\udc80-\udcff]")
_SURROGATE_ESCAPE = re.compile(r"\\u[dD][89a-fA-F]")
_ESCAPE = re.compile(
    r"\\(?:u(?:([dD][89abAB][0-9a-fA-F]{2})(\\u[dD][c-fC-F][0-9a-fA-F]{2})?"
    r"|([dD][c-fC-F][0-9a-fA-F]{2}))|(?s:.))"
)
_QUOTED = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*"', re.DOTALL)
_NOT_BRACKET = re.compile(r"[^\[\]{}]+")
#: Text, in pieces that are pieced together in the end.
_Pieces = Union[str, "list[_Pieces]"]
_DEPTH_OF: Final = {"[": 1, "{": 1, "]": -1, "}": -1}


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


# The standard library's scanner is strict but for NaN and Infinity, and hands the text of a
# number to whatever it is told to; orjson writes a Fragment as it stands.
_scan: Callable[[str, int], tuple[Any, int]] = json.JSONDecoder(
    parse_int=orjson.Fragment, parse_float=orjson.Fragment, parse_constant=_no_constant
).scan_once  # type: ignore[attr-defined]
_scan_string: Callable[[str, int], tuple[str, int]] = json.decoder.scanstring  # type: ignore[attr-defined]


def decode_text(data: bytes) -> str:
    """Return ``data`` as text in which every undecodable byte and lone surrogate is U+FFFD."""
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError:
        # errors="replace" would make one U+FFFD of several bytes.
        text = _UNDECODABLE.sub("\ufffd", data.decode("utf-8", "surrogateescape"))
    if _SURROGATE_ESCAPE.search(text):
        text = _ESCAPE.sub(_mend_escape, text)
    return text


def _mend_escape(match: re.Match[str]) -> str:
    high, low, lone_low = match.groups()
    return "\\ufffd" if lone_low or (high and not low) else match.group()


def split_object(data: bytes) -> dict[str, str]:
    """Split a JSON object into its fields, each value in the raw text it was sent in.

    Of duplicate names the last wins.

    Raises:
        ValueError: ``data`` is not one JSON object.
    """
    text = decode_text(data)
    try:
        fields = _split(text, _scan)
    except RecursionError:
        fields = _split(text, _walk_inside)
    _check_depth(text)
    return fields


def _split(text: str, scan: Callable[[str, int], tuple[Any, int]]) -> dict[str, str]:
    fields: dict[str, str] = {}
    pos = _skip_space(text, 0)
    if text[pos : pos + 1] != "{":
        raise ValueError("expected a JSON object")
    pos = _skip_space(text, pos + 1)
    if text[pos : pos + 1] == "}":
        pos += 1
    else:
        while True:
            if text[pos : pos + 1] != '"':
                raise _error("expected a field name in double quotes", text, pos)
            name, pos = _scan_string(text, pos + 1)
            pos = _skip_space(text, pos)
            if text[pos : pos + 1] != ":":
                raise _error("expected ':'", text, pos)
            start = _skip_space(text, pos + 1)
            try:
                end = scan(text, start)[1]
            except StopIteration as stop:
                raise _error("expected a value", text, stop.value) from None
            fields[name] = text[start:end]
            pos = _skip_space(text, end)
            mark = text[pos : pos + 1]
            pos += 1
            if mark == "}":
                break
            if mark != ",":
                raise _error("expected ',' or '}'", text, pos - 1)
            pos = _skip_space(text, pos)
    _check_end(text, pos)
    return fields


def canonical(text: str) -> bytes:
    """Return the canonical form of JSON ``text`` that came out of :func:`decode_text`.

    Raises:
        ValueError: ``text`` is not one JSON value.
    """
    start = _skip_space(text, 0)
    if nested_deeper(text, FRAGMENT_DEPTH):
        walked, end = _walk(text, start, 0)
        encoded = walked.encode("utf-8")
    else:
        try:
            value, end = _scan(text, start)
        except StopIteration as stop:
            raise _error("expected a value", text, stop.value) from None
        encoded = orjson.dumps(value, option=orjson.OPT_SORT_KEYS)
    _check_end(text, end)
    return _escape_for_html(encoded)


def _escape_for_html(encoded: bytes) -> bytes:
    # All of these can only stand inside strings.
    for char, escape in _HTML:
        if char in encoded:
            encoded = encoded.replace(char, escape)
    return encoded


_HTML: Final = tuple(
    (char.encode("utf-8"), b"\\u%04x" % ord(char)) for char in ("<", ">", "&", "\u2028", "\u2029")
)


def _skip_space(text: str, pos: int) -> int:
    match = _SPACE.match(text, pos)
    return match.end() if match else pos


def _error(message: str, text: str, pos: int) -> ValueError:
    return json.JSONDecodeError(message, text, pos)


def _check_end(text: str, pos: int) -> None:
    pos = _skip_space(text, pos)
    if pos != len(text):
        raise _error("expected nothing more", text, pos)


def nested_deeper(text: str, levels: int) -> bool:
    """Tell whether JSON ``text`` is nested deeper than so many levels."""
    if text.count("[") + text.count("{") <= levels:
        return False
    brackets = _NOT_BRACKET.sub("", _QUOTED.sub("", text))
    depths = itertools.accumulate(map(_DEPTH_OF.__getitem__, brackets))
    return max(depths, default=0) > levels


def _check_depth(text: str) -> None:
    if nested_deeper(text, MAX_DEPTH):
        raise ValueError(f"the JSON is nested deeper than {MAX_DEPTH} levels")


def _walk_inside(text: str, pos: int) -> tuple[str, int]:
    return _walk(text, pos, 1)


def _walk(text: str, pos: int, depth: int) -> tuple[str, int]:
    """Read the value at ``pos`` without recursion; return its canonical form and its end.

    ``depth`` is how many levels are open around it.
    """
    open_values: list[dict[str, _Pieces] | list[_Pieces]] = []
    names: list[str] = []
    done: _Pieces
    while True:
        pos = _skip_space(text, pos)
        char = text[pos : pos + 1]
        if char == "{" or char == "[":
            if depth + len(open_values) >= MAX_DEPTH:
                raise ValueError(f"the JSON is nested deeper than {MAX_DEPTH} levels")
            inner = _skip_space(text, pos + 1)
            if text[inner : inner + 1] == ("}" if char == "{" else "]"):
                done, pos = ("{}" if char == "{" else "[]"), inner + 1
            elif char == "{":
                open_values.append({})
                name, pos = _name(text, inner)
                names.append(name)
                continue
            else:
                open_values.append([])
                pos = inner
                continue
        else:
            try:
                value, pos = _scan(text, pos)
            except StopIteration as stop:
                raise _error("expected a value", text, stop.value) from None
            done = orjson.dumps(value).decode("utf-8")
        while open_values:
            holder = open_values[-1]
            is_object = isinstance(holder, dict)
            if isinstance(holder, dict):
                holder[names[-1]] = done
            else:
                holder.append(done)
            pos = _skip_space(text, pos)
            mark = text[pos : pos + 1]
            pos += 1
            if mark == ",":
                if is_object:
                    names[-1], pos = _name(text, _skip_space(text, pos))
                break
            if mark != ("}" if is_object else "]"):
                raise _error(f"expected ',' or '{'}' if is_object else ']'}'", text, pos - 1)
            open_values.pop()
            if isinstance(holder, dict):
                names.pop()
                done = ["{"]
                for name in sorted(holder):
                    done += [orjson.dumps(name).decode("utf-8"), ":", holder[name], ","]
                done[-1] = "}"
            else:
                done = ["["]
                for item in holder:
                    done += [item, ","]
                done[-1] = "]"
        else:
            return _joined(done), pos


def _joined(value: _Pieces) -> str:
    # Once, at the end: joined at each level, what lies deep would be copied by every level.
    written: list[str] = []
    waiting = [value]
    while waiting:
        piece = waiting.pop()
        if isinstance(piece, str):
            written.append(piece)
        else:
            waiting += reversed(piece)
    return "".join(written)


def _name(text: str, pos: int) -> tuple[str, int]:
    """Read ``"name" :`` at ``pos``; return the name and where its value begins."""
    if text[pos : pos + 1] != '"':
        raise _error("expected a field name in double quotes", text, pos)
    name, pos = _scan_string(text, pos + 1)
    pos = _skip_space(text, pos)
    if text[pos : pos + 1] != ":":
        raise _error("expected ':'", text, pos)
    return name, pos + 1
