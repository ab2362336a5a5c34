"""Live output between the agent that publishes and those who watch."""

from __future__ import annotations

import json
import queue

import pytest

from rebuno_sync.kernel import live
from rebuno_sync.kernel.live import Hub


def test_each_subscriber_gets_what_comes_after_it() -> None:
    hub = Hub()
    hub.publish("e", "s", 0, "before")
    first, second, other = (hub.subscribe(e, lambda: True) for e in ("e", "e", "f"))
    hub.publish("e", "s", 1, "x")
    second.close()
    hub.publish("e", "s", 2, "y")
    hub.close()
    assert [json.loads(f[6:])["seq"] for f in list(first)[1:]] == [1, 2]
    assert len(list(other)) == 1


def test_a_subscriber_that_does_not_keep_up_loses_the_rest() -> None:
    hub = Hub()
    subscription = hub.subscribe("e", lambda: True)
    for seq in range(5000):
        hub.publish("e", "s", seq, "x")
    hub.close()
    seqs = [json.loads(frame[6:])["seq"] for frame in subscription if frame.startswith(b"data: ")]
    assert 0 < len(seqs) < 5000
    assert seqs == list(range(seqs[0], seqs[0] + len(seqs)))


def test_a_silent_stream_says_that_it_lives(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "KEEP_ALIVE", 0.001)
    subscription = Hub().subscribe("e", lambda: True)
    assert [next(subscription) for _ in range(2)] == [b": connected\n\n", b": keep-alive\n\n"]


def test_a_stream_is_silent_for_15_seconds_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    subscription = Hub().subscribe("e", lambda: True)
    next(subscription)
    waits: list[float] = []

    def nothing_came(timeout: float) -> bytes:
        waits.append(timeout)
        raise queue.Empty

    monkeypatch.setattr(subscription._frames, "get", nothing_came)
    assert [next(subscription) for _ in range(2)] == [b": keep-alive\n\n"] * 2
    assert waits == [15.0, 15.0]


def test_nothing_is_left_of_closed_subscriptions() -> None:
    hub = Hub()
    for _ in range(3):
        subscription = hub.subscribe("e", lambda: True)
        subscription.close()
        subscription.close()
    assert not hub._subscriptions


def test_a_closed_hub_ends_new_streams_at_once() -> None:
    hub = Hub()
    hub.close()
    assert len(list(hub.subscribe("e", lambda: True))) == 1
