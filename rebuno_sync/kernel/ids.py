"""UUIDv7 ids (RFC 9562): made in the order of the kernel's clock."""

from __future__ import annotations

import os
import re
import uuid

_UUID = re.compile(r"[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}")


def new_id(now: float) -> str:
    """Return a new UUIDv7 for the time ``now``, in seconds since the Unix epoch."""
    # The twelve bits after the version hold the part of a millisecond, so that ids sort finer.
    ticks = int(now * 1000 * 4096)
    value = (ticks >> 12) << 80 | 0x7 << 76 | (ticks & 0xFFF) << 64
    value |= 0b10 << 62 | int.from_bytes(os.urandom(8), "big") >> 2
    return str(uuid.UUID(int=value))


def parse_id(text: str) -> str | None:
    """Return ``text`` in lower case when it is a UUID, else ``None``."""
    return text.lower() if _UUID.fullmatch(text) else None
