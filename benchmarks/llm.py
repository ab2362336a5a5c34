"""How much later the first byte of a streamed answer comes when the call is recorded.

    python -m benchmarks.llm [--calls N]

Bare and recorded calls are made in turn, inside one handler, to a provider and a kernel that
answer at once. What recording adds is told in round trips to that kernel: at most two.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.loopback import STEP_ID, execution_id
from benchmarks.processes import SECRET, Kernel
from rebuno_sync import Agent, http_client, requests_session, signing, wire
from rebuno_sync.transport import Transport

#: Recording may add this many round trips to the kernel before the first byte.
TARGET = 2.0
_ASK: dict[str, Any] = {
    "model": "bench",
    "messages": [{"role": "user", "content": "How is the weather in Tromsø?"}],
    "stream": True,
}
#: Makes one call and returns how many seconds passed until the first byte was there.
Call = Callable[[], float]


def first_byte(calls: int) -> dict[str, Any]:
    """Measure, and return medians in seconds.

    Args:
        calls: how often each library is called, bare and recorded.

    Returns:
        ``round_trip``, and ``libraries``: ``bare`` and ``recorded`` by the library's name.
    """
    with contextlib.ExitStack() as stack:
        kernel = Kernel()
        stack.callback(kernel.close)
        provider = stack.enter_context(_provider())
        ways = {
            name: {
                "bare": stack.enter_context(library(provider, recorded=False)),
                "recorded": stack.enter_context(library(provider, recorded=True)),
            }
            for name, library in _LIBRARIES.items()
        }
        samples: dict[str, dict[str, list[float]]] = {
            name: {"bare": [], "recorded": []} for name in ways
        }
        trips: list[float] = []
        trip = _round_trip(kernel.url)

        def handler(steps: int) -> None:
            for number in range(steps):
                for name, pair in ways.items():
                    for how, call in pair.items():
                        seconds = call()
                        if number > steps // 10:  # the first ones open connections
                            samples[name][how].append(seconds)
                trips.append(trip())

        _run(kernel, handler, calls)
    return {
        "round_trip": statistics.median(trips),
        "libraries": {
            name: {how: statistics.median(found) for how, found in by.items()}
            for name, by in samples.items()
        },
    }


def _run(kernel: Kernel, handler: Callable[[int], None], calls: int) -> None:
    """Run ``handler`` in an execution."""
    agent = Agent("bench", secret=SECRET, base_url=kernel.url, signature="v1")
    agent.bind(handler)
    webhook = {
        "execution_id": execution_id(calls, replay=False),
        "dispatch_id": str(uuid.uuid4()),
        "dispatch_attempt": 1,
        "lease_timeout_seconds": 120,
    }
    body = json.dumps(webhook).encode("utf-8")
    agent.deliver(body, signing.sign_body(SECRET, body))
    kernel.next_output()
    agent.close()


def _round_trip(kernel_url: str) -> Call:
    transport = Transport(kernel_url, timeout=30)
    path = wire.execution_path(execution_id(0, replay=False), "steps")
    args = wire.encode(_ASK, "args")
    body = b'{"kind":"llm_call","target":"bench","args":%s}' % args
    headers = {"Content-Type": "application/json", "Rebuno-Agent-Id": STEP_ID[:8]}

    def trip() -> float:
        begin = time.perf_counter()
        transport.request("POST", path, body, lambda target: headers)
        return time.perf_counter() - begin

    return trip


@contextlib.contextmanager
def _provider() -> Iterator[str]:
    process = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.llm_provider"],
        cwd=Path(__file__).resolve().parent.parent,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    try:
        yield process.stdout.readline().strip()
    finally:
        process.communicate()


@contextlib.contextmanager
def _requests(provider: str, *, recorded: bool) -> Iterator[Call]:
    import requests

    with requests_session() if recorded else requests.Session() as session:

        def call() -> float:
            begin = time.perf_counter()
            url = f"{provider}/v1/chat/completions"
            with session.post(url, json=_ASK, stream=True) as response:
                chunks = response.iter_content(None)
                next(chunks)
                seconds = time.perf_counter() - begin
                for _ in chunks:
                    pass
            return seconds

        yield call


@contextlib.contextmanager
def _openai(provider: str, *, recorded: bool) -> Iterator[Call]:
    import openai

    with openai.OpenAI(
        base_url=f"{provider}/v1",
        api_key="none",
        max_retries=0,
        http_client=http_client() if recorded else openai.DefaultHttpxClient(),
    ) as client:

        def call() -> float:
            begin = time.perf_counter()
            chunks = iter(client.chat.completions.create(**_ASK))
            next(chunks)
            seconds = time.perf_counter() - begin
            for _ in chunks:
                pass
            return seconds

        yield call


_LIBRARIES: dict[str, Any] = {"requests": _requests, "openai": _openai}


def show(results: dict[str, Any], console: Console) -> None:
    """Print the results as a table."""
    trip = results["round_trip"]
    table = Table(title=f"first streamed byte; a round trip to the kernel: {trip * 1e6:.0f} µs")
    for column in ("", "bare (µs)", "recorded (µs)", "added (µs)", "in round trips"):
        table.add_column(column, justify="right" if column else "left")
    for name, found in results["libraries"].items():
        added = found["recorded"] - found["bare"]
        trips = added / trip
        verdict = "[green]≤[/]" if trips <= TARGET else "[red]>[/]"
        figures = (found["bare"], found["recorded"], added)
        table.add_row(
            name,
            *(f"{figure * 1e6:.0f}" for figure in figures),
            f"{trips:.1f} {verdict} {TARGET:g}",
        )
    console.print(table)


def main() -> None:
    """Measure and show."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.llm", description=__doc__)
    parser.add_argument("--calls", type=int, default=300, help="calls of each kind (default 300)")
    show(first_byte(parser.parse_args().calls), Console())


if __name__ == "__main__":
    main()
