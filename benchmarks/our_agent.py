"""The agent under measurement, on ``rebuno_sync``."""

from __future__ import annotations

import resource
import sys
import time
from typing import Any

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
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return {"seconds": seconds, "peak_rss": usage.ru_maxrss}


agent.run(process, host="127.0.0.1", port=0)
