"""The openai and anthropic libraries as users run them, over recording clients.

Also run with the last releases of both that are built on httpx: see ``test_llm_on_httpx.py``.
"""

from __future__ import annotations

import json
import threading
import time
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import anthropic
import openai
import pydantic
import pytest

from examples.fake_provider import FakeProvider, Reply, calls, data, dropped, error, text
from rebuno_sync import (
    Blocked,
    PolicyError,
    RateLimited,
    http_client,
    raise_for_refusal,
    step,
    tool,
)
from tests.integration.llm_runs import Killed, Seen, agent_under, run, run_twice
from tests.scripted import GENERATION_3, Answer, Recorded, ScriptedKernel, Verdict

ASK = [{"role": "user", "content": "How is the weather in Tromsø?"}]
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}
CHAT_TOOL = {"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}
RESPONSES_TOOL = {"type": "function", "name": "weather", "parameters": SCHEMA, "strict": True}
MESSAGES_TOOL = {"name": "weather", "description": "…", "input_schema": SCHEMA}


class Weather(pydantic.BaseModel):
    city: str
    degrees: int


class Api:
    """One API of a provider, used through its library.

    Attributes:
        library: the module, whose errors are raised.
        base_client: the module in which the library waits between its retries.
    """

    name: str
    library: Any
    base_client: Any

    def client(self, fake: FakeProvider, **options: Any) -> Any:
        raise NotImplementedError

    def ask(self, client: Any, **more: Any) -> Any:
        raise NotImplementedError

    def said(self, answer: Any) -> str:
        raise NotImplementedError

    def __repr__(self) -> str:
        return self.name


class OpenAIApi(Api):
    library = openai
    base_client = openai._base_client

    def client(self, fake: FakeProvider, **options: Any) -> Any:
        options = {"max_retries": 0, "http_client": http_client(), **options}
        return openai.OpenAI(base_url=fake.openai_url, api_key="k", **options)


class Chat(OpenAIApi):
    name = "chat"

    def ask(self, client: Any, **more: Any) -> Any:
        return client.chat.completions.create(**{"model": "m", "messages": ASK, **more})

    def said(self, answer: Any) -> str:
        return answer.choices[0].message.content or ""


class ResponsesApi(OpenAIApi):
    name = "responses"

    def ask(self, client: Any, **more: Any) -> Any:
        return client.responses.create(**{"model": "m", "input": ASK, **more})

    def said(self, answer: Any) -> str:
        found: str = answer.output_text
        return found


class Messages(Api):
    name = "messages"
    library = anthropic
    base_client = anthropic._base_client

    def client(self, fake: FakeProvider, **options: Any) -> Any:
        options = {"max_retries": 0, "http_client": http_client(), **options}
        return anthropic.Anthropic(base_url=fake.url, api_key="k", **options)

    def ask(self, client: Any, **more: Any) -> Any:
        return client.messages.create(**{"model": "m", "max_tokens": 99, "messages": ASK, **more})

    def said(self, answer: Any) -> str:
        return "".join(block.text for block in answer.content if block.type == "text")


APIS = [Chat(), ResponsesApi(), Messages()]


@pytest.fixture(params=APIS, ids=repr)
def api(request: pytest.FixtureRequest) -> Api:
    return request.param


@pytest.fixture
def kernel() -> Iterator[ScriptedKernel]:
    with ScriptedKernel(GENERATION_3) as kernel:
        yield kernel


def dumped(value: Any) -> Any:
    """An answer of a library with everything that it holds."""
    return {**value.model_dump(mode="json"), "request_id": getattr(value, "_request_id", None)}


# Answers


def test_a_plain_answer(api: Api) -> None:
    with FakeProvider([text("Snow.")]) as fake, api.client(fake) as client:
        seen = run_twice(lambda: dumped(api.ask(client)))
        assert len(fake.asked) == 1
    assert seen.steps == [("m", "succeeded")]
    assert "Snow." in json.dumps(seen.values[0])


def test_a_streamed_answer(api: Api) -> None:
    with FakeProvider([text("Snow in Tromsø.")]) as fake, api.client(fake) as client:
        seen = run_twice(lambda: [dumped(event) for event in api.ask(client, stream=True)])
        assert len(fake.asked) == 1
    assert len(seen.values[0]) > 4
    assert seen.steps == [("m", "succeeded")]
    assert "closed_early" not in seen.outcomes[0]


def test_a_streamed_answer_comes_as_it_comes(api: Api) -> None:
    more = threading.Event()

    def ask() -> int:
        stream = iter(api.ask(client, stream=True))
        next(stream)
        more.set()
        return 1 + sum(1 for _ in stream)

    reply = text("Snow in Tromsø.").held(more, after=2)
    with FakeProvider([reply]) as fake, api.client(fake) as client:
        run_twice(ask)


def test_a_raw_response(api: Api) -> None:
    def ask() -> Any:
        create = {
            "chat": lambda: client.chat.completions.with_raw_response.create,
            "responses": lambda: client.responses.with_raw_response.create,
            "messages": lambda: client.messages.with_raw_response.create,
        }[api.name]()
        asked = {"input": ASK} if api.name == "responses" else {"messages": ASK}
        more = {"max_tokens": 9} if api.name == "messages" else {}
        found = create(model="m", **asked, **more)
        return found.status_code, dict(found.headers), api.said(found.parse())

    with FakeProvider([text("Snow.")]) as fake, api.client(fake) as client:
        seen = run_twice(ask)
    assert seen.values[0] == (200, {"content-type": "application/json"}, "Snow.")


def test_a_loop_of_tool_calls(api: Api) -> None:
    """Each answer and each tool is a step; the second attempt runs none of them again."""
    ran: list[str] = []

    @tool
    def weather(city: str) -> str:
        ran.append(city)
        return f"−4 °C in {city}"

    loops = {"chat": chat_loop, "responses": responses_loop, "messages": messages_loop}
    replies = [
        calls("weather", city="Tromsø").and_calls("weather", city="Bodø"),
        text("It is cold."),
    ]
    for stream in (False, True):
        ran.clear()
        with FakeProvider(replies) as fake, api.client(fake) as client:
            seen = run_twice(lambda: loops[api.name](client, weather, stream))  # noqa: B023
            assert len(fake.asked) == 2
        assert seen.values[0] == "It is cold."
        assert ran == ["Tromsø", "Bodø"]
        assert [target for target, _ in seen.steps] == ["m", "weather", "weather", "m"]


def chat_loop(client: Any, weather: Callable[..., str], stream: bool) -> str:
    messages: list[Any] = list(ASK)
    while True:
        asked = {"model": "m", "messages": messages, "tools": [CHAT_TOOL]}
        if stream:
            with client.chat.completions.stream(**asked) as events:
                for _ in events:
                    pass
                message = events.get_final_completion().choices[0].message
        else:
            message = client.chat.completions.create(**asked).choices[0].message
        if not message.tool_calls:
            return str(message.content)
        messages.append(message.model_dump(exclude_none=True, exclude={"parsed"}))
        for call in message.tool_calls:
            result = weather(**json.loads(call.function.arguments))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})


def responses_loop(client: Any, weather: Callable[..., str], stream: bool) -> str:
    items: list[Any] = list(ASK)
    while True:
        asked = {"model": "m", "input": items, "tools": [RESPONSES_TOOL]}
        if stream:
            with client.responses.stream(**asked) as events:
                for _ in events:
                    pass
                answer = events.get_final_response()
        else:
            answer = client.responses.create(**asked)
        wanted = [item for item in answer.output if item.type == "function_call"]
        if not wanted:
            return str(answer.output_text)
        for item in wanted:
            called = {"type": "function_call", "call_id": item.call_id, "name": item.name}
            items.append({**called, "arguments": item.arguments})
        for item in wanted:
            result = weather(**json.loads(item.arguments))
            items.append(
                {"type": "function_call_output", "call_id": item.call_id, "output": result}
            )


def messages_loop(client: Any, weather: Callable[..., str], stream: bool) -> str:
    messages: list[Any] = list(ASK)
    while True:
        asked = {
            "model": "m",
            "max_tokens": 99,
            "messages": messages,
            "tools": [MESSAGES_TOOL],
        }
        if stream:
            with client.messages.stream(**asked) as events:
                for _ in events:
                    pass
                answer = events.get_final_message()
        else:
            answer = client.messages.create(**asked)
        wanted = [block for block in answer.content if block.type == "tool_use"]
        if not wanted:
            return "".join(block.text for block in answer.content)
        used = [
            {"type": "tool_use", "id": block.id, "name": block.name, "input": block.input}
            for block in wanted
        ]
        results = [
            {"type": "tool_result", "tool_use_id": block.id, "content": weather(**block.input)}
            for block in wanted
        ]
        messages += [
            {"role": "assistant", "content": used},
            {"role": "user", "content": results},
        ]


@pytest.mark.parametrize("streamed", [False, True])
def test_structured_output_of_chat_completions(streamed: bool) -> None:
    api = Chat()

    def ask() -> Any:
        asked = {"model": "m", "messages": ASK, "response_format": Weather}
        if streamed:
            with client.chat.completions.stream(**asked) as stream:
                answer = stream.get_final_completion()
        else:
            answer = client.chat.completions.parse(**asked)
        return answer.choices[0].message.parsed.model_dump()

    reply = data({"city": "Tromsø", "degrees": -4})
    with FakeProvider([reply]) as fake, api.client(fake) as client:
        seen = run_twice(ask)
    assert seen.values[0] == {"city": "Tromsø", "degrees": -4}


def test_structured_output_of_responses() -> None:
    api = ResponsesApi()

    def ask() -> Any:
        answer = client.responses.parse(model="m", input=ASK, text_format=Weather)
        return answer.output_parsed.model_dump()

    reply = data({"city": "Tromsø", "degrees": -4})
    with FakeProvider([reply]) as fake, api.client(fake) as client:
        seen = run_twice(ask)
    assert seen.values[0] == {"city": "Tromsø", "degrees": -4}


def test_structured_output_of_messages() -> None:
    api = Messages()

    def ask() -> Any:
        answer = client.messages.parse(
            model="m", max_tokens=99, messages=ASK, output_format=Weather
        )
        return answer.parsed_output.model_dump()

    reply = data({"city": "Tromsø", "degrees": -4})
    with FakeProvider([reply]) as fake, api.client(fake) as client:
        seen = run_twice(ask)
    assert seen.values[0] == {"city": "Tromsø", "degrees": -4}


def test_a_list_of_models_passes_through(api: Api, kernel: ScriptedKernel) -> None:
    with FakeProvider([]) as fake, api.client(fake) as client:
        seen = run(kernel, lambda: [model.id for model in client.models.list()])
    assert (seen.values, seen.steps) == ([["test-model"]], [])


# Failures


def caught(api: Api, call: Callable[[], Any]) -> dict[str, Any]:
    """The error that ``call`` raises, with everything that a handler may look at."""
    with pytest.raises(api.library.APIError) as found:
        call()
    exc = found.value
    response = getattr(exc, "response", None)
    return {
        "class": type(exc).__name__,
        "text": str(exc),
        "body": exc.body,
        "status": getattr(exc, "status_code", None),
        "request_id": getattr(exc, "request_id", None),
        "retry_after": None if response is None else response.headers.get("retry-after"),
        "cause": type(exc.__cause__).__name__,
    }


@pytest.mark.parametrize("status", [400, 401, 403, 404, 408, 409, 413, 422, 429, 500, 503, 529])
def test_an_error_comes_back_as_the_same_error(api: Api, status: int) -> None:
    with FakeProvider([error(status, "as it is", retry_after=7)]) as fake:
        with api.client(fake) as client:
            seen = run_twice(lambda: caught(api, lambda: api.ask(client)))
        assert len(fake.asked) == 1
    assert seen.values[0]["status"] == status
    assert "as it is" in seen.values[0]["text"]
    assert seen.values[0]["retry_after"] == "7"


def test_a_dropped_connection_comes_back_as_the_same_error(api: Api) -> None:
    with FakeProvider([dropped()]) as fake, api.client(fake) as client:
        seen = run_twice(lambda: caught(api, lambda: api.ask(client)))
    assert seen.values[0]["class"] == "APIConnectionError"
    assert seen.values[0]["cause"] == "RemoteProtocolError"


def test_a_time_out_comes_back_as_the_same_error(api: Api) -> None:
    never = threading.Event()
    with FakeProvider([text("Late.").held(never)]) as fake, api.client(fake) as client:
        seen = run_twice(lambda: caught(api, lambda: api.ask(client, timeout=0.2)))
        never.set()
    assert seen.values[0]["class"] == "APITimeoutError"
    assert seen.values[0]["cause"] == "ReadTimeout"


def test_an_error_event_in_a_stream_comes_back_as_the_same_error(api: Api) -> None:
    def ask() -> Any:
        came: list[Any] = []

        def read() -> None:
            for event in api.ask(client, stream=True):
                came.append(dumped(event))

        if api.name == "responses":
            read()
            failure = None
        else:
            failure = caught(api, read)
        step("note", lambda: "noted")
        return failure, came

    with FakeProvider([text("Snow in Tromsø.").failing(3)]) as fake, api.client(fake) as client:
        seen = run_twice(ask)
    assert "overloaded" in json.dumps(seen.values[0])


def test_a_cut_stream_comes_back_as_the_same_error(api: Api) -> None:
    def ask() -> Any:
        came: list[Any] = []
        stream = api.ask(client, stream=True)
        with pytest.raises(Exception, match=r"Connection error|peer closed") as found:
            came.extend(dumped(event) for event in stream)
        return came, type(found.value).__name__, str(found.value)

    with FakeProvider([text("Snow in Tromsø.").cut(4)]) as fake, api.client(fake) as client:
        seen = run_twice(ask)
    assert len(seen.values[0][0]) >= 2
    assert seen.steps == [("m", "failed")]


@pytest.mark.parametrize("failing", [error(429), error(500), dropped()], ids=["429", "500", "0"])
def test_a_handler_that_fell_back_does_so_again(api: Api, failing: Reply) -> None:
    def ask() -> str:
        try:
            return api.said(api.ask(client, model="first"))
        except api.library.APIError as exc:
            return f"{type(exc).__name__} {api.said(api.ask(client, model='second'))}"

    with FakeProvider([failing, text("Snow.")]) as fake, api.client(fake) as client:
        seen = run_twice(ask)
        assert len(fake.asked) == 2
    assert seen.values[0].endswith(" Snow.")
    assert [target for target, _ in seen.steps] == ["first", "second"]


# The library's own retries


@pytest.fixture
def naps(api: Api, monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """How long the library slept between its tries; it does not really."""
    slept: list[float] = []
    clock = types.SimpleNamespace(
        time=time.time, time_ns=time.time_ns, monotonic=time.monotonic, sleep=slept.append
    )
    monkeypatch.setattr(api.base_client, "time", clock)
    return slept


def test_the_librarys_retries_replay_one_by_one_without_a_wait(api: Api, naps: list[float]) -> None:
    replies = [error(429, retry_after=30), error(500), error(503, retry_after=9), text("Snow.")]
    attempts: list[int] = []

    def ask() -> str:
        attempts.append(len(naps))
        return api.said(api.ask(client))

    with FakeProvider(replies) as fake, api.client(fake, max_retries=3) as client:
        seen = run_twice(ask)
        assert len(fake.asked) == 4
    assert seen.values[0] == "Snow."
    assert [outcome["status"] for outcome in seen.outcomes] == [429, 500, 503, 200]
    first, second = naps[: attempts[1]], naps[attempts[1] :]
    assert [first[0], first[2]] == [30, 9]
    assert second == [0.001] * 3


def test_retries_that_ran_out_replay_to_the_same_error(api: Api, naps: list[float]) -> None:
    with FakeProvider([error(500, "one"), error(503, "two")]) as fake:
        with api.client(fake, max_retries=1) as client:
            seen = run_twice(lambda: caught(api, lambda: api.ask(client)))
        assert len(fake.asked) == 2
    assert seen.values[0]["status"] == 503


def test_a_connection_that_the_library_tried_again_replays(api: Api, naps: list[float]) -> None:
    with FakeProvider([dropped(), text("Snow.")]) as fake:
        with api.client(fake, max_retries=1) as client:
            seen = run_twice(lambda: api.said(api.ask(client)))
        assert len(fake.asked) == 2
    assert seen.values[0] == "Snow."
    assert seen.steps == [("m", "failed"), ("m", "succeeded")]


@pytest.mark.parametrize("told", ["true", "false"])
def test_what_the_provider_says_of_retrying_holds_on_replay(
    api: Api, naps: list[float], told: str
) -> None:
    """Against what the status says, so that only the header can bring it about."""
    replies = [error(400 if told == "true" else 500).with_headers(x_should_retry=told)]
    replies += [text("Snow.")] if told == "true" else []

    def ask() -> str:
        try:
            return api.said(api.ask(client))
        except api.library.APIStatusError as exc:
            return str(exc.status_code)

    with FakeProvider(replies) as fake, api.client(fake, max_retries=1) as client:
        seen = run_twice(ask)
        assert len(fake.asked) == len(replies)
    assert seen.values[0] == ("Snow." if told == "true" else "500")


def test_a_long_retry_after_leads_to_the_same_end(api: Api, naps: list[float]) -> None:
    """Some libraries wait for however long, some give up: what they did, they do again."""
    attempts: list[int] = []

    def ask() -> str:
        attempts.append(len(naps))
        try:
            return api.said(api.ask(client))
        except api.library.RateLimitError as exc:
            return f"gave up: {exc.status_code}"

    def script(asked: Any) -> Reply:
        return error(429, retry_after=300) if asked.number == 1 else text("Snow.")

    with FakeProvider(script) as fake, api.client(fake, max_retries=1) as client:
        seen = run_twice(ask)
        assert len(fake.asked) == len(seen.steps)
    assert all(nap < 1 for nap in naps[attempts[1] :])


# Refusals


@pytest.mark.parametrize(
    ("told", "signal"),
    [
        ({"decision": "blocked", "step_id": "s1", "approval_id": "a1"}, Blocked),
        ({"decision": "denied", "step_id": "s1", "reason": 'too "dear"; don\'t'}, PolicyError),
        ({"decision": "rate_limited", "reason": "rate_limit_exceeded"}, RateLimited),
    ],
    ids=["blocked", "denied", "rate_limited"],
)
@pytest.mark.parametrize("streamed", [False, True])
def test_a_refused_call_is_submitted_exactly_once(
    api: Api,
    kernel: ScriptedKernel,
    told: dict[str, Any],
    signal: type[BaseException],
    streamed: bool,
) -> None:
    kernel.decide_steps(lambda submission: told)
    found: list[BaseException] = []

    def ask() -> None:
        try:
            api.ask(client, stream=streamed)
        except api.library.APIStatusError as exc:
            try:
                raise_for_refusal(exc)
            except BaseException as raised:
                found.append(raised)
            raise

    with FakeProvider([]) as fake, api.client(fake, max_retries=5) as client:
        seen = run(kernel, ask)
        assert fake.asked == []
    assert len(kernel.sent("submit")) == 1
    assert [type(exc) for exc in found] == [signal]
    if signal is Blocked:
        assert kernel.sent("fail") == []
    else:
        reason = told["reason"]
        wanted = f"policy_denied: {reason}" if signal is PolicyError else reason
        assert seen.run.failure_reason == wanted


def test_a_lost_lease_is_submitted_exactly_once(api: Api, kernel: ScriptedKernel) -> None:
    def lost(request: Recorded) -> Answer | None:
        if request.call == "submit":
            return Answer.error(409, "lease_superseded")
        return None

    kernel.intercept(lost)
    with FakeProvider([]) as fake, api.client(fake, max_retries=5) as client:
        run(kernel, lambda: api.ask(client))
    assert len(kernel.sent("submit")) == 1
    assert kernel.sent("fail") == kernel.sent("complete") == []


def test_a_call_waits_for_its_approval(api: Api) -> None:
    def policy(kind: str, target: str, args: Any) -> Verdict:
        return Verdict("require_approval")

    with ScriptedKernel(GENERATION_3, policy=policy) as kernel:
        seen = Seen(kernel.create({}))
        with (
            FakeProvider([text("Snow.")]) as fake,
            api.client(fake) as client,
            agent_under(kernel, lambda: seen.values.append(api.said(api.ask(client)))) as agent,
        ):
            kernel.deliver(seen.run)
            assert agent.join(60)
            assert (seen.run.status, fake.asked) == ("blocked", [])
            (approval,) = seen.run.approvals.values()
            kernel.decide(approval, grant=True)
            kernel.deliver(seen.run)
            assert agent.join(60)
    assert (seen.run.status, seen.values) == ("completed", ["Snow."])


# Streams that are not read to their end


def take_two(api: Api, client: Any) -> list[Any]:
    """Read two events and leave the stream open, as ``break`` does."""
    came = []
    for event in api.ask(client, stream=True):
        came.append(dumped(event))
        if len(came) == 2:
            break
    return came


def test_a_stream_that_is_left_by_break_is_recorded_before_the_next_effect(api: Api) -> None:
    def ask() -> Any:
        came = take_two(api, client)
        return came, step("note", lambda: "noted")

    with FakeProvider([text("Snow in Tromsø.")]) as fake, api.client(fake) as client:
        seen = run_twice(ask)
        assert len(fake.asked) == 1
    assert seen.steps == [("m", "succeeded"), ("note", "succeeded")]


def test_a_stream_that_is_left_by_break_is_closed_when_the_handler_returns(
    api: Api, kernel: ScriptedKernel
) -> None:
    never = threading.Event()
    reply = text("Snow in Tromsø.").held(never, after=3)
    with FakeProvider([reply]) as fake, api.client(fake) as client:
        seen = run(kernel, lambda: len(take_two(api, client)))
        never.set()
    assert (seen.run.status, seen.values) == ("completed", [2])
    assert seen.outcomes[0]["closed_early"] is True


@contextmanager
def closing(stream: Any) -> Iterator[Any]:
    try:
        yield stream
    finally:
        stream.close()


def test_a_stream_that_is_closed_twice(api: Api) -> None:
    def ask() -> Any:
        with closing(api.ask(client, stream=True)) as stream:
            first = dumped(next(iter(stream)))
            stream.close()
        step("note", lambda: "noted")
        return first

    with FakeProvider([text("Snow in Tromsø.")]) as fake, api.client(fake) as client:
        run_twice(ask)


def test_a_stream_left_by_a_thread_that_is_ended(api: Api, kernel: ScriptedKernel) -> None:
    """What its end closes behind it is not recorded: the next attempt asks again."""
    attempts: list[int] = []

    def ask() -> int:
        attempts.append(1)
        count = 0
        for _ in api.ask(client, stream=True):
            count += 1
            if len(attempts) == 1:
                raise Killed
        return count

    with FakeProvider([text("One."), text("Two, three.")]) as fake, api.client(fake) as client:
        seen = Seen(kernel.create({}))
        with agent_under(kernel, lambda: seen.values.append(ask())) as agent:
            for _ in range(2):
                kernel.deliver(seen.run)
                assert agent.join(60)
        assert len(fake.asked) == 2
    assert seen.run.status == "completed"
    assert seen.values[0] > 2
    assert len(kernel.sent("step_complete")) == 1


def test_a_tool_that_waits_inside_a_stream(api: Api) -> None:
    """The stream is left without a word by the library; all of it is there on the next attempt."""

    @tool("gated")
    def gated() -> str:
        return "opened"

    def policy(kind: str, target: str, args: Any) -> Verdict:
        return Verdict("require_approval" if kind == "tool_call" else "allow")

    def ask() -> int:
        count = 0
        for _ in api.ask(client, stream=True):
            count += 1
            if count == 2:
                assert gated() == "opened"
        return count

    with (
        ScriptedKernel(GENERATION_3, policy=policy) as kernel,
        FakeProvider([text("Snow in Tromsø.")]) as fake,
        api.client(fake) as client,
    ):
        seen = Seen(kernel.create({}))
        with agent_under(kernel, lambda: seen.values.append(ask())) as agent:
            kernel.deliver(seen.run)
            assert agent.join(60)
            (approval,) = seen.run.approvals.values()
            kernel.decide(approval, grant=True)
            kernel.deliver(seen.run)
            assert agent.join(60)
        assert seen.run.status == "completed"
        assert len(fake.asked) == 1
    assert seen.values[0] > 4
    assert "closed_early" not in seen.outcomes[0]
