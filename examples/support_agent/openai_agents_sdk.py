"""The same agent with the OpenAI Agents SDK, run synchronously.

The SDK is asynchronous inside and wants an asynchronous client; ``async_http_client`` is the one
of ``http_client`` behind that face.
"""

from __future__ import annotations

import functools

from agents import Agent, OpenAIResponsesModel, Runner, function_tool, set_tracing_disabled
from openai import AsyncOpenAI

from rebuno_sync.effects.llm_bridge import async_http_client

from .desk import INSTRUCTIONS, MODEL, TOOLS
from .serve import app_for


@functools.cache
def agent() -> Agent:
    """The agent of this process."""
    set_tracing_disabled(True)
    client = AsyncOpenAI(http_client=async_http_client())
    return Agent(
        "support",
        instructions=INSTRUCTIONS,
        model=OpenAIResponsesModel(MODEL, client),
        tools=[function_tool(fn) for fn in TOOLS.values()],
    )


def answer(question: str) -> str:
    """Run the agent to its end; the SDK calls the tools on threads of its own."""
    return str(Runner.run_sync(agent(), question).final_output)


create_app = functools.partial(app_for, answer)
