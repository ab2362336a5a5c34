"""Handlers that make LLM calls, run on a first attempt and again on a replay."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import json
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import requests

from rebuno_sync import Agent, http_client, requests_session
from tests.scripted import GENERATION_3, ScriptedKernel, served
from tests.scripted.state import TERMINAL, Execution

MESSAGES = [{"role": "user", "content": "How is the weather in Tromsø?"}]
ASK = {"model": "test-model", "messages": MESSAGES}


class Killed(SystemExit):
    """Ends an attempt as a killed process would: nothing is reported."""


@dataclass
class Seen:
    """What came of running one handler on two attempts."""

    run: Execution
    values: list[Any] = field(default_factory=list)

    @property
    def steps(self) -> list[tuple[str, str]]:
        return [(step.target, step.status) for step in self.run.steps.values()]

    @property
    def outcomes(self) -> list[Any]:
        """The recorded results, and the errors where there is no result, in order."""
        return [
            json.loads((step.result or step.error).text)  # type: ignore[union-attr]
            for step in self.run.steps.values()
        ]


@contextlib.contextmanager
def agent_under(kernel: ScriptedKernel, handler: Callable[[], Any]) -> Iterator[Agent]:
    """Our agent, served on a real port, with its webhook told to the kernel."""
    agent = Agent(kernel.agent_id, secret=kernel.secret, base_url=kernel.url)
    agent.bind(handler)
    with served(agent.app) as url:
        kernel.agent_url = f"{url}/webhook"
        try:
            yield agent
        finally:
            assert agent.close(timeout=60)


def run(kernel: ScriptedKernel, handler: Callable[[], Any]) -> Seen:
    """Deliver one execution once."""
    seen = Seen(kernel.create({}))
    with agent_under(kernel, lambda: seen.values.append(handler())) as agent:
        assert kernel.deliver(seen.run).status < 300
        assert agent.join(60)
    return seen


def run_twice(
    handler: Callable[[], Any], kernel: ScriptedKernel | None = None, *, same: bool = True
) -> Seen:
    """Run ``handler`` to its end, kill it there, and run it again to the end of the execution.

    Args:
        same: whether both attempts must have seen the same.
    """
    with contextlib.ExitStack() as stack:
        kernel = kernel or stack.enter_context(ScriptedKernel(GENERATION_3))
        seen = Seen(kernel.create({}))

        def twice() -> None:
            seen.values.append(handler())
            if len(seen.values) == 1:
                raise Killed

        agent = stack.enter_context(agent_under(kernel, twice))
        for _ in range(2):
            assert kernel.deliver(seen.run).status < 300
            assert agent.join(60)
        assert seen.run.status in TERMINAL, kernel.calls()
        assert seen.run.status == "completed", seen.run.failure_reason
    first, second = seen.values
    if same:
        assert first == second
    return seen


@dataclass(frozen=True)
class Got:
    """An answer as a caller of an HTTP library sees it."""

    status: int
    reason: str
    headers: dict[str, str]
    content: bytes
    text: str


def receive(connection: socket.socket) -> bytes:
    """Read one request off a connection, so that nothing is left unread when it is closed."""
    head = b""
    while b"\r\n\r\n" not in head:
        head += connection.recv(65536)
    head, _, body = head.partition(b"\r\n\r\n")
    length = int(head.lower().partition(b"content-length:")[2].split()[0])
    while len(body) < length:
        body += connection.recv(65536)
    return body


class Web:
    """An HTTP library, used in one way."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.library = importlib.import_module(name)

    def __repr__(self) -> str:
        return self.name

    @property
    def base_error(self) -> Any:
        if self.name == "requests":
            return requests.RequestException
        return self.library.RequestError

    def client(self, **options: Any) -> Any:
        """A recording client; ``inner`` is its inner adapter or transport."""
        inner = options.pop("inner", None)
        if self.name == "requests":
            return requests_session(adapter=inner, **options)
        return http_client(library=self.name, transport=inner, **options)  # type: ignore[call-overload]

    def inner(self) -> Any:
        """What sends requests in this library."""
        if self.name == "requests":
            return requests.adapters.HTTPAdapter()
        return self.library.HTTPTransport()

    def post(self, client: Any, url: str, body: Any = None, **options: Any) -> Got:
        """POST a body and read the answer."""
        with self.opened(client, url, body, **options) as response:
            content = response.content if self.name == "requests" else response.read()
            return Got(
                response.status_code,
                response.reason if self.name == "requests" else response.reason_phrase,
                {name.lower(): value for name, value in response.headers.items()},
                content,
                response.text,
            )

    @contextlib.contextmanager
    def opened(
        self, client: Any, url: str, body: Any = None, *, timeout: float = 30.0, **options: Any
    ) -> Iterator[Any]:
        """POST a body and leave the answer unread."""
        options.setdefault("headers", {"Authorization": "Bearer any"})
        if "content" in options and self.name == "requests":
            options["data"] = options.pop("content")
        elif "content" not in options:
            options["json"] = ASK if body is None else body
        if self.name == "requests":
            with client.post(url, stream=True, timeout=timeout, **options) as response:
                yield response
            return
        with client.stream("POST", url, timeout=timeout, **options) as response:
            yield response

    def chunks(self, response: Any) -> Iterator[bytes]:
        """The body as it comes."""
        if self.name == "requests":
            found: Iterator[bytes] = response.iter_content(None)
            return found
        return iter(response.iter_bytes())

    def error(self, call: Callable[[], Any]) -> tuple[str, str]:
        """The class and the text of the error of the library that ``call`` raises."""
        with pytest.raises(self.base_error) as caught:
            call()
        return type(caught.value).__name__, str(caught.value)


WEBS = [Web(name) for name in ("requests", "httpx2", "httpx") if importlib.util.find_spec(name)]
