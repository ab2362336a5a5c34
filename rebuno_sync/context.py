"""The execution that a handler runs in: the one place where an effect happens.

An effect is submitted, its body is run when the kernel says so, and its outcome is recorded
before the handler sees it. Whatever ends the dispatch is remembered here, so that a handler that
swallows a signal still ends as the kernel said (PROTOCOL 5).
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import functools
import logging
import random
import threading
from collections.abc import Callable, Iterator
from typing import Any, Literal, Protocol

from . import observers, wire
from .decisions import Replayed, Run, replayed, resolve, tool_error, unknown
from .errors import (
    APIError,
    Blocked,
    ControlFlow,
    LeaseSuperseded,
    NetworkError,
    PolicyError,
    RebunoError,
    Terminated,
    ToolError,
    is_interruption,
)
from .kernel_client import KernelClient
from .lease import Lease, refusal_of
from .outcomes import Deadline, described, encoded
from .step_watches import StepWatches
from .transport import is_transient
from .wire import Idempotency, Kind

log = logging.getLogger(__name__)

_OUTCOME_UNKNOWN = frozenset({"indeterminate", "timeout"})
_FIRST_RETRY_PAUSE, _LONGEST_RETRY_PAUSE = 0.5, 30.0

_current: contextvars.ContextVar[ExecutionContext] = contextvars.ContextVar("rebuno_sync_execution")


def execution() -> ExecutionContext:
    """Return the execution that the calling code runs in.

    Raises:
        RuntimeError: there is none; the message says how to mend the call.
    """
    try:
        return _current.get()
    except LookupError:
        raise RuntimeError(_OUTSIDE) from None


def previous() -> Any:
    """Return the state that the previous turn of this execution's session left.

    That is what its handler returned as ``Result(…, state=…)``, or its output when it left
    none; ``None`` for the first turn, and from kernels before generation 3 (PROTOCOL 10).

    Raises:
        RuntimeError: called outside an execution.
    """
    return execution().previous()


_OUTSIDE = """\
there is no execution here: effects are recorded only while a handler runs.

Tools, steps and execution() work inside the function given to agent.bind() or
@agent.handler, when the kernel has dispatched to it. If this call is inside a
handler but on another thread, start that thread through bind_context(fn) or a
ContextThreadPoolExecutor. To run a tool's plain function unrecorded, say in a
test, call its __wrapped__."""


def execution_or_none() -> ExecutionContext | None:
    """Return the execution that the calling code runs in, or ``None``."""
    return _current.get(None)


@dataclasses.dataclass(frozen=True)
class Effect:
    """One effect to perform: what is submitted, and how its body is run.

    Attributes:
        name: the target of the step.
        kind: the kind of the step.
        args: the JSON of the arguments.
        body: runs the effect; its value must have a JSON form.
        idempotency: what the kernel may do when the outcome was lost.
        retries: how often a failed body is run again inside the one step.
        timeout: after how many seconds the step is recorded as failed.
        on_denied: whether a denial raises, or becomes the result as a sentence.
        reconcile: asked for the outcome of an effect whose outcome is unknown.
    """

    name: str
    kind: Kind
    args: bytes
    body: Callable[[], Any]
    idempotency: Idempotency = Idempotency.SAFE_TO_RETRY
    retries: int = 0
    timeout: float | None = None
    on_denied: Literal["raise", "return"] = "raise"
    reconcile: Callable[[str, Any], Any] | None = None


class OpenAnswer(Protocol):
    """The outcome of a step that is still coming in."""

    def settle(self) -> bool:
        """Record all of it, unless another thread reads it; tell whether it is done with.

        Raises what recording raises.
        """

    def end(self) -> None:
        """Record what has come, as the handler has ended; never raises."""


class ExecutionContext:
    """What a handler may know of its execution; see :func:`execution`.

    Attributes:
        id: the execution's id.
        agent_id: the agent's id.
        input: the raw input.
        status: the execution's status when this dispatch began.
        dispatch_id: the dispatch.
        dispatch_attempt: its attempt, ``None`` for kernels of generation 1.
        cancelled: a ``threading.Event``, set when the lease is lost or given up.
    """

    def __init__(self, execution: wire.Execution, lease: Lease, kernel: KernelClient) -> None:
        self.id = execution.id
        self.agent_id = execution.agent_id
        self.input = execution.input
        self.status = execution.status
        self.dispatch_id = lease.dispatch_id
        self.dispatch_attempt = lease.attempt
        self.cancelled = lease.cancelled
        self._lease = lease
        self._kernel = kernel
        self._lock = threading.Lock()
        self._signal: ControlFlow | None = None
        self._fatal: APIError | None = None
        self._ended = False
        self._running = 0
        self._overdue = 0
        self._seen: set[str] = set()
        self._open: set[OpenAnswer] = set()
        self._recorded: frozenset[str] | None = None
        self._watches = StepWatches(self.agent_id, self.id, self.dispatch_attempt)

    def __repr__(self) -> str:
        return f"<ExecutionContext {self.id} of agent {self.agent_id}>"

    @property
    def is_replaying(self) -> bool:
        """Whether steps recorded by earlier attempts are still ahead of the handler.

        The first use in a dispatch asks the kernel which steps have an outcome.
        """
        if self._recorded is None:
            self._guard()
            with self._kernel_errors():
                steps = self._kernel.terminal_steps(self.id, self._lease)
            with self._lock:
                mine = self._seen
                self._recorded = frozenset(step.step_id for step in steps) - mine
        return not self._recorded <= self._seen

    def check(self) -> None:
        """Return while this attempt still owns the execution.

        Long bodies call it now and then to stop early.

        Raises:
            LeaseSuperseded: another attempt owns it, or this one was given up.
            Blocked, Terminated: the dispatch has ended that way.
        """
        self._guard()

    def previous(self) -> Any:
        """Return the state that the previous turn of the session left, or ``None``."""
        self._guard()
        with self._kernel_errors():
            return self._kernel.previous(self.id, self._lease)

    # The dispatch's end

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """Make this the current execution of the calling context, until the block ends."""
        token = _current.set(self)
        try:
            yield
        finally:
            for answer in self._opened():
                answer.end()
            _current.reset(token)
            with self._lock:
                self._ended = True
            self._watches.abandon(self.signal)

    @property
    def signal(self) -> ControlFlow | None:
        """What has ended the dispatch, whether or not the handler let it pass."""
        return self._signal or self._lease.signal

    @property
    def fatal(self) -> APIError | None:
        """An answer that fails the execution, whether or not the handler let it pass."""
        return self._fatal

    def end_with(self, signal: ControlFlow) -> None:
        """Remember what ends the dispatch; the first signal is the one that stays."""
        with self._lock:
            if self._signal is None:
                self._signal = signal

    # Effects

    def perform(self, effect: Effect) -> Any:
        """Submit an effect, run its body when it is due, and return the recorded outcome.

        Raises:
            PolicyError, RateLimited: the kernel did not allow it.
            ToolError: the body failed, now or in an earlier attempt.
            Blocked, Terminated, LeaseSuperseded: the dispatch ends here.
        """
        try:
            found = self.submit(effect.kind, effect.name, effect.args, effect.idempotency)
        except PolicyError as exc:
            if effect.on_denied == "raise":
                raise
            return f"{effect.name} not allowed. reason: {exc.reason}"
        if isinstance(found, Run):
            with self.within(found.step_id):
                found = self._run(found.step_id, effect)
        if found.error is None:
            return found.value
        if effect.reconcile is not None and found.error.reason in _OUTCOME_UNKNOWN:
            return self._reconciled(found.step_id, effect)
        raise found.error

    def submit(
        self, kind: Kind, name: str, args: bytes, idempotency: Idempotency
    ) -> Run | Replayed:
        """Submit a step and return what to do with it; raises as :meth:`perform` does."""
        for answer in self._opened():
            if answer.settle():
                with self._lock:
                    self._open.discard(answer)
        self._guard()
        submit = functools.partial(self._submit, kind, name, args, idempotency)
        found = self._watches.submitted(kind, name, submit) if observers.installed else submit()
        self._trace("replayed" if isinstance(found, Replayed) else "runs", name, found.step_id)
        return found

    def _submit(
        self, kind: Kind, name: str, args: bytes, idempotency: Idempotency
    ) -> Run | Replayed:
        with self._kernel_errors():
            decision = self._kernel.submit(self.id, self._lease, kind, name, args, idempotency)
            with self._lock:
                self._seen.add(decision.step_id)
            return resolve(decision, name)

    def within(self, step_id: str) -> contextlib.AbstractContextManager[None]:
        """Have this thread work on a step within the block, for logs and traces."""
        return self._watches.within(step_id)

    def leave_open(self, answer: OpenAnswer) -> None:
        """Note an answer that comes in pieces while the handler goes on.

        It is settled before the next effect, which may follow from what has come, and ended
        with the handler.
        """
        with self._lock:
            self._open.add(answer)

    def _opened(self) -> tuple[OpenAnswer, ...]:
        with self._lock:
            return tuple(self._open)

    def record(self, step_id: str, name: str, result: bytes) -> Replayed:
        """Record the JSON result of a step and return the outcome that now stands."""
        self._guard_report()
        with self._kernel_errors():
            answer = self._kernel.complete_step(self.id, self._lease, step_id, result)
            stands = self._settled(answer, step_id, name, lambda: wire.decode(result), None)
        return self._watches.ended(stands)

    def record_failure(self, step_id: str, name: str, error: dict[str, Any]) -> Replayed:
        """Record the JSON error of a step and return the outcome that now stands."""
        self._guard_report()
        with self._kernel_errors():
            raw = wire.encode(error, "error")
            answer = self._kernel.fail_step(self.id, self._lease, step_id, raw)
            failed = tool_error(wire.decode(raw), name, step_id)
            stands = self._settled(answer, step_id, name, lambda: None, failed)
        return self._watches.ended(stands)

    def stream(self, step_id: str, seq: int, data: str) -> None:
        """Send one piece of live output of a running step: one try, no retries.

        Raises:
            RebunoError: it was not taken.
        """
        self._guard()
        self._kernel.stream(self.id, self._lease, step_id, seq, data)

    def _settled(
        self,
        answer: wire.Decision,
        step_id: str,
        name: str,
        value: Callable[[], Any],
        error: ToolError | None,
    ) -> Replayed:
        if answer.decision == "recorded":
            self._trace("recorded" if error is None else "failed", name, step_id)
            return Replayed(step_id, value(), error)
        if answer.decision == "replay":
            return replayed(answer, name, step_id)
        if answer.decision == "execution_terminal":
            raise Terminated
        raise unknown(answer)

    def _run(self, step_id: str, effect: Effect) -> Replayed:
        if effect.idempotency is Idempotency.AT_MOST_ONCE:
            lapsed = self._lease.lapsed()
            if lapsed is not None:
                self._end_lease(lapsed, "lapsed")
                raise lapsed
        deadline = self._deadline(step_id, effect)
        try:
            with self.running():
                result, error = self._outcome(step_id, effect, deadline)
        finally:
            passed = deadline is not None and deadline.stop()
        if passed:
            assert deadline is not None
            return deadline.outcome()
        if error is not None:
            return self.record_failure(step_id, effect.name, error)
        return self.record(step_id, effect.name, result)

    def _deadline(self, step_id: str, effect: Effect) -> Deadline | None:
        if effect.timeout is None:
            return None
        record = functools.partial(self.record_failure, step_id, effect.name)
        overdue = functools.partial(self._note_running, 0)
        try:
            return Deadline(effect.timeout, effect.name, record, overdue)
        except RuntimeError as exc:
            # No thread to be had, as while the interpreter ends. The kernel takes the body for
            # running: leaving it out now would make the outcome of an at-most-once step unknown.
            log.warning("%s runs without its time-out: %s (step %s)", effect.name, exc, step_id)
            return None

    def _outcome(
        self, step_id: str, effect: Effect, deadline: Deadline | None
    ) -> tuple[bytes, dict[str, Any] | None]:
        """Run the body, again if it may be; return the JSON result, or what went wrong."""
        pause = _FIRST_RETRY_PAUSE
        for left in range(effect.retries, -1, -1):
            try:
                value = effect.body()
            except BaseException as exc:
                # asyncio.CancelledError and the like are failures of the body as any other.
                if isinstance(exc, ControlFlow) or is_interruption(exc):
                    raise
                error = described(exc)
                again = f"; {left} more tries" if left else ""
                log.warning("%s failed (step %s)%s", effect.name, step_id, again, exc_info=exc)
            else:
                return encoded(value, effect.name)
            if left:
                self.cancelled.wait(pause * random.uniform(0.75, 1.25))
                self._guard_report()
                if deadline is not None and deadline.passed:
                    break
                pause = min(pause * 2, _LONGEST_RETRY_PAUSE)
        return b"", error

    def _reconciled(self, step_id: str, effect: Effect) -> Any:
        """Ask what became of an effect; the answer is a step of its own, so it is asked once."""
        assert effect.reconcile is not None
        args = wire.decode(effect.args)
        return self.perform(
            Effect(
                name=f"{effect.name}.reconcile",
                kind=Kind.LOCAL,
                args=wire.encode({"step_id": step_id}, "args"),
                body=functools.partial(effect.reconcile, step_id, args),
            )
        )

    def _trace(self, what: str, name: str, step_id: str) -> None:
        """Say at level DEBUG how each effect goes, for those who want to watch."""
        if log.isEnabledFor(logging.DEBUG):
            fields = {
                "execution_id": self.id,
                "dispatch_attempt": self.dispatch_attempt,
                "step_id": step_id,
                "target": name,
                "outcome": what,
            }
            log.debug("%s %s (step %s)", what, name, step_id, extra=fields)

    # Guards

    def _guard(self) -> None:
        """Raise when no kernel call may be made any more, without touching the network."""
        if self._ended:
            raise Terminated(
                "the handler of this execution has returned; effects that other threads start "
                "after that cannot be recorded. Wait for the threads before returning."
            )
        self._raise_signal(self.signal)

    def _guard_report(self) -> None:
        """The same for reports of outcomes, which are still taken while the execution waits."""
        if not isinstance(self._signal, Blocked):
            self._raise_signal(self.signal)

    def _raise_signal(self, signal: ControlFlow | None) -> None:
        if signal is not None:
            self.end_with(signal)
            raise signal.with_traceback(None)

    @contextlib.contextmanager
    def _kernel_errors(self) -> Iterator[None]:
        """Decide what a failed kernel call means for this attempt, and remember it."""
        try:
            yield
        except ControlFlow as signal:
            self.end_with(signal)
            raise
        except APIError as exc:
            ending, why = refusal_of(exc), "refused"
            if ending is None:
                if exc.code == "unknown_decision":
                    self._fatal = self._fatal or exc
                # A refused signature is none of the handler's doing either.
                if not is_transient(exc.status_code) and exc.status_code != 401:
                    raise
                ending, why = _given_up(exc), "unreachable"
            self._end_lease(ending, why)
            raise ending from exc
        except NetworkError as exc:
            ending = _given_up(exc)
            self._end_lease(ending, "unreachable")
            raise ending from exc

    def _end_lease(self, signal: ControlFlow, why: str) -> None:
        log.warning("%s: %s", self._lease, signal)
        self._lease.lose(signal, why)
        self.end_with(signal)

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Count a body as running until the block ends, so that the lease is kept for it."""
        self._note_running(+1)
        try:
            yield
        finally:
            self._note_running(-1)

    def _note_running(self, change: int, overdue: int = 0) -> None:
        """Keep the lease only while some body is still within its time.

        A body that hangs past its time-out cannot be stopped, but its execution can go on
        elsewhere: the lease is left to run out, and the next attempt replays the time-out.
        """
        with self._lock:
            self._running += change
            self._overdue += overdue
            stuck = 0 < self._running == self._overdue
            # Without attempts the kernel's next delivery looks like a repeat of this one.
            self._lease.paused = stuck and self._lease.attempt is not None


def _given_up(cause: RebunoError) -> LeaseSuperseded:
    return LeaseSuperseded(
        f"this attempt is given up, the kernel delivers again when its lease runs out: {cause}"
    )
