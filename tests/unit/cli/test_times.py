"""Times and durations as people read them."""

from __future__ import annotations

import datetime

import pytest

from rebuno_sync.cli.times import age_text, between, duration_text, now, parse_time

UTC = datetime.timezone.utc


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("2026-11-29T14:23:14Z", datetime.datetime(2026, 11, 29, 14, 23, 14, tzinfo=UTC)),
        (
            "2026-11-29T14:23:14.123456789Z",
            datetime.datetime(2026, 11, 29, 14, 23, 14, 123456, tzinfo=UTC),
        ),
        (
            "2026-11-29T14:23:14.5+02:00",
            datetime.datetime(2026, 11, 29, 12, 23, 14, 500000, tzinfo=UTC),
        ),
        ("2026-13-29T14:23:14Z", None),
        ("2026-11-29T14:23:14", None),
        ("yesterday", None),
        ("", None),
        (None, None),
    ],
)
def test_times_of_any_precision_are_read(
    text: str | None, expected: datetime.datetime | None
) -> None:
    assert parse_time(text) == expected


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        (None, ""),
        (0, "0 ms"),
        (0.0124, "12 ms"),
        (0.9994, "999 ms"),
        (0.9996, "1.0 s"),
        (59.94, "59.9 s"),
        (59.96, "1 m"),
        (61, "1 m 1 s"),
        (3600, "1 h"),
        (3660, "1 h 1 m"),
        (90000, "1 d 1 h"),
    ],
)
def test_durations_have_the_two_units_that_matter(seconds: float | None, expected: str) -> None:
    assert duration_text(seconds) == expected


def test_a_duration_is_never_negative_and_none_where_an_end_is_missing() -> None:
    early, late = "2026-11-29T14:23:14Z", "2026-11-29T14:23:15.250Z"
    assert between(early, late) == 1.25
    assert between(late, early) == 0.0
    assert between(early, None) is None
    assert between("", late) is None


def test_an_age_looks_both_ways() -> None:
    hour = datetime.timedelta(hours=1, minutes=2)
    assert age_text((now() - hour).isoformat()) == "1 h 2 m ago"
    assert age_text((now() + hour).isoformat()).startswith("in 1 h ")
    assert age_text("") == ""
