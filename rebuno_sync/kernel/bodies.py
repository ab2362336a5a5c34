"""Request bodies: a JSON object whose fields are all known, read one by one."""

from __future__ import annotations

import json
import math
from typing import Any, Final

from rebuno_sync.kernel import jsontext, refusals

#: What 64 bits hold, which is as far as databases and other readers of JSON go.
MAX_INTEGER: Final = 2**63 - 1


class Body:
    """The fields of a request body.

    A field that is ``null`` is taken as absent, but by :meth:`raw`.

    Args:
        data: the body as it came.
        known: the names a field may have.

    Raises:
        ValidationError: it is not a JSON object, or has an unknown field.
    """

    def __init__(self, data: bytes, *known: str) -> None:
        if not data.strip():
            raise refusals.invalid("the request has no body; send a JSON object")
        try:
            self._fields = jsontext.split_object(data)
        except ValueError as exc:
            raise refusals.invalid(f"the body is not a JSON object: {exc}") from None
        for name in self._fields:
            if name not in known:
                fields = f"the fields are {', '.join(known)}" if known else "there are none"
                raise refusals.invalid(f"unknown field {name!r:.100}; {fields}")

    def raw(self, name: str) -> str | None:
        """Return the JSON text of a field, ``None`` when it is absent."""
        return self._fields.get(name)

    def value(self, name: str) -> Any:
        """Return the value of a small field, ``None`` when it is absent or null."""
        raw = self._fields.get(name)
        try:
            return None if raw is None else json.loads(raw)
        except (ValueError, RecursionError):  # an endless integer, or a value nested too deep
            raise refusals.invalid(f"{name} is not a value that can be used here") from None

    def text(self, name: str) -> str | None:
        """Return a field that is text, ``None`` when it is absent.

        Raises:
            ValidationError: it is not text.
        """
        value = self.value(name)
        if value is not None and not isinstance(value, str):
            raise refusals.invalid(f"{name} must be text, got {self.raw(name):.100}")
        return value

    def required_text(self, name: str) -> str:
        """Return a field that must be there, as text that is not empty.

        Raises:
            ValidationError: it is not.
        """
        value = self.text(name)
        if not value:
            raise refusals.invalid(f"{name} is missing")
        return value

    def count(self, name: str) -> int:
        """Return a field that must be there, as an integer from 0 to 2⁶³-1.

        Raises:
            ValidationError: it is not.
        """
        value = self.value(name)
        if type(value) is not int or not 0 <= value <= MAX_INTEGER:
            raise refusals.invalid(f"{name} must be an integer from 0 to {MAX_INTEGER}")
        return value

    def number(self, name: str) -> float | None:
        """Return a field that is a number, ``None`` when it is absent.

        Raises:
            ValidationError: it is not a number.
        """
        value = self.value(name)
        if value is None:
            return None
        try:
            number = float(value) if type(value) in (int, float) else math.nan
        except OverflowError:
            number = math.inf
        if not math.isfinite(number):
            raise refusals.invalid(f"{name} must be a number, got {self.raw(name):.100}")
        return number
