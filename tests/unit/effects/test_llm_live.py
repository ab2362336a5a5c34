"""Live deltas: how they are cut, when they are sent, and what never waits for them."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rebuno_sync import APIError, LeaseSuperseded, NetworkError
from rebuno_sync.effects import llm_live
from rebuno_sync.effects.llm_live import FLUSH_AT, MAX_DELTA, MAX_WAITING, LiveChannel
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

    def send(self, seq: int, text: str) -> None:
        self.arrived.set()
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


def channel_to(kernel: Kernel) -> LiveChannel:
    return LiveChannel(kernel.send, "live")


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


def test_without_text_there_is_no_thread(kernel: Kernel) -> None:
    before = threading.active_count()
    channel = channel_to(kernel)
    channel.feed(b"")
    channel.close()
    assert threading.active_count() == before


def test_a_kernel_that_hangs_holds_up_nothing_but_the_end_once(
    kernel: Kernel, monkeypatch: pytest.MonkeyPatch
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
    wait_until(lambda: channel._thread is not None and not channel._thread.is_alive())
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
