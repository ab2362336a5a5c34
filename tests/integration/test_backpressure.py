"""More executions than a process takes: refused for now, and none is lost."""

from __future__ import annotations

import threading

from rebuno_sync import Agent, Client, step
from rebuno_sync.kernel import EmbeddedKernel
from tests.scripted import served, wait_until

SECRET = "orchard-secret"
#: The longest pause before a delivery is tried again is 30 s and a quarter (PROTOCOL 7).
PAUSE = 40.0


def test_what_a_full_queue_refuses_comes_again() -> None:
    go = threading.Event()
    begun: list[str] = []

    with EmbeddedKernel() as kernel, Client(kernel.url) as client:
        agent = Agent("a1", secret=SECRET, base_url=kernel.url, max_concurrency=1, max_queue=1)

        @agent.handler
        def handler(name: str) -> str:
            begun.append(name)
            assert go.wait(60)
            return step("greet", lambda: f"hello {name}")

        with served(agent.app) as url:
            client.register_agent("a1", f"{url}/webhook", SECRET)
            names = ["first", "second", "third", "fourth"]
            created = [client.create("a1", {"name": name}) for name in names]

            def refusals() -> list[str]:
                events = [e for one in created for e in client.events(one.id)]
                return [e.execution_id for e in events if e.type == "dispatch.failed"]

            wait_until(lambda: len(refusals()) == 2, what="two of four found no place")
            wait_until(lambda: len(begun) == 1)
            go.set()
            wait_until(lambda: len(begun) == 2)
            assert len(set(refusals())) == 2
            kernel.advance(PAUSE)
            ended = [client.wait(one.id, timeout=60) for one in created]
            assert [one.output for one in ended] == [f"hello {name}" for name in names]
            assert sorted(begun) == sorted(names)
            assert agent.close(30)
