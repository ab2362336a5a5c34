"""The steps under way in one execution, as whoever watches sees them.

A step begins with its submission and ends where its outcome stands: at once for one that is
replayed or refused, on another thread for one that ran out of time, and with the handler for one
that nothing was recorded of.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from .decisions import Replayed, Run
from .errors import (
    APIError,
    Blocked,
    LeaseSuperseded,
    PolicyError,
    RateLimited,
    Terminated,
)
from .logs import WithinStep
from .observers import StepEvent, Watch
from .wire import Kind


class StepWatches:
    """Watches the steps of one attempt; empty as long as nobody watches."""

    def __init__(self, agent_id: str, execution_id: str, attempt: int | None) -> None:
        self._of = agent_id, execution_id, attempt
        self._watches: dict[str, Watch[StepEvent]] = {}

    def submitted(
        self, kind: Kind, name: str, submit: Callable[[], Run | Replayed]
    ) -> Run | Replayed:
        """Return what ``submit`` does, or raise it, and tell how the kernel decided."""
        event = StepEvent(*self._of, kind.value, name)
        watch = Watch(event)
        try:
            with watch.current():
                found = submit()
        except BaseException as exc:
            event.decision, event.error = word_for(exc), exc
            event.step_id = getattr(exc, "step_id", "")
            watch.decided()
            watch.end()
            raise
        event.step_id = found.step_id
        if isinstance(found, Run):
            event.decision = "proceed"
            self._watches[found.step_id] = watch
            watch.decided()
        else:
            event.decision = "replay"
            watch.decided()
            _end(watch, found)
        return found

    def within(self, step_id: str) -> contextlib.AbstractContextManager[None]:
        """Have this thread work on a step within the block."""
        watch = self._watches.get(step_id)
        return WithinStep(step_id) if watch is None else _within(step_id, watch)

    def ended(self, stands: Replayed) -> Replayed:
        """Tell that a step has ended, if it has not been told, and return how."""
        watch = self._watches.pop(stands.step_id, None)
        if watch is not None:
            _end(watch, stands)
        return stands

    def abandon(self, signal: BaseException | None) -> None:
        """Tell that nothing was recorded of the steps that are left, as the handler has ended."""
        for step_id in list(self._watches):
            watch = self._watches.pop(step_id, None)
            if watch is not None:
                watch.event.outcome, watch.event.error = "abandoned", signal
                watch.end()


@contextlib.contextmanager
def _within(step_id: str, watch: Watch[StepEvent]) -> Iterator[None]:
    with WithinStep(step_id), watch.current():
        yield


def _end(watch: Watch[StepEvent], stands: Replayed) -> None:
    watch.event.error = stands.error
    watch.event.outcome = "succeeded" if stands.error is None else "failed"
    watch.end()


def word_for(exc: BaseException) -> str:
    """Return the word for a submission that raised ``exc``: the kernel's, if it gave any."""
    if isinstance(exc, PolicyError):
        return "denied"
    if isinstance(exc, RateLimited):
        return "rate_limited"
    if isinstance(exc, Blocked):
        return "blocked" if exc.step_id else "execution_blocked"
    if isinstance(exc, Terminated):
        return "execution_terminal"
    cause = exc.__cause__
    if isinstance(exc, LeaseSuperseded) and isinstance(cause, APIError):
        return cause.code if cause.status_code == 409 else "unanswered"
    return "refused" if isinstance(exc, (APIError, ValueError)) else "unanswered"
