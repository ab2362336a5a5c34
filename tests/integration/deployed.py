"""The files of ``examples/deploy`` as docs/deploying.md deploys them, on this machine, by no root.

Paths of the page lie in a directory, its addresses are free ports of the loop-back interface, and
the embedded kernel stands where the page has the Rebuno kernel on PostgreSQL. nginx is a real one,
on our own configuration; what systemd would do is done as the unit says by :class:`Service`.
"""

from __future__ import annotations

import configparser
import contextlib
import os
import pwd
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import requests
import trustme
from flask import Flask, abort, request

from rebuno_sync import Client
from rebuno_sync.kernel import EmbeddedKernel
from tests.scripted import served, wait_until

ROOT = Path(__file__).resolve().parents[2]
FILES = ROOT / "examples" / "deploy"
OWNER = "the-token-of-the-owner"
LEASE = 120.0
#: What the page has at these places lies beneath a directory of the test.
PATHS = (
    *("/etc/nginx", "/etc/shop", "/etc/ssl", "/etc/systemd"),
    *("/run/shop", "/srv/shop", "/var/lib/shop"),
)
#: What the page types where the site has its own.
SECRET = "orchard-secret"
_PATIENCE = 60.0


class Payments:
    """The payment service that the shop calls; knows each charge by its reference."""

    def __init__(self) -> None:
        self.charged: Counter[str] = Counter()
        self._held: dict[str, threading.Event] = {}
        self.app = Flask("payments")
        self.app.post("/charges")(self._charge)
        self.app.get("/charges/<reference>")(self._find)

    def hold(self, item: str) -> None:
        """Take charges of ``item``, and let whoever asked for them wait for the answer."""
        self._held[item] = threading.Event()

    def let_go(self, item: str) -> None:
        self._held[item].set()

    def items(self) -> Counter[str]:
        """How often each item was charged."""
        found: Counter[str] = Counter()
        for reference, times in self.charged.items():
            found[reference[37:]] += times
        return found

    def close(self) -> None:
        for event in self._held.values():
            event.set()

    def _charge(self) -> dict[str, str]:
        reference = request.get_json()["reference"]
        self.charged[reference] += 1
        if held := self._held.get(reference[37:]):
            held.wait(_PATIENCE)
        return {"receipt": f"receipt of {reference}"}

    def _find(self, reference: str) -> dict[str, str]:
        if reference not in self.charged:
            abort(404)
        return {"receipt": f"receipt of {reference}"}


class Service:
    """A service that is started, reloaded and stopped as its unit says."""

    def __init__(self, unit: Path, socket_unit: Path, log: Path) -> None:
        self._unit = _read_unit(unit)
        self._log = log
        path = Path(_read_unit(socket_unit)["Socket"]["ListenStream"])
        self._notices = path.parent / "notices"
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(path))
        self._listener.listen(128)
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def folder(self) -> str:
        return str(self._unit["Service"]["WorkingDirectory"])

    def environment(self) -> dict[str, str]:
        """What its processes have in their environment."""
        return {
            **_read_environment(Path(self._unit["Service"]["EnvironmentFile"])),
            "PATH": os.environ["PATH"],
            "PYTHONPATH": str(ROOT),
            "TMPDIR": str(self._notices.parent),
        }

    def start(self) -> None:
        """Start it, and return when it has told that it is ready (``Type=notify``)."""
        service = self._unit["Service"]
        assert service["Type"] == "notify"
        environment = {**self.environment(), "NOTIFY_SOCKET": str(self._notices)}
        with (
            socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as notices,
            self._log.open("ab") as log,
        ):
            notices.bind(str(self._notices))
            notices.settimeout(_PATIENCE)
            number = self._listener.fileno()
            self.process = subprocess.Popen(
                # The third file is the socket, and the pid is that of whom it is for.
                ["bash", "-c", f"exec 3<&{number}; LISTEN_PID=$$ exec {service['ExecStart']}"],
                cwd=self.folder,
                env={**environment, "LISTEN_FDS": "1"},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=[number],
                start_new_session=True,
            )
            try:
                assert b"READY=1" in notices.recv(1024).split(b"\n")
            finally:
                self._notices.unlink()

    def reload(self) -> None:
        assert self.process is not None
        command = self._unit["Service"]["ExecReload"]
        environment = {"MAINPID": str(self.process.pid), "PATH": os.environ["PATH"]}
        subprocess.run(["bash", "-c", command], env=environment, check=True, timeout=_PATIENCE)

    def begin_to_stop(self) -> subprocess.Popen[bytes]:
        assert self._unit["Service"]["KillMode"] == "mixed"
        assert self.process is not None
        self.process.terminate()
        return self.process

    def stop(self) -> None:
        """Stop it; fails when systemd would have lost its patience."""
        process = self.begin_to_stop()
        try:
            process.wait(float(self._unit["Service"]["TimeoutStopSec"]))
        finally:
            self.kill()

    def restart(self) -> None:
        self.stop()
        self.start()

    def kill(self) -> None:
        """End whatever of it is left."""
        process, self.process = self.process, None
        if process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    def close(self) -> None:
        self.kill()
        self._listener.close()


class Site:
    """A machine with the shop on it.

    Attributes:
        kernel: the embedded kernel, which listens where the page has two of its replicas.
        client: an operator's client, past every proxy.
        payments: the payment service.
        service: the shop under gunicorn.
        webhook: the webhook's URL, through nginx.
        public: the shop's URL for customers, through nginx.
        kernel_proxy: the kernel's URL, through nginx.
    """

    def __init__(self, kernel: EmbeddedKernel, client: Client, payments: Payments) -> None:
        self.kernel = kernel
        self.client = client
        self.payments = payments
        self.root = Path()
        self.nginx: list[str] = []
        self.service: Service
        self._changes: dict[str, str] = {}

    def localised(self, text: str) -> str:
        """Return a file or command of the page with the paths and addresses of this machine."""
        patterns = "|".join(re.escape(found) for found in self._changes)
        return re.sub(patterns, lambda found: self._changes[found[0]], text)

    def run(self, command: str) -> str:
        """Run a command of the page, and return what it prints.

        systemd's part is done by :class:`Service`; everything else is the command itself.
        """
        words = command.removeprefix("sudo ").replace("\\\n", " ").split()
        if words[0] == "systemctl":
            self._systemctl(words[1:])
            return ""
        environment = {
            **os.environ,
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT),
            "REBUNO_URL": self.kernel_proxy,
            "REBUNO_API_KEY": OWNER,
        }
        folder: str | Path = self.root
        line = self.localised(command.replace("sudo ", ""))
        if words[0] == "nginx":
            line = " ".join([*self.nginx, *words[1:]])
        elif words[0] == "systemd-run":
            # What it runs is the first thing that is no option and no value of one.
            line = line[line.index(f"{self.root}/srv/shop/venv") :]
            environment, folder = self.service.environment(), self.service.folder
        done = subprocess.run(
            ["bash", "-c", f"set -o pipefail; {line}"],
            cwd=folder,
            env=environment,
            capture_output=True,
            text=True,
            timeout=_PATIENCE,
            check=False,
        )
        said = f"{command}\n{line}\n{done.stdout}{done.stderr}\n{self.log}"
        assert done.returncode == 0, said
        return done.stdout

    def _systemctl(self, words: list[str]) -> None:
        if words == ["reload", "nginx"]:
            subprocess.run([*self.nginx, "-s", "reload"], check=True, timeout=_PATIENCE)
        elif words == ["enable", "--now", "shop.socket", "shop.service"]:
            self.service.start()
        elif words in (["reload", "shop"], ["restart", "shop"]):
            (self.service.reload if words[0] == "reload" else self.service.restart)()
        else:
            assert words == ["daemon-reload"], f"what does systemctl {words} do?"

    def place(self, file: str, target: str, changes: dict[str, str] | None = None) -> None:
        """Put a file where the page puts it, with ``changes`` to its text."""
        text = (FILES / file).read_text(encoding="utf-8")
        for before, after in (changes or {}).items():
            assert before in text, f"{file} has no {before}"
            text = text.replace(before, after)
        path = Path(self.localised(target))
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(self.localised(text), encoding="utf-8")

    @property
    def log(self) -> str:
        path = self.root / "log"
        return path.read_text(encoding="utf-8") if path.exists() else ""

    def configure(self, name: str, value: str) -> None:
        """Set a variable in the environment of the service."""
        with (self.root / "etc/shop/shop.env").open("a", encoding="utf-8") as file:
            file.write(f"{name}={value}\n")

    def order(self, *items: str) -> str:
        """Order as a customer does, and return the id of the execution that it starts."""
        answer = self.session.post(
            f"{self.public}/orders", json=dict.fromkeys(items, 100), timeout=_PATIENCE
        )
        assert answer.status_code == 202, answer.text + self.log
        return next(iter(self.client.list(agent_id="shop", limit=1))).id

    def wait_for(self, item: str) -> None:
        """Wait until the payment service was asked for an item."""
        wait_until(lambda: self.payments.items()[item], what=f"nobody charged {item}")

    def attempts(self, execution_id: str) -> int:
        events = self.client.events(execution_id)
        return sum(event.type == "dispatch.acked" for event in events)

    def workers(self) -> set[int]:
        """The processes of the workers that gunicorn has now."""
        assert self.service.process is not None
        children = Path(
            f"/proc/{self.service.process.pid}/task/{self.service.process.pid}/children"
        )
        return {int(pid) for pid in children.read_text().split()}


@contextlib.contextmanager
def deployed(
    *, fulfilment: dict[str, str] | None = None, replicas: tuple[str, ...] = ()
) -> Iterator[Site]:
    """Deploy the shop; start its service with ``site.service.start()``.

    Args:
        fulfilment: what is changed in ``fulfilment.py``.
        replicas: the addresses of two kernels; of the embedded one if not given.
    """
    nginx = shutil.which("nginx", path=f"{os.environ['PATH']}:/usr/sbin:/usr/local/sbin")
    if nginx is None:
        pytest.skip("NOT TESTED: nginx is not installed (Debian: apt-get install nginx-light)")
    with contextlib.ExitStack() as stack:
        payments = Payments()
        payments_url = stack.enter_context(served(payments.app))
        stack.callback(payments.close)
        kernel = stack.enter_context(
            # As current kernels are: a proxy that changes a path makes signatures invalid.
            EmbeddedKernel(lease_timeout=LEASE, bearer_token=OWNER, accept_body_signatures=False)
        )
        client = stack.enter_context(Client(kernel.url, OWNER))
        site = Site(kernel, client, payments)
        # A short path: that of a socket has at most 107 bytes.
        site.root = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="shop-")))
        listeners = [
            stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=128))
            for _ in range(3)
        ]
        public, webhooks, kernels = (
            f"127.0.0.1:{listener.getsockname()[1]}" for listener in listeners
        )
        site.public = f"https://{public}"
        site.webhook = f"http://{webhooks}/agents/shop/webhook"
        site.kernel_proxy = f"http://{kernels}"
        replicas = replicas or (kernel.url.removeprefix("http://"),) * 2
        site._changes = {
            "listen 443": f"listen {public}",
            "10.0.0.10:8001": webhooks,
            "10.0.0.20:8080": kernels,
            "10.0.0.21:8080": replicas[0],
            "10.0.0.22:8080": replicas[1],
            "allow 10.0.0.20": "allow 127.0.0.1",
            "https://payments.example.com": payments_url,
            "/bin/kill": "kill",
            "curl ": f"curl --silent --show-error --noproxy '*' --cacert {site.root}/ca.pem ",
            "https://shop.example.com": f"https://{public}",
            # Nobody here is root, and there is no such group.
            " --owner=root --group=shop": "",
            **{path: f"{site.root}{path}" for path in PATHS},
        }
        install(site, fulfilment or {})
        site.session = stack.enter_context(requests.Session())
        site.session.verify = str(site.root / "ca.pem")
        site.session.trust_env = False
        stack.enter_context(running_nginx(nginx, site, listeners))
        units = site.root / "etc/systemd/system"
        site.service = Service(units / "shop.service", units / "shop.socket", site.root / "log")
        stack.callback(site.service.close)
        site.configure("REBUNO_API_KEY", client.create_api_key("shop", ["executions:write"]).token)
        yield site


def install(site: Site, fulfilment: dict[str, str]) -> None:
    """Put every file where the page says."""
    for file in ("shop.py", "orders.py", "gunicorn.conf.py"):
        site.place(file, f"/srv/shop/app/{file}")
    site.place("fulfilment.py", "/srv/shop/app/fulfilment.py", fulfilment)
    site.place("shop.service", "/etc/systemd/system/shop.service")
    site.place("shop.socket", "/etc/systemd/system/shop.socket")
    site.place("shop.env", "/etc/shop/shop.env")
    site.place("shop.conf", "/etc/nginx/conf.d/shop.conf")
    site.place("rebuno.conf", "/etc/nginx/conf.d/rebuno.conf")
    (site.root / "etc/shop/agent-secret").write_text(SECRET + "\n", encoding="utf-8")
    (site.root / "srv/shop/venv").symlink_to(sys.prefix)
    (site.root / "var/lib/shop").mkdir(parents=True)
    (site.root / "run").mkdir()
    authority = trustme.CA()
    authority.cert_pem.write_to_path(str(site.root / "ca.pem"))
    certificate = authority.issue_cert("shop.example.com", "127.0.0.1")
    for folder in ("certs", "private"):
        (site.root / "etc/ssl" / folder).mkdir(parents=True)
    ssl = site.root / "etc/ssl"
    certificate.cert_chain_pems[0].write_to_path(str(ssl / "certs/shop.example.com.pem"))
    certificate.private_key_pem.write_to_path(str(ssl / "private/shop.example.com.key"))
    # What the distribution's own nginx.conf says, for a process of ours.
    user = f"user {pwd.getpwuid(os.getuid()).pw_name};" if os.getuid() == 0 else ""
    kept = "\n".join(
        f"{kind}_temp_path {site.root}/run/{kind};"
        for kind in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    )
    (site.root / "etc/nginx/nginx.conf").write_text(
        f"{user} daemon off; worker_processes 1; pid {site.root}/run/nginx.pid; events {{}}\n"
        f"http {{ access_log {site.root}/access; {kept}\n"
        f"include {site.root}/etc/nginx/conf.d/*.conf; }}\n",
        encoding="utf-8",
    )


@contextlib.contextmanager
def running_nginx(nginx: str, site: Site, listeners: list[socket.socket]) -> Iterator[None]:
    """Run nginx on sockets that are open already, so that nobody can take their ports."""
    numbers = [listener.fileno() for listener in listeners]
    configuration = f"{site.root}/etc/nginx/nginx.conf"
    site.nginx = [nginx, "-e", "stderr", "-p", str(site.root), "-c", configuration]
    with (site.root / "nginx-log").open("ab") as log:
        process = subprocess.Popen(
            site.nginx,
            env={**os.environ, "NGINX": "".join(f"{number};" for number in numbers)},
            stdout=log,
            stderr=log,
            pass_fds=numbers,
        )
    try:
        yield
        assert process.poll() is None, (site.root / "nginx-log").read_text()
    finally:
        process.terminate()
        try:
            process.wait(_PATIENCE)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _read_unit(path: Path) -> Any:
    unit = configparser.RawConfigParser(strict=False, comment_prefixes="#")
    unit.optionxform = str  # type: ignore[assignment,method-assign]
    unit.read_string(path.read_text(encoding="utf-8"))
    return unit


def _read_environment(path: Path) -> dict[str, str]:
    lines = path.read_text(encoding="utf-8").splitlines()
    return dict(line.split("=", 1) for line in lines if line and not line.startswith("#"))
