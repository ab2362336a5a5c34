"""The loop written out with the ``openai`` client; the one durable thing is ``http_client``."""

from __future__ import annotations

import functools
import json
from typing import Any

from openai import OpenAI

from rebuno_sync import http_client

from .desk import INSTRUCTIONS, MODEL, SCHEMAS, TOOLS, call_tool
from .serve import app_for

_TOOLS: Any = [
    {
        "type": "function",
        "function": {"name": name, "description": fn.__doc__, "parameters": SCHEMAS[name]},
    }
    for name, fn in TOOLS.items()
]


@functools.cache
def client() -> OpenAI:
    """The client of this process; ``OPENAI_API_KEY`` and ``OPENAI_BASE_URL`` say which provider."""
    return OpenAI(http_client=http_client())


def answer(question: str) -> str:
    """Let the model call tools until it has an answer, which is streamed as it comes."""
    messages: list[Any] = [
        {"role": "system", "content": INSTRUCTIONS},
        {"role": "user", "content": question},
    ]
    while True:
        with client().chat.completions.stream(
            model=MODEL, messages=messages, tools=_TOOLS
        ) as stream:
            message = stream.get_final_completion().choices[0].message
        if not message.tool_calls:
            return message.content or ""
        messages.append(
            {
                "role": "assistant",
                "content": message.content,
                "tool_calls": [
                    {
                        "id": call.id,
                        "type": "function",
                        "function": {
                            "name": call.function.name,
                            "arguments": call.function.arguments,
                        },
                    }
                    for call in message.tool_calls
                ],
            }
        )
        for call in message.tool_calls:
            told = call_tool(call.function.name, json.loads(call.function.arguments))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": told})


create_app = functools.partial(app_for, answer)
