"""What an agent says to its kernel: every route of PROTOCOL 4, signed as PROTOCOL 3 says."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping
from email.utils import parsedate_to_datetime
from typing import Any, Literal

from . import signing, wire
from .agent_secrets import Secrets
from .errors import NotFoundError, safe_text
from .lease import Lease, now
from .transport import Answer, Resend, Transport, is_transient
from .wire import execution_path

log = logging.getLogger(__name__)

Signature = Literal["auto", "body", "v1"]
#: For how long reads at the start of a dispatch are tried again, in seconds.
READ_PATIENCE = 60.0


class KernelClient:
    """Speaks for one agent to one kernel.

    Args:
        agent_id: the agent's id.
        secrets: the agent's secrets; the first signs, and when the kernel does not know it (yet,
            or any more) the next one that it knows.
        transport: how to reach the kernel.
        signature: ``"body"`` or ``"v1"`` to pin one; ``"auto"`` begins with the body signature,
            moves to the request signature on a 401 and never back.
    """

    def __init__(
        self,
        agent_id: str,
        secrets: Secrets,
        transport: Transport,
        signature: Signature = "auto",
    ) -> None:
        self.agent_id = agent_id
        self._secrets = secrets
        # What the kernel took last, so that a secret it does not know is not tried each time.
        self._accepted: str | None = None
        self._transport = transport
        self._may_step_up = signature == "auto"
        self._signs_request = signature == "v1"
        # How far the kernel's clock is ahead of this machine's, as far as it matters.
        self._clock_offset = 0.0

    # Reads

    def execution(self, execution_id: str, lease: Lease) -> wire.Execution:
        """Read an execution; raises as :meth:`_call` does."""
        answer = self._call(
            "GET", execution_path(execution_id), lease=lease, patience=READ_PATIENCE
        )
        return answer.model(wire.Execution)

    def terminal_steps(self, execution_id: str, lease: Lease) -> list[wire.Step]:
        """Read the steps that have an outcome."""
        path = execution_path(execution_id, "steps") + "?status=terminal"
        answer = self._call("GET", path, lease=lease, patience=READ_PATIENCE)
        return answer.models(wire.Step)

    def step(self, execution_id: str, step_id: str, lease: Lease) -> wire.Step:
        """Read one step."""
        path = execution_path(execution_id, "steps", step_id)
        return self._call("GET", path, lease=lease, patience=READ_PATIENCE).model(wire.Step)

    def previous(self, execution_id: str, lease: Lease) -> Any:
        """Read the state that the previous turn of the session left.

        ``None`` without one, and from kernels before generation 3, which have no sessions.
        """
        path = execution_path(execution_id, "previous")
        try:
            answer = self._call("GET", path, lease=lease, patience=READ_PATIENCE)
        except NotFoundError:
            return None
        data = answer.json()
        return data.get("state") if isinstance(data, dict) else None

    # Steps

    def submit(
        self,
        execution_id: str,
        lease: Lease,
        kind: wire.Kind,
        target: str,
        args: bytes,
        idempotency: wire.Idempotency,
    ) -> wire.Decision:
        """Submit a step and return the decision. Sent again only when it never arrived.

        Args:
            args: the JSON of the arguments, exactly as it shall be hashed.
        """
        body = b'{"kind":"%s","target":%s,"args":%s,"idempotency":"%s"}' % (
            kind.value.encode(),
            wire.encode(target, "the name"),
            args,
            idempotency.value.encode(),
        )
        answer = self._call(
            "POST",
            execution_path(execution_id, "steps"),
            body,
            lease=lease,
            mutates=True,
            resend=Resend.NEVER_ARRIVED,
            patience=lease.timeout,
            what=f"the step {target!r:.200} with its arguments",
        )
        return answer.model(wire.Decision)

    def complete_step(
        self, execution_id: str, lease: Lease, step_id: str, result: bytes
    ) -> wire.Decision:
        """Report the JSON result of a step."""
        return self._settle(execution_id, lease, step_id, "complete", b'{"result":%s}' % result)

    def fail_step(
        self, execution_id: str, lease: Lease, step_id: str, error: bytes
    ) -> wire.Decision:
        """Report the JSON error of a step."""
        return self._settle(execution_id, lease, step_id, "fail", b'{"error":%s}' % error)

    def _settle(
        self, execution_id: str, lease: Lease, step_id: str, how: str, body: bytes
    ) -> wire.Decision:
        path = execution_path(execution_id, "steps", step_id, how)
        answer = self._call(
            "POST",
            path,
            body,
            lease=lease,
            mutates=True,
            patience=lease.timeout,
            what=f"the {'result' if how == 'complete' else 'error'} of step {step_id}",
        )
        decision = answer.model(wire.Decision)
        if decision.decision == "replay" and not {"result", "error"} & answer.json().keys():
            # Old kernels say that there is an outcome already, and not which.
            step = self.step(execution_id, step_id, lease)
            return wire.Decision("replay", step_id, result=step.result, error=step.error)
        return decision

    def stream(self, execution_id: str, lease: Lease, step_id: str, seq: int, data: str) -> None:
        """Send one piece of live output, at most 7000 bytes of UTF-8; one try only."""
        body = wire.encode({"seq": seq, "data": data}, "delta")
        path = execution_path(execution_id, "steps", step_id, "stream")
        self._call("POST", path, body, lease=lease, mutates=True)

    # The dispatch

    def heartbeat(self, execution_id: str, lease: Lease, timeout: float) -> None:
        """Renew the lease; one try of at most ``timeout`` seconds."""
        path = execution_path(execution_id, "heartbeat")
        self._call("POST", path, lease=lease, mutates=True, timeout=timeout)

    def complete(self, execution_id: str, lease: Lease, output: bytes, state: bytes | None) -> None:
        """End the execution with its JSON output, and the state for the next turn if any."""
        tail = b"" if state is None else b',"state":' + state
        body = b'{"output":%s%s}' % (output, tail)
        path = execution_path(execution_id, "complete")
        self._call("POST", path, body, lease=lease, mutates=True, patience=lease.timeout)

    def fail(self, execution_id: str, lease: Lease, reason: str) -> None:
        """End the execution as failed, with the text that people group by."""
        body = wire.encode({"error": safe_text(reason)}, "failure")
        path = execution_path(execution_id, "fail")
        self._call("POST", path, body, lease=lease, mutates=True, patience=lease.timeout)

    def put_metadata(self, description: str | None, input_schema: Any, output_schema: Any) -> None:
        """Tell the kernel what the agent takes and gives (generation 3)."""
        body = wire.encode(
            {
                "description": description,
                "input_schema": input_schema,
                "output_schema": output_schema,
            },
            "metadata",
        )
        path = f"/v0/agents/{wire.segment(self.agent_id)}/metadata"
        self._call("PUT", path, body, what=f"the metadata of agent {self.agent_id}")

    # One call

    def _call(
        self,
        method: str,
        path: str,
        body: bytes = b"",
        *,
        lease: Lease | None = None,
        mutates: bool = False,
        resend: Resend = Resend.ALWAYS,
        patience: float = 0.0,
        timeout: float | None = None,
        what: str = "",
    ) -> Answer:
        """Send one signed request.

        Args:
            what: what the body is, for the message when it is too large.

        Raises:
            ValueError: the body is larger than the kernel takes; nothing is sent.
            NetworkError: no usable answer came.
            APIError: the kernel answered with an error status.
        """
        wire.check_size(len(body), what or f"the body of {method} {path}")

        sent_at = now()

        def send(secret: str, v1: bool) -> Answer:
            def headers(target: str) -> Mapping[str, str]:
                nonlocal sent_at
                sent_at = now()
                held = lease if mutates else None
                return self._headers(method, target, body, held, secret, v1)

            return self._transport.request(
                method,
                path,
                body,
                headers,
                resend=resend,
                patience=patience,
                stop=lease.cancelled if lease is not None else None,
                timeout=timeout,
            )

        for secret, v1 in self._credentials():
            # A 401 says that nothing was done, whatever the request was.
            offset = self._clock_offset
            answer = send(secret, v1)
            if answer.status == 401 and v1 and self._takes_clock_of(answer, offset):
                answer = send(secret, v1)
            if answer.status != 401:
                if not is_transient(answer.status):
                    self._accepted = secret
                    # Never back: another thread may have moved on meanwhile.
                    self._signs_request |= v1
                break
        answer.raise_for_status()
        if mutates and lease is not None:
            lease.renewed(sent_at)
        return answer

    def _credentials(self) -> Iterator[tuple[str, bool]]:
        """Yield each secret and signature that may be tried, the likeliest first."""
        secrets, signs_request = self._secrets.all(), self._signs_request
        # False sorts before True, and the rest stays in its order.
        for secret in sorted(secrets, key=lambda each: each != self._accepted):
            yield secret, signs_request
            if self._may_step_up and not signs_request:
                yield secret, True

    def _takes_clock_of(self, refusal: Answer, signed_by: float) -> bool:
        """Tell whether a request was refused for its time; sign by the kernel's from then on.

        Args:
            refusal: the kernel's 401.
            signed_by: the offset by which the refused request was signed.
        """
        try:
            told = parsedate_to_datetime(refusal.headers.get("date", "")).timestamp()
        except ValueError:
            return False
        offset = told - time.time()
        if abs(offset - signed_by) < signing.MAX_CLOCK_SKEW / 2:
            return False
        log.warning(
            "the kernel's clock is %.0f s off this machine's; requests are signed by the kernel's",
            offset,
        )
        self._clock_offset = offset
        return True

    def _headers(
        self,
        method: str,
        target: str,
        body: bytes,
        lease: Lease | None,
        secret: str,
        v1: bool,
    ) -> Mapping[str, str]:
        headers = {
            "Content-Type": "application/json",
            wire.AGENT_ID_HEADER: self.agent_id,
        }
        dispatch_id = attempt = ""
        if lease is not None:
            headers[wire.DISPATCH_ID_HEADER] = dispatch_id = lease.dispatch_id
            if lease.attempt is not None:
                headers[wire.DISPATCH_ATTEMPT_HEADER] = attempt = str(lease.attempt)
        if v1:
            headers[wire.TIMESTAMP_HEADER] = timestamp = str(int(time.time() + self._clock_offset))
            headers[wire.SIGNATURE_HEADER] = signing.sign_request(
                secret,
                method,
                target,
                timestamp,
                body,
                dispatch_id=dispatch_id,
                dispatch_attempt=attempt,
            )
        else:
            headers[wire.SIGNATURE_HEADER] = signing.sign_body(secret, body)
        return headers
