"""Carrying the execution into other threads."""

from __future__ import annotations

import concurrent.futures
import contextvars
import inspect
import threading
from typing import Any

import flask
import pytest

from rebuno_sync import ContextThreadPoolExecutor, bind_context, execution, step, tool
from rebuno_sync.context import execution_or_none
from rebuno_sync.errors import Blocked, LeaseSuperseded, Terminated
from rebuno_sync.wire import Decision
from tests.unit.support import MemoryKernel, in_execution

variable: contextvars.ContextVar[str] = contextvars.ContextVar("variable", default="unset")


@pytest.fixture
def kernel() -> MemoryKernel:
    return MemoryKernel()


def in_thread(fn: Any) -> Any:
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        return pool.submit(fn).result()


def test_a_bound_function_finds_the_execution(kernel: MemoryKernel) -> None:
    with in_execution(kernel) as context:
        bound = bind_context(execution_or_none)
        assert in_thread(bound) is context
        assert in_thread(execution_or_none) is None
    assert in_thread(bound) is context
    with pytest.raises(Terminated, match="Wait for the threads before returning"):
        in_thread(bind_context(context.check))


def test_a_bound_function_outside_an_execution() -> None:
    variable.set("here")
    assert in_thread(bind_context(variable.get)) == "here"
    with pytest.raises(RuntimeError, match="no execution here"):
        in_thread(bind_context(execution))


def test_it_keeps_its_name_arguments_and_value() -> None:
    def add(a: int, *, b: int = 2) -> int:
        """Add."""
        return a + b

    bound = bind_context(add)
    assert (bound.__name__, bound.__doc__) == ("add", "Add.")
    assert inspect.signature(bound) == inspect.signature(add)
    assert (bound(1), bound(1, b=5)) == (3, 6)


def test_the_context_is_that_of_the_binding() -> None:
    variable.set("bound")
    bound = bind_context(lambda value: (variable.get(), variable.set(value)) and variable.get())
    variable.set("changed since")
    assert in_thread(lambda: bound("a")) == "a"
    assert variable.get() == "changed since", "what it sets stays in it"
    seen = []
    later = bind_context(lambda: seen.append(variable.get()))
    variable.set("changed again")
    later()
    assert seen == ["changed since"]


def test_many_threads_may_call_it_at_once(kernel: MemoryKernel) -> None:
    together = threading.Barrier(4, timeout=30)

    def work() -> Any:
        together.wait()
        return execution()

    with in_execution(kernel) as context:
        bound = bind_context(work)
        with concurrent.futures.ThreadPoolExecutor(4) as pool:
            found = [f.result() for f in [pool.submit(bound) for _ in range(4)]]
    assert found == [context] * 4


def test_it_may_call_itself(kernel: MemoryKernel) -> None:
    def down(n: int) -> int:
        return 0 if n == 0 else 1 + bound(n - 1)

    with in_execution(kernel):
        bound = bind_context(down)
        assert bound(5) == 5


def test_flask_comes_along() -> None:
    app = flask.Flask("the app")
    with app.app_context():
        flask.g.value = 7
        found = in_thread(bind_context(lambda: (flask.current_app.name, flask.g.value)))
    assert found == ("the app", 7)


def test_the_executor_carries_it_for_submit_and_map(kernel: MemoryKernel) -> None:
    @tool
    def double(n: int) -> int:
        return 2 * n

    with in_execution(kernel), ContextThreadPoolExecutor(max_workers=3) as pool:
        futures = [pool.submit(double, n) for n in range(5)]
        assert [f.result() for f in futures] == [0, 2, 4, 6, 8]
        assert list(pool.map(double, range(5, 8))) == [10, 12, 14]
        assert pool.submit(step, "x", lambda a: a, {"a": 1}).result() == 1


def test_each_task_has_the_execution_of_whoever_submits(kernel: MemoryKernel) -> None:
    with ContextThreadPoolExecutor(1) as pool:
        with in_execution(kernel) as first:
            assert pool.submit(execution).result() is first
        with in_execution(MemoryKernel()) as second:
            assert pool.submit(execution).result() is second
        with pytest.raises(RuntimeError, match="no execution here"):
            pool.submit(execution).result()


@pytest.mark.parametrize(
    "decision", [Decision("blocked", "s"), Decision("execution_terminal")], ids=str
)
def test_signals_come_out_of_futures(kernel: MemoryKernel, decision: Decision) -> None:
    kernel.answers["submit"] = [decision]
    with in_execution(kernel) as context, ContextThreadPoolExecutor(2) as pool:
        future = pool.submit(step, "x", lambda: 1)
        assert isinstance(future.exception(), Blocked | Terminated)
        assert context.signal is future.exception()
        with pytest.raises((Blocked, Terminated)):
            step("y", lambda: 1)
    assert kernel.names() == ["submit"]


def test_one_lost_lease_stops_every_thread(kernel: MemoryKernel) -> None:
    lost, ended = threading.Event(), []

    def work() -> None:
        assert lost.wait(30)
        try:
            step("x", lambda: 1)
        except LeaseSuperseded as exc:
            ended.append(exc)

    with in_execution(kernel) as context, ContextThreadPoolExecutor(4) as pool:
        for _ in range(4):
            pool.submit(work)
        context._lease.lose(LeaseSuperseded())
        lost.set()
    assert len(ended) == 4
    assert kernel.calls == []
