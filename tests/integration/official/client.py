"""The official client against a kernel, run by an interpreter that has it: ``client.py URL TOKEN``.

Prints what it was told, as one JSON object.
"""

import asyncio
import json
import sys

from rebuno import Client, ConflictError, NotFoundError


async def until(client, execution_id, *statuses):
    for _ in range(3000):
        found = await client.get(execution_id)
        if found.status.value in statuses:
            return found
        await asyncio.sleep(0.01)
    raise TimeoutError(f"still {found.status}")


async def gated(client, grant):
    created = await client.create("ours", {"amount": 5})
    await until(client, created.id, "blocked")
    (waiting,) = [a for a in await client.list_approvals() if a.execution_id == created.id]
    decide = client.grant_approval if grant else client.deny_approval
    await decide(waiting.id, decided_by="ann", rationale="not today")
    decided = await client.get_approval(waiting.id)
    try:
        await client.grant_approval(waiting.id, decided_by="ann")
        again = "accepted"
    except ConflictError:
        again = "conflict"
    ended = await until(client, created.id, "completed", "failed")
    steps = await client.list_steps(created.id)
    (one,) = [s for s in steps if s.target == "gated"]
    alone = await client.get_step(created.id, one.step_id)
    return {
        "agent_id": created.agent_id,
        "input": created.input,
        "status": ended.status.value,
        "output": ended.output,
        "failure_reason": ended.failure_reason,
        "approval": str(getattr(decided.status, "value", decided.status)),
        "again": again,
        "steps": sorted([s.target, str(getattr(s.status, "value", s.status))] for s in steps),
        "same_step": alone.step_id == one.step_id and alone.target == "gated",
        "events": [[e.event_seq, e.type] for e in await client.events(created.id, limit=1000)],
        "later": [e.event_seq for e in await client.events(created.id, after_seq=2, limit=2)],
    }


async def main():
    client = Client(sys.argv[1], api_key=sys.argv[2])
    told = {"granted": await gated(client, True), "denied": await gated(client, False)}
    waiting = await client.create("ours", {"amount": 6})
    await until(client, waiting.id, "blocked")
    await client.cancel(waiting.id)
    told["cancelled"] = (await client.get(waiting.id)).status.value
    try:
        await client.get("01a227b5-0000-7000-8000-000000000000")
        told["nothing"] = "found"
    except NotFoundError:
        told["nothing"] = "not found"
    await client.close()
    print(json.dumps(told))


asyncio.run(main())
