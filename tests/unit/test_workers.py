"""The queue of one agent in one process: repeats, attempts, limits, the orderly end."""

from __future__ import annotations

import collections
import contextlib
import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from rebuno_sync import workers as workers_module
from rebuno_sync.claims import Claims
from rebuno_sync.errors import ConflictError, LeaseSuperseded
from rebuno_sync.lease import Heartbeats, Lease, now
from rebuno_sync.wire import Dispatch
from rebuno_sync.workers import Acceptance, Run, Workers
from tests.scripted import wait_until
from tests.unit.support import dispatch

TAKEN, REPEATED, CLOSING = Acceptance.TAKEN, Acceptance.REPEATED, Acceptance.CLOSING
FULL, CLAIMED = Acceptance.FULL, Acceptance.CLAIMED


def _open() -> threading.Event:
    gate = threading.Event()
    gate.set()
    return gate


class Elsewhere(Claims):
    """Claims of which a test says what other processes have."""

    def __init__(self, taken: set[str]) -> None:
        self._taken = taken

    def take(self, dispatch: Dispatch) -> bool:
        return f"{dispatch.dispatch_id}/{dispatch.dispatch_attempt}" not in self._taken


class Bench:
    """Workers whose handlers wait until they are let go."""

    def __init__(self, limit: int = 2, queue_limit: int = 1000) -> None:
        self.begun: list[str] = []
        self.ended: list[str] = []
        self.beats: list[str] = []
        self.runs: dict[str, Run] = {}
        self.refuse_beats: set[str] = set()
        self.elsewhere: set[str] = set()
        self._gates = collections.defaultdict[str, threading.Event](threading.Event)
        self._lock = threading.Lock()
        self.heartbeats = Heartbeats(self._beat, "bench-heartbeat")
        self.workers = Workers(
            self._run,
            self.heartbeats,
            "bench",
            limit=limit,
            queue_limit=queue_limit,
            claims=Elsewhere(self.elsewhere),
        )

    def accept(self, name: str, attempt: int | None = 1, **fields: Any) -> Acceptance:
        # So that beats are seen, where a test waits for them, without a pause.
        fields = {"execution_id": f"e-{name}", "lease": 0.003, **fields}
        return self.workers.accept(
            dispatch(attempt, dispatch_id=name, **fields), contextlib.nullcontext
        )

    def gate(self, label: str) -> threading.Event:
        with self._lock:
            return self._gates[label]

    def let_all_go(self) -> None:
        """Open every gate, also those of what has not begun."""
        with self._lock:
            self._gates.default_factory = _open
            for gate in self._gates.values():
                gate.set()

    def let_go(self, *labels: str) -> None:
        for label in labels:
            self.gate(label).set()

    def wait_for(self, *labels: str) -> None:
        """Wait until these have begun."""
        wait_until(lambda: set(labels) <= set(self.begun), what=f"begun so far: {self.begun}")

    def _run(self, run: Run) -> None:
        label = f"{run.dispatch.dispatch_id}/{run.dispatch.dispatch_attempt or 1}"
        self.runs[label] = run
        self.begun.append(label)
        assert self.gate(label).wait(60)
        self.ended.append(label)

    def _beat(self, lease: Lease, timeout: float) -> None:
        self.beats.append(lease.dispatch_id)
        if lease.dispatch_id in self.refuse_beats:
            raise ConflictError("m", "lease_superseded", 409)
        lease.renewed(now())

    def threads(self) -> list[threading.Thread]:
        names = [t for t in threading.enumerate() if t.name.startswith("bench-")]
        return [t for t in names if t.name != "bench-heartbeat"]


@pytest.fixture
def make() -> Iterator[Callable[..., Bench]]:
    made: list[Bench] = []

    def make(limit: int = 2, queue_limit: int = 1000) -> Bench:
        made.append(Bench(limit, queue_limit))
        return made[-1]

    yield make
    for bench in made:
        bench.let_all_go()
        assert bench.workers.close(60)
        wait_until(lambda bench=bench: not bench.threads())


def test_a_dispatch_runs_on_a_named_daemon_thread(make: Callable[..., Bench]) -> None:
    bench = make()
    assert bench.accept("d1") is TAKEN
    bench.wait_for("d1/1")
    (thread,) = bench.threads()
    assert (thread.name, thread.daemon) == ("bench-1", True)
    bench.let_go("d1/1")
    assert bench.workers.join(30)
    assert bench.ended == ["d1/1"]


def test_as_many_run_as_may_and_the_rest_waits_in_order(make: Callable[..., Bench]) -> None:
    bench = make(limit=2)
    for name in "abcdef":
        assert bench.accept(name) is TAKEN
    bench.wait_for("a/1", "b/1")
    # What waits is kept alive by beats, from its acceptance on.
    wait_until(lambda: set("abcdef") <= set(bench.beats))
    assert sorted(bench.begun) == ["a/1", "b/1"]
    assert len(bench.threads()) == 2
    assert not bench.workers.join(0)
    bench.let_go("b/1")
    bench.wait_for("c/1")
    bench.let_go("a/1", "c/1", "d/1", "e/1", "f/1")
    assert bench.workers.join(30)
    assert bench.begun[2:] == ["c/1", "d/1", "e/1", "f/1"]


def test_two_deliveries_at_once_and_one_idle_thread(make: Callable[..., Bench]) -> None:
    """The idle thread is woken for the first; the second must not take it for free."""
    bench = make(limit=8)
    bench.accept("warm-up")
    bench.let_go("warm-up/1")
    assert bench.workers.join(30)
    wait_until(lambda: bench.workers._idle == 1)
    with bench.workers._changed:
        assert bench.accept("a") is TAKEN
        assert bench.accept("b") is TAKEN
    bench.wait_for("a/1", "b/1")


def test_idle_threads_end(make: Callable[..., Bench], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers_module, "IDLE_SECONDS", 0.0)
    bench = make()
    bench.accept("a")
    bench.let_go("a/1")
    wait_until(lambda: bench.ended == ["a/1"] and not bench.threads())
    assert (bench.workers._threads, bench.workers._idle) == (0, 0)
    bench.accept("b")
    bench.let_go("b/1")
    wait_until(lambda: bench.ended == ["a/1", "b/1"])


# Repeats and attempts


def test_a_repeat_is_ignored_while_it_waits_runs_and_after(make: Callable[..., Bench]) -> None:
    bench = make(limit=1)
    bench.accept("a", attempt=2)
    bench.accept("b", attempt=2)
    bench.wait_for("a/2")
    for attempt in (1, 2):
        assert bench.accept("a", attempt) is REPEATED
        assert bench.accept("b", attempt) is REPEATED
    bench.let_go("a/2", "b/2")
    assert bench.workers.join(30)
    for attempt in (1, 2):
        assert bench.accept("a", attempt) is REPEATED
    assert bench.begun == ["a/2", "b/2"]


def test_a_newer_attempt_flags_the_running_one_and_runs_beside_it(
    make: Callable[..., Bench],
) -> None:
    bench = make(limit=2)
    bench.accept("a")
    bench.wait_for("a/1")
    old = bench.runs["a/1"].lease
    assert not old.cancelled.is_set()
    assert bench.accept("a", 2) is TAKEN
    assert old.cancelled.is_set()
    assert isinstance(old.signal, LeaseSuperseded)
    assert "attempt 2 has been dispatched" in str(old.signal)
    bench.wait_for("a/2")
    assert bench.ended == []
    assert not bench.runs["a/2"].lease.cancelled.is_set()


def test_a_newer_attempt_waits_for_a_free_thread(make: Callable[..., Bench]) -> None:
    bench = make(limit=1)
    bench.accept("a")
    bench.wait_for("a/1")
    assert bench.accept("a", 2) is TAKEN
    wait_until(lambda: bench.beats.count("a") >= 3)
    assert bench.begun == ["a/1"]
    bench.let_go("a/1")
    bench.wait_for("a/2")


def test_a_newer_attempt_takes_the_place_of_one_that_waits(make: Callable[..., Bench]) -> None:
    bench = make(limit=1)
    bench.accept("a")
    bench.wait_for("a/1")
    bench.accept("b")
    assert bench.accept("b", 3) is TAKEN
    assert bench.accept("b", 2) is REPEATED
    bench.let_go("a/1", "b/3")
    assert bench.workers.join(30)
    assert bench.begun == ["a/1", "b/3"]


def test_a_newer_attempt_after_the_end_of_the_older(make: Callable[..., Bench]) -> None:
    bench = make()
    bench.accept("a")
    bench.let_go("a/1", "a/2")
    assert bench.workers.join(30)
    assert bench.accept("a", 2) is TAKEN
    assert bench.workers.join(30)
    assert bench.ended == ["a/1", "a/2"]


def test_generation_1_repeats_only_what_is_held(make: Callable[..., Bench]) -> None:
    bench = make(limit=1)
    bench.accept("a", None)
    bench.wait_for("a/1")
    bench.accept("b", None)
    assert bench.accept("a", None) is REPEATED
    assert bench.accept("b", None) is REPEATED
    bench.let_go("a/1", "b/1")
    assert bench.workers.join(30)
    assert bench.accept("a", None) is TAKEN
    assert bench.workers.join(30)
    assert bench.ended == ["a/1", "b/1", "a/1"]


def test_a_lease_lost_in_the_queue_never_runs(make: Callable[..., Bench]) -> None:
    bench = make(limit=1)
    bench.accept("a")
    bench.wait_for("a/1")
    bench.refuse_beats.add("b")
    bench.accept("b")
    bench.accept("c")
    wait_until(lambda: bench.workers._waiting[0].lease.cancelled.is_set())
    joined = threading.Event()
    thread = threading.Thread(target=lambda: bench.workers.join() and joined.set())
    thread.start()
    bench.let_go("a/1", "c/1")
    assert joined.wait(30)
    thread.join()
    assert bench.begun == ["a/1", "c/1"]


def test_join_notices_that_the_last_one_in_the_queue_was_dropped(
    make: Callable[..., Bench],
) -> None:
    bench = make(limit=2)
    bench.accept("old", execution_id="e")
    bench.wait_for("old/1")
    bench.accept("new", execution_id="e")
    wait_until(lambda: bench.workers._idle == 1)
    (waiting,) = bench.workers._waiting
    waiting.lease.lose(LeaseSuperseded())
    waiters = bench.workers._changed._waiters  # type: ignore[attr-defined]
    joiner = threading.Thread(target=bench.workers.join)
    joiner.start()
    wait_until(lambda: len(waiters) == 2)
    with bench.workers._changed:
        bench.workers._running.clear()
        assert bench.workers._take() is None
    joiner.join(30)
    assert not joiner.is_alive()


def test_one_execution_at_a_time_across_dispatches(make: Callable[..., Bench]) -> None:
    bench = make(limit=4)
    bench.accept("old", execution_id="e")
    bench.wait_for("old/1")
    assert bench.accept("new", execution_id="e") is TAKEN
    assert bench.accept("other") is TAKEN
    bench.wait_for("other/1")
    wait_until(lambda: bench.beats.count("new") >= 3)
    assert "new/1" not in bench.begun
    bench.let_go("old/1")
    bench.wait_for("new/1")


def test_only_so_many_are_remembered(
    make: Callable[..., Bench], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workers_module, "REMEMBERED", 3)
    bench = make(limit=2)
    bench.accept("held")
    bench.wait_for("held/1")
    for i in range(10):
        bench.let_go(f"d{i}/1")
        assert bench.accept(f"d{i}") is TAKEN
        wait_until(lambda i=i: f"d{i}/1" in bench.ended)
        wait_until(lambda: len(bench.workers._running) == 1)
    assert len(bench.workers._ended) == 3
    assert bench.accept("held") is REPEATED, "what is held is never forgotten"
    assert bench.accept("d9") is REPEATED


def test_nothing_of_what_has_ended_is_kept_but_its_name() -> None:
    """Thousands are remembered; with their leases they would take megabytes."""
    kept: list[weakref.ref[object]] = []

    class NoHeartbeats:
        def add(self, lease: object) -> None:
            kept.append(weakref.ref(lease))

        def remove(self, lease: object) -> None:
            pass

    beats: Any = NoHeartbeats()
    workers = Workers(lambda run: None, beats, "kept", limit=1, queue_limit=9)
    for i in range(3):
        assert workers.accept(Dispatch("e", f"d{i}", 1, 60.0), contextlib.nullcontext) is TAKEN
    assert workers.join(30)
    assert workers.accept(Dispatch("e", "d0", 1, 60.0), contextlib.nullcontext) is REPEATED

    def gone() -> bool:
        gc.collect()
        return [ref() for ref in kept] == [None] * 3

    wait_until(gone, what="a lease is kept")
    assert workers.close(30)


# What goes wrong


@pytest.mark.parametrize("error", [ValueError("bug"), KeyboardInterrupt(), SystemExit(3)])
def test_a_failure_leaves_the_thread_at_work(
    error: BaseException, caplog: pytest.LogCaptureFixture
) -> None:
    ran: list[str] = []

    def run(run: Run) -> None:
        ran.append(run.dispatch.dispatch_id)
        if run.dispatch.dispatch_id == "bad":
            raise error

    workers = Workers(
        run, Heartbeats(lambda lease, timeout: None, "hb"), "failing", limit=1, queue_limit=9
    )
    for name in ("bad", "good"):
        workers.accept(dispatch(dispatch_id=name), contextlib.nullcontext)
    assert workers.join(30)
    assert ran == ["bad", "good"]
    assert workers._threads == 1
    assert any("abandoned" in r.getMessage() for r in caplog.records)
    assert workers.close(30)


def test_no_thread_to_be_had(make: Callable[..., Bench], monkeypatch: pytest.MonkeyPatch) -> None:
    bench = make(limit=2)
    start = threading.Thread.start

    def refuse(thread: threading.Thread) -> None:
        if thread.name.startswith("bench-") and thread.name != "bench-heartbeat":
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refuse)
    with pytest.raises(RuntimeError):
        bench.accept("a")
    assert bench.workers.join(0), "it is not held, so the kernel's next try is taken"
    assert bench.heartbeats._held == set()
    monkeypatch.setattr(threading.Thread, "start", start)
    bench.let_go("a/1")
    assert bench.accept("a") is TAKEN
    assert bench.workers.join(30)
    wait_until(lambda: bench.workers._idle == 1)
    bench.accept("b")
    bench.wait_for("b/1")
    monkeypatch.setattr(threading.Thread, "start", refuse)
    assert bench.accept("c") is TAKEN, "the thread that is there will come to it"
    bench.let_go("b/1", "c/1")
    assert bench.workers.join(30)
    monkeypatch.setattr(threading.Thread, "start", start)
    bench.accept("d")
    bench.accept("e")
    bench.wait_for("d/1", "e/1")


# The end


def test_closing_in_order(make: Callable[..., Bench], caplog: pytest.LogCaptureFixture) -> None:
    bench = make(limit=1)
    bench.accept("a")
    bench.wait_for("a/1")
    bench.accept("b")
    (waiting,) = bench.workers._waiting
    closed: list[bool] = []
    closer = threading.Thread(target=lambda: closed.append(bench.workers.close(60)))
    closer.start()
    wait_until(lambda: bench.workers.closing)
    assert bench.accept("c") is CLOSING
    assert bench.accept("a", 2) is CLOSING
    wait_until(waiting.lease.cancelled.is_set)
    assert not bench.runs["a/1"].lease.cancelled.is_set(), "what runs has its time"
    count = bench.beats.count("a")
    wait_until(lambda: bench.beats.count("a") >= count + 3, what="and keeps its lease")
    bench.let_go("a/1")
    closer.join(30)
    assert closed == [True]
    assert bench.begun == ["a/1"]
    assert any("had not begun and is given up" in r.getMessage() for r in caplog.records)


def test_what_does_not_end_in_time_is_given_up(
    make: Callable[..., Bench], caplog: pytest.LogCaptureFixture
) -> None:
    bench = make()
    bench.accept("a")
    bench.wait_for("a/1")
    assert bench.workers.close(0.0) is False
    lease = bench.runs["a/1"].lease
    assert isinstance(lease.signal, LeaseSuperseded)
    assert "this process is shutting down" in str(lease.signal)
    assert lease not in bench.heartbeats._held
    assert any("still ran after 0 s" in r.getMessage() for r in caplog.records)
    bench.let_go("a/1")
    assert bench.workers.close(30) is True


def test_closing_wakes_idle_threads(make: Callable[..., Bench]) -> None:
    bench = make()
    bench.accept("a")
    bench.let_go("a/1")
    wait_until(lambda: bench.workers._idle == 1)
    assert bench.workers.close(30)
    wait_until(lambda: not bench.threads())


def test_a_storm_of_deliveries(make: Callable[..., Bench]) -> None:
    """Many threads deliver the same dispatches: each attempt runs once, none is lost."""
    done: list[tuple[str, int]] = []
    lock = threading.Lock()

    def run(run: Run) -> None:
        with lock:
            done.append((run.dispatch.dispatch_id, run.dispatch.dispatch_attempt or 0))

    workers = Workers(
        run, Heartbeats(lambda lease, timeout: None, "hb"), "storm", limit=4, queue_limit=1000
    )
    taken: list[tuple[str, int]] = []

    def deliver() -> None:
        for i in range(100):
            one = dispatch(1, dispatch_id=f"d{i}", execution_id=f"e{i}")
            if workers.accept(one, contextlib.nullcontext) is TAKEN:
                taken.append((f"d{i}", 1))

    senders = [threading.Thread(target=deliver) for _ in range(6)]
    for sender in senders:
        sender.start()
    for sender in senders:
        sender.join()
    assert workers.join(30)
    assert sorted(taken) == sorted((f"d{i}", 1) for i in range(100))
    assert sorted(done) == sorted(taken)
    assert workers.close(30)


def test_a_full_queue_takes_nothing_more(make: Callable[..., Bench]) -> None:
    bench = make(limit=1, queue_limit=2)
    assert [bench.accept(name) for name in "abcd"] == [TAKEN, TAKEN, TAKEN, FULL]
    bench.wait_for("a/1")
    # What is held already is not refused: a repeat needs no place, a newer attempt has one.
    assert bench.accept("b") is REPEATED
    assert bench.accept("b", attempt=2) is TAKEN
    assert bench.accept("d", attempt=2) is FULL
    bench.let_go("a/1", "c/1", "b/2")
    assert bench.workers.join(30)
    assert bench.begun == ["a/1", "c/1", "b/2"]
    assert bench.accept("d", attempt=3) is TAKEN, "what was refused is taken when there is room"


def test_no_queue_at_all(make: Callable[..., Bench]) -> None:
    bench = make(limit=2, queue_limit=0)
    assert [bench.accept(name) for name in "abc"] == [TAKEN, TAKEN, FULL]


def test_what_another_process_has_is_left_to_it(make: Callable[..., Bench]) -> None:
    bench = make()
    bench.elsewhere.add("a/1")
    assert bench.accept("a") is CLAIMED
    assert bench.workers.join(0)
    assert bench.accept("a", attempt=2) is TAKEN
    bench.wait_for("a/2")


def test_a_newer_attempt_elsewhere_ends_the_one_here(make: Callable[..., Bench]) -> None:
    bench = make()
    bench.accept("a")
    bench.wait_for("a/1")
    bench.elsewhere.add("a/2")
    assert bench.accept("a", attempt=2) is CLAIMED
    assert bench.runs["a/1"].lease.cancelled.is_set()


def test_nothing_is_claimed_that_is_then_refused(make: Callable[..., Bench]) -> None:
    """Another process may still take it."""
    bench = make(limit=1, queue_limit=0)
    bench.accept("a")
    claimed: list[Dispatch] = []
    assert bench.workers._claims is not None
    bench.workers._claims.take = claimed.append  # type: ignore[method-assign,assignment]
    assert bench.accept("b") is FULL
    bench.workers.refuse()
    assert bench.accept("c") is CLOSING
    assert claimed == []


@pytest.mark.parametrize("limit", [1, 2, 3])
def test_what_was_just_taken_begins_though_the_end_is_near(limit: int) -> None:
    """Every thread begins one dispatch more; for the rest of the queue there is none."""
    begin, begun, go = threading.Event(), [], threading.Event()

    def run(run: Run) -> None:
        begun.append(run.dispatch.dispatch_id)
        assert go.wait(30)

    class Late(Workers):
        """As when no thread has come to run yet."""

        def _next(self) -> Run | None:
            self._changed.release()
            try:
                assert begin.wait(30)
            finally:
                self._changed.acquire()
            return super()._next()

    workers = Late(
        run, Heartbeats(lambda lease, timeout: None, "beat"), "late", limit=limit, queue_limit=9
    )
    for name in "abcd":
        taken = dispatch(1, dispatch_id=name, execution_id=f"e-{name}")
        assert workers.accept(taken, contextlib.nullcontext) is TAKEN
    workers.refuse()
    begin.set()
    wait_until(lambda: len(begun) == limit)
    go.set()
    assert workers.close(30)
    assert sorted(begun) == list("abcd")[:limit]
