"""What goes on in this process, told to whoever watches: traces, metrics. At first nobody does.

The places where something happens ask :data:`installed` before they do anything else, so that
it costs next to nothing while nobody watches. What an observer raises is logged and goes no
further: no run is broken by being watched.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Generic, TypeVar

log = logging.getLogger(__name__)


@dataclasses.dataclass(slots=True)
class DispatchEvent:
    """One dispatch, from when a thread takes it up to when its end is reported.

    Attributes:
        carrier: what :meth:`Observer.carrier` kept of the webhook's headers.
        waited: how long it was in the queue, in seconds.
        outcome: ``completed``, ``failed``, ``blocked``, ``terminated``; ``superseded`` when its
            lease was lost, or given up since the kernel was out of reach; ``abandoned`` when it
            was given up otherwise, so that it is delivered again; ``ended_before`` when there
            was nothing left to do.
        reason: the reason that was reported for a failure.
        error: what the handler raised, if that is why it failed.
        seconds: how long it took.
    """

    agent_id: str
    execution_id: str
    dispatch_id: str
    attempt: int | None
    carrier: Mapping[str, str]
    waited: float
    outcome: str = ""
    reason: str = ""
    error: BaseException | None = None
    seconds: float = 0.0


@dataclasses.dataclass(slots=True)
class StepEvent:
    """One step, from its submission to the record of its outcome.

    Attributes:
        kind: ``tool_call``, ``llm_call`` or ``local``.
        target: the name of the tool or step, or the model.
        step_id: empty until the kernel has named it.
        decision: the word of the kernel (PROTOCOL 5); ``unanswered`` when none came.
        outcome: ``succeeded`` or ``failed``, now or in the record that is replayed;
            ``abandoned`` when the body ended without a record; empty when it did not run.
        error: what was raised, or what the record says was.
        seconds: how long it took.
    """

    agent_id: str
    execution_id: str
    attempt: int | None
    kind: str
    target: str
    step_id: str = ""
    decision: str = ""
    outcome: str = ""
    error: BaseException | None = None
    seconds: float = 0.0

    @property
    def replayed(self) -> bool:
        """Whether the outcome was recorded by an earlier attempt."""
        return self.decision == "replay"


@dataclasses.dataclass(slots=True)
class RequestEvent:
    """One try of a request to the kernel.

    Attributes:
        route: the path with ``{id}`` for each id.
        headers: sent besides the request's own; an observer may add some.
        status: the status of the answer; ``None`` when no answer came.
        error: why none came.
        seconds: how long it took.
    """

    method: str
    base_url: str
    route: str
    headers: dict[str, str] = dataclasses.field(default_factory=dict)
    status: int | None = None
    error: BaseException | None = None
    seconds: float = 0.0


Event = DispatchEvent | StepEvent | RequestEvent
E = TypeVar("E", DispatchEvent, StepEvent, RequestEvent)


class Observer:
    """Override what you want to hear of.

    Calls come on the thread where it happens, some while locks are held: they return at once
    and call nothing of this package.
    """

    def began(self, event: Event) -> Any:
        """Something begins; what is returned is handed to the calls about its course."""

    def entered(self, kept: Any) -> Any:
        """The calling thread works on it from now on; what is returned goes to :meth:`left`."""

    def left(self, kept: Any, token: Any) -> None:
        """The calling thread works on it no more."""

    def decided(self, event: StepEvent, kept: Any) -> None:
        """The kernel has decided on a step, or has not."""

    def ended(self, event: Event, kept: Any) -> None:
        """It has ended, whichever way."""

    def carrier(self, headers: Mapping[str, str]) -> Mapping[str, str]:
        """Return what to keep of a webhook until its dispatch begins, say to connect a trace."""
        return {}

    def delivered(self, agent_id: str, outcome: str, reason: str) -> None:
        """A webhook was ``taken``, ``repeated``, or ``refused`` for a reason."""

    def load(
        self,
        agent_id: str,
        *,
        waiting: int,
        running: int,
        max_queue: int,
        max_concurrency: int,
    ) -> None:
        """So many dispatches of an agent wait and run in this process, of so many that may."""

    def heartbeat_failed(self, agent_id: str) -> None:
        """A lease was not renewed when it was due; it is tried again."""

    def lease_lost(self, agent_id: str, why: str) -> None:
        """A lease was lost or given up."""


#: Who watches. Forked processes go on with those of their parent.
installed: tuple[Observer, ...] = ()


def install(observer: Observer) -> None:
    """Have ``observer`` told of everything from now on."""
    global installed
    installed = (*installed, observer)


def remove(observer: Observer) -> None:
    """Tell ``observer`` of nothing new; it still hears the end of what it saw begin."""
    global installed
    installed = tuple(each for each in installed if each is not observer)


def _safely(call: Callable[..., Any], *args: Any, **named: Any) -> Any:
    try:
        return call(*args, **named)
    except Exception:
        log.warning("an observer failed in %s", getattr(call, "__qualname__", call), exc_info=True)
        return None


def tell(what: str, *args: Any, **named: Any) -> None:
    """Call the method ``what`` of every observer."""
    for observer in installed:
        _safely(getattr(observer, what), *args, **named)


def carried(headers: Mapping[str, str]) -> dict[str, str]:
    """Return what the observers keep of a webhook's headers."""
    found: dict[str, str] = {}
    for observer in installed:
        found.update(_safely(observer.carrier, headers) or {})
    return found


class Watch(Generic[E]):
    """One event under way, as those see it who were there when it began."""

    def __init__(self, event: E) -> None:
        self.event: E = event
        self._kept = [(observer, _safely(observer.began, event)) for observer in installed]
        self._began = time.perf_counter()

    @contextlib.contextmanager
    def current(self) -> Iterator[None]:
        """Have this thread work on it within the block."""
        entered = [(o, kept, _safely(o.entered, kept)) for o, kept in self._kept]
        try:
            yield
        finally:
            for observer, kept, token in reversed(entered):
                _safely(observer.left, kept, token)

    def decided(self) -> None:
        """Tell what the kernel has decided."""
        for observer, kept in self._kept:
            _safely(observer.decided, self.event, kept)

    def end(self) -> None:
        """Tell the end."""
        self.event.seconds = time.perf_counter() - self._began
        for observer, kept in self._kept:
            _safely(observer.ended, self.event, kept)
