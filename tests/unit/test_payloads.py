"""What is over the kernel's 10 MiB: refused before it is sent, and never a loop of attempts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import requests
from requests import PreparedRequest, Response
from requests.adapters import BaseAdapter

from rebuno_sync import Agent, Client, Result, requests_session, step, tool
from rebuno_sync.testing.in_process import TestKernel
from rebuno_sync.testing.runs import AgentRun, run_agent
from rebuno_sync.wire import MAX_BODY_BYTES

MUCH = "x" * MAX_BODY_BYTES


@tool
def echo(text: str, times: int = 1) -> str:
    return text * times


@tool
def boom(size: int) -> None:
    raise ValueError("x" * size)


@pytest.fixture
def kernel() -> Iterator[TestKernel]:
    with TestKernel() as kernel:
        yield kernel


@pytest.fixture
def sizes(kernel: TestKernel, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The sizes of the bodies that were sent."""
    sent: list[int] = []
    transport = kernel.transport
    send_once = type(transport()).send_once

    def counting(self: Any, method: str, path: str, body: bytes, *rest: Any) -> Any:
        sent.append(len(body))
        return send_once(self, method, path, body, *rest)

    monkeypatch.setattr(type(transport()), "send_once", counting)
    return sent


def run(kernel: TestKernel, handler: Callable[..., Any], **options: Any) -> AgentRun:
    agent = Agent("a1", secret="s", base_url="http://kernel.invalid", **options)
    agent.bind(handler)
    return run_agent(agent, {}, kernel=kernel)


def attempts(run: AgentRun) -> int:
    return sum(event.type == "dispatch.acked" for event in run.events)


@pytest.mark.parametrize(
    ("handler", "reason"),
    [
        (lambda: echo(MUCH), "agent_error: ValueError: the step 'echo' with its arguments has 104"),
        (
            lambda: step("load", lambda text: None, {"text": MUCH}),
            "agent_error: ValueError: the step 'load' with its arguments has 104",
        ),
        (
            lambda: echo("x", MAX_BODY_BYTES),
            "tool_error: echo: the result of echo has 10485762 bytes of JSON, and the kernel "
            "takes 10485760; store the data elsewhere and pass a reference to it",
        ),
        (lambda: boom(MAX_BODY_BYTES), "tool_error: boom: xxx"),
        (lambda: MUCH, "agent_error: ValueError: the output has 10485762 bytes of JSON"),
        (
            lambda: Result("x" * 6_000_000, state="x" * 6_000_000),
            "agent_error: ValueError: the output with the state has 12000004 bytes of JSON",
        ),
    ],
    ids=["arguments", "arguments of a step", "result", "error", "output", "state"],
)
def test_what_a_handler_makes_too_large_is_a_recorded_failure(
    kernel: TestKernel, sizes: list[int], handler: Callable[[], Any], reason: str
) -> None:
    found = run(kernel, handler)
    assert found.status == "failed"
    assert found.failure_reason.startswith(reason)
    assert max(sizes) <= MAX_BODY_BYTES
    assert attempts(found) == 1, "given up, it would have been dispatched again and again"


def test_a_reason_is_cut_rather_than_lost(kernel: TestKernel, sizes: list[int]) -> None:
    def handler() -> None:
        raise ValueError("x" * 2 * MAX_BODY_BYTES)

    found = run(kernel, handler)
    assert found.failure_reason.startswith("agent_error: ValueError: xxx")
    assert found.failure_reason.endswith("more characters)")
    assert attempts(found) == 1


def test_the_result_is_a_failure_of_its_step_that_replays(kernel: TestKernel) -> None:
    found = run(kernel, lambda: echo("x", MAX_BODY_BYTES))
    (step,) = found.steps
    assert step.status == "failed"
    assert step.error["type"] == "ValueError"
    assert "echo has 10485762 bytes" in step.error["message"]


class Provider(BaseAdapter):
    """Counts what would have gone to a provider of models."""

    def __init__(self) -> None:
        super().__init__()
        self.asked = 0

    def send(self, request: PreparedRequest, **settings: Any) -> Response:  # type: ignore[override]
        self.asked += 1
        raise requests.ConnectionError("no provider here")

    def close(self) -> None:
        """Nothing is open."""


def test_the_body_of_an_llm_call(kernel: TestKernel, sizes: list[int]) -> None:
    provider = Provider()

    def handler() -> Any:
        session = requests_session(adapter=provider)
        answer = session.post("http://llm.invalid/v1", json={"model": "m1", "prompt": MUCH})
        return [answer.status_code, answer.json()["error"]["message"]]

    status, message = run(kernel, handler).output
    assert status == 400
    assert message.startswith("rebuno_sync: the step 'm1' with its arguments has 1048")
    assert provider.asked == 0
    assert max(sizes) <= MAX_BODY_BYTES


def test_metadata(kernel: TestKernel, sizes: list[int], caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "rebuno_sync.agent")
    agent = Agent("a1", secret="s", base_url="http://kernel.invalid", description=MUCH)
    agent.bind(lambda: 1)
    found = run_agent(agent, {}, kernel=kernel)
    assert found.status == "completed"
    assert agent.join(30)
    assert "the metadata of agent a1 has 1048" in caplog.text
    assert max(sizes) <= MAX_BODY_BYTES


def test_an_operators_input_and_policy(kernel: TestKernel, sizes: list[int]) -> None:
    with kernel.client() as client:
        client.register_agent("a1", "http://agent.invalid/webhook", "s")
        sizes.clear()
        for call, what in _calls(client):
            with pytest.raises(ValueError, match=what + r" has 1048\d+ bytes of JSON"):
                call()
    assert sizes == []


def _calls(client: Client) -> list[tuple[Callable[[], object], str]]:
    return [
        (lambda: client.create("a1", MUCH), "the input for agent a1"),
        (lambda: client.set_policy("a1", MUCH), "the body of POST /v0/policies/a1"),
    ]
