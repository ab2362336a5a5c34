"""The recorded exchanges of a generation 1 kernel, held against the embedded one."""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import requests

from rebuno_sync import signing
from rebuno_sync.kernel import EmbeddedKernel
from tests.unit.kernel.agent_double import Caller, Webhooks, eventually

ROWS = [
    json.loads(line)
    for line in (Path(__file__).parents[2] / "vectors" / "wire_generation1.jsonl")
    .read_text("utf-8")
    .splitlines()
]
SECRET = "orchard-secret"
POLICY = json.loads(ROWS[79]["request"]["body"])["bundle"]
AGENT = {"id": "a1", "webhook_url": "<webhook>", "policy_bundle": "", "registered_at": "<time>"}
REFUSED: dict[str, Any] = {"code": "validation_error"}
MISSING = {"code": "not_found"}
SUPERSEDED = {"code": "lease_superseded"}

#: Rows in which the embedded kernel answers otherwise on purpose: why, the status, the body.
DIFFERENCES: dict[int, tuple[str, int, Any]] = {
    0: ("generation 3 spells the fields so, and tells no secret", 201, AGENT),
    1: ("the same", 200, [AGENT]),
    2: ("the same", 200, AGENT),
    83: ("the same", 200, {**AGENT, "policy_bundle": POLICY, "description": "x"}),
    4: ("an agent without id is refused", 400, REFUSED),
    6: ("deleting what is not there is 404", 404, MISSING),
    15: (
        "what was recorded comes along, whatever was reported",
        200,
        {"decision": "replay", "result": {"ok": True}},
    ),
    146: (
        "the same",
        200,
        {
            "decision": "replay",
            "error": ROWS[142]["answer"]["body"]["error"],
        },
    ),
    42: ("a lease that is not good is 409 since generation 2", 409, SUPERSEDED),
    43: ("the same", 409, SUPERSEDED),
    44: (
        "generation 3 knows the field, and there are none in it",
        200,
        {"decision": "proceed", "step_id": "<step of row 44>"},
    ),
    48: ("an unknown kind is refused", 400, REFUSED),
    49: ("a missing target is refused", 400, REFUSED),
    51: ("an unknown idempotency is refused", 400, REFUSED),
    60: ("a missing agent_id is refused", 400, REFUSED),
    65: (
        "row 44 left a step, rows 48, 49 and 51 none",
        200,
        [
            *ROWS[65]["answer"]["body"][:4],
            *(
                {**e, "event_seq": e["event_seq"] - 6, "payload": {**e["payload"], **of_row_44}}
                for e in ROWS[65]["answer"]["body"][10:13]
                for of_row_44 in [{"step_id": "<step of row 44>"}]
            ),
            *({**e, "event_seq": e["event_seq"] - 3} for e in ROWS[65]["answer"]["body"][10:13]),
        ],
    ),
    68: ("generation 3 has metadata", 204, None),
    74: (
        "row 60 made nothing",
        200,
        {
            "executions": [
                ROWS[74]["answer"]["body"]["executions"][1],
                {**ROWS[70]["answer"]["body"]},
            ],
            "next_cursor": "<id3>",
        },
    ),
}
#: What a generation 3 decision tells besides.
MORE_OF_A_DENIAL = {
    86: {"reason": "policy_denied", "rule_id": "no-reason"},
    87: {"rule_id": "with-reason"},
    88: {"rule_id": "with-reason"},
    89: {"rule_id": "default"},
    107: {"rule_id": "no-reason"},
    108: {"rule_id": "with-reason"},
    143: {"rule_id": "__indeterminate_retry"},
}


class Replay:
    """Sends the recorded requests; equal placeholders stand for equal values."""

    def __init__(self, kernel: EmbeddedKernel, webhooks: Webhooks) -> None:
        self.kernel = kernel
        self.webhooks = webhooks
        self.caller = Caller(kernel.url, "a1", SECRET)
        self.bound: dict[str, Any] = {"<webhook>": webhooks.url}
        self.stream: requests.Response | None = None

    def request(self, row: dict[str, Any]) -> requests.Response:
        request, status = row["request"], row["answer"]["status"]
        path, body = self.fill(request["path"]), self.fill(request["body"])
        body = body.replace("http://127.0.0.1:18090/webhook", self.webhooks.url)
        if "(7001 characters of data)" in body:
            body = json.dumps({"seq": 1, "data": "x" * 7001})
        lease = {"dispatch_id": self.fill(request["dispatch_id"])}
        if not lease["dispatch_id"]:
            lease = {}
        if request["auth"] == "client":
            return self.caller.client(request["method"], path, body.encode())
        caller = self.caller
        if status == 401:  # the row does not say how it was signed, only that it was wrong
            caller = Caller(self.kernel.url, "a1", "another secret")
        try:
            return caller.agent(
                request["method"],
                path,
                body.encode(),
                lease=lease or None,
                body_signature=True,
            )
        finally:
            if caller is not self.caller:
                caller.close()

    def fill(self, text: str) -> str:
        for name, value in self.bound.items():
            text = text.replace(name, str(value))
        for name in ("<id7>", "<step8>"):  # ids of nothing
            if name in text:
                self.bound[name] = str(uuid.uuid4()) if "id" in name else "0" * 64
                text = text.replace(name, self.bound[name])
        return text

    def same(self, expected: Any, actual: Any, where: str) -> None:
        if isinstance(expected, str) and expected.startswith("<") and expected != "<time>":
            assert self.bound.setdefault(expected, actual) == actual, f"{where}: {expected}"
        elif expected == "<time>":
            assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d+Z", actual), where
        elif isinstance(expected, dict):
            assert isinstance(actual, dict), where
            if expected.get("type") == "dispatch.failed":
                # Ours says why besides.
                assert actual["payload"].pop("reason") == "answered HTTP 500", where
            assert actual.keys() == expected.keys(), where
            for name, value in expected.items():
                self.same(value, actual[name], f"{where}.{name}")
        elif isinstance(expected, list):
            assert isinstance(actual, list), where
            assert len(actual) == len(expected), where
            for i, value in enumerate(expected):
                self.same(value, actual[i], f"{where}[{i}]")
        else:
            assert actual == expected, where

    def check(self, number: int, row: dict[str, Any], answer: requests.Response) -> None:
        status, expected = row["answer"]["status"], row["answer"]["body"]
        if number in DIFFERENCES:
            _, status, expected = DIFFERENCES[number]
        where = f"row {number} ({row['scene']}, {row['note']}): {answer.text:.300}"
        assert answer.status_code == status, where
        if status >= 400 and isinstance(expected, dict):
            # The words are our own, and there are some.
            assert answer.json()["code"] == expected["code"], where
            assert answer.json()["message"], where
            return
        if expected is None:
            assert answer.content == b"", where
            return
        if isinstance(expected, str):
            assert answer.text == expected, where
            return
        actual = answer.json()
        if number in MORE_OF_A_DENIAL:
            expected = {**expected, **MORE_OF_A_DENIAL[number]}
        if expected == {"executions": None}:  # a list never comes back as null
            expected = {"executions": []}
        if "/steps" in row["request"]["path"] and isinstance(expected, list):
            # Recorded in no order; ours is that of submission.
            order = [step["step_id"] for step in actual]
            expected = sorted(expected, key=lambda s: order.index(self.bound[s["step_id"]]))
        self.same(expected, actual, where)

    def webhook(self, row: dict[str, Any]) -> None:
        headers, body = self.webhooks.received.get(timeout=30)
        assert "Rebuno-Execution-Id" in headers
        assert headers["Content-Type"] == "application/json"
        assert headers["Rebuno-Signature"] == signing.sign_body(SECRET, body)
        actual = json.loads(body)
        assert actual.pop("dispatch_attempt") >= 1
        assert actual.pop("lease_timeout_seconds") == 4
        self.same(json.loads(row["webhook"]["body"]), actual, "webhook")
        assert headers["Rebuno-Execution-Id"] == actual["execution_id"]

    def events(self, execution: str) -> list[str]:
        answer = self.caller.client("GET", f"/v0/executions/{self.bound[execution]}/events")
        return [event["type"] for event in answer.json()]

    def pass_time(self, number: int) -> None:
        """Let happen what the recording waited for."""
        if number in (117, 139):  # an approval of 3 s; a lease of 4 s
            self.kernel.advance(4)
        if number == 149:
            statuses = iter([500])
            self.webhooks.answer = lambda body: next(statuses, 200)
        if number == 151:
            eventually(lambda: "dispatch.failed" in self.events("<id24>"))
            self.kernel.advance(1.3)
        if number == 157:
            self.stream = self.caller.session.get(
                f"{self.kernel.url}/v0/executions/{self.bound['<id26>']}/stream",
                stream=True,
                timeout=30,
            )

    def sse(self, row: dict[str, Any]) -> None:
        assert self.stream is not None
        assert self.stream.headers["Content-Type"].startswith(row["sse"]["content_type"])
        lines = (line.decode("utf-8") for line in self.stream.iter_lines())
        data = next(line for line in lines if line.startswith("data: "))
        self.same(
            json.loads(row["sse"]["frame"].removeprefix("data: ")),
            json.loads(data.removeprefix("data: ")),
            "sse",
        )
        self.stream.close()


@pytest.fixture
def webhooks() -> Iterator[Webhooks]:
    receiver = Webhooks()
    yield receiver
    receiver.close()


def test_the_recorded_exchanges_get_the_recorded_answers(webhooks: Webhooks) -> None:
    with EmbeddedKernel(lease_timeout=4, accept_generation_1=True) as kernel:
        replay = Replay(kernel, webhooks)
        for number, row in enumerate(ROWS):
            replay.pass_time(number)
            if "webhook" in row:
                replay.webhook(row)
            elif "sse" in row:
                replay.sse(row)
            elif "request" in row:
                replay.check(number, row, replay.request(row))
        replay.caller.close()
