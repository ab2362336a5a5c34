"""The same agent with LangChain's ``create_agent``, which runs on LangGraph."""

from __future__ import annotations

import functools
from typing import Any

from langchain.agents import create_agent
from langchain_openai import ChatOpenAI

from rebuno_sync import http_client

from .desk import INSTRUCTIONS, MODEL, TOOLS
from .serve import app_for


@functools.cache
def graph() -> Any:
    """The agent of this process; LangGraph calls the tools from its own threads."""
    model = ChatOpenAI(model=MODEL, http_client=http_client(), streaming=True)
    return create_agent(model, list(TOOLS.values()), system_prompt=INSTRUCTIONS)


def answer(question: str) -> str:
    """Run the graph to its end."""
    found = graph().invoke({"messages": [{"role": "user", "content": question}]})
    return str(found["messages"][-1].content)


create_app = functools.partial(app_for, answer)
