"""The HTTP routes of the kernel (PROTOCOL 4 and 9): requests in, transitions, answers out."""

from __future__ import annotations

import logging
import sqlite3
from collections.abc import Callable
from typing import Any

import orjson
from flask import Flask, Request, Response, request
from werkzeug.exceptions import HTTPException, RequestEntityTooLarge

from rebuno_sync.errors import APIError
from rebuno_sync.kernel import (
    approvals,
    identity,
    keys,
    policy_cases,
    queries,
    refusals,
    registry,
    steps,
    transitions,
    views,
)
from rebuno_sync.kernel.auth import Authenticator
from rebuno_sync.kernel.bodies import MAX_INTEGER, Body
from rebuno_sync.kernel.hosts import check_origin
from rebuno_sync.kernel.ids import parse_id
from rebuno_sync.kernel.live import Hub
from rebuno_sync.kernel.metrics import CONTENT_TYPE, Metrics
from rebuno_sync.kernel.store import Store, StoreError, Transaction
from rebuno_sync.wire import MAX_BODY_BYTES, MAX_STREAM_BYTES, Idempotency, Kind

_log = logging.getLogger(__name__)

_KINDS = [kind.value for kind in Kind]
_IDEMPOTENCIES = [value.value for value in Idempotency]
_EXECUTION = "/v0/executions/<execution_id>"
_LONGEST_TARGET = 1000


class Api:
    """The routes, each a method, over one kernel's parts.

    Args:
        deadline: how long an execution may take, in seconds; ``None`` for as long as it needs.
    """

    def __init__(
        self,
        store: Store,
        hub: Hub,
        auth: Authenticator,
        metrics: Metrics,
        deadline: float | None,
    ) -> None:
        self._store = store
        self._metrics = metrics
        self._hub = hub
        self._auth = auth
        self._deadline = deadline

    def app(self) -> Flask:
        """Return the WSGI application."""
        app = Flask("rebuno_sync.kernel", static_folder=None)
        app.config["MAX_CONTENT_LENGTH"] = MAX_BODY_BYTES
        app.config["PROVIDE_AUTOMATIC_OPTIONS"] = False
        app.url_map.merge_slashes = False  # a signed request is never redirected
        routes: list[tuple[str, str, Callable[..., Response]]] = [
            ("GET", "/v0/health", self.health),
            ("GET", "/v0/ready", self.ready),
            ("GET", "/metrics", self.metrics),
            ("POST", "/v0/executions", self.create_execution),
            ("GET", "/v0/executions", self.list_executions),
            ("GET", f"{_EXECUTION}", self.get_execution),
            ("GET", f"{_EXECUTION}/events", self.list_events),
            ("GET", f"{_EXECUTION}/stream", self.watch_stream),
            ("POST", f"{_EXECUTION}/cancel", self.cancel_execution),
            ("GET", f"{_EXECUTION}/steps", self.list_steps),
            ("GET", f"{_EXECUTION}/steps/<step_id>", self.get_step),
            ("GET", f"{_EXECUTION}/previous", self.get_previous),
            ("POST", f"{_EXECUTION}/steps", self.submit_step),
            ("POST", f"{_EXECUTION}/steps/<step_id>/complete", self.complete_step),
            ("POST", f"{_EXECUTION}/steps/<step_id>/fail", self.fail_step),
            ("POST", f"{_EXECUTION}/steps/<step_id>/stream", self.publish_delta),
            ("POST", f"{_EXECUTION}/heartbeat", self.heartbeat),
            ("POST", f"{_EXECUTION}/complete", self.complete_execution),
            ("POST", f"{_EXECUTION}/fail", self.fail_execution),
            ("POST", "/v0/agents", self.register_agent),
            ("GET", "/v0/agents", self.list_agents),
            ("GET", "/v0/agents/<agent_id>", self.get_agent),
            ("DELETE", "/v0/agents/<agent_id>", self.delete_agent),
            ("PUT", "/v0/agents/<agent_id>/metadata", self.describe_agent),
            ("POST", "/v0/policies/<agent_id>", self.set_policy),
            ("POST", "/v0/policies/<agent_id>/test", self.test_policy),
            ("GET", "/v0/approvals", self.list_approvals),
            ("GET", "/v0/approvals/<approval_id>", self.get_approval),
            ("POST", "/v0/approvals/<approval_id>/grant", self.grant_approval),
            ("POST", "/v0/approvals/<approval_id>/deny", self.deny_approval),
            ("POST", "/v0/api-keys", self.create_key),
            ("GET", "/v0/api-keys", self.list_keys),
            ("DELETE", "/v0/api-keys/<key_id>", self.delete_key),
        ]
        for method, rule, view in routes:
            app.add_url_rule(rule, view.__name__, view, methods=[method])
        app.before_request(lambda: check_origin(request))
        app.before_request(_check_path)
        app.after_request(_keep_type)
        app.register_error_handler(APIError, _refuse)
        app.register_error_handler(RequestEntityTooLarge, _refuse_size)
        app.register_error_handler(HTTPException, _refuse_route)
        app.register_error_handler(StoreError, _refuse_store)
        app.register_error_handler(Exception, _refuse_unexpected)
        return app

    # No authentication

    def health(self) -> Response:
        return _json({"status": "ok"})

    def ready(self) -> Response:
        self._store.check()
        with self._store.read() as tx:
            tx.one("SELECT 1")
        return _json({"status": "ready"})

    def metrics(self) -> Response:
        return Response(self._metrics.render(), content_type=CONTENT_TYPE)

    def create_execution(self) -> Response:
        self._auth.client(request, "executions:write")
        body = Body(
            request.get_data(),
            "agent_id",
            "input",
            "session",
            "parent_execution_id",
            "idempotency_key",
            "spawned_by",
            "on_behalf_of",
        )
        parent = body.text("parent_execution_id")
        new = transitions.NewExecution(
            agent_id=body.required_text("agent_id"),
            input=body.raw("input") or "null",
            session=body.text("session"),
            parent_execution_id=None if parent is None else _uuid(parent, "parent_execution_id"),
            idempotency_key=body.text("idempotency_key"),
            spawned_by=_spawned_by(body),
            on_behalf_of=body.text("on_behalf_of"),
            deadline=self._deadline,
        )
        with self._store.write() as tx:
            row = transitions.create(tx, new)
        return _json(views.execution(row), 201)

    def list_executions(self) -> Response:
        self._auth.client(request, "executions:read")
        filters = {c: v for c in ("agent_id", "session", "status") if (v := request.args.get(c))}
        cursor = request.args.get("cursor") or None
        with self._store.read() as tx:
            rows, following = queries.executions(
                tx,
                filters,
                None if cursor is None else _uuid(cursor, "cursor"),
                _limit(50, 200),
            )
        page: dict[str, Any] = {"executions": [views.execution(row) for row in rows]}
        if following is not None:
            page["next_cursor"] = following
        return _json(page)

    def list_events(self, execution_id: str) -> Response:
        self._auth.client(request, "executions:read")
        after = request.args.get("after_seq", 0, type=int)  # unreadable counts as 0
        with self._store.read() as tx:
            row = queries.execution(tx, _execution_id(execution_id))
            rows = queries.events(tx, row["id"], min(max(0, after), MAX_INTEGER), _limit(100, 1000))
        return _json([views.event(row) for row in rows])

    def watch_stream(self, execution_id: str) -> Response:
        self._auth.client(request, "executions:read")
        with self._store.read() as tx:
            row = queries.execution(tx, _execution_id(execution_id))
        asked = request._get_current_object()  # type: ignore[attr-defined]
        return Response(
            self._hub.subscribe(row["id"], lambda: self._auth.may(asked, "executions:read")),
            content_type="text/event-stream",
            headers={"Cache-Control": "no-cache"},
        )

    def cancel_execution(self, execution_id: str) -> Response:
        self._auth.client(request, "executions:write")
        with self._store.write() as tx:
            transitions.cancel(tx, _execution_id(execution_id))
        return _nothing()

    # Executions, for whoever may read them

    def get_execution(self, execution_id: str) -> Response:
        agent_id = self._auth.reader(request)
        with self._store.read() as tx:
            row = _readable(tx, execution_id, agent_id)
        return _json(views.execution(row))

    def list_steps(self, execution_id: str) -> Response:
        agent_id = self._auth.reader(request)
        with self._store.read() as tx:
            row = _readable(tx, execution_id, agent_id)
            rows = queries.steps(tx, row["id"], request.args.get("status") or None)
        return _json([views.step(step) for step in rows])

    def get_step(self, execution_id: str, step_id: str) -> Response:
        agent_id = self._auth.reader(request)
        with self._store.read() as tx:
            row = _readable(tx, execution_id, agent_id)
            step = steps.known_step(tx, row["id"], step_id)
        return _json(views.step(step))

    # Executions, for their agents

    def get_previous(self, execution_id: str) -> Response:
        agent_id = self._auth.agent(request)
        with self._store.read() as tx:
            row = transitions.owned(tx, _execution_id(execution_id), agent_id)
            state = queries.previous(tx, row)
        return _json({"state": orjson.Fragment(state)})

    def submit_step(self, execution_id: str) -> Response:
        agent_id = self._auth.agent(request)
        lease = self._auth.lease(request, submission=True)
        submission = _submission(request)
        with self._store.write() as tx:
            answer = steps.submit(tx, agent_id, _execution_id(execution_id), lease, submission)
        return _json(answer)

    def complete_step(self, execution_id: str, step_id: str) -> Response:
        return self._settle_step(execution_id, step_id, succeeded=True, field="result")

    def fail_step(self, execution_id: str, step_id: str) -> Response:
        return self._settle_step(execution_id, step_id, succeeded=False, field="error")

    def _settle_step(
        self, execution_id: str, step_id: str, succeeded: bool, field: str
    ) -> Response:
        agent_id = self._auth.agent(request)
        lease = self._auth.lease(request)
        outcome = Body(request.get_data(), field).raw(field) or "null"
        with self._store.write() as tx:
            answer = steps.settle_step(
                tx, agent_id, _execution_id(execution_id), lease, step_id, succeeded, outcome
            )
        return _json(answer)

    def publish_delta(self, execution_id: str, step_id: str) -> Response:
        agent_id = self._auth.agent(request)
        lease = self._auth.stream_lease(request)
        body = Body(request.get_data(), "seq", "data")
        seq, data = body.count("seq"), body.text("data")
        if data is None:
            raise refusals.invalid("data is missing")
        if len(data.encode("utf-8", "replace")) > MAX_STREAM_BYTES:
            raise refusals.invalid(f"data is over {MAX_STREAM_BYTES} bytes; send it in parts")
        id = _execution_id(execution_id)
        with self._store.write() as tx:
            steps.streaming(tx, agent_id, id, lease, step_id)
        self._hub.publish(id, step_id, seq, data)
        return _nothing()

    def heartbeat(self, execution_id: str) -> Response:
        agent_id = self._auth.agent(request)
        lease = self._auth.lease(request)
        if request.get_data().strip():
            Body(request.get_data())
        with self._store.write() as tx:
            transitions.heartbeat(tx, agent_id, _execution_id(execution_id), lease)
        return _nothing()

    def complete_execution(self, execution_id: str) -> Response:
        agent_id = self._auth.agent(request)
        lease = self._auth.lease(request)
        body = Body(request.get_data(), "output", "state")
        output, state = body.raw("output") or "null", body.raw("state")
        with self._store.write() as tx:
            transitions.complete(tx, agent_id, _execution_id(execution_id), lease, output, state)
        return _nothing()

    def fail_execution(self, execution_id: str) -> Response:
        agent_id = self._auth.agent(request)
        lease = self._auth.lease(request)
        reason = Body(request.get_data(), "error").text("error") or ""
        with self._store.write() as tx:
            transitions.fail(tx, agent_id, _execution_id(execution_id), lease, reason)
        return _nothing()

    # Agents and policies

    def register_agent(self) -> Response:
        self._auth.client(request, "agents:write")
        body = Body(request.get_data(), "id", "webhook_url", "secret", "lease_timeout_seconds")
        try:
            agent = registry.NewAgent(
                id=body.required_text("id"),
                webhook_url=body.required_text("webhook_url"),
                secret=body.required_text("secret"),
                lease_timeout=body.number("lease_timeout_seconds"),
            )
        except ValueError as exc:
            raise refusals.invalid(str(exc)) from None
        with self._store.write() as tx:
            row = registry.register(tx, agent)
        return _json(views.agent(row), 201)

    def list_agents(self) -> Response:
        self._auth.client(request, "agents:read")
        with self._store.read() as tx:
            rows = queries.agents(tx)
        return _json([views.agent(row) for row in rows])

    def get_agent(self, agent_id: str) -> Response:
        self._auth.client(request, "agents:read")
        with self._store.read() as tx:
            row = registry.known(tx, agent_id)
        return _json(views.agent(row))

    def delete_agent(self, agent_id: str) -> Response:
        self._auth.client(request, "agents:write")
        with self._store.write() as tx:
            registry.delete(tx, agent_id)
        return _nothing()

    def describe_agent(self, agent_id: str) -> Response:
        if self._auth.agent(request) != agent_id:
            raise refusals.forbidden("an agent describes itself alone")
        body = Body(request.get_data(), "description", "input_schema", "output_schema")
        schemas = [body.raw(name) for name in ("input_schema", "output_schema")]
        input_schema, output_schema = (None if s == "null" else s for s in schemas)
        with self._store.write() as tx:
            registry.describe(tx, agent_id, body.text("description"), input_schema, output_schema)
        return _nothing()

    def set_policy(self, agent_id: str) -> Response:
        self._auth.client(request, "policies:write")
        bundle = Body(request.get_data(), "bundle").text("bundle")
        if bundle is None:
            raise refusals.invalid("bundle is missing")
        with self._store.write() as tx:
            registry.set_policy(tx, agent_id, bundle)
        return _nothing()

    def test_policy(self, agent_id: str) -> Response:
        self._auth.client(request, "policies:write")
        body = Body(request.get_data(), "cases", "bundle")
        text = body.text("bundle")
        try:
            cases = policy_cases.cases_of(body.value("cases"), agent_id, args="args", expect=False)
        except policy_cases.CasesError as exc:
            raise refusals.invalid(str(exc)) from None
        if text is None:
            with self._store.read() as tx:
                bundle = registry.policy_of(tx, agent_id)
        else:
            bundle = registry.checked_bundle(text)
        outcomes = policy_cases.judge(bundle, cases)
        return _json(
            {
                "results": [outcome.record() for outcome in outcomes],
                "mismatches": sum(1 for outcome in outcomes if outcome.mismatch),
                "unreached_rules": policy_cases.unreached(bundle, outcomes),
            }
        )

    # Approvals

    def list_approvals(self) -> Response:
        self._auth.client(request, "approvals:read")
        with self._store.read() as tx:
            rows = queries.approvals(tx)
        return _json([views.approval(row) for row in rows])

    def get_approval(self, approval_id: str) -> Response:
        self._auth.client(request, "approvals:read")
        with self._store.read() as tx:
            row = queries.approval(tx, _uuid(approval_id, "the approval id"))
        return _json(views.approval(row))

    def grant_approval(self, approval_id: str) -> Response:
        return self._decide(approval_id, granted=True)

    def deny_approval(self, approval_id: str) -> Response:
        return self._decide(approval_id, granted=False)

    def _decide(self, approval_id: str, granted: bool) -> Response:
        self._auth.client(request, "approvals:write")
        body = Body(request.get_data(), "decided_by", "rationale")
        decided_by, rationale = body.text("decided_by") or "", body.text("rationale") or ""
        with self._store.write() as tx:
            approvals.decide(
                tx, _uuid(approval_id, "the approval id"), granted, decided_by, rationale
            )
        return _nothing()

    # API keys

    def create_key(self) -> Response:
        held = self._auth.client(request, "api_keys:manage")
        body = Body(request.get_data(), "name", "scopes")
        name, scopes = body.required_text("name"), body.value("scopes")
        if not isinstance(scopes, list) or not all(isinstance(s, str) for s in scopes):
            raise refusals.invalid("scopes must be a list of text")
        for scope in scopes:
            if scope in keys.SCOPES and scope not in held:
                raise refusals.forbidden(
                    f"the API key lacks the scope {scope}, and so cannot give it to another"
                )
        with self._store.write() as tx:
            row, token = keys.create(tx, name, scopes)
        return _json({**views.api_key(row), "token": token}, 201)

    def list_keys(self) -> Response:
        self._auth.client(request, "api_keys:manage")
        with self._store.read() as tx:
            rows = keys.listed(tx)
        return _json([views.api_key(row) for row in rows])

    def delete_key(self, key_id: str) -> Response:
        self._auth.client(request, "api_keys:manage")
        with self._store.write() as tx:
            keys.delete(tx, _uuid(key_id, "the key id"))
        return _nothing()


def _check_path() -> None:
    # WSGI decodes a path before it is routed: an id with a slash in it would name another route
    # than the one that was asked for, and signed.
    path, _, _ = request.environ["REQUEST_URI"].partition("?")
    if "%2f" in path.lower():
        raise refusals.invalid("there is an encoded slash in the path, and no id has one")


def _submission(request: Request) -> steps.Submission:
    body = Body(request.get_data(), "kind", "target", "args", "idempotency", "resources")
    if body.value("resources") not in (None, []):
        raise refusals.invalid("resources names some, and none is registered with this kernel")
    kind = body.required_text("kind")
    if kind not in _KINDS:
        raise refusals.invalid(f"kind must be one of {', '.join(_KINDS)}")
    idempotency = body.text("idempotency") or Idempotency.SAFE_TO_RETRY.value
    if idempotency not in _IDEMPOTENCIES:
        raise refusals.invalid(f"idempotency must be one of {', '.join(_IDEMPOTENCIES)}")
    target = body.required_text("target")
    if len(target) > _LONGEST_TARGET:
        raise refusals.invalid(f"target is longer than {_LONGEST_TARGET} characters")
    args = body.raw("args") or "null"
    return steps.Submission(
        kind=kind,
        target=target,
        args=args,
        args_hash=identity.args_hash(args.encode("utf-8")),
        idempotency=idempotency,
    )


def _spawned_by(body: Body) -> str | None:
    value = body.value("spawned_by")
    if value is None:
        return None
    if not isinstance(value, dict) or set(value) != {"execution_id", "step_id"}:
        raise refusals.invalid("spawned_by must be an object of execution_id and step_id")
    return body.raw("spawned_by")


def _readable(tx: Transaction, execution_id: str, agent_id: str | None) -> sqlite3.Row:
    if agent_id is None:
        return queries.execution(tx, _execution_id(execution_id))
    return transitions.owned(tx, _execution_id(execution_id), agent_id)


def _execution_id(text: str) -> str:
    return _uuid(text, "the execution id")


def _uuid(text: str, what: str) -> str:
    parsed = parse_id(text)
    if parsed is None:
        raise refusals.invalid(f"{what} must be a UUID, got {text!r:.100}")
    return parsed


def _limit(default: int, most: int) -> int:
    text = request.args.get("limit") or str(default)
    if not text.isdecimal() or not text.isascii() or len(text) > 9 or int(text) < 1:
        raise refusals.invalid(f"limit must be an integer from 1, got {text!r:.100}")
    return min(int(text), most)


def _keep_type(response: Response) -> Response:
    response.headers["X-Content-Type-Options"] = "nosniff"
    return response


def _json(value: Any, status: int = 200) -> Response:
    return Response(orjson.dumps(value), status, content_type="application/json; charset=utf-8")


def _nothing() -> Response:
    response = Response(status=204)
    del response.headers["Content-Type"]
    return response


def _refuse(error: APIError) -> Response:
    answer = {"code": error.code, "message": error.message}
    if error.details is not None:
        answer["details"] = error.details
    return _json(answer, error.status_code)


def _refuse_size(error: RequestEntityTooLarge) -> Response:
    message = f"the body is over {MAX_BODY_BYTES} bytes"
    return _json({"code": "validation_error", "message": message}, 413)


def _refuse_route(error: HTTPException) -> Response:
    status = error.code or 500
    if status == 404:
        return Response("404 page not found\n", 404, content_type="text/plain; charset=utf-8")
    return Response(status=status)


def _refuse_store(error: StoreError) -> Response:
    return _json({"code": "internal_error", "message": str(error)}, 503)


def _refuse_unexpected(error: Exception) -> Response:
    _log.error("%s %r failed", request.method, request.path, exc_info=error)
    message = f"the kernel failed: {type(error).__name__}; its log tells more"
    return _json({"code": "internal_error", "message": message}, 500)
