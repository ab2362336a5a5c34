"""Runs in a process of its own: loads a gunicorn configuration and its app, and reports on both.

Whatever importing an app does, it does here and not to the doctor; so a crash is a finding, and
the sockets and threads counted afterwards are the app's. The report goes to a file descriptor as
JSON, since the app may print. It holds the agents' secrets: it is never shown.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import inspect
import json
import os
import socket
import sys
import threading
import traceback
from collections.abc import Iterator
from typing import Any

_SETTINGS = (
    "bind",
    "graceful_timeout",
    "preload_app",
    "threads",
    "timeout",
    "workers",
)


@dataclasses.dataclass(frozen=True)
class Agent:
    """An agent that the app made."""

    agent_id: str
    secrets: list[str]
    base_url: str
    shutdown_timeout: float
    has_handler: bool
    routes: list[str]


@dataclasses.dataclass(frozen=True)
class Effect:
    """A tool or step that has a time-out."""

    name: str
    timeout: float
    idempotency: str


@dataclasses.dataclass(frozen=True)
class Report:
    """What was found.

    Attributes:
        failure: what could not be read: ``configuration`` or ``app``; ``""`` when all could.
        reason: why.
        settings: those of gunicorn that matter; empty when there are none to read.
        worker_class: its name, or the path of the class.
        worker_failure: why gunicorn cannot load that class; ``""`` when it can.
        app: what is served, as ``module:name``; ``""`` for nothing.
        started: the threads that importing the app left running.
        opened: the sockets that it left open.
        patched: whether gevent had patched the standard library before that.
        agents: the agents that it made.
        effects: the tools with a time-out.
        own_names: what this machine is called, and its addresses.
        claims: why deliveries would not be claimed among the workers; ``""`` when they would.
    """

    failure: str = ""
    reason: str = ""
    settings: dict[str, Any] = dataclasses.field(default_factory=dict)
    worker_class: str = ""
    worker_failure: str = ""
    app: str = ""
    started: list[str] = dataclasses.field(default_factory=list)
    opened: list[str] = dataclasses.field(default_factory=list)
    patched: bool = False
    agents: list[Agent] = dataclasses.field(default_factory=list)
    effects: list[Effect] = dataclasses.field(default_factory=list)
    own_names: list[str] = dataclasses.field(default_factory=list)
    claims: str = ""

    @classmethod
    def from_json(cls, text: str) -> Report:
        """Read what :meth:`to_json` wrote."""
        data = json.loads(text)
        data["agents"] = [Agent(**row) for row in data["agents"]]
        data["effects"] = [Effect(**row) for row in data["effects"]]
        return cls(**data)

    def to_json(self) -> str:
        """Return the report as text."""
        return json.dumps(dataclasses.asdict(self))


def probe(arguments: list[str]) -> Report:
    """Load what ``gunicorn`` would with these arguments, and report."""
    from gunicorn.app.base import Application
    from gunicorn.app.wsgiapp import WSGIApplication

    class Reader(WSGIApplication):
        def load_config(self) -> None:
            # gunicorn insists on an app; a configuration alone can be looked at as well.
            Application.load_config(self)
            self.app_uri = self.app_uri or self.cfg.wsgi_app

    sys.argv = ["gunicorn", *arguments]
    try:
        reader = Reader("%(prog)s [OPTIONS] [APP_MODULE]", prog="gunicorn")
    except SystemExit:
        return Report("configuration")
    cfg = reader.cfg
    for path in (cfg.pythonpath or "").split(","):
        if path:
            sys.path.insert(0, os.path.abspath(path))
    threads_before, sockets_before = set(threading.enumerate()), set(_sockets())
    settings = {name: getattr(cfg, name) for name in _SETTINGS}
    found = Report(
        settings=settings,
        worker_class=_worker_class(cfg),
        worker_failure=_worker_failure(cfg),
        app=reader.app_uri or "",
    )
    if not found.app:
        return found
    patched = _is_patched()
    try:
        reader.load()
    except (Exception, SystemExit) as exc:
        traceback.print_exc()
        return dataclasses.replace(found, failure="app", reason=_told(exc))
    return dataclasses.replace(
        found,
        started=[t.name for t in threading.enumerate() if t not in threads_before],
        opened=[_described(fd) for fd in _sockets() if fd not in sockets_before],
        patched=patched,
        agents=_agents(),
        effects=_effects(),
        own_names=_own_names(),
        claims=_claims_problem(),
    )


def _own_names() -> list[str]:
    name = socket.gethostname()
    found = {name.lower()}
    with contextlib.suppress(OSError):  # a name that nothing resolves
        found |= {str(info[4][0]) for info in socket.getaddrinfo(name, None)}
    return sorted(found)


def _claims_problem() -> str:
    """Look where deliveries are claimed; what is not there yet is left for the workers to make."""
    from rebuno_sync.claims import claims_directory, require_private

    directory = claims_directory()
    try:
        if directory.exists():
            require_private(directory)
        nearest = next(path for path in (directory, *directory.parents) if path.exists())
    except OSError as exc:
        return str(exc)
    if not os.access(nearest, os.W_OK | os.X_OK):
        return f"this user may not write to {nearest}"
    return ""


def _worker_class(cfg: Any) -> str:
    # Of what is configured, cfg.worker_class_str drops the module when it is a class.
    given = cfg.settings["worker_class"].get()
    if isinstance(given, type):
        return f"{given.__module__}.{given.__qualname__}"
    return str(cfg.worker_class_str)


def _worker_failure(cfg: Any) -> str:
    """Load the worker class as gunicorn does before anything else; return why it cannot."""
    try:
        loaded = cfg.worker_class
    except RuntimeError as exc:
        # gunicorn's words: what it looked for, then a whole traceback in brackets.
        lines = [line for line in str(exc).rstrip("]\n ").splitlines() if line.strip()]
        return " ".join(dict.fromkeys((lines[0].strip(), lines[-1].strip()))) if lines else "?"
    except (Exception, SystemExit) as exc:
        return _told(exc)
    # What its module does not have, gunicorn takes for a class until it makes a worker of it.
    return "" if isinstance(loaded, type) else f"{loaded!r} is no class"


def _told(exc: BaseException) -> str:
    return f"{type(exc).__name__}: {exc}".strip(": ")


def _is_patched() -> bool:
    monkey = sys.modules.get("gevent.monkey")
    return monkey is not None and bool(monkey.is_module_patched("threading"))


def _sockets() -> Iterator[int]:
    for fd in range(3, os.sysconf("SC_OPEN_MAX") if os.name == "posix" else 0):
        if fd >= 4096:
            return
        try:
            mode = os.fstat(fd).st_mode
        except OSError:
            continue
        if mode & 0o170000 == 0o140000:
            yield fd


def _described(fd: int) -> str:
    with socket.socket(fileno=os.dup(fd)) as found:
        for name, word in ((found.getpeername, "to"), (found.getsockname, "on")):
            try:
                address = name()
            except OSError:
                continue
            if isinstance(address, tuple):
                return f"{word} {address[0]}:{address[1]}"
            if address:
                return f"{word} {address!s}"
    return "unnamed"


def _agents() -> list[Agent]:
    from rebuno_sync.agent import AgentCore

    apps = _flask_apps()
    return [
        Agent(
            agent_id=agent.agent_id,
            # The doctor signs as the agent does, to see whether the kernel agrees.
            secrets=list(agent._secrets.all()),
            base_url=agent._kernel._transport.base_url,
            shutdown_timeout=agent.shutdown_timeout,
            has_handler=agent._binder is not None,
            routes=sorted(_routes(agent, apps)),
        )
        for agent in _instances(AgentCore)
    ]


def _flask_apps() -> list[Any]:
    flask = sys.modules.get("flask")
    return [] if flask is None else list(_instances(flask.Flask))


def _routes(agent: Any, apps: list[Any]) -> Iterator[str]:
    for app in apps:
        for rule in app.url_map.iter_rules():
            view = app.view_functions.get(rule.endpoint)
            ours = getattr(view, "__module__", "") == "rebuno_sync.serving.flask_blueprint"
            if ours and inspect.getclosurevars(view).nonlocals.get("agent") is agent:
                yield rule.rule


def _effects() -> list[Effect]:
    from rebuno_sync.effects.options import EffectOptions

    return [
        Effect(options.name, float(options.timeout), options.idempotency.value)
        for options in _instances(EffectOptions)
        if options.timeout is not None
    ]


def _instances(kind: type) -> Iterator[Any]:
    # isinstance() would wake the proxies that pretend to be something else.
    return (found for found in gc.get_objects() if kind in type(found).__mro__)


def main() -> None:
    """``python -m rebuno_sync.cli.doctor.probe FD ARGUMENTS``."""
    descriptor, *arguments = sys.argv[1:]
    report = probe(arguments)
    with open(int(descriptor), "w", encoding="utf-8") as file:
        file.write(report.to_json())
        file.flush()
    # Whatever the app started need not be waited for.
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
