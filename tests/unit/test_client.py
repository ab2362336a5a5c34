"""The operator's client, against scripted kernels, the embedded one and odd servers."""

from __future__ import annotations

import contextlib
import inspect
import json
import threading
import types
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest

from rebuno_sync import Client
from rebuno_sync import client as client_module
from rebuno_sync import transport as transport_module
from rebuno_sync.errors import (
    APIError,
    ConflictError,
    ForbiddenError,
    NetworkError,
    NotFoundError,
    UnauthorizedError,
    ValidationError,
)
from rebuno_sync.kernel import EmbeddedKernel
from tests.scripted import (
    GENERATION_1,
    GENERATION_2,
    GENERATION_3,
    Answer,
    Recorded,
    ScriptedKernel,
    Verdict,
    wait_until,
)
from tests.scripted.http import Server
from tests.unit.sockets import Connection, SocketServer, reserved_port

NOBODY = "0192f3a4-1111-7222-8333-444455556666"


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("REBUNO_URL", "REBUNO_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(transport_module, "_FIRST_PAUSE", 0.001)
    monkeypatch.setattr(transport_module, "_LONGEST_PAUSE", 0.001)
    monkeypatch.setattr(client_module, "_FIRST_POLL", 0.001)
    monkeypatch.setattr(client_module, "_LONGEST_POLL", 0.01)


@pytest.fixture
def embedded() -> Iterator[EmbeddedKernel]:
    with EmbeddedKernel() as kernel:
        yield kernel


@pytest.fixture
def client(embedded: EmbeddedKernel) -> Iterator[Client]:
    with Client(embedded.url) as client:
        client.register_agent("a1", "http://127.0.0.1:9/webhook", "secret")
        yield client


@contextlib.contextmanager
def answering(respond: Callable[[Recorded], Answer]) -> Iterator[tuple[Client, list[Recorded]]]:
    """A client of a server that says whatever ``respond`` says."""
    seen: list[Recorded] = []

    def note(request: Recorded) -> Answer:
        seen.append(request)
        return respond(request)

    with Server(note) as server, Client(server.url) as client:
        yield client, seen


# Construction


def test_where_the_kernel_is(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"pass base_url=… or set REBUNO_URL in the environment"):
        Client()
    with pytest.raises(ValueError, match="is not a kernel URL"):
        Client("localhost:8080")
    monkeypatch.setenv("REBUNO_URL", "http://env.example/")
    assert repr(Client()) == "<Client of http://env.example>"
    assert repr(Client("http://arg.example")) == "<Client of http://arg.example>"


def test_the_token(monkeypatch: pytest.MonkeyPatch) -> None:
    def token(**options: Any) -> str | None:
        with Server(lambda request: seen.append(request) or Answer.json([])) as server:  # type: ignore[func-returns-value]
            list(Client(server.url, **options).agents())
        value: str | None = seen[-1].headers.get("Authorization")
        return value

    seen: list[Recorded] = []
    assert token() is None
    assert token(api_key="abc") == "Bearer abc"
    monkeypatch.setenv("REBUNO_API_KEY", "from-env")
    assert token() == "Bearer from-env"
    assert token(api_key="abc") == "Bearer abc"
    for bad in ("abc\n", "ä", "a\x00b"):
        with pytest.raises(ValueError, match="no HTTP header can carry") as caught:
            Client("http://x", api_key=bad)
        assert bad not in str(caught.value)


def test_a_closed_client() -> None:
    with Client("http://127.0.0.1:1") as client:
        pass
    for call in (
        lambda: client.get(NOBODY),
        lambda: next(client.stream(NOBODY)),
        client.health,
        lambda: next(client.list()),
    ):
        with pytest.raises(RuntimeError, match="this client is closed"):
            call()


def test_the_pool_is_the_processes() -> None:
    """Closing one client must not break another, or the agents of the process."""
    with answering(lambda request: Answer.json([])) as (client, _):
        with Client(client._transport.base_url) as other:
            assert list(other.agents()) == []
        assert list(client.agents()) == []


# Executions


def test_create_get_cancel(client: Client) -> None:
    created = client.create("a1", {"n": 10**30, "x": 1.0, "t": (1, 2)})
    assert (created.agent_id, created.status, created.done) == ("a1", "running", False)
    assert created.input == {"n": 10**30, "x": 1.0, "t": [1, 2]}
    assert client.get(created.id).input == created.input
    assert client.cancel(created.id) is None  # type: ignore[func-returns-value]
    found = client.get(created.id)
    assert (found.status, found.done) == ("cancelled", True)
    with pytest.raises(ConflictError):
        client.cancel(created.id)


def test_errors(client: Client, embedded: EmbeddedKernel) -> None:
    for call in (
        lambda: client.get(NOBODY),
        lambda: client.create("nobody"),
        lambda: client.agent("nobody"),
        lambda: client.approval(NOBODY),
        lambda: list(client.events(NOBODY)),
        lambda: list(client.steps(NOBODY)),
    ):
        with pytest.raises(NotFoundError):
            call()
    with pytest.raises(ValidationError):
        client.get("not-a-uuid")
    with pytest.raises(ValidationError, match="r1"):
        client.set_policy("a1", "default_action: deny\nrules: [{id: r1, when: {}, then: {}}]")
    with pytest.raises(TypeError, match=r"execution\.input\.a is a set"):
        client.create("a1", {"a": {1}})
    for bad in ("", "..", "."):
        with pytest.raises(ValueError, match="is not an id"):
            client.get(bad)
    with EmbeddedKernel(bearer_token="t") as guarded:
        with pytest.raises(UnauthorizedError):
            Client(guarded.url).get(NOBODY)
        with pytest.raises(NotFoundError):
            Client(guarded.url, "t").get(NOBODY)


@pytest.mark.parametrize("generation", [GENERATION_1, GENERATION_2], ids=str)
def test_old_kernels_are_sent_what_they_know(generation: Any) -> None:
    with ScriptedKernel(generation) as kernel, Client(kernel.url) as client:
        info = client.register_agent("a1", "http://x/webhook", "s")
        assert (info.id, info.webhook_url) == ("a1", "http://x/webhook")
        assert [a.id for a in client.agents()] == ["a1"]
        created = client.create("a1", {"a": 1})
        assert client.get(created.id).status == "running"
        assert [e.id for e in client.list()] == [created.id]
        assert list(client.steps(created.id)) == []
        assert list(client.approvals()) == []
        assert client.health()
        client.delete_agent("a1")
        with pytest.raises(NotFoundError):
            client.agent("a1")
        assert json.loads(kernel.sent("create")[0].body) == {"agent_id": "a1", "input": {"a": 1}}
        assert set(json.loads(kernel.sent("register")[0].body)) == {"id", "webhook_url", "secret"}


def test_fields_of_generation_3() -> None:
    with ScriptedKernel(GENERATION_3) as kernel, Client(kernel.url) as client:
        client.register_agent("a1", "http://x", "s", lease_timeout_seconds=1.5)
        client.create("a1", session="s1", idempotency_key="k", on_behalf_of="ann")
        client.create(
            "a1",
            parent_execution_id="p",
            spawned_by={"execution_id": "e", "step_id": "s"},
        )
        assert json.loads(kernel.sent("register")[0].body)["lease_timeout_seconds"] == 1.5
        bodies = [json.loads(r.body) for r in kernel.sent("create")]
        assert bodies == [
            {
                "agent_id": "a1",
                "input": None,
                "session": "s1",
                "idempotency_key": "k",
                "on_behalf_of": "ann",
            },
            {
                "agent_id": "a1",
                "input": None,
                "parent_execution_id": "p",
                "spawned_by": {"execution_id": "e", "step_id": "s"},
            },
        ]


def test_a_creation_is_repeated_only_under_a_key() -> None:
    ok = Answer.json({"id": "1", "agent_id": "a", "status": "running"}, 201)
    answers: list[Answer] = []
    with answering(lambda request: answers.pop(0) if answers else ok) as (client, seen):
        answers += [Answer(503)]
        with pytest.raises(APIError):
            client.create("a")
        assert len(seen) == 1
        answers += [Answer(503), Answer(502)]
        assert client.create("a", idempotency_key="k").id == "1"
        assert len(seen) == 4


@pytest.mark.parametrize(
    ("call", "repeated"),
    [
        (lambda c: c.get(NOBODY), True),
        (lambda c: c.cancel(NOBODY), False),
        (lambda c: c.grant("x"), False),
        (lambda c: c.deny("x"), False),
        (lambda c: c.register_agent("a", "u", "s"), True),
        (lambda c: c.set_policy("a", "x"), True),
        (lambda c: c.delete_agent("a"), False),
    ],
)
def test_what_is_repeated(call: Callable[[Client], Any], repeated: bool) -> None:
    answers = [Answer(503), Answer(500)]
    ok = Answer.json({"id": "1", "agent_id": "a", "status": "running"})
    with answering(lambda request: answers.pop(0) if answers else ok) as (client, seen):
        if repeated:
            call(client)
            assert len(seen) == 3
        else:
            with pytest.raises(APIError):
                call(client)
            assert len(seen) == 1


def test_a_kernel_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "PATIENCE", 0.01)
    with reserved_port() as reserved:
        client = Client(f"http://127.0.0.1:{reserved.getsockname()[1]}")
        with pytest.raises(NetworkError, match="could not be reached"):
            client.get(NOBODY)
        assert client.health() is False


@pytest.mark.parametrize(
    ("answer", "healthy"),
    [
        (Answer.json({"status": "ready"}), True),
        (Answer.json({"status": "starting"}, 503), False),
        (Answer(404, b"404 page not found", "text/plain"), False),
        (Answer(200, b"<html>", "text/html"), False),
    ],
)
def test_health(answer: Answer, healthy: bool) -> None:
    with answering(lambda request: answer) as (client, seen):
        assert client.health() is healthy
    assert [r.target for r in seen] == ["/v0/ready"]


@pytest.mark.parametrize("body", ["[]", "{}", '"x"', '{"id":"1"}', "1"])
def test_answers_that_make_no_sense(body: str) -> None:
    with answering(lambda request: Answer(200, body.encode(), "application/json")) as (client, _):
        for call in (
            lambda: client.get(NOBODY),
            lambda: client.create("a"),
            lambda: client.step(NOBODY, "s"),
            lambda: client.approval("x"),
        ):
            with pytest.raises(NetworkError, match="makes no sense"):
                call()
        if body != "[]":
            for call in (
                lambda: list(client.agents()),
                lambda: list(client.steps(NOBODY)),
                lambda: list(client.approvals()),
                lambda: list(client.events(NOBODY)),
            ):
                with pytest.raises(NetworkError, match="makes no sense"):
                    call()


# Pages


def test_lists_go_on_page_after_page(
    client: Client, embedded: EmbeddedKernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_module, "_PAGE", 3)
    client.register_agent("a2", "http://127.0.0.1:9/webhook", "secret")
    ids = [client.create("a1").id for _ in range(7)]
    other = client.create("a2").id
    assert [e.id for e in client.list()] == [other, *reversed(ids)]
    assert [e.id for e in client.list(agent_id="a1")] == list(reversed(ids))
    assert [e.id for e in client.list(limit=4)] == [other, *reversed(ids[4:])]
    assert list(client.list(limit=0)) == []
    client.cancel(ids[2])
    assert [e.id for e in client.list(status="cancelled")] == [ids[2]]
    assert list(client.list(session="none")) == []


def test_pages_are_read_as_they_are_needed() -> None:
    def respond(request: Recorded) -> Answer:
        query = parse_qs(urlsplit(request.target).query)
        first = int(query.get("cursor", ["0"])[0])
        count = int(query["limit"][0])
        rows = [
            {"id": str(n), "agent_id": "a", "status": "running"}
            for n in range(first, first + count)
        ]
        return Answer.json({"executions": rows, "next_cursor": str(first + count)})

    with answering(respond) as (client, seen):
        found = client.list()
        assert seen == []
        assert [next(found).id for _ in range(3)] == ["0", "1", "2"]
        assert len(seen) == 1
        assert len(list(client.list(limit=450))) == 450
        limits = [parse_qs(urlsplit(r.target).query)["limit"] for r in seen[1:]]
        assert limits == [["200"], ["200"], ["50"]]
        assert all(inspect.isgenerator(g) for g in (found, client.steps("x"), client.events("x")))


def test_a_list_may_be_null() -> None:
    for body in ("null", '{"executions":null}'):
        answer = Answer(200, body.encode(), "application/json")
        with answering(lambda request, answer=answer: answer) as (client, _):
            if body == "null":
                assert list(client.agents()) == []
                assert list(client.steps(NOBODY)) == []
                assert list(client.events(NOBODY)) == []
                assert list(client.approvals()) == []
            else:
                assert list(client.list()) == []


def test_events_in_pages(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    created = client.create("a1")
    client.cancel(created.id)
    everything = list(client.events(created.id))
    assert [e.event_seq for e in everything] == list(range(1, len(everything) + 1))
    assert everything[0].type == "execution.created"
    assert everything[0].payload["execution_id"] == created.id
    monkeypatch.setattr(client_module, "_EVENT_PAGE", 2)
    assert list(client.events(created.id)) == everything
    assert list(client.events(created.id, after_seq=3)) == everything[3:]
    assert list(client.events(created.id, after_seq=len(everything))) == []


# Waiting


def test_wait(client: Client) -> None:
    created = client.create("a1")
    timer = threading.Thread(target=lambda: client.cancel(created.id))
    timer.start()
    assert client.wait(created.id, 30).status == "cancelled"
    timer.join()
    assert client.wait(created.id, 0).status == "cancelled"


@pytest.mark.parametrize("timeout", [0, 0.02])
def test_wait_gives_up(client: Client, timeout: float) -> None:
    created = client.create("a1")
    with pytest.raises(TimeoutError, match=rf"{created.id} is still running after {timeout:g} s"):
        client.wait(created.id, timeout)


def test_wait_takes_a_last_look(monkeypatch: pytest.MonkeyPatch) -> None:
    """What ended while the last pause ran has ended in time."""
    now = [0.0]

    def sleep(seconds: float) -> None:
        now[0] += seconds

    clock = types.SimpleNamespace(monotonic=lambda: now[0], sleep=sleep)
    monkeypatch.setattr(client_module, "time", clock)
    monkeypatch.setattr(client_module, "_FIRST_POLL", 4.0)
    monkeypatch.setattr(client_module, "_LONGEST_POLL", 60.0)
    looks: list[float] = []

    def get(execution_id: str) -> Any:
        looks.append(now[0])
        status = "completed" if now[0] >= 10.0 else "running"
        return client_module.Execution("1", "a", status)

    client = Client("http://127.0.0.1:1")
    monkeypatch.setattr(client, "get", get)
    assert client.wait("1", 10.0).done
    assert looks == [0.0, 4.0, 10.0]


def test_wait_bears_a_kernel_that_restarts(monkeypatch: pytest.MonkeyPatch) -> None:
    client = Client("http://127.0.0.1:1")
    away = iter([NetworkError("refused"), NetworkError("refused"), None])

    def get(execution_id: str) -> Any:
        error = next(away)
        if error is not None:
            raise error
        return client_module.Execution("1", "a", "completed")

    monkeypatch.setattr(client, "get", get)
    assert client.wait("1", 30.0).done


def test_wait_tells_of_a_kernel_that_stays_away(monkeypatch: pytest.MonkeyPatch) -> None:
    client = Client("http://127.0.0.1:1")

    def get(execution_id: str) -> Any:
        raise NetworkError("refused")

    monkeypatch.setattr(client, "get", get)
    for timeout in (0.1, None):
        with pytest.raises(NetworkError, match="refused"):
            client.wait("1", timeout)


def test_wait_until_blocked() -> None:
    policy = lambda kind, target, args: Verdict("require_approval")  # noqa: E731
    with ScriptedKernel(GENERATION_3, policy=policy) as kernel, Client(kernel.url) as client:
        run = kernel.create()
        run.status = "blocked"
        assert client.wait(run.id, 30, until_blocked=True).status == "blocked"
        with pytest.raises(TimeoutError, match="still blocked"):
            client.wait(run.id, 0)


def test_watch_sees_everything_to_the_end(client: Client) -> None:
    created = client.create("a1")
    seen: list[Any] = []
    watcher = threading.Thread(target=lambda: seen.extend(client.watch(created.id, timeout=60)))
    watcher.start()
    wait_until(lambda: len(seen) >= 2)
    client.cancel(created.id)
    watcher.join(60)
    assert not watcher.is_alive()
    assert seen == list(client.events(created.id))
    assert "execution.cancelled" in [e.type for e in seen]
    assert list(client.watch(created.id, after_seq=2)) == seen[2:]


def test_watch_gives_up(client: Client) -> None:
    created = client.create("a1")
    with pytest.raises(TimeoutError, match="has not ended after 0 s"):
        list(client.watch(created.id, timeout=0))


# Live output


def stream(body: bytes, head: bytes = b"", *, cut: bool = False) -> Callable[[Connection], None]:
    def serve(connection: Connection) -> None:
        connection.request()
        connection.sock.sendall(
            b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"
            b"Transfer-Encoding: chunked\r\n\r\n"
        )
        # Cut where nobody expects it: within lines, within characters.
        for n in range(0, len(body), 7):
            piece = body[n : n + 7]
            connection.sock.sendall(b"%x\r\n%s\r\n" % (len(piece), piece))
        if not cut:
            connection.sock.sendall(b"0\r\n\r\n")

    return serve


def test_live_output() -> None:
    body = (
        ': hello\n\nid: 7\ndata: {"step_id":"s","seq":0,"data":"Grü"}\n\n'
        ': still here\r\n\r\ndata:{"step_id":"s","seq":1,"data":"ße\\n","more":1}\r\n\r\n'
    ).encode()
    with SocketServer(stream(body)) as server:
        found = list(Client(server.url, "tok").stream(NOBODY))
    assert [(d.step_id, d.seq, d.data) for d in found] == [("s", 0, "Grü"), ("s", 1, "ße\n")]
    assert found[1].extra == {"more": 1}


@pytest.mark.parametrize("line", [b"data: {", b"data: []", b'data: {"seq":1}', b"data: \xff"])
def test_live_output_that_makes_no_sense(line: bytes) -> None:
    with (
        SocketServer(stream(line + b"\n\n")) as server,
        pytest.raises(NetworkError, match="makes no sense"),
    ):
        list(Client(server.url).stream(NOBODY))


def test_live_output_that_breaks_off() -> None:
    body = b'data: {"step_id":"s","seq":0,"data":"x"}\n\n'
    with SocketServer(stream(body, cut=True)) as server:
        found = Client(server.url).stream(NOBODY)
        assert next(found).data == "x"
        with pytest.raises(NetworkError, match="broke off"):
            next(found)


def test_live_output_that_falls_silent() -> None:
    def serve(connection: Connection) -> None:
        connection.request()
        connection.sock.sendall(b"HTTP/1.1 200 OK\r\n\r\n: hello\n")
        connection.request()

    with SocketServer(serve) as server, pytest.raises(NetworkError, match="broke off"):
        list(Client(server.url).stream(NOBODY, timeout=0.05))


def test_a_stream_nobody_reads_on_is_closed() -> None:
    ended = threading.Event()

    def serve(connection: Connection) -> None:
        connection.request()
        connection.sock.sendall(
            b'HTTP/1.1 200 OK\r\n\r\ndata: {"step_id":"s","seq":0,"data":"x"}\n\n'
        )
        if connection.request() == b"":
            ended.set()

    with SocketServer(serve) as server:
        found = Client(server.url).stream(NOBODY)
        next(found)
        found.close()
        assert ended.wait(30)


def test_a_stream_that_is_refused(client: Client) -> None:
    with pytest.raises(NotFoundError):
        next(client.stream(NOBODY))


# Approvals, agents, policies


def test_approvals() -> None:
    policy = lambda kind, target, args: Verdict(  # noqa: E731
        "require_approval", approvers=("ann",), message="really?"
    )
    with ScriptedKernel(GENERATION_3, policy=policy) as kernel, Client(kernel.url) as client:
        from tests.unit.test_kernel_client import begin, client_of, submit

        granted, denied = begin(kernel), begin(kernel)
        for run, lease in (granted, denied):
            assert submit(client_of(kernel, "v1"), run, lease).decision == "blocked"
        first, second = client.approvals()
        assert (first.status, first.approvers, first.message) == ("pending", ["ann"], "really?")
        assert client.approval(first.id) == first
        with pytest.raises(ForbiddenError):
            client.grant(first.id, decided_by="bob")
        client.grant(first.id, decided_by="ann", rationale="fine")
        client.deny(second.id, decided_by="ann", rationale="not today")
        with pytest.raises(ConflictError):
            client.grant(first.id, decided_by="ann")
        decided = client.approval(first.id)
        assert (decided.status, decided.decided_by, decided.rationale) == ("granted", "ann", "fine")
        assert list(client.approvals()) == []
        (step,) = client.steps(denied[0].id, status="terminal")
        assert (step.status, step.error) == ("denied", {"reason": "not today"})
        assert client.step(denied[0].id, step.step_id) == step


def test_agents_and_policies(client: Client) -> None:
    info = client.register_agent("a 2~", "http://x/webhook", "s3cret", lease_timeout_seconds=7.5)
    assert (info.id, info.lease_timeout_seconds) == ("a 2~", 7.5)
    assert client.agent("a 2~").webhook_url == "http://x/webhook"
    assert {a.id for a in client.agents()} == {"a1", "a 2~"}
    assert "s3cret" not in repr([vars(a) for a in client.agents()])
    client.set_policy("a1", "default_action: deny\nrules: []\n")
    client.delete_agent("a 2~")
    assert [a.id for a in client.agents()] == ["a1"]


def test_many_threads_share_a_client(client: Client) -> None:
    created = client.create("a1")
    failures: list[BaseException] = []

    def read() -> None:
        try:
            for _ in range(10):
                assert client.get(created.id).id == created.id
        except BaseException as exc:
            failures.append(exc)

    threads = [threading.Thread(target=read) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
