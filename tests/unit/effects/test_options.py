"""The keywords of tools and steps, checked where they are written."""

from __future__ import annotations

import re
from typing import Any

import pytest

from rebuno_sync import step, tool, wrap_tool
from rebuno_sync.effects.options import EffectOptions
from rebuno_sync.wire import Idempotency, Kind
from tests.unit.support import MemoryKernel, in_execution

DEFAULTS: dict[str, Any] = {
    "idempotency": "safe_to_retry",
    "retries": 0,
    "timeout": None,
    "on_denied": "raise",
    "reconcile": None,
    "resources": None,
}

WRONG: list[tuple[dict[str, Any], type[Exception], str]] = [
    (
        {"idempotency": "exactly_once"},
        ValueError,
        "work: idempotency is 'safe_to_retry' or 'at_most_once', not 'exactly_once'",
    ),
    ({"retries": -1}, ValueError, "work: retries is a number of tries from 0 up, not -1"),
    ({"retries": 1.0}, ValueError, "work: retries is a number of tries from 0 up, not 1.0"),
    ({"retries": True}, ValueError, "work: retries is a number of tries from 0 up, not True"),
    (
        {"retries": 1, "idempotency": "at_most_once"},
        ValueError,
        "work: an at-most-once effect is never tried twice",
    ),
    ({"timeout": 0}, ValueError, "work: timeout is a number of seconds above 0, not 0"),
    ({"timeout": -1.5}, ValueError, "work: timeout is a number of seconds above 0"),
    ({"timeout": float("inf")}, ValueError, "work: timeout is a number of seconds above 0"),
    ({"timeout": float("nan")}, ValueError, "work: timeout is a number of seconds above 0"),
    ({"timeout": "5"}, ValueError, "work: timeout is a number of seconds above 0, not '5'"),
    ({"timeout": True}, ValueError, "work: timeout is a number of seconds above 0, not True"),
    ({"on_denied": "ignore"}, ValueError, "work: on_denied is 'raise' or 'return', not 'ignore'"),
    (
        {"reconcile": 5, "idempotency": "at_most_once"},
        TypeError,
        r"work: reconcile is a function of \(step_id, args\), not 5",
    ),
    (
        {"reconcile": lambda step_id, args: 1},
        ValueError,
        "work: reconcile is asked about at-most-once effects; set idempotency='at_most_once'",
    ),
    (
        {"resources": ["disk"]},
        ValueError,
        r"work: resources=\['disk'\] names resources that are not registered",
    ),
]


def work() -> None:
    raise AssertionError("it must not run")


@pytest.mark.parametrize(
    ("wrong", "kind", "message"), WRONG, ids=[re.sub(r" at 0x\w+", "", str(w[0])) for w in WRONG]
)
def test_what_makes_no_sense(wrong: dict[str, Any], kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        tool("work", **wrong)(work)
    with pytest.raises(kind, match=message):
        tool(**wrong)(work)
    with pytest.raises(kind, match=message):
        wrap_tool("work", lambda args: work(), **wrong)
    kernel = MemoryKernel()
    with in_execution(kernel), pytest.raises(kind, match=message):
        step("work", work, **wrong)
    assert kernel.calls == []


@pytest.mark.parametrize("name", ["", 5, b"work"])
def test_names(name: Any) -> None:
    with pytest.raises(TypeError, match="the name of a tool or step is non-empty text, not"):
        EffectOptions.checked(Kind.LOCAL, name, **DEFAULTS)
    with pytest.raises(TypeError, match="non-empty text"):
        wrap_tool(name, lambda args: 1)
    with in_execution(MemoryKernel()), pytest.raises(TypeError, match="non-empty text"):
        step(name, work)


def test_what_an_effect_gets() -> None:
    def reconcile(step_id: str, args: Any) -> None: ...

    given = {
        "idempotency": "at_most_once",
        "retries": 0,
        "timeout": 2.5,
        "on_denied": "return",
        "reconcile": reconcile,
        "resources": (),
    }
    effect = EffectOptions.checked(Kind.TOOL_CALL, "work", **given).effect(b"{}", work)  # type: ignore[arg-type]
    assert (effect.name, effect.kind, effect.args, effect.body) == (
        "work",
        Kind.TOOL_CALL,
        b"{}",
        work,
    )
    assert effect.idempotency is Idempotency.AT_MOST_ONCE
    assert (effect.retries, effect.timeout, effect.on_denied) == (0, 2.5, "return")
    assert effect.reconcile is reconcile
