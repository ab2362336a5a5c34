"""The operator's side: create executions, read and watch them, decide approvals (PROTOCOL 9)."""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any
from urllib.parse import urlencode

from . import wire
from .errors import APIError, NetworkError
from .event_stream import data_lines
from .transport import Answer, Resend, Transport, read_model, read_models
from .wire import (
    AgentInfo,
    ApiKey,
    Approval,
    Delta,
    Event,
    Execution,
    PolicyTest,
    Step,
    execution_path,
)

#: For how long a call is tried again while the kernel cannot be reached, in seconds.
PATIENCE = 5.0
_PAGE = 200
_EVENT_PAGE = 1000
_PIECE = 1 << 16
_FIRST_POLL, _LONGEST_POLL = 0.05, 1.0


class Client:
    """Speaks to a kernel as an operator does; a context manager.

    Args:
        base_url: where the kernel is; ``REBUNO_URL`` by default.
        api_key: the bearer token; ``REBUNO_API_KEY`` by default, none if that is not set.
        timeout: how long to wait for an answer, in seconds.

    Raises:
        ValueError: there is no URL, or it is not one.

    Every call raises :class:`~rebuno_sync.NetworkError` when no usable answer came, and the
    subclass of :class:`~rebuno_sync.APIError` for an error status. Reads are tried again for a
    few seconds, as is everything that certainly did not reach the kernel.
    """

    def __init__(
        self, base_url: str | None = None, api_key: str | None = None, *, timeout: float = 35.0
    ) -> None:
        url = base_url or os.environ.get("REBUNO_URL")
        if not url:
            raise ValueError("pass base_url=… or set REBUNO_URL in the environment")
        self._transport = Transport(url, timeout=timeout)
        token = api_key or os.environ.get("REBUNO_API_KEY") or ""
        if not (token.isascii() and token.isprintable()):
            raise ValueError("the api_key has characters in it that no HTTP header can carry")
        self._headers = {"Authorization": f"Bearer {token}"} if token else {}
        self._closed = False

    def __repr__(self) -> str:
        return f"<Client of {self._transport.base_url}>"

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def connect(self, transport: Transport) -> None:
        """Reach the kernel through another transport from now on, as tests do without sockets."""
        self._transport = transport

    def close(self) -> None:
        """End the use of this client; the connections belong to the process and stay pooled."""
        self._closed = True

    # Executions

    def create(
        self,
        agent_id: str,
        input: Any = None,
        *,
        session: str = "",
        parent_execution_id: str = "",
        idempotency_key: str = "",
        spawned_by: Mapping[str, str] | None = None,
        on_behalf_of: str = "",
    ) -> Execution:
        """Start an execution.

        Args:
            agent_id: the agent to run.
            input: its input; anything with a JSON form.
            session, parent_execution_id, spawned_by, on_behalf_of: for kernels of generation 3.
            idempotency_key: creating again under the same key gives the same execution, and
                the call is then tried again whatever happened to it (generation 3).

        Raises:
            TypeError: the input has no JSON form.
            ValueError: the input has more JSON than a kernel takes, 10 MiB; nothing was sent.
            NotFoundError: there is no such agent.
        """
        fields = {
            "session": session,
            "parent_execution_id": parent_execution_id,
            "idempotency_key": idempotency_key,
            "spawned_by": dict(spawned_by) if spawned_by else None,
            "on_behalf_of": on_behalf_of,
        }
        given = {name: value for name, value in fields.items() if value}
        body = wire.encode({"agent_id": agent_id, "input": input, **given}, "execution")
        resend = Resend.ALWAYS if idempotency_key else Resend.NEVER_ARRIVED
        what = f"the input for agent {agent_id}"
        return self._call("POST", "/v0/executions", body, resend, what=what).model(Execution)

    def get(self, execution_id: str) -> Execution:
        """Read an execution."""
        return self._call("GET", execution_path(execution_id)).model(Execution)

    def list(
        self, *, agent_id: str = "", status: str = "", session: str = "", limit: int | None = None
    ) -> Iterator[Execution]:
        """Go through executions, the newest first, a page at a time.

        Args:
            agent_id, status, session: only those that match.
            limit: at most so many.
        """
        query = {"agent_id": agent_id, "status": status, "session": session}
        left = limit if limit is not None else -1
        cursor = ""
        while left:
            page = {**query, "cursor": cursor, "limit": min(left, _PAGE) if left > 0 else _PAGE}
            found = self._call("GET", "/v0/executions" + _query(page)).model(_Page)
            rows = read_models(Execution, found.executions)
            yield from rows if left < 0 else rows[:left]
            left = max(left - len(rows), 0) if left > 0 else left
            cursor = found.next_cursor
            if not cursor or not rows:
                return

    def wait(
        self, execution_id: str, timeout: float | None = None, *, until_blocked: bool = False
    ) -> Execution:
        """Wait until an execution has ended, and return it.

        Args:
            timeout: how long to wait at most, in seconds.
            until_blocked: return also when it waits for an approval.

        Raises:
            TimeoutError: it has not come to that in time.
            NetworkError: the kernel could not be reached; with a ``timeout``, until it was over.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        for pause in _polls(timeout):
            try:
                found = self.get(execution_id)
            except NetworkError:
                # A kernel that restarts is waited for as long as the execution is.
                if deadline is None or time.monotonic() >= deadline:
                    raise
                time.sleep(pause)
                continue
            if found.done or (until_blocked and found.status == "blocked"):
                return found
            time.sleep(pause)
        raise TimeoutError(f"execution {execution_id} is still {found.status} after {timeout:g} s")

    def cancel(self, execution_id: str) -> None:
        """Cancel an execution; raises ``ConflictError`` when it has already ended."""
        self._call("POST", execution_path(execution_id, "cancel"), b"", Resend.NEVER_ARRIVED)

    # What happened

    def events(self, execution_id: str, *, after_seq: int = 0) -> Iterator[Event]:
        """Go through the events recorded so far, in order.

        Args:
            after_seq: begin after this ``event_seq``.
        """
        while True:
            query = _query({"after_seq": after_seq, "limit": _EVENT_PAGE})
            rows = self._call("GET", execution_path(execution_id, "events") + query).models(Event)
            for event in rows:
                after_seq = event.event_seq
                yield event
            if len(rows) < _EVENT_PAGE:
                return

    def watch(
        self, execution_id: str, *, after_seq: int = 0, timeout: float | None = None
    ) -> Iterator[Event]:
        """Go through the events as they happen, until the execution has ended.

        Args:
            after_seq: begin after this ``event_seq``.
            timeout: how long to watch at most, in seconds.

        Raises:
            TimeoutError: the execution has not ended in time.
        """
        ended = False
        deadline = None if timeout is None else time.monotonic() + timeout
        pauses = _polls(None)
        while True:
            # Read the status first: what ends the execution is then among the events read next.
            ended = self.get(execution_id).done
            before = after_seq
            for event in self.events(execution_id, after_seq=after_seq):
                after_seq = event.event_seq
                yield event
            if ended:
                return
            if deadline is not None and time.monotonic() > deadline:
                raise TimeoutError(f"execution {execution_id} has not ended after {timeout:g} s")
            if after_seq > before:
                pauses = _polls(None)
            time.sleep(next(pauses))

    def steps(self, execution_id: str, *, status: str = "") -> Iterator[Step]:
        """Go through the steps of an execution.

        Args:
            status: ``"terminal"`` for those that have an outcome.
        """
        path = execution_path(execution_id, "steps") + _query({"status": status})
        yield from self._call("GET", path).models(Step)

    def step(self, execution_id: str, step_id: str) -> Step:
        """Read one step."""
        return self._call("GET", execution_path(execution_id, "steps", step_id)).model(Step)

    def stream(self, execution_id: str, *, timeout: float = 60.0) -> Iterator[Delta]:
        """Go through the live output of an execution's steps, from now until it is closed.

        Args:
            timeout: the longest silence to bear, in seconds; a kernel sends a sign of life
                every 15.

        Raises:
            NetworkError: the kernel cannot be reached, or fell silent.
        """
        import requests
        from urllib3.exceptions import HTTPError

        self._require_open()
        response = self._transport.open_stream(
            execution_path(execution_id, "stream"),
            {"Accept": "text/event-stream", **self._headers},
            read_timeout=timeout,
        )
        with response:
            try:
                # What is there, be it little: requests itself reads so byte by byte alone.
                pieces = iter(lambda: response.raw.read1(_PIECE, decode_content=True), b"")
                for data in data_lines(pieces):
                    yield read_model(Delta, _decoded(data))
            except ValueError as exc:
                raise NetworkError(f"the live stream makes no sense: {exc}") from None
            except (requests.RequestException, HTTPError, OSError) as exc:
                raise NetworkError(f"the live stream of {execution_id} broke off: {exc}") from exc

    # Approvals

    def approvals(self) -> Iterator[Approval]:
        """Go through the approvals that wait for a decision."""
        yield from self._call("GET", "/v0/approvals").models(Approval)

    def approval(self, approval_id: str) -> Approval:
        """Read one approval."""
        return self._call("GET", f"/v0/approvals/{wire.segment(approval_id)}").model(Approval)

    def grant(self, approval_id: str, *, decided_by: str = "", rationale: str = "") -> None:
        """Let the step run.

        Args:
            decided_by: who decides; must be among the approvers when there are any.
            rationale: why.

        Raises:
            ForbiddenError: ``decided_by`` may not decide this.
            ConflictError: it has already been decided.
        """
        self._decide(approval_id, "grant", decided_by, rationale)

    def deny(self, approval_id: str, *, decided_by: str = "", rationale: str = "") -> None:
        """Refuse the step; the handler sees ``rationale`` as the reason.

        Raises as :meth:`grant` does.
        """
        self._decide(approval_id, "deny", decided_by, rationale)

    def _decide(self, approval_id: str, how: str, decided_by: str, rationale: str) -> None:
        body = wire.encode({"decided_by": decided_by, "rationale": rationale}, "decision")
        path = f"/v0/approvals/{wire.segment(approval_id)}/{how}"
        self._call("POST", path, body, Resend.NEVER_ARRIVED)

    # Agents

    def agents(self) -> Iterator[AgentInfo]:
        """Go through the registered agents."""
        yield from self._call("GET", "/v0/agents").models(AgentInfo)

    def agent(self, agent_id: str) -> AgentInfo:
        """Read one agent."""
        return self._call("GET", f"/v0/agents/{wire.segment(agent_id)}").model(AgentInfo)

    def register_agent(
        self,
        agent_id: str,
        webhook_url: str,
        secret: str,
        *,
        lease_timeout_seconds: float | None = None,
    ) -> AgentInfo:
        """Register an agent, or change its registration.

        Args:
            webhook_url: where the kernel posts dispatches.
            secret: what both sides sign with.
            lease_timeout_seconds: how long its leases last (generation 3); the kernel's by
                default.
        """
        fields: dict[str, Any] = {"id": agent_id, "webhook_url": webhook_url, "secret": secret}
        if lease_timeout_seconds is not None:
            fields["lease_timeout_seconds"] = lease_timeout_seconds
        body = wire.encode(fields, "agent")
        return self._call("POST", "/v0/agents", body).model(AgentInfo)

    def delete_agent(self, agent_id: str) -> None:
        """Remove an agent."""
        path = f"/v0/agents/{wire.segment(agent_id)}"
        self._call("DELETE", path, b"", Resend.NEVER_ARRIVED)

    def set_policy(self, agent_id: str, bundle: str) -> None:
        """Replace an agent's policy.

        Args:
            bundle: the YAML text (PROTOCOL 8).

        Raises:
            ValidationError: the bundle is refused; the message names the rule, and the old
                one stays.
        """
        body = wire.encode({"bundle": bundle}, "policy")
        self._call("POST", f"/v0/policies/{wire.segment(agent_id)}", body)

    def test_policy(
        self, agent_id: str, cases: Sequence[Mapping[str, Any]], *, bundle: str | None = None
    ) -> PolicyTest:
        """Ask what a policy says to some steps; nothing is recorded, and no limit counts them.

        Args:
            cases: an object for each: ``target``, and as wanted ``kind`` (``tool_call`` by
                default), ``args``, ``agent_id``, ``name``, and ``expect``: a decision, or an
                object of ``decision``, ``rule`` and ``reason``.
            bundle: the YAML text to try; the agent's policy by default.

        Raises:
            ValidationError: a case or the bundle is malformed; the message names it.
            NotFoundError: the agent's policy is meant, and there is no such agent.
        """
        fields: dict[str, Any] = {"cases": [dict(case) for case in cases]}
        if bundle is not None:
            fields["bundle"] = bundle
        path = f"/v0/policies/{wire.segment(agent_id)}/test"
        return self._call("POST", path, wire.encode(fields, "policy test")).model(PolicyTest)

    # API keys

    def api_keys(self) -> Iterator[ApiKey]:
        """Go through the API keys, without their tokens."""
        yield from self._call("GET", "/v0/api-keys").models(ApiKey)

    def create_api_key(self, name: str, scopes: Sequence[str]) -> ApiKey:
        """Make an API key. Its ``token`` is told here and never again.

        Args:
            name: what it is for.
            scopes: what it may do, such as ``executions:read``.

        Raises:
            ForbiddenError: the caller lacks one of the scopes, or may not make keys.
            ValidationError: there is no such scope.
        """
        body = wire.encode({"name": name, "scopes": list(scopes)}, "key")
        return self._call("POST", "/v0/api-keys", body, Resend.NEVER_ARRIVED).model(ApiKey)

    def delete_api_key(self, key_id: str) -> None:
        """Delete an API key; its token is worth nothing from then on."""
        path = f"/v0/api-keys/{wire.segment(key_id)}"
        self._call("DELETE", path, b"", Resend.NEVER_ARRIVED)

    def health(self) -> bool:
        """Tell whether a kernel answers, now, and is ready to work."""
        try:
            self._call("GET", "/v0/ready", patience=0.0)
        except (NetworkError, APIError):
            return False
        return True

    def _call(
        self,
        method: str,
        path: str,
        body: bytes = b"",
        resend: Resend = Resend.ALWAYS,
        patience: float | None = None,
        what: str = "",
    ) -> Answer:
        self._require_open()
        wire.check_size(len(body), what or f"the body of {method} {path}")
        headers = dict(self._headers)
        if body:
            headers["Content-Type"] = "application/json"
        answer = self._transport.request(
            method,
            path,
            body,
            lambda target: headers,
            resend=resend,
            patience=PATIENCE if patience is None else patience,
        )
        return answer.raise_for_status()

    def _require_open(self) -> None:
        if self._closed:
            raise RuntimeError("this client is closed")


@dataclasses.dataclass(frozen=True)
class _Page(wire.Model):
    executions: Any = None
    next_cursor: str = ""


def _decoded(data: bytes) -> Any:
    try:
        return wire.decode(data)
    except ValueError as exc:
        raise NetworkError(f"the live stream makes no sense: {exc}") from None


def _query(fields: Mapping[str, Any]) -> str:
    given = {name: value for name, value in fields.items() if value not in ("", None)}
    return "?" + urlencode(given) if given else ""


def _polls(timeout: float | None) -> Iterator[float]:
    """Yield growing pauses, and once more when the time is up, for a last look."""
    deadline = None if timeout is None else time.monotonic() + timeout
    pause = _FIRST_POLL
    while True:
        left = pause if deadline is None else deadline - time.monotonic()
        yield max(min(pause, left), 0.0)
        if left <= 0:
            return
        pause = min(pause * 1.5, _LONGEST_POLL)
