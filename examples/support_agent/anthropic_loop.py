"""The same loop with the ``anthropic`` client."""

from __future__ import annotations

import functools
from typing import Any

from anthropic import Anthropic

from rebuno_sync import http_client

from .desk import INSTRUCTIONS, MODEL, SCHEMAS, TOOLS, call_tool
from .serve import app_for

_TOOLS: Any = [
    {"name": name, "description": fn.__doc__, "input_schema": SCHEMAS[name]}
    for name, fn in TOOLS.items()
]


@functools.cache
def client() -> Anthropic:
    """The client of this process; ``ANTHROPIC_API_KEY`` says who pays."""
    return Anthropic(http_client=http_client())


def answer(question: str) -> str:
    """Let the model call tools until it has an answer, which is streamed as it comes."""
    messages: list[Any] = [{"role": "user", "content": question}]
    while True:
        with client().messages.stream(
            model=MODEL, max_tokens=1024, system=INSTRUCTIONS, messages=messages, tools=_TOOLS
        ) as stream:
            message = stream.get_final_message()
        if message.stop_reason != "tool_use":
            return "".join(block.text for block in message.content if block.type == "text")
        messages.append(message.to_param())
        results = [
            {
                "type": "tool_result",
                "tool_use_id": block.id,
                "content": call_tool(block.name, block.input),
            }
            for block in message.content
            if block.type == "tool_use"
        ]
        messages.append({"role": "user", "content": results})


create_app = functools.partial(app_for, answer)
