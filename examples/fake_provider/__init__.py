"""A model provider on this machine: enough of the OpenAI and Anthropic APIs to run agents offline.

It serves chat completions, responses, messages and the list of models, plain and streamed, with
tool calls, structured output and errors, and answers what a script says::

    with FakeProvider([calls("find_order", order_id="A-17"), text("It ships on Monday.")]) as fake:
        client = OpenAI(base_url=fake.openai_url, api_key="any")
        ...
    assert len(fake.asked) == 2

``python -m examples.fake_provider --script FILE`` serves a script from a JSON file.
"""

from .asked import Asked, ToolResult
from .replies import Reply, ToolCall, calls, data, dropped, error, raw, text
from .script import ScriptError, load_script
from .server import FakeProvider

__all__ = [
    "Asked",
    "FakeProvider",
    "Reply",
    "ScriptError",
    "ToolCall",
    "ToolResult",
    "calls",
    "data",
    "dropped",
    "error",
    "load_script",
    "raw",
    "text",
]
