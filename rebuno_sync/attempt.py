"""One attempt: reads the execution, calls the handler, reports what came of it (PROTOCOL 5)."""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable
from typing import Any

from . import logs, observers, wire
from .context import ExecutionContext
from .decisions import raise_for_refusal
from .errors import (
    APIError,
    Blocked,
    ControlFlow,
    LeaseSuperseded,
    NetworkError,
    PolicyError,
    RateLimited,
    RebunoError,
    Terminated,
    ToolError,
    failure_reason,
    is_interruption,
)
from .inputs import InputBinder, InputInvalid
from .kernel_client import KernelClient
from .lease import refusal_of
from .workers import Run

log = logging.getLogger(__name__)

#: From this attempt on, ``SystemExit`` or ``KeyboardInterrupt`` in a handler fails its execution.
MAX_EXITS = 5


class Result:
    """What a handler returns when it also leaves state for the next turn of its session.

    Args:
        output: the output of the execution; must have a JSON form.
        state: what :func:`previous` returns in the next turn; needs a generation 3 kernel.
    """

    def __init__(self, output: Any = None, state: Any = None) -> None:
        self.output = output
        self.state = state

    def __repr__(self) -> str:
        return f"Result(output={self.output!r}, state={self.state!r})"


@dataclasses.dataclass(frozen=True)
class End:
    """How a dispatch ended; see :class:`.observers.DispatchEvent`.

    Attributes:
        report: tells the kernel; ``None`` when there is nothing to tell.
    """

    outcome: str
    reason: str = ""
    error: BaseException | None = None
    report: Callable[[], None] | None = None


_OUTCOMES: dict[type, str] = {
    Blocked: "blocked",
    Terminated: "terminated",
    LeaseSuperseded: "superseded",
    type(None): "abandoned",
}


class Attempt:
    """One attempt at an execution, on the thread that runs it.

    Args:
        agent_id: the agent.
        kernel: where the execution is.
        binder: calls the handler.
        run: the dispatch.
        is_ending: tells whether this process is about to end.

    Attributes:
        called: whether the handler was called.
    """

    def __init__(
        self,
        agent_id: str,
        kernel: KernelClient,
        binder: InputBinder,
        run: Run,
        is_ending: Callable[[], bool],
    ) -> None:
        self.called = False
        self._agent_id = agent_id
        self._kernel = kernel
        self._binder = binder
        self._lease = run.lease
        self._run = run
        self._is_ending = is_ending

    def run(self) -> None:
        """Run the handler, and report its end."""
        lease = self._lease
        logs.enter_dispatch(lease.execution_id, lease.attempt)
        if not observers.installed:
            self._outcome()
            return
        event = observers.DispatchEvent(
            self._agent_id,
            lease.execution_id,
            lease.dispatch_id,
            lease.attempt,
            self._run.carrier,
            time.monotonic() - self._run.accepted_at,
            outcome="abandoned",
        )
        watch = observers.Watch(event)
        try:
            with watch.current():
                end = self._outcome()
            event.outcome, event.reason, event.error = end.outcome, end.reason, end.error
        except BaseException as exc:
            event.error = exc
            raise
        finally:
            watch.end()

    def _outcome(self) -> End:
        lease = self._lease
        try:
            execution = self._kernel.execution(lease.execution_id, lease)
        except RebunoError as exc:
            log.warning("given up, the execution cannot be read: %s: %s", lease, exc)
            return End("abandoned", error=exc)
        if execution.agent_id != self._agent_id:
            # Two agents that share a secret take each other's webhooks for their own.
            log.error(
                "given up, the execution belongs to agent %s, not to %s; give each agent a secret "
                "of its own: %s",
                execution.agent_id,
                self._agent_id,
                lease,
            )
            return End("abandoned")
        if execution.done:
            log.info("nothing to do, it is %s already: %s", execution.status, lease)
            return End("ended_before")
        if lease.signal is not None:
            log.info("nothing to do, %s: %s", lease.signal, lease)
            return End(_OUTCOMES[type(lease.signal)])
        self.called = True
        context = ExecutionContext(execution, lease, self._kernel)
        end = self._handle(context)
        signal = context.signal
        if signal is not None:
            log.info("ended, %s: %s", type(signal).__name__.lower(), lease)
            end = End(_OUTCOMES[type(signal)])
        elif end.report is not None:
            end = self._report(end, end.report)
        return end

    def _handle(self, context: ExecutionContext) -> End:
        """Call the handler; return what came of it and how to report that."""
        kernel, lease = self._kernel, self._lease
        try:
            with self._run.scope(), context.entered():
                value = self._binder.call(context.input)
        except InputInvalid as exc:
            return self._fail(f"input_invalid: {exc}", exc)
        except ControlFlow as signal:
            context.end_with(signal)
            return End("abandoned")
        except BaseException as exc:
            if is_interruption(exc):
                return self._interrupted(exc)
            return self._failed(exc, context)
        if context.fatal is not None:
            return self._fail(failure_reason(context.fatal), context.fatal)
        result = value if isinstance(value, Result) else Result(value)
        try:
            output = wire.encode(result.output, "output")
            state = None if result.state is None else wire.encode(result.state, "state")
            self._check_end(output, state)
        except (TypeError, ValueError) as exc:
            log.error("the handler's output cannot be reported: %s: %s", lease, exc)
            return self._fail(failure_reason(exc), exc)
        return End("completed", report=lambda: kernel.complete(context.id, lease, output, state))

    def _fail(self, reason: str, error: BaseException) -> End:
        kernel, lease = self._kernel, self._lease
        return End("failed", reason, error, lambda: kernel.fail(lease.execution_id, lease, reason))

    def _interrupted(self, exc: BaseException) -> End:
        """Leave the execution to another attempt: it has done nothing wrong when a worker ends.

        Unless its own code does that to it each time, as ``sys.exit()`` in a library would.
        """
        by_itself = isinstance(exc, (SystemExit, KeyboardInterrupt))
        exits = by_itself and (self._lease.attempt or 0) >= MAX_EXITS
        # Under gevent, gunicorn's own way out of a hung worker is raised within the handler.
        if exits and not self._is_ending():
            log.error("the handler exits in every attempt: %s", self._lease, exc_info=exc)
            return self._fail(failure_reason(exc), exc)
        name = type(exc).__name__
        log.warning("given up, %s in the handler: %s", name, self._lease, exc_info=exc)
        return End("abandoned", error=exc)

    def _failed(self, exc: BaseException, context: ExecutionContext) -> End:
        try:
            raise_for_refusal(exc)
        except ControlFlow as signal:
            context.end_with(signal)
            return End("abandoned")
        except RebunoError as refused:
            return self._fail(failure_reason(refused), refused)
        if self._is_ending():
            # An interpreter that is being torn down raises what has nothing to do with the
            # work; another process will find out whether this was real.
            log.warning("given up while shutting down: %s", context, exc_info=exc)
            return End("abandoned", error=exc)
        if not isinstance(exc, (PolicyError, RateLimited, ToolError)):
            log.error("the handler of execution %s raised", context.id, exc_info=exc)
        return self._fail(failure_reason(context.fatal or exc), exc)

    def _check_end(self, output: bytes, state: bytes | None) -> None:
        what = "the output" if state is None else "the output with the state"
        wire.check_size(len(output) + len(state or b""), what, wire.MAX_VALUE_BYTES)
        if state is not None and self._run.dispatch.lease_timeout_seconds is None:
            raise ValueError("Result(state=…) needs a kernel of generation 3, which keeps sessions")

    def _report(self, end: End, report: Callable[[], None]) -> End:
        """Report an end to the kernel; return the one that now stands."""
        lease = self._lease
        lease.reporting = True
        try:
            try:
                report()
            except APIError as exc:
                if exc.status_code not in (400, 413):
                    raise
                # The next attempt would come to the same output, and no further.
                log.error("the kernel refuses the output of %s: %s", lease, exc)
                self._kernel.fail(lease.execution_id, lease, failure_reason(exc))
                return End("failed", failure_reason(exc), exc)
        except APIError as exc:
            log.warning("the kernel did not take the end of %s: %s", lease, exc)
            return End(_OUTCOMES[type(refusal_of(exc))], error=exc)
        except NetworkError as exc:
            log.warning("given up, the end cannot be reported: %s: %s", lease, exc)
            return End("abandoned", error=exc)
        return end
