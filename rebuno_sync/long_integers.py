"""Integers beyond what Python converts from and to text by itself, which stops at 4300 digits."""

from __future__ import annotations

import decimal
import math
from collections.abc import Callable
from typing import Any, Final

#: Longer ones are refused: the time it takes to read or write one grows faster than its length.
MAX_DIGITS: Final = 100_000


def encode(plain: Any, root: str, encode_rest: Callable[[Any], str]) -> str:
    """Return the JSON of dicts, lists and scalars that holds long integers somewhere.

    Args:
        plain: what to encode.
        root: what an error calls it.
        encode_rest: encodes what holds none.

    Raises:
        TypeError: an integer has more than :data:`MAX_DIGITS` digits.
    """
    if isinstance(plain, dict):
        rows = ((encode_rest(k), encode(v, root, encode_rest)) for k, v in plain.items())
        return "{" + ",".join(f"{key}:{value}" for key, value in rows) + "}"
    if isinstance(plain, list):
        return "[" + ",".join(encode(v, root, encode_rest) for v in plain) + "]"
    if type(plain) is int and plain.bit_length() > 2000:
        text = f"{decimal.Decimal(plain):f}" if plain.bit_length() < 4 * MAX_DIGITS else ""
        if not text or len(text.lstrip("-")) > MAX_DIGITS:
            raise TypeError(
                f"{root} holds an integer of more than {MAX_DIGITS} digits; pass it as text"
            )
        return text
    return encode_rest(plain)


def parse(text: str) -> int | float:
    """Return the integer that ``text`` is; beyond :data:`MAX_DIGITS` it is infinite, as 1e999 is.

    Args:
        text: decimal digits, with or without a minus.
    """
    sign, digits = (-1, text[1:]) if text.startswith("-") else (1, text)
    return sign * (math.inf if len(digits) > MAX_DIGITS else _natural(digits))


def _natural(digits: str) -> int:
    # By halves: int() and decimal take time in the square of the length.
    if len(digits) < 640:
        return int(digits)
    half = len(digits) // 2
    shift: int = 10**half
    return _natural(digits[:-half]) * shift + _natural(digits[-half:])
