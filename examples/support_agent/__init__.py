"""A support agent with three tools, one of which a person must approve, in five loops.

``desk`` holds the tools, ``openai_loop`` is the loop written out with the ``openai`` client, and
the same agent is there with ``anthropic``, LangGraph, the OpenAI Agents SDK and pydantic-ai.
``python -m examples.support_agent.demo`` runs it all on this machine, without a provider.
"""
