"""The agent under measurement, on ``rebuno_sync``."""

from __future__ import annotations

import sys
import time
from typing import Any

from benchmarks.memory import peak_kib
from rebuno_sync import Agent, tool

# The official SDK signs requests, so ours does the same work.
agent = Agent("bench", secret="loop-back", base_url=sys.argv[1], signature="v1")


@tool
def search(query: str, limit: int) -> dict[str, Any]:
    return {
        "hits": [{"id": i, "title": f"The result number {i}", "score": i / 8} for i in range(5)]
    }


def process(steps: int) -> dict[str, Any]:
    begin = time.perf_counter()
    for i in range(steps):
        search("durable execution in plain Python", i)
    seconds = time.perf_counter() - begin
    return {"seconds": seconds, "peak_rss": peak_kib()}


agent.run(process, host="127.0.0.1", port=0)
