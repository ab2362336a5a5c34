"""What every command shares: the kernel it speaks to, how it prints, how it ends.

Exit codes: 0 done, 1 failed, 2 wrong usage, 3 the kernel is unreachable, 4 the execution was
cancelled, 130 interrupted.
"""

from __future__ import annotations

import enum
import functools
import os
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import click

from rebuno_sync.cli.output import Output, one_line
from rebuno_sync.errors import APIError, NetworkError, RebunoError

if TYPE_CHECKING:
    from rebuno_sync import Client
    from rebuno_sync.wire import Execution

F = TypeVar("F", bound=Callable[..., Any])


class Exit(enum.IntEnum):
    """The exit codes."""

    DONE = 0
    FAILED = 1
    USAGE = 2
    UNREACHABLE = 3
    CANCELLED = 4
    INTERRUPTED = 130


_ENDS = {"completed": Exit.DONE, "failed": Exit.FAILED, "cancelled": Exit.CANCELLED}
#: What a proxy answers for a kernel that is not there.
_GATEWAY_STATUSES = frozenset({502, 503, 504})


def exit_code_of(execution: Execution) -> Exit:
    """Return the code that stands for how an execution ended."""
    return _ENDS.get(execution.status, Exit.DONE)


class Failure(click.ClickException):
    """Ends the command with one line on the standard error stream."""

    exit_code = Exit.FAILED

    def __init__(self, message: str) -> None:
        super().__init__(one_line(message))


class Misuse(Failure):
    """What was given makes no sense."""

    exit_code = Exit.USAGE


class Unreachable(Failure):
    """No kernel answered."""

    exit_code = Exit.UNREACHABLE


def failure_of(exc: RebunoError) -> Failure:
    """Return the failure that an error of the package stands for."""
    gone = isinstance(exc, APIError) and exc.status_code in _GATEWAY_STATUSES
    return (Unreachable if gone or isinstance(exc, NetworkError) else Failure)(str(exc))


class Session:
    """The options that hold for every command, wherever on the line they stand."""

    def __init__(self) -> None:
        self.url: str | None = None
        self.api_key: str | None = None
        self.timeout = 35.0
        self.json = False

    @functools.cached_property
    def output(self) -> Output:
        """Where results go."""
        return Output(json=self.json)

    @functools.cached_property
    def client(self) -> Client:
        """The kernel.

        Raises:
            Misuse: there is no URL, or it is not one.
        """
        from rebuno_sync import Client

        url = self.url or os.environ.get("REBUNO_URL")
        if not url:
            raise Misuse("which kernel? Pass --url, or set REBUNO_URL.")
        try:
            return Client(url, self.api_key, timeout=self.timeout)
        except ValueError as exc:
            raise Misuse(str(exc)) from None


pass_session = click.make_pass_decorator(Session, ensure=True)


def _stored(name: str) -> Callable[[click.Context, click.Parameter, Any], None]:
    def store(context: click.Context, parameter: click.Parameter, value: Any) -> None:
        if value is not None:
            setattr(context.ensure_object(Session), name, value)

    return store


def stored_option(flag: str, name: str, **settings: Any) -> Callable[[F], F]:
    """Return an option that the session keeps, wherever on the line it stands."""
    return click.option(flag, expose_value=False, callback=_stored(name), **settings)


def json_option(command: F) -> F:
    """Add ``--json``."""
    return stored_option(
        "--json", "json", is_flag=True, default=None, help="Print JSON, one object a line."
    )(command)


def kernel_options(command: F) -> F:
    """Add ``--json`` and what says which kernel to speak to."""
    command = stored_option(
        "--timeout",
        "timeout",
        type=click.FloatRange(min=0, min_open=True),
        metavar="SECONDS",
        help="How long to wait for an answer; 35 by default.",
    )(command)
    command = stored_option(
        "--api-key",
        "api_key",
        metavar="TOKEN",
        help="The bearer token; REBUNO_API_KEY by default, which others on this machine cannot "
        "read in the list of processes.",
    )(command)
    command = stored_option(
        "--url", "url", metavar="URL", help="Where the kernel is; REBUNO_URL by default."
    )(command)
    return json_option(command)


def ids_option(command: F) -> F:
    """Add ``--quiet``."""
    return click.option("-q", "--quiet", "ids", is_flag=True, help="Print the ids alone.")(command)


def listed(session: Session, found: Iterable[Any], *, ids: bool = False) -> bool:
    """Print models as JSON, or their ids alone; tell whether one of these was asked for."""
    if session.json:
        for model in found:
            session.output.record(model)
    elif ids:
        for model in found:
            session.output.line(model.id)
    return session.json or ids


def for_each(session: Session, ids: Sequence[str], act: Callable[[str], None], done: str) -> None:
    """Do the same to several things, as far as the kernel lets.

    Args:
        act: does it to one.
        done: what to say of one that it was done to, such as ``"cancelled"``.

    Raises:
        Failure: the kernel refused some; each has been told by then.
    """
    refused = 0
    for id in ids:
        try:
            act(id)
        except APIError as exc:
            refused += 1
            session.output.note(f"{id}: {one_line(str(exc))}")
            continue
        if session.json:
            session.output.record({"id": id, "done": done})
        else:
            session.output.line(f"{done} ", id)
    if refused:
        raise Failure(f"{refused} of {len(ids)} could not be {done}")
