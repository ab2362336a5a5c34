"""The scripted kernel: checks each request as its generation does, and lets a test step in."""

from __future__ import annotations

import http.client
import json
import re
import threading
import time
import uuid
from collections.abc import Callable
from types import TracebackType
from typing import Any
from urllib.parse import parse_qs, urlsplit

from rebuno_sync import signing
from tests.scripted import state
from tests.scripted.generations import Generation
from tests.scripted.http import Answer, Raw, Recorded, Server
from tests.scripted.routes import METADATA, ROUTES
from tests.scripted.state import Approval, Execution, Step, Verdict

#: The calls that only the agent makes, under its signature.
_AGENT_CALLS = frozenset(
    {
        "submit",
        "step_complete",
        "step_fail",
        "stream",
        "heartbeat",
        "complete",
        "fail",
        "metadata",
    }
)

Interceptor = Callable[[Recorded], Answer | None]
Decider = Callable[[dict[str, Any]], dict[str, Any] | None]


class _Refused(Exception):
    def __init__(self, status: int, code: str, message: str = "") -> None:
        super().__init__(code)
        self.answer = Answer.error(status, code, message)


def _invalid(message: str = "") -> _Refused:
    return _Refused(400, "validation_error", f"validation error{message and ': '}{message}")


def members(body: bytes) -> dict[str, str]:
    """Split a JSON object into its members, each as the very text that was sent."""
    text = body.decode("utf-8")
    decoder = json.JSONDecoder(parse_int=str, parse_float=str)
    value, end = decoder.raw_decode(text)
    if not isinstance(value, dict) or text[end:].strip():
        raise ValueError("not an object")
    found: dict[str, str] = {}
    at = text.index("{") + 1
    while len(found) < len(value):
        key_at = text.index('"', at)
        key, at = decoder.raw_decode(text, key_at)
        start = re.compile(r"\s*:\s*").match(text, at).end()  # type: ignore[union-attr]
        _, at = decoder.raw_decode(text, start)
        found[key] = text[start:at]
    return found


class ScriptedKernel:
    """A kernel of one generation on a free port, driven by the test.

    Nothing happens by itself: the test creates executions (:meth:`create`) and delivers them
    (:meth:`deliver`). ``policy`` decides new steps; :meth:`intercept` answers a request before
    anything is checked; :meth:`decide_steps` answers a submission after everything was.

    Attributes:
        agent_url: where webhooks go; set it before :meth:`deliver`.
        requests: every request, oldest first, with its ``call`` name and its answer.
    """

    def __init__(
        self,
        generation: Generation,
        *,
        agent_id: str = "a1",
        secret: str = "orchard-secret",
        lease_timeout: float = 120.0,
        policy: Callable[[str, str, Any], Verdict] | None = None,
    ) -> None:
        self.generation = generation
        self.agent_id = agent_id
        self.secret = secret
        self.lease_timeout = lease_timeout
        self.policy = policy or (lambda kind, target, args: Verdict())
        self.agent_url = ""
        self.requests: list[Recorded] = []
        self.executions: dict[str, Execution] = {}
        self.agents: dict[str, dict[str, Any]] = {}
        self._register(agent_id, "")
        self._interceptors: list[Interceptor] = []
        self._deciders: list[Decider] = []
        self._changed = threading.Condition(threading.RLock())
        self._server = Server(self._respond)
        routes = (*ROUTES, METADATA) if generation.number == 3 else ROUTES
        self._routes = [(call, method, re.compile(path)) for call, method, path in routes]

    @property
    def url(self) -> str:
        """The address that agents and clients are given."""
        return self._server.url

    def close(self) -> None:
        """Stop serving; raises what went wrong inside, if anything did."""
        self._server.close()

    def __enter__(self) -> ScriptedKernel:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        exc: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    # What the test does

    def intercept(self, interceptor: Interceptor) -> None:
        """Let ``interceptor`` see each request first; its answer, unless ``None``, is sent."""
        self._interceptors.append(interceptor)

    def decide_steps(self, decider: Decider) -> None:
        """Let ``decider`` answer well-formed submissions; ``None`` leaves it to the state."""
        self._deciders.append(decider)

    def create(self, input: Any = None) -> Execution:
        """Create an execution; its dispatch waits for :meth:`deliver`."""
        with self._changed:
            run = state.create(self.agent_id, Raw(json.dumps(input)))
            self.executions[run.id] = run
            return run

    def deliver(self, run: Execution) -> Answer:
        """Claim the dispatch for its next attempt, POST the webhook, return what came back."""
        self.take(run)
        answer = self.post_webhook(self.webhook_body(run), run.id)
        with self._changed:
            acked = 200 <= answer.status < 300
            run.log_dispatch(*(("dispatch.acked", "acked") if acked else _FAILED))
        return answer

    def take(self, run: Execution) -> None:
        """Claim the dispatch for its next attempt without telling the agent."""
        with self._changed:
            state.claim(run)
            self._changed.notify_all()

    def webhook_body(self, run: Execution) -> bytes:
        """The webhook of the current attempt."""
        body: dict[str, Any] = {"execution_id": run.id, "dispatch_id": run.dispatch_id}
        if self.generation.sends_attempt:
            body["dispatch_attempt"] = run.attempt
        if self.generation.sends_lease_timeout:
            body["lease_timeout_seconds"] = self.lease_timeout
        return json.dumps(body, separators=(",", ":")).encode("utf-8")

    def post_webhook(
        self, body: bytes, execution_id: str, *, signature: str | None = None
    ) -> Answer:
        """POST ``body`` to the agent, signed unless a signature is given."""
        url = urlsplit(self.agent_url)
        connection = http.client.HTTPConnection(url.hostname or "", url.port, timeout=30)
        try:
            headers = {
                "Content-Type": "application/json",
                "Rebuno-Execution-Id": execution_id,
                "Rebuno-Signature": signing.sign_body(self.secret, body)
                if signature is None
                else signature,
                "User-Agent": "Go-http-client/1.1",
            }
            connection.request("POST", url.path, body, headers)
            response = connection.getresponse()
            return Answer(response.status, response.read(), response.getheader("Content-Type", ""))
        finally:
            connection.close()

    def decide(self, approval: Approval, *, grant: bool, by: str = "ann", why: str = "") -> None:
        """Settle an approval; the execution is dispatched anew by :meth:`deliver`."""
        with self._changed:
            state.decide(self._run_of(approval), approval, grant, by, why)

    def expire(self, approval: Approval) -> None:
        """Let the time of an approval run out."""
        with self._changed:
            state.expire(self._run_of(approval), approval)

    def _run_of(self, approval: Approval) -> Execution:
        return next(r for r in self.executions.values() if approval.id in r.approvals)

    def cancel(self, run: Execution) -> None:
        """Cancel an execution."""
        with self._changed:
            state.cancel(run)

    def wait_for(self, condition: Callable[[], Any], timeout: float = 30.0) -> None:
        """Wait until ``condition``, asked anew after each request, holds.

        Raises:
            TimeoutError: it did not, within ``timeout`` seconds; the message lists the calls.
        """
        with self._changed:
            if not self._changed.wait_for(condition, timeout):
                raise TimeoutError(f"it never came true; calls so far: {self.calls()}")

    def calls(self, *names: str) -> list[str]:
        """The names of the calls so far, oldest first, or of those among ``names``."""
        return [r.call for r in self.requests if not names or r.call in names]

    def sent(self, call: str) -> list[Recorded]:
        """The requests of one call, oldest first."""
        return [r for r in self.requests if r.call == call]

    # What the agent gets

    def _respond(self, request: Recorded) -> Answer:
        call, found, refusal = self._route(request)
        request.call = call
        with self._changed:
            answer = next((a for i in self._interceptors if (a := i(request))), None)
            if answer is None:
                try:
                    answer = refusal or self._checked(call, request, found)
                except _Refused as exc:
                    answer = exc.answer
            request.answer = answer
            self.requests.append(request)
            self._changed.notify_all()
        return answer

    def _route(self, request: Recorded) -> tuple[str, dict[str, str], Answer | None]:
        same_path = False
        for call, method, pattern in self._routes:
            if match := pattern.fullmatch(request.path):
                if method == request.method:
                    return call, match.groupdict(), None
                same_path = True
        if same_path:
            return "unknown", {}, Answer(405)
        return "unknown", {}, Answer(404, b"404 page not found\n", "text/plain; charset=utf-8")

    def _checked(self, call: str, request: Recorded, found: dict[str, str]) -> Answer:
        if call in _AGENT_CALLS or request.headers.get("Rebuno-Agent-Id"):
            self._check_signature(request)
        if "id" in found:
            try:
                uuid.UUID(found["id"])
            except ValueError:
                raise _invalid() from None
            if found["id"] not in self.executions:
                raise _Refused(404, "not_found")
        run = self.executions.get(found.get("id", ""))
        if run is None:
            return self._admin(call, request, found)
        if call in ("read", "steps", "step", "events", "cancel"):
            return self._read(call, request, run, found)
        fields = self._fields(call, request)
        if call == "submit":
            return self._submit(request, run, fields)
        step = self._step(run, found) if "step" in found else None
        self._check_lease(call, request, run)
        if step is not None:
            return self._step_call(call, run, step, fields)
        return self._end_call(call, run, fields)

    def _check_signature(self, request: Recorded) -> None:
        headers = request.headers
        given = headers.get("Rebuno-Signature", "")
        if self.generation.signature_prefix == signing.BODY_PREFIX:
            expected = signing.sign_body(self.secret, request.body)
        else:
            timestamp = headers.get("Rebuno-Timestamp", "")
            if not timestamp.isdecimal() or abs(time.time() - int(timestamp)) > 300:
                raise _Refused(401, "unauthorized")
            expected = signing.sign_request(
                self.secret,
                request.method,
                request.target,
                timestamp,
                request.body,
                dispatch_id=headers.get("Rebuno-Dispatch-Id", ""),
                dispatch_attempt=headers.get("Rebuno-Dispatch-Attempt", ""),
            )
        if headers.get("Rebuno-Agent-Id") != self.agent_id or given != expected:
            raise _Refused(401, "unauthorized")

    def _fields(self, call: str, request: Recorded) -> dict[str, str]:
        allowed = self.generation.fields(call)
        if not allowed:
            if request.body:
                raise _invalid()
            return {}
        try:
            fields = members(request.body)
        except ValueError:
            raise _invalid() from None
        if not allowed.issuperset(fields):
            raise _invalid()
        return fields

    def _check_lease(self, call: str, request: Recorded, run: Execution) -> None:
        if not self.generation.checks_lease:
            return
        if call == "stream" and self.generation.number < 3:
            return
        dispatch, attempt = (
            request.headers.get(name, "")
            for name in ("Rebuno-Dispatch-Id", "Rebuno-Dispatch-Attempt")
        )
        try:
            uuid.UUID(dispatch)
        except ValueError:
            raise _invalid("missing dispatch_id") from None
        if not attempt.isdecimal() or int(attempt) < 1:
            raise _invalid("missing dispatch_attempt")
        if run.status in state.TERMINAL:
            return
        good = dispatch == run.dispatch_id and int(attempt) == run.attempt
        # A body that ran when the execution blocked may still record its outcome.
        if call not in ("step_complete", "step_fail"):
            good = good and run.in_flight and (run.status == "running" or call == "submit")
        if not good:
            raise _Refused(409, "lease_superseded")

    def _submit(self, request: Recorded, run: Execution, fields: dict[str, str]) -> Answer:
        if self.generation.checks_lease:
            self._check_lease("submit", request, run)
        else:
            self._check_dispatch(request, run)
        submission = {name: json.loads(text) for name, text in fields.items()}
        for decider in self._deciders:
            if (told := decider(submission)) is not None:
                return Answer.json(told)
        return Answer.json(state.submit(run, fields, self.policy))

    def _check_dispatch(self, request: Recorded, run: Execution) -> None:
        dispatch = request.headers.get("Rebuno-Dispatch-Id", "")
        if not dispatch:
            raise _invalid("missing dispatch_id")
        try:
            uuid.UUID(dispatch)
        except ValueError:
            raise _invalid() from None
        if dispatch in (run.dispatch_id, *run.retired):
            return
        if any(dispatch in (r.dispatch_id, *r.retired) for r in self.executions.values()):
            raise _invalid("dispatch_id belongs to another execution")
        raise _invalid("unknown dispatch_id")

    def _step(self, run: Execution, found: dict[str, str]) -> Step:
        try:
            return run.steps[found["step"]]
        except KeyError:
            raise _Refused(404, "not_found") from None

    def _step_call(self, call: str, run: Execution, step: Step, fields: dict[str, str]) -> Answer:
        if call == "stream":
            if len(json.loads(fields["data"]).encode("utf-8")) > 7000:
                raise _invalid()
            if self.generation.number == 3 and step.status != "executing":
                raise _Refused(409, "conflict")
            return Answer(204)
        name = "result" if call == "step_complete" else "error"
        return Answer.json(state.report(run, step, **{name: Raw(fields.get(name, "null"))}))

    def _end_call(self, call: str, run: Execution, fields: dict[str, str]) -> Answer:
        if call == "heartbeat":
            return Answer(204)
        if run.status in state.TERMINAL:
            raise _Refused(409, "execution_terminal")
        if call == "complete":
            state.end(run, "completed", output=Raw(fields.get("output", "null")))
        else:
            state.end(run, "failed", reason=json.loads(fields["error"]))
        return Answer(204)

    # What clients get

    def _read(self, call: str, request: Recorded, run: Execution, found: dict[str, str]) -> Answer:
        if call == "cancel":
            if run.status in state.TERMINAL:
                raise _Refused(409, "execution_terminal")
            state.cancel(run)
            return Answer(204)
        if call == "read":
            return Answer.json(self._execution(run))
        if call == "step":
            return Answer.json(_step_json(run, self._step(run, found)))
        if call == "events":
            return Answer.json(run.events or None)
        query = parse_qs(urlsplit(request.target).query)
        steps = [
            _step_json(run, s)
            for s in run.steps.values()
            if query.get("status") != ["terminal"] or s.status in state.TERMINAL_STEP
        ]
        return Answer.json(steps or None)

    def _execution(self, run: Execution) -> dict[str, Any]:
        told: dict[str, Any] = {
            "id": run.id,
            "agent_id": run.agent_id,
            "input": run.input,
            "status": run.status,
        }
        if run.output is not None:
            told["output"] = run.output
        if run.failure_reason:
            told["failure_reason"] = run.failure_reason
        return {**told, "created_at": run.created_at, "updated_at": state.now()}

    def _admin(self, call: str, request: Recorded, found: dict[str, str]) -> Answer:
        if call in ("health", "ready"):
            return Answer.json({"status": "ok" if call == "health" else "ready"})
        if call == "executions":
            return self._executions(request)
        if call in ("agents", "agent", "register", "remove"):
            return self._agents(call, request, found)
        if call == "create":
            fields = self._fields(call, request)
            agent_id = json.loads(fields.get("agent_id", '""'))
            if agent_id not in self.agents:
                raise _Refused(404, "not_found")
            run = state.create(agent_id, Raw(fields.get("input", "null")))
            self.executions[run.id] = run
            return Answer.json(self._execution(run), 201)
        if call == "metadata":
            return Answer(204)
        return self._approvals(call, request, found)

    def _executions(self, request: Recorded) -> Answer:
        query = parse_qs(urlsplit(request.target).query)
        rows = [
            self._execution(run)
            for run in reversed(self.executions.values())
            if run.status in query.get("status", [run.status])
            and run.agent_id in query.get("agent_id", [run.agent_id])
        ]
        return Answer.json({"executions": rows or None})

    def _agents(self, call: str, request: Recorded, found: dict[str, str]) -> Answer:
        if call == "register":
            fields = {k: json.loads(v) for k, v in self._fields(call, request).items()}
            told = self._register(fields.get("id", ""), fields.get("webhook_url", ""))
            # Generation 1 tells the secret back, once.
            secret = {"Secret": fields.get("secret", "")} if self.generation.number == 1 else {}
            return Answer.json({**told, **secret}, 201)
        blank = {"Secret": ""} if self.generation.number == 1 else {}
        if call == "agents":
            return Answer.json([{**a, **blank} for a in self.agents.values()] or None)
        if call == "remove":
            self.agents.pop(found["agent"], None)
            return Answer(204)
        if found["agent"] not in self.agents:
            raise _Refused(404, "not_found")
        return Answer.json({**self.agents[found["agent"]], **blank})

    def _register(self, agent_id: str, webhook_url: str) -> dict[str, Any]:
        id_name, url_name, policy_name, time_name = self.generation.agent_fields
        told = {id_name: agent_id, url_name: webhook_url, policy_name: "", time_name: state.now()}
        self.agents[agent_id] = told
        return told

    def _approvals(self, call: str, request: Recorded, found: dict[str, str]) -> Answer:
        known = {a.id: (run, a) for run in self.executions.values() for a in run.approvals.values()}
        if call == "approvals":
            rows = [_approval_json(r, a) for r, a in known.values() if a.status == "pending"]
            return Answer.json(rows or None)
        if found["approval"] not in known:
            raise _Refused(404, "not_found")
        run, approval = known[found["approval"]]
        if call == "approval":
            return Answer.json(_approval_json(run, approval))
        fields = {k: json.loads(v) for k, v in self._fields("decide", request).items()}
        if approval.status != "pending":
            raise _Refused(409, "conflict")
        by = fields.get("decided_by", "")
        if approval.approvers and by not in approval.approvers:
            message = f'forbidden: "{by}" is not an approver for this approval'
            raise _Refused(403, "forbidden", message)
        state.decide(run, approval, call == "grant", by, fields.get("rationale", ""))
        return Answer(204)


_FAILED = ("dispatch.failed", "failed")


def _step_json(run: Execution, step: Step) -> dict[str, Any]:
    told = {
        "step_id": step.step_id,
        "execution_id": run.id,
        "kind": step.kind,
        "target": step.target,
        "args_hash": step.args_hash,
        "occurrence": step.occurrence,
        "status": step.status,
        "idempotency": step.idempotency,
        "args": step.args,
    }
    for name in ("result", "error", "started_at", "completed_at"):
        if value := getattr(step, name):
            told[name] = value
    return told


def _approval_json(run: Execution, approval: Approval) -> dict[str, Any]:
    told: dict[str, Any] = {"id": approval.id, "step_id": approval.step_id, "execution_id": run.id}
    for name in ("status", "message", "decided_by", "decided_at", "rationale", "created_at"):
        if value := getattr(approval, name):
            told[name] = value
    if approval.approvers:
        told["approvers"] = list(approval.approvers)
    return told
