"""An agent: verifies webhooks and runs one dispatch after the other. Knows no web framework.

A dispatch goes: :meth:`AgentCore.deliver` verifies the raw body and queues it
(:mod:`.workers`); a worker thread reads the execution, binds its input (:mod:`.inputs`) and
calls the handler within an :class:`~.context.ExecutionContext`; what comes of it is reported as
PROTOCOL 5 says.
"""

from __future__ import annotations

import contextlib
import contextvars
import logging
import os
import time
from collections.abc import Callable
from typing import Any, TypeVar

from . import wire
from .agent_secrets import Given, Secrets
from .claims import Claims
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
from .functions import require_plain_function
from .inputs import InputBinder, InputInvalid, schema_of
from .kernel_client import KernelClient, Signature
from .lease import Heartbeats
from .processes import Part, this_process
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


_ANSWERS = {
    Acceptance.TAKEN: (202, "taken"),
    Acceptance.REPEATED: (202, "already held"),
    Acceptance.CLAIMED: (202, "held by another process"),
    Acceptance.FULL: (503, "the queue of this process is full"),
    Acceptance.CLOSING: (503, "this process is shutting down"),
}


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


class AgentCore:
    """The agent without a web server; :class:`rebuno_sync.Agent` adds the ways in.

    Args:
        agent_id: the id under which the agent is registered at the kernel.
        secret: the secret shared with the kernel. A list of them while one is being replaced:
            each verifies webhooks, the first signs. A :class:`pathlib.Path` of a file with one a
            line, which is read again when it changes. By default what ``REBUNO_AGENT_SECRET``
            holds, or the file that ``REBUNO_AGENT_SECRET_FILE`` names.
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
        max_queue: how many dispatches may wait in a process beyond those that run. When the
            queue is full, a webhook is answered 503 with ``Retry-After``, and the kernel delivers
            it again (PROTOCOL 7).

    Raises:
        ValueError: an argument makes no sense, or is neither given nor in the environment.
        OSError: a file of secrets cannot be read.
    """

    def __init__(
        self,
        agent_id: str,
        *,
        secret: Given = None,
        base_url: str | None = None,
        webhook_path: str = "/webhook",
        kernel_timeout: float = 35.0,
        max_concurrency: int = 32,
        shutdown_timeout: float = 25.0,
        signature: Signature = "auto",
        description: str | None = None,
        output_schema: Any = None,
        max_queue: int = 1000,
    ) -> None:
        if not isinstance(agent_id, str) or not agent_id:
            raise ValueError(f"agent_id is non-empty text, not {agent_id!r}")
        if not (agent_id.isascii() and agent_id.isprintable()):
            raise ValueError(f"agent_id is sent as an HTTP header, which takes ASCII: {agent_id!r}")
        if not webhook_path.startswith("/"):
            raise ValueError(f"webhook_path begins with '/': {webhook_path!r}")
        if type(max_concurrency) is not int or max_concurrency < 1:
            raise ValueError(f"max_concurrency is a number from 1 up, not {max_concurrency!r}")
        if type(max_queue) is not int or max_queue < 0:
            raise ValueError(f"max_queue is a number from 0 up, not {max_queue!r}")
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
        self.max_queue = max_queue
        self.shutdown_timeout = shutdown_timeout
        self.description = description
        self.output_schema = output_schema
        self._secrets = Secrets(secret)
        url = from_environment(base_url, "base_url", "REBUNO_URL")
        self._signature: Signature = signature
        self.connect(Transport(url, timeout=kernel_timeout))
        self._connected = False
        self._binder: InputBinder | None = None
        self._part: Part | None = None
        self._refused_at = -_QUIET_SECONDS

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.agent_id!r}>"

    def connect(self, transport: Transport) -> None:
        """Reach the kernel through another transport from now on, as tests do without sockets."""
        self._kernel = KernelClient(self.agent_id, self._secrets, transport, self._signature)
        self._kernel_url = transport.base_url
        self._connected = True

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
        if signature is None or not self._secrets.verify(body, signature):
            self._note_refused(signature is None)
            return 401, ""
        try:
            dispatch = Dispatch.from_json(wire.decode(body))
        except ValueError as exc:
            return 400, f"this is not a dispatch: {exc}"
        if self._binder is None:
            return 503, "this agent has no handler yet; give it one with agent.bind(fn)"
        if this_process().refusing:
            return 503, "this process is ending"
        accepted = self._here().workers.accept(dispatch, scope)
        return _ANSWERS[accepted]

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

    def _here(self) -> Part:
        part = self._part
        if part is None or part.pid != os.getpid():
            part = self._part = this_process().part(part, self._make_part)
        return part

    def _make_part(self) -> Part:
        # A kernel that was connected lives in this process and delivers to no other.
        claims = None if self._connected else Claims(self.agent_id, self._kernel_url)
        workers = Workers(
            self._run_dispatch,
            Heartbeats(self._beat, f"rebuno-heartbeat-{self.agent_id}"),
            f"rebuno-{self.agent_id}",
            limit=self.max_concurrency,
            queue_limit=self.max_queue,
            claims=claims,
        )
        return Part(workers, self.shutdown_timeout)

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
        if this_process().refusing or self._here().workers.closing:
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
