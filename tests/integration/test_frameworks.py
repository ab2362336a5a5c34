"""Agent frameworks on recorded tools and clients: signals pass, denials answer, nothing is lost."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import json
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import anthropic
import openai
import pytest

from examples.fake_provider import Asked, FakeProvider, Reply, calls, text
from rebuno_sync import (
    Blocked,
    LeaseSuperseded,
    PolicyError,
    Terminated,
    ToolError,
    execution,
    http_client,
    tool,
)
from rebuno_sync.effects.llm_bridge import async_http_client
from tests.running import Running, given_up_once, running

Tools = list[Callable[..., Any]]
Answerer = Callable[[str], str]

SCHEMAS: dict[str, Any] = {
    "find": {"type": "object", "properties": {"order": {"type": "string"}}, "required": ["order"]},
    "refund": {
        "type": "object",
        "properties": {"order": {"type": "string"}, "cents": {"type": "integer"}},
        "required": ["order", "cents"],
    },
}


_open: list[Any] = []


def sync_client() -> Any:
    _open.append(http_client())
    return _open[-1]


def async_client() -> Any:
    _open.append(async_http_client())
    return _open[-1]


def close_clients() -> None:
    while _open:
        client = _open.pop()
        asyncio.run(client.aclose()) if hasattr(client, "aclose") else client.close()


# The frameworks: each makes a function that answers a question with the tools.


def told(result: Any) -> str:
    return result if isinstance(result, str) else json.dumps(result)


def chat_loop(fake: FakeProvider, tools: Tools) -> Answerer:
    client = openai.OpenAI(base_url=fake.openai_url, api_key="k", http_client=sync_client())
    by_name = {fn.__name__: fn for fn in tools}
    offered: Any = [
        {"type": "function", "function": {"name": n, "parameters": SCHEMAS[n]}} for n in by_name
    ]

    def answer(question: str) -> str:
        messages: list[Any] = [{"role": "user", "content": question}]
        while True:
            completion = client.chat.completions.create(model="m", messages=messages, tools=offered)
            message = completion.choices[0].message
            if not message.tool_calls:
                return message.content or ""
            messages.append(message)
            for call in message.tool_calls:
                assert call.type == "function"
                result = by_name[call.function.name](**json.loads(call.function.arguments))
                content = told(result)
                messages.append({"role": "tool", "tool_call_id": call.id, "content": content})

    return answer


def responses_loop(fake: FakeProvider, tools: Tools) -> Answerer:
    client = openai.OpenAI(base_url=fake.openai_url, api_key="k", http_client=sync_client())
    by_name = {fn.__name__: fn for fn in tools}
    offered: Any = [
        {"type": "function", "name": n, "parameters": SCHEMAS[n], "strict": False} for n in by_name
    ]

    def answer(question: str) -> str:
        items: list[Any] = [{"role": "user", "content": question}]
        while True:
            response = client.responses.create(model="m", input=items, tools=offered)
            wanted = [item for item in response.output if item.type == "function_call"]
            if not wanted:
                return response.output_text
            items += wanted
            for item in wanted:
                result = by_name[item.name](**json.loads(item.arguments))
                output = {"call_id": item.call_id, "output": told(result)}
                items.append({"type": "function_call_output", **output})

    return answer


def messages_loop(fake: FakeProvider, tools: Tools) -> Answerer:
    client = anthropic.Anthropic(base_url=fake.url, api_key="k", http_client=sync_client())
    by_name = {fn.__name__: fn for fn in tools}
    offered: Any = [{"name": n, "input_schema": SCHEMAS[n]} for n in by_name]

    def answer(question: str) -> str:
        messages: list[Any] = [{"role": "user", "content": question}]
        while True:
            message = client.messages.create(
                model="m", max_tokens=99, messages=messages, tools=offered
            )
            wanted = [block for block in message.content if block.type == "tool_use"]
            if not wanted:
                return "".join(block.text for block in message.content if block.type == "text")
            messages.append(message.to_param())
            results = [
                {
                    "type": "tool_result",
                    "tool_use_id": block.id,
                    "content": told(by_name[block.name](**block.input)),
                }
                for block in wanted
            ]
            messages.append({"role": "user", "content": results})

    return answer


def langgraph_agent(fake: FakeProvider, tools: Tools) -> Answerer:
    graph = _graph(fake, tools)
    return lambda question: (
        graph.invoke({"messages": [{"role": "user", "content": question}]})["messages"][-1].content
    )


def langgraph_stream(fake: FakeProvider, tools: Tools) -> Answerer:
    graph = _graph(fake, tools, streaming=True)

    def answer(question: str) -> str:
        asked = {"messages": [{"role": "user", "content": question}]}
        states = list(graph.stream(asked, stream_mode="values"))
        return states[-1]["messages"][-1].content

    return answer


def _graph(fake: FakeProvider, tools: Tools, **options: Any) -> Any:
    from langchain.agents import create_agent
    from langchain_openai import ChatOpenAI

    where: dict[str, Any] = {"base_url": fake.openai_url, "api_key": "k", **options}
    return create_agent(ChatOpenAI(model="m", http_client=sync_client(), **where), tools)


def langgraph_anthropic(fake: FakeProvider, tools: Tools) -> Answerer:
    from langchain.agents import create_agent
    from langchain_anthropic import ChatAnthropic

    model = ChatAnthropic(model="m", api_key="k", base_url=fake.url)
    # It has no parameter for the client; this is the property that holds it.
    model.__dict__["_client"] = anthropic.Anthropic(
        base_url=fake.url, api_key="k", http_client=sync_client()
    )
    graph = create_agent(model, tools)

    def answer(question: str) -> str:
        found = graph.invoke({"messages": [{"role": "user", "content": question}]})
        return found["messages"][-1].content

    return answer


def openai_agents(fake: FakeProvider, tools: Tools) -> Answerer:
    from agents import Agent, OpenAIResponsesModel, Runner, function_tool, set_tracing_disabled

    set_tracing_disabled(True)
    model = OpenAIResponsesModel("m", _async_openai(fake))
    agent = Agent("a", model=model, tools=[function_tool(fn) for fn in tools])

    def answer(question: str) -> str:
        with own_event_loop():
            return Runner.run_sync(agent, question).final_output

    return answer


def pydantic_ai(fake: FakeProvider, tools: Tools) -> Answerer:
    from pydantic_ai import Agent
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    provider = OpenAIProvider(openai_client=_async_openai(fake))
    agent = Agent(OpenAIChatModel("m", provider=provider), tools=tools)

    def answer(question: str) -> str:
        with own_event_loop():
            return agent.run_sync(question).output

    return answer


def _async_openai(fake: FakeProvider) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=fake.openai_url, api_key="k", http_client=async_client())


@contextlib.contextmanager
def own_event_loop() -> Iterator[None]:
    """Close the event loop that a run_sync() would else leave behind on the thread."""
    loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)
    try:
        yield
    finally:
        loop.run_until_complete(loop.shutdown_default_executor())
        asyncio.set_event_loop(None)
        loop.close()


FRAMEWORKS: dict[str, tuple[Callable[[FakeProvider, Tools], Answerer], str]] = {
    "chat": (chat_loop, "openai"),
    "responses": (responses_loop, "openai"),
    "messages": (messages_loop, "anthropic"),
    "langgraph": (langgraph_agent, "langchain"),
    "langgraph-stream": (langgraph_stream, "langchain"),
    "langgraph-anthropic": (langgraph_anthropic, "langchain_anthropic"),
    "openai-agents": (openai_agents, "agents"),
    "pydantic-ai": (pydantic_ai, "pydantic_ai"),
}
#: Those that call tools on threads of their own.
THREADED = ("langgraph", "langgraph-stream", "langgraph-anthropic", "openai-agents", "pydantic-ai")
#: Those that call tools of one answer at the same time.
PARALLEL = ("langgraph", "openai-agents", "pydantic-ai")


@pytest.fixture(params=FRAMEWORKS)
def framework(request: pytest.FixtureRequest) -> str:
    needed = FRAMEWORKS[request.param][1]
    if importlib.util.find_spec(needed) is None:
        pytest.skip(f"{needed} is not installed")
    return request.param


# One question, two tools, one answer


def script(asked: Asked) -> Reply:
    if not asked.results:
        return calls("find", order="A-17")
    if asked.after == "find":
        return calls("refund", order="A-17", cents=4900)
    return text(f"Told: {asked.results[-1].content}")


class Story:
    """A framework's agent running; what its tools do and what leaves the framework is noted."""

    def __init__(self, framework: str, *, policy: str = "", on_denied: Any = "return") -> None:
        self._framework, self._policy, self._on_denied = framework, policy, on_denied
        self.threads: list[str] = []
        self.raised: list[BaseException] = []
        self.in_find: Callable[[], None] = lambda: None
        self.script: Callable[[Asked], Reply] = script
        self.fake: FakeProvider

    @contextlib.contextmanager
    def begun(self) -> Iterator[Running]:
        @tool
        def find(order: str) -> dict[str, str]:
            """Find an order."""
            self.threads.append(threading.current_thread().name)
            self.in_find()
            return {"order": order}

        @tool(on_denied=self._on_denied)
        def refund(order: str, cents: int) -> str:
            """Refund an order."""
            return f"refunded {cents} for {order}"

        def handler(question: str) -> str:
            try:
                found = answer(question)
            except BaseException as exc:
                self.raised.append(exc)
                raise
            given_up_once()
            return found

        with FakeProvider(lambda asked: self.script(asked)) as self.fake:
            answer = FRAMEWORKS[self._framework][0](self.fake, [find, refund])
            try:
                with running(handler, policy=self._policy or None) as found:
                    yield found
            finally:
                close_clients()

    def signals(self, found: Running) -> list[type[BaseException]]:
        """What left the framework, once the agent is done with what the kernel gave it."""
        assert found.agent.join(60.0)
        return [type(exc) for exc in self.raised]

    @property
    def times_asked(self) -> list[int]:
        return list(self.fake.times_asked.values())


INPUT = {"question": "Money back for A-17!"}
ALL_STEPS = ["m", "find", "m", "refund", "m"]


def targets(found: Running, execution_id: Any) -> list[str]:
    return [s.target for s in found.steps(execution_id)]


def test_every_effect_is_a_step_and_a_replay_asks_nobody(framework: str) -> None:
    story = Story(framework)
    with story.begun() as found:
        ended = found.run_twice(INPUT)
        assert ended.output == "Told: refunded 4900 for A-17"
        assert targets(found, ended) == ALL_STEPS
        assert {s.occurrence for s in found.steps(ended)} == {0}
    assert story.times_asked == [1, 1, 1]
    assert len(story.threads) == 1


def test_a_denied_tool_answers(framework: str) -> None:
    story = Story(framework, policy=rule("refund", "deny, reason: too much"))
    with story.begun() as found:
        ended = found.run_twice(INPUT)
        assert ended.output == "Told: refund not allowed. reason: too much"
    assert story.times_asked == [1, 1, 1]


def test_a_denial_that_raises(framework: str) -> None:
    """It is an ordinary error: the OpenAI Agents SDK tells the model, the others let it pass."""
    story = Story(framework, policy=rule("refund", "deny, reason: too_much"), on_denied="raise")
    with story.begun() as found:
        if framework == "openai-agents":
            assert "An error occurred while running" in found.run_twice(INPUT).output
        else:
            ended = found.run(INPUT)
            assert ended.failure_reason == "too_much"
            assert story.signals(found) == [PolicyError]


def test_a_failing_tool(framework: str) -> None:
    """The same: a ToolError is for the framework to handle, and comes back on replay."""
    story = Story(framework)

    def fail() -> None:
        raise ValueError("no such order")

    story.in_find = fail
    with story.begun() as found:
        if framework == "openai-agents":
            assert "4900" in found.run_twice(INPUT).output
            told = story.fake.asked[1].results[0].content
            assert told.startswith("An error occurred while running the tool")
            assert story.times_asked == [1, 1, 1]
        else:
            ended = found.run(INPUT)
            assert ended.failure_reason == "tool_error: find: no such order"
            assert story.signals(found) == [ToolError]


# Signals


def rule(target: str, then: str) -> str:
    return (
        "default_action: allow\n"
        f"rules: [{{id: r, when: {{target: {target}}}, then: {{decision: {then}}}}}]\n"
    )


@pytest.mark.parametrize("grant", [True, False])
def test_a_tool_that_needs_approval_blocks_and_goes_on(framework: str, grant: bool) -> None:
    story = Story(framework, policy=rule("refund", "require_approval"))
    with story.begun() as found:
        blocked = found.run(INPUT)
        assert story.signals(found) == [Blocked]
        told_by = "refunded 4900 for A-17" if grant else "refund not allowed. reason: no"
        story_goes_on(found, blocked.id, grant)
        assert found.wait(blocked.id).output == f"Told: {told_by}"
        assert targets(found, blocked) == ALL_STEPS
    assert story.times_asked == [1, 1, 1]


def story_goes_on(found: Running, execution_id: str, grant: bool) -> None:
    """Decide; the attempt after that is given up once, and one more replays it all."""
    (approval,) = found.client.approvals()
    if grant:
        found.client.grant(approval.id, decided_by="ann")
    else:
        found.client.deny(approval.id, decided_by="ann", rationale="no")
    found.next_attempt(execution_id)


def test_a_model_call_that_needs_approval(framework: str) -> None:
    story = Story(framework, policy=rule("m", "require_approval"))
    with story.begun() as found:
        waiting = found.run(INPUT)
        assert waiting.status == "blocked"
        assert len(found.steps(waiting)) == 1
        assert story.fake.asked == []
        waiting = found.decide(waiting, grant=True)
        assert waiting.status == "blocked"
        assert targets(found, waiting) == ["m", "find", "m"]
    assert story.times_asked == [1]


def test_a_denied_model_call_is_submitted_once(framework: str) -> None:
    story = Story(framework, policy=rule("m", "deny, reason: no_models"))
    with story.begun() as found:
        ended = found.run(INPUT)
        assert ended.failure_reason == "no_models"
        assert targets(found, ended) == ["m"]
    assert story.fake.asked == []


def test_a_cancelled_execution_ends_the_run(framework: str) -> None:
    story = Story(framework)
    with story.begun() as found:
        story.in_find = lambda: found.client.cancel(execution().id)
        ended = found.run(INPUT)
        assert ended.status == "cancelled"
        assert story.signals(found) == [Terminated]
        assert targets(found, ended) == ["m", "find"]
    assert story.times_asked == [1]


def test_a_lost_lease_ends_the_run_and_the_next_attempt_finishes(framework: str) -> None:
    story = Story(framework)
    lost = threading.Event()

    def lose() -> None:
        if not lost.is_set():
            lost.set()
            found.lose_leases()

    story.in_find = lose
    with story.begun() as found:
        execution_id = found.start(INPUT)
        found.next_attempt(execution_id, after=2)
        ended = found.wait(execution_id)
        assert ended.output == "Told: refunded 4900 for A-17"
        assert story.signals(found)[:1] == [LeaseSuperseded]
    assert story.times_asked == [1, 1, 1]


# Threads


@pytest.mark.parametrize("framework", THREADED, indirect=True)
def test_tools_on_a_frameworks_own_threads_keep_the_execution(framework: str) -> None:
    story = Story(framework)
    with story.begun() as found:
        story.in_find = lambda: story.threads.append(execution().id)
        ended = found.run_twice(INPUT)
        thread, seen = story.threads
        assert not thread.startswith("rebuno-")
        assert seen == ended.id


@pytest.mark.parametrize("framework", PARALLEL, indirect=True)
def test_tools_that_run_at_once(framework: str) -> None:
    def at_once(asked: Asked) -> Reply:
        if asked.results:
            return text(" ".join(sorted(result.content for result in asked.results)))
        return calls("find", order="1").and_calls("find", order="2").and_calls("find", order="3")

    together = threading.Barrier(3)
    story = Story(framework)
    story.script = at_once
    story.in_find = lambda: together.wait(30) and None
    with story.begun() as found:
        ended = found.run_twice(INPUT)
        assert all(f'"{n}"' in ended.output.replace("'", '"') for n in (1, 2, 3))
        assert sorted(targets(found, ended)) == ["find", "find", "find", "m", "m"]
    assert story.times_asked == [1, 1]
    assert len(story.threads) == 3


@pytest.mark.parametrize("framework", PARALLEL, indirect=True)
def test_one_of_several_tools_blocks(framework: str) -> None:
    def at_once(asked: Asked) -> Reply:
        if asked.results:
            return text("Done.")
        return calls("find", order="1").and_calls("refund", order="2", cents=3)

    story = Story(framework, policy=rule("refund", "require_approval"))
    story.script = at_once
    with story.begun() as found:
        blocked = found.run(INPUT)
        assert story.signals(found) == [Blocked]
        story_goes_on(found, blocked.id, grant=True)
        assert found.wait(blocked.id).output == "Done."
        assert sorted(targets(found, blocked)) == ["find", "m", "m", "refund"]
    assert story.times_asked == [1, 1]


def test_a_thread_that_lost_the_execution_is_told_so() -> None:
    """A pool that does not carry context variables: nothing runs, and the message helps."""
    ran: list[str] = []

    @tool
    def find(order: str) -> str:
        ran.append(order)
        return order

    def handler() -> str:
        with ThreadPoolExecutor(1) as pool, pytest.raises(RuntimeError) as raised:
            pool.submit(find, "A-17").result()
        return str(raised.value)

    with running(handler) as found:
        ended = found.run()
        assert "ContextThreadPoolExecutor" in ended.output
        assert found.steps(ended) == []
    assert ran == []


# The bridge to asynchronous clients


def test_a_streamed_answer_through_the_bridge() -> None:
    with FakeProvider([text("one ", "two ", "three")]) as fake:

        async def ask() -> list[str]:
            async with _async_openai(fake) as client:
                stream = await client.chat.completions.create(
                    model="m", messages=[{"role": "user", "content": "count"}], stream=True
                )
                return [c.choices[0].delta.content async for c in stream if c.choices]

        def handler() -> list[str]:
            found = asyncio.run(ask())
            given_up_once()
            return [piece for piece in found if piece]

        with running(handler) as found:
            assert found.run_twice().output == ["one ", "two ", "three"]
        assert len(fake.asked) == 1


def test_outside_an_execution_the_bridge_passes_through() -> None:
    with FakeProvider([text("free")]) as fake:

        async def ask() -> str | None:
            async with _async_openai(fake) as client:
                found = await client.chat.completions.create(
                    model="m", messages=[{"role": "user", "content": "x"}]
                )
                return found.choices[0].message.content

        assert asyncio.run(ask()) == "free"
    assert "idempotency-key" not in fake.asked[0].headers


def test_a_failure_through_the_bridge_is_the_librarys_own() -> None:
    async def ask() -> None:
        client = openai.AsyncOpenAI(
            base_url="http://127.0.0.1:1/v1",
            api_key="k",
            http_client=async_http_client(),
            max_retries=0,
        )
        async with client:
            with pytest.raises(openai.APIConnectionError):
                await client.models.list()

    asyncio.run(ask())
