"""Agents of three steps, the same in every host."""

from __future__ import annotations

from collections.abc import Callable

from rebuno_sync import Agent, step, tool


@tool
def greet(name: str) -> str:
    return f"hello {name}"


@tool
def shout(text: str) -> str:
    return text.upper()


def make_agent(agent_id: str, whereabouts: Callable[[], str]) -> Agent:
    """Return an agent whose middle step tells what it finds in the app around it."""
    agent = Agent(agent_id)

    @agent.handler
    def talk(name: str) -> list[str]:
        greeting = greet(name)
        where = step("where", whereabouts)
        return [shout(greeting), where]

    return agent
