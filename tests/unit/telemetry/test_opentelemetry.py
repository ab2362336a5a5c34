"""Spans: what they hang from, what they say, and what they never say."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from rebuno_sync import (
    Agent,
    ContextThreadPoolExecutor,
    PolicyError,
    ToolError,
    observers,
    requests_session,
    step,
    tool,
)
from rebuno_sync.lease import Heartbeats, Lease
from rebuno_sync.signing import sign_body
from rebuno_sync.telemetry import opentelemetry as telemetry
from rebuno_sync.testing.in_process import InProcessTransport, TestKernel
from rebuno_sync.testing.runs import AgentRun, run_agent
from rebuno_sync.transport import Answer
from tests.scripted import wait_until
from tests.unit.support import dispatch
from tests.unit.test_logs import LoggingProvider

POLICY = """
default_action: allow
rules:
- {id: d, when: {target: denied}, then: {decision: deny, reason: not_today}}
- {id: a, when: {target: approved}, then: {decision: require_approval}}
"""
TRACE_ID, PARENT_ID = 0x4BF92F3577B34DA6A3CE929D0E0E4736, 0x00F067AA0BA902B7
TRACEPARENT = f"00-{TRACE_ID:032x}-{PARENT_ID:016x}-01"


class Traces:
    """The spans of one test."""

    def __init__(self) -> None:
        self._kept = InMemorySpanExporter()
        self.provider = TracerProvider()
        self.provider.add_span_processor(SimpleSpanProcessor(self._kept))
        self.tracer = self.provider.get_tracer("shop")

    @property
    def spans(self) -> tuple[ReadableSpan, ...]:
        return self._kept.get_finished_spans()

    def named(self, name: str) -> ReadableSpan:
        (found,) = [s for s in self.spans if s.name == name]
        return found

    def path(self, span: ReadableSpan) -> list[str]:
        """The names from a span up to its root."""
        names, by_id = [], {s.context.span_id: s for s in self.spans}
        at: ReadableSpan | None = span
        while at is not None:
            names.append(at.name)
            at = None if at.parent is None else by_id.get(at.parent.span_id)
        return names


@pytest.fixture
def traces() -> Iterator[Traces]:
    found = Traces()
    telemetry.instrument(tracer_provider=found.provider)
    try:
        yield found
    finally:
        telemetry.uninstrument()
        assert observers.installed == ()


def run(handler: Callable[..., Any], input: Any = None) -> AgentRun:
    with TestKernel() as kernel:
        agent = Agent("a1", secret="s", base_url="http://kernel.invalid")
        agent.bind(handler)
        found = run_agent(agent, input or {}, policy=POLICY, kernel=kernel)
        assert agent.join(30)
    return found


@tool
def denied() -> None: ...


@tool
def approved() -> None: ...


@tool
def broken() -> None:
    raise ValueError("no such order")


def test_the_tree_and_what_spans_say(traces: Traces) -> None:
    @tool
    def inner() -> None:
        with traces.tracer.start_as_current_span("sql"):
            pass

    @tool
    def outer() -> None:
        inner()
        with ContextThreadPoolExecutor(1) as pool:
            pool.submit(traces.tracer.start_span("thread").end).result()
            pool.submit(lambda: traces.tracer.start_span("pooled").end()).result()

    def handler() -> None:
        traces.tracer.start_span("own").end()
        outer()
        step("note", lambda: 1)
        session = requests_session(adapter=LoggingProvider())
        session.post("http://llm.invalid/v1", json={"model": "m1"})

    found = run(handler)
    steps = {s.target: s for s in found.steps}
    whole = traces.named("dispatch a1")
    assert whole.parent is None
    assert whole.kind is SpanKind.CONSUMER
    assert whole.status.status_code is StatusCode.UNSET
    told = dict(whole.attributes or {})
    assert told.pop("rebuno.queue_seconds") >= 0
    assert told == {
        "rebuno.agent_id": "a1",
        "rebuno.execution_id": found.execution.id,
        "rebuno.dispatch_id": told["rebuno.dispatch_id"],
        "rebuno.dispatch_attempt": 1,
        "rebuno.outcome": "completed",
    }
    for target, kind, path in (
        ("outer", "tool_call", ["tool_call outer", "dispatch a1"]),
        ("inner", "tool_call", ["tool_call inner", "tool_call outer", "dispatch a1"]),
        ("note", "local", ["local note", "dispatch a1"]),
        ("m1", "llm_call", ["llm_call m1", "dispatch a1"]),
    ):
        span = traces.named(f"{kind} {target}")
        assert traces.path(span) == path
        model = {"gen_ai.request.model": "m1"} if kind == "llm_call" else {}
        assert dict(span.attributes or {}) == {
            "rebuno.agent_id": "a1",
            "rebuno.execution_id": found.execution.id,
            "rebuno.dispatch_attempt": 1,
            "rebuno.step_kind": kind,
            "rebuno.step_target": target,
            "rebuno.step_id": steps[target].step_id,
            "rebuno.decision": "proceed",
            "rebuno.replayed": False,
            "rebuno.outcome": "succeeded",
            **model,
        }
        assert span.status.status_code is StatusCode.UNSET
        assert span.kind is (SpanKind.CLIENT if kind == "llm_call" else SpanKind.INTERNAL)
    assert traces.path(traces.named("own")) == ["own", "dispatch a1"]
    assert traces.path(traces.named("sql")) == [
        "sql",
        "tool_call inner",
        "tool_call outer",
        "dispatch a1",
    ]
    assert traces.path(traces.named("pooled")) == ["pooled", "tool_call outer", "dispatch a1"]


def test_requests_to_the_kernel_are_spans_of_what_they_are_for(traces: Traces) -> None:
    run(lambda: step("note", lambda: 1))
    submitted = traces.named("POST /v0/executions/{id}/steps")
    recorded = traces.named("POST /v0/executions/{id}/steps/{id}/complete")
    assert traces.path(submitted)[1:] == traces.path(recorded)[1:] == ["local note", "dispatch a1"]
    reported = traces.named("POST /v0/executions/{id}/complete")
    assert traces.path(reported)[1:] == ["dispatch a1"]
    assert reported.kind is SpanKind.CLIENT
    assert dict(reported.attributes or {}) == {
        "http.request.method": "POST",
        "url.template": "/v0/executions/{id}/complete",
        "server.address": "kernel.invalid",
        "http.response.status_code": 204,
    }
    # The operator's requests of this test belong to no span.
    assert "POST /v0/agents" not in {s.name for s in traces.spans}


def test_the_span_of_a_stream_ends_with_its_record(traces: Traces) -> None:
    def handler() -> str:
        session = requests_session(adapter=LoggingProvider())
        asked = {"model": "m1", "stream": True}
        answer = session.post("http://llm.invalid/v1", json=asked, stream=True)
        traces.tracer.start_span("reading").end()
        return answer.text

    run(handler)
    call = traces.named("llm_call m1")
    assert call.attributes["rebuno.outcome"] == "succeeded"  # type: ignore[index]
    assert traces.path(traces.named("reading")) == ["reading", "dispatch a1"]
    recorded = traces.named("POST /v0/executions/{id}/steps/{id}/complete")
    assert traces.path(recorded)[1:] == ["llm_call m1", "dispatch a1"]
    assert (call.end_time or 0) >= (recorded.end_time or 0) > 0


def test_heartbeats_make_no_spans(traces: Traces) -> None:
    with TestKernel() as kernel:
        agent = Agent("a1", secret="s", base_url="http://kernel.invalid")
        kernel.attach(agent)
        beaten = threading.Event()

        def beat(lease: Lease, timeout: float) -> None:
            try:
                agent._beat(lease, timeout)
            finally:
                beaten.set()

        beats = Heartbeats(beat, "hb")
        lease = Lease(dispatch(1, 0.003))
        beats.add(lease)
        assert beaten.wait(30)
        beats.remove(lease)
    assert traces.spans == ()


def test_replays_say_so(traces: Traces) -> None:
    attempts: list[int] = []

    def handler() -> None:
        step("note", lambda: 1)
        with pytest.raises(ToolError):
            broken()
        attempts.append(1)
        if len(attempts) == 1:
            raise SystemExit

    with TestKernel() as kernel:
        agent = Agent("a1", secret="s", base_url="http://kernel.invalid")
        agent.bind(handler)
        kernel.attach(agent)
        with kernel.client() as client:
            created = client.create("a1", {})
            wait_until(lambda: attempts)
            assert agent.join(30)
            kernel.advance(121)
            client.wait(created.id, 30)
            assert agent.join(30)
    first, second = [s for s in traces.spans if s.name == "local note"]
    assert [s.attributes["rebuno.replayed"] for s in (first, second)] == [False, True]  # type: ignore[index]
    assert [s.attributes["rebuno.decision"] for s in (first, second)] == ["proceed", "replay"]  # type: ignore[index]
    for span in [s for s in traces.spans if s.name == "tool_call broken"]:
        assert span.status.status_code is StatusCode.ERROR
        assert span.attributes["error.type"] == "ValueError"  # type: ignore[index]
    abandoned, completed = [s for s in traces.spans if s.name == "dispatch a1"]
    assert abandoned.attributes["rebuno.outcome"] == "abandoned"  # type: ignore[index]
    assert abandoned.status.status_code is StatusCode.ERROR
    assert completed.attributes["rebuno.dispatch_attempt"] == 2  # type: ignore[index]


def test_blocked_is_no_error(traces: Traces) -> None:
    run(approved)
    for name in ("dispatch a1", "tool_call approved"):
        assert traces.named(name).status.status_code is StatusCode.UNSET
    assert traces.named("dispatch a1").attributes["rebuno.outcome"] == "blocked"  # type: ignore[index]
    assert traces.named("tool_call approved").attributes["rebuno.decision"] == "blocked"  # type: ignore[index]


def test_failures_are_errors(traces: Traces) -> None:
    def handler() -> None:
        with pytest.raises(PolicyError):
            denied()
        raise LookupError("gone")

    run(handler)
    refused, whole = traces.named("tool_call denied"), traces.named("dispatch a1")
    assert refused.status.status_code is StatusCode.ERROR
    assert "not_today" in (refused.status.description or "")
    assert refused.attributes["rebuno.decision"] == "denied"  # type: ignore[index]
    assert whole.status.description == "agent_error: LookupError: gone"
    assert whole.attributes["error.type"] == "LookupError"  # type: ignore[index]
    (event,) = whole.events
    assert event.attributes["exception.message"] == "gone"  # type: ignore[index]


# The trace that a webhook belongs to


def dispatched(headers: Mapping[str, str], web: trace.Span | None = None) -> None:
    """Deliver one dispatch with these headers, perhaps within the span of a web framework."""
    with TestKernel() as kernel:
        agent = Agent("a1", secret="s", base_url="http://kernel.invalid")
        agent.bind(lambda: None)
        kernel.attach(agent)
        # Delivered by hand; the kernel's own delivery is answered first.
        with kernel.client() as client:
            execution_id = client.create("a1", {}).id
            client.wait(execution_id, 30)
            assert agent.join(30)
        fields = {"execution_id": execution_id, "dispatch_id": "by-hand", "dispatch_attempt": 1}
        body = json.dumps(fields).encode()
        browser = agent.app.test_client()
        signed = {"Rebuno-Signature": sign_body("s", body), **headers}
        with trace.use_span(web or trace.INVALID_SPAN):
            assert browser.post("/webhook", data=body, headers=signed).status_code == 202
        assert agent.join(30)


def by_hand(traces: Traces) -> ReadableSpan:
    (found,) = [
        s for s in traces.spans if (s.attributes or {}).get("rebuno.dispatch_id") == "by-hand"
    ]
    return found


def test_a_trace_goes_on_from_the_header(traces: Traces) -> None:
    dispatched({"TraceParent": TRACEPARENT})
    span = by_hand(traces)
    assert span.context.trace_id == TRACE_ID
    assert span.parent is not None
    assert (span.parent.span_id, span.parent.is_remote) == (PARENT_ID, True)


def test_or_from_the_span_of_the_web_framework(traces: Traces) -> None:
    web = traces.tracer.start_span("web")
    dispatched({"traceparent": TRACEPARENT}, web)
    web.end()
    span = by_hand(traces)
    assert span.parent is not None
    assert span.parent.span_id == web.get_span_context().span_id


@pytest.mark.parametrize("header", ["", "00-zz-1-01", TRACEPARENT * 9], ids=["none", "no", "long"])
def test_a_header_that_makes_no_sense_begins_a_trace(traces: Traces, header: str) -> None:
    dispatched({"traceparent": header} if header else {})
    assert by_hand(traces).parent is None


# Settings


class Headers(InProcessTransport):
    """Keeps the headers of what is sent."""

    seen: list[Mapping[str, str]]

    def send_once(
        self, method: str, path: str, body: bytes, headers: Any, timeout: float
    ) -> Answer:
        # The metadata of the agent belongs to no dispatch.
        if not path.endswith("/metadata"):
            self.seen.append(headers(path))
        return super().send_once(method, path, body, headers, timeout)


@pytest.mark.parametrize("propagates", [False, True])
def test_the_kernel_is_told_of_the_trace_when_asked(traces: Traces, propagates: bool) -> None:
    telemetry.instrument(tracer_provider=traces.provider, propagate_to_kernel=propagates)
    with TestKernel() as kernel:
        agent = Agent("a1", secret="s", base_url="http://kernel.invalid", signature="v1")
        agent.bind(lambda: step("note", lambda: 1))
        transport = Headers(lambda: kernel.app)
        transport.seen = []
        kernel.attach(agent, transport)
        with kernel.client() as client:
            assert client.wait(client.create("a1", {}).id, 30).output == 1
        assert agent.join(30)
    sent = [headers.get("traceparent") for headers in transport.seen]
    if propagates:
        trace_id = f"{traces.named('dispatch a1').context.trace_id:032x}"
        assert all(value is not None and trace_id in value for value in sent)
        assert len(set(sent)) == len(sent)
    else:
        assert set(sent) == {None}


def test_switching_on_twice_makes_no_span_twice(traces: Traces) -> None:
    telemetry.instrument(tracer_provider=traces.provider)
    assert len(observers.installed) == 1
    run(lambda: None)
    traces.named("dispatch a1")


def test_spans_say_nothing_of_arguments_results_and_secrets(traces: Traces) -> None:
    @tool
    def pay(card: str) -> str:
        return f"paid with {card}"

    telemetry.instrument(tracer_provider=traces.provider, propagate_to_kernel=True)

    def handler(card: str) -> str:
        return pay(card)

    found = run(handler, {"card": "hush-card"})
    assert found.output == "paid with hush-card"
    said = "\n".join(span.to_json() for span in traces.spans)
    assert "hush" not in said
    assert "sha256=" not in said
    assert "POST /v0/executions/{id}/steps" in said
