"""Token usage read from recorded answers."""

from __future__ import annotations

import base64
import json
from typing import Any

import pytest

from rebuno_sync.kernel.usage import tokens_used


def record(body: Any, **more: Any) -> str:
    text = body if isinstance(body, str) else json.dumps(body)
    return json.dumps({"status": 200, "headers": {}, "body": text, **more})


def stream(*events: Any, end: str = "\n") -> str:
    lines = []
    for event in events:
        if isinstance(event, dict) and "type" in event:
            lines.append(f"event: {event['type']}")
        text = event if isinstance(event, str) else json.dumps(event)
        lines += [f"data: {text}", ""]
    return end.join([*lines, ""])


CHAT = {
    "prompt_tokens": 11,
    "completion_tokens": 22,
    "total_tokens": 33,
    "prompt_tokens_details": {"cached_tokens": 5},
}
RESPONSES = {"input_tokens": 3, "output_tokens": 4, "total_tokens": 7}
MESSAGES = {
    "input_tokens": 1,
    "output_tokens": 2,
    "cache_creation_input_tokens": 100,
    "cache_read_input_tokens": 1000,
    "service_tier": "standard",
}
CHAT_STREAM = (
    {"choices": [{"delta": {"content": 'he said "usage"'}}], "usage": None},
    {"choices": [], "usage": CHAT},
    "[DONE]",
)
RESPONSES_STREAM = (
    {"type": "response.created", "response": {"id": "r", "usage": None}},
    {"type": "response.output_text.delta", "delta": "x"},
    {"type": "response.completed", "response": {"id": "r", "usage": RESPONSES}},
)
MESSAGES_STREAM = (
    {"type": "message_start", "message": {"usage": {**MESSAGES, "output_tokens": 1}}},
    {"type": "content_block_delta", "delta": {"type": "text_delta", "text": "x"}},
    {"type": "message_delta", "delta": {}, "usage": {"output_tokens": 15}},
    {"type": "message_delta", "delta": {}, "usage": {"output_tokens": 40}},
    {"type": "message_stop"},
)


@pytest.mark.parametrize(
    ("body", "tokens"),
    [
        pytest.param({"choices": [], "usage": CHAT}, 33, id="chat"),
        pytest.param({"output": [], "usage": RESPONSES}, 7, id="responses"),
        pytest.param({"content": [], "usage": MESSAGES}, 1103, id="messages"),
        pytest.param({"usage": {"prompt_tokens": 4, "total_tokens": 4}}, 4, id="embeddings"),
        pytest.param({"usage": {"prompt_tokens": 4, "completion_tokens": 5}}, 9, id="no total"),
        pytest.param(stream(*CHAT_STREAM), 33, id="chat stream"),
        pytest.param(stream(*CHAT_STREAM, end="\r\n"), 33, id="chat stream with CR LF"),
        pytest.param(stream(*RESPONSES_STREAM), 7, id="responses stream"),
        pytest.param(stream(*MESSAGES_STREAM), 1141, id="messages stream"),
        pytest.param(stream(*MESSAGES_STREAM[:2]), 1102, id="messages stream that broke off"),
        pytest.param(stream(*MESSAGES_STREAM).rstrip(), 1141, id="a stream without its last line"),
        pytest.param('data: {"usage":\ndata: {"total_tokens": 3}}\n\n', 3, id="two data lines"),
        pytest.param('data:{"usage":{"total_tokens":3}}\n\n', 3, id="no space"),
    ],
)
def test_what_providers_tell(body: Any, tokens: int) -> None:
    assert tokens_used(record(body)) == tokens


@pytest.mark.parametrize(
    "outcome",
    [
        "null",
        "3",
        '{"usage": {"total_tokens": 3}}',
        '{"body": {"usage": {"total_tokens": 3}}}',
        record("no JSON about usage"),
        record({"usage": None}),
        record({"usage": {}}),
        record({"usage": [1]}),
        record({"usage": {"total_tokens": "3"}}),
        record({"usage": {"total_tokens": -1}}),
        record({"usage": {"total_tokens": True}}),
        record({"usage": {"total_tokens": 1.5}}),
        record({"usage": {"total_tokens": 10**30}}),
        record({"text": '"usage": {"total_tokens": 3}'}),
        record(stream(*CHAT_STREAM[:1])),
        record(stream('{"usage": broken')),
        record("[" * 100_000 + '"usage"'),
        '{"body": "\\"usage", "body_base64": "no base64"}',
    ],
)
def test_what_tells_nothing(outcome: str) -> None:
    assert tokens_used(outcome) is None


def test_a_body_kept_as_base64_is_read_too() -> None:
    encoded = base64.b64encode(json.dumps({"usage": CHAT, "pad": "\0"}).encode()).decode()
    assert tokens_used(record("", body_base64=encoded)) == 33


def test_an_answer_that_broke_off_counts_as_far_as_it_tells() -> None:
    partial = json.loads(record(stream(*MESSAGES_STREAM[:3])))
    assert tokens_used(json.dumps({"message": "cut", "response": partial})) == 1116
