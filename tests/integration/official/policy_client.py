"""The official client as the operator of an agent under a policy.

``policy_client.py URL TOKEN AGENT_ID``, run by an interpreter that has the SDK. The last approval
it leaves to whoever moves the clock: it prints its id. Then it prints what it was told, as one
JSON object.
"""

import asyncio
import json
import sys

from rebuno import Client, ConflictError, ForbiddenError

AGENT = sys.argv[3]


async def until(client, execution_id, *statuses):
    for _ in range(6000):
        found = await client.get(execution_id)
        if found.status.value in statuses:
            return found
        await asyncio.sleep(0.01)
    raise TimeoutError(f"still {found.status}, not {statuses}")


async def asked(client, do, amount):
    created = await client.create(AGENT, {"do": do, "amount": amount})
    await until(client, created.id, "blocked", "completed", "failed")
    (approval,) = [a for a in await client.list_approvals() if a.execution_id == created.id]
    return created.id, approval


async def ended(client, execution_id, approval_id):
    found = await until(client, execution_id, "completed", "failed")
    approval = await client.get_approval(approval_id)
    return {
        "id": execution_id,
        "status": found.status.value,
        "output": found.output,
        "failure_reason": found.failure_reason,
        "approval": str(getattr(approval.status, "value", approval.status)),
        "decided_by": approval.decided_by,
    }


async def refused(call):
    try:
        await call
    except (ConflictError, ForbiddenError) as exc:
        return type(exc).__name__
    return "accepted"


async def surveyed(client):
    created = await client.create(AGENT, {"do": "survey"})
    found = await until(client, created.id, "completed", "failed")
    events = await client.events(created.id, limit=1000)
    rules = {event.payload["rule_id"] for event in events if event.payload.get("rule_id")}
    return {
        "status": found.status.value,
        "output": found.output,
        "failure_reason": found.failure_reason,
        "rules": sorted(rules),
    }


async def granted(client):
    execution_id, approval = await asked(client, "buy", 250)
    told = {
        "message": approval.message,
        "stranger": await refused(client.grant_approval(approval.id, decided_by="mallory")),
    }
    await client.grant_approval(approval.id, decided_by="ann", rationale="as agreed")
    told |= await ended(client, execution_id, approval.id)
    told["again"] = await refused(client.deny_approval(approval.id, decided_by="bob"))
    return told


async def denied(client, do, rationale):
    execution_id, approval = await asked(client, do, 300)
    await client.deny_approval(approval.id, decided_by="bob", rationale=rationale)
    return await ended(client, execution_id, approval.id)


async def expired(client):
    execution_id, approval = await asked(client, "buy", 350)
    print(approval.id, flush=True)
    return await ended(client, execution_id, approval.id)


async def main():
    client = Client(sys.argv[1], api_key=sys.argv[2])
    told = {
        "survey": await surveyed(client),
        "granted": await granted(client),
        "denied": await denied(client, "buy", "too much"),
        "uncaught": await denied(client, "buy_or_fail", ""),
        "expired": await expired(client),
    }
    await client.close()
    print(json.dumps(told))


asyncio.run(main())
