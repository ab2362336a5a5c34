"""Carrying the execution into other threads."""

from __future__ import annotations

import concurrent.futures
import contextvars
import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


def bind_context(fn: Callable[P, T]) -> Callable[P, T]:
    """Return ``fn`` bound to the execution that the caller runs in.

    The bound function may be called on any thread, by several at once: effects in it belong to
    the caller's execution, and Flask's ``current_app`` and every other context variable are
    what they were here.

    Args:
        fn: what shall run elsewhere, say as the target of a ``threading.Thread``.
    """
    here = contextvars.copy_context()

    @functools.wraps(fn)
    def bound(*args: P.args, **kwargs: P.kwargs) -> T:
        # A context can be entered by one thread at a time, so each call gets a copy.
        return here.copy().run(fn, *args, **kwargs)

    return bound


class ContextThreadPoolExecutor(concurrent.futures.ThreadPoolExecutor):
    """A ``ThreadPoolExecutor`` whose tasks run in the execution of whoever submits them.

    Leave its ``with`` block, or wait for the futures, before the handler returns: effects that
    begin after that cannot be recorded.
    """

    def submit(
        self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs
    ) -> concurrent.futures.Future[T]:
        """Schedule ``fn(*args, **kwargs)`` in the caller's execution."""
        return super().submit(bind_context(fn), *args, **kwargs)
