"""Leases and the threads that keep them."""

from __future__ import annotations

import logging
import threading
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from rebuno_sync import lease as lease_module
from rebuno_sync.errors import (
    APIError,
    Blocked,
    ConflictError,
    LeaseSuperseded,
    NetworkError,
    NotFoundError,
    RebunoError,
    Terminated,
)
from rebuno_sync.lease import MOST_THREADS, Heartbeats, Lease, refusal_of
from tests.scripted import wait_until
from tests.unit.support import dispatch

#: So short that beats come at once.
SHORT = 0.003
#: So long that no beat comes while a test runs.
LONG = 10_000.0


def lease_of(timeout: float | None = SHORT, name: str = "d1") -> Lease:
    return Lease(dispatch(1, timeout, dispatch_id=name))


class Kernel:
    """Counts beats; ``answer`` decides each."""

    def __init__(self) -> None:
        self.beats: list[str] = []
        self.patience: list[float] = []
        self.answer: Callable[[Lease], None] = lambda lease: None
        self._lock = threading.Lock()

    def beat(self, lease: Lease, timeout: float) -> None:
        with self._lock:
            self.beats.append(lease.dispatch_id)
            self.patience.append(timeout)
        self.answer(lease)
        lease.renewed(lease_module.now())


@pytest.fixture
def kernel() -> Kernel:
    return Kernel()


@pytest.fixture
def heartbeats(kernel: Kernel) -> Iterator[Heartbeats]:
    heartbeats = Heartbeats(kernel.beat, "test-heartbeat")
    yield heartbeats
    for lease in list(heartbeats._held):
        heartbeats.remove(lease)
    wait_until(lambda: not threads(), what="the heartbeat threads should have ended")


def threads() -> list[threading.Thread]:
    return [t for t in threading.enumerate() if t.name == "test-heartbeat"]


# One lease


@pytest.mark.parametrize(
    ("told", "timeout", "interval"),
    [
        (None, 120, 30),
        (90, 90, 30),
        (120, 120, 30),
        (60, 60, 20),
        (0.3, 0.3, 0.1),
        (9000, 9000, 30),
    ],
)
def test_intervals(told: float | None, timeout: float, interval: float) -> None:
    lease = lease_of(told)
    assert (lease.timeout, lease.interval) == (timeout, pytest.approx(interval))
    assert 0 < lease.remaining() <= timeout


def test_a_lease_is_lost_once() -> None:
    lease = lease_of()
    assert lease.signal is None
    first = LeaseSuperseded("first")
    lease.lose(first)
    lease.lose(Terminated())
    assert lease.signal is first
    assert lease.cancelled.is_set()


def test_a_lease_names_itself() -> None:
    assert str(lease_of()) == "execution e1 (dispatch d1 attempt 1)"
    assert str(Lease(dispatch(None))) == "execution e1 (dispatch d1)"


@pytest.mark.parametrize(
    ("error", "signal"),
    [
        (ConflictError("m", "lease_superseded", 409), LeaseSuperseded),
        (ConflictError("m", "execution_terminal", 409), Terminated),
        (ConflictError("m", "conflict", 409), type(None)),
        (APIError("m", "lease_superseded", 500), type(None)),
        (NotFoundError("m", "not_found", 404), type(None)),
        (NetworkError("m"), type(None)),
    ],
    ids=str,
)
def test_which_refusals_end_a_dispatch(error: RebunoError, signal: type) -> None:
    assert type(refusal_of(error)) is signal


# Heartbeats


def test_nothing_runs_without_a_lease(heartbeats: Heartbeats) -> None:
    assert threads() == []


def test_beats_go_on_until_the_lease_is_let_go(kernel: Kernel, heartbeats: Heartbeats) -> None:
    lease = lease_of()
    heartbeats.add(lease)
    assert all(t.daemon for t in threads())
    wait_until(lambda: len(kernel.beats) >= 5)
    heartbeats.remove(lease)
    wait_until(lambda: not threads())
    count = len(kernel.beats)
    heartbeats.add(lease_of(name="d2"))
    wait_until(lambda: kernel.beats.count("d2") >= 3)
    assert kernel.beats.count("d1") == count


def test_the_first_beat_waits_for_the_interval(kernel: Kernel, heartbeats: Heartbeats) -> None:
    heartbeats.add(lease_of(LONG, "slow"))
    heartbeats.add(lease_of(name="fast"))
    wait_until(lambda: len(kernel.beats) >= 5)
    assert set(kernel.beats) == {"fast"}


def test_a_shorter_lease_wakes_the_one_who_waits(kernel: Kernel, heartbeats: Heartbeats) -> None:
    heartbeats.add(lease_of(LONG, "slow"))
    wait_until(lambda: heartbeats._watched)
    heartbeats.add(lease_of(name="fast"))
    wait_until(lambda: "fast" in kernel.beats)


def test_many_leases(kernel: Kernel, heartbeats: Heartbeats) -> None:
    names = [f"d{i}" for i in range(50)]
    for name in names:
        heartbeats.add(lease_of(0.03, name))
    wait_until(lambda: all(kernel.beats.count(name) >= 3 for name in names))
    assert len(threads()) <= MOST_THREADS


def test_a_failed_beat_is_logged_and_tried_again(
    kernel: Kernel, heartbeats: Heartbeats, caplog: pytest.LogCaptureFixture
) -> None:
    def answer(lease: Lease) -> None:
        if len(kernel.beats) <= 3:
            raise NetworkError("no route")

    kernel.answer = answer
    lease = lease_of(0.3)
    heartbeats.add(lease)
    wait_until(lambda: len(kernel.beats) >= 5)
    assert not lease.cancelled.is_set()
    failed = [r.getMessage() for r in caplog.records if "heartbeat failed" in r.getMessage()]
    assert len(failed) == 3
    assert "no route" in failed[0]
    assert "of the lease left" in failed[0]


@pytest.mark.parametrize("timeout", [1.0, 4.0, 30.0, 120.0])
def test_failed_beats_are_tried_again_before_the_lease_is_due(
    timeout: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a clock of its own: every beat hangs for as long as it may, and fails."""
    now = [1000.0]
    monkeypatch.setattr(lease_module, "time", types.SimpleNamespace(monotonic=lambda: now[0]))
    tries: list[float] = []

    def hang(lease: Lease, patience: float) -> None:
        tries.append(now[0])
        now[0] += patience
        raise NetworkError("late")

    heartbeats = Heartbeats(hang, "never-started")
    lease = lease_of(timeout)
    heartbeats._held.add(lease)
    due = now[0] + timeout
    delay = lease.interval
    while now[0] + delay < due and len(tries) < 100:
        now[0] += delay
        delay = heartbeats._beat_once(lease)
    assert len(tries) >= 3
    assert tries[0] == 1000.0 + lease.interval


def test_a_lease_that_is_over_is_asked_for_no_more_often_than_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else every worker hammers a kernel that is away, and fills its log."""
    now = [1000.0]
    monkeypatch.setattr(lease_module, "time", types.SimpleNamespace(monotonic=lambda: now[0]))

    def refuse(lease: Lease, patience: float) -> None:
        raise NetworkError("refused")

    heartbeats = Heartbeats(refuse, "never-started")
    lease = lease_of(6.0)
    heartbeats._held.add(lease)
    now[0] += 60.0
    assert heartbeats._beat_once(lease) == lease.interval == 2.0


def test_an_unexpected_error_costs_no_lease_its_beats(
    kernel: Kernel, heartbeats: Heartbeats, caplog: pytest.LogCaptureFixture
) -> None:
    def answer(lease: Lease) -> None:
        if lease.dispatch_id == "bad":
            raise ZeroDivisionError

    kernel.answer = answer
    heartbeats.add(lease_of(name="bad"))
    heartbeats.add(lease_of(name="good"))
    wait_until(lambda: kernel.beats.count("bad") >= 3 and kernel.beats.count("good") >= 3)
    assert any(r.exc_info for r in caplog.records)


@pytest.mark.parametrize(
    ("code", "signal"), [("lease_superseded", LeaseSuperseded), ("execution_terminal", Terminated)]
)
def test_a_refused_beat_loses_the_lease_and_is_the_last(
    kernel: Kernel, heartbeats: Heartbeats, code: str, signal: type
) -> None:
    def answer(lease: Lease) -> None:
        if lease.dispatch_id == "taken":
            raise ConflictError("m", code, 409)

    kernel.answer = answer
    taken, mine = lease_of(name="taken"), lease_of(name="mine")
    heartbeats.add(taken)
    heartbeats.add(mine)
    assert taken.cancelled.wait(30)
    assert isinstance(taken.signal, signal)
    count = len(kernel.beats)
    wait_until(lambda: len(kernel.beats) >= count + 5)
    assert kernel.beats.count("taken") == 1
    assert not mine.cancelled.is_set()


def test_a_lease_that_was_lost_elsewhere_is_not_beaten(
    kernel: Kernel, heartbeats: Heartbeats
) -> None:
    lost, mine = lease_of(name="lost"), lease_of(name="mine")
    lost.lose(LeaseSuperseded())
    heartbeats.add(lost)
    heartbeats.add(mine)
    wait_until(lambda: kernel.beats.count("mine") >= 5)
    assert "lost" not in kernel.beats


def test_a_refusal_after_the_end_means_nothing(kernel: Kernel, heartbeats: Heartbeats) -> None:
    beating, go = threading.Event(), threading.Event()

    def answer(lease: Lease) -> None:
        beating.set()
        assert go.wait(30)
        raise ConflictError("m", "execution_terminal", 409)

    kernel.answer = answer
    lease = lease_of()
    heartbeats.add(lease)
    assert beating.wait(30)
    heartbeats.remove(lease)
    go.set()
    wait_until(lambda: not threads())
    assert not lease.cancelled.is_set()


def test_a_refusal_while_the_end_is_reported_means_nothing(
    kernel: Kernel, heartbeats: Heartbeats, caplog: pytest.LogCaptureFixture
) -> None:
    def answer(lease: Lease) -> None:
        raise ConflictError("m", "lease_superseded", 409)

    kernel.answer = answer
    lease = lease_of()
    lease.reporting = True
    heartbeats.add(lease)
    wait_until(lambda: len(kernel.beats) >= 2)
    assert not lease.cancelled.is_set()
    assert not caplog.records


def test_no_beats_while_paused(kernel: Kernel, heartbeats: Heartbeats) -> None:
    paused, other = lease_of(name="paused"), lease_of(name="other")
    paused.paused = True
    heartbeats.add(paused)
    heartbeats.add(other)
    wait_until(lambda: len(kernel.beats) >= 5)
    assert "paused" not in kernel.beats
    paused.paused = False
    wait_until(lambda: "paused" in kernel.beats)


def test_a_beat_that_hangs_delays_no_other_lease(kernel: Kernel, heartbeats: Heartbeats) -> None:
    go = threading.Event()
    hanging = [f"hangs-{i}" for i in range(3)]

    def answer(lease: Lease) -> None:
        if lease.dispatch_id in hanging:
            assert go.wait(30)

    kernel.answer = answer
    for name in [*hanging, "fine"]:
        heartbeats.add(lease_of(name=name))
    wait_until(lambda: set(hanging) <= set(kernel.beats))
    count = kernel.beats.count("fine")
    wait_until(lambda: kernel.beats.count("fine") >= count + 5)
    assert [kernel.beats.count(name) for name in hanging] == [1, 1, 1]
    go.set()


def test_more_hanging_beats_than_threads(kernel: Kernel, heartbeats: Heartbeats) -> None:
    go = threading.Event()

    def answer(lease: Lease) -> None:
        assert go.wait(30)

    kernel.answer = answer
    for i in range(2 * MOST_THREADS):
        heartbeats.add(lease_of(name=f"d{i}"))
    wait_until(lambda: len(kernel.beats) == MOST_THREADS)
    assert len(threads()) == MOST_THREADS
    go.set()
    wait_until(lambda: len(set(kernel.beats)) == 2 * MOST_THREADS)


def test_a_thread_that_cannot_be_started_is_missed_by_nobody(
    kernel: Kernel, heartbeats: Heartbeats, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = threading.Thread.start

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    first = lease_of(name="first")
    with pytest.raises(RuntimeError):
        heartbeats.add(first)
    monkeypatch.setattr(threading.Thread, "start", start)
    second, third = lease_of(name="second"), lease_of(name="third")
    heartbeats.add(second)
    monkeypatch.setattr(threading.Thread, "start", refuse)
    heartbeats.add(third)
    wait_until(lambda: kernel.beats.count("second") >= 3 and kernel.beats.count("third") >= 3)
    assert "first" not in kernel.beats


def test_coming_and_going_from_many_threads(kernel: Kernel, heartbeats: Heartbeats) -> None:
    failures: list[BaseException] = []

    def churn(n: int) -> None:
        try:
            for i in range(20):
                lease = lease_of(name=f"{n}-{i}")
                heartbeats.add(lease)
                wait_until(lambda name=lease.dispatch_id: name in kernel.beats)
                heartbeats.remove(lease)
        except BaseException as exc:
            failures.append(exc)

    workers = [threading.Thread(target=churn, args=(n,)) for n in range(6)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert failures == []
    wait_until(lambda: not threads())
    assert (heartbeats._threads, heartbeats._watched, heartbeats._held) == (0, False, set())


def test_what_is_logged_of_a_lost_lease(
    kernel: Kernel, heartbeats: Heartbeats, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)

    def answer(lease: Lease) -> None:
        raise ConflictError("m", "lease_superseded", 409)

    kernel.answer = answer
    lease = lease_of()
    heartbeats.add(lease)
    assert lease.cancelled.wait(30)
    wait_until(lambda: any("lease lost" in r.getMessage() for r in caplog.records))


def test_a_signal_is_kept_as_it_was_given() -> None:
    lease: Any = lease_of()
    lease.lose(Blocked())
    assert isinstance(lease.signal, Blocked)
