"""The words in the live output of LLM calls."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rebuno_sync.live_text import LiveText

CHAT = (
    "".join(
        f"data: {json.dumps(message)}\n\n"
        for message in (
            {"choices": [{"delta": {"role": "assistant", "content": ""}}]},
            {"choices": [{"delta": {"content": "Good "}}]},
            {"choices": [{"delta": {"content": "day\n"}}, {"delta": {"tool_calls": []}}]},
            {"choices": [], "usage": {"total_tokens": 3}},
        )
    )
    + "data: [DONE]\n\n"
)
RESPONSES = "".join(
    f"event: {message['type']}\r\ndata: {json.dumps(message)}\r\n\r\n"
    for message in (
        {"type": "response.created", "response": {"id": "r"}},
        {"type": "response.output_text.delta", "delta": "Good "},
        {"type": "response.output_text.delta", "delta": "day\n"},
        {"type": "response.function_call_arguments.delta", "delta": "{}"},
        {"type": "response.output_text.done", "text": "Good day\n"},
    )
)
MESSAGES = "".join(
    f"event: {message['type']}\ndata: {json.dumps(message)}\n\n"
    for message in (
        {"type": "message_start", "message": {"content": []}},
        {"type": "ping"},
        {"type": "content_block_delta", "delta": {"type": "text_delta", "text": "Good "}},
        {"type": "content_block_delta", "delta": {"type": "text_delta", "text": "day\n"}},
        {"type": "content_block_delta", "delta": {"type": "input_json_delta", "partial_json": "{"}},
        {"type": "message_stop"},
    )
)


@pytest.mark.parametrize("stream", [CHAT, RESPONSES, MESSAGES], ids=["chat", "responses", "claude"])
@given(data=st.data())
def test_the_text_comes_out_however_the_stream_is_cut(stream: str, data: st.DataObject) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=8)))
    ends = [*cuts, len(stream)]
    pieces = [stream[a:b] for a, b in zip([0, *cuts], ends, strict=True)]
    live = LiveText()
    said = "".join(live.feed(seq, piece) for seq, piece in enumerate(pieces))
    assert said == "Good day\n"


@given(st.lists(st.text(alphabet="ab \n", min_size=1), min_size=1, max_size=5))
def test_plain_text_passes_unchanged(pieces: list[str]) -> None:
    live = LiveText()
    assert "".join(live.feed(seq, piece) for seq, piece in enumerate(pieces)) == "".join(pieces)


def test_a_watcher_that_comes_late_begins_at_the_next_message() -> None:
    live = LiveText()
    middle = CHAT.index('"Good ') + 3
    assert live.feed(4, CHAT[middle:]) == "day\n"


def test_late_plain_text_is_shown_as_it_is() -> None:
    assert LiveText().feed(7, "and so on\nto the end") == "and so on\nto the end"


@pytest.mark.parametrize(
    "message",
    [
        "data: [1, 2]\n",
        "data: nonsense\n",
        'data: {"choices": {"delta": 1}}\n',
        'data: {"choices": [1, {"delta": 2}, {"delta": {"content": 3}}]}\n',
        'data: {"type": "content_block_delta", "delta": "text"}\n',
        'data: {"type": "response.output_text.delta", "delta": {}}\n',
        ": comment\n",
    ],
)
def test_messages_that_say_nothing_say_nothing(message: str) -> None:
    assert LiveText().feed(0, message) == ""
