"""Local steps."""

from __future__ import annotations

import itertools
import types
from typing import Any

import pytest

from rebuno_sync import RateLimited, ToolError, step
from rebuno_sync.wire import Decision
from tests.unit.support import MemoryKernel, in_execution


@pytest.fixture
def kernel() -> MemoryKernel:
    return MemoryKernel()


def submitted(kernel: MemoryKernel) -> list[tuple[str, str, bytes, str]]:
    return [call[1:] for call in kernel.calls if call[0] == "submit"]


def test_a_step_comes_out_the_same_every_time(kernel: MemoryKernel) -> None:
    numbers = itertools.count(1)
    for _ in range(3):
        with in_execution(kernel):
            assert step("number", lambda: next(numbers)) == 1
            assert step("number", lambda: next(numbers)) == 2
    assert submitted(kernel)[0] == ("local", "number", b"{}", "safe_to_retry")


def test_arguments_are_part_of_its_identity(kernel: MemoryKernel) -> None:
    with in_execution(kernel):
        assert step("add", lambda a, b=2: a + b, {"a": 1}) == 3
        assert step("add", lambda a, b: a * b, {"a": 5, "b": 5}) == 25
        assert step("add", lambda: 0, types.MappingProxyType({})) == 0
    assert [args for _, _, args, _ in submitted(kernel)] == [b'{"a":1}', b'{"a":5,"b":5}', b"{}"]


def test_outside_an_execution() -> None:
    with pytest.raises(RuntimeError, match="no execution here"):
        step("x", lambda: 1)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({"a": b"x"}, r"args\.a is a bytes"),
        ({1: 2}, "args has the key 1"),
        ({"a": object()}, r"args\.a is a object"),
    ],
)
def test_bad_arguments(kernel: MemoryKernel, args: Any, message: str) -> None:
    with in_execution(kernel), pytest.raises(TypeError, match=message):
        step("x", lambda **given: pytest.fail("it must not run"), args)
    assert kernel.calls == []


def test_what_is_no_plain_function(kernel: MemoryKernel) -> None:
    async def later() -> None: ...

    with in_execution(kernel):
        with pytest.raises(TypeError, match=r"step\(\) takes a plain function, and .*later"):
            step("x", later)
        with pytest.raises(TypeError, match=r"step\(\) takes a function, not 5"):
            step("x", 5)  # type: ignore[arg-type]
    assert kernel.calls == []


def test_arguments_that_do_not_fit_are_the_bodys_failure(kernel: MemoryKernel) -> None:
    with in_execution(kernel), pytest.raises(ToolError, match="unexpected keyword") as caught:
        step("x", lambda: 1, {"a": 1})
    assert caught.value.type == "TypeError"


def test_keywords_reach_the_effect(kernel: MemoryKernel) -> None:
    kernel.answers["submit"] = [
        Decision("denied", "s", reason="no"),
        Decision("rate_limited", reason="rate_limit_exceeded"),
        Decision("replay", "s", error={"reason": "indeterminate"}),
    ]
    with in_execution(kernel):
        assert step("x", lambda: 1, on_denied="return") == "x not allowed. reason: no"
        with pytest.raises(RateLimited):
            step("x", lambda: 1)
        found = step(
            "x",
            lambda: 1,
            {"n": 1},
            idempotency="at_most_once",
            reconcile=lambda step_id, args: [step_id, args],
        )
        assert found == ["s", {"n": 1}]
    assert submitted(kernel)[2][3] == "at_most_once"


def test_retries(kernel: MemoryKernel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rebuno_sync.context._FIRST_RETRY_PAUSE", 0.0)
    tries = itertools.count(1)

    def body() -> int:
        if (n := next(tries)) < 3:
            raise ValueError
        return n

    with in_execution(kernel):
        assert step("x", body, retries=2) == 3
