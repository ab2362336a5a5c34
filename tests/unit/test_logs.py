"""Which execution, attempt and step log records name, whoever logs; and what they never say."""

from __future__ import annotations

import ast
import concurrent.futures
import io
import logging
import re
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import requests
import structlog
from requests import PreparedRequest, Response
from requests.adapters import BaseAdapter

import rebuno_sync
from rebuno_sync import (
    Agent,
    Client,
    ContextThreadPoolExecutor,
    PolicyError,
    ToolError,
    UnauthorizedError,
    bind_context,
    requests_session,
    step,
    tool,
)
from rebuno_sync.kernel import EmbeddedKernel
from rebuno_sync.lease import Heartbeats, Lease
from rebuno_sync.logs import ExecutionFilter, add_execution
from rebuno_sync.testing.in_process import TestKernel
from rebuno_sync.testing.runs import AgentRun, run_agent
from tests.scripted import served, wait_until
from tests.unit.support import dispatch

shop = logging.getLogger("shop.orders")

Ids = tuple[Any, Any, Any]


class Seen(logging.Handler):
    """A handler as an app has it, with the filter; keeps what it saw."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.records: list[logging.LogRecord] = []
        self.addFilter(ExecutionFilter(**options))

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)

    def ids(self, message: str) -> Ids:
        """What the one record that begins so says of where it belongs."""
        (found,) = [r for r in self.records if r.getMessage().startswith(message)]
        return found.execution_id, found.dispatch_attempt, found.step_id  # type: ignore[attr-defined]


@pytest.fixture
def seen() -> Iterator[Seen]:
    handler = Seen()
    root = logging.getLogger()
    level = root.level
    root.addHandler(handler)
    root.setLevel(logging.DEBUG)
    try:
        yield handler
    finally:
        root.removeHandler(handler)
        root.setLevel(level)


def run(handler: Callable[..., Any], **options: Any) -> AgentRun:
    with TestKernel() as kernel:
        agent = Agent("a1", secret="s", base_url="http://kernel.invalid")
        agent.bind(handler)
        found = run_agent(agent, {}, kernel=kernel, **options)
        assert agent.join(30)
    return found


@tool
def inner() -> None:
    shop.info("in the inner tool")


@tool
def outer() -> None:
    shop.info("in the outer tool")
    inner()
    shop.info("back in the outer tool")
    thread = threading.Thread(target=bind_context(lambda: shop.info("on a thread of the tool")))
    thread.start()
    thread.join()


def test_records_of_the_user_name_execution_attempt_and_step(seen: Seen) -> None:
    def handler() -> None:
        shop.info("before")
        outer()
        with ContextThreadPoolExecutor(1) as pool:
            pool.submit(shop.info, "on a pool").result()
            pool.submit(lambda: step("pooled", lambda: shop.info("in a step on a pool"))).result()
        with concurrent.futures.ThreadPoolExecutor(1) as plain:
            plain.submit(shop.info, "on a foreign thread").result()
        shop.info("after")

    found = run(handler)
    steps = {s.target: s.step_id for s in found.steps}
    here = (found.execution.id, 1)
    assert seen.ids("before") == seen.ids("after") == seen.ids("on a pool") == (*here, "")
    for message in ("in the outer", "back in the outer", "on a thread of the tool"):
        assert seen.ids(message) == (*here, steps["outer"])
    assert seen.ids("in the inner tool") == (*here, steps["inner"])
    assert seen.ids("in a step on a pool") == (*here, steps["pooled"])
    assert seen.ids("on a foreign thread") == ("", "", "")
    shop.info("outside")
    assert seen.ids("outside") == ("", "", "")


def test_each_attempt_names_its_number(seen: Seen) -> None:
    with TestKernel() as kernel:
        agent = Agent("a1", secret="s", base_url="http://kernel.invalid")

        @agent.handler
        def handler() -> None:
            shop.info("attempt %d", rebuno_sync.execution().dispatch_attempt)
            if rebuno_sync.execution().dispatch_attempt == 1:
                raise SystemExit

        kernel.attach(agent)
        with kernel.client() as client:
            run_id = client.create("a1", {}).id
            wait_until(lambda: any("attempt 1" in r.getMessage() for r in seen.records))
            assert agent.join(30)
            kernel.advance(121)
            client.wait(run_id, 30)
        assert agent.join(30)
    assert seen.ids("attempt 1") == (run_id, 1, "")
    assert seen.ids("attempt 2") == (run_id, 2, "")
    # What this package says of the dispatch after the handler has gone is of it, too.
    assert seen.ids("given up, SystemExit") == (run_id, 1, "")


def test_our_own_records_name_them(seen: Seen) -> None:
    @tool
    def broken() -> None:
        raise ValueError("no")

    @tool(timeout=0.01)
    def slow() -> None:
        wait_until(lambda: any("still running" in r.getMessage() for r in seen.records))

    def handler() -> None:
        with pytest.raises(ToolError):
            broken()
        with pytest.raises(ToolError):
            slow()
        raise LookupError("the end")

    found = run(handler)
    steps = {s.target: s.step_id for s in found.steps}
    here = (found.execution.id, 1)
    assert seen.ids("broken failed") == (*here, steps["broken"])
    assert seen.ids("slow was still running") == (*here, steps["slow"])
    assert seen.ids("runs slow") == (*here, steps["slow"])
    assert seen.ids("the handler of execution") == (*here, "")


def test_records_of_leases_name_them_on_any_thread(seen: Seen) -> None:
    asked = threading.Event()

    def beat(lease: Lease, timeout: float) -> None:
        asked.set()
        raise rebuno_sync.NetworkError("away")

    beats = Heartbeats(beat, "hb")
    lease = Lease(dispatch(3, 0.003))
    beats.add(lease)
    assert asked.wait(30)
    wait_until(lambda: any(r.getMessage().startswith("heartbeat failed") for r in seen.records))
    beats.remove(lease)
    record = next(r for r in seen.records if r.getMessage().startswith("heartbeat failed"))
    assert (record.execution_id, record.dispatch_attempt) == ("e1", 3)  # type: ignore[attr-defined]


class LoggingProvider(BaseAdapter):
    """A provider whose HTTP library logs, as all of them do."""

    def send(self, request: PreparedRequest, **settings: Any) -> Response:  # type: ignore[override]
        shop.debug("asking")
        response = Response()
        response.status_code, response.request = 200, request
        response.headers["content-type"] = "text/event-stream" if b"stream" in request.body else ""  # type: ignore[operator]
        response.raw = io.BytesIO(b"data: a\n\ndata: [DONE]\n\n")
        return response

    def close(self) -> None:
        """Nothing is open."""


@pytest.mark.parametrize("stream", [False, True])
def test_an_llm_call_is_a_step_as_well(seen: Seen, stream: bool) -> None:
    def handler() -> str:
        session = requests_session(adapter=LoggingProvider())
        asked = {"model": "m1", **({"stream": True} if stream else {})}
        return session.post("http://llm.invalid/v1", json=asked).text

    found = run(handler)
    assert found.output == "data: a\n\ndata: [DONE]\n\n"
    (llm,) = found.steps
    assert seen.ids("asking") == (found.execution.id, 1, llm.step_id)


class BrokenStream(LoggingProvider):
    """Answers that break off after their first chunk."""

    def send(self, request: PreparedRequest, **settings: Any) -> Response:  # type: ignore[override]
        response = super().send(request, **settings)
        response.iter_content = lambda *_: _breaks_off()  # type: ignore[method-assign]
        return response


def _breaks_off() -> Iterator[bytes]:
    yield b"data: a\n\n"
    raise requests.ConnectionError("the line is dead")


def test_what_is_said_of_a_stream_while_the_handler_reads_it(
    seen: Seen, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: Any) -> None:
        raise rebuno_sync.NetworkError("the kernel is busy")

    monkeypatch.setattr("rebuno_sync.kernel_client.KernelClient.stream", refuse)

    def handler() -> None:
        session = requests_session(adapter=BrokenStream())
        asked = {"model": "m1", "stream": True}
        answer = session.post("http://llm.invalid/v1", json=asked, stream=True)
        with pytest.raises(requests.RequestException):
            list(answer.iter_content(None))
        shop.info("back in the handler")

    found = run(handler)
    (llm,) = found.steps
    here = (found.execution.id, 1, llm.step_id)
    assert seen.ids("m1 broke off") == here
    # On the thread that publishes what comes in.
    assert seen.ids("a live delta was not taken") == here
    assert seen.ids("back in the handler") == (*here[:2], "")


def test_what_is_given_up_at_a_shutdown_is_named(seen: Seen) -> None:
    held, go = threading.Event(), threading.Event()

    def handler() -> None:
        held.set()
        assert go.wait(30)

    with TestKernel() as kernel:
        agent = Agent("a1", secret="s", base_url="http://kernel.invalid", max_concurrency=1)
        agent.bind(handler)
        kernel.attach(agent)
        with kernel.client() as client:
            created = client.create("a1", {})
            assert held.wait(30)
            assert not agent.close(0)
            go.set()
            assert agent.join(30)
    assert seen.ids("shutting down: ") == (created.id, 1, "")


# The filter by itself


def record_of(message: str, extra: dict[str, Any] | None = None) -> logging.LogRecord:
    return shop.makeRecord(shop.name, logging.INFO, "f", 1, message, (), None, extra=extra)


def test_outside_of_an_execution_a_format_never_fails() -> None:
    form = logging.Formatter("[%(execution_id)s %(dispatch_attempt)s %(step_id)s] %(message)s")
    for absent, text in (({}, "[  ] m"), ({"absent": "-"}, "[- - -] m")):
        record = record_of("m")
        assert ExecutionFilter(**absent).filter(record)
        assert form.format(record) == text
    record = record_of("m")
    ExecutionFilter(absent=None).filter(record)
    assert record.execution_id is None  # type: ignore[attr-defined]


def test_what_a_record_brings_of_its_own_stays() -> None:
    record = record_of("m", {"step_id": "mine"})
    ExecutionFilter().filter(record)
    assert record.step_id == "mine"  # type: ignore[attr-defined]
    assert add_execution(None, "info", {"execution_id": "mine"}) == {"execution_id": "mine"}


def test_it_stops_what_a_filter_of_that_name_would() -> None:
    assert ExecutionFilter("shop").filter(record_of("m"))
    other = record_of("m")
    assert not ExecutionFilter("bank").filter(other)


# structlog


def test_structlog_events_name_them() -> None:
    events: list[dict[str, Any]] = []

    def keep(logger: Any, name: str, event: Any) -> Any:
        events.append(dict(event))
        raise structlog.DropEvent

    log = structlog.wrap_logger(None, processors=[add_execution, keep])

    def handler() -> None:
        log.info("in the handler", order=1)
        step("s", lambda: log.info("in the step"))

    found = run(handler)
    log.info("outside")
    here = {"execution_id": found.execution.id, "dispatch_attempt": 1}
    assert events == [
        {"event": "in the handler", "order": 1, **here},
        {"event": "in the step", "step_id": found.steps[0].step_id, **here},
        {"event": "outside"},
    ]


# One tree, and nothing secret


def test_every_logger_of_ours_is_in_one_tree() -> None:
    package = Path(rebuno_sync.__file__).parent
    found = 0
    for path in package.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("getLogger"):
                found += 1
                assert ast.unparse(node.args[0]) in ("__name__", "'rebuno_sync'"), path
    assert found > 10


SECRET = "hush-agent-secret"
TOKEN = "hush-kernel-token"
PROVIDER_KEY = "hush-provider-key"
ARGUMENT = "hush-argument"
HUSH = re.compile(r"hush-[a-z-]+|(sha256|v1)=[0-9a-f]{16,}")


@tool
def pay(card: str) -> str:
    return "paid"


@tool
def refused(card: str) -> str:
    raise AssertionError("policy denies it")


@tool
def failing(card: str) -> str:
    raise ValueError("no such account")


@pytest.mark.parametrize("signature", ["body", "v1"])
def test_nothing_secret_is_logged(
    seen: Seen, capfd: pytest.CaptureFixture[str], signature: Any
) -> None:
    class Provider(LoggingProvider):
        def send(self, request: PreparedRequest, **settings: Any) -> Response:  # type: ignore[override]
            assert PROVIDER_KEY in request.headers["Authorization"]
            if b"broken" in request.body:  # type: ignore[operator]
                raise requests.ConnectionError("the provider is away")
            return super().send(request, **settings)

    def handler(card: str) -> dict[str, str]:
        assert card == ARGUMENT
        session = requests_session(adapter=Provider())
        session.headers["Authorization"] = f"Bearer {PROVIDER_KEY}"
        for model in ("m1", "broken"):
            try:
                session.post("http://llm.invalid/v1", json={"model": model, "card": card})
            except requests.ConnectionError:
                shop.info("as expected")
        pay(card)
        step("note", lambda card: None, {"card": card})
        with pytest.raises(ToolError):
            failing(card)
        with pytest.raises(PolicyError):
            refused(card)
        return {"card": card}

    policy = (
        "default_action: allow\nrules:\n- id: r\n  when: {target: refused}\n"
        "  then: {decision: deny}\n"
    )
    with EmbeddedKernel(bearer_token=TOKEN) as kernel:
        agent = Agent("a1", secret=SECRET, base_url=kernel.url, signature=signature)
        agent.bind(handler)
        stranger = Agent("a1", secret="hush-other-secret", base_url=kernel.url)
        stranger.bind(handler)
        with served(agent.app) as url, Client(kernel.url, TOKEN) as client:
            client.register_agent("a1", f"{url}/webhook", SECRET)
            client.set_policy("a1", policy)
            found = client.wait(client.create("a1", {"card": ARGUMENT}).id, 30)
            assert found.status == "completed", found
            assert agent.close(30)
            assert stranger.deliver(b"{}", "sha256=" + "0" * 64)[0] == 401
            with pytest.raises(UnauthorizedError):
                stranger._kernel.execution(found.id, Lease(dispatch(1, execution_id=found.id)))
            with Client(kernel.url, "hush-other-token") as wrong:
                with pytest.raises(UnauthorizedError):
                    wrong.get(found.id)
                said = [repr(thing) for thing in (agent, stranger, client, wrong, kernel)]
    names = {r.name.partition(".")[0] for r in seen.records}
    assert {"rebuno_sync", "urllib3", "shop"} <= names
    assert any(r.name.startswith("rebuno_sync.context") for r in seen.records)
    formatter = logging.Formatter()
    for record in seen.records:
        said += [formatter.format(record), repr(vars(record))]
    said += capfd.readouterr()
    assert [line for line in said if HUSH.search(line)] == []
