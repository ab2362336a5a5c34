"""An agent: verifies webhooks and runs one dispatch after the other. Knows no web framework.

A dispatch goes: :meth:`AgentCore.deliver` verifies the raw body and queues it
(:mod:`.workers`); a worker thread reads the execution, binds its input (:mod:`.inputs`) and
calls the handler within an :class:`~.context.ExecutionContext`; what comes of it is reported as
PROTOCOL 5 says.
"""

from __future__ import annotations

import atexit
import contextlib
import contextvars
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any, TypeVar

from . import signing, wire
from .context import ExecutionContext
from .decisions import raise_for_refusal
from .errors import (
    APIError,
    ControlFlow,
    NetworkError,
    PolicyError,
    RateLimited,
    RebunoError,
    ToolError,
    failure_reason,
    is_interruption,
)
from .forks import after_fork
from .functions import require_plain_function
from .inputs import InputBinder, InputInvalid, schema_of
from .kernel_client import KernelClient, Signature
from .lease import Heartbeats
from .transport import Transport
from .wire import Dispatch
from .workers import Acceptance, Run, Scope, Workers

log = logging.getLogger(__name__)

H = TypeVar("H", bound=Callable[..., Any])

#: Webhook bodies have four short fields; more bytes than this are refused with 413.
MAX_WEBHOOK_BYTES = 64 * 1024
#: From this attempt on a handler that raises ``SystemExit`` fails its execution.
MAX_EXITS = 5
#: Wrong signatures are logged no more often than this, in seconds.
_QUIET_SECONDS = 10.0


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


class _Process:
    """What an agent holds in one process; a fork begins with a fresh one."""

    def __init__(self, agent: AgentCore) -> None:
        self.pid = os.getpid()
        heartbeats = Heartbeats(agent._beat, f"rebuno-heartbeat-{agent.agent_id}")
        self.workers = Workers(
            agent._run_dispatch, heartbeats, agent.max_concurrency, f"rebuno-{agent.agent_id}"
        )
        self.shutdown_timeout = agent.shutdown_timeout
        self.metadata_sent = threading.Event()


class _Held:
    """What all agents hold in this process; a fork begins with a fresh one."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.parts: weakref.WeakSet[_Process] = weakref.WeakSet()
        # A plain attribute: a signal handler may set it while this thread holds any lock.
        self.refusing = False
        self._registered = False
        self._drained = False

    def make(self, agent: AgentCore) -> _Process:
        """Return the agent's part; call with the lock held."""
        part = _Process(agent)
        if not self._registered:
            self._registered = True
            # Worker threads are daemons, so that a hung handler cannot hold up the end of the
            # process; here is where those that do end get their time. It must come before
            # concurrent.futures refuses new work, which handlers may need to get to their end.
            register = getattr(threading, "_register_atexit", atexit.register)
            try:
                register(self.drain)
            except RuntimeError:  # the process is already ending
                part.workers.refuse()
        self.parts.add(part)
        return part

    def drain(self, limit: float | None = None) -> bool:
        """Close every agent at the end of the process, all within the same seconds, once."""
        if self is not _held or self._drained:
            return True
        self._drained = True
        begin = time.monotonic()
        self.refusing = True
        parts = list(self.parts)
        for part in parts:
            part.workers.refuse()
        done = True
        for part in parts:
            seconds = min(part.shutdown_timeout, part.shutdown_timeout if limit is None else limit)
            done &= part.workers.close(max(0.0, begin + seconds - time.monotonic()))
        return done


_held = _Held()


def refuse_dispatches() -> None:
    """Have every agent of this process answer 503 from now on; safe in a signal handler."""
    _held.refusing = True


def drain(limit: float | None = None) -> bool:
    """Close every agent of this process: each gets its ``shutdown_timeout``, all at once.

    Args:
        limit: the longest that this may take, in seconds.

    Returns:
        Whether every handler ended in time.
    """
    return _held.drain(limit)


@after_fork
def _renew() -> None:
    global _held
    _held = _Held()


class AgentCore:
    """The agent without a web server; :class:`rebuno_sync.Agent` adds the ways in.

    Args:
        agent_id: the id under which the agent is registered at the kernel.
        secret: the shared secret; ``REBUNO_AGENT_SECRET`` by default.
        base_url: where the kernel is; ``REBUNO_URL`` by default.
        webhook_path: the path of the webhook below the blueprint or app.
        kernel_timeout: how long to wait for an answer of the kernel, in seconds.
        max_concurrency: how many handlers run at once in a process; further dispatches wait
            in a queue that keeps their leases.
        shutdown_timeout: how long running handlers may take to end when the process does, in
            seconds.
        signature: ``"auto"``, or ``"body"`` or ``"v1"`` to pin one (PROTOCOL 3).
        description: what the agent does, told to generation 3 kernels.
        output_schema: the JSON schema of the output, or a pydantic model, told likewise.

    Raises:
        ValueError: an argument makes no sense, or is neither given nor in the environment.
    """

    def __init__(
        self,
        agent_id: str,
        *,
        secret: str | None = None,
        base_url: str | None = None,
        webhook_path: str = "/webhook",
        kernel_timeout: float = 35.0,
        max_concurrency: int = 32,
        shutdown_timeout: float = 25.0,
        signature: Signature = "auto",
        description: str | None = None,
        output_schema: Any = None,
    ) -> None:
        if not isinstance(agent_id, str) or not agent_id:
            raise ValueError(f"agent_id is non-empty text, not {agent_id!r}")
        if not (agent_id.isascii() and agent_id.isprintable()):
            raise ValueError(f"agent_id is sent as an HTTP header, which takes ASCII: {agent_id!r}")
        if not webhook_path.startswith("/"):
            raise ValueError(f"webhook_path begins with '/': {webhook_path!r}")
        if type(max_concurrency) is not int or max_concurrency < 1:
            raise ValueError(f"max_concurrency is a number from 1 up, not {max_concurrency!r}")
        for name, seconds, least in (
            ("kernel_timeout", kernel_timeout, 1e-3),
            ("shutdown_timeout", shutdown_timeout, 0.0),
        ):
            if not isinstance(seconds, (int, float)) or not least <= seconds < 1e9:
                raise ValueError(f"{name} is a number of seconds, not {seconds!r}")
        if signature not in ("auto", "body", "v1"):
            raise ValueError(f"signature is 'auto', 'body' or 'v1', not {signature!r}")
        self.agent_id = agent_id
        self.webhook_path = webhook_path
        self.max_concurrency = max_concurrency
        self.shutdown_timeout = shutdown_timeout
        self.description = description
        self.output_schema = output_schema
        self._secret = from_environment(secret, "secret", "REBUNO_AGENT_SECRET")
        url = from_environment(base_url, "base_url", "REBUNO_URL")
        self._signature: Signature = signature
        self.connect(Transport(url, timeout=kernel_timeout))
        self._binder: InputBinder | None = None
        self._process: _Process | None = None
        self._refused_at = -_QUIET_SECONDS

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.agent_id!r}>"

    def connect(self, transport: Transport) -> None:
        """Reach the kernel through another transport from now on, as tests do without sockets."""
        self._kernel = KernelClient(self.agent_id, self._secret, transport, self._signature)

    # The handler

    def bind(self, fn: Callable[..., Any]) -> None:
        """Make ``fn`` the handler: a plain function whose signature is the input's schema.

        Keyword fields, one pydantic model, or one ``dict``/``Any``/bare parameter for the raw
        input. What it returns is the execution's output and must have a JSON form.

        Raises:
            TypeError: ``fn`` is a coroutine function or a generator, or no input can fill it.
        """
        require_plain_function(fn, "agent.bind()")
        self._binder = InputBinder(fn)

    def handler(self, fn: H) -> H:
        """Decorate the handler; the same as :meth:`bind`."""
        self.bind(fn)
        return fn

    # Deliveries

    def deliver(
        self, body: bytes, signature: str | None, scope: Scope = contextlib.nullcontext
    ) -> tuple[int, str]:
        """Take one webhook; answer with a status and a text for whoever reads the kernel's log.

        Args:
            body: the raw body, exactly as it came.
            signature: the ``Rebuno-Signature`` header, if there was one.
            scope: entered around the handler, such as a Flask app's ``app_context``.
        """
        if signature is None or not signing.verify_body(self._secret, body, signature):
            self._note_refused(signature is None)
            return 401, ""
        try:
            dispatch = Dispatch.from_json(wire.decode(body))
        except ValueError as exc:
            return 400, f"this is not a dispatch: {exc}"
        if self._binder is None:
            return 503, "this agent has no handler yet; give it one with agent.bind(fn)"
        if _held.refusing:
            return 503, "this process is ending"
        accepted = self._here().workers.accept(dispatch, scope)
        if accepted is Acceptance.CLOSING:
            return 503, "this process is shutting down"
        return 202, "taken" if accepted is Acceptance.TAKEN else "already held"

    def _note_refused(self, unsigned: bool) -> None:
        """Say in the log that a webhook was refused, but not as often as somebody might send it."""
        now = time.monotonic()
        if now - self._refused_at < _QUIET_SECONDS:
            return
        self._refused_at = now
        log.warning(
            "a webhook for agent %s was refused: %s. If the kernel sent it, the agent is "
            "registered there with another secret than this process has",
            self.agent_id,
            "it has no signature" if unsigned else "its signature is wrong",
        )

    def join(self, timeout: float | None = None) -> bool:
        """Wait until no dispatch is queued or running in this process.

        Args:
            timeout: how long to wait at most, in seconds.

        Returns:
            Whether that came about.
        """
        return self._here().workers.join(timeout)

    def close(self, timeout: float | None = None) -> bool:
        """Take no more dispatches, let running handlers end, give up what does not.

        Args:
            timeout: how long handlers may take, in seconds; ``shutdown_timeout`` by default.

        Returns:
            Whether every running handler ended in time. What did not, and what was still
            queued, is never reported as failed: the kernel delivers it again.
        """
        return self._here().workers.close(self.shutdown_timeout if timeout is None else timeout)

    def _here(self) -> _Process:
        process = self._process
        if process is None or process.pid != os.getpid():
            held = _held
            with held.lock:
                process = self._process
                if process is None or process.pid != os.getpid():
                    process = self._process = held.make(self)
        return process

    def _beat(self, lease: Any, timeout: float) -> None:
        self._kernel.heartbeat(lease.execution_id, lease, timeout)

    # One dispatch

    def _run_dispatch(self, run: Run) -> None:
        """Run the handler for one dispatch and report what came of it."""
        lease = run.lease
        try:
            execution = self._kernel.execution(lease.execution_id, lease)
        except RebunoError as exc:
            log.warning("given up, the execution cannot be read: %s: %s", lease, exc)
            return
        if execution.done:
            log.info("nothing to do, it is %s already: %s", execution.status, lease)
            return
        if lease.signal is not None:
            log.info("nothing to do, %s: %s", lease.signal, lease)
            return
        context = ExecutionContext(execution, lease, self._kernel)
        # A context of its own: what one handler sets must not reach the next on this thread.
        report = contextvars.Context().run(self._handle, run, context)
        signal = context.signal
        if signal is not None:
            log.info("ended, %s: %s", type(signal).__name__.lower(), lease)
        elif report is not None:
            self._report(report, run)
        self._send_metadata(run.dispatch)

    def _handle(self, run: Run, context: ExecutionContext) -> Callable[[], None] | None:
        """Call the handler; return how to report its end, or ``None`` when nothing is."""
        assert self._binder is not None
        kernel, lease = self._kernel, run.lease

        def fail(reason: str) -> Callable[[], None]:
            return lambda: kernel.fail(context.id, lease, reason)

        try:
            with run.scope(), context.entered():
                value = self._binder.call(context.input)
        except InputInvalid as exc:
            return fail(f"input_invalid: {exc}")
        except ControlFlow as signal:
            context.end_with(signal)
            return None
        except BaseException as exc:
            if is_interruption(exc):
                return self._interrupted(exc, run, fail)
            return self._failed(exc, context, fail)
        if context.fatal is not None:
            return fail(failure_reason(context.fatal))
        result = value if isinstance(value, Result) else Result(value)
        try:
            output = wire.encode(result.output, "output")
            state = None if result.state is None else wire.encode(result.state, "state")
            self._check_end(output, state, run.dispatch)
        except (TypeError, ValueError) as exc:
            log.error("the handler's output cannot be reported: %s: %s", lease, exc)
            return fail(failure_reason(exc))
        return lambda: kernel.complete(context.id, lease, output, state)

    def _interrupted(
        self, exc: BaseException, run: Run, fail: Callable[[str], Callable[[], None]]
    ) -> Callable[[], None] | None:
        """Leave the execution to another attempt: it has done nothing wrong when a worker ends.

        Unless its own code does that to it each time, as ``sys.exit()`` in a library would.
        """
        if isinstance(exc, SystemExit) and (run.dispatch.dispatch_attempt or 0) >= MAX_EXITS:
            log.error("the handler exits in every attempt: %s", run.lease, exc_info=exc)
            return fail(failure_reason(exc))
        name = type(exc).__name__
        log.warning("given up, %s in the handler: %s", name, run.lease, exc_info=exc)
        return None

    def _failed(
        self,
        exc: BaseException,
        context: ExecutionContext,
        fail: Callable[[str], Callable[[], None]],
    ) -> Callable[[], None] | None:
        try:
            raise_for_refusal(exc)
        except ControlFlow as signal:
            context.end_with(signal)
            return None
        except RebunoError as refused:
            return fail(failure_reason(refused))
        if _held.refusing or self._here().workers.closing:
            # An interpreter that is being torn down raises what has nothing to do with the
            # work; another process will find out whether this was real.
            log.warning("given up while shutting down: %s", context, exc_info=exc)
            return None
        if not isinstance(exc, (PolicyError, RateLimited, ToolError)):
            log.error("the handler of execution %s raised", context.id, exc_info=exc)
        return fail(failure_reason(context.fatal or exc))

    @staticmethod
    def _check_end(output: bytes, state: bytes | None, dispatch: Dispatch) -> None:
        what = "the output" if state is None else "the output with the state"
        wire.check_size(len(output) + len(state or b""), what, wire.MAX_VALUE_BYTES)
        if state is not None and dispatch.lease_timeout_seconds is None:
            raise ValueError("Result(state=…) needs a kernel of generation 3, which keeps sessions")

    def _report(self, report: Callable[[], None], run: Run) -> None:
        lease = run.lease
        try:
            try:
                report()
            except APIError as exc:
                if exc.status_code not in (400, 413):
                    raise
                # The next attempt would come to the same output, and no further.
                log.error("the kernel refuses the output of %s: %s", lease, exc)
                self._kernel.fail(lease.execution_id, lease, failure_reason(exc))
        except APIError as exc:
            log.warning("the kernel did not take the end of %s: %s", lease, exc)
        except NetworkError as exc:
            log.warning("given up, the end cannot be reported: %s: %s", lease, exc)

    def _send_metadata(self, dispatch: Dispatch) -> None:
        """Tell a generation 3 kernel what the agent takes and gives, once per process."""
        sent = self._here().metadata_sent
        if dispatch.lease_timeout_seconds is None or sent.is_set():
            return
        sent.set()
        assert self._binder is not None
        try:
            self._kernel.put_metadata(
                self.description, self._binder.schema(), schema_of(self.output_schema)
            )
        except Exception as exc:
            log.info("the kernel did not take the metadata of %s: %s", self.agent_id, exc)


def from_environment(value: str | None, argument: str, variable: str) -> str:
    """Return an argument, or the environment variable that stands in for it.

    Raises:
        ValueError: neither is given; the message names both.
    """
    found = value if value is not None else os.environ.get(variable)
    if not found:
        raise ValueError(f"pass {argument}=… or set {variable} in the environment")
    return found
