"""``rebuno-sync doctor``: what will hurt, before it does."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import click

from rebuno_sync.cli.session import Exit, Misuse, Session, json_option, pass_session, stored_option

if TYPE_CHECKING:
    from rebuno_sync.cli.doctor.findings import Finding
    from rebuno_sync.cli.doctor.probe import Report

_DISTRIBUTIONS = ("rebuno-sync", "gunicorn", "flask", "requests", "urllib3", "gevent", "eventlet")
_LOOKS = {
    "error": ("✘ error  ", "bold red"),
    "warning": ("▲ warning", "yellow"),
    "info": ("• info   ", "cyan"),
    "ok": ("✔ ok     ", "green"),
}


@click.command(context_settings={"ignore_unknown_options": True})
@click.option("-c", "--config", "config", metavar="FILE", help="The gunicorn configuration file.")
@click.option(
    "--webhook-url",
    metavar="URL",
    help="Where the agent's webhook is; by default what the kernel has registered.",
)
@click.option("--offline", is_flag=True, help="Ask neither the kernel nor the webhook.")
@stored_option("--url", "url", metavar="URL", help="Where the kernel is; REBUNO_URL by default.")
@stored_option("--api-key", "api_key", metavar="TOKEN", help="REBUNO_API_KEY by default.")
@json_option
@click.argument("arguments", metavar="[GUNICORN ARGUMENTS]...", nargs=-1, type=click.UNPROCESSED)
@pass_session
def doctor(
    session: Session,
    config: str | None,
    webhook_url: str | None,
    offline: bool,
    arguments: Sequence[str],
) -> None:
    """Look at an app and how gunicorn would run it, and say what will hurt.

    Give what you would give to gunicorn: its configuration file, MODULE:APP, other arguments.
    Without a MODULE:APP, here or in the configuration, only the kernel is looked at. The app is
    imported in a process of its own; the kernel and the webhook are asked over the network.

    The exit code is 1 when there is an error among the findings.
    """
    if os.name != "posix":
        raise Misuse("gunicorn, and so its doctor, needs a POSIX system")
    worst = Exit.DONE
    for finding in _findings(session, config, webhook_url, offline, arguments):
        _show(session, finding)
        if finding.severity == "error":
            worst = Exit.FAILED
    click.get_current_context().exit(worst)


def _findings(
    session: Session,
    config: str | None,
    webhook_url: str | None,
    offline: bool,
    arguments: Sequence[str],
) -> Iterator[Finding]:
    from rebuno_sync.cli.doctor import server_checks
    from rebuno_sync.cli.doctor.reading import read

    yield _versions()
    url = session.url or os.environ.get("REBUNO_URL")
    told = (["--config", config] if config else []) + list(arguments)
    report = read(told, session.url)
    online = [] if offline else list(_online(session, url, webhook_url, report))
    leases = [lease for lease, _ in online if lease is not None]
    yield from server_checks.check(report, max(leases, default=None))
    for _, finding in online:
        yield finding


def _versions() -> Finding:
    from rebuno_sync.cli.doctor.findings import Finding

    found = [f"Python {platform.python_version()}"]
    for name in _DISTRIBUTIONS:
        try:
            found.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            continue
    return Finding("info", "versions", ", ".join(found))


def _online(
    session: Session, url: str | None, webhook_url: str | None, report: Report
) -> Iterator[tuple[float | None, Finding]]:
    """Yield what the network tells, each with the agent's lease time-out where that is known."""
    from rebuno_sync.cli.doctor import kernel_checks
    from rebuno_sync.cli.doctor.findings import Finding
    from rebuno_sync.client import Client

    urls = {agent.base_url for agent in report.agents} or ({url} if url else set())
    if not urls:
        yield (
            None,
            Finding("info", "kernel-url", "no kernel is known; pass --url or set REBUNO_URL"),
        )
    unreachable = set()
    for kernel_url in sorted(urls):
        for finding in kernel_checks.check_kernel(kernel_url):
            if finding.severity == "error":
                unreachable.add(kernel_url)
            yield None, finding
    for agent in report.agents:
        webhook = webhook_url
        if agent.base_url not in unreachable:
            yield None, kernel_checks.check_signature(agent)
            with Client(agent.base_url, session.api_key, timeout=10.0) as client:
                known = kernel_checks.registration(client, agent.agent_id)
            if isinstance(known, Finding):
                yield None, known
            else:
                lease = known.lease_timeout_seconds
                yield (
                    lease,
                    Finding(
                        "ok",
                        "registration",
                        f"the kernel knows {agent.agent_id} at {known.webhook_url}",
                    ),
                )
                webhook = webhook or known.webhook_url
        if webhook:
            for finding in kernel_checks.check_webhook(agent, webhook):
                yield None, finding


def _show(session: Session, finding: Finding) -> None:
    if session.json:
        import dataclasses

        session.output.record(dataclasses.asdict(finding))
        return
    look, style = _LOOKS[finding.severity]
    look = look if session.output.unicode else look[2:]
    session.output.line((look, style), "  ", finding.what, (f"  [{finding.check}]", "dim"))
    for label, text in (("why", finding.why), ("mend", finding.mend)):
        if text:
            session.output.line((f"    {label}: ", "dim"), text)
