"""An agent: verifies webhooks and runs one dispatch after the other. Knows no web framework.

A dispatch goes: :meth:`AgentCore.deliver` verifies the raw body and queues it
(:mod:`.workers`); a worker thread makes an :class:`~.attempt.Attempt` of it.
"""

from __future__ import annotations

import contextlib
import contextvars
import logging
import os
import time
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from . import observers, wire
from .agent_secrets import Given, Secrets
from .attempt import Attempt
from .claims import Claims
from .functions import require_plain_function
from .inputs import InputBinder, schema_of
from .kernel_client import KernelClient, Signature
from .lease import Heartbeats
from .processes import Part, this_process
from .transport import Transport
from .uwsgi import no_threads
from .wire import Dispatch
from .workers import Acceptance, Run, Scope, Workers

log = logging.getLogger(__name__)

H = TypeVar("H", bound=Callable[..., Any])

#: Webhook bodies have four short fields; more bytes than this are refused with 413.
MAX_WEBHOOK_BYTES = 64 * 1024
#: Webhooks refused for their signature are logged no more often than this, in seconds.
_QUIET_SECONDS = 10.0
#: What the log says of those. The kernel signs whatever it sends: what is not signed came from
#: somebody else, such as a probe, and tells nothing of secrets.
_REFUSALS = {
    "unsigned": (logging.INFO, "it has no signature, so no kernel sent it"),
    "signature": (
        logging.WARNING,
        "its signature is wrong. If the kernel sent it, the agent is registered there with another "
        "secret than this process has",
    ),
}
_NO_HEADERS: Mapping[str, str] = {}
#: What is answered, and what observers are told: the outcome and a reason.
_ANSWERS = {
    Acceptance.TAKEN: (202, "taken", "taken", ""),
    Acceptance.REPEATED: (202, "already held", "repeated", ""),
    Acceptance.CLAIMED: (202, "held by another process", "repeated", "claimed"),
    Acceptance.FULL: (503, "the queue of this process is full", "refused", "queue_full"),
    Acceptance.CLOSING: (503, "this process is shutting down", "refused", "closing"),
}


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
        ValueError: an argument makes no sense, or is neither given nor in the environment, or a
            file of secrets cannot be read.
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
        if agent_id in (".", ".."):
            raise ValueError(f"agent_id is part of paths, where {agent_id!r} means something else")
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
        # Each for itself: anybody can send unsigned ones, and must not silence the warning.
        self._noted_at = dict.fromkeys(_REFUSALS, -_QUIET_SECONDS)

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
        self,
        body: bytes,
        signature: str | None,
        scope: Scope = contextlib.nullcontext,
        headers: Mapping[str, str] = _NO_HEADERS,
    ) -> tuple[int, str]:
        """Take one webhook; answer with a status and a text for whoever reads the kernel's log.

        Args:
            body: the raw body, exactly as it came.
            signature: the ``Rebuno-Signature`` header, if there was one.
            scope: entered around the handler, such as a Flask app's ``app_context``.
            headers: all headers, whatever their case; a trace may go on from them.
        """
        if len(body) > MAX_WEBHOOK_BYTES:
            text = f"a dispatch has at most {MAX_WEBHOOK_BYTES} bytes"
            return self._refused("too_large", 413, text)
        if not signature:
            self._note_refused("unsigned")
            return self._refused("unsigned", 401)
        if not self._secrets.verify(body, signature):
            self._note_refused("signature")
            return self._refused("signature", 401)
        try:
            dispatch = Dispatch.from_json(wire.decode(body))
        except ValueError as exc:
            return self._refused("malformed", 400, f"this is not a dispatch: {exc}")
        if self._binder is None:
            text = "this agent has no handler yet; give it one with agent.bind(fn)"
            return self._refused("no_handler", 503, text)
        if unfit := no_threads():
            log.error("a dispatch for agent %s was refused: %s", self.agent_id, unfit)
            return self._refused("no_threads", 503, unfit)
        if this_process().refusing:
            return self._refused("closing", 503, "this process is ending")
        carrier = observers.carried(headers) if observers.installed else _NO_HEADERS
        accepted = self._here().workers.accept(dispatch, scope, carrier)
        status, text, outcome, reason = _ANSWERS[accepted]
        observers.tell("delivered", self.agent_id, outcome, reason)
        return status, text

    def _refused(self, reason: str, status: int, text: str = "") -> tuple[int, str]:
        observers.tell("delivered", self.agent_id, "refused", reason)
        return status, text

    def _note_refused(self, reason: str) -> None:
        """Say in the log that a webhook was refused, but not as often as somebody might send it."""
        now = time.monotonic()
        if now - self._noted_at[reason] < _QUIET_SECONDS:
            return
        self._noted_at[reason] = now
        level, why = _REFUSALS[reason]
        log.log(level, "a webhook for agent %s was refused: %s", self.agent_id, why)

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
            part = this_process().part(lambda: self._part, self._make_part)
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
            agent_id=self.agent_id,
        )
        self._part = Part(workers, self.shutdown_timeout)
        return self._part

    def _beat(self, lease: Any, timeout: float) -> None:
        self._kernel.heartbeat(lease.execution_id, lease, timeout)

    # One dispatch

    def _run_dispatch(self, run: Run) -> None:
        """Run the handler for one dispatch and report what came of it."""
        # A context of its own: what one handler sets must not reach the next on this thread.
        contextvars.Context().run(self._run_attempt, run)

    def _run_attempt(self, run: Run) -> None:
        assert self._binder is not None
        attempt = Attempt(self.agent_id, self._kernel, self._binder, run, self._is_ending)
        attempt.run()
        if attempt.called:
            self._send_metadata(run.dispatch)

    def _is_ending(self) -> bool:
        return this_process().refusing or self._here().workers.closing

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
