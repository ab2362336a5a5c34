"""How values read on the page."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any

import pytest

from rebuno_sync.kernel import page_values
from rebuno_sync.kernel.page_values import LAID_OUT, SHOWN


def show(raw: str) -> page_values.Shown:
    return page_values.shown(raw, len(raw.encode()))


@pytest.mark.parametrize(
    ("deceptive", "seen"),
    [
        ("\u202egnp.exe", "\\u202egnp.exe"),
        ("pay\u200bpal", "pay\\u200bpal"),
        ("a\x00b\x1b[2J", "a\\u0000b\\u001b[2J"),
        ("\u2066x\u2069", "\\u2066x\\u2069"),
        ("hid\U000e0041den", "hid\\U000e0041den"),
        ("\ufeffx\xadx", "\\ufeffx\\u00adx"),
    ],
)
def test_invisible_and_turning_characters_are_written_out(deceptive: str, seen: str) -> None:
    assert page_values.visible(deceptive) == seen


def test_text_of_every_script_stays_as_it_is() -> None:
    text = "Äpfel, 梨, груша, אגס, كمثرى, 👩‍🌾 🍐️\tand\nlines"
    assert page_values.visible(text) == text


def test_json_is_laid_out_and_numbers_keep_their_text() -> None:
    raw = '{"b":1e2,"a":[12345678901234567890123,-0.10],"c":{}}'
    assert show(raw).text == (
        '{\n  "b": 1e2,\n  "a": [\n    12345678901234567890123,\n    -0.10\n  ],\n  "c": {}\n}'
    )


def test_text_is_shown_as_text() -> None:
    assert show(json.dumps("two\nlines")).text == "two\nlines"


def test_a_name_that_is_there_twice_hides_nothing() -> None:
    raw = '{"amount":1,"amount":1000000}'
    assert show(raw).text == raw


def test_the_response_of_an_llm_call_is_taken_apart() -> None:
    recorded = {
        "status": 200,
        "headers": {"content-type": "application/json"},
        "body": '{"choices":[]}',
    }
    found = show(json.dumps(recorded))
    assert found.text == '{\n  "choices": []\n}'
    assert found.note == "HTTP 200, application/json"


@pytest.mark.parametrize(
    ("body", "text", "note"),
    [
        (
            'data: {"choices":[{"delta":{"content":"Once "}}]}\n\n'
            'data: {"choices":[{"delta":{"content":"upon"}}]}\n\ndata: [DONE]',
            "Once upon",
            "HTTP 200, text/event-stream: the words of the stream",
        ),
        ('data: {"choices":[]}', 'data: {"choices":[]}', "HTTP 200, text/event-stream"),
    ],
)
def test_of_a_stream_the_words_are_shown(body: str, text: str, note: str) -> None:
    recorded = {"status": 200, "headers": {"content-type": "text/event-stream"}, "body": body}
    found = show(json.dumps(recorded))
    assert (found.text.rstrip("\n"), found.note) == (text, note)


@pytest.mark.parametrize(
    "recorded",
    [
        {"status": 200, "headers": {}, "body": {"no": "text"}},
        {"status": 200, "headers": {"x": 1}, "body": ""},
        {"status": 200, "headers": {}, "body": "", "more": 1},
    ],
)
def test_what_only_looks_like_a_response_is_shown_whole(recorded: dict[str, Any]) -> None:
    found = show(json.dumps(recorded))
    assert json.loads(found.text) == recorded
    assert found.note == ""


@pytest.mark.parametrize("length", [SHOWN + 1, LAID_OUT + 1])
def test_long_values_are_cut_and_say_so(length: int) -> None:
    raw = json.dumps("x" * length)
    found = page_values.shown(raw[: page_values.READ], len(raw))
    assert len(found.text) == SHOWN
    assert found.is_cut
    assert found.size == length + 2


def test_a_value_of_just_the_length_is_whole() -> None:
    found = show(json.dumps("x" * SHOWN))
    assert found.text == "x" * SHOWN
    assert not found.is_cut


@pytest.mark.parametrize("depth", [500, 20_000])
def test_deep_nesting_is_shown_as_it_was_sent(depth: int) -> None:
    raw = '{"a":' + "[" * depth + "]" * depth + "}"
    assert show(raw).text == raw[:SHOWN]


@pytest.mark.parametrize(
    ("raw", "hint"),
    [
        ('{"city":"Ulm","days":3}', "city: Ulm, days: 3"),
        ("null", ""),
        ("[1,2]", "[1,2]"),
        ('"text"', "text"),
        ('{"text":"' + "x" * 200 + '"}', "text: " + "x" * 154 + "…"),
        (
            '{"model":"m","messages":[{"role":"system","content":"s"},'
            '{"role":"user","content":"the question"}]}',
            "the question",
        ),
        (
            '{"model":"m","messages":[{"role":"user","content":'
            '[{"type":"text","text":"look at this"},{"type":"image"}]}]}',
            "look at this",
        ),
        ('{"model":"m","input":"the question"}', "the question"),
        ('{"model":"m","messages":[]}', "model: m, messages: []"),
        ('{"model":"m","messages":[{"content":[{"text":7}]}]}', None),
        ('{"input":"not a model"}', "input: not a model"),
    ],
)
def test_hints(raw: str, hint: str | None) -> None:
    if hint is None:
        page_values.hint(raw)
    else:
        assert page_values.hint(raw) == hint


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0, "under 1 ms"),
        (0.0123, "12 ms"),
        (0.9996, "1.0 s"),
        (1.25, "1.2 s"),
        (10.0, "10 s"),
        (59.97, "1 min"),
        (61.0, "1 min 1 s"),
        (3600.0, "1 h"),
        (3 * 3600 + 59 * 60, "3 h 59 min"),
        (86400.0 * 2 + 3600, "2 d 1 h"),
    ],
)
def test_durations(seconds: float, text: str) -> None:
    assert page_values.duration(seconds) == text


@pytest.mark.parametrize(
    ("octets", "text"),
    [(12, "12 bytes"), (1500, "1.5 kB"), (999_499, "999 kB"), (10_485_760, "10.5 MB")],
)
def test_sizes(octets: int, text: str) -> None:
    assert page_values.size(octets) == text


@pytest.fixture
def in_kathmandu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TZ", "NPT-5:45")
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


@pytest.mark.usefixtures("in_kathmandu")
def test_times_are_the_kernels_own() -> None:
    noon = 1_790_000_000.25
    assert page_values.clock(noon, noon) == "19:58:20"
    assert page_values.clock(noon - 86400, noon) == "20 Sep 19:58:20"
    assert page_values.clock(noon - 366 * 86400, noon) == "20 Sep 2025 19:58:20"
    assert page_values.clock(noon, noon, precise=True) == "19:58:20.250"
    assert page_values.iso(noon) == "2026-09-21T19:58:20.250+05:45"
    assert page_values.zone(noon) == "NPT"
