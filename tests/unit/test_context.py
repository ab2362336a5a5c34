"""The execution context: effects, what ends a dispatch, time-outs, retries, reconciling."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable
from typing import Any

import pytest

from rebuno_sync import context as context_module
from rebuno_sync import wire
from rebuno_sync.context import (
    Effect,
    ExecutionContext,
    execution,
    execution_or_none,
    previous,
)
from rebuno_sync.errors import (
    APIError,
    Blocked,
    ConflictError,
    ControlFlow,
    LeaseSuperseded,
    NetworkError,
    NotFoundError,
    PolicyError,
    RateLimited,
    Terminated,
    ToolError,
    UnauthorizedError,
    ValidationError,
)
from rebuno_sync.lease import Lease
from rebuno_sync.wire import Decision, Idempotency, Kind
from tests.scripted import wait_until
from tests.unit.support import MemoryKernel, dispatch, in_execution


@pytest.fixture
def kernel() -> MemoryKernel:
    return MemoryKernel()


@pytest.fixture(autouse=True)
def _no_pauses_between_retries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(context_module, "_FIRST_RETRY_PAUSE", 0.0)


def effect(body: Callable[[], Any] = lambda: None, **options: Any) -> Effect:
    return Effect("work", Kind.TOOL_CALL, b"{}", body, **options)


def raising(exc: BaseException) -> Callable[[], Any]:
    def body() -> None:
        raise exc

    return body


# Where it is found


def test_there_is_none_outside() -> None:
    assert execution_or_none() is None
    for call in (execution, previous):
        with pytest.raises(RuntimeError, match=r"there is no execution here: .*\n\n.*agent\.bind"):
            call()


def test_it_is_current_within_and_only_there(kernel: MemoryKernel) -> None:
    with in_execution(kernel, input={"a": 1}) as context:
        assert execution() is context
        assert (context.id, context.agent_id, context.status) == ("e1", "a1", "running")
        assert (context.dispatch_id, context.dispatch_attempt) == ("d1", 1)
        assert context.input == {"a": 1}
        assert isinstance(context.cancelled, threading.Event)
        assert not context.cancelled.is_set()
        assert context.check() is None  # type: ignore[func-returns-value]
        assert "e1" in repr(context)
        seen: list[Any] = []
        thread = threading.Thread(target=lambda: seen.append(execution_or_none()))
        thread.start()
        thread.join()
        assert seen == [None]
    assert execution_or_none() is None


# Truth 1


@pytest.mark.parametrize(
    ("value", "expected"),
    [((1, 2), [1, 2]), ({"a": (1,)}, {"a": [1]}), (1.0, 1.0), (10**4400, 10**4400), (None, None)],
    ids=["tuple", "nested", "float", "long", "none"],
)
def test_the_first_run_returns_what_replays_return(
    kernel: MemoryKernel, value: Any, expected: Any
) -> None:
    runs = []

    def body() -> Any:
        runs.append(1)
        return value

    for _ in range(3):
        with in_execution(kernel) as context:
            found = context.perform(effect(body))
        assert found == expected
        assert type(found) is type(expected)
    assert len(runs) == 1


def test_what_a_caller_does_to_a_result_stays_with_the_caller(kernel: MemoryKernel) -> None:
    mine = {"rows": [1]}
    with in_execution(kernel) as context:
        found = context.perform(effect(lambda: mine))
        found["rows"].append(2)
        mine["rows"].append(3)
    with in_execution(kernel) as context:
        assert context.perform(effect()) == {"rows": [1]}


class Stubborn(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


class Mute(Exception):
    def __repr__(self) -> str:
        raise RuntimeError("no text")

    __str__ = __repr__


def caused_by_itself() -> Exception:
    error = ValueError("loop")
    error.__cause__ = error
    return error


def in_a_circle() -> Exception:
    first, second = ValueError("first"), KeyError("second")
    first.__context__, second.__context__ = second, first
    return first


def with_notes() -> Exception:
    error = ValueError("noted")
    error.__notes__ = [object()]  # type: ignore[attr-defined]
    return error


@pytest.mark.parametrize(
    ("error", "message", "kind"),
    [
        (ValueError("bad"), "bad", "ValueError"),
        (ValueError(), "", "ValueError"),
        (ValueError("a", 2), "('a', 2)", "ValueError"),
        (KeyError("k"), "'k'", "KeyError"),
        (OSError(2, "gone", "file"), "[Errno 2] gone: 'file'", "FileNotFoundError"),
        (Stubborn(), "<Stubborn that cannot be shown as text>", "Stubborn"),
        (Mute(), "<Mute that cannot be shown as text>", "Mute"),
        (ValueError("a\ud800"), "a?", "ValueError"),
        (ValueError("x" * 70_000), "x" * 65_536 + "… (4464 more characters)", "ValueError"),
        (caused_by_itself(), "loop", "ValueError"),
        (in_a_circle(), "first", "ValueError"),
        (with_notes(), "noted", "ValueError"),
        (UnicodeDecodeError("utf-8", b"\xff", 0, 1, "bad"), None, "UnicodeDecodeError"),
        (ToolError("inner", "t", type="X", reason="timeout"), "inner", "ToolError"),
        (PolicyError("no"), "no", "PolicyError"),
        (RecursionError("deep"), "deep", "RecursionError"),
        (MemoryError(), "", "MemoryError"),
        (StopIteration(5), "5", "StopIteration"),
    ],
    ids=lambda v: type(v).__name__ if isinstance(v, BaseException) else "",
)
def test_an_error_is_equal_on_every_replay(
    kernel: MemoryKernel, error: Exception, message: str | None, kind: str
) -> None:
    found = []
    for _ in range(3):
        with in_execution(kernel) as context, pytest.raises(ToolError) as caught:
            context.perform(effect(raising(error)))
        found.append(caught.value)
    first, *replays = found
    assert first.message == (str(error) if message is None else message)
    assert (first.tool, first.type, first.reason) == ("work", kind, "")
    assert first.error == {"message": first.message, "type": kind}
    assert first.__cause__ is None
    for replay in replays:
        assert replay == first
        assert (type(replay), replay.args, vars(replay)) == (ToolError, first.args, vars(first))


def test_the_original_error_is_logged(
    kernel: MemoryKernel, caplog: pytest.LogCaptureFixture
) -> None:
    error = ValueError("bad")
    with in_execution(kernel) as context, pytest.raises(ToolError):
        context.perform(effect(raising(error)))
    logged = [r for r in caplog.records if r.exc_info]
    assert [r.exc_info[1] for r in logged if r.exc_info] == [error]


class Unreadable:
    @property
    def __class__(self) -> Any:
        raise LookupError("detached")


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (b"x", "result is a bytes, which has no JSON form"),
        ({"a": [float("nan")]}, r"result\.a\[0\] is nan"),
        (lambda: 1, "result is a function"),
        ("\ud800", "result has a lone surrogate"),
        (Unreadable(), "result is a Unreadable, and reading it raised LookupError"),
        ("x" * wire.MAX_BODY_BYTES, "the result of work has 10485762 bytes of JSON"),
    ],
    ids=["bytes", "nan", "function", "surrogate", "unreadable", "too long"],
)
def test_a_result_that_cannot_be_recorded_is_a_failure(
    kernel: MemoryKernel, value: Any, message: str
) -> None:
    runs = []

    def body() -> Any:
        runs.append(1)
        return value

    errors = []
    for _ in range(2):
        with in_execution(kernel) as context, pytest.raises(ToolError, match=message) as caught:
            context.perform(effect(body, retries=0))
        errors.append(caught.value)
    assert errors[0] == errors[1]
    assert len(runs) == 1, "the body has run; it must not run again on a replay"


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(1), GeneratorExit()])
def test_what_ends_a_process_is_not_recorded(kernel: MemoryKernel, error: BaseException) -> None:
    with in_execution(kernel) as context:
        with pytest.raises(type(error)) as caught:
            context.perform(effect(raising(error), retries=3, timeout=60))
        assert caught.value is error
        assert context.signal is None
    assert kernel.names() == ["submit"]
    with in_execution(kernel) as context:
        assert context.perform(effect(lambda: "again")) == "again"


class GreenletExit(BaseException):
    """Stands for gevent's, which is known by its name."""


def test_the_end_of_a_greenlet_is_not_recorded(kernel: MemoryKernel) -> None:
    with in_execution(kernel) as context, pytest.raises(GreenletExit):
        context.perform(effect(raising(GreenletExit())))
    assert kernel.names() == ["submit"]


def test_a_cancelled_coroutine_is_a_failure_like_any_other(kernel: MemoryKernel) -> None:
    """It is no ``Exception``, and left unrecorded the body would run again in every attempt."""

    async def cancelled() -> None:
        task = asyncio.current_task()
        assert task is not None
        task.cancel()
        await asyncio.sleep(0)

    for _ in range(2):
        with in_execution(kernel) as context, pytest.raises(ToolError) as caught:
            context.perform(effect(lambda: asyncio.run(cancelled())))
        assert caught.value.type == "CancelledError"
    assert kernel.names().count("fail_step") == 1


def test_signals_of_effects_within_a_body_are_not_recorded(kernel: MemoryKernel) -> None:
    kernel.answers["submit"] = [None, Decision("blocked", "s2", approval_id="ap")]

    def outer() -> Any:
        return execution().perform(Effect("inner", Kind.LOCAL, b"{}", lambda: 1))

    with in_execution(kernel) as context:
        with pytest.raises(Blocked):
            context.perform(effect(outer))
        assert isinstance(context.signal, Blocked)
    assert kernel.names() == ["submit", "submit"]


# Decisions


@pytest.mark.parametrize(
    ("decision", "signal"),
    [
        (Decision("blocked", "s", approval_id="ap"), Blocked),
        (Decision("execution_blocked"), Blocked),
        (Decision("execution_terminal"), Terminated),
    ],
    ids=lambda v: v.decision if isinstance(v, Decision) else "",
)
def test_signals_are_remembered(
    kernel: MemoryKernel, decision: Decision, signal: type[ControlFlow]
) -> None:
    kernel.answers["submit"] = [decision]
    with in_execution(kernel) as context:
        with pytest.raises(signal) as caught:
            context.perform(effect(raising(AssertionError("it must not run"))))
        for call in (
            lambda: context.perform(effect()),
            context.check,
            context.previous,
            lambda: context.is_replaying,
            lambda: context.stream("s", 0, "x"),
        ):
            with pytest.raises(signal) as again:
                call()
            assert again.value is caught.value
        assert context.signal is caught.value
    assert kernel.names() == ["submit"]


def test_a_block_says_what_is_waited_for(kernel: MemoryKernel) -> None:
    kernel.answers["submit"] = [Decision("blocked", "s", approval_id="ap")]
    with in_execution(kernel) as context, pytest.raises(Blocked) as caught:
        context.perform(effect())
    assert (caught.value.approval_id, caught.value.step_id) == ("ap", "s")


def test_denials_and_limits_are_errors(kernel: MemoryKernel) -> None:
    kernel.answers["submit"] = [
        Decision("denied", "s", reason="too dear", rule_id="r1"),
        Decision("denied", "s"),
        Decision("rate_limited", reason="rate_limiter_unavailable"),
        Decision("rate_limited"),
    ]
    with in_execution(kernel) as context:
        with pytest.raises(PolicyError, match="too dear") as denied:
            context.perform(effect())
        assert vars(denied.value) == {
            "reason": "too dear",
            "rule_id": "r1",
            "tool": "work",
            "step_id": "s",
        }
        with pytest.raises(PolicyError, match="policy_denied"):
            context.perform(effect())
        for reason in ("rate_limiter_unavailable", "rate_limit_exceeded"):
            with pytest.raises(RateLimited) as limited:
                context.perform(effect())
            assert (limited.value.reason, limited.value.tool) == (reason, "work")
        assert context.signal is None
        assert context.fatal is None
        assert context.perform(effect(lambda: "goes on")) == "goes on"


def test_a_denial_as_a_result(kernel: MemoryKernel) -> None:
    kernel.answers["submit"] = [Decision("denied", "s", reason="too dear")] * 2
    for _ in range(2):
        with in_execution(kernel) as context:
            found = context.perform(effect(on_denied="return"))
        assert found == "work not allowed. reason: too dear"


@pytest.mark.parametrize(
    "decision", [Decision("perhaps"), Decision("proceed"), Decision("")], ids=str
)
def test_an_unknown_decision_is_fatal(kernel: MemoryKernel, decision: Decision) -> None:
    kernel.answers["submit"] = [decision]
    with in_execution(kernel) as context:
        with pytest.raises(APIError, match="does not know what that means") as caught:
            context.perform(effect(raising(AssertionError("it must not run"))))
        assert context.fatal is caught.value
        assert context.signal is None


@pytest.mark.parametrize("call", ["complete_step", "fail_step"])
@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (Decision("replay", result="stored"), "stored"),
        (Decision("replay", error={"message": "m", "type": "T"}), ToolError),
        (Decision("execution_terminal"), Terminated),
        (Decision("perhaps"), APIError),
        (ConflictError("m", "lease_superseded", 409), LeaseSuperseded),
        (ConflictError("m", "execution_terminal", 409), Terminated),
        (ConflictError("m", "conflict", 409), ConflictError),
        (APIError("m", "internal_error", 500), LeaseSuperseded),
        (NetworkError("m"), LeaseSuperseded),
    ],
    ids=["result", "error", "terminal", "unknown", "409", "ended", "conflict", "500", "network"],
)
def test_answers_to_reports(kernel: MemoryKernel, call: str, answer: Any, expected: Any) -> None:
    kernel.answers[call] = [answer]
    body = (lambda: "mine") if call == "complete_step" else raising(ValueError("mine"))
    with in_execution(kernel) as context:
        if isinstance(expected, str):
            assert context.perform(effect(body)) == expected
            return
        with pytest.raises(expected):
            context.perform(effect(body))
        assert context.signal is None or isinstance(context.signal, expected)
        assert context.cancelled.is_set() is issubclass(expected, LeaseSuperseded | Terminated) or (
            isinstance(answer, Decision)
        )


def test_a_refused_submission_is_the_handlers_to_see(kernel: MemoryKernel) -> None:
    kernel.answers["submit"] = [ValidationError("m", "x", 400)]
    with in_execution(kernel) as context:
        with pytest.raises(ValidationError):
            context.perform(effect())
        assert context.signal is None
        assert not context.cancelled.is_set()


@pytest.mark.parametrize(
    "error",
    [
        NetworkError("cut"),
        NetworkError("refused", never_arrived=True),
        APIError("m", "internal_error", 500),
        APIError("m", "http_503", 503),
        APIError("m", "http_429", 429),
        UnauthorizedError("m", "unauthorized", 401),
        ConflictError("m", "lease_superseded", 409),
    ],
    ids=str,
)
def test_a_lost_kernel_or_lease_gives_the_attempt_up(
    kernel: MemoryKernel, error: Exception
) -> None:
    kernel.answers["submit"] = [error]
    with in_execution(kernel) as context:
        with pytest.raises(LeaseSuperseded) as caught:
            context.perform(effect())
        assert context.cancelled.is_set()
        for call in (lambda: context.perform(effect()), context.check, context.previous):
            with pytest.raises(LeaseSuperseded):
                call()
        assert context.signal is caught.value
    assert kernel.names() == ["submit"], "later calls do not touch the network"


def test_a_lease_lost_elsewhere_ends_every_later_call(kernel: MemoryKernel) -> None:
    with in_execution(kernel) as context:
        context._lease.lose(LeaseSuperseded("attempt 2 has been dispatched"))
        assert context.cancelled.is_set()
        for call in (
            lambda: context.perform(effect()),
            context.check,
            context.previous,
            lambda: context.is_replaying,
        ):
            with pytest.raises(LeaseSuperseded, match="attempt 2"):
                call()
    assert kernel.calls == []


def test_a_body_that_ran_into_a_lost_lease_writes_nothing(kernel: MemoryKernel) -> None:
    with in_execution(kernel) as context:

        def body() -> str:
            context._lease.lose(LeaseSuperseded())
            return "too late"

        with pytest.raises(LeaseSuperseded):
            context.perform(effect(body))
    assert kernel.names() == ["submit"]


def test_a_body_beside_a_block_still_records(kernel: MemoryKernel) -> None:
    with in_execution(kernel) as context:

        def body() -> str:
            kernel.answers["submit"] = [Decision("blocked", "s2")]
            with pytest.raises(Blocked):
                context.perform(Effect("gate", Kind.TOOL_CALL, b"{}", lambda: 1))
            return "done"

        assert context.perform(effect(body)) == "done"
        assert isinstance(context.signal, Blocked)
    assert kernel.names() == ["submit", "submit", "complete_step"]


def test_nothing_begins_after_the_handler_has_returned(kernel: MemoryKernel) -> None:
    with in_execution(kernel) as context:
        pass
    with pytest.raises(Terminated, match="the handler of this execution has returned"):
        context.perform(effect())
    assert kernel.calls == []


def test_the_first_signal_stays(kernel: MemoryKernel) -> None:
    with in_execution(kernel) as context:
        first, second = Blocked(), Terminated()
        context.end_with(first)
        context.end_with(second)
        context._lease.lose(LeaseSuperseded())
        assert context.signal is first


# Replaying


def test_is_replaying_until_what_was_recorded_is_behind(kernel: MemoryKernel) -> None:
    kernel.answers["submit"] = [None, Decision("denied", "denied-step")]
    with in_execution(kernel) as context:
        assert context.is_replaying is False
        context.perform(effect(lambda: 1))
        with pytest.raises(PolicyError):
            context.perform(effect())
        assert context.is_replaying is False
    kernel.steps["denied-step"] = {"status": "denied", "target": "work"}
    kernel.answers["submit"] = [None, Decision("denied", "denied-step")]
    with in_execution(kernel, attempt=2) as context:
        assert context.is_replaying is True
        context.perform(effect())
        assert context.is_replaying is True
        with pytest.raises(PolicyError):
            context.perform(effect())
        assert context.is_replaying is False
        context.perform(effect(lambda: 1))
        assert context.is_replaying is False
    assert kernel.names().count("terminal_steps") == 2


def test_steps_of_this_attempt_are_never_ahead(kernel: MemoryKernel) -> None:
    with in_execution(kernel) as context:
        context.perform(effect(lambda: 1))
        assert context.is_replaying is False


def test_previous_state(kernel: MemoryKernel) -> None:
    kernel.state = {"turn": 1}
    with in_execution(kernel):
        assert previous() == {"turn": 1}


# Retries


def failing(times: int, value: Any = "at last") -> tuple[Callable[[], Any], list[int]]:
    runs: list[int] = []

    def body() -> Any:
        runs.append(1)
        if len(runs) <= times:
            raise ValueError(f"failure {len(runs)}")
        return value

    return body, runs


def test_retries_happen_within_one_step(kernel: MemoryKernel) -> None:
    body, runs = failing(2)
    with in_execution(kernel) as context:
        assert context.perform(effect(body, retries=2)) == "at last"
    assert len(runs) == 3
    assert kernel.names() == ["submit", "complete_step"]


def test_the_last_failure_is_recorded(kernel: MemoryKernel) -> None:
    body, runs = failing(9)
    with in_execution(kernel) as context, pytest.raises(ToolError, match="failure 3"):
        context.perform(effect(body, retries=2))
    assert len(runs) == 3
    assert kernel.names() == ["submit", "fail_step"]


def test_a_result_that_cannot_be_recorded_is_not_tried_again(kernel: MemoryKernel) -> None:
    body, runs = failing(0, value=b"x")
    with in_execution(kernel) as context, pytest.raises(ToolError):
        context.perform(effect(body, retries=5))
    assert len(runs) == 1


def test_no_retry_after_the_lease_is_lost(
    kernel: MemoryKernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(context_module, "_FIRST_RETRY_PAUSE", 1000.0)
    runs = []
    with in_execution(kernel) as context:

        def body() -> None:
            runs.append(1)
            context._lease.lose(LeaseSuperseded())
            raise ValueError

        with pytest.raises(LeaseSuperseded):
            context.perform(effect(body, retries=5))
    assert len(runs) == 1
    assert kernel.names() == ["submit"]


# Time-outs


def test_a_body_within_its_time(kernel: MemoryKernel) -> None:
    with in_execution(kernel) as context:
        assert context.perform(effect(lambda: "quick", timeout=1000)) == "quick"
        assert context._lease.paused is False
    assert kernel.names() == ["submit", "complete_step"]
    wait_until(lambda: not any(t.name == "rebuno-timeout-work" for t in threading.enumerate()))


def test_a_body_past_its_time_is_recorded_while_it_runs(kernel: MemoryKernel) -> None:
    with in_execution(kernel) as context:

        def body() -> str:
            wait_until(lambda: "fail_step" in kernel.names())
            return "too late"

        with pytest.raises(ToolError) as caught:
            context.perform(effect(body, timeout=0.01))
        assert context._lease.paused is False
    error = caught.value
    assert (error.type, error.reason, error.tool) == ("TimeoutError", "timeout", "work")
    assert "work was still running after its time-out of 0.01 s; it was not stopped" in str(error)
    assert kernel.names() == ["submit", "fail_step"]
    with in_execution(kernel) as context, pytest.raises(ToolError) as replayed:
        context.perform(effect(raising(AssertionError("it must not run")), timeout=0.01))
    assert replayed.value == error


def test_no_further_try_once_the_time_is_up(kernel: MemoryKernel) -> None:
    runs = []

    def body() -> None:
        runs.append(1)
        wait_until(lambda: "fail_step" in kernel.names())
        raise ValueError("late failure")

    with in_execution(kernel) as context, pytest.raises(ToolError) as caught:
        context.perform(effect(body, timeout=0.01, retries=5))
    assert caught.value.reason == "timeout"
    assert len(runs) == 1, "the step is already recorded as failed"


def test_the_lease_of_a_stuck_body_runs_out(kernel: MemoryKernel) -> None:
    seen = []
    with in_execution(kernel) as context:

        def body() -> None:
            wait_until(lambda: context._lease.paused)
            seen.append(context._lease.paused)

        with pytest.raises(ToolError):
            context.perform(effect(body, timeout=0.01))
        assert seen == [True]
        assert context._lease.paused is False


def test_without_attempts_the_lease_of_a_stuck_body_is_kept(kernel: MemoryKernel) -> None:
    with in_execution(kernel, attempt=None) as context:

        def body() -> None:
            wait_until(lambda: "fail_step" in kernel.names())
            assert context._lease.paused is False

        with pytest.raises(ToolError):
            context.perform(effect(body, timeout=0.01))


def test_another_body_within_its_time_keeps_the_lease(kernel: MemoryKernel) -> None:
    with in_execution(kernel) as context:

        def stuck() -> None:
            wait_until(lambda: "fail_step" in kernel.names())

        def outer() -> str:
            with pytest.raises(ToolError):
                context.perform(Effect("inner", Kind.LOCAL, b"{}", stuck, timeout=0.01))
            assert context._lease.paused is False
            return "fine"

        assert context.perform(effect(outer)) == "fine"


class _Watched(Lease):
    """A lease that notes whether ``paused`` is only set where its value was decided."""

    def __init__(self) -> None:
        self.context: ExecutionContext | None = None
        self.unguarded = 0
        super().__init__(dispatch())

    @property
    def paused(self) -> bool:
        return self._paused

    @paused.setter
    def paused(self, value: bool) -> None:
        if self.context is not None and not self.context._lock.locked():
            self.unguarded += 1
        self._paused = value


def test_two_threads_cannot_leave_the_lease_paused(kernel: MemoryKernel) -> None:
    lease = _Watched()
    context = ExecutionContext(wire.Execution("e1", "a1", "running"), lease, kernel)  # type: ignore[arg-type]
    lease.context = context
    with context.entered(), pytest.raises(ToolError):
        context.perform(
            effect(lambda: wait_until(lambda: "fail_step" in kernel.names()) and None, timeout=0.01)
        )
    assert lease.unguarded == 0


def test_the_record_of_a_timeout_that_cannot_be_written(kernel: MemoryKernel) -> None:
    kernel.answers["fail_step"] = [ConflictError("m", "lease_superseded", 409)]
    with in_execution(kernel) as context:
        with pytest.raises(LeaseSuperseded):
            context.perform(
                effect(lambda: wait_until(context.cancelled.is_set) and None, timeout=0.01)
            )
        assert isinstance(context.signal, LeaseSuperseded)


def test_a_timeout_after_the_outcome_was_recorded_elsewhere(kernel: MemoryKernel) -> None:
    kernel.answers["fail_step"] = [Decision("replay", result="theirs")]
    with in_execution(kernel) as context:
        found = context.perform(
            effect(lambda: wait_until(lambda: "fail_step" in kernel.names()) and None, timeout=0.01)
        )
    assert found == "theirs"


def test_a_time_that_nobody_can_watch(
    kernel: MemoryKernel, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The kernel has said proceed; without the body the outcome would be unknown."""

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't create new thread at interpreter shutdown")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    with in_execution(kernel) as context:
        assert context.perform(at_most_once(lambda: "paid", timeout=1000)) == "paid"
    assert kernel.names() == ["submit", "complete_step"]
    assert any("runs without its time-out" in r.getMessage() for r in caplog.records)


# Reconciling


def at_most_once(body: Callable[[], Any], **options: Any) -> Effect:
    return Effect("pay", Kind.TOOL_CALL, b'{"cents":5}', body, Idempotency.AT_MOST_ONCE, **options)


INDETERMINATE = {"message": "outcome unknown", "reason": "indeterminate"}


def test_an_unknown_outcome_is_reconciled_once(kernel: MemoryKernel) -> None:
    asked: list[tuple[str, Any]] = []

    def reconcile(step_id: str, args: Any) -> dict[str, Any]:
        asked.append((step_id, args))
        return {"receipt": (1, 2)}

    for _ in range(3):
        kernel.answers["submit"] = [Decision("replay", "s9", error=INDETERMINATE)]
        with in_execution(kernel) as context:
            found = context.perform(at_most_once(lambda: 1, reconcile=reconcile))
        assert found == {"receipt": [1, 2]}
    assert asked == [("s9", {"cents": 5})]
    submitted = {(c[1], c[2], c[3]) for c in kernel.calls if c[0] == "submit"}
    assert ("local", "pay.reconcile", b'{"step_id":"s9"}') in submitted


def test_a_reconcile_that_fails(kernel: MemoryKernel) -> None:
    errors = []
    for _ in range(2):
        kernel.answers["submit"] = [Decision("replay", "s9", error=INDETERMINATE)]
        with in_execution(kernel) as context, pytest.raises(ToolError) as caught:
            context.perform(
                at_most_once(lambda: 1, reconcile=lambda s, a: raising(KeyError("no such"))())
            )
        errors.append(caught.value)
    assert errors[0] == errors[1]
    assert (errors[0].tool, errors[0].type) == ("pay.reconcile", "KeyError")


def test_without_a_reconcile_the_unknown_outcome_is_an_error(kernel: MemoryKernel) -> None:
    kernel.answers["submit"] = [Decision("replay", "s9", error=INDETERMINATE)]
    with in_execution(kernel) as context, pytest.raises(ToolError) as caught:
        context.perform(at_most_once(lambda: 1))
    assert (caught.value.reason, caught.value.message) == ("indeterminate", "outcome unknown")


@pytest.mark.parametrize("how", ["lapsed", "lost"])
def test_an_at_most_once_body_does_not_begin_without_the_lease(
    kernel: MemoryKernel, how: str
) -> None:
    """By then another attempt may have been told that it never happened."""
    ran: list[str] = []
    with in_execution(kernel) as context:

        def stand_still() -> None:
            context._lease._renewed_at -= 1000.0
            if how == "lost":
                context._lease.lose(LeaseSuperseded("a heartbeat was refused"))

        kernel.answers["submit"] = [stand_still] * 2
        if how == "lapsed":
            context.perform(effect(lambda: ran.append("repeatable")))
            assert ran == ["repeatable"], "that is harmless, and may still be recorded"
            ran.clear()
        with pytest.raises(LeaseSuperseded, match=r"ran out before the body|was refused"):
            context.perform(at_most_once(lambda: ran.append("paid")))
        assert ran == []
        with pytest.raises(LeaseSuperseded):
            context.perform(effect(lambda: ran.append("more")))
    assert ran == []


def test_a_timeout_of_an_at_most_once_effect_is_reconciled(kernel: MemoryKernel) -> None:
    def body() -> None:
        wait_until(lambda: "fail_step" in kernel.names())

    with in_execution(kernel) as context:
        found = context.perform(
            at_most_once(body, timeout=0.01, reconcile=lambda step_id, args: "it went through")
        )
    assert found == "it went through"


def test_a_known_failure_is_not_reconciled(kernel: MemoryKernel) -> None:
    with in_execution(kernel) as context, pytest.raises(ToolError, match="declined"):
        context.perform(
            at_most_once(
                raising(ValueError("declined")),
                reconcile=lambda s, a: raising(AssertionError("it must not be asked"))(),
            )
        )


# Watching


def test_effects_are_traced_at_debug(
    kernel: MemoryKernel, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, logger="rebuno_sync.context")
    for _ in range(2):
        with in_execution(kernel) as context:
            context.perform(effect(lambda: 1))
    told = [(r.outcome, r.target) for r in caplog.records if hasattr(r, "outcome")]
    assert told == [("runs", "work"), ("recorded", "work"), ("replayed", "work")]


def test_a_missing_execution_is_the_handlers_to_see(kernel: MemoryKernel) -> None:
    kernel.answers["previous"] = [NotFoundError("m", "not_found", 404)]
    with in_execution(kernel) as context, pytest.raises(NotFoundError):
        context.previous()
