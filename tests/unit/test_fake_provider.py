"""The fake provider, held against the real libraries with their strictest validation."""

from __future__ import annotations

import http.client
import json
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import anthropic
import openai
import pydantic
import pytest

from examples.fake_provider import (
    Asked,
    FakeProvider,
    Reply,
    ScriptError,
    calls,
    data,
    dropped,
    error,
    raw,
    text,
)

ROOT = Path(__file__).resolve().parents[2]
WEATHER = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}
CHAT_TOOL = {"type": "function", "function": {"name": "weather", "parameters": WEATHER}}
RESPONSES_TOOL = {"type": "function", "name": "weather", "parameters": WEATHER, "strict": True}
ANTHROPIC_TOOL = {"name": "weather", "input_schema": WEATHER}
ASK = [{"role": "user", "content": "How is the weather in Tromsø?"}]
ANSWER = "Snow in Tromsø: −4 °C, says 天気."


class Weather(pydantic.BaseModel):
    city: str
    degrees: int


@contextmanager
def openai_client(fake: FakeProvider, **options: Any) -> Iterator[openai.OpenAI]:
    options = {"max_retries": 0, "api_key": "k", **options}
    with openai.OpenAI(
        base_url=fake.openai_url, _strict_response_validation=True, **options
    ) as client:
        yield client


@contextmanager
def anthropic_client(fake: FakeProvider, **options: Any) -> Iterator[anthropic.Anthropic]:
    options = {"max_retries": 0, "api_key": "k", **options}
    with anthropic.Anthropic(
        base_url=fake.url, _strict_response_validation=True, **options
    ) as client:
        yield client


def ask_chat(client: openai.OpenAI, **more: Any) -> Any:
    return client.chat.completions.create(**{"model": "m", "messages": ASK, **more})


def ask_responses(client: openai.OpenAI, **more: Any) -> Any:
    return client.responses.create(**{"model": "m", "input": ASK, **more})


def ask_messages(client: anthropic.Anthropic, **more: Any) -> Any:
    return client.messages.create(**{"model": "m", "max_tokens": 99, "messages": ASK, **more})


# Each API: how to open a client, how to ask, how to read the text of a plain and of a streamed
# answer, and the errors of its library.


def chat_text(answer: Any) -> str:
    return answer.choices[0].message.content or ""


def chat_streamed(stream: Any) -> list[str]:
    return [c.choices[0].delta.content for c in stream if c.choices and c.choices[0].delta.content]


def responses_streamed(stream: Any) -> list[str]:
    return [e.delta for e in stream if e.type == "response.output_text.delta"]


def messages_streamed(stream: Any) -> list[str]:
    return [e.delta.text for e in stream if e.type == "content_block_delta"]


class Api:
    def __init__(
        self, name: str, library: Any, client: Any, ask: Any, text: Any, streamed: Any
    ) -> None:
        self.name = name
        self.library = library
        self.client = client
        self.ask = ask
        self.text: Callable[[Any], str] = text
        self.streamed: Callable[[Any], list[str]] = streamed


APIS = [
    Api("chat", openai, openai_client, ask_chat, chat_text, chat_streamed),
    Api(
        "responses",
        openai,
        openai_client,
        ask_responses,
        lambda answer: answer.output_text,
        responses_streamed,
    ),
    Api(
        "messages",
        anthropic,
        anthropic_client,
        ask_messages,
        lambda answer: answer.content[0].text,
        messages_streamed,
    ),
]


@pytest.fixture(params=APIS, ids=lambda api: api.name)
def api(request: pytest.FixtureRequest) -> Api:
    return request.param


# What every API does


def test_plain_text(api: Api) -> None:
    with FakeProvider([text(ANSWER)]) as fake, api.client(fake) as client:
        answer = api.ask(client)
    assert api.text(answer) == ANSWER
    assert answer.model == "m"
    assert fake.asked[0].user_text == ASK[0]["content"]


def test_streamed_text_comes_in_its_pieces(api: Api) -> None:
    with FakeProvider([text("Snow, ", "a lot ", "of it.")]) as fake, api.client(fake) as client:
        assert api.streamed(api.ask(client, stream=True)) == ["Snow, ", "a lot ", "of it."]
    assert fake.asked[0].stream


@pytest.mark.parametrize("size", [1, 7])
def test_a_stream_may_be_split_anywhere(api: Api, size: int) -> None:
    with FakeProvider([text(ANSWER).in_chunks_of(size)]) as fake, api.client(fake) as client:
        assert "".join(api.streamed(api.ask(client, stream=True))) == ANSWER


def test_compressed_bodies(api: Api) -> None:
    script = [text(ANSWER).gzipped(), text(ANSWER).gzipped()]
    with FakeProvider(script) as fake, api.client(fake) as client:
        assert api.text(api.ask(client)) == ANSWER
        assert "".join(api.streamed(api.ask(client, stream=True))) == ANSWER


def test_length_is_told(api: Api) -> None:
    with FakeProvider([text("Snow").cut_short()]) as fake, api.client(fake) as client:
        answer = api.ask(client)
    told = {
        "chat": lambda: answer.choices[0].finish_reason == "length",
        "responses": lambda: answer.incomplete_details.reason == "max_output_tokens",
        "messages": lambda: answer.stop_reason == "max_tokens",
    }
    assert told[api.name]()


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, "BadRequestError"),
        (401, "AuthenticationError"),
        (404, "NotFoundError"),
        (429, "RateLimitError"),
        (500, "InternalServerError"),
    ],
)
def test_errors_are_those_of_the_library(api: Api, status: int, kind: str) -> None:
    kind = getattr(api.library, kind)
    with (
        FakeProvider([error(status, "no luck")]) as fake,
        api.client(fake) as client,
        pytest.raises(kind, match="no luck") as raised,
    ):
        api.ask(client)
    assert raised.value.status_code == status
    assert raised.value.request_id == f"req_{fake.asked[0].digest}01"


def test_overload(api: Api) -> None:
    with (
        FakeProvider([error(529, "no luck")]) as fake,
        api.client(fake) as client,
        pytest.raises(api.library.APIStatusError) as raised,
    ):
        api.ask(client)
    assert raised.value.status_code == 529


def test_the_library_retries_after_what_it_is_told(api: Api) -> None:
    script = [error(429, retry_after=0.01), error(500, retry_after=0.01), text("Snow")]
    with FakeProvider(script) as fake, api.client(fake, max_retries=2) as client:
        assert api.text(api.ask(client)) == "Snow"
    assert [asked.number for asked in fake.asked] == [1, 2, 3]
    assert list(fake.times_asked.values()) == [3]
    assert [a.headers["x-stainless-retry-count"] for a in fake.asked] == ["0", "1", "2"]


def test_a_dropped_connection(api: Api) -> None:
    with (
        FakeProvider([dropped()]) as fake,
        api.client(fake) as client,
        pytest.raises(api.library.APIConnectionError),
    ):
        api.ask(client)


@pytest.mark.parametrize("stream", [False, True])
def test_a_cut_answer(api: Api, stream: bool) -> None:
    with (
        FakeProvider([text("Snow").cut(3)]) as fake,
        api.client(fake) as client,
        pytest.raises(Exception, match=r"peer closed|Connection error"),
    ):
        list(api.ask(client, stream=stream))


def test_an_error_within_a_stream(api: Api) -> None:
    seen: list[Any] = []
    with FakeProvider([text("Snow").failing(2, "no luck")]) as fake, api.client(fake) as client:
        stream = api.ask(client, stream=True)
        if api.name == "responses":
            seen = [event for event in stream if event.type == "error"]
            assert seen[0].message == "no luck"
        else:
            with pytest.raises(api.library.APIError, match="no luck"):
                list(stream)


def test_a_held_answer_waits(api: Api) -> None:
    go = threading.Event()
    answers: list[str] = []
    with FakeProvider([text("Snow").held(go)]) as fake, api.client(fake) as client:
        caller = threading.Thread(target=lambda: answers.append(api.text(api.ask(client))))
        caller.start()
        fake.wait_until_asked(1)
        assert answers == []
        go.set()
        caller.join(30)
    assert answers == ["Snow"]


def test_a_held_stream_waits_in_the_middle(api: Api) -> None:
    go = threading.Event()
    with FakeProvider([text(ANSWER).held(go, after=1)]) as fake, api.client(fake) as client:
        stream = iter(api.ask(client, stream=True))
        next(stream)
        go.set()
        assert "".join(api.streamed(stream)).endswith("天気.")


def test_closing_frees_a_held_answer() -> None:
    raised: list[BaseException] = []

    def ask() -> None:
        with openai_client(fake) as client:
            try:
                ask_chat(client)
            except openai.APIConnectionError as exc:
                raised.append(exc)

    with FakeProvider([dropped().held(threading.Event())]) as fake:
        caller = threading.Thread(target=ask)
        caller.start()
        fake.wait_until_asked(1)
    caller.join(30)
    assert len(raised) == 1


def test_ids_depend_on_the_request_alone(api: Api) -> None:
    def ids() -> list[str]:
        with FakeProvider([text("Snow")] * 3) as fake, api.client(fake) as client:
            return [api.ask(client, model=model).id for model in ("m", "n", "m")]

    first = ids()
    assert first == ids()
    assert len(set(first)) == 3


def test_a_key_can_be_demanded(api: Api) -> None:
    with FakeProvider([text("Snow")], api_key="secret") as fake:
        with api.client(fake) as client, pytest.raises(api.library.AuthenticationError):
            api.ask(client)
        with api.client(fake, api_key="secret") as client:
            assert api.text(api.ask(client)) == "Snow"


def test_models(api: Api) -> None:
    with FakeProvider(models=["m", "n"]) as fake, api.client(fake) as client:
        assert [model.id for model in client.models.list()] == ["m", "n"]
        assert client.models.retrieve("n").id == "n"
    assert fake.asked == []


def test_a_script_that_runs_out_is_not_missed(api: Api) -> None:
    fake = FakeProvider()
    with (
        api.client(fake, max_retries=2) as client,
        pytest.raises(api.library.InternalServerError, match="has no reply"),
    ):
        api.ask(client)
    assert len(fake.asked) == 1
    with pytest.raises(ScriptError, match=r"request 1 .* has no reply"):
        fake.close()


def test_a_call_of_a_tool_that_is_not_on_offer_is_not_missed(api: Api) -> None:
    fake = FakeProvider([calls("weather", city="Tromsø")])
    with api.client(fake) as client, pytest.raises(api.library.InternalServerError):
        api.ask(client)
    with pytest.raises(ScriptError, match="calls 'weather'"):
        fake.close()


# Tools


def weather_script(asked: Asked) -> Reply:
    if not asked.results:
        assert asked.tools == ("weather",)
        return (
            text("Let me look.").and_calls("weather", city="Tromsø").and_calls("weather", city="")
        )
    assert [(r.name, r.content) for r in asked.results] == [("weather", "snow"), ("weather", "?")]
    assert asked.after == "weather"
    return text(ANSWER)


ARGUMENTS = [{"city": "Tromsø"}, {"city": ""}]
RESULTS = ["snow", "?"]


@pytest.mark.parametrize("stream", [False, True])
def test_tools_by_chat(stream: bool) -> None:
    with FakeProvider(weather_script) as fake, openai_client(fake) as client:
        if stream:
            with client.chat.completions.stream(
                model="m", messages=ASK, tools=[CHAT_TOOL], stream_options={"include_usage": True}
            ) as events:
                answer = events.get_final_completion()
        else:
            answer = ask_chat(client, tools=[CHAT_TOOL])
        message = answer.choices[0].message
        assert (answer.choices[0].finish_reason, message.content) == ("tool_calls", "Let me look.")
        assert answer.usage.total_tokens > 16
        asked = [json.loads(call.function.arguments) for call in message.tool_calls]
        assert asked == ARGUMENTS
        said = message.model_dump(exclude={"parsed"}, exclude_none=True)
        for call in said["tool_calls"]:
            call["function"].pop("parsed_arguments", None)
        results = [
            {"role": "tool", "tool_call_id": call.id, "content": result}
            for call, result in zip(message.tool_calls, RESULTS, strict=True)
        ]
        answer = ask_chat(client, tools=[CHAT_TOOL], messages=[*ASK, said, *results])
        assert chat_text(answer) == ANSWER
        with pytest.raises(openai.BadRequestError, match="did not have response messages"):
            ask_chat(client, messages=[*ASK, said, results[0]])
        with pytest.raises(openai.BadRequestError, match="preceding message"):
            ask_chat(client, messages=[*ASK, results[0]])


@pytest.mark.parametrize("stream", [False, True])
def test_tools_by_responses(stream: bool) -> None:
    with FakeProvider(weather_script) as fake, openai_client(fake) as client:
        if stream:
            with client.responses.stream(model="m", input=ASK, tools=[RESPONSES_TOOL]) as events:
                answer = events.get_final_response()
        else:
            answer = ask_responses(client, tools=[RESPONSES_TOOL])
        assert (answer.status, answer.output_text) == ("completed", "Let me look.")
        found = [item for item in answer.output if item.type == "function_call"]
        assert [json.loads(item.arguments) for item in found] == ARGUMENTS
        said = [
            {
                "type": "function_call",
                "call_id": i.call_id,
                "name": i.name,
                "arguments": i.arguments,
            }
            for i in found
        ]
        results = [
            {"type": "function_call_output", "call_id": item.call_id, "output": result}
            for item, result in zip(found, RESULTS, strict=True)
        ]
        answer = ask_responses(client, input=[*ASK, *said, *results])
        assert answer.output_text == ANSWER
        answer = ask_responses(client, input=results, previous_response_id=answer.id)
        assert answer.output_text == ANSWER
        with pytest.raises(openai.BadRequestError, match="no tool output found"):
            ask_responses(client, input=[*ASK, *said, results[0]])
        with pytest.raises(openai.BadRequestError, match="no tool call found"):
            ask_responses(client, input=[*ASK, results[0]])


@pytest.mark.parametrize("stream", [False, True])
def test_tools_by_messages(stream: bool) -> None:
    with FakeProvider(weather_script) as fake, anthropic_client(fake) as client:
        if stream:
            with client.messages.stream(
                model="m", max_tokens=99, messages=ASK, tools=[ANTHROPIC_TOOL]
            ) as events:
                answer = events.get_final_message()
        else:
            answer = ask_messages(client, tools=[ANTHROPIC_TOOL])
        assert (answer.stop_reason, answer.content[0].text) == ("tool_use", "Let me look.")
        found = [block for block in answer.content if block.type == "tool_use"]
        assert [block.input for block in found] == ARGUMENTS
        said = {
            "role": "assistant",
            "content": [
                {"type": "tool_use", "id": b.id, "name": b.name, "input": b.input} for b in found
            ],
        }
        results = [
            {"type": "tool_result", "tool_use_id": block.id, "content": result}
            for block, result in zip(found, RESULTS, strict=True)
        ]
        after = {"role": "user", "content": results}
        answer = ask_messages(client, messages=[*ASK, said, after])
        assert answer.content[0].text == ANSWER
        with pytest.raises(anthropic.BadRequestError, match="without `tool_result`"):
            ask_messages(client, messages=[*ASK, said, {"role": "user", "content": results[:1]}])
        with pytest.raises(anthropic.BadRequestError, match="unexpected `tool_use_id`"):
            ask_messages(client, messages=[*ASK, after])


# Structured output


def test_structured_output() -> None:
    value = {"city": "Tromsø", "degrees": -4}
    with FakeProvider([data(value)] * 3) as fake:
        with openai_client(fake) as client:
            chat = client.chat.completions.parse(model="m", messages=ASK, response_format=Weather)
            assert chat.choices[0].message.parsed == Weather(**value)
            response = client.responses.parse(model="m", input=ASK, text_format=Weather)
            assert response.output_parsed == Weather(**value)
        with anthropic_client(fake) as client:
            message = client.messages.parse(
                model="m", max_tokens=99, messages=ASK, output_format=Weather
            )
            assert message.parsed_output == Weather(**value)


# Without a library


def request(fake: FakeProvider, method: str, path: str, body: bytes = b"") -> tuple[int, bytes]:
    connection = http.client.HTTPConnection(fake.url.removeprefix("http://"), timeout=30)
    try:
        connection.request(method, path, body, {"Authorization": "Bearer k"})
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


def test_raw_bodies_come_byte_for_byte() -> None:
    body = bytes(range(256))
    script = [raw(body, 203, "application/octet-stream"), raw([body[:9], b"", body[9:]])]
    with FakeProvider(script) as fake:
        for status in (203, 200):
            assert request(fake, "POST", "/v1/messages", b"{}")[0] == 400
            asked = b'{"model": "m", "messages": [{"role": "user", "content": "hi"}]}'
            assert request(fake, "POST", "/v1/chat/completions", asked) == (status, body)


def test_what_is_not_served() -> None:
    with FakeProvider() as fake:
        assert request(fake, "POST", "/v1/nothing")[0] == 404
        assert request(fake, "GET", "/v1/chat/completions")[0] == 405
        assert request(fake, "POST", "/v1/chat/completions", b"no JSON")[0] == 400


def test_the_command_serves_a_file(tmp_path: Path) -> None:
    script = [
        {"when": {"after": "weather", "result_contains": "snow"}, "text": "Take a coat."},
        {"when": {"contains": "WEATHER", "after": None}, "calls": [{"name": "weather"}]},
        {"error": 429, "message": "slow down", "retry_after": 0.01},
        {"data": {"city": "Tromsø"}},
    ]
    (tmp_path / "script.json").write_text(json.dumps(script), "utf-8")
    with subprocess.Popen(
        [sys.executable, "-m", "examples.fake_provider", "--script", tmp_path / "script.json"],
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    ) as process:
        assert process.stdout is not None
        url = process.stdout.readline().strip().removeprefix("OPENAI_BASE_URL=")
        assert re.fullmatch(r"ANTHROPIC_BASE_URL=\S+\n", process.stdout.readline())
        with openai.OpenAI(base_url=url, api_key="k") as client:
            answer = ask_chat(client, tools=[CHAT_TOOL])
            call = answer.choices[0].message.tool_calls[0]
            said = answer.choices[0].message.model_dump(exclude_none=True)
            result = {"role": "tool", "tool_call_id": call.id, "content": "much snow"}
            assert chat_text(ask_chat(client, messages=[*ASK, said, result])) == "Take a coat."
            hello = [{"role": "user", "content": "Hello"}]
            assert chat_text(ask_chat(client, messages=hello)) == '{"city":"Tromsø"}'
        process.send_signal(signal.SIGTERM)
        rest = process.stdout.read()
        assert process.wait(30) == 0
    assert "2 /v1/chat/completions m: Take a coat." in rest


@pytest.mark.parametrize(
    ("script", "complaint"),
    [
        ({}, "a list of replies"),
        ([1], "reply 1: an object"),
        ([{"txt": "x"}], "no field 'txt'"),
        ([{"text": "x", "when": {"before": "y"}}], "no field 'before'"),
        ([{"when": {}}], "one of 'text'"),
    ],
)
def test_a_bad_script_file_is_explained(tmp_path: Path, script: Any, complaint: str) -> None:
    from examples.fake_provider import load_script

    (tmp_path / "script.json").write_text(json.dumps(script), "utf-8")
    with pytest.raises(ValueError, match=complaint):
        load_script(tmp_path / "script.json")
