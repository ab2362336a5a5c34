"""Times and durations, from the wire to what a person reads."""

from __future__ import annotations

import datetime
import re

_RFC_3339 = re.compile(
    r"(\d{4}-\d\d-\d\d)[Tt ](\d\d:\d\d:\d\d)(?:\.(\d+))?([Zz]|[+-]\d\d:\d\d)",
)


def parse_time(text: str | None) -> datetime.datetime | None:
    """Return an RFC 3339 time, of whatever precision, or ``None`` when ``text`` is none."""
    found = _RFC_3339.fullmatch(text or "")
    if found is None:
        return None
    date, clock, fraction, zone = found.groups()
    micros = ((fraction or "") + "000000")[:6]
    offset = "+00:00" if zone in ("Z", "z") else zone
    try:
        return datetime.datetime.fromisoformat(f"{date}T{clock}.{micros}{offset}")
    except ValueError:
        return None


def now() -> datetime.datetime:
    """Return the time, with its zone."""
    return datetime.datetime.now(datetime.timezone.utc)


def between(begin: str | None, end: str | None) -> float | None:
    """Return the seconds between two times of the wire; never below 0."""
    first, last = parse_time(begin), parse_time(end)
    if first is None or last is None:
        return None
    return max((last - first).total_seconds(), 0.0)


def clock_text(text: str | None) -> str:
    """Return the time of day, here, to the millisecond."""
    found = parse_time(text)
    return found.astimezone().strftime("%H:%M:%S.%f")[:-3] if found else ""


def age_text(text: str | None) -> str:
    """Return how long ago, or how far ahead, a time of the wire is."""
    found = parse_time(text)
    if found is None:
        return ""
    seconds = (now() - found).total_seconds()
    return f"{duration_text(seconds)} ago" if seconds >= 0 else f"in {duration_text(-seconds)}"


def duration_text(seconds: float | None) -> str:
    """Return a duration in the two units that matter."""
    if seconds is None:
        return ""
    if seconds < 0.9995:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    for unit, size, below, part in (("d", 86400, "h", 3600), ("h", 3600, "m", 60)):
        if whole >= size:
            return _two(whole // size, unit, whole % size // part, below)
    return _two(whole // 60, "m", whole % 60, "s")


def _two(many: int, unit: str, few: int, below: str) -> str:
    return f"{many} {unit} {few} {below}" if few else f"{many} {unit}"
