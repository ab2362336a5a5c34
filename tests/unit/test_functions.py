"""What may be a handler or a body."""

from __future__ import annotations

import contextlib
import functools
import math
import re
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest

from rebuno_sync.functions import require_plain_function


def plain(a: int = 1) -> int:
    return a


async def later(a: int = 1) -> int:
    return a


def several() -> Iterator[int]:
    yield 1


async def several_later() -> AsyncIterator[int]:
    yield 1


class Caller:
    def __call__(self) -> int:
        return 1

    def method(self) -> int:
        return 1

    async def method_later(self) -> int:
        return 1


class LateCaller:
    async def __call__(self) -> int:
        return 1


class LazyCaller:
    def __call__(self) -> Iterator[int]:
        yield 1


class SyncAdapter:
    """As adapters to synchronous code look: an instance that wraps a coroutine function."""

    def __init__(self, fn: Callable[..., Any]) -> None:
        functools.update_wrapper(self, fn)

    def __call__(self) -> int:
        return 1


@contextlib.contextmanager
def opened() -> Iterator[int]:
    yield 1


def named(value: object) -> str:
    """Its ``repr``, the same in every process."""
    return re.sub(r" at 0x\w+", "", repr(value))


@pytest.mark.parametrize(
    "fn",
    [
        plain,
        functools.partial(plain, 1),
        functools.partial(functools.partial(plain), a=1),
        Caller(),
        Caller().method,
        functools.partial(Caller()),
        SyncAdapter(later),
        math.sqrt,
        len,
        dict,
        lambda: 1,
    ],
    ids=named,
)
def test_plain_functions(fn: Any) -> None:
    require_plain_function(fn, "@tool")


@pytest.mark.parametrize(
    "fn",
    [
        later,
        functools.partial(later, 1),
        functools.partial(functools.partial(later)),
        Caller().method_later,
        LateCaller(),
        functools.partial(LateCaller()),
        several_later,
    ],
    ids=named,
)
def test_coroutine_functions(fn: Any) -> None:
    with pytest.raises(TypeError, match=r"@tool takes a plain function, and .* coroutine function"):
        require_plain_function(fn, "@tool")


@pytest.mark.parametrize("fn", [several, functools.partial(several), LazyCaller()], ids=named)
def test_generators(fn: Any) -> None:
    with pytest.raises(TypeError, match="is a generator; return a list instead"):
        require_plain_function(fn, "@tool")


@pytest.mark.parametrize("wrapper", [staticmethod, classmethod])
def test_the_order_of_decorators(wrapper: Any) -> None:
    with pytest.raises(TypeError, match=f"put @tool beneath @{wrapper.__name__}, not above it"):
        require_plain_function(wrapper(plain), "@tool")


@pytest.mark.parametrize("thing", [None, 1, "plain", [plain]])
def test_what_is_no_function(thing: Any) -> None:
    with pytest.raises(TypeError, match="@tool takes a function, not"):
        require_plain_function(thing, "@tool")
