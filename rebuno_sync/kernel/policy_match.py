"""Globs, regular expressions and the text of arguments, as Go's kernel compares them (PROTOCOL 8).

Both kinds of pattern run on RE2: the time of a match is linear in the text, whatever the pattern.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from typing import Any, NoReturn

import re2  # type: ignore[import-untyped]

Matcher = Callable[[str], bool]

_SURROGATE = re.compile("[\ud800-\udfff]")
_LAST_CHARACTER = 0x10FFFF
#: The time of a match grows with the pattern as well; no rule needs one as long as this.
LONGEST_PATTERN = 1000


def compile_glob(pattern: str) -> Matcher:
    """Return a test of whole texts against a glob of Go's ``path.Match``.

    ``*`` and ``?`` match ``/`` as well. A pattern is read to its end here, so that one that Go
    would find malformed only for certain texts is malformed for all.

    Raises:
        ValueError: the pattern is malformed; the message says where.
    """
    _check_length(pattern)
    parts: list[str] = []
    at = 0
    while at < len(pattern):
        char = pattern[at]
        if char == "[":
            expression, at = _character_class(pattern, at + 1)
            parts.append(expression)
            continue
        if char == "\\":
            at += 1
            if at == len(pattern):
                raise ValueError("it ends in a lone backslash; write \\\\ for a backslash itself")
            parts.append(re2.escape(pattern[at]))
        else:
            parts.append({"*": "(?s:.)*", "?": "(?s:.)"}.get(char) or re2.escape(char))
        at += 1
    return _compiled(r"\A" + "".join(parts) + r"\z")


def _character_class(pattern: str, at: int) -> tuple[str, int]:
    """Read a class from behind its ``[``; return its expression and where it ends."""
    negated = pattern.startswith("^", at)
    at += negated
    ranges: list[tuple[int, int]] = []
    while not (ranges and pattern.startswith("]", at)):
        low, at = _class_character(pattern, at)
        high = low
        if pattern.startswith("-", at):
            high, at = _class_character(pattern, at + 1)
        ranges.append((low, high))
    # Go reads [z-a] as a class that holds nothing, where RE2 would refuse it.
    held = "".join(rf"\x{{{low:x}}}-\x{{{high:x}}}" for low, high in ranges if low <= high)
    if held:
        return f"[{'^' if negated else ''}{held}]", at + 1
    return rf"[{'' if negated else '^'}\x00-\x{{{_LAST_CHARACTER:x}}}]", at + 1


def _class_character(pattern: str, at: int) -> tuple[int, int]:
    if pattern.startswith(("-", "]"), at):
        raise ValueError(
            f"{pattern[at]!r} stands in a [character class] where a character must; "
            f"write \\{pattern[at]} to mean it literally"
        )
    at += pattern.startswith("\\", at)
    # Inside a class no character is the last of the pattern: the ] must follow.
    if at + 1 >= len(pattern):
        raise ValueError("a [character class] is not closed; write \\[ to mean it literally")
    return ord(pattern[at]), at + 1


def compile_regex(pattern: str) -> Matcher:
    """Return a test that searches texts for an RE2 expression, not anchored.

    Raises:
        ValueError: RE2 does not know the syntax, or the expression is too large.
    """
    _check_length(pattern)
    return _compiled(pattern)


def _check_length(pattern: str) -> None:
    if len(pattern) > LONGEST_PATTERN:
        raise ValueError(f"it has more than {LONGEST_PATTERN} characters")


def _compiled(pattern: str) -> Matcher:
    options = re2.Options()
    options.log_errors = False  # RE2 would write to the standard error stream
    try:
        compiled = re2.compile(pattern, options)
    except re2.error as exc:
        problem = exc.args[0]
        raise ValueError(
            problem.decode("utf-8", "replace") if isinstance(problem, bytes) else str(problem)
        ) from None

    def matches(text: str) -> bool:
        return compiled.search(valid_text(text)) is not None

    return matches


def valid_text(text: str) -> str:
    """Return ``text`` with each lone surrogate as U+FFFD, as a Go program would hold it."""
    return text if text.isascii() else _SURROGATE.sub("\ufffd", text)


def decode_arguments(args: bytes) -> dict[str, Any]:
    """Decode the arguments of a step the way Go does; anything but an object has no keys.

    Every number becomes a float. Undecodable bytes and lone surrogates in keys become U+FFFD,
    the last of duplicate keys wins.

    Raises:
        ValueError: ``args`` is not JSON.
        RecursionError: it is nested too deeply.
    """
    value = json.loads(
        args.decode("utf-8", "surrogateescape") or "null",
        parse_int=float,
        parse_constant=_refuse_constant,
        object_pairs_hook=lambda pairs: {valid_text(key): value for key, value in pairs},
    )
    return value if isinstance(value, dict) else {}


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def argument_text(value: Any) -> str:
    """Return the text that a decoded argument is compared as: Go's ``%v`` of it."""
    written: list[str] = []
    # Values still to write, the next one last; text that stands between them is in a tuple.
    waiting = [value]
    while waiting:
        value = waiting.pop()
        if isinstance(value, tuple):
            written.append(value[0])
        elif isinstance(value, list):
            waiting.append(("]",))
            for position, item in reversed(list(enumerate(value))):
                waiting += [item, (" ",)] if position else [item]
            written.append("[")
        elif isinstance(value, dict):
            waiting.append(("]",))
            # Go sorts by UTF-8 bytes, which is the order of code points.
            for position, key in reversed(list(enumerate(sorted(value)))):
                waiting += [value[key], (f" {key}:" if position else f"{key}:",)]
            written.append("map[")
        else:
            written.append(_scalar_text(value))
    return "".join(written)


def _scalar_text(value: Any) -> str:
    if isinstance(value, str):
        return valid_text(value)
    if isinstance(value, bool):
        return "true" if value else "false"
    return "<nil>" if value is None else _number_text(value)


def _number_text(value: float) -> str:
    if math.isinf(value):
        return "+Inf" if value > 0 else "-Inf"
    shortest = repr(value)
    if abs(value) < 1e6 or "e" in shortest:
        return shortest.removesuffix(".0")
    # Go turns to the exponent from 1e+06 on, Python only from 1e+16.
    sign = "-" if value < 0 else ""
    whole, _, fraction = shortest.lstrip("-").partition(".")
    digits = (whole + fraction).rstrip("0")
    point = "." if len(digits) > 1 else ""
    return f"{sign}{digits[0]}{point}{digits[1:]}e+{len(whole) - 1:02d}"
