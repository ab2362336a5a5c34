"""The doctor on real configurations and apps, against real kernels and webhooks."""

from __future__ import annotations

import email.utils
import json
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from rebuno_sync import Agent
from rebuno_sync.cli.doctor.kernel_checks import check_kernel, check_signature, check_webhook
from rebuno_sync.cli.doctor.probe import Agent as Found
from rebuno_sync.cli.doctor.reading import read
from rebuno_sync.cli.root import root
from rebuno_sync.kernel import EmbeddedKernel
from tests.integration.test_cli import free_port
from tests.scripted import served

SECRET = "orchard-secret"
APP = """
from rebuno_sync import Agent, tool

agent = Agent("a1", shutdown_timeout=20)

@tool("pay", idempotency="at_most_once", timeout=90)
def pay(amount: int) -> int:
    return amount

@agent.handler
def handle(amount: int = 1) -> int:
    return pay(amount)
"""
FLASK = """
from flask import Flask

def create_app():
    app = Flask(__name__)
    app.register_blueprint(agent.blueprint, url_prefix="/agents/a1")
    return app
"""


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """Write an app, and a configuration if there is one, where the doctor will look."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("REBUNO_AGENT_SECRET", SECRET)
    monkeypatch.setenv("REBUNO_URL", "http://127.0.0.1:9")
    for name in ("REBUNO_API_KEY", "GUNICORN_CMD_ARGS"):
        monkeypatch.delenv(name, raising=False)

    def write(app: str = APP + FLASK, config: str = "") -> Path:
        (tmp_path / "shop.py").write_text(textwrap.dedent(app))
        if config:
            (tmp_path / "conf.py").write_text(textwrap.dedent(config))
        return tmp_path

    return write


@pytest.fixture(scope="module")
def kernel() -> Iterator[EmbeddedKernel]:
    with EmbeddedKernel() as kernel:
        yield kernel


@pytest.fixture(scope="module")
def webhook(kernel: EmbeddedKernel) -> Iterator[str]:
    agent = Agent("a1", secret=SECRET, base_url=kernel.url)
    agent.bind(lambda: None)
    with served(agent.app) as url:
        yield f"{url}/webhook"


def doctor(*arguments: str) -> tuple[int, dict[str, dict[str, str]]]:
    """Run the doctor; return its exit code and its findings by what was looked at."""
    result = CliRunner().invoke(root, ["doctor", "--json", *arguments])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    found = [json.loads(line) for line in result.stdout.splitlines()]
    assert all(f["mend"] for f in found if f["severity"] == "error")
    return result.exit_code, {f["check"]: f for f in found}


def register(kernel: EmbeddedKernel, url: str, secret: str = SECRET, **more: Any) -> None:
    from rebuno_sync import Client

    with Client(kernel.url) as client:
        client.register_agent("a1", url, secret, **more)


# The probe


def test_the_app_is_read_as_gunicorn_would(write: Callable[..., Path]) -> None:
    write(config="bind = ['127.0.0.1:8000']\nworkers = 3\nwsgi_app = 'shop:create_app()'\n")
    report = read(["--config", "conf.py", "--timeout", "77"], "http://kernel.example:8080/base")
    assert report.failure == ""
    assert report.settings["workers"] == 3
    assert report.settings["timeout"] == 77
    assert report.settings["bind"] == ["127.0.0.1:8000"]
    assert report.worker_class == "sync"
    (agent,) = report.agents
    assert agent == Found(
        "a1", [SECRET], "http://kernel.example:8080/base", 20.0, True, ["/agents/a1/webhook"]
    )
    assert [(e.name, e.timeout, e.idempotency) for e in report.effects] == [
        ("pay", 90.0, "at_most_once")
    ]
    assert (report.started, report.opened, report.patched) == ([], [], False)


def test_the_place_where_deliveries_are_claimed_is_looked_at(
    write: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write()
    monkeypatch.setenv("REBUNO_CLAIMS_DIR", str(tmp_path / "run" / "claims"))
    assert read(["shop:create_app()"], "http://kernel.example:8080").claims == ""
    assert not (tmp_path / "run").exists(), "it may be another user who looks"
    (tmp_path / "run").touch()
    monkeypatch.setenv("REBUNO_CLAIMS_DIR", str(tmp_path / "run"))
    told = read(["shop:create_app()"], "http://kernel.example:8080").claims
    assert told == f"{tmp_path / 'run'} is no directory"


def test_gunicorn_arguments_in_the_environment_count(
    write: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    write(APP + "app = agent.app\n")
    monkeypatch.setenv("GUNICORN_CMD_ARGS", "--threads 4 --preload")
    report = read(["shop:app"], None)
    assert (report.worker_class, report.settings["preload_app"]) == ("gthread", True)
    assert report.agents[0].routes == ["/webhook"]


def test_what_importing_leaves_behind_is_found(write: Callable[..., Path]) -> None:
    write(
        """
        import socket, threading, time
        listener = socket.create_server(("127.0.0.1", 0))
        connection = socket.create_connection(listener.getsockname())
        threading.Thread(target=time.sleep, args=(60,), name="poller", daemon=True).start()
        print("noise on the standard output")
        def app(environ, start_response): ...
        """
    )
    report = read(["shop:app"], None)
    assert report.started == ["poller"]
    assert len(report.opened) == 2
    assert any(s.startswith("to 127.0.0.1:") for s in report.opened)
    assert any(s.startswith("on 127.0.0.1:") for s in report.opened)


def test_a_client_that_is_only_made_at_import_opens_nothing(write: Callable[..., Path]) -> None:
    write(APP + "from rebuno_sync import Client\nclient = Client()\napp = agent.app\n")
    report = read(["--preload", "shop:app"], None)
    assert (report.started, report.opened) == ([], [])


@pytest.mark.parametrize(
    ("app", "arguments", "failure", "reason"),
    [
        ("1 / 0", ["shop:app"], "app", "ZeroDivisionError: division by zero"),
        ("app = None", ["shop:missing"], "app", "Failed to find attribute 'missing' in 'shop'"),
        ("raise SystemExit(3)", ["shop:app"], "app", "SystemExit: 3"),
        ("import os; os._exit(7)", ["shop:app"], "app", "ended with 7"),
        ("import os; os.abort()", ["shop:app"], "app", "ended with -6"),
        ("", ["nowhere:app"], "app", "No module named 'nowhere'"),
        ("", ["--config", "nowhere.py", "shop:app"], "configuration", "doesn't exist"),
        ("", ["--workers", "many", "shop:app"], "configuration", "invalid int value: 'many'"),
        ("", ["--wrokers", "3", "shop:app"], "configuration", "unrecognized arguments"),
    ],
)
def test_what_cannot_be_loaded_is_told(
    write: Callable[..., Path], app: str, arguments: list[str], failure: str, reason: str
) -> None:
    write(app)
    report = read(arguments, None)
    assert report.failure == failure
    assert reason in report.reason


def test_an_error_in_the_configuration_is_told(write: Callable[..., Path]) -> None:
    write(config="workers = cores\n")
    report = read(["--config", "conf.py", "shop:create_app()"], None)
    assert (report.failure, report.reason) == (
        "configuration",
        "NameError: name 'cores' is not defined",
    )


def test_an_app_that_hangs_is_given_up(
    write: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    write("import time\ntime.sleep(300)\n")
    monkeypatch.setattr("rebuno_sync.cli.doctor.reading.PATIENCE", 3.0)
    assert read(["shop:app"], None).reason == "importing it did not end within 3 s"


@pytest.mark.parametrize(
    ("worker_class", "missing", "words"),
    [
        (
            "gevent",
            "packaging",
            "class uri 'gevent' invalid or not found: ModuleNotFoundError: no packaging here",
        ),
        ("gevnt", "", "class uri 'gevnt' invalid or not found: "),
        ("shop.Worker", "", "'shop.Worker' is no class"),
        ("gevent", "", ""),
        ("gunicorn.workers.gthread.ThreadWorker", "", ""),
    ],
)
def test_a_worker_class_is_loaded_as_gunicorn_would(
    write: Callable[..., Path], worker_class: str, missing: str, words: str
) -> None:
    where = write(APP + "app = agent.app\n")
    if missing:
        (where / f"{missing}.py").write_text("raise ModuleNotFoundError('no packaging here')\n")
    report = read(["-k", worker_class, "shop:app"], None)
    assert (report.failure, report.started, report.opened) == ("", [], [])
    assert report.worker_failure.startswith(words)
    assert bool(report.worker_failure) is bool(words)
    code, found = doctor("--offline", "--", "-k", worker_class, "shop:app")
    assert code == (1 if words else 0)
    finding = found["worker-class"]
    assert (finding["severity"] == "error") is bool(words)
    assert words in finding["what"]


# The whole


def test_a_sound_setup(write: Callable[..., Path], kernel: EmbeddedKernel, webhook: str) -> None:
    write(APP + "app = agent.app\n")
    register(kernel, webhook, lease_timeout_seconds=20)
    code, found = doctor("--url", kernel.url, "--", "-k", "gthread", "--threads", "4", "shop:app")
    assert code == 0
    troubled = {name for name, f in found.items() if f["severity"] not in ("ok", "info")}
    assert troubled == {"long-step"}
    looked_at = {"kernel-ready", "clock", "secret", "registration", "webhook", "worker-class"}
    assert looked_at <= found.keys()
    assert "20 s" in found["lease"]["what"]
    assert SECRET not in json.dumps(found)


def test_secrets_that_differ(
    write: Callable[..., Path],
    kernel: EmbeddedKernel,
    webhook: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    write(APP + "app = agent.app\n")
    register(kernel, webhook)
    monkeypatch.setenv("REBUNO_AGENT_SECRET", "another-secret")
    code, found = doctor("--url", kernel.url, "shop:app")
    assert code == 1
    assert found["secret"]["severity"] == "error"
    assert found["webhook-secret"]["severity"] == "error"


def test_a_webhook_where_nobody_is(write: Callable[..., Path], kernel: EmbeddedKernel) -> None:
    write()
    register(kernel, f"http://127.0.0.1:{free_port()}/hook")
    code, found = doctor("--url", kernel.url, "shop:create_app()")
    assert code == 1
    assert "cannot be reached from here: http://127.0.0.1:" in found["webhook"]["what"]
    assert "/agents/a1/webhook" in found["webhook-path"]["what"]
    assert found["secret"]["severity"] == "ok"


def test_an_agent_that_the_kernel_does_not_know(write: Callable[..., Path], webhook: str) -> None:
    write(APP + "app = agent.app\n")
    with EmbeddedKernel() as kernel:
        code, found = doctor("--url", kernel.url, "--webhook-url", webhook, "shop:app")
    assert code == 1
    assert found["registration"]["severity"] == "error"
    assert found["webhook"]["severity"] == "ok"


def test_without_a_token_the_registration_is_not_known(write: Callable[..., Path]) -> None:
    write()
    with EmbeddedKernel(bearer_token="sesame") as kernel:
        _, found = doctor("--url", kernel.url, "shop:create_app()")
        assert found["registration"]["severity"] == "info"
        _, found = doctor("--url", kernel.url, "--api-key", "sesame", "shop:create_app()")
        assert found["registration"]["severity"] == "error"


def test_a_kernel_that_is_not_there(write: Callable[..., Path]) -> None:
    write()
    code, found = doctor("--url", f"http://127.0.0.1:{free_port()}", "shop:create_app()")
    assert code == 1
    assert found["kernel-reachable"]["severity"] == "error"
    assert not {"secret", "registration", "webhook"} & found.keys()


def test_offline_asks_nobody(write: Callable[..., Path]) -> None:
    write()
    code, found = doctor("--offline", "shop:create_app()")
    assert code == 0
    assert not {"kernel-reachable", "kernel-ready", "secret", "webhook"} & found.keys()


def test_the_kernel_alone(write: Callable[..., Path], kernel: EmbeddedKernel) -> None:
    write("")
    code, found = doctor("--url", kernel.url)
    assert code == 0
    assert {"kernel-ready", "clock"} <= found.keys()


def test_for_people_each_finding_says_why_and_how_to_mend(write: Callable[..., Path]) -> None:
    write(config="preload_app = True\ngraceful_timeout = 5\nworker_class = 'eventlet'\n")
    result = CliRunner().invoke(root, ["doctor", "--offline", "-c", "conf.py", "shop:create_app()"])
    assert result.exit_code == 1
    assert "✘ error    graceful_timeout is 5 s" in result.stdout
    assert "    why: When gunicorn is stopped" in result.stdout
    assert "    mend: Set graceful_timeout = 25 or more.\n" in result.stdout


# Kernels that are out of order


def answering(status: str, **headers: str) -> Any:
    """Return an app that answers everything alike."""

    def app(environ: Any, start_response: Any) -> list[bytes]:
        environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
        start_response(status, [("Content-Length", "2"), *headers.items()])
        return [b"{}"]

    return app


@pytest.mark.parametrize(
    ("status", "what"),
    [
        ("200 OK", "is ready"),
        ("503 Service Unavailable", "not ready: HTTP 503"),
        ("404 Not Found", "there is no kernel"),
        ("302 Found", "not ready: HTTP 302"),
    ],
)
def test_readiness(status: str, what: str) -> None:
    with served(answering(status)) as url:
        finding = next(check_kernel(url))
    assert finding.check == "kernel-ready"
    assert what in finding.what
    assert finding.severity == ("ok" if status == "200 OK" else "error")


@pytest.mark.parametrize(
    ("off", "severity", "words", "why"),
    [
        (0, "ok", "agrees", ""),
        (-120, "warning", "ahead of the kernel's", "From 300 s on"),
        (120, "warning", "behind the kernel's", "From 300 s on"),
        (-3600, "warning", "ahead of the kernel's", "then signs by the kernel's clock"),
        (3600, "warning", "behind the kernel's", "then signs by the kernel's clock"),
    ],
)
def test_clocks(off: int, severity: str, words: str, why: str) -> None:
    def app(environ: Any, start_response: Any) -> Any:
        date = email.utils.formatdate(time.time() + off, usegmt=True)
        return answering("200 OK", Date=date)(environ, start_response)

    with served(app) as url:
        (finding,) = [f for f in check_kernel(url) if f.check == "clock"]
    assert finding.severity == severity
    assert words in finding.what
    assert why in finding.why


def test_a_kernel_url_that_is_none() -> None:
    (finding,) = check_kernel("kernel.example:8080")
    assert (finding.severity, finding.check) == ("error", "kernel-url")


def found_agent(base_url: str, secret: str = SECRET) -> Found:
    return Found("a1", [secret], base_url, 25.0, True, ["/webhook"])


def test_a_kernel_that_takes_any_signature_proves_nothing() -> None:
    with served(answering("404 Not Found")) as url:
        assert check_signature(found_agent(url)).severity == "info"


def test_a_kernel_that_fails_meanwhile_is_no_proof_either() -> None:
    with served(answering("418 Teapot")) as url:
        assert check_signature(found_agent(url)).severity == "warning"


@pytest.mark.parametrize(
    ("status", "words"),
    [
        ("404 Not Found", "answers HTTP 404 to what is not signed"),
        ("200 OK", "HTTP 200"),
        ("302 Found", "HTTP 302"),
        ("500 Oops", "HTTP 500"),
    ],
)
def test_something_else_at_the_webhook(status: str, words: str) -> None:
    with served(answering(status)) as url:
        findings = list(check_webhook(found_agent(url), f"{url}/webhook"))
    assert [(f.severity, f.check) for f in findings] == [("error", "webhook")]
    assert words in findings[0].what


def test_an_agent_that_cannot_take_anything_now() -> None:
    def app(environ: Any, start_response: Any) -> Any:
        signed = "HTTP_REBUNO_SIGNATURE" in environ
        return answering("503 Closing" if signed else "401 No")(environ, start_response)

    with served(app) as url:
        (finding,) = check_webhook(found_agent(url), f"{url}/webhook")
    assert (finding.severity, finding.check) == ("error", "webhook")
    assert "HTTP 503 to what is signed" in finding.what


def test_a_loopback_webhook_for_a_kernel_elsewhere(webhook: str) -> None:
    findings = list(check_webhook(found_agent("https://kernel.example"), webhook))
    assert [(f.severity, f.check) for f in findings] == [
        ("error", "webhook-url"),
        ("ok", "webhook"),
    ]
