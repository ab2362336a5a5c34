"""The page of the embedded kernel: executions, approvals and agents, rendered on the server."""

from __future__ import annotations

import hashlib
import logging
import re
from collections.abc import Callable
from typing import Any, Final

import jinja2
from flask import Blueprint, Response, redirect, request, url_for
from werkzeug.exceptions import HTTPException

from rebuno_sync.errors import APIError
from rebuno_sync.kernel import (
    approvals,
    page_agents,
    page_approvals,
    page_data,
    page_execution,
    page_guard,
    page_values,
    queries,
    refusals,
    registry,
)
from rebuno_sync.kernel.bodies import MAX_INTEGER
from rebuno_sync.kernel.hosts import Hosts
from rebuno_sync.kernel.ids import parse_id
from rebuno_sync.kernel.keys import KeyRing
from rebuno_sync.kernel.live import Hub
from rebuno_sync.kernel.page_guard import Guard
from rebuno_sync.kernel.store import Store, StoreError, Transaction

_log = logging.getLogger(__name__)

_ON_THIS_PAGE = re.compile(r"/(?:[\w-][\w./-]*)?(?:\?[\w=&%.+-]*)?", re.ASCII)
_UNSAFE_IN_FILE_NAME = re.compile(r"[^A-Za-z0-9_-]+")
_LONGEST_TEXT: Final = 4000
_FILTERS: Final = ("agent_id", "session", "status")
_DECISION: Final = ("decision", "decided_by", "rationale")


class Page:
    """The routes of the page, each a method.

    Args:
        store: the kernel's database.
        hub: where live output is handed on.
        hosts: the names under which the kernel answers.
        bearer_token: what has to be shown to see the page, if not an API key; ``None`` when
            nothing has.
    """

    def __init__(self, store: Store, hub: Hub, hosts: Hosts, bearer_token: str | None) -> None:
        self._store = store
        self._hub = hub
        self._hosts = hosts
        self._guard = Guard(bearer_token, KeyRing(store))
        self._templates = _templates()
        self._needed: dict[str, str] = {}

    def blueprint(self) -> Blueprint:
        """Return the routes, ready to be registered on the kernel's application."""
        blueprint = Blueprint("page", __name__, static_folder="static")
        execution = "/executions/<execution_id>"
        # What may be seen without logging in needs no scope.
        routes: list[tuple[str, str, Callable[..., Any], str]] = [
            ("GET", "/", self.executions, "executions:read"),
            ("GET", execution, self.execution, "executions:read"),
            ("GET", f"{execution}/events", self.events, "executions:read"),
            ("GET", f"{execution}/events.jsonl", self.download_events, "executions:read"),
            ("GET", f"{execution}/live", self.live, "executions:read"),
            (
                "GET",
                f"{execution}/<any(input,output):part>.json",
                self.download_value,
                "executions:read",
            ),
            (
                "GET",
                f"{execution}/steps/<step_id>/<any(args,result,error):part>.json",
                self.download_step,
                "executions:read",
            ),
            ("GET", "/approvals", self.approvals, "approvals:read"),
            ("GET", "/approvals/<approval_id>", self.approval, "approvals:read"),
            ("GET", "/approvals/<approval_id>/args.json", self.download_args, "approvals:read"),
            ("POST", "/approvals/<approval_id>", self.decide, "approvals:write"),
            ("GET", "/agents", self.agents, "agents:read"),
            ("GET", "/agents/<agent_id>", self.agent, "agents:read"),
            ("GET", "/login", self.login, ""),
            ("POST", "/login", self.log_in, ""),
            ("POST", "/logout", self.log_out, ""),
        ]
        for method, rule, view, scope in routes:
            blueprint.add_url_rule(rule, view.__name__, view, methods=[method])
            self._needed[f"{blueprint.name}.{view.__name__}"] = scope
        blueprint.before_request(self._let_in)
        blueprint.after_request(_add_headers)
        blueprint.register_error_handler(APIError, self._refuse)
        blueprint.register_error_handler(HTTPException, self._refuse_http)
        blueprint.register_error_handler(StoreError, self._refuse_stopped)
        blueprint.register_error_handler(Exception, self._refuse_unexpected)
        return blueprint

    def _let_in(self) -> Any:
        """Stop a request that may not pass."""
        self._hosts.check(request)
        if request.endpoint == "page.static":
            return None
        if request.method == "POST":
            self._guard.check_form(request)
        elif page_guard.lacks_strict_cookies(request):
            return self._render("bounce.html", 200, keep_cookie=True)
        needed = self._needed[request.endpoint or ""]
        scopes = self._guard.scopes(request)
        if not needed or needed in scopes:
            return None
        if not scopes:
            here = None if request.method == "POST" else request.full_path.rstrip("?")
            return redirect(url_for("page.login", next=here), 303)
        if request.endpoint == "page.executions":  # where one is led to after logging in
            for endpoint in ("page.approvals", "page.agents"):
                if self._needed[endpoint] in scopes:
                    return redirect(url_for(endpoint), 303)
        raise refusals.forbidden(f"the API key that you logged in with lacks the scope {needed}")

    # Executions

    def executions(self) -> Response:
        filters = {name: request.args.get(name) or None for name in _FILTERS}
        used = {name: value for name, value in filters.items() if value is not None}
        cursor = parse_id(request.args.get("cursor", ""))
        with self._store.read() as tx:
            version = self._version(tx, page_data.list_version(tx))
            if version in request.if_none_match:
                return _unchanged()
            listed = page_data.execution_list(tx, used, cursor)
        return self._render(
            "executions.html", filters=filters, cursor=cursor, list=listed, version=version
        )

    def execution(self, execution_id: str) -> Response:
        id = _id(execution_id)
        page = request.args.get("page", type=int)
        with self._store.read() as tx:
            version = self._version(tx, page_execution.execution_version(tx, id))
            if version in request.if_none_match:
                return _unchanged()
            found = page_execution.execution_page(tx, id, page)
        return self._render("execution.html", x=found, version=version)

    def events(self, execution_id: str) -> Response:
        after = min(max(0, request.args.get("after", 0, type=int)), MAX_INTEGER)
        with self._store.read() as tx:
            row, rows, following = page_data.events_page(tx, _id(execution_id), after)
        events = [(event, page_data.shown_event(event)) for event in rows]
        return self._render("events.html", row=row, events=events, after=after, next=following)

    def download_events(self, execution_id: str) -> Response:
        id = _id(execution_id)
        with self._store.read() as tx:
            page_execution.execution_version(tx, id)
        return _download(
            page_data.event_lines(self._store, id), f"events-{id}.jsonl", "application/jsonl"
        )

    def live(self, execution_id: str) -> Response:
        id = _id(execution_id)
        with self._store.read() as tx:
            page_execution.execution_version(tx, id)
        asked = request._get_current_object()  # type: ignore[attr-defined]
        stream = self._hub.subscribe(id, lambda: "executions:read" in self._guard.scopes(asked))
        return Response(stream, content_type="text/event-stream")

    def download_value(self, execution_id: str, part: str) -> Response:
        id = _id(execution_id)
        with self._store.read() as tx:
            value = page_data.whole_value(tx, "executions", id, id, part)
        return _download(value, f"{part}-{id}.json")

    def download_step(self, execution_id: str, step_id: str, part: str) -> Response:
        id = _id(execution_id)
        with self._store.read() as tx:
            value = page_data.whole_value(tx, "steps", step_id, id, part)
        return _download(value, f"{part}-{step_id[:16]}.json")

    # Approvals

    def approvals(self) -> Response:
        with self._store.read() as tx:
            version = self._version(tx, page_data.list_version(tx))
            if version in request.if_none_match:
                return _unchanged()
            pending = page_approvals.pending_approvals(tx)
            decided = page_approvals.decided_approvals(tx)
        return self._render("approvals.html", pending=pending, decided=decided, version=version)

    def approval(self, approval_id: str) -> Response:
        return self._show_approval(_id(approval_id))

    def decide(self, approval_id: str) -> Any:
        id = _id(approval_id)
        form = {
            name: request.form.get(name, "").replace("\r\n", "\n").strip() for name in _DECISION
        }
        problem = _problem(form)
        if problem:
            return self._show_approval(id, 400, problem, form)
        try:
            with self._store.write() as tx:
                approvals.decide(
                    tx, id, form["decision"] == "grant", form["decided_by"], form["rationale"]
                )
        except APIError as exc:
            if exc.status_code == 404:
                raise
            return self._show_approval(id, exc.status_code, exc.message, form)
        return redirect(url_for("page.approval", approval_id=id), 303)

    def download_args(self, approval_id: str) -> Response:
        id = _id(approval_id)
        with self._store.read() as tx:
            row = queries.approval(tx, id)
            value = page_data.whole_value(tx, "steps", row["step_id"], row["execution_id"], "args")
        return _download(value, f"args-{id}.json")

    def _show_approval(
        self, id: str, status: int = 200, problem: str = "", form: dict[str, str] | None = None
    ) -> Response:
        with self._store.read() as tx:
            card = page_approvals.approval_card(tx, id)
        form = form or dict.fromkeys(_DECISION, "")
        return self._render("approval.html", status, card=card, problem=problem, form=form)

    # Agents

    def agents(self) -> Response:
        with self._store.read() as tx:
            cards = page_agents.agent_cards(tx)
        return self._render("agents.html", cards=cards)

    def agent(self, agent_id: str) -> Response:
        with self._store.read() as tx:
            card = page_agents.agent_card(tx, registry.known(tx, agent_id))
        return self._render("agent.html", card=card)

    # Logging in and out

    def login(self) -> Any:
        following = request.args.get("next", "")
        if not self._guard.asks_for_token:
            return redirect(_local(following), 303)
        return self._render("login.html", next=following)

    def log_in(self) -> Any:
        following = request.form.get("next", "")
        id = self._guard.log_in(request.form.get("token", ""))
        if id is None:
            return self._render(
                "login.html", 401, next=following, problem="That is neither the token nor a key."
            )
        answer = redirect(_local(following), 303)
        page_guard.give_cookie(request, answer, id)
        return answer

    def log_out(self) -> Any:
        self._guard.log_out(request)
        answer = redirect(url_for("page.login"), 303)
        answer.delete_cookie(page_guard.cookie_name(request), httponly=True, samesite="Strict")
        return answer

    # Rendering

    def _version(self, tx: Transaction, parts: tuple[Any, ...]) -> str:
        """Return what changes when the page would: with the data, and with the form token."""
        form_token = self._guard.form_token(self._guard.browser_id(request)[0])
        parts = (*parts, page_approvals.count_pending(tx), form_token)
        return hashlib.sha256(repr(parts).encode()).hexdigest()[:20]

    def _render(
        self, template: str, status: int = 200, *, keep_cookie: bool = False, **values: Any
    ) -> Response:
        id, is_new = self._guard.browser_id(request)
        scopes = self._guard.scopes(request)
        with self._store.read() as tx:
            now = tx.now
            waiting = page_approvals.count_pending(tx) if "approvals:read" in scopes else 0
        html = self._templates.get_template(template).render(
            **values,
            csrf=self._guard.form_token(id),
            may=scopes,
            can_log_out=bool(scopes) and self._guard.asks_for_token,
            waiting=waiting,
            now=now,
            path=request.path,
        )
        response = Response(html, status, content_type="text/html; charset=utf-8")
        if "version" in values:
            response.set_etag(values["version"])
        if is_new and not keep_cookie:
            page_guard.give_cookie(request, response, id)
        return response

    def _refuse(self, error: APIError) -> Response:
        return self._say(error.status_code, error.message)

    def _refuse_http(self, error: HTTPException) -> Response:
        return self._say(error.code or 500, error.description or "")

    def _refuse_stopped(self, error: StoreError) -> Response:
        return self._say(503, "The kernel is stopping.")

    def _refuse_unexpected(self, error: Exception) -> Response:
        _log.error("%s %r failed", request.method, request.path, exc_info=error)
        return self._say(500, f"The kernel failed: {type(error).__name__}; its log tells more.")

    def _say(self, status: int, message: str) -> Response:
        html = self._templates.get_template("error.html").render(
            status=status, message=message, asks_for_token=self._guard.asks_for_token
        )
        return Response(html, status, content_type="text/html; charset=utf-8")


def _templates() -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("rebuno_sync.kernel"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        finalize=_finalize,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.globals["url_for"] = url_for
    for filter in (
        page_values.clock,
        page_values.duration,
        page_values.iso,
        page_values.size,
        page_values.zone,
    ):
        environment.filters[filter.__name__] = filter
    return environment


def _finalize(value: Any) -> Any:
    """Let no text on the page pretend to be another: see :func:`page_values.visible`."""
    return page_values.visible(value) if type(value) is str else value


def _problem(form: dict[str, str]) -> str:
    """Return what is wrong with a decision as it was filled in, if anything."""
    if form["decision"] not in ("grant", "deny"):
        return "Choose whether to grant or to deny."
    if not form["decided_by"]:
        return "Say who you are: the decision is recorded under a name."
    if max(len(form["decided_by"]), len(form["rationale"])) > _LONGEST_TEXT:
        return f"Keep the name and the rationale under {_LONGEST_TEXT} characters each."
    return ""


def _local(path: str) -> str:
    """Return ``path`` when it leads to this page, else the front."""
    return path if _ON_THIS_PAGE.fullmatch(path) else "/"


def _id(text: str) -> str:
    id = parse_id(text)
    if id is None:
        raise refusals.not_found("page", text)
    return id


def _unchanged() -> Response:
    return Response(status=304)


def _download(body: Any, name: str, content_type: str = "application/json") -> Response:
    return Response(
        body,
        content_type=content_type,
        headers={"Content-Disposition": f'attachment; filename="{name}"'},
    )


def _add_headers(response: Response) -> Response:
    response.headers.update(page_guard.HEADERS)
    if request.endpoint == "page.static":
        response.headers["Cache-Control"] = "no-cache"
    return response
