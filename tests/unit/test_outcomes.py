"""What came of a body, and the watch over its time. How effects use them: test_context."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from rebuno_sync import wire
from rebuno_sync.decisions import Replayed
from rebuno_sync.errors import LeaseSuperseded, ToolError
from rebuno_sync.outcomes import Deadline, described, encoded
from tests.scripted import wait_until

TIMED_OUT = Replayed("s", error=ToolError("late"))


def test_values() -> None:
    assert encoded({"a": (1,)}, "work") == (b'{"a":[1]}', None)
    result, error = encoded({"a": {1}}, "work")
    assert result == b""
    assert error is not None
    assert error["type"] == "TypeError"
    assert error["message"].startswith("result.a is a set")


def test_the_longest_value() -> None:
    longest = "x" * (wire.MAX_BODY_BYTES - 1024 - 2)
    assert encoded(longest, "work")[1] is None
    error = encoded(longest + "x", "work")[1]
    assert error is not None
    assert "store the data elsewhere and pass a reference to it" in error["message"]


def test_errors() -> None:
    assert described(ValueError("a", 1)) == {"message": "('a', 1)", "type": "ValueError"}
    inner = ToolError("m", "inner", type="KeyError", reason="timeout")
    assert described(inner) == {"message": "m", "type": "ToolError"}


class Watch:
    """What a deadline told of itself."""

    def __init__(self, outcome: Replayed | BaseException = TIMED_OUT) -> None:
        self.recorded: list[dict[str, Any]] = []
        self.overdue: list[int] = []
        self.outcome = outcome
        self.hold = threading.Event()
        self.hold.set()

    def record(self, error: dict[str, Any]) -> Replayed:
        self.recorded.append(error)
        assert self.hold.wait(30)
        if isinstance(self.outcome, BaseException):
            raise self.outcome
        return self.outcome

    def start(self, seconds: float) -> Deadline:
        return Deadline(seconds, "work", self.record, self.overdue.append)


def test_a_body_in_time() -> None:
    watch = Watch()
    deadline = watch.start(1000.0)
    assert any(t.name == "rebuno-timeout-work" and t.daemon for t in threading.enumerate())
    assert deadline.stop() is False
    wait_until(lambda: all(t.name != "rebuno-timeout-work" for t in threading.enumerate()))
    assert (watch.recorded, watch.overdue, deadline.passed) == ([], [], False)


def test_a_body_over_its_time() -> None:
    watch = Watch()
    deadline = watch.start(0.001)
    assert deadline.outcome() is TIMED_OUT
    assert deadline.passed
    assert watch.overdue == [1]
    assert deadline.stop() is True
    assert watch.overdue == [1, -1]
    (error,) = watch.recorded
    assert (error["type"], error["reason"]) == ("TimeoutError", "timeout")
    assert "after its time-out of 0.001 s" in error["message"]


def test_a_body_that_ends_while_its_failure_is_recorded() -> None:
    watch = Watch()
    watch.hold.clear()
    deadline = watch.start(0.001)
    wait_until(lambda: watch.recorded)
    assert deadline.stop() is True
    waiter = threading.Thread(target=lambda: outcomes.append(deadline.outcome()))
    outcomes: list[Replayed] = []
    waiter.start()
    watch.hold.set()
    waiter.join(30)
    assert outcomes == [TIMED_OUT]


def test_what_recording_raises_reaches_the_body() -> None:
    signal = LeaseSuperseded()
    deadline = Watch(signal).start(0.001)
    with pytest.raises(LeaseSuperseded) as caught:
        deadline.outcome()
    assert caught.value is signal
    assert deadline.stop()


def test_time_and_body_never_both_win() -> None:
    for n in range(100):
        watch = Watch()
        deadline = watch.start(n * 2e-5)
        passed = deadline.stop()
        if passed:
            assert deadline.outcome() is TIMED_OUT
        deadline._timer.join(30)
        assert sum(watch.overdue) == 0
        assert len(watch.recorded) == int(passed)
