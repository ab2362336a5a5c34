"""The same agent with pydantic-ai, run synchronously; see ``openai_agents_sdk`` on its client."""

from __future__ import annotations

import functools

from openai import AsyncOpenAI
from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

from rebuno_sync.effects.llm_bridge import async_http_client

from .desk import INSTRUCTIONS, MODEL, TOOLS
from .serve import app_for


@functools.cache
def agent() -> Agent:
    """The agent of this process."""
    client = AsyncOpenAI(http_client=async_http_client())
    model = OpenAIChatModel(MODEL, provider=OpenAIProvider(openai_client=client))
    return Agent(model, instructions=INSTRUCTIONS, tools=list(TOOLS.values()))


def answer(question: str) -> str:
    """Run the agent to its end; pydantic-ai calls the tools on threads of its own."""
    return agent().run_sync(question).output


create_app = functools.partial(app_for, answer)
