"""docs/deploying.md, done: the shop under gunicorn, nginx before it, an execution from end to end.

Not tested, for want of them here: PostgreSQL and the production kernel, whose place the embedded
kernel takes, a systemd that runs the units (it checks them, and :mod:`.deployed` does what they
say), and a container engine.
"""

from __future__ import annotations

import contextlib
import dataclasses
import http.client
import re
import shutil
import socket
import threading
from collections.abc import Iterator
from urllib.parse import urlsplit

import pytest

from rebuno_sync import Client
from rebuno_sync.wire import Execution
from tests.documentation.pages import ROOT, Block, blocks
from tests.integration.deployed import FILES, LEASE, OWNER, SECRET, Site, deployed
from tests.scripted import wait_until

PAGE = ROOT / "docs" / "deploying.md"
ITEMS = ("tea", "milk", "sugar", "honey")


@pytest.fixture
def site() -> Iterator[Site]:
    with deployed() as site:
        site.service.start()
        register(site)
        yield site


def register(site: Site) -> None:
    site.client.register_agent("shop", site.webhook, SECRET)


def ours() -> list[Block]:
    """The blocks of the page that are run here."""
    found = [block for block in blocks(PAGE) if block.by]
    assert {block.by for block in found} == {"tests/integration/test_deploying.py"}
    return found


def commands(*, about: str = "") -> list[str]:
    """The commands of the page; only those of blocks in which ``about`` is found, if given."""
    return [
        command
        for block in ours()
        if block.language == "console" and about in block.text
        for command in re.findall(r"^\$ ((?:.*\\\n)*.*)$", block.text, re.MULTILINE)
    ]


def test_the_page_shows_the_files_as_they_are() -> None:
    shown = {}
    for block in ours():
        if block.language != "console":
            name = block.text.partition("\n")[0].removeprefix("# ").rpartition("/")[2]
            shown[name] = block.text
    there = {
        path.name: path.read_text(encoding="utf-8") for path in FILES.iterdir() if path.is_file()
    }
    assert shown == there


def test_the_commands_of_the_page_run() -> None:
    with deployed() as site:
        said = {}
        for command in commands():
            if command.startswith("systemd-analyze"):
                continue  # in a test of its own
            said[command] = site.run(command)
            if command.startswith("rebuno-sync keys add"):
                site.configure("REBUNO_API_KEY", said[command].strip())
        orders = list(site.client.list(agent_id="shop"))
        assert [order.status for order in orders] == ["completed"], site.log
        doctor = next(text for command, text in said.items() if "doctor" in command)
        assert "✖" not in doctor
        for found in ("the kernel takes the signature of shop", "the agent shop answers at"):
            assert found in doctor
        secret = (site.root / "agent-secret").read_text(encoding="utf-8")
        assert (site.root / "etc/shop/agent-secret").read_text(encoding="utf-8") == secret
        # The service that was restarted, with the secret that was replaced, works.
        site.service.kill()
        site.service.start()
        paid(site, site.order("coffee"))


def test_systemd_takes_the_units() -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("NOT TESTED: systemd is not installed here, so nothing checks the units")
    checks = [command for command in commands() if command.startswith("systemd-analyze")]
    assert [command.split()[1] for command in checks] == ["verify", "security"]
    with deployed() as site:
        # What it does not understand it only mentions.
        said = [site.run(f"{command} 2>&1") for command in checks]
    assert "shop.s" not in said[0], said[0]


def paid(site: Site, execution_id: str) -> Execution:
    """Wait for the end of an execution, and hold that its order was paid, each item once."""
    found = site.client.wait(execution_id, timeout=60)
    assert found.status == "completed", f"{found}\n{site.log}"
    number = found.output["order"]
    state = site.session.get(f"{site.public}/orders/{number}", timeout=30).json()
    assert state == {"state": "paid"}
    assert len(found.output["receipts"]) == len(set(found.output["receipts"]))
    steps = [(s.target, s.status) for s in site.client.steps(execution_id)]
    assert steps.count(("mark_paid", "succeeded")) == 1, steps
    return found


def test_an_order_goes_from_end_to_end_through_nginx(site: Site) -> None:
    found = paid(site, site.order(*ITEMS))
    assert site.payments.items() == dict.fromkeys(ITEMS, 1)
    assert site.attempts(found.id) == 1
    assert re.search(rf"^INFO \d+ {found.id} 1 fulfilment: charged tea$", site.log, re.MULTILINE)
    # Webhooks come in by one server, and what the agent says to its kernel leaves by the other.
    accesses = (site.root / "access").read_text(encoding="utf-8")
    assert accesses.count('"POST /agents/shop/webhook HTTP/1.1" 2') == 1
    assert f'"POST /v0/executions/{found.id}/complete HTTP/1.1" 204' in accesses


def test_a_reload_lets_a_handler_end_while_new_workers_take_orders(site: Site) -> None:
    site.payments.hold("sugar")
    first = site.order(*ITEMS)
    site.wait_for("sugar")
    before = wait_until(lambda: len(site.workers()) == 2 and site.workers())
    site.service.reload()
    # Two new ones, and of the old ones at least the one with the handler.
    wait_until(lambda: len(site.workers() - before) == 2, what="no new workers came")
    wait_until(lambda: len(site.workers() & before) == 1, what="no old worker has gone")
    second = paid(site, site.order("coffee"))
    assert site.workers() & before, "the handler did not get its time"
    site.payments.let_go("sugar")
    found = paid(site, first)
    assert site.attempts(found.id) == site.attempts(second.id) == 1
    assert site.payments.items() == dict.fromkeys((*ITEMS, "coffee"), 1)
    wait_until(lambda: not site.workers() & before, what="an old worker stays")


def test_a_stop_lets_one_handler_end_and_gives_the_other_up_for_the_next_start() -> None:
    with deployed(fulfilment={"shutdown_timeout=20": "shutdown_timeout=3"}) as site:
        site.service.start()
        register(site)
        for item in ("sugar", "salt"):
            site.payments.hold(item)
        ending = site.order("tea", "sugar")
        given_up = site.order("salt", "pepper")
        for item in ("sugar", "salt"):
            site.wait_for(item)
        master = site.service.begin_to_stop()
        # Said when a worker takes no more connections, before its handlers get their time.
        wait_until(lambda: site.log.count("Worker exiting") == 2)
        # Nobody listens now, and what comes waits on the socket for the next master.
        late: list[str] = []
        customer = threading.Thread(target=lambda: late.append(site.order("coffee")))
        customer.start()
        site.payments.let_go("sugar")
        assert site.client.wait(ending, timeout=60).status == "completed"
        assert master.wait(60) == 0
        assert given_up in site.log
        assert customer.is_alive()
        assert site.client.get(given_up).status == "running"

        site.service.start()
        customer.join(60)
        paid(site, ending)
        paid(site, late[0])
        site.kernel.advance(LEASE + 1)
        found = paid(site, given_up)
        assert [site.attempts(e) for e in (ending, late[0], given_up)] == [1, 1, 2]
        assert site.payments.items() == dict.fromkeys(
            ("tea", "sugar", "salt", "pepper", "coffee"), 1
        )
        targets = [step.target for step in site.client.steps(found.id)]
        assert "charge.reconcile" in targets


def test_only_the_kernel_comes_to_the_webhook(site: Site) -> None:
    url = f"{site.public}/agents/shop/webhook"
    assert site.session.post(url, data=b"{}", timeout=30).status_code == 404
    forged = {"Rebuno-Signature": "sha256=" + "0" * 64}
    internal = [
        site.session.get(site.webhook.replace("/agents/shop/webhook", path), timeout=30).status_code
        for path in ("/health", "/agents/shop", "/agents/shop/webhook/more")
    ]
    assert internal == [404, 404, 404]
    answer = site.session.post(site.webhook, data=b"{}", headers=forged, timeout=30)
    assert (answer.status_code, answer.text) == (401, "")
    large = site.session.post(site.webhook, data=b"x" * 70_000, timeout=30)
    assert (large.status_code, "nginx" in large.text) == (413, True)
    # Every address 127.x.y.z is this machine, and only one of them is allowed.
    parts = urlsplit(site.webhook)
    assert parts.port is not None
    stranger = http.client.HTTPConnection(
        "127.0.0.1", parts.port, timeout=30, source_address=("127.0.0.2", 0)
    )
    with contextlib.closing(stranger):
        stranger.request("POST", parts.path, b"{}", forged)
        assert stranger.getresponse().status == 403


def test_the_proxy_of_the_kernel_takes_large_bodies_and_lets_streams_through(site: Site) -> None:
    with Client(site.kernel_proxy, OWNER) as client:
        made = client.create("shop", {"note": "x" * 3_000_000})
        assert client.get(made.id).input["note"][-1] == "x"
    url = f"{site.kernel_proxy}/v0/executions/{made.id}/stream"
    owner = {"Authorization": f"Bearer {OWNER}"}
    with site.session.get(url, headers=owner, stream=True, timeout=10) as stream:
        # The first line comes at once, and the next one fifteen seconds later.
        assert next(stream.iter_lines()) == b": connected"


@pytest.mark.parametrize(("method", "times"), [("GET", 2), ("POST", 1)])
def test_the_proxy_of_the_kernel_sends_reads_again_and_submissions_never(
    method: str, times: int
) -> None:
    path = "/v0/executions/a%2Fb//c?d=%20"  # signatures are over it as it is
    with dying_server() as one, dying_server() as two:
        with deployed(replicas=(one.address, two.address)) as site:
            answer = site.session.request(method, site.kernel_proxy + path, timeout=30)
        assert answer.status_code == 502
    assert one.requests + two.requests == [f"{method} {path}".encode()] * times


@dataclasses.dataclass
class Dying:
    """A server that takes a request and closes the connection instead of answering."""

    address: str
    requests: list[bytes] = dataclasses.field(default_factory=list)


@contextlib.contextmanager
def dying_server() -> Iterator[Dying]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        server = Dying(f"127.0.0.1:{listener.getsockname()[1]}")

        def serve() -> None:
            while True:
                connection, _ = listener.accept()
                with connection:
                    if not (received := connection.recv(65536)):
                        return
                    server.requests.append(received.partition(b" HTTP/")[0])

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield server
        finally:
            # An empty connection is the sign to stop.
            socket.create_connection(listener.getsockname()).close()
            thread.join()


def test_another_secret_comes_in_while_executions_run(site: Site) -> None:
    site.payments.hold("sugar")
    first = site.order(*ITEMS)
    site.wait_for("sugar")
    (site.root / "agent-secret").write_text(SECRET + "\n", encoding="utf-8")
    for number, command in enumerate(commands(about="new-secret")):
        site.run(command)
        found = paid(site, site.order(f"item-{number}"))
        assert site.attempts(found.id) == 1
    site.payments.let_go("sugar")
    assert site.attempts(paid(site, first).id) == 1
    new = (site.root / "agent-secret").read_text(encoding="utf-8")
    assert (site.root / "etc/shop/agent-secret").read_text(encoding="utf-8") == new
    assert new.strip() != SECRET
    accesses = (site.root / "access").read_text(encoding="utf-8")
    assert not re.search(r'"POST /agents/shop/webhook HTTP/1.1" 4', accesses)
