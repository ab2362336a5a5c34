"""What all agents of a process share: one end."""

from __future__ import annotations

import threading
import types

import pytest

from rebuno_sync import Agent, processes


def test_one_timeout_for_all_agents_of_a_process() -> None:
    """Several agents in one app drain side by side, not one after the other."""
    held = processes.Process()
    closed: list[tuple[str, float]] = []
    now = [100.0]

    class Workers:
        def __init__(self, name: str, takes: float) -> None:
            self.name, self.takes = name, takes

        def refuse(self) -> None:
            closed.append((f"{self.name} refuses", 0.0))

        def close(self, timeout: float) -> bool:
            closed.append((self.name, timeout))
            now[0] += min(self.takes, timeout)
            return True

    class Part:
        def __init__(self, name: str, takes: float, timeout: float) -> None:
            self.workers, self.shutdown_timeout = Workers(name, takes), timeout

    parts = [Part("a", 20.0, 25.0), Part("b", 20.0, 25.0), Part("c", 1.0, 10.0)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(threading, "_register_atexit", lambda drain: None, raising=False)
        for part in parts:
            held._add(part)  # type: ignore[arg-type] - a stand-in
        patch.setattr(processes, "_process", held)
        patch.setattr(processes, "time", types.SimpleNamespace(monotonic=lambda: now[0]))
        assert held.drain() is True
        count = len(closed)
        assert held.drain() is True
        assert len(closed) == count, "what was given up is not waited for again"
    assert {name for name, _ in closed[:3]} == {"a refuses", "b refuses", "c refuses"}
    timeouts = dict(closed[3:])
    assert now[0] <= 125.0
    assert all(0 <= t <= 25.0 for t in timeouts.values())


def test_two_first_deliveries_at_once_make_one_part(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second comes while the first is at it, and finds what that has made."""
    agent = Agent("a1", secret="s", base_url="http://127.0.0.1:9")
    part, make = processes.Process.part, agent._make_part
    first_makes, second_asks = threading.Event(), threading.Event()
    made: list[processes.Part] = []

    def making() -> processes.Part:
        first_makes.set()
        assert second_asks.wait(30)
        made.append(make())
        return made[-1]

    def asking(self: processes.Process, *args: object) -> processes.Part:
        if first_makes.is_set():
            second_asks.set()
        return part(self, *args)  # type: ignore[arg-type] - as the agent calls it

    monkeypatch.setattr(agent, "_make_part", making)
    monkeypatch.setattr(processes.Process, "part", asking)
    found: list[processes.Part] = []
    threads = [threading.Thread(target=lambda: found.append(agent._here())) for _ in range(2)]
    threads[0].start()
    assert first_makes.wait(30)
    threads[1].start()
    for thread in threads:
        thread.join(30)
    assert len(made) == 1
    assert found == [made[0]] * 2
