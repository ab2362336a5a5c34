"""What the doctor says of gunicorn configurations."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from rebuno_sync.cli.doctor.findings import Finding
from rebuno_sync.cli.doctor.probe import Agent, Effect, Report
from rebuno_sync.cli.doctor.server_checks import check

AGENT = Agent("a", "secret", "http://kernel.example:8080", 25.0, True, ["/webhook"])
DEFAULTS: dict[str, Any] = {
    "bind": ["127.0.0.1:8000"],
    "graceful_timeout": 30,
    "preload_app": False,
    "threads": 8,
    "timeout": 60,
    "workers": 2,
}


def report(worker_class: str = "gthread", **changes: Any) -> Report:
    settings = {**DEFAULTS, **{k: v for k, v in changes.items() if k in DEFAULTS}}
    others = {k: v for k, v in changes.items() if k not in DEFAULTS}
    found = Report(settings=settings, worker_class=worker_class, app="shop:app", agents=[AGENT])
    return replace(found, **others)


def found(report: Report, lease: float | None = None) -> dict[str, Finding]:
    return {finding.check: finding for finding in check(report, lease)}


def severities(report: Report, lease: float | None = None) -> dict[str, str]:
    return {name: f.severity for name, f in found(report, lease).items() if f.severity != "ok"}


def test_a_sound_setup_has_nothing_to_mend() -> None:
    assert severities(report()) == {"lease": "info"}
    assert {"worker-class", "agents", "shutdown"} <= found(report()).keys()


def test_workers_that_cannot_agree_on_who_runs_a_delivery() -> None:
    finding = found(report(claims="/run/claims is no directory"))["claims"]
    assert finding.severity == "warning"
    assert "/run/claims is no directory" in finding.what
    assert "claims" not in found(report())


def test_everything_but_fine_says_why_and_how_to_mend() -> None:
    spoiled = report(
        "eventlet",
        graceful_timeout=10,
        timeout=10,
        preload_app=True,
        started=["poller"],
        opened=["to 10.0.0.1:5432"],
        effects=[Effect("pay", 90.0, "at_most_once")],
        bind=["kernel.example:8080"],
    )
    findings = [f for f in check(spoiled) if f.severity != "ok"]
    assert len(findings) == 8
    assert all(f.why and f.mend for f in findings)


@pytest.mark.parametrize(
    ("worker_class", "severity"),
    [
        ("gthread", "ok"),
        ("gunicorn.workers.gthread.ThreadWorker", "ok"),
        ("sync", "ok"),
        ("gevent", "warning"),
        ("gunicorn.workers.ggevent.GeventPyWSGIWorker", "warning"),
        ("tornado", "warning"),
        ("eventlet", "error"),
        ("asgi", "error"),
        ("gunicorn.workers.gasgi.ASGIWorker", "error"),
        ("uvicorn.workers.UvicornWorker", "error"),
        ("shop.workers.Ours", "info"),
    ],
)
def test_worker_classes(worker_class: str, severity: str) -> None:
    assert found(report(worker_class))["worker-class"].severity == severity


@pytest.mark.parametrize(
    ("worker_class", "mend"),
    [
        ("gevent", "pip install 'gunicorn[gevent]'"),
        ("gunicorn.workers.ggevent.GeventWorker", "pip install 'gunicorn[gevent]'"),
        ("tornado", "pip install 'gunicorn[tornado]'"),
        ("shop.Worker", "Mend its name"),
        ("eventlet", "Set worker_class = 'gthread'."),
    ],
)
def test_a_worker_class_that_cannot_be_loaded(worker_class: str, mend: str) -> None:
    (finding,) = [
        f
        for f in check(report(worker_class, worker_failure="No module named 'x'"))
        if f.check == "worker-class"
    ]
    assert finding.severity == "error"
    assert finding.mend.startswith(mend)
    assert ("No module named 'x'" in finding.what) is (worker_class != "eventlet")


@pytest.mark.parametrize(
    ("worker_class", "workers", "threads", "severity"),
    [
        ("sync", 1, 1, "warning"),
        ("gthread", 1, 1, "warning"),
        ("sync", 2, 1, "ok"),
        ("gthread", 1, 2, "ok"),
    ],
)
def test_one_request_at_a_time_is_worth_a_warning(
    worker_class: str, workers: int, threads: int, severity: str
) -> None:
    finding = found(report(worker_class, workers=workers, threads=threads))["worker-class"]
    assert finding.severity == severity


def test_gevent_must_patch_before_a_preloaded_app() -> None:
    preloaded = report("gevent", preload_app=True)
    assert severities(preloaded)["gevent-patching"] == "error"
    assert "gevent-patching" not in found(replace(preloaded, patched=True))
    assert "gevent-patching" not in found(report("gevent"))


def test_what_a_preloaded_app_opens_or_starts_is_named() -> None:
    opened = report(preload_app=True, started=["poller"], opened=["to 10.0.0.1:5432"])
    assert "poller" in found(opened)["preload-threads"].what
    assert "10.0.0.1:5432" in found(opened)["preload-sockets"].what
    assert severities(opened)["preload-threads"] == severities(opened)["preload-sockets"] == "error"
    assert found(report(preload_app=True))["preload"].severity == "ok"


def test_without_preload_they_are_nobodys_business() -> None:
    assert not {"preload", "preload-threads"} & found(report(started=["poller"])).keys()


@pytest.mark.parametrize(
    ("graceful", "timeout", "checks"),
    [
        (26, 26, set()),
        (25, 60, {"graceful-timeout"}),
        (10, 60, {"graceful-timeout"}),
        (30, 25, {"timeout"}),
        (30, 0, set()),
        (5, 5, {"graceful-timeout", "timeout"}),
    ],
)
def test_workers_need_the_time_that_agents_take_to_shut_down(
    graceful: int, timeout: int, checks: set[str]
) -> None:
    told = severities(report(graceful_timeout=graceful, timeout=timeout))
    assert {name for name, severity in told.items() if severity == "error"} == checks


def test_the_agent_that_takes_longest_counts() -> None:
    slow = replace(AGENT, agent_id="slow", shutdown_timeout=55.0)
    finding = found(report(agents=[AGENT, slow]))["graceful-timeout"]
    assert "slow" in finding.what
    assert "graceful_timeout = 60" in finding.mend


def test_mending_never_asks_for_no_time_at_all() -> None:
    assert "shutdown_timeout" not in found(report(graceful_timeout=3))["graceful-timeout"].mend
    assert "shutdown_timeout=15" in found(report(graceful_timeout=20))["graceful-timeout"].mend


def test_steps_that_outlast_a_deploy_are_named() -> None:
    effects = [Effect("pay", 90.0, "at_most_once"), Effect("look", 20.0, "safe_to_retry")]
    findings = [f for f in check(report(effects=effects)) if f.check == "long-step"]
    assert len(findings) == 1
    assert "pay may take 90 s" in findings[0].what
    assert "indeterminate" in findings[0].why
    retried = report(effects=[Effect("look", 90.0, "safe_to_retry")])
    assert "runs again" in found(retried)["long-step"].why


def test_the_shortest_of_the_times_decides_what_is_a_long_step() -> None:
    effects = [Effect("look", 22.0, "safe_to_retry")]
    assert "long-step" not in found(report(effects=effects))
    assert "gives it 20 s" in found(report(effects=effects, timeout=20))["long-step"].what


def test_the_lease_is_named_with_what_is_known_of_it() -> None:
    assert "120 s unless the kernel differs" in found(report())["lease"].what
    assert "timeout is 60 s" in found(report())["lease"].what
    assert found(report(), 30.0)["lease"].what.startswith("after a worker is killed")
    assert found(report(timeout=0))["lease"].what.startswith("graceful_timeout is 30 s")
    long = report(timeout=0, graceful_timeout=200)
    assert found(long)["lease"].what.startswith("after a worker is killed")


@pytest.mark.parametrize(
    ("bind", "url", "itself"),
    [
        ("127.0.0.1:8000", "http://127.0.0.1:8000", True),
        ("0.0.0.0:8000", "http://localhost:8000/base", True),
        ("[::]:8000", "http://[::1]:8000", True),
        (":8000", "http://127.0.0.1:8000", True),
        ("shop.example:80", "http://shop.example", True),
        ("127.0.0.1:8000", "http://127.0.0.1:8080", False),
        ("127.0.0.1:8000", "http://kernel.example:8000", False),
        ("0.0.0.0:8000", "http://Shop-7.internal:8000", True),
        ("[::]:8000", "http://10.0.0.7:8000", True),
        ("127.0.0.1:8000", "http://10.0.0.7:8000", False),
        ("0.0.0.0:8000", "http://10.0.0.8:8000", False),
        ("unix:/run/shop.sock", "http://127.0.0.1:8000", False),
        ("fd://3", "http://127.0.0.1:8000", False),
    ],
)
def test_a_kernel_that_is_the_app_itself(bind: str, url: str, itself: bool) -> None:
    agent = replace(AGENT, base_url=url)
    names = {"own_names": ["10.0.0.7", "shop-7.internal"]}
    single = report("sync", bind=[bind], agents=[agent], workers=1, threads=1, **names)
    several = report(bind=[bind], agents=[agent], **names)
    assert severities(single).get("own-kernel") == ("error" if itself else None)
    assert severities(several).get("own-kernel") == ("warning" if itself else None)


def test_agents_that_cannot_be_reached_or_do_nothing() -> None:
    assert severities(report(agents=[]))["agents"] == "warning"
    assert severities(report(agents=[replace(AGENT, has_handler=False)]))["agents"] == "error"
    assert severities(report(agents=[replace(AGENT, routes=[])]))["agents"] == "warning"


def test_what_cannot_be_read_is_one_finding() -> None:
    (finding,) = check(Report("configuration", "Error: 'nope.py' doesn't exist"))
    assert (finding.severity, finding.check) == ("error", "configuration")
    (finding,) = check(Report("app", "it took too long"))
    assert (finding.severity, finding.check) == ("error", "app")


def test_a_configuration_without_an_app_is_looked_at_alone() -> None:
    assert severities(report("eventlet", app="", agents=[])) == {"worker-class": "error"}


def test_an_app_that_fails_leaves_the_configuration_to_look_at() -> None:
    failed = report("eventlet", failure="app", reason="ImportError: no", agents=[])
    assert severities(failed) == {"worker-class": "error", "app": "error"}
