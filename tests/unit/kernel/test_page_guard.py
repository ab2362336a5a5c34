"""Who may see the page and act on it."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import urlsplit

import pytest
from flask import Request
from werkzeug.test import EnvironBuilder

from rebuno_sync.errors import ForbiddenError
from rebuno_sync.kernel import Clock, EmbeddedKernel, page_guard
from rebuno_sync.kernel.hosts import Hosts, check_origin, host_name
from rebuno_sync.kernel.keys import EVERYTHING, KeyRing
from rebuno_sync.kernel.page_guard import Guard
from rebuno_sync.kernel.store import Store
from tests.unit.kernel.agent_double import Caller, Webhooks
from tests.unit.kernel.conftest import manifest
from tests.unit.kernel.visitor import Form, Visitor, set_cookie, words

TOKEN = "a-token-of-the-kernel"
POLICY = """
default_action: allow
rules:
  - {id: ask, when: {target: ask}, then: {decision: require_approval}}
"""


def request(method: str = "GET", path: str = "/", **headers: str) -> Request:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return Request(EnvironBuilder(path, method=method, headers=named).get_environ())


@pytest.fixture
def visitors() -> Iterator[Callable[[str], Visitor]]:
    opened: list[Visitor] = []

    def visit(url: str) -> Visitor:
        opened.append(Visitor(url))
        return opened[-1]

    yield visit
    for visitor in opened:
        visitor.close()


@pytest.fixture
def visitor(kernel: EmbeddedKernel, visitors: Callable[[str], Visitor]) -> Visitor:
    return visitors(kernel.url)


@pytest.fixture
def asked(kernel: EmbeddedKernel, caller: Caller, webhooks: Webhooks) -> str:
    """An approval that waits; its path on the page."""
    caller.client("POST", "/v0/policies/a1", {"bundle": POLICY})
    caller.client("POST", "/v0/executions", {"agent_id": "a1"})
    lease = webhooks.next()
    step = {"kind": "tool_call", "target": "ask", "args": {}}
    path = f"/v0/executions/{lease['execution_id']}/steps"
    answer = caller.agent("POST", path, step, lease=lease).json()
    return f"/approvals/{answer['approval_id']}"


def status_of(caller: Caller, approval: str) -> str:
    return str(caller.client("GET", f"/v0{approval}").json()["status"])


@pytest.fixture
def keys() -> Iterator[KeyRing]:
    store = Store(None, Clock())
    yield KeyRing(store)
    store.close()


DECISION = {"decision": "grant", "decided_by": "ann", "rationale": ""}


# Hosts


@pytest.mark.parametrize(
    "host",
    ["localhost", "localhost:81", "LOCALHOST", "127.0.0.1:9", "[::1]:9", "[::1]", "kernel.test:1"],
)
def test_names_that_are_the_kernels(host: str) -> None:
    Hosts("127.0.0.1", ["kernel.test"]).check(request(Host=host))


@pytest.mark.parametrize(
    "host",
    [
        "evil.test",
        "localhost.evil.test",
        "evil.test:80",
        "127.0.0.1.evil.test",
        "localhost@evil.test",
        "evil.test#localhost",
        "localhost:80:80",
        "localhost:port",
        "[::1",
        "192.0.2.7",
        "0.0.0.0",
        "localhost/",
        "local host",
        "löcalhost",
        "",
    ],
)
@pytest.mark.parametrize("listens_on", ["127.0.0.1", "0.0.0.0", "::"])
def test_names_that_are_not(host: str, listens_on: str) -> None:
    with pytest.raises(ForbiddenError, match="does not answer under the name"):
        Hosts(listens_on).check(request(Host=host))


def test_the_address_listened_on_is_a_name() -> None:
    Hosts("192.0.2.7").check(request(Host="192.0.2.7:80"))
    Hosts("FE80::7").check(request(Host="[fe80::7]:80"))


def test_where_every_address_is_listened_on_the_one_a_connection_came_in_on_is_a_name() -> None:
    asked = request(Host="127.0.0.3:80")
    with socket.create_server(("127.0.0.3", 0)) as listener:
        with socket.create_connection(listener.getsockname()) as client:
            connection, _ = listener.accept()
            with connection:
                asked.environ["werkzeug.socket"] = connection
                Hosts("0.0.0.0").check(asked)
                with pytest.raises(ForbiddenError):
                    Hosts("127.0.0.1").check(asked)
                asked.environ["HTTP_HOST"] = "127.0.0.4:80"
                with pytest.raises(ForbiddenError):
                    Hosts("0.0.0.0").check(asked)
        assert client.fileno() == -1


@pytest.mark.parametrize("name", ["http://kernel.test", "kernel.test:80", "a b", "", "a/b"])
def test_allowed_hosts_are_names_alone(name: str) -> None:
    with pytest.raises(ValueError, match="allowed_hosts must be host names"):
        EmbeddedKernel(allowed_hosts=[name])


def test_host_names() -> None:
    assert host_name("Kernel.Test:80") == "kernel.test"
    assert host_name("[::1]:80") == "::1"
    assert host_name("kernel.test:99999") is None


# Origins


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"Origin": "http://localhost"},
        {"Origin": "https://localhost", "Sec_Fetch_Site": "same-origin"},
        {"Sec_Fetch_Site": "none"},
        {
            "Sec_Fetch_Site": "cross-site",
            "Sec_Fetch_Mode": "navigate",
            "Sec_Fetch_Dest": "document",
        },
    ],
)
def test_requests_that_come_from_here_or_from_a_person(headers: dict[str, str]) -> None:
    check_origin(request(**headers))


@pytest.mark.parametrize(
    ("method", "headers"),
    [
        ("GET", {"Origin": "http://evil.test"}),
        ("GET", {"Origin": "http://localhost:81"}),
        ("GET", {"Origin": "null"}),
        ("GET", {"Origin": ""}),
        ("GET", {"Origin": "localhost"}),
        ("GET", {"Origin": "ftp://localhost"}),
        ("GET", {"Sec_Fetch_Site": "cross-site"}),
        ("GET", {"Sec_Fetch_Site": "same-site", "Sec_Fetch_Mode": "no-cors"}),
        (
            "GET",
            {
                "Sec_Fetch_Site": "cross-site",
                "Sec_Fetch_Mode": "navigate",
                "Sec_Fetch_Dest": "iframe",
            },
        ),
        (
            "POST",
            {
                "Sec_Fetch_Site": "cross-site",
                "Sec_Fetch_Mode": "navigate",
                "Sec_Fetch_Dest": "document",
            },
        ),
        ("POST", {"Sec_Fetch_Site": "same-site", "Origin": "http://localhost"}),
    ],
)
def test_requests_that_another_page_sent(method: str, headers: dict[str, str]) -> None:
    with pytest.raises(ForbiddenError, match="another origin"):
        check_origin(request(method, **headers))


# The page


PAGES = ("/", "/approvals", "/agents", "/login", "/static/page.css", "/static/page.js")


@pytest.mark.parametrize("path", PAGES)
def test_a_foreign_name_gets_nothing(visitor: Visitor, path: str) -> None:
    answer = visitor.get(path, Host="evil.test")
    assert answer.status_code == 403
    assert "Set-Cookie" not in answer.headers
    assert "a1" not in answer.text


def test_an_allowed_name_gets_the_page(
    kernels: Callable[..., EmbeddedKernel], visitors: Callable[[str], Visitor]
) -> None:
    visitor = visitors(kernels(allowed_hosts=["kernel.test"]).url)
    assert visitor.get("/", Host="kernel.test").status_code == 200


@pytest.mark.parametrize(
    "path", [*PAGES, "/nothing-here/at-all", "/agents/nobody", "/executions/no-id"]
)
def test_every_answer_is_guarded(visitor: Visitor, path: str) -> None:
    headers = visitor.get(path).headers
    if path == "/nothing-here/at-all":  # no page of ours
        assert headers["Content-Type"].startswith("text/plain")
        return
    policy = headers["Content-Security-Policy"]
    assert "default-src 'none'" in policy
    assert "frame-ancestors 'none'" in policy
    assert "unsafe" not in policy
    assert headers["X-Frame-Options"] == "DENY"
    assert headers["X-Content-Type-Options"] == "nosniff"
    assert headers["Referrer-Policy"] == "same-origin"
    expected = "no-cache" if path.startswith("/static") else "no-store"
    assert headers["Cache-Control"] == expected


def test_no_template_has_a_script_or_a_style_of_its_own(visitor: Visitor, asked: str) -> None:
    for path in ("/", "/approvals", asked, "/agents", "/agents/a1", "/login"):
        html = visitor.get(path, follow=True).text
        assert "<style" not in html
        assert " style=" not in html
        assert html.count("<script") == html.count("page.js") == 1
        assert " onclick" not in html


def test_a_form_from_the_page_is_taken(visitor: Visitor, asked: str, caller: Caller) -> None:
    answer = visitor.fill(asked, asked, **DECISION)
    assert (answer.status_code, answer.headers["Location"]) == (303, asked)
    assert status_of(caller, asked) == "granted"


@pytest.mark.parametrize(
    "headers",
    [
        {"Origin": "http://evil.test"},
        {"Origin": "null"},
        {"Origin": ""},
        {"Origin": "", "Sec_Fetch_Site": ""},
        {"Origin": "http://127.0.0.1"},
        {"Sec_Fetch_Site": "cross-site"},
        {"Sec_Fetch_Site": "same-site"},
        {"Host": "evil.test"},
        {"Host": "evil.test", "Origin": "http://evil.test"},
    ],
)
def test_a_form_from_elsewhere_is_not(
    visitor: Visitor, asked: str, caller: Caller, headers: dict[str, str]
) -> None:
    fields = Form(visitor.get(asked).text).forms[asked]
    answer = visitor.post(asked, {**fields, **DECISION}, **headers)
    assert answer.status_code == 403
    assert status_of(caller, asked) == "pending"


@pytest.mark.parametrize("token", [None, "", "0" * 64, "é", "\ud800"])
def test_a_form_without_its_token_is_not(
    visitor: Visitor, asked: str, caller: Caller, token: str | None
) -> None:
    fields = {**Form(visitor.get(asked).text).forms[asked], **DECISION}
    if token is None:
        del fields["csrf"]
    else:
        fields["csrf"] = token.encode("utf-8", "surrogatepass")  # type: ignore[assignment]
    assert visitor.post(asked, fields).status_code == 403
    assert status_of(caller, asked) == "pending"


def test_a_token_is_good_for_its_own_browser_alone(
    visitor: Visitor, visitors: Callable[[str], Visitor], asked: str, caller: Caller
) -> None:
    theirs = Form(visitor.get(asked).text).forms[asked]
    other = visitors(visitor.url)
    other.get(asked)
    assert other.post(asked, {**theirs, **DECISION}).status_code == 403
    other.session.cookies.clear()
    assert other.post(asked, {**theirs, **DECISION}).status_code == 403
    assert status_of(caller, asked) == "pending"


def test_a_form_that_outlived_the_kernel_says_so(keys: KeyRing) -> None:
    guard, later = Guard(None, keys), Guard(None, keys)
    id, is_new = guard.browser_id(request(Host="localhost:1"))
    assert is_new

    def sent() -> Request:
        named = {
            "Host": "localhost:1",
            "Origin": "http://localhost:1",
            "Cookie": f"rebuno_1={id}",
        }
        form = {"csrf": guard.form_token(id)}
        return EnvironBuilder("/", method="POST", headers=named, data=form).get_request(Request)

    guard.check_form(sent())
    with pytest.raises(ForbiddenError, match="the kernel was restarted"):
        later.check_form(sent())


def test_the_cookie(visitor: Visitor) -> None:
    port = urlsplit(visitor.url).port
    cookie = set_cookie(visitor.get())
    assert cookie["name"] == f"rebuno_{port}"
    assert cookie["httponly"]
    assert cookie["samesite"] == "Strict"
    assert cookie["path"] == "/"
    assert "domain" not in cookie
    assert "expires" not in cookie
    assert "Set-Cookie" not in visitor.get().headers


@pytest.mark.parametrize("id", ["", "short", "x" * 44, "é" * 43])
def test_an_id_that_is_none_of_ours_is_replaced(visitor: Visitor, id: str) -> None:
    port = urlsplit(visitor.url).port
    answer = visitor.get("/", Cookie=f"rebuno_{port}={id}".encode().decode("latin-1"))
    assert len(set_cookie(answer)["value"]) == 43


def test_a_link_from_another_site_is_asked_for_once_more(visitor: Visitor) -> None:
    """Browsers keep strict cookies back then; a new one would log the visitor out."""
    link = {
        "Sec_Fetch_Site": "cross-site",
        "Sec_Fetch_Mode": "navigate",
        "Sec_Fetch_Dest": "document",
    }
    answer = visitor.get("/approvals", **link)
    assert answer.status_code == 200
    assert 'http-equiv="refresh"' in answer.text
    assert "Set-Cookie" not in answer.headers
    visitor.get()
    assert 'http-equiv="refresh"' not in visitor.get("/approvals", **link).text


# With a bearer token


@pytest.fixture
def closed(
    kernels: Callable[..., EmbeddedKernel],
    visitors: Callable[[str], Visitor],
    webhooks: Webhooks,
) -> Visitor:
    """A visitor of a kernel that asks for a token."""
    return visitors(kernels(manifest=manifest(webhooks), bearer_token=TOKEN).url)


def test_the_page_asks_for_the_token(closed: Visitor) -> None:
    id = "0192f3a4-1111-7222-8333-444455556666"
    for path in (
        "/",
        "/approvals",
        "/agents",
        "/agents/a1",
        f"/executions/{id}",
        f"/executions/{id}/events",
        f"/executions/{id}/events.jsonl",
        f"/executions/{id}/live",
        f"/executions/{id}/input.json",
        f"/executions/{id}/steps/x/args.json",
        f"/approvals/{id}",
    ):
        answer = closed.get(path)
        assert answer.status_code == 303, path
        assert urlsplit(answer.headers["Location"]).path == "/login"
    assert "a1" not in words(closed.get("/login").text)
    assert closed.get("/static/page.css").status_code == 200


def test_the_token_lets_in_until_logging_out(closed: Visitor) -> None:
    closed.get("/login")
    before = closed.cookies()
    answer = closed.log_in(TOKEN)
    assert (answer.status_code, answer.headers["Location"]) == (303, "/")
    cookie = set_cookie(answer)
    assert cookie["httponly"]
    assert cookie["samesite"] == "Strict"
    assert closed.cookies() != before
    assert TOKEN not in str(answer.headers)
    session = dict(closed.cookies())
    assert closed.get("/").status_code == 200
    assert closed.get("/login").status_code == 200
    assert closed.fill("/", "/logout").status_code == 303
    assert closed.cookies() == {}
    closed.session.cookies.update(session)
    assert closed.get("/").status_code == 303


@pytest.mark.parametrize("token", ["", "wrong", TOKEN + "x", TOKEN[:-1], "é"])
def test_another_token_does_not(closed: Visitor, token: str) -> None:
    answer = closed.log_in(token)
    assert answer.status_code == 401
    assert "That is neither the token nor a key." in answer.text
    assert closed.get("/").status_code == 303


def test_a_login_needs_the_token_of_its_form(closed: Visitor) -> None:
    closed.get("/login")
    answer = closed.post("/login", {"token": TOKEN, "csrf": "0" * 64, "next": ""})
    assert answer.status_code == 403
    assert closed.get("/").status_code == 303


def test_a_form_that_was_filled_in_before_logging_out_does_nothing(
    closed: Visitor, webhooks: Webhooks
) -> None:
    closed.log_in(TOKEN)
    fields = Form(closed.get("/").text).forms["/logout"]
    closed.post("/logout", fields)
    closed.get("/login")
    path = "/approvals/0192f3a4-1111-7222-8333-444455556666"
    assert closed.post(path, {**fields, **DECISION}).status_code == 403
    fresh = Form(closed.get("/login").text).forms["/login"]
    answer = closed.post(path, {**fresh, **DECISION})
    assert (answer.status_code, answer.headers["Location"]) == (303, "/login")


def test_the_session_is_no_bearer_token_and_the_other_way_round(closed: Visitor) -> None:
    closed.log_in(TOKEN)
    (session,) = closed.cookies().values()
    assert closed.get("/v0/agents").status_code == 401
    assert closed.get("/v0/agents", Authorization=f"Bearer {session}").status_code == 401
    closed.session.cookies.clear()
    assert closed.get("/", Authorization=f"Bearer {TOKEN}").status_code == 303


@pytest.mark.parametrize(
    ("wanted", "led_to"),
    [
        ("/approvals", "/approvals"),
        ("/executions/0192f3a4-1111-7222-8333-444455556666?page=2", None),
        ("/?status=failed&agent_id=a%20b", None),
        ("//evil.test", "/"),
        ("/\\evil.test", "/"),
        ("https://evil.test", "/"),
        ("/\t/evil.test", "/"),
        ("/..//evil.test", "/"),
        ("javascript:alert(1)", "/"),
        ("", "/"),
    ],
)
def test_logging_in_leads_back_into_the_page_only(
    closed: Visitor, wanted: str, led_to: str | None
) -> None:
    answer = closed.fill("/login", "/login", token=TOKEN, next=wanted)
    assert answer.headers["Location"] == (led_to or wanted)


def test_the_login_remembers_where_one_wanted_to_go(closed: Visitor) -> None:
    answer = closed.get("/?status=failed")
    assert answer.headers["Location"] == "/login?next=/?status%3Dfailed"
    fields = Form(closed.get(answer.headers["Location"]).text).forms["/login"]
    assert fields["next"] == "/?status=failed"


def test_a_session_ends_by_itself(monkeypatch: pytest.MonkeyPatch, keys: KeyRing) -> None:
    now = 1000.0
    monkeypatch.setattr("rebuno_sync.kernel.page_guard.time.monotonic", lambda: now)
    guard = Guard(TOKEN, keys)
    id = guard.log_in(TOKEN)
    asked = request(Host="localhost:1", Cookie=f"rebuno_1={id}")
    assert guard.scopes(asked) == EVERYTHING
    now += page_guard.SESSION_SECONDS - 1
    assert guard.scopes(asked) == EVERYTHING
    now += 2
    assert guard.scopes(asked) == frozenset()


def test_sessions_do_not_pile_up(monkeypatch: pytest.MonkeyPatch, keys: KeyRing) -> None:
    monkeypatch.setattr("rebuno_sync.kernel.page_guard._MOST_SESSIONS", 3)
    guard = Guard(TOKEN, keys)
    ids = [guard.log_in(TOKEN) for _ in range(5)]
    let_in = [guard.scopes(request(Host="localhost:1", Cookie=f"rebuno_1={id}")) for id in ids]
    assert [bool(scopes) for scopes in let_in] == [False, False, True, True, True]


# With an API key


@pytest.fixture
def make_key(closed: Visitor) -> Iterator[Callable[..., dict[str, Any]]]:
    caller = Caller(closed.url)

    def make(*scopes: str) -> dict[str, Any]:
        body = {"name": "of a test", "scopes": scopes}
        bearer = {"Authorization": f"Bearer {TOKEN}"}
        answer = caller.client("POST", "/v0/api-keys", body, **bearer)
        assert answer.status_code == 201, answer.text
        return dict(answer.json())

    yield make
    caller.close()


@pytest.fixture
def waiting(closed: Visitor, webhooks: Webhooks) -> str:
    """An approval that waits in the kernel that asks for a token; its path on the page."""
    caller = Caller(closed.url)
    bearer = {"Authorization": f"Bearer {TOKEN}"}
    caller.client("POST", "/v0/policies/a1", {"bundle": POLICY}, **bearer)
    caller.client("POST", "/v0/executions", {"agent_id": "a1"}, **bearer)
    lease = webhooks.next()
    step = {"kind": "tool_call", "target": "ask", "args": {"n": 1}}
    path = f"/v0/executions/{lease['execution_id']}/steps"
    answer = caller.agent("POST", path, step, lease=lease).json()
    caller.close()
    return f"/approvals/{answer['approval_id']}"


def test_a_key_opens_what_its_scopes_allow(
    closed: Visitor, make_key: Callable[..., dict[str, Any]], waiting: str
) -> None:
    key = make_key("approvals:read", "approvals:write")
    answer = closed.log_in(key["token"])
    assert (answer.status_code, answer.headers["Location"]) == (303, "/")
    front = closed.get("/")
    assert (front.status_code, front.headers["Location"]) == (303, "/approvals")
    html = closed.get("/approvals").text
    assert "ask" in html
    assert 'href="/agents"' not in html
    for path in ("/agents", "/agents/a1", "/?status=failed"):
        assert closed.get(path, follow=False).status_code in (303, 403)
    execution = html.split('href="/executions/')[1].partition('"')[0]
    for path in ("", "/events", "/events.jsonl", "/live", "/input.json"):
        answer = closed.get(f"/executions/{execution}{path}")
        assert answer.status_code == 403, path
        assert "lacks the scope executions:read" in answer.text
    assert closed.get(f"{waiting}/args.json").json() == {"n": 1}
    assert closed.fill(waiting, waiting, **DECISION).status_code == 303
    assert "Granted" in closed.get(waiting).text


def test_a_key_that_may_only_read_decides_nothing(
    closed: Visitor, make_key: Callable[..., dict[str, Any]], waiting: str
) -> None:
    closed.log_in(make_key("approvals:read", "executions:read")["token"])
    html = closed.get(waiting).text
    assert "pending" in html
    assert waiting not in Form(html).forms
    fields = Form(html).forms["/logout"]
    answer = closed.post(waiting, {**fields, **DECISION})
    assert answer.status_code == 403
    assert "lacks the scope approvals:write" in answer.text
    assert "pending" in closed.get(waiting).text
    assert "orchard-secret" not in closed.get("/").text


def test_a_key_that_may_not_read_approvals_sees_none(
    closed: Visitor, make_key: Callable[..., dict[str, Any]], waiting: str
) -> None:
    closed.log_in(make_key("executions:read")["token"])
    html = closed.get("/").text
    assert 'href="/approvals"' not in html
    execution = html.split('href="/executions/')[1].partition('"')[0]
    assert "May decide" not in closed.get(f"/executions/{execution}").text


def test_a_key_that_opens_nothing_here(
    closed: Visitor, make_key: Callable[..., dict[str, Any]]
) -> None:
    closed.log_in(make_key("policies:write")["token"])
    assert closed.get("/").status_code == 403
    assert "Log in as somebody else" in closed.get("/").text
    closed.log_in(make_key("agents:read")["token"])
    assert closed.get("/").headers["Location"] == "/agents"


def test_a_deleted_key_ends_its_sessions(
    closed: Visitor, make_key: Callable[..., dict[str, Any]]
) -> None:
    key = make_key("executions:read")
    closed.log_in(key["token"])
    assert closed.get("/").status_code == 200
    bearer = {"Authorization": f"Bearer {TOKEN}"}
    caller = Caller(closed.url)
    assert caller.client("DELETE", f"/v0/api-keys/{key['id']}", **bearer).status_code == 204
    caller.close()
    assert closed.get("/").status_code == 303
    assert closed.log_in(key["token"]).status_code == 401


# The API beside it


def test_the_api_of_an_open_kernel_knows_its_names(visitor: Visitor, caller: Caller) -> None:
    answer = visitor.get("/v0/executions", Host="evil.test")
    assert answer.status_code == 403
    assert answer.json()["code"] == "forbidden"
    assert "allowed_hosts" in answer.json()["message"]
    assert visitor.get("/v0/executions").status_code == 200
    assert visitor.get("/v0/health", Host="evil.test").status_code == 200


def test_the_api_of_a_closed_kernel_goes_by_the_token(closed: Visitor) -> None:
    bearer = f"Bearer {TOKEN}"
    answer = closed.get("/v0/executions", Host="kernel.test", Authorization=bearer)
    assert answer.status_code == 200


def test_agents_call_under_any_name(
    kernel: EmbeddedKernel, caller: Caller, webhooks: Webhooks
) -> None:
    caller.client("POST", "/v0/executions", {"agent_id": "a1"})
    lease = webhooks.next()
    path = f"/v0/executions/{lease['execution_id']}/heartbeat"
    answer = caller.agent("POST", path, lease=lease, extra={"Host": "kernel.internal"})
    assert answer.status_code == 204


@pytest.mark.parametrize(
    "headers",
    [
        {"Origin": "http://evil.test"},
        {"Origin": "null"},
        {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "no-cors"},
    ],
)
def test_no_web_page_can_drive_the_api(caller: Caller, asked: str, headers: dict[str, Any]) -> None:
    answer = caller.client("POST", f"/v0{asked}/grant", {"decided_by": "ann"}, **headers)
    assert answer.status_code == 403
    assert status_of(caller, asked) == "pending"
