"""What came of a body: its JSON, the JSON of its failure, or that its time was up."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any

from . import wire
from .decisions import Replayed
from .errors import ToolError, safe_text
from .threads import bind_context

log = logging.getLogger(__name__)


def encoded(value: Any, name: str) -> tuple[bytes, dict[str, Any] | None]:
    """Return the JSON of a body's value, or else what went wrong.

    What cannot be recorded is a failure of the step, since the body has run.
    """
    try:
        result = wire.encode(value, "result")
        wire.check_size(len(result), f"the result of {name}", wire.MAX_VALUE_BYTES)
    except Exception as exc:
        log.warning("the result of %s cannot be recorded: %s", name, exc)
        return b"", described(exc)
    return result, None


def described(exc: BaseException) -> dict[str, Any]:
    """Return the JSON that is recorded for an exception: its class name and its text."""
    message = safe_text(exc.message if isinstance(exc, ToolError) else exc)
    return {"message": message, "type": type(exc).__name__}


class Deadline:
    """Records a step as failed when its time is up, while the body runs on.

    Args:
        seconds: the time.
        name: the name of the effect.
        record: records the failure and returns the outcome that then stands.
        overdue: told ``+1`` when the time is up, and ``-1`` when the body ends after that.

    Attributes:
        passed: whether the time was up before the body ended.
    """

    def __init__(
        self,
        seconds: float,
        name: str,
        record: Callable[[dict[str, Any]], Replayed],
        overdue: Callable[[int], None],
    ) -> None:
        self.passed = False
        self._message = (
            f"{name} was still running after its time-out of {seconds:g} s; it was not stopped, "
            "so it may yet take effect"
        )
        self._record = record
        self._overdue = overdue
        self._lock = threading.Lock()
        self._over = False
        self._recorded = threading.Event()
        self._outcome: Replayed | BaseException | None = None
        self._timer = threading.Timer(seconds, bind_context(self._expire))
        self._timer.daemon = True
        self._timer.name = f"rebuno-timeout-{name}"
        self._timer.start()

    def stop(self) -> bool:
        """End the watch as the body has ended; tell whether the time was up before."""
        with self._lock:
            self._over = True
        self._timer.cancel()
        if self.passed:
            self._overdue(-1)
        return self.passed

    def outcome(self) -> Replayed:
        """Return what was recorded when the time was up; raises what recording it raised."""
        self._recorded.wait()
        if isinstance(self._outcome, Replayed):
            return self._outcome
        assert self._outcome is not None
        raise self._outcome

    def _expire(self) -> None:
        with self._lock:
            if self._over:
                return
            self.passed = True
        self._overdue(+1)
        log.warning("%s", self._message)
        try:
            self._outcome = self._record(
                {"message": self._message, "type": "TimeoutError", "reason": "timeout"}
            )
        except BaseException as exc:
            self._outcome = exc
        finally:
            self._recorded.set()
