"""One agent: webhooks taken, dispatches run and reported, and the orderly end."""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import json
import logging
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import flask
import pydantic
import pytest

from rebuno_sync import (
    Agent,
    Blocked,
    ContextThreadPoolExecutor,
    LeaseSuperseded,
    PolicyError,
    RateLimited,
    Result,
    Terminated,
    ToolError,
    execution,
    previous,
    processes,
    signing,
    step,
    tool,
)
from rebuno_sync import transport as transport_module
from rebuno_sync.agent import MAX_WEBHOOK_BYTES
from rebuno_sync.kernel import EmbeddedKernel
from rebuno_sync.wire import MAX_BODY_BYTES
from tests.scripted import (
    GENERATION_1,
    GENERATION_2,
    GENERATION_3,
    Answer,
    Recorded,
    ScriptedKernel,
    Verdict,
    served,
    wait_until,
)
from tests.unit.sockets import reserved_port
from tests.unit.support import agent_of, run_once

ROOT = Path(__file__).resolve().parents[2]
URL = "http://127.0.0.1:1"


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("REBUNO_URL", "REBUNO_AGENT_SECRET"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(transport_module, "_FIRST_PAUSE", 0.001)
    monkeypatch.setattr(transport_module, "_LONGEST_PAUSE", 0.001)


@pytest.fixture
def kernel() -> Iterator[ScriptedKernel]:
    with ScriptedKernel(GENERATION_2) as kernel:
        yield kernel


@pytest.fixture
def kernel3() -> Iterator[ScriptedKernel]:
    with ScriptedKernel(GENERATION_3) as kernel:
        yield kernel


# Construction


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"agent_id": ""}, "agent_id is non-empty text, not ''"),
        ({"agent_id": None}, "agent_id is non-empty text, not None"),
        ({"agent_id": "agént"}, "agent_id is sent as an HTTP header, which takes ASCII"),
        ({"agent_id": ".."}, r"agent_id is part of paths, where '\.\.' means something else"),
        ({"agent_id": "a\nb"}, "agent_id is sent as an HTTP header"),
        ({"secret": None}, "pass secret=… or set REBUNO_AGENT_SECRET in the environment"),
        ({"secret": ""}, "pass secret=… or set REBUNO_AGENT_SECRET"),
        ({"base_url": None}, "pass base_url=… or set REBUNO_URL in the environment"),
        ({"base_url": "kernel:8080"}, "'kernel:8080' is not a kernel URL"),
        ({"webhook_path": "webhook"}, "webhook_path begins with '/': 'webhook'"),
        ({"max_concurrency": 0}, "max_concurrency is a number from 1 up, not 0"),
        ({"max_concurrency": True}, "max_concurrency is a number from 1 up, not True"),
        ({"max_concurrency": 2.0}, "max_concurrency is a number from 1 up"),
        ({"max_queue": -1}, "max_queue is a number from 0 up, not -1"),
        ({"secret": []}, "there is no secret in the list; pass secret=…"),
        ({"secret": ["s", ""]}, "a secret is not text, or empty; pass secret=…"),
        ({"secret": b"s"}, "secret is text, a list of texts or a Path, not bytes"),
        ({"kernel_timeout": 0}, "kernel_timeout is a number of seconds, not 0"),
        ({"kernel_timeout": float("inf")}, "kernel_timeout is a number of seconds, not inf"),
        ({"kernel_timeout": "5"}, "kernel_timeout is a number of seconds"),
        ({"shutdown_timeout": -1}, "shutdown_timeout is a number of seconds, not -1"),
        ({"shutdown_timeout": float("nan")}, "shutdown_timeout is a number of seconds"),
        ({"signature": "sha256"}, "signature is 'auto', 'body' or 'v1', not 'sha256'"),
    ],
    ids=lambda v: str(v) if isinstance(v, dict) else "",
)
def test_what_makes_no_sense(options: dict[str, Any], message: str) -> None:
    given = {"agent_id": "a1", "secret": "s", "base_url": URL, **options}
    with pytest.raises(ValueError, match=message):
        Agent(given.pop("agent_id"), **given)


def test_the_environment_stands_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REBUNO_AGENT_SECRET", "env-secret")
    monkeypatch.setenv("REBUNO_URL", URL)
    agent = Agent("a1")
    assert (agent._secrets.all(), agent._kernel._transport.base_url) == (("env-secret",), URL)
    assert repr(agent) == "<Agent 'a1'>"
    assert Agent("a1", secret="mine")._secrets.all() == ("mine",)


def test_nothing_is_started_by_construction() -> None:
    before = threading.enumerate()
    agent = Agent("a1", secret="s", base_url=URL)
    agent.bind(lambda: None)
    assert agent.blueprint is agent.blueprint
    assert agent.app is agent.app
    assert threading.enumerate() == before
    assert agent._part is None


def test_the_handler() -> None:
    agent = Agent("a1", secret="s", base_url=URL)

    @agent.handler
    def handler(topic: str) -> str:
        return topic

    assert handler("x") == "x"

    async def later() -> None: ...

    with pytest.raises(TypeError, match=r"agent\.bind\(\) takes a plain function, and .*coroutine"):
        agent.bind(later)
    with pytest.raises(TypeError, match="takes \\*rest"):
        agent.handler(lambda *rest: None)


# Deliveries


def deliver(agent: Agent, body: bytes | dict[str, Any], **options: Any) -> tuple[int, str]:
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    signature = options.pop("signature", signing.sign_body("s", raw))
    return agent.deliver(raw, signature, **options)


GOOD = {"execution_id": "e1", "dispatch_id": "d1", "dispatch_attempt": 1}


def test_deliveries_that_are_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    agent = Agent("a1", secret="s", base_url=URL)
    parsed: list[bytes] = []
    monkeypatch.setattr("rebuno_sync.wire.decode", lambda data: parsed.append(data) or {})
    for signature in (None, "", "sha256=", "sha256=" + "0" * 64, signing.sign_body("t", b"{}")):
        assert deliver(agent, b"{}", signature=signature) == (401, "")
    assert parsed == [], "nothing is parsed before it is verified"
    monkeypatch.undo()
    for body, why in (
        (b"", "Expecting value"),
        (b"{", "Expecting"),
        (b"\xff", "utf-8"),
        (b"[]", "expected a JSON object for Dispatch"),
        (b"{}", "came without execution_id, dispatch_id"),
        (b'{"execution_id":"e","dispatch_id":"d","dispatch_attempt":0}', "dispatch_attempt"),
        (b"[" * 50_000, "nested too deeply"),
    ):
        status, text = deliver(agent, body)
        assert status == 400
        assert text.startswith("this is not a dispatch: ")
        assert why in text
    status, text = deliver(agent, GOOD)
    assert (status, text) == (
        503,
        "this agent has no handler yet; give it one with agent.bind(fn)",
    )
    agent.bind(lambda: None)
    assert agent.close(0)
    assert deliver(agent, GOOD) == (503, "this process is shutting down")


def test_unknown_fields_are_taken(kernel: ScriptedKernel) -> None:
    with agent_of(kernel, lambda: "done") as agent:
        run = kernel.create()
        kernel.take(run)
        body = json.loads(kernel.webhook_body(run)) | {"later": {"field": 1}}
        raw = json.dumps(body).encode()
        assert kernel.post_webhook(raw, run.id).status == 202
        assert agent.join(30)
    assert run.output.text == '"done"'  # type: ignore[union-attr]


def test_a_repeat_is_acknowledged_and_ignored(kernel: ScriptedKernel) -> None:
    ran: list[int] = []
    go = threading.Event()

    def handler() -> None:
        ran.append(execution().dispatch_attempt or 0)
        assert go.wait(30)

    with agent_of(kernel, handler) as agent:
        run = kernel.create()
        assert kernel.deliver(run).body == b"taken"
        body = kernel.webhook_body(run)
        wait_until(lambda: ran)
        for _ in range(3):
            assert kernel.post_webhook(body, run.id) == Answer(
                202, b"already held", "text/plain; charset=utf-8"
            )
        go.set()
        assert agent.join(30)
        assert kernel.post_webhook(body, run.id).body == b"already held"
        assert agent.join(30)
    assert ran == [1]


def test_the_webhook_is_acknowledged_while_everything_is_busy(kernel: ScriptedKernel) -> None:
    go = threading.Event()
    with agent_of(kernel, lambda: go.wait(30), max_concurrency=1) as agent:
        runs = [kernel.create() for _ in range(4)]
        assert [kernel.deliver(run).status for run in runs] == [202] * 4
        wait_until(lambda: kernel.calls("read"))
        go.set()
        assert agent.join(30)
    assert [run.status for run in runs] == ["completed"] * 4


def test_the_queue_keeps_its_leases() -> None:
    """Many leases' lengths pass while two wait for the only thread; nobody loses one."""
    started, go = threading.Event(), threading.Event()

    def handler() -> str:
        started.set()
        assert go.wait(60)
        return "done"

    with EmbeddedKernel() as kernel:
        agent = Agent("a1", secret="s", base_url=kernel.url, max_concurrency=1)
        agent.bind(handler)
        from rebuno_sync import Client

        with served(agent.app) as url, Client(kernel.url) as client:
            client.register_agent("a1", f"{url}/webhook", "s", lease_timeout_seconds=2.0)
            ids = [client.create("a1").id for _ in range(3)]
            assert started.wait(30)
            beats: dict[str, int] = dict.fromkeys(ids, 0)
            beat = agent._kernel.heartbeat

            def counted(execution_id: str, *rest: Any) -> None:
                beat(execution_id, *rest)
                beats[execution_id] += 1

            agent._kernel.heartbeat = counted  # type: ignore[method-assign]
            wait_until(lambda: min(beats.values()) >= 4)
            go.set()
            assert [client.wait(i, 30).output for i in ids] == ["done"] * 3
            attempts = [
                e.payload["attempt"]
                for i in ids
                for e in client.events(i)
                if e.type == "dispatch.acked"
            ]
            assert attempts == [1, 1, 1]
            assert agent.close(30)


def test_a_newer_attempt_stops_the_older(kernel: ScriptedKernel) -> None:
    seen: list[Any] = []
    first_waits, go = threading.Event(), threading.Event()

    @tool
    def note(who: int) -> int:
        return who

    def handler() -> Any:
        attempt = execution().dispatch_attempt
        if attempt == 1:
            first_waits.set()
            assert execution().cancelled.wait(30)
            with pytest.raises(LeaseSuperseded, match="attempt 2 has been dispatched"):
                note(1)
            with pytest.raises(LeaseSuperseded):
                execution().check()
            seen.append("stopped")
            go.set()
            return "from the first"
        assert go.wait(30)
        return note(2)

    with agent_of(kernel, handler) as agent:
        run = kernel.create()
        kernel.deliver(run)
        assert first_waits.wait(30)
        assert kernel.deliver(run).body == b"taken"
        assert agent.join(30)
    assert seen == ["stopped"]
    assert (run.status, run.output.text) == ("completed", "2")  # type: ignore[union-attr]
    assert kernel.calls("submit", "complete") == ["submit", "complete"]


# Where a handler runs


def test_a_handler_runs_on_a_worker_thread_in_the_app_context(kernel: ScriptedKernel) -> None:
    seen: dict[str, Any] = {}

    def handler() -> None:
        seen["app"] = flask.current_app.name
        seen["request"] = flask.has_request_context()
        seen["thread"] = threading.current_thread().name
        flask.g.value = 1
        seen["g"] = step("inside", lambda: [flask.g.value, flask.current_app.name])

    run = run_once(kernel, handler)
    assert run.status == "completed"
    assert seen == {
        "app": "rebuno_sync.agent",
        "request": False,
        "thread": "rebuno-a1-1",
        "g": [1, "rebuno_sync.agent"],
    }


variable: contextvars.ContextVar[str] = contextvars.ContextVar("variable")


def test_what_one_handler_sets_never_reaches_the_next(kernel: ScriptedKernel) -> None:
    seen: list[str | None] = []

    def handler(name: str) -> None:
        seen.append(variable.get(None))
        variable.set(name)
        seen.append(variable.get(None))

    variable.set("of the test")
    with agent_of(kernel, handler, max_concurrency=1) as agent:
        for name in ("a", "b"):
            kernel.deliver(kernel.create({"name": name}))
            assert agent.join(30)
    assert seen == [None, "a", None, "b"]


def test_teardowns_run_when_the_handler_has_ended(kernel: ScriptedKernel) -> None:
    ended: list[Any] = []
    agent = Agent("a1", secret=kernel.secret, base_url=kernel.url)

    @agent.handler
    def handler() -> str:
        ended.append("handler")
        return "done"

    @agent.app.teardown_appcontext
    def teardown(error: BaseException | None) -> None:
        if ended == ["handler"]:
            ended.append(error)

    with served(agent.app) as url:
        kernel.agent_url = f"{url}/webhook"
        run = kernel.create()
        kernel.deliver(run)
        assert agent.join(30)
        assert agent.close(30)
    assert ended == ["handler", None]
    assert run.status == "completed"


# How a handler's end is reported (PROTOCOL 5)


class Order(pydantic.BaseModel):
    number: int


@pytest.mark.parametrize(
    ("value", "output"),
    [
        (None, "null"),
        ({"a": (1, 2.0)}, '{"a":[1,2.0]}'),
        (10**5000, "1" + "0" * 5000),
        (Order(number=1), '{"number":1}'),
        (Result(), "null"),
        (Result([1]), "[1]"),
        ("é\u2028", '"é\u2028"'),
    ],
    ids=["none", "nested", "long", "model", "empty", "result", "text"],
)
def test_outputs(kernel: ScriptedKernel, value: Any, output: str) -> None:
    run = run_once(kernel, lambda: value)
    assert run.status == "completed"
    (request,) = kernel.sent("complete")
    assert request.body == b'{"output":%s}' % output.encode()


@tool
def failing_tool() -> None:
    raise KeyError("k")


def swallow_and_raise() -> None:
    try:
        failing_tool()
    except ToolError:
        raise ValueError("wrapped") from None


class Stubborn(Exception):
    def __str__(self) -> str:
        raise RuntimeError


def raising(error: BaseException) -> Callable[[], Any]:
    def handler() -> Any:
        raise error

    return handler


@dataclasses.dataclass
class Lazy:
    a: int = 1

    def __getattribute__(self, name: str) -> Any:
        if name == "a":
            raise LookupError("detached")
        return super().__getattribute__(name)


@pytest.mark.parametrize(
    ("handler", "reason"),
    [
        (raising(ValueError("bad")), "agent_error: ValueError: bad"),
        (raising(Stubborn()), "agent_error: Stubborn: <Stubborn that cannot be shown as text>"),
        (raising(PolicyError("too_dear")), "too_dear"),
        (raising(PolicyError("it is too dear")), "policy_denied: it is too dear"),
        (raising(RateLimited()), "rate_limit_exceeded"),
        (raising(ToolError("m", "t")), "tool_error: t: m"),
        (raising(ToolError("\ud800", "t")), "tool_error: t: ?"),
        (failing_tool, "tool_error: failing_tool: 'k'"),
        (swallow_and_raise, "agent_error: ValueError: wrapped"),
        (lambda: b"x", "agent_error: TypeError: output is a bytes, which has no JSON form"),
        (lambda: {"a": [float("nan")]}, "agent_error: TypeError: output.a[0] is nan"),
        (lambda: [Lazy()], "agent_error: TypeError: output[0] is a Lazy, and reading it raised"),
        (lambda: "x" * MAX_BODY_BYTES, "agent_error: ValueError: the output has 10485762"),
        (lambda: Result(1, state={1}), "agent_error: TypeError: state is a set"),
        (lambda: Result(1, state=2), "agent_error: ValueError: Result(state=…) needs a kernel of"),
    ],
    ids=range(15),
)
def test_failures(kernel: ScriptedKernel, handler: Callable[[], Any], reason: str) -> None:
    run = run_once(kernel, handler)
    assert run.status == "failed"
    assert run.failure_reason.startswith(reason)
    assert kernel.calls("complete", "fail") == ["fail"]


def test_a_failure_of_the_handler_is_logged(
    kernel: ScriptedKernel, caplog: pytest.LogCaptureFixture
) -> None:
    run_once(kernel, raising(ValueError("bad")))
    (record,) = [r for r in caplog.records if r.name == "rebuno_sync.attempt" and r.exc_info]
    assert record.levelno == logging.ERROR
    caplog.clear()
    run_once(kernel, raising(PolicyError("no")))
    assert [r for r in caplog.records if r.exc_info] == []


def test_an_input_that_does_not_bind(kernel: ScriptedKernel) -> None:
    def handler(topic: str) -> None:
        raise AssertionError("it must not be called")

    for value, reason in (
        ({"topic": 5}, "input_invalid: input.topic must be a JSON string, and is a JSON integer"),
        (None, "input_invalid: the input has no field 'topic'"),
        ({"topic": "x", "\ud800": 1}, "input_invalid: the input has the field '\\ud800'"),
    ):
        run = run_once(kernel, handler, value)
        assert run.status == "failed"
        assert run.failure_reason.startswith(reason)


@pytest.mark.parametrize(
    "error", [Blocked(), Terminated(), LeaseSuperseded(), KeyboardInterrupt(), SystemExit(1)]
)
def test_ends_that_are_not_reported(kernel: ScriptedKernel, error: BaseException) -> None:
    run = run_once(kernel, raising(error))
    assert run.status == "running"
    assert kernel.calls("complete", "fail") == []


@pytest.mark.parametrize("error", [SystemExit, KeyboardInterrupt])
def test_a_handler_that_exits_in_every_attempt_fails_in_the_end(
    kernel: ScriptedKernel, error: type[BaseException]
) -> None:
    """``sys.exit()`` in a library must not run a handler again for ever."""
    attempts: list[int | None] = []

    def handler() -> None:
        attempts.append(execution().dispatch_attempt)
        raise error("no such option")

    with agent_of(kernel, handler) as agent:
        run = kernel.create()
        for _ in range(5):
            assert run.status == "running"
            kernel.deliver(run)
            assert agent.join(timeout=30)
    assert attempts == [1, 2, 3, 4, 5]
    reason = f"agent_error: {error.__name__}: no such option"
    assert (run.status, run.failure_reason) == ("failed", reason)


def test_a_handler_that_the_end_of_its_worker_interrupts_never_fails(
    kernel: ScriptedKernel,
) -> None:
    """Under gevent, gunicorn's way out of a hung worker is raised within the handler."""

    def handler() -> None:
        if execution().dispatch_attempt == 5:
            agent._here().workers.refuse()
        sys.exit(1)

    with agent_of(kernel, handler) as agent:
        run = kernel.create()
        for _ in range(5):
            kernel.deliver(run)
            assert agent.join(timeout=30)
    assert run.status == "running"


@pytest.mark.parametrize(("error", "attempts"), [(ValueError, 1), (SystemExit, 5)])
def test_nothing_fails_between_the_signal_and_the_drain(
    kernel: ScriptedKernel,
    error: type[BaseException],
    attempts: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What is raised while gunicorn takes a worker down may be of the worker, not of the work."""

    def handler() -> None:
        if execution().dispatch_attempt == attempts:
            processes.refuse_dispatches()
        raise error("now") if execution().dispatch_attempt == attempts else SystemExit

    monkeypatch.setattr(processes, "_process", processes.Process())
    with agent_of(kernel, handler) as agent:
        run = kernel.create()
        for _ in range(attempts):
            kernel.deliver(run)
            assert agent.join(timeout=30)
    assert run.status == "running"
    assert kernel.calls("complete", "fail") == []


def test_an_exception_outside_of_exception_fails_at_once(kernel: ScriptedKernel) -> None:
    class Stop(BaseException):
        pass

    run = run_once(kernel, raising(Stop("now")))
    assert (run.status, run.failure_reason) == ("failed", "agent_error: Stop: now")


def test_a_refused_webhook_is_told_in_the_log_but_not_each_time(
    kernel: ScriptedKernel, caplog: pytest.LogCaptureFixture
) -> None:
    with agent_of(kernel, lambda: None) as agent:
        for _ in range(50):
            assert agent.deliver(b"{}", "sha256=wrong")[0] == 401
    (told,) = [r.getMessage() for r in caplog.records if "was refused" in r.getMessage()]
    assert "another secret" in told
    assert kernel.secret not in told


def test_an_unsigned_webhook_is_no_warning_and_hides_none(
    kernel: ScriptedKernel, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger="rebuno_sync.agent")
    with agent_of(kernel, lambda: None) as agent:
        for signature in (None, "", "sha256=wrong", None):
            assert agent.deliver(b"{}", signature) == (401, "")
    told = [(r.levelname, r.getMessage()) for r in caplog.records if "was refused" in r.msg]
    assert [level for level, _ in told] == ["INFO", "WARNING"]
    assert "no signature" in told[0][1]
    assert "its signature is wrong" in told[1][1]


DECISIONS = [
    {"decision": "blocked", "step_id": "s", "approval_id": "a"},
    {"decision": "execution_blocked"},
    {"decision": "execution_terminal"},
]


@pytest.mark.parametrize("decision", DECISIONS, ids=lambda d: d["decision"])
@pytest.mark.parametrize("then", ["return", "raise", "suppress"])
def test_a_swallowed_signal_still_ends_the_dispatch(
    kernel: ScriptedKernel, decision: dict[str, Any], then: str
) -> None:
    kernel.decide_steps(lambda submission: decision)
    swallowed: list[BaseException] = []

    def handler() -> str:
        try:
            step("x", lambda: 1)
        except BaseException as exc:
            swallowed.append(exc)
        if then == "raise":
            raise ValueError("something else")
        if then == "suppress":
            with contextlib.suppress(BaseException):
                step("y", lambda: 1)
        return "as if nothing had happened"

    run = run_once(kernel, handler)
    assert len(swallowed) == 1
    assert run.status == "running"
    assert kernel.calls("submit", "complete", "fail") == ["submit"]


def test_an_unknown_decision_fails_the_execution_even_when_swallowed(
    kernel: ScriptedKernel,
) -> None:
    kernel.decide_steps(lambda submission: {"decision": "perhaps"})

    def handler() -> str:
        with contextlib.suppress(Exception):
            step("x", lambda: 1)
        return "as if nothing had happened"

    run = run_once(kernel, handler)
    assert run.failure_reason.startswith(
        "agent_error: APIError: the kernel answered with the decision 'perhaps'"
    )


def test_a_signal_from_another_thread(kernel: ScriptedKernel) -> None:
    kernel.policy = lambda kind, target, args: Verdict(
        "require_approval" if target == "gate" else "allow"
    )

    def handler() -> list[Any]:
        with ContextThreadPoolExecutor(4) as pool:
            futures = [pool.submit(step, name, lambda: 1) for name in ("a", "gate", "b")]
        return [f.exception() for f in futures]

    run = run_once(kernel, handler)
    assert run.status == "blocked"
    assert kernel.calls("complete", "fail") == []


@pytest.mark.parametrize("call", ["read", "submit", "step_complete", "complete", "fail"])
def test_a_lost_kernel_is_never_a_failure(kernel: ScriptedKernel, call: str) -> None:
    kernel.intercept(lambda request: Answer(500) if request.call == call else None)
    lost: list[bool] = []

    def handler() -> str:
        try:
            step("x", lambda: 1)
        except LeaseSuperseded:
            lost.append(execution().cancelled.is_set())
            raise
        if call == "fail":
            raise ValueError
        return "done"

    with agent_of(kernel, handler) as agent:
        # Patience is what would make this test slow; the tests of the transport hold it.
        agent._kernel._transport.request = _impatient(agent._kernel._transport.request)  # type: ignore[method-assign]
        run = kernel.create()
        kernel.deliver(run)
        assert agent.join(30)
    assert run.status == "running"
    assert "fail" not in kernel.calls() or call == "fail"
    assert lost == ([True] if call in ("submit", "step_complete") else [])


def _impatient(request: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args, **options: request(*args, **{**options, "patience": 0.0})


def test_a_kernel_that_is_gone(caplog: pytest.LogCaptureFixture) -> None:
    with reserved_port() as reserved:
        url = f"http://127.0.0.1:{reserved.getsockname()[1]}"
        agent = Agent("a1", secret="s", base_url=url)
        agent.bind(raising(AssertionError("it must not be called")))
        agent._kernel._transport.request = _impatient(agent._kernel._transport.request)  # type: ignore[method-assign]
        assert deliver(agent, GOOD) == (202, "taken")
        assert agent.join(30)
        assert agent.close(30)
    assert any("the execution cannot be read" in r.getMessage() for r in caplog.records)


def test_an_execution_that_has_ended_is_left_alone(kernel: ScriptedKernel) -> None:
    with agent_of(kernel, raising(AssertionError("it must not be called"))) as agent:
        run = kernel.create()
        kernel.take(run)
        body = kernel.webhook_body(run)
        kernel.cancel(run)
        assert kernel.post_webhook(body, run.id).status == 202
        assert agent.join(30)
    assert kernel.calls() == ["read"]


def test_a_lease_lost_before_the_handler_began(kernel: ScriptedKernel) -> None:
    reading, go = threading.Event(), threading.Event()

    def hold(request: Recorded) -> Answer | None:
        return None

    ran: list[int] = []
    with agent_of(kernel, lambda: ran.append(execution().dispatch_attempt or 0)) as agent:
        read = agent._kernel.execution

        def slow(execution_id: str, lease: Any) -> Any:
            found = read(execution_id, lease)
            if lease.attempt == 1:
                reading.set()
                assert go.wait(30)
            return found

        agent._kernel.execution = slow  # type: ignore[method-assign]
        kernel.intercept(hold)
        run = kernel.create()
        kernel.deliver(run)
        assert reading.wait(30)
        kernel.deliver(run)
        wait_until(lambda: ran)
        go.set()
        assert agent.join(30)
    assert ran == [2], "the older attempt finds out before it calls the handler"


def test_an_output_that_the_kernel_refuses_fails_the_execution(kernel: ScriptedKernel) -> None:
    for status in (400, 413):
        kernel._interceptors.clear()
        kernel.intercept(
            lambda request, status=status: (
                Answer.error(status, "validation_error", "no NUL in output")
                if request.call == "complete"
                else None
            )
        )
        run = run_once(kernel, lambda: "a\x00")
        assert run.status == "failed", "else every attempt would come to the same, for ever"
        assert "no NUL in output" in run.failure_reason


@pytest.mark.parametrize(
    "answer",
    [
        Answer.error(409, "lease_superseded"),
        Answer.error(409, "execution_terminal"),
        Answer.error(403, "forbidden"),
    ],
    ids=["superseded", "terminal", "forbidden"],
)
def test_an_end_that_is_not_taken(
    kernel: ScriptedKernel, answer: Answer, caplog: pytest.LogCaptureFixture
) -> None:
    kernel.intercept(lambda request: answer if request.call == "complete" else None)
    run = run_once(kernel, lambda: 1)
    assert run.status == "running"
    assert kernel.calls("complete", "fail") == ["complete"]
    assert any("did not take the end" in r.getMessage() for r in caplog.records)


def test_a_beat_that_comes_after_the_end_loses_nothing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The execution has ended at the kernel, and the answer that says so is on its way."""
    refused = threading.Semaphore(0)

    def answer(request: Recorded) -> Answer | None:
        if request.call == "heartbeat" and kernel.calls("complete"):
            refused.release()
            return Answer.error(409, "lease_superseded")
        return None

    with (
        ScriptedKernel(GENERATION_3, lease_timeout=0.6) as kernel,
        agent_of(kernel, lambda: 1) as agent,
    ):
        kernel.intercept(answer)
        complete = agent._kernel.complete

        def late(*args: Any) -> None:
            complete(*args)
            # The second comes when the first has been dealt with.
            assert refused.acquire(timeout=30)
            assert refused.acquire(timeout=30)

        agent._kernel.complete = late  # type: ignore[method-assign]
        run = kernel.create()
        kernel.deliver(run)
        assert agent.join(60)
    assert run.status == "completed"
    assert caplog.records == []


def test_a_refusal_that_came_through_a_library(kernel: ScriptedKernel) -> None:
    def wrapped(text: str) -> Callable[[], Any]:
        def handler() -> None:
            try:
                raise RuntimeError(f"Error code: 403 - {{'error': {{'message': '{text}'}}}}")
            except RuntimeError as exc:
                raise ValueError("the model call failed") from exc

        return handler

    for text, status, reason in (
        ("rebuno_refusal: blocked", "running", ""),
        ("rebuno_refusal: execution_terminal", "running", ""),
        ("rebuno_refusal: lease_superseded", "running", ""),
        ("rebuno_refusal: denied reason=over budget", "failed", "policy_denied: over budget"),
        ("rebuno_refusal: denied reason=over_budget", "failed", "over_budget"),
        (
            "rebuno_refusal: rate_limited reason=rate_limit_exceeded",
            "failed",
            "rate_limit_exceeded",
        ),
        ("rebuno_refusal: nonsense", "failed", "agent_error: ValueError: the model call failed"),
    ):
        run = run_once(kernel, wrapped(text))
        assert (run.status, run.failure_reason) == (status, reason)


# Sessions and metadata


def test_state_for_the_next_turn(kernel3: ScriptedKernel) -> None:
    kernel3.intercept(
        lambda request: (
            Answer.json({"state": {"turn": 1}}) if request.target.endswith("/previous") else None
        )
    )
    run_once(kernel3, lambda: Result(previous()["turn"], state={"turn": (2,)}))
    (request,) = kernel3.sent("complete")
    assert request.body == b'{"output":1,"state":{"turn":[2]}}'
    assert repr(Result(1, 2)) == "Result(output=1, state=2)"


def test_metadata_is_told_once_to_kernels_that_know_it(kernel3: ScriptedKernel) -> None:
    def handler(topic: str, depth: int = 1) -> None: ...

    with agent_of(kernel3, handler, description="Finds out.", output_schema=Order) as agent:
        for _ in range(3):
            kernel3.deliver(kernel3.create({"topic": "x"}))
            assert agent.join(30)
    (request,) = kernel3.sent("metadata")
    assert request.json == {
        "description": "Finds out.",
        "input_schema": {
            "type": "object",
            "properties": {"topic": {"type": "string"}, "depth": {"type": "integer"}},
            "required": ["topic"],
            "additionalProperties": False,
        },
        "output_schema": Order.model_json_schema(),
    }


def test_metadata_that_cannot_be_told(
    kernel3: ScriptedKernel, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    run = run_once(kernel3, lambda: 1, output_schema=object())
    assert run.status == "completed"
    assert any("did not take the metadata" in r.getMessage() for r in caplog.records)
    caplog.clear()
    kernel3.intercept(lambda r: Answer.error(404, "not_found") if r.call == "metadata" else None)
    assert run_once(kernel3, lambda: 1).status == "completed"
    assert any("did not take the metadata" in r.getMessage() for r in caplog.records)


@pytest.mark.parametrize("generation", [GENERATION_1, GENERATION_2], ids=str)
def test_no_metadata_for_kernels_that_know_none(generation: Any) -> None:
    with ScriptedKernel(generation) as kernel:
        run_once(kernel, lambda: 1, description="Finds out.")
        assert "unknown" not in kernel.calls()


# The end


def test_join_and_close(kernel: ScriptedKernel) -> None:
    started, go = threading.Event(), threading.Event()

    def handler() -> str:
        started.set()
        assert go.wait(30)
        return "done"

    with agent_of(kernel, handler) as agent:
        assert agent.join(0)
        run = kernel.create()
        kernel.deliver(run)
        assert started.wait(30)
        assert agent.join(0) is False
        closer = threading.Thread(target=lambda: results.append(agent.close()))
        results: list[bool] = []
        closer.start()
        wait_until(lambda: agent._here().workers.closing)
        late = kernel.create()
        answer = kernel.deliver(late)
        assert (answer.status, answer.body) == (503, b"this process is shutting down")
        go.set()
        closer.join(30)
        assert results == [True]
        assert run.status == "completed"
        assert late.status == "running"


def test_what_is_given_up_at_the_end_writes_nothing_more(kernel: ScriptedKernel) -> None:
    started, go, ended = threading.Event(), threading.Event(), threading.Event()

    @tool
    def late() -> None: ...

    def handler() -> str:
        started.set()
        assert go.wait(30)
        try:
            late()
        finally:
            ended.set()
        return "done"

    with agent_of(kernel, handler) as agent:
        run = kernel.create()
        kernel.deliver(run)
        assert started.wait(30)
        assert agent.close(0) is False
        go.set()
        assert ended.wait(30)
        assert agent.close(30)
    assert run.status == "running"
    assert kernel.calls("submit", "complete", "fail") == []


def test_a_failure_while_shutting_down_is_not_reported(kernel: ScriptedKernel) -> None:
    """What an interpreter that is torn down raises says nothing about the work."""
    started, go = threading.Event(), threading.Event()

    def handler() -> None:
        started.set()
        assert go.wait(30)
        raise RuntimeError("cannot schedule new futures after interpreter shutdown")

    with agent_of(kernel, handler) as agent:
        run = kernel.create()
        kernel.deliver(run)
        assert started.wait(30)
        agent._here().workers.refuse()
        go.set()
        assert agent.join(30)
    assert run.status == "running"


SCRIPT = """
    import sys, threading
    from rebuno_sync import Agent, signing, step
    import json

    url, secret, body = sys.argv[1:4]
    common = dict(secret=secret, base_url=url, shutdown_timeout={timeout})
    agents = [Agent("a1", **common), Agent("a2", **common)]
    started = threading.Semaphore(0)
    ending = threading.Event()

    @agents[0].handler
    def quick():
        started.release()
        assert ending.wait(30)
        return step("last", lambda: "words")

    @agents[1].handler
    def hung():
        started.release()
        threading.Event().wait()

    raw = body.encode()
    assert agents[0].deliver(raw, signing.sign_body(secret, raw)) == (202, "taken")
    if {both}:
        assert agents[1].deliver(raw, signing.sign_body(secret, raw)) == (202, "taken")
        started.acquire()
    started.acquire()
    # Called at the very end of the process, before what the agents have registered there.
    threading._register_atexit(ending.set)
"""


def test_the_end_of_the_process_waits_for_handlers(kernel: ScriptedKernel) -> None:
    run = kernel.create()
    kernel.take(run)
    script = textwrap.dedent(SCRIPT.format(timeout=60, both=False))
    body = kernel.webhook_body(run).decode()
    subprocess.run(
        [sys.executable, "-c", script, kernel.url, kernel.secret, body],
        check=True,
        cwd=ROOT,
        timeout=60,
    )
    assert (run.status, run.output.text) == ("completed", '"words"')  # type: ignore[union-attr]


def test_a_hung_handler_does_not_hold_up_the_end(kernel: ScriptedKernel) -> None:
    run = kernel.create()
    kernel.take(run)
    kernel.intercept(
        lambda r: kernel_answer(run.id) if r.headers["Rebuno-Agent-Id"] == "a2" else None
    )
    script = textwrap.dedent(SCRIPT.format(timeout=3, both=True))
    body = kernel.webhook_body(run).decode()
    done = subprocess.run(
        [sys.executable, "-c", script, kernel.url, kernel.secret, body],
        check=True,
        cwd=ROOT,
        timeout=60,
        capture_output=True,
        text=True,
    )
    assert "still ran after" in done.stderr
    assert run.status == "completed"


def kernel_answer(execution_id: str) -> Answer:
    return Answer.json({"id": execution_id, "agent_id": "a2", "status": "running"})


def test_agents_are_made_before_the_fork(kernel: ScriptedKernel) -> None:
    """As under gunicorn --preload: used in the parent, then in each child."""
    script = """
        import os, sys
        from rebuno_sync import Agent, signing, step
        url, secret = sys.argv[1:3]
        bodies = [b.encode() for b in sys.argv[3:]]
        agent = Agent("a1", secret=secret, base_url=url)

        @agent.handler
        def handler():
            return step("pid", os.getpid)

        def deliver(raw):
            assert agent.deliver(raw, signing.sign_body(secret, raw)) == (202, "taken")
            assert agent.join(30)

        deliver(bodies[0])
        for raw in bodies[1:]:
            child = os.fork()
            if child == 0:
                deliver(raw)
                sys.exit(0)
            assert os.waitpid(child, 0)[1] == 0
        deliver(bodies[0].replace(b'"dispatch_attempt":1', b'"dispatch_attempt":2'))
    """
    runs = [kernel.create() for _ in range(3)]
    for run in runs:
        kernel.take(run)
    bodies = [kernel.webhook_body(run).decode() for run in runs]
    subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script), kernel.url, kernel.secret, *bodies],
        check=True,
        cwd=ROOT,
        timeout=60,
    )
    outputs = [run.output.text for run in runs]  # type: ignore[union-attr]
    assert len(set(outputs)) == 3
    assert [run.status for run in runs] == ["completed"] * 3


def test_the_limit_of_a_webhook_is_far_above_a_dispatch() -> None:
    assert MAX_WEBHOOK_BYTES == 64 * 1024
