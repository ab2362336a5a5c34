"""Live deltas: how they are cut, when they are sent, and what never waits for them."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rebuno_sync import APIError, LeaseSuperseded, NetworkError
from rebuno_sync.effects import llm_live
from rebuno_sync.effects.llm_live import FLUSH_AT, MAX_DELTA, MAX_WAITING, LiveChannel, Publishers
from rebuno_sync.wire import MAX_STREAM_BYTES
from tests.scripted import wait_until


class Kernel:
    """Takes deltas."""

    def __init__(self) -> None:
        self.deltas: list[tuple[int, str]] = []
        self.open = threading.Event()
        self.open.set()
        self.arrived = threading.Event()
        self.answers: list[BaseException | None] = []
        self.on_send: Callable[[], object] = lambda: None

    def send(self, seq: int, text: str) -> None:
        self.arrived.set()
        self.on_send()
        assert self.open.wait(30)
        answer = self.answers.pop(0) if self.answers else None
        if answer is not None:
            raise answer
        self.deltas.append((seq, text))

    @property
    def text(self) -> str:
        return "".join(text for _, text in self.deltas)


@pytest.fixture
def kernel() -> Kernel:
    return Kernel()


@pytest.fixture
def no_timer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only size and end cause a flush."""
    monkeypatch.setattr(llm_live, "FLUSH_AFTER", 1e6)


@pytest.fixture
def publishers(monkeypatch: pytest.MonkeyPatch) -> Publishers:
    found = Publishers()
    monkeypatch.setattr(llm_live, "_publishers", found)
    return found


def channel_to(kernel: Kernel) -> LiveChannel:
    return LiveChannel(kernel.send)


def test_the_numbers_are_those_of_the_protocol() -> None:
    """PROTOCOL 11; the other tests here count in the module's own names."""
    assert llm_live.MAX_DELTA == 1750  # characters
    assert llm_live.FLUSH_AT == 2000  # characters
    assert llm_live.FLUSH_AFTER == 0.05  # seconds


def test_a_kernel_that_hangs_holds_the_caller_for_a_second_at_most(
    kernel: Kernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The one wait of ``close`` is given that bound; it is looked at here, not waited for."""
    assert llm_live.LAST_FLUSH == 1.0  # seconds
    kernel.open.clear()
    channel = channel_to(kernel)
    channel.feed(b"text")
    assert kernel.arrived.wait(30)
    bounds: list[float | None] = []

    def over(condition: Callable[[], object], timeout: float | None = None) -> bool:
        bounds.append(timeout)
        return bool(condition())

    with monkeypatch.context() as patched:
        patched.setattr(channel._changed, "wait_for", over)
        channel.close()
    kernel.open.set()
    assert bounds == [1.0]


@settings(max_examples=30)
@given(st.lists(st.binary(max_size=3000), max_size=8), st.text(max_size=4000))
def test_everything_arrives_in_order_in_small_pieces(chunks: list[bytes], text: str) -> None:
    kernel = Kernel()
    channel = channel_to(kernel)
    whole = text.encode() + b"".join(chunks)
    for at in range(0, len(whole), 1001):
        channel.feed(whole[at : at + 1001])
    channel.close()
    # What is cut in the middle of a character at the very end stays unsaid.
    assert whole.decode("utf-8", "replace").startswith(kernel.text.rstrip("\ufffd"))
    assert len(kernel.text) >= len(whole.decode("utf-8", "ignore"))
    assert [seq for seq, _ in kernel.deltas] == list(range(len(kernel.deltas)))
    for _, piece in kernel.deltas:
        assert 0 < len(piece) <= MAX_DELTA
        assert len(piece.encode()) <= MAX_STREAM_BYTES


@pytest.mark.usefixtures("no_timer")
def test_enough_text_is_sent_at_once(kernel: Kernel) -> None:
    channel = channel_to(kernel)
    channel.feed(b"x" * (FLUSH_AT - 1))
    assert not kernel.arrived.is_set()
    channel.feed(b"y")
    wait_until(lambda: len(kernel.text) == FLUSH_AT)
    assert [len(text) for _, text in kernel.deltas] == [MAX_DELTA, FLUSH_AT - MAX_DELTA]
    channel.close()


def test_a_little_text_is_sent_soon(kernel: Kernel) -> None:
    channel = channel_to(kernel)
    channel.feed(b"Sn")
    wait_until(lambda: kernel.deltas)
    assert kernel.deltas == [(0, "Sn")]
    channel.close()


@pytest.mark.usefixtures("no_timer")
def test_the_end_sends_what_is_left(kernel: Kernel) -> None:
    channel = channel_to(kernel)
    channel.feed(b"rest")
    channel.close()
    assert kernel.deltas == [(0, "rest")]


# Threads


def live_threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name == "rebuno-live"}


def test_without_text_there_is_no_thread(kernel: Kernel, publishers: Publishers) -> None:
    before = live_threads()
    channel = channel_to(kernel)
    channel.feed(b"")
    channel.close()
    assert live_threads() <= before


def test_a_thread_serves_one_stream_after_the_other(publishers: Publishers) -> None:
    used: set[int] = set()
    for _ in range(20):
        kernel = Kernel()
        kernel.on_send = lambda: used.add(threading.get_ident())
        channel = channel_to(kernel)
        channel.feed(b"text")
        channel.close()
        assert kernel.text == "text"
        wait_until(lambda: publishers._idle)
    assert len(used) == 1


def test_streams_at_once_do_not_wait_for_each_other(publishers: Publishers) -> None:
    kernels = [Kernel() for _ in range(5)]
    channels = [channel_to(kernel) for kernel in kernels]
    for kernel, channel in zip(kernels, channels, strict=True):
        kernel.open.clear()
        channel.feed(b"text")
    for kernel in kernels:
        assert kernel.arrived.wait(30)
    for kernel, channel in zip(kernels, channels, strict=True):
        kernel.open.set()
        channel.close()
        assert kernel.text == "text"


def test_idle_threads_end(publishers: Publishers, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llm_live, "_IDLE_SECONDS", 0.01)
    before = live_threads()
    done = threading.Event()
    publishers.run(done.set)
    assert done.wait(30)
    wait_until(lambda: live_threads() <= before)
    assert publishers._idle == []


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_fork_begins_with_threads_of_its_own(kernel: Kernel) -> None:
    """A thread that waits in the parent is not there in the child."""
    channel = channel_to(kernel)
    channel.feed(b"parent")
    channel.close()
    wait_until(lambda: llm_live._publishers._idle)
    child = os.fork()
    if child == 0:
        status = 1
        try:
            mine = Kernel()
            channel = channel_to(mine)
            channel.feed(b"child")
            channel.close()
            status = 0 if mine.text == "child" else 1
        finally:
            os._exit(status)
    assert os.waitpid(child, 0)[1] == 0


def test_a_kernel_that_hangs_holds_up_nothing_but_the_end_once(
    kernel: Kernel, publishers: Publishers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(llm_live, "LAST_FLUSH", 0.05)
    kernel.open.clear()
    channel = channel_to(kernel)
    channel.feed(b"first")
    assert kernel.arrived.wait(30)
    for _ in range(5000):  # none of these waits, or the test would never get further
        channel.feed(b"x" * 1000)
    assert channel._size <= MAX_WAITING
    channel.close()
    channel.feed(b"after the end")
    kernel.open.set()
    wait_until(lambda: publishers._idle)
    # What was under way arrived; what had waited longer than the end was let go.
    assert kernel.deltas == [(0, "first")]


@pytest.mark.usefixtures("no_timer")
def test_what_is_too_much_is_dropped_and_the_rest_goes_on(kernel: Kernel) -> None:
    kernel.open.clear()
    channel = channel_to(kernel)
    channel.feed(b"a" * FLUSH_AT)
    assert kernel.arrived.wait(30)
    channel.feed(b"b" * (MAX_WAITING + 1))
    channel.feed(b"c" * 10)
    kernel.open.set()
    channel.close()
    assert kernel.text == "a" * FLUSH_AT + "c" * 10


@pytest.mark.parametrize(
    "failure",
    [NetworkError("gone"), APIError("no", "conflict", 409), ValueError("odd"), None],
)
def test_a_failed_delta_is_not_sent_again(kernel: Kernel, failure: Any) -> None:
    kernel.answers = [failure or RuntimeError("odder")]
    channel = channel_to(kernel)
    channel.feed(b"lost")
    wait_until(lambda: not kernel.answers)
    channel.feed(b"there")
    channel.close()
    assert kernel.deltas == [(1, "there")]


@pytest.mark.parametrize("failure", [NetworkError("gone"), LeaseSuperseded()])
def test_it_stops_when_there_is_no_use(kernel: Kernel, failure: BaseException) -> None:
    kernel.answers = [failure] * 100
    channel = channel_to(kernel)
    channel.feed(b"x" * (MAX_DELTA * 10))
    wait_until(lambda: channel._stopped)
    tried = 100 - len(kernel.answers)
    assert tried == (1 if isinstance(failure, LeaseSuperseded) else 3)
    channel.feed(b"more")
    channel.close()
    assert 100 - len(kernel.answers) == tried


def test_characters_that_are_split_between_chunks_are_whole(kernel: Kernel) -> None:
    channel = channel_to(kernel)
    for byte in "日本 😀".encode():
        channel.feed(bytes([byte]))
    channel.close()
    assert kernel.text == "日本 😀"
