"""Traces: spans for dispatches, steps, LLM calls and requests to the kernel.

Needs the extra ``opentelemetry``; what becomes of the spans is up to the SDK that the app sets up.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

from opentelemetry import context, propagate, trace
from opentelemetry.context import Context
from opentelemetry.trace import Span, SpanKind, StatusCode, TracerProvider

from .. import observers
from ..errors import Blocked, ToolError, safe_text
from ..observers import DispatchEvent, Event, Observer, RequestEvent, StepEvent
from ..version import __version__

#: Words of the kernel, or of this package, for a step that could not be had.
_REFUSALS = frozenset({"denied", "rate_limited", "refused", "unanswered"})
_FAILURES = frozenset({"failed", "abandoned"})
_KINDS = {"llm_call": SpanKind.CLIENT}


def instrument(
    *, tracer_provider: TracerProvider | None = None, propagate_to_kernel: bool = False
) -> None:
    """Make spans of what the agents and clients of this process do, from now on.

    Call it once, before or after the SDK is set up and before or after a fork; called again, the
    last settings count.

    - A span for each dispatch, as a child of whatever the webhook's request belongs to: the span
      that a framework's instrumentation has made for it, or else its ``traceparent`` header. It
      is current in the handler.
    - A span for each step within that, current in its body, so that spans of libraries nest.
    - A span for each try of a request to the kernel, wherever there is a span that it belongs
      to; heartbeats belong to none.

    Blocked dispatches and steps are no errors. Arguments, results and headers are never put on a
    span; messages of exceptions are.

    Args:
        tracer_provider: where tracers come from; the global one by default.
        propagate_to_kernel: whether requests to the kernel carry the trace in headers. Kernels
            ignore it; a proxy or a mesh on the way may go by it.
    """
    global _tracing
    uninstrument()
    _tracing = _Tracing(tracer_provider, propagate_to_kernel)
    observers.install(_tracing)


def uninstrument() -> None:
    """Make no more spans; those that have begun still end."""
    global _tracing
    if _tracing is not None:
        observers.remove(_tracing)
    _tracing = None


@dataclasses.dataclass(frozen=True)
class _Begun:
    span: Span
    context: Context


class _Tracing(Observer):
    def __init__(self, provider: TracerProvider | None, propagates: bool) -> None:
        self._tracer = trace.get_tracer("rebuno_sync", __version__, provider)
        self._propagates = propagates

    def carrier(self, headers: Mapping[str, str]) -> Mapping[str, str]:
        if _has_span(context.get_current()):
            carrier: dict[str, str] = {}
            propagate.inject(carrier)
            return carrier
        names = propagate.get_global_textmap().fields
        return {name: headers[name] for name in names if name in headers}

    def began(self, event: Event) -> _Begun | None:
        if isinstance(event, DispatchEvent):
            return self._begin_dispatch(event)
        if isinstance(event, StepEvent):
            return self._begin_step(event)
        return self._begin_request(event)

    def entered(self, kept: _Begun | None) -> Any:
        return None if kept is None else context.attach(kept.context)

    def left(self, kept: _Begun | None, token: Any) -> None:
        if token is not None:
            context.detach(token)

    def decided(self, event: StepEvent, kept: _Begun | None) -> None:
        if kept is not None:
            kept.span.set_attribute("rebuno.step_id", event.step_id)
            kept.span.set_attribute("rebuno.decision", event.decision)
            kept.span.set_attribute("rebuno.replayed", event.replayed)

    def ended(self, event: Event, kept: _Begun | None) -> None:
        if kept is None:
            return
        if isinstance(event, DispatchEvent):
            _end_dispatch(event, kept.span)
        elif isinstance(event, StepEvent):
            _end_step(event, kept.span)
        else:
            _end_request(event, kept.span)
        kept.span.end()

    def _begin_dispatch(self, event: DispatchEvent) -> _Begun:
        parent = propagate.extract(event.carrier)
        attributes = {
            **_attributes(event),
            "rebuno.dispatch_id": event.dispatch_id,
            "rebuno.queue_seconds": event.waited,
        }
        return self._begin(f"dispatch {event.agent_id}", parent, SpanKind.CONSUMER, attributes)

    def _begin_step(self, event: StepEvent) -> _Begun:
        attributes = {
            **_attributes(event),
            "rebuno.step_kind": event.kind,
            "rebuno.step_target": event.target,
        }
        if event.kind == "llm_call":
            attributes["gen_ai.request.model"] = event.target
        kind = _KINDS.get(event.kind, SpanKind.INTERNAL)
        name = f"{event.kind} {event.target}"
        return self._begin(name, context.get_current(), kind, attributes)

    def _begin_request(self, event: RequestEvent) -> _Begun | None:
        parent = context.get_current()
        if not _has_span(parent):
            return None
        attributes = {
            "http.request.method": event.method,
            "url.template": event.route,
            "server.address": urlsplit(event.base_url).hostname or "",
        }
        name = f"{event.method} {event.route}"
        begun = self._begin(name, parent, SpanKind.CLIENT, attributes)
        if self._propagates:
            propagate.inject(event.headers, begun.context)
        return begun

    def _begin(
        self, name: str, parent: Context, kind: SpanKind, attributes: dict[str, Any]
    ) -> _Begun:
        span = self._tracer.start_span(name, parent, kind, attributes)
        return _Begun(span, trace.set_span_in_context(span, parent))


def _has_span(within: Context) -> bool:
    return trace.get_current_span(within).get_span_context().is_valid


def _attributes(event: DispatchEvent | StepEvent) -> dict[str, Any]:
    found = {"rebuno.agent_id": event.agent_id, "rebuno.execution_id": event.execution_id}
    attempt = {} if event.attempt is None else {"rebuno.dispatch_attempt": event.attempt}
    return {**found, **attempt}


def _end_dispatch(event: DispatchEvent, span: Span) -> None:
    span.set_attribute("rebuno.outcome", event.outcome)
    if event.outcome in _FAILURES:
        span.set_status(StatusCode.ERROR, event.reason or event.outcome)
        if event.error is not None:
            span.set_attribute("error.type", type(event.error).__name__)
            span.record_exception(event.error)


def _end_step(event: StepEvent, span: Span) -> None:
    if event.outcome:
        span.set_attribute("rebuno.outcome", event.outcome)
    failed = event.outcome in _FAILURES or event.decision in _REFUSALS
    if failed and not isinstance(event.error, Blocked):
        kind = event.error.type if isinstance(event.error, ToolError) else ""
        span.set_attribute("error.type", kind or type(event.error).__name__)
        span.set_status(StatusCode.ERROR, safe_text(event.error))


def _end_request(event: RequestEvent, span: Span) -> None:
    if event.status is not None:
        span.set_attribute("http.response.status_code", event.status)
        if event.status >= 400:
            span.set_attribute("error.type", str(event.status))
            span.set_status(StatusCode.ERROR)
    elif event.error is not None:
        span.set_attribute("error.type", type(event.error).__name__)
        span.set_status(StatusCode.ERROR, safe_text(event.error))


_tracing: _Tracing | None = None
