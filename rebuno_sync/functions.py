"""What may be a handler or a body: a plain function, whose work is done when it returns."""

from __future__ import annotations

import functools
import inspect
from typing import Any


def plain_callable(fn: Any) -> Any:
    """Return the function behind a ``functools.partial`` or an instance that can be called."""
    while isinstance(fn, functools.partial):
        fn = fn.func
    if inspect.isroutine(fn) or isinstance(fn, type):
        return fn
    return getattr(fn, "__call__", fn)  # noqa: B004 (an instance's own method)


def require_plain_function(fn: Any, what: str) -> None:
    """Refuse what would return before its work is done.

    Raises:
        TypeError: ``fn`` is not callable, is a coroutine function or is a generator function.
    """
    if isinstance(fn, (staticmethod, classmethod)):
        raise TypeError(f"put {what} beneath @{type(fn).__name__}, not above it")
    if not callable(fn):
        raise TypeError(f"{what} takes a function, not {fn!r}")
    target = plain_callable(fn)
    name = getattr(fn, "__qualname__", repr(fn))
    if inspect.iscoroutinefunction(target) or inspect.isasyncgenfunction(target):
        raise TypeError(
            f"{what} takes a plain function, and {name} is a coroutine function; write it with "
            "def, or call asyncio.run() inside it"
        )
    if inspect.isgeneratorfunction(target):
        raise TypeError(
            f"{what} takes a plain function, and {name} is a generator; return a list instead"
        )
