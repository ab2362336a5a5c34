"""Which execution, attempt and step a log record belongs to.

:class:`ExecutionFilter` is for :mod:`logging`, :func:`add_execution` for structlog. Both know what
the calling thread works on, and what :func:`rebuno_sync.bind_context` has carried to it, whoever
logs: the handler, a tool, a library, or this package.
"""

from __future__ import annotations

import contextvars
import logging
from collections.abc import MutableMapping
from typing import Any

_dispatch: contextvars.ContextVar[tuple[str, int | None]] = contextvars.ContextVar(
    "rebuno_sync_dispatch", default=("", None)
)
_step: contextvars.ContextVar[str] = contextvars.ContextVar("rebuno_sync_step", default="")


class ExecutionFilter(logging.Filter):
    """Gives every record ``execution_id``, ``dispatch_attempt`` and ``step_id``; stops none.

    Add it to handlers, not to loggers: only a handler's filters see the records of every logger
    beneath. With a ``QueueHandler``, add it to that, since its listener has a thread of its own.

    ``step_id`` is there while the body of a step runs or its outcome is recorded. What a record
    brings of its own under these names stays.

    Args:
        name: as for ``logging.Filter``: records of other loggers are stopped; none by default.
        absent: what stands in for an id that there is none of, such as ``"-"``, or ``None`` for
            JSON; format with ``%(dispatch_attempt)s``, which takes any of them.
    """

    def __init__(self, name: str = "", *, absent: Any = "") -> None:
        super().__init__(name)
        self.absent = absent

    def filter(self, record: logging.LogRecord) -> bool:
        """Add what is known; tell whether the record is of the logger ``name`` or beneath it."""
        for name, value in current_ids().items():
            if not hasattr(record, name):
                setattr(record, name, self.absent if value is None else value)
        return bool(super().filter(record))


def add_execution(
    logger: Any, method_name: str, event_dict: MutableMapping[str, Any]
) -> MutableMapping[str, Any]:
    """Processor for structlog: adds ``execution_id``, ``dispatch_attempt`` and ``step_id``.

    What there is none of is left out, and what an event brings of its own stays. It works in
    ``structlog.configure(processors=…)`` and in the ``foreign_pre_chain`` of a
    ``ProcessorFormatter``.
    """
    for name, value in current_ids().items():
        if value is not None:
            event_dict.setdefault(name, value)
    return event_dict


def current_ids() -> dict[str, Any]:
    """Return what the calling code works on; ``None`` under each name that says nothing here."""
    execution_id, attempt = _dispatch.get()
    return {
        "execution_id": execution_id or None,
        "dispatch_attempt": attempt,
        "step_id": _step.get() or None,
    }


def enter_dispatch(execution_id: str, attempt: int | None) -> None:
    """Say what this thread works on from now on, to the end of its ``contextvars.Context``."""
    _dispatch.set((execution_id, attempt))


class WithinStep:
    """Says which step this thread works on within the block.

    A class, since each step of each handler passes here, and a generator would take four times
    as long.
    """

    __slots__ = ("_step_id", "_token")

    def __init__(self, step_id: str) -> None:
        self._step_id = step_id

    def __enter__(self) -> None:
        self._token = _step.set(self._step_id)

    def __exit__(self, *raised: object) -> None:
        _step.reset(self._token)
