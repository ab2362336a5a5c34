"""The agent under measurement, on the official SDK. Run by its own interpreter."""

import sys
import time

from memory import peak_kib  # beside this file, which is run by its path
from rebuno import Agent, tool

agent = Agent("bench", secret="loop-back", base_url=sys.argv[1])


@tool
async def search(query: str, limit: int) -> dict:
    return {
        "hits": [{"id": i, "title": f"The result number {i}", "score": i / 8} for i in range(5)]
    }


async def process(steps: int) -> dict:
    begin = time.perf_counter()
    for i in range(steps):
        await search("durable execution in plain Python", i)
    seconds = time.perf_counter() - begin
    return {"seconds": seconds, "peak_rss": peak_kib()}


agent.run(process, host="127.0.0.1", port=0)
