"""What a client may say of an execution that it creates, and what comes back (PROTOCOL 4, 9)."""

from __future__ import annotations

import uuid
from typing import Any

import pytest

from tests.conformance.driver import Agent, Kernel, done, ok, refused


def create(agent: Agent, **more: Any) -> Any:
    """Create an execution with more than an agent and an input; returns it."""
    body = {"agent_id": agent.id, "input": 1, **more}
    response = agent.kernel.send("POST", "/v0/executions", body)
    assert response.status_code == 201, response.text
    agent.kernel.executions.append(response.json()["id"])
    return response.json()


def test_an_idempotency_key_names_one_execution(kernel: Kernel, agent: Agent) -> None:
    """9, generation 3: created again under its key, it is the same one, and runs once."""
    key = uuid.uuid4().hex
    first = create(agent, idempotency_key=key)
    assert create(agent, idempotency_key=key)["id"] == first["id"]
    agent.next(first["id"])
    assert kernel.types(first["id"]).count("dispatch.queued") == 1
    assert create(agent, idempotency_key=uuid.uuid4().hex)["id"] != first["id"]
    assert create(kernel.agent(), idempotency_key=key)["id"] != first["id"]


def test_what_it_was_created_with_comes_back(kernel: Kernel, agent: Agent) -> None:
    """4 and 9, generation 3: session, parent_execution_id, spawned_by, on_behalf_of."""
    parent = agent.start()
    step = parent.proceed()
    done(parent.complete(1))
    told = {
        "session": uuid.uuid4().hex,
        "parent_execution_id": parent.execution_id,
        "spawned_by": {"execution_id": parent.execution_id, "step_id": step},
        "on_behalf_of": "ann",
    }
    created = create(agent, **told)
    assert {name: created.get(name) for name in told} == told
    seen = ok(agent.next(created["id"]).send("GET", ""))
    assert {name: seen.get(name) for name in told} == told


def test_list_by_session(kernel: Kernel, agent: Agent) -> None:
    """9, generation 3: GET /v0/executions?session=."""
    session = uuid.uuid4().hex
    of_it = create(agent, session=session)["id"]
    create(agent, session=uuid.uuid4().hex)
    create(agent)
    page = ok(kernel.send("GET", f"/v0/executions?session={session}"))
    assert [row["id"] for row in page["executions"]] == [of_it]


def test_an_unknown_parent(agent: Agent) -> None:
    """4 and 9: 404 for a parent that is not there, 400 for what is no id."""
    for parent, status, code in (
        (str(uuid.uuid4()), 404, "not_found"),
        ("no-id", 400, "validation_error"),
    ):
        body = {"agent_id": agent.id, "parent_execution_id": parent}
        refused(agent.kernel.send("POST", "/v0/executions", body), status, code)


@pytest.mark.parametrize(
    ("end", "state"),
    [
        ({"output": {"told": 1}, "state": {"kept": 2}}, {"kept": 2}),
        ({"output": {"told": 1}}, {"told": 1}),
        ({"output": None}, None),
    ],
)
def test_previous(agent: Agent, end: dict[str, Any], state: Any) -> None:
    """4, generation 3: the parent's state, or its output when it kept none."""
    parent = agent.start()
    done(parent.send("POST", "/complete", end))
    child = agent.next(create(agent, parent_execution_id=parent.execution_id)["id"])
    assert ok(child.send("GET", "/previous")) == {"state": state}
