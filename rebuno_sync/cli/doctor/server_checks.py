"""What a gunicorn configuration and an app mean for agents. Pure: a report in, findings out.

What gunicorn does, which these checks rest on: a worker that is told to go (a restart, a deploy)
is killed after ``graceful_timeout``; one that goes by itself (``max_requests``) or is replaced on
a reload stops its sign of life, and is aborted once that is ``timeout`` old. A worker that serves
keeps the sign of life, whatever handlers do on their threads.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

from rebuno_sync.cli.doctor.findings import Finding
from rebuno_sync.cli.doctor.probe import Report
from rebuno_sync.lease import DEFAULT_TIMEOUT

_THREADED = ("gthread", "gunicorn.workers.gthread.ThreadWorker")
_SYNC = ("sync", "gunicorn.workers.sync.SyncWorker")
#: Worker classes whose dependencies are an extra of gunicorn.
_EXTRAS = ("gevent", "tornado")
_WILDCARDS = ("", "0.0.0.0", "::")
_LOOPBACK = ("127.0.0.1", "::1", "localhost")


def check(report: Report, lease_timeout: float | None = None) -> Iterator[Finding]:
    """Look at a configuration and its app.

    Args:
        report: what the probe found.
        lease_timeout: the longest lease that the agents are registered with, in seconds;
            ``None`` when theirs is the kernel's default, or not known.
    """
    if report.failure == "configuration":
        yield Finding(
            "error",
            "configuration",
            f"gunicorn cannot read its configuration: {report.reason}",
            "It would not start.",
            "Run gunicorn with --check-config and mend what it says.",
        )
        return
    if not report.settings:
        yield _app_failure(report)
        return
    yield from _workers(report)
    if report.failure == "app":
        yield _app_failure(report)
        return
    if not report.app:
        return
    yield from _agents(report)
    yield from _claims(report)
    yield from _preload(report)
    yield from _shutdown(report)
    yield from _steps(report)
    yield _lease(report.settings, lease_timeout)
    yield from _own_kernel(report)


def _app_failure(report: Report) -> Finding:
    return Finding(
        "error",
        "app",
        f"the app {report.app} cannot be imported: {report.reason}",
        "No worker would start.",
        "Import it in a Python shell, in the directory and environment that gunicorn gets.",
    )


def _workers(report: Report) -> Iterator[Finding]:
    name, settings = report.worker_class, report.settings
    workers, threads = settings["workers"], settings["threads"]
    kind = name.rpartition(".")[2].lower()
    if "eventlet" in kind:
        yield Finding(
            "error",
            "worker-class",
            "the eventlet worker is not supported",
            "Eventlet is no longer maintained, and its threads stop heartbeats while a step works.",
            "Set worker_class = 'gthread'.",
        )
    elif report.worker_failure:
        yield _worker_failure(report, kind)
    elif name in _THREADED or name in _SYNC:
        yield _real_threads(name in _SYNC, workers, threads)
    elif "gevent" in kind:
        yield from _gevent(report)
    elif "uvicorn" in name.lower() or "asgi" in kind:
        yield Finding(
            "error",
            "worker-class",
            f"the worker class {name} serves ASGI, and a Flask app is WSGI",
            "No webhook would be answered.",
            "Set worker_class = 'gthread'.",
        )
    elif "tornado" in kind:
        yield Finding(
            "warning",
            "worker-class",
            "the tornado worker serves one request at a time on its event loop",
            "A slow request of the app holds up webhooks; the kernel gives each 30 s.",
            "Set worker_class = 'gthread'.",
        )
    else:
        yield Finding(
            "info",
            "worker-class",
            f"the worker class {name} is not known here",
            "Agents need threads that run while a step works: handlers and heartbeats have some.",
            "Set worker_class = 'gthread' unless you know that this one leaves threads alone.",
        )


def _worker_failure(report: Report, kind: str) -> Finding:
    extra = next((extra for extra in _EXTRAS if extra in kind), None)
    mend = (
        f"pip install 'gunicorn[{extra}]', in the environment that gunicorn runs in"
        if extra
        else "Mend its name, or install what it needs where gunicorn runs"
    )
    return Finding(
        "error",
        "worker-class",
        f"gunicorn cannot load the worker class {report.worker_class}: {report.worker_failure}",
        "It would not start.",
        f"{mend}; or set worker_class = 'gthread'.",
    )


def _real_threads(sync: bool, workers: int, threads: int) -> Finding:
    at_once = workers * (1 if sync else threads)
    if at_once == 1:
        return Finding(
            "warning",
            "worker-class",
            "one request at a time: one worker with one thread",
            "Handlers and heartbeats have threads of their own and lose nothing, but a slow "
            "request of the app holds up webhooks, which the kernel gives 30 s each.",
            "Set threads = 4 (and worker_class = 'gthread'), or more workers.",
        )
    name = "sync" if sync else "gthread"
    return Finding(
        "ok",
        "worker-class",
        f"{name}, {at_once} requests at once; handlers and heartbeats have threads of their own",
    )


def _gevent(report: Report) -> Iterator[Finding]:
    if report.settings["preload_app"] and report.app and not report.patched and not report.failure:
        yield Finding(
            "error",
            "gevent-patching",
            "preload_app imports the app before the gevent worker patches the standard library",
            "Locks and threads made at import stay real ones, and block every greenlet there is.",
            "Write 'from gevent import monkey; monkey.patch_all()' at the top of the "
            "configuration file, or set preload_app = False, or worker_class = 'gthread'.",
        )
    yield Finding(
        "warning",
        "worker-class",
        "under gevent, threads are greenlets: handlers and heartbeats take turns",
        "A step that computes without waiting for anything stops the heartbeats of its worker, "
        "and every lease it holds runs out: other attempts begin while this one still works.",
        "Set worker_class = 'gthread'; or be sure that no step computes for a third of its lease.",
    )


def _claims(report: Report) -> Iterator[Finding]:
    if report.claims:
        yield Finding(
            "warning",
            "claims",
            f"deliveries would not be claimed among the workers: {report.claims}",
            "One that something on the way sends twice may run in two workers, and each effect "
            "twice.",
            "Have REBUNO_CLAIMS_DIR name a directory that the user of the workers alone writes "
            "to, and run the doctor as that user.",
        )


def _agents(report: Report) -> Iterator[Finding]:
    if not report.agents:
        yield Finding(
            "warning",
            "agents",
            f"importing {report.app} makes no agent",
            "There is nothing here that the kernel could send work to.",
            "If agents are made later, on the first request say, make them where the app is made.",
        )
    for agent in report.agents:
        if not agent.has_handler:
            yield Finding(
                "error",
                "agents",
                f"the agent {agent.agent_id} has no handler",
                "Every delivery is refused with 503; after five, executions fail.",
                "Give it one with @agent.handler or agent.bind(fn), in a module that is imported.",
            )
        elif not agent.routes:
            yield Finding(
                "warning",
                "agents",
                f"no Flask app has the webhook of the agent {agent.agent_id}",
                "Unless it is mounted in some other way, every delivery is answered with 404.",
                "app.register_blueprint(agent.blueprint)",
            )
        else:
            at = ", ".join(agent.routes)
            yield Finding("ok", "agents", f"the agent {agent.agent_id} takes dispatches at {at}")


def _preload(report: Report) -> Iterator[Finding]:
    if not report.settings["preload_app"]:
        return
    if report.started:
        yield Finding(
            "error",
            "preload-threads",
            f"preload_app, and importing the app starts threads: {', '.join(report.started)}",
            "A fork takes no threads along: in the workers they are gone, and locks that they "
            "held stay locked for ever.",
            "Start them in the post_fork hook or on first use, or set preload_app = False.",
        )
    if report.opened:
        yield Finding(
            "error",
            "preload-sockets",
            f"preload_app, and importing the app opens sockets: {', '.join(report.opened)}",
            "All workers share one connection: answers to one arrive at another. Agents and "
            "rebuno_sync.Client open theirs anew after a fork; database and HTTP clients do not.",
            "Connect in the post_fork hook or on first use, or set preload_app = False.",
        )
    if not report.started and not report.opened:
        yield Finding(
            "ok", "preload", "preload_app, and importing the app opens and starts nothing"
        )


def _shutdown(report: Report) -> Iterator[Finding]:
    if not report.agents:
        return
    slowest = max(report.agents, key=lambda agent: agent.shutdown_timeout)
    needed, fine = slowest.shutdown_timeout, True
    limits = (
        ("graceful_timeout", "graceful-timeout", "when gunicorn is stopped or restarted"),
        ("timeout", "timeout", "on a reload, or when max_requests is reached"),
    )
    for name, slug, when in limits:
        allowed = report.settings[name]
        if name == "timeout" and not allowed:
            continue  # 0 is for ever
        if allowed <= needed:
            fine = False
            yield Finding(
                "error",
                slug,
                f"{name} is {allowed} s, and the agent {slowest.agent_id} lets handlers take "
                f"{needed:g} s to end (shutdown_timeout)",
                f"{when[0].upper()}{when[1:]}, the worker is killed in the middle of steps that "
                "would have ended in time. What is at-most-once among them ends indeterminate.",
                f"Set {name} = {int(needed) + 5} or more"
                + (f", or Agent(shutdown_timeout={allowed - 5})." if allowed > 5 else "."),
            )
    if fine:
        yield Finding(
            "ok", "shutdown", f"workers have the {needed:g} s that agents take to shut down"
        )


def _steps(report: Report) -> Iterator[Finding]:
    if not report.effects or not report.agents:
        return
    settings = report.settings
    given = min(
        min(agent.shutdown_timeout for agent in report.agents),
        settings["graceful_timeout"],
        settings["timeout"] or float("inf"),
    )
    for effect in sorted(report.effects, key=lambda e: (-e.timeout, e.name)):
        if effect.timeout <= given:
            continue
        once = effect.idempotency == "at_most_once"
        then = (
            "It is at-most-once: it ends indeterminate, unless it has reconcile=…."
            if once
            else "It runs again from its beginning in the next attempt."
        )
        yield Finding(
            "warning",
            "long-step",
            f"{effect.name} may take {effect.timeout:g} s, and a worker that ends gives it "
            f"{given:g} s",
            f"A deploy while it runs cuts it off. {then}",
            f"Raise shutdown_timeout, graceful_timeout and timeout above {effect.timeout:g} s, or "
            "divide it into shorter steps.",
        )


def _lease(settings: dict[str, Any], registered: float | None) -> Finding:
    lease = DEFAULT_TIMEOUT if registered is None else registered
    lasts = f"{lease:g} s" if registered is not None else f"{lease:g} s unless the kernel differs"
    mend = (
        "For a faster second attempt, register the agent with a shorter lease: "
        "rebuno-sync agents add … --lease-timeout SECONDS"
    )
    timeout, graceful = settings["timeout"], settings["graceful_timeout"]
    if timeout and timeout < lease:
        return Finding(
            "info",
            "lease",
            f"timeout is {timeout} s, and a lease lasts {lasts}",
            f"A worker whose main thread is held up for {timeout} s (an extension that keeps the "
            "GIL) is killed, and its executions wait for the rest of their leases before another "
            "worker gets them.",
            f"Give steps that keep the GIL a process of their own. {mend}",
        )
    if graceful < lease:
        return Finding(
            "info",
            "lease",
            f"graceful_timeout is {graceful} s, and a lease lasts {lasts}",
            f"What a deploy cuts off after {graceful} s waits for the rest of its lease before "
            "another worker gets it.",
            mend,
        )
    return Finding(
        "info",
        "lease",
        f"after a worker is killed, its executions wait for the rest of their leases, {lasts}",
        "The kernel delivers again when a lease has run out.",
        mend,
    )


def _own_kernel(report: Report) -> Iterator[Finding]:
    settings = report.settings
    for agent in report.agents:
        if not _listens_at(settings["bind"], agent.base_url, report.own_names):
            continue
        single = settings["workers"] == 1 and settings["threads"] == 1
        why = (
            "A request that calls the kernel waits for the one worker that it occupies itself."
            if single
            else "Calls to the kernel take the place of requests, and with all workers busy they "
            "wait for each other. Workers do not share an embedded kernel."
        )
        yield Finding(
            "error" if single else "warning",
            "own-kernel",
            f"the kernel of the agent {agent.agent_id}, {agent.base_url}, is this server itself",
            why,
            "Set REBUNO_URL to where the kernel is; for development, run 'rebuno-sync dev' beside.",
        )


def _listens_at(binds: list[str], url: str, own_names: list[str]) -> bool:
    parts = urlsplit(url)
    host = (parts.hostname or "").lower()
    port = parts.port or (443 if parts.scheme == "https" else 80)
    for bind in binds:
        address, _, bound_port = bind.removeprefix("tcp://").rpartition(":")
        if not bound_port.isdecimal() or int(bound_port) != port:
            continue
        address = address.strip("[]").lower()
        if address == host or (host in _LOOPBACK and address in (*_WILDCARDS, *_LOOPBACK)):
            return True
        if address in _WILDCARDS and host in own_names:
            return True
    return False
