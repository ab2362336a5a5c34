"""``rebuno-sync dev``: the embedded kernel, served until it is told to stop."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

import click

from rebuno_sync.cli.feed import Feed
from rebuno_sync.cli.session import Exit, Failure, Misuse, Session, json_option, pass_session
from rebuno_sync.errors import RebunoError

if TYPE_CHECKING:
    from rebuno_sync.kernel import EmbeddedKernel

_LOOPBACK = ("127.0.0.1", "::1", "localhost")
_LAST_LINES_SECONDS = 2.0
_WAKE_SECONDS = 0.2


def _address(context: click.Context, parameter: click.Parameter, value: str) -> tuple[str, int]:
    host, colon, port = value.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not colon or not host or not port.isascii() or not port.isdecimal() or int(port) > 65535:
        raise click.BadParameter(f"{value!r} is not HOST:PORT, such as 127.0.0.1:8080")
    return host, int(port)


@click.command()
@click.option(
    "--db",
    type=click.Path(dir_okay=False, path_type=Path),
    help="The SQLite file to keep everything in; in memory, and gone at the end, without it.",
)
@click.option(
    "--listen",
    metavar="HOST:PORT",
    callback=_address,
    default="127.0.0.1:8080",
    show_default=True,
    help="Where to listen; port 0 takes a free one.",
)
@click.option(
    "--config",
    "manifest",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="A manifest: the agents, and their policies, in YAML.",
)
@click.option(
    "--lease-timeout",
    type=click.FloatRange(min=0, min_open=True),
    default=120.0,
    show_default=True,
    metavar="SECONDS",
    help="How long a lease lasts that is not renewed.",
)
@click.option(
    "--deadline",
    type=click.FloatRange(min=0, min_open=True),
    metavar="SECONDS",
    help="How long an execution may take; then it fails with deadline_exceeded.",
)
@click.option(
    "--retain",
    type=click.FloatRange(min=0, min_open=True),
    metavar="SECONDS",
    help="How long executions are kept after their end; for ever by default.",
)
@click.option(
    "--bearer-token",
    metavar="TOKEN",
    help="What clients must send; others on this machine can read it in the list of processes.",
)
@click.option(
    "--bearer-token-env", metavar="NAME", help="The environment variable that holds the token."
)
@click.option(
    "--refuse-body-signatures",
    is_flag=True,
    help="Refuse agents that sign the body alone, as kernels of generation 3 do.",
)
@click.option("--accept-generation-1", is_flag=True, help="Serve agents that send no attempt.")
@click.option(
    "--allow-host",
    "allowed_hosts",
    multiple=True,
    metavar="NAME",
    help="A name, besides loop-back ones and the one of --listen, under which it may be asked.",
)
@click.option("--quiet", is_flag=True, help="Print the URL, and of what happens only warnings.")
@json_option
@pass_session
def dev(
    session: Session,
    db: Path | None,
    listen: tuple[str, int],
    manifest: Path | None,
    lease_timeout: float,
    deadline: float | None,
    retain: float | None,
    bearer_token: str | None,
    bearer_token_env: str | None,
    refuse_body_signatures: bool,
    accept_generation_1: bool,
    allowed_hosts: tuple[str, ...],
    quiet: bool,
) -> None:
    """Serve the embedded kernel, with its page at /, until SIGINT or SIGTERM.

    What it did before goes on when it is started again on the same file.
    """
    from rebuno_sync.kernel import EmbeddedKernel

    host, port = listen
    token = _token(bearer_token, bearer_token_env)
    try:
        kernel = EmbeddedKernel(
            db,
            manifest=manifest,
            lease_timeout=lease_timeout,
            deadline=deadline,
            retain=retain,
            bearer_token=token,
            host=host,
            port=port,
            accept_body_signatures=not refuse_body_signatures,
            accept_generation_1=accept_generation_1,
            allowed_hosts=allowed_hosts,
        )
        with _told_to_stop() as stop:
            kernel.start()
            feed = Feed(None if quiet else kernel.activity(), session.output)
            _begin(session, kernel, db, host, token)
            feed.start()
            try:
                # A signal may reach another thread; this one hears of it when it wakes up.
                while not stop.wait(_WAKE_SECONDS):
                    pass
            finally:
                written = feed.stop(_LAST_LINES_SECONDS)
                kernel.stop()
    except (RebunoError, ValueError, OSError) as exc:
        raise Failure(str(getattr(exc, "strerror", None) or exc)) from exc
    if not written:
        # Nobody reads what we print, and the interpreter would wait for it for ever.
        os._exit(Exit.DONE)
    session.output.note("stopped")


def _token(given: str | None, variable: str | None) -> str | None:
    if given is not None and variable is not None:
        raise Misuse("give the token with --bearer-token or --bearer-token-env, not both")
    if variable is None:
        return given
    token = os.environ.get(variable)
    if not token:
        raise Misuse(f"--bearer-token-env: the variable {variable} is not set")
    return token


def _begin(
    session: Session, kernel: EmbeddedKernel, db: Path | None, host: str, token: str | None
) -> None:
    if session.json:
        where = None if db is None else str(db)
        session.output.record({"kernel": {"url": kernel.url, "db": where}})
    else:
        where = f"keeps everything in {db}" if db else "keeps it all in memory; --db FILE keeps it"
        session.output.line(("kernel ", "bold"), kernel.url, (f"  {where}", "dim"))
    if host not in _LOOPBACK and token is None:
        session.output.note(
            f"warning: {host} may be reached from other machines, and every client is let in; "
            "set --bearer-token-env"
        )


@contextmanager
def _told_to_stop() -> Iterator[threading.Event]:
    """Yield an event that SIGINT and SIGTERM set; a second signal ends the process at once."""
    stop = threading.Event()
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def told(number: int, frame: FrameType | None) -> None:
        if stop.is_set():
            os._exit(Exit.INTERRUPTED)
        stop.set()

    for number in before:
        signal.signal(number, told)
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
